"""Work that cannot be sent to other processes: the error names the stage and the object inside."""

from __future__ import annotations

import functools
import pickle
import threading
from typing import Any

import pyarrow as pa
import pytest

from penstock.engines.executor import Task
from penstock.engines.pickled_work import pickled
from penstock.errors import ConfigError


class Keep:
    """A transform with a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self.function(batch)


class Slotted:
    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Work:
    def __init__(self, *stages: Any) -> None:
        self.stages = list(stages)

    def __call__(self, task: Task) -> dict[str, Any]:
        return {}


def closure(held: Any) -> Any:
    def keep(batch: pa.RecordBatch) -> pa.RecordBatch:
        return held or batch

    return keep


def test_work_with_lambdas_and_closures_is_sent() -> None:
    work = pickle.loads(pickled(Work(Keep(lambda batch: batch), Keep(closure(3)))))  # noqa: S301 - written here
    assert work(Task("a", "map")) == {}


@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (Keep(closure(threading.Lock())), "a _thread.lock at .function -> variable 'held' of keep"),
        (Keep(Slotted(threading.Lock())), "a _thread.lock at .function -> .handle"),
        (Keep(functools.partial(print, file=threading.Lock())), "a _thread.lock at .function -> argument 'file'"),
        (Keep({"a": [1, threading.Lock()]}), "a _thread.lock at .function -> ['a'] -> [1]"),
        (Keep(each for each in "ab"), "a generator at .function"),
    ],
)
def test_the_stage_and_the_object_inside_are_named(stage: Keep, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pickled(Work(Keep(lambda batch: batch), stage))
    assert str(caught.value).startswith("Keep cannot be sent to other processes: it holds " + where)
    assert "open files, locks and connections inside the function" in str(caught.value)


def test_an_object_outside_of_stages_is_named_too() -> None:
    with pytest.raises(ConfigError, match=r"the pipeline cannot be sent .* a _thread.lock at .stages -> \[0\]"):
        pickled(Work(threading.Lock()))
