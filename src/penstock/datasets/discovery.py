"""Discovery of dataset classes by naming convention: in penstock, in installed plugins, and in given directories.

A class is found if its name ends with `Dataset`, it inherits from `KaggleDataset` and is not abstract, and its file
ends with `_dataset.py` or is in a folder called `datasets`. `HousePricesDataset` is the dataset of "house-prices",
unless the class has a `competition = "..."`.

Discovery runs the code of a file, so only files and folders that the caller names are searched, never the current
directory by default.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock import plugins
from penstock.datasets.base import ColumnSpec, DatasetSpec, KaggleDataset
from penstock.datasets.tables import read_names, split_file
from penstock.errors import ConfigError, PenstockError, PluginError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike

log = logging.getLogger(__name__)

_PRIVATE = "_penstock_discovered_"
_SKIPPED = {"__pycache__", "site-packages", "node_modules"}
_PACKAGE = "penstock.datasets"
_ANY_TABLE = f"{_PACKAGE}.tabular:TabularDataset"


class Chosen(NamedTuple):
    """Dataset class of a competition, with the reason."""

    name: str
    """`package.module:Class`, or `/path/to/file.py:Class`."""
    why: str


@dataclass(slots=True)
class Discovery:
    """Dataset classes that were found, and errors."""

    found: dict[str, type[KaggleDataset]] = field(default_factory=dict)
    """Class of each competition, in the order of discovery."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Errors by file or entry point: it could not be loaded, or a class in it was skipped."""
    files: dict[str, str] = field(default_factory=dict)
    """Classes below the given paths as `/path/to/file.py:Class`, by competition."""

    def add(self, classes: Iterable[type[KaggleDataset]], place: str, file: Path | None = None) -> None:
        for dataset in classes:
            name = competition_of(dataset)
            other = self.found.setdefault(name, dataset)
            if other is not dataset and other.__module__.startswith(f"{_PACKAGE}."):
                log.info("%s in %s replaces penstock's own class for %r", dataset.__name__, place, name)
                self.found[name] = dataset
            elif other is not dataset:
                error = ConfigError(
                    f"{dataset.__name__} in {place} is for {name!r}, and so is {other.__name__} in "
                    f"{_file_of(other)}, which was found first; rename one, or give it another `competition`"
                )
                self._note(place, error)
            if file is not None and self.found[name] is dataset:
                self.files[name] = f"{file}:{dataset.__qualname__}"

    def attempt(self, place: str, load: Callable[[], Iterable[type[KaggleDataset]]], file: Path | None = None) -> None:
        """Add the classes that `load` returns; an error is recorded, and discovery continues."""
        try:
            self.add(load(), place, file)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a module may raise anything, and call sys.exit
            self._note(place, error)

    def _note(self, place: str, error: BaseException) -> None:
        self.errors[place] = error
        log.warning("%s: skipped: %s: %s", place, type(error).__name__, error, exc_info=error)


def discover(*paths: PathLike, installed: bool = True) -> Discovery:
    """Dataset classes of penstock, of installed plugins, and below these paths.

    A class replaces penstock's own for the same competition; two others for one competition are an error. A given file
    is loaded under any name. Each file is loaded once, under a private module name, and again only if its content
    changed.
    """
    result = Discovery()
    if installed:
        for name in _own_modules():
            result.attempt(name, lambda name=name: _classes(importlib.import_module(name)))  # type: ignore[misc]
        for plugin in plugins.installed():
            if plugin.group == "datasets":
                result.attempt(
                    f"{plugin.target} ({plugin.package})",
                    lambda plugin=plugin: [_checked(plugins.find("datasets", plugin.name), plugin.target)],  # type: ignore[misc]
                )
    seen: set[Path] = set()
    for path in paths:
        for file in _files(require_local(path, "a place of dataset classes")):
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                result.attempt(str(file), lambda real=real: _classes(_load_file(real)), real)  # type: ignore[misc]
    return result


def installed_class(competition: str, spec: DatasetSpec) -> Chosen:
    """Class of penstock or of a plugin with the name of a competition; else `TabularDataset`.

    A class of penstock is for known columns, and has its own formats for them. It is not used for data with other
    columns, nor for a spec with another target or with its own formats.
    """
    wanted = plain_name(competition)
    found = next((one for name, one in discover().found.items() if plain_name(name) == wanted), None)
    if found is None:
        return Chosen(_ANY_TABLE, "no class has its name")
    if found.__module__.startswith(f"{_PACKAGE}."):
        if why := _unsuited(found, spec):
            return Chosen(_ANY_TABLE, f"{found.__name__} is not for it: {why}")
        return Chosen(name_of(found), "penstock's own, by its name and columns")
    return Chosen(name_of(found), "of a plugin, by its name")


def competition_of(dataset: type[KaggleDataset]) -> str:
    """Competition of a class: its `competition`, or its name: `HousePricesDataset` -> "house-prices"."""
    own = dataset.__dict__.get("competition")  # not a parent's: a subclass is another dataset
    if isinstance(own, str) and own:
        return own
    bare = dataset.__name__.removesuffix("Dataset")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_+", "-", bare).lower()


