"""Backends are found by name, import their framework only then, and say what to install when it is missing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from penstock._optional import require
from penstock.batching.backends import backend_of, get_backend
from penstock.errors import ConfigError


def in_a_fresh_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_backends_and_the_batch_imports_no_framework() -> None:
    code = (
        "import sys, numpy, penstock.batching.backends, penstock.batching.batch\n"
        "make = penstock.batching.batch.TrainingBatch.from_numpy\n"
        "make({'input_ids': numpy.zeros((1, 2), int)}, backend='numpy').num_tokens\n"
        "print(sorted({'torch', 'mlx', 'jax', 'jaxlib', 'transformers'} & set(sys.modules)))"
    )
    assert in_a_fresh_process(code) == "[]"


def test_the_modules_named_like_frameworks_do_not_stand_in_for_them() -> None:
    torch = pytest.importorskip("torch")
    assert isinstance(get_backend("torch").from_numpy(np.zeros(2)), torch.Tensor)
    assert sys.modules["penstock.batching.backends.torch"] is not torch


def test_a_missing_framework_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # as if it were not installed
        "from penstock.batching.backends import get_backend\n"
        "try: get_backend('torch')\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "'penstock[torch]'" in in_a_fresh_process(code)


def test_an_unknown_backend_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'pytorch'.*'torch'"):
        get_backend("pytorch")


def test_a_backend_is_made_once_and_passed_through() -> None:
    assert get_backend("numpy") is get_backend("numpy") is get_backend(get_backend("numpy"))


def test_subclasses_of_arrays_belong_to_their_framework() -> None:
    class Mine(np.ndarray):
        pass

    assert backend_of(np.zeros(3).view(Mine)).name == "numpy"


def test_what_is_no_array_has_no_backend() -> None:
    with pytest.raises(ConfigError, match=r"builtins\.list"):
        backend_of([1, 2])


def test_require_gives_the_module() -> None:
    assert require("json.decoder", "json").__name__ == "json.decoder"


def test_require_names_the_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no_such_thing.*penstock\[thing\]"):
        require("no_such_thing.core", "thing")


def test_require_does_not_hide_what_is_broken_inside_a_module(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "half_there.py").write_text("import something_it_lacks")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_lacks") as caught:
        require("half_there", "half")
    assert "penstock[half]" not in str(caught.value)
