from __future__ import annotations

import threading

import numpy as np
import pytest

from penstock.memory import MemoryBudget
from penstock.memory.pool import Ledger


class Tensor:
    """Something that says nothing about its memory."""


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger whose thread does nothing: only `settle` releases the charge of objects that are gone."""
    monkeypatch.setattr(Ledger, "_watch", lambda self: None)
    return Ledger(MemoryBudget(1000), "tensors")


def test_an_object_in_the_place_of_one_that_is_gone_is_not_known(ledger: Ledger) -> None:
    tensor = Tensor()
    ledger.add(tensor, 100)
    assert ledger.knows(tensor)
    number = id(tensor)
    del tensor
    others = [Tensor()]
    while id(others[-1]) != number:
        others.append(Tensor())
    assert ledger.nbytes == 100, "not settled yet"
    assert not ledger.knows(others[-1])


def test_memory_in_the_place_of_some_that_is_gone_is_not_known(ledger: Ledger) -> None:
    memory, owner = np.zeros(100, np.uint8), Tensor()
    ledger.add(owner, 100, address=memory.ctypes.data)
    assert ledger.knows(memory[50:])
    del owner
    assert not ledger.knows(memory[50:])
    ledger.settle()
    assert (len(ledger), ledger.nbytes) == (0, 0)


def test_a_forgotten_ledger_ends_with_its_last_object() -> None:
    budget, ended = MemoryBudget(1000), threading.Event()
    ledger = Ledger(budget, "tensors", on_end=ended.set)
    tensor = Tensor()
    ledger.add(tensor, 100)
    ledger.forget()
    assert not ended.wait(0.05)
    assert budget.by_owner() == {"tensors": 100}
    del tensor
    assert ended.wait(300)
    assert budget.used == 0
