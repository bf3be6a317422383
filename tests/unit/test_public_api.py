"""The public surface: what every `__all__` lists is there, nothing is missing from it, and it costs no framework."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import penstock

# Modules of integrations import their trainers.
FOUND = [info.name for info in pkgutil.walk_packages(penstock.__path__, "penstock.")]
MODULES = sorted(["penstock", *(name for name in FOUND if not name.startswith("penstock.integrations."))])
WITH_ALL = [name for name in MODULES if hasattr(importlib.import_module(name), "__all__")]
PUBLIC = [name for name in WITH_ALL if "._" not in name]
PACKAGES = [name for name in WITH_ALL if hasattr(importlib.import_module(name), "__path__")]
HELPERS = {"annotations", "TYPE_CHECKING", "attach"}
FRAMEWORKS = ["jax", "mlx", "pandas", "ray", "tensorflow", "torch"]
COSTLY = ["gigatoken", "numba", "sentencepiece", "tiktoken", "transformers"]


def in_order(names: list[str]) -> list[str]:
    """As ruff sorts them (RUF022): constants, then classes, then the rest, each by the alphabet."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


def test_the_packages_people_import_from_say_what_they_offer() -> None:
    wanted = ["loaders", "memory", "observe", "pipeline", "sinks", "sources", "store", "testing", "transforms", "types"]
    assert {"penstock", *(f"penstock.{name}" for name in wanted)} <= set(PUBLIC)


@pytest.mark.parametrize("name", WITH_ALL)
def test_all_is_sorted_and_has_no_name_twice(name: str) -> None:
    listed = importlib.import_module(name).__all__
    assert listed == in_order(list(dict.fromkeys(listed)))


@pytest.mark.parametrize("name", WITH_ALL)
def test_every_public_name_can_be_imported(name: str) -> None:
    module = importlib.import_module(name)
    assert not [public for public in module.__all__ if not hasattr(module, public)]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_of_a_package_is_complete(name: str) -> None:
    package = importlib.import_module(name)
    assert all(hasattr(package, public) for public in package.__all__)  # some are imported when first asked for
    seen = {
        public
        for public, value in vars(package).items()
        if not public.startswith("_") and not isinstance(value, ModuleType) and public not in HELPERS
    }
    assert set(package.__all__) == seen


@pytest.mark.parametrize("name", [name for name in PACKAGES if name in PUBLIC])
def test_every_public_class_and_function_has_a_docstring(name: str) -> None:
    package = importlib.import_module(name)
    offered = {public: getattr(package, public) for public in package.__all__}
    assert not [public for public, value in offered.items() if callable(value) and not value.__doc__]


def test_data_processor_is_another_name_for_transform() -> None:
    assert penstock.DataProcessor is penstock.Transform


@pytest.mark.parametrize(
    "module", ["penstock", *(f"penstock.{name}" for name in ("sources", "transforms", "sinks", "loaders", "cli.main"))]
)
def test_importing_penstock_imports_no_framework(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {FRAMEWORKS + COSTLY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
