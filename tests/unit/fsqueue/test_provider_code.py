"""A provider that was edited makes other batches: its queue is refused, and an edit that means nothing is not one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson
import pytest
from queues import Given, Numbered, provider

from penstock.errors import ConfigError, StaleQueueError
from penstock.fsqueue import Queue
from penstock.fsqueue.prepare_command import find_provider
from penstock.fsqueue.provider_code import code_of

PREPARE = '''
"""A dataset."""
import numpy as np
from penstock.fsqueue import DataProviderBase
from .helpers import shifted

LARGEST = 10
UNUSED = 1


def drawn(rng, shape):
    return rng.integers(LARGEST, size=shape)


def unused():
    return 1


class Base(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size]}]}


class Digits(Base):
    def sample_batch(self, split, rng):
        # the digits
        return {"x": shifted(drawn(rng, (self.batch_size, self.block_size)))}


if __name__ == "__main__":
    print("nothing")
'''
HELPERS = "def shifted(x):\n    return x + 1\n"
EDITS = {
    "sample_batch": ("shifted(drawn(", "shifted(1 - drawn(", "Digits"),
    "base": ('"int64"', '"int" "64"', None),
    "meta of the base": ("[self.block_size]}]", "[self.block_size + 0]}]", "Base"),
    "helper": ("rng.integers(LARGEST", "rng.integers(1, LARGEST", "drawn"),
    "value": ("LARGEST = 10", "LARGEST = 11", "LARGEST"),
    "neighbour": ("x + 1", "x + 2", "helpers.py"),
    "unused function": ("return 1", "return 2", None),
    "unused value": ("UNUSED = 1", "UNUSED = 2", None),
    "comment": ("# the digits", "# other words", None),
    "docstring": ("    def build_meta(self):\n", '    def build_meta(self):\n        """What it is."""\n', None),
    "layout": ('return {"x": shifted', "return {\n            'x': shifted", None),
    "main": ('print("nothing")', 'print("something")', None),
}


def written(root: Path, old: str = "", new: str = "") -> Any:
    """The provider of a dataset whose files were written, with one edit."""
    home = root / "digits"
    home.mkdir(parents=True, exist_ok=True)
    (home / "prepare_streaming.py").write_text(PREPARE.replace(old, new) if old else PREPARE)
    (home / "helpers.py").write_text(HELPERS.replace(old, new) if old else HELPERS)
    found = find_provider("digits", root)
    config = {"dataset": "digits", "batch_size": 2, "block_size": 3, "split_proportions": {"train": 1.0}}
    return found(config, queue_dir=root / "queue")


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed_if_batches_may_depend_on_it(edit: str, tmp_path: Path) -> None:
    old, new, named = EDITS[edit]
    assert old in PREPARE + HELPERS
    written(tmp_path).run(max_batches=8)
    edited = written(tmp_path, old, new)
    if named is None:
        edited.run(max_batches=16)
        return
    with pytest.raises(StaleQueueError, match=str(named)):
        edited.run(max_batches=16)
    written(tmp_path).run(max_batches=16)


def test_the_code_of_a_class_is_the_same_wherever_it_stands(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert code_of(type(first)) == code_of(type(second))
    assert sorted(code_of(type(first))) == ["Base", "Digits", "LARGEST", "drawn", "helpers.py"]


def test_a_class_that_was_made_by_a_call_is_known_by_its_functions() -> None:
    one = type("Sampled", (Given,), {"sample": staticmethod(lambda k, rng: {"x": k})})
    other = type("Sampled", (Given,), {"sample": staticmethod(lambda k, rng: {"x": k + 1})})
    assert code_of(one)["Sampled"] != code_of(other)["Sampled"]
    assert code_of(one)["Given"] == code_of(other)["Given"]


def test_a_class_without_source_text_is_told(caplog: pytest.LogCaptureFixture) -> None:
    space: dict[str, Any] = {"Numbered": Numbered, "__name__": "typed"}
    exec("class Typed(Numbered):\n    def sample_batch(self, split, rng):\n        return {}\n", space)
    assert "Typed" not in code_of(space["Typed"])
    assert "typed.Typed" in caplog.text


def test_a_queue_that_does_not_know_its_code_is_filled_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = provider(tmp_path / "q")
    old = source.description()
    Queue.create(
        tmp_path / "q", type(old)(old.meta, {k: v for k, v in old.settings.items() if k != "provider_code"}, old.splits)
    )
    caplog.set_level(logging.WARNING)
    source.run(max_batches=16)
    assert "provider" in caplog.text
    facts = orjson.loads((tmp_path / "q" / "queue.json").read_bytes())
    assert "provider_code" not in facts["settings"]


def test_the_name_of_the_code_is_no_name_for_a_setting(tmp_path: Path) -> None:
    kind = type("Coded", (Numbered,), {"settings": {"provider_code": None}})
    with pytest.raises(ConfigError, match="'provider_code'"):
        provider(tmp_path / "q", kind)
