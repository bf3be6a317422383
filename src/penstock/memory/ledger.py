"""What objects take that may go at any moment, as a charge on a budget until they are gone."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from penstock.memory.budget import MemoryBudget

__all__ = ["Ledger"]

_CLOSED, _FORGOTTEN = -1, -2
"""Notes to the thread of a ledger that are about no object."""


class Ledger:
    """What tensors take, until they are gone: they may go on any thread, in the middle of anything.

    Whoever lets go of the last reference only leaves a note (a SimpleQueue may be put to from anywhere); a thread that
    sleeps otherwise takes the bytes off the budget, so that who waits for them is woken. It ends with `close`, or,
    after `forget`, with the last tensor: `at_the_end` is called then.
    """

    def __init__(self, budget: MemoryBudget, owner: str, at_the_end: Callable[[], None] = lambda: None) -> None:
        self._budget, self._owner, self._at_the_end = budget, owner, at_the_end
        self._notes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: dict[int, tuple[int, int | None, weakref.ref[Any]]] = {}
        """Serial -> bytes, address, the object."""
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._own = self._foreign = self.peak = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        return self._own + self._foreign

    @property
    def tensors(self) -> int:
        return len(self._held)

    def add(self, owner: Any, nbytes: int, address: int | None = None) -> None:
        """Count `nbytes` until `owner` is gone."""
        with self._lock:
            serial = next(self._serial)
            self._held[serial] = (nbytes, address, weakref.ref(owner))
            self._own += nbytes
            self._charge()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="penstock-tensors", daemon=True)
                self._thread.start()
        weakref.finalize(owner, self._notes.put, serial).atexit = False

    def knows(self, tensor: Any) -> bool:
        """Whether the tensor, or what it is a view of, is counted already."""
        address = _address(tensor)
        with self._lock:
            held = list(self._held.values())
        for nbytes, start, owner in held:
            # What is gone may not have been struck out yet, and another object may be in its place by now.
            alive = owner()
            if alive is None:
                continue
            if start is None:
                if alive is tensor:
                    return True
            elif address is not None and start <= address < start + max(1, nbytes):
                return True
        return False

    def forget(self) -> None:
        """Nobody will call any more: what is held goes on counting, and with the last of it everything ends."""
        self._notes.put(_FORGOTTEN)

    def settle(self, foreign: int) -> None:
        """Take note of what is gone; `foreign` bytes are kept that were not made here."""
        notes: list[int] = []
        while not self._notes.empty():
            try:
                notes.append(self._notes.get_nowait())
            except queue.Empty:
                break
        with self._lock:
            if not self._closed:
                self._foreign = foreign
                self._strike(notes)
                self._charge()
        for note in notes:
            if note < 0:
                self._notes.put(note)  # it was for the thread

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._held.clear()
            self._own = self._foreign = 0
            self._charge()
        self._notes.put(_CLOSED)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    def _watch(self) -> None:
        forgotten = False
        while not (forgotten and not self._held):
            note = self._notes.get()
            if note == _CLOSED:
                return
            forgotten |= note == _FORGOTTEN
            with self._lock:
                self._strike([note])
                self._foreign = 0 if forgotten else self._foreign
                self._charge()
        self._at_the_end()

    def _strike(self, notes: Sequence[int]) -> None:
        for note in notes:
            gone = self._held.pop(note, None)
            self._own -= gone[0] if gone is not None else 0

    def _charge(self) -> None:
        self.peak = max(self.peak, self.nbytes)
        self._budget.hold(self._owner, self.nbytes, by=self)


def _address(tensor: Any) -> int | None:
    """Where its memory begins, if it says so."""
    if hasattr(tensor, "ctypes"):
        return int(tensor.ctypes.data)
    return int(tensor.data_ptr()) if hasattr(tensor, "data_ptr") else None