def plain_name(competition: str) -> str:
    """Name in which House_Prices and house-prices are equal."""
    return re.sub(r"[\s_-]+", "-", competition.strip().casefold())


def name_of(dataset: type[KaggleDataset]) -> str:
    """Name of a class for `load_class`: `package.module:Class`, or `/path/to/file.py:Class`."""
    module = dataset.__module__
    if module.startswith(_PRIVATE) or module == "__main__":
        return f"{_file_of(dataset)}:{dataset.__qualname__}"
    return f"{module}:{dataset.__qualname__}"


def load_class(name: str) -> type[KaggleDataset]:
    """Class of a name from `name_of`; runs the code of its module."""
    where, _, qualified = name.rpartition(":")
    if not where or not qualified:
        raise ConfigError(f"{name!r} is not a class name; expected 'package.module:Class' or 'path/to/file.py:Class'")
    try:
        module = _load_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
        found: Any = module
        for part in qualified.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the dataset class {name!r} cannot be loaded: {type(error).__name__}: {error}; correct it, or register "
            "the competition again with another dataset_class"
        ) from error
    return _checked(found, name)


# -- modules ---------------------------------------------------------------------------------------------------------


def _own_modules() -> list[str]:
    package = importlib.import_module(_PACKAGE)
    return [f"{_PACKAGE}.{module.name}" for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or directory: {str(path)!r} (looked from {Path.cwd()})")
    real_roots: set[str] = set()
    for root, folders, names in os.walk(path, followlinks=True):
        here = os.path.realpath(root)
        if here in real_roots or (Path(root, "pyvenv.cfg").exists() and Path(root) != path):
            folders.clear()
            continue
        real_roots.add(here)
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED)
        inside = Path(root).absolute().name == "datasets"
        for name in sorted(names):
            if name.endswith("_dataset.py") or (inside and name.endswith(".py") and name[0] not in "._"):
                yield Path(root, name)


def _load_file(file: Path) -> ModuleType:
    """Run a file as a private module, which nothing else can import.

    A file that was imported already is returned as that module.
    """
    for known, module in list(sys.modules.items()):
        origin = getattr(module, "__dict__", {}).get("__file__")
        if known == "__main__" or known.startswith(_PRIVATE) or not isinstance(origin, str):
            continue
        if Path(origin).name == file.name and Path(origin).resolve() == file:
            return module
    source = file.read_bytes()
    digest = hashlib.blake2b(str(file).encode() + b"\0" + source, digest_size=8).hexdigest()
    name = f"{_PRIVATE}{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise PluginError(f"{file} is not a Python file; expected one that ends with .py")
    module = importlib.util.module_from_spec(spec)
    # Not by the loader, which may use compiled files of an older source.
    code = compile(source, str(file), "exec", dont_inherit=True)
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# -- classes ---------------------------------------------------------------------------------------------------------


def _classes(module: ModuleType) -> list[type[KaggleDataset]]:
    """Datasets that a module defines; imported ones are found in their own modules."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, KaggleDataset)
        and value.__module__ == module.__name__
        and value.__name__.endswith("Dataset")
        and name == value.__name__
        and not inspect.isabstract(value)
        and module.__name__ != f"{_PACKAGE}.tabular"  # its class is for any table
    ]


def _unsuited(dataset: type[KaggleDataset], spec: DatasetSpec) -> str:
    """Reason why a class of penstock does not fit the data of a spec; empty if it fits."""
    own: DatasetSpec = getattr(sys.modules[dataset.__module__], f"{dataset.__module__.rpartition('.')[2]}_spec")()
    if spec.targets and spec.targets != own.targets:
        return f"the spec predicts {', '.join(map(repr, spec.targets))}, and the class {', '.join(own.targets)!r}"
    if spec.competition_type is not own.competition_type:
        return f"the spec has type {spec.competition_type.value}, and the class {own.competition_type.value}"
    try:
        there = read_names(split_file(spec, "train"), **spec.csv_options)
    except (OSError, PenstockError):
        return ""  # the dataset raises for this file
    features = [name for name in own.columns if name not in own.targets]
    if lacking := [name for name in features if name not in there]:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return f"the training file has no {', '.join(map(repr, lacking[:3]))}{more}"
    left_out = {*spec.targets, *spec.ignored}
    if out := [name for name in features if name in left_out]:
        return f"{out[0]!r} is not a feature in the spec"
    for name in own.columns:
        if name in spec.columns and _format_of(spec.columns[name]) not in ({}, _format_of(own.columns[name])):
            return f"the spec has its own format for {name!r}"
    return ""


def _format_of(column: ColumnSpec) -> dict[str, Any]:
    """Fields of a column that decide its format in a text."""
    return {key: value for key, value in column.to_dict().items() if key not in ("kind", "date_format")}


def _checked(found: Any, name: str) -> type[KaggleDataset]:
    if not isinstance(found, type) or not issubclass(found, KaggleDataset):
        raise ConfigError(f"{name} is {found!r:.80}, expected a class that inherits from KaggleDataset")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"{name} is abstract: it lacks {missing}")
    return found


def _file_of(dataset: type[KaggleDataset]) -> str:
    module = sys.modules.get(dataset.__module__)
    return str(getattr(module, "__file__", None) or dataset.__module__)
