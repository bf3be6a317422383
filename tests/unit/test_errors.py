"""Errors cross processes: each class of penstock pickles, and arrives with its message and its fields."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

import penstock.chat.format_preference
import penstock.files.objects
import penstock.fsqueue.prepare_command
import penstock.pipeline.array_worker  # noqa: F401 - classes of errors are found once their modules are loaded
from penstock.errors import ChangedFileError, DataError, PenstockError, PluginError, QueueNotFoundError, StageError


def classes(root: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    for kind in root.__subclasses__():
        if kind.__module__.startswith("penstock."):
            yield kind
            yield from classes(kind)


def made(kind: type[PenstockError]) -> PenstockError:
    if issubclass(kind, ChangedFileError):
        return kind("it is shorter", file="a.jsonl")
    if issubclass(kind, StageError):
        return kind("no such key", stage="Tokenize", file="a.jsonl", row=3, offset=40)
    if kind is DataError:
        return kind("no such key", file="a.jsonl", row=3, offset=40, data={"text": "x"})
    return kind("a reason")


@pytest.mark.parametrize("kind", sorted(set(classes()), key=lambda kind: kind.__qualname__))
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_an_error_arrives_whole(kind: type[PenstockError], protocol: int) -> None:
    error = made(kind)
    error.add_note("in a worker process")
    arrived = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - written here
    assert type(arrived) is kind
    assert (str(arrived), repr(arrived), vars(arrived)) == (str(error), repr(error), vars(error))


def test_fields_of_built_in_parents_arrive() -> None:
    missing = pickle.loads(pickle.dumps(QueueNotFoundError(2, "no queue", "/queue")))  # noqa: S301 - written here
    assert (missing.errno, missing.filename, str(missing)) == (2, "/queue", "[Errno 2] no queue: '/queue'")
    plugin = pickle.loads(pickle.dumps(PluginError("cannot be loaded", name="mine")))  # noqa: S301 - written here
    assert (plugin.name, plugin.msg) == ("mine", "cannot be loaded")


def test_an_error_can_be_copied() -> None:
    error = StageError("no such key", stage="Tokenize", file="a.jsonl", row=3)
    assert vars(copy.deepcopy(error)) == vars(error)
