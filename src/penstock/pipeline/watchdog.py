"""Watchdog: a small process that notices when C code in a stage lets no other thread run.

`stall_seconds` is watched by a thread, which cannot run while a function keeps the interpreter to itself, as
`10 ** 30_000_000 % 7` does. The watchdog reads memory that the stages and the control thread write: beats, and which
thread is in which stage since when. When the beats stop for longer than a stage may take, it says which one it is. It
ends the process only if the thread of that stage was running all the time; else the culprit may be code outside of the
pipeline, and it says no more than that.

One watchdog serves all runs of a process, from the first run on; it ends with the process. Only where memory can be
shared by descriptor (not on Windows), and threads are told apart on Linux only. This file is also the program of the
watchdog, which imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from typing import TypeAlias, cast

_HEADER = struct.Struct("<QI")
"""Beats, and the number of runs."""
_ENTRY = struct.Struct("<QddH")
"""Thread (0: free), since when, seconds allowed, length of the text behind it."""
_Entry: TypeAlias = tuple[int, float, float, str]
_SLOTS, _SLOT_BYTES = 127, 512
_TEXT_BYTES = _SLOT_BYTES - _ENTRY.size
_TICK = 0.25
_CLOSE_SECONDS = 2.0
_BURNING = 0.2
"""Share of the time that a thread which holds the interpreter is seen to run at least, on a busy machine too."""


class Watchdog:
    """Memory that the watchdog reads. Writing it costs a stage a few microseconds a batch."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_SLOT_BYTES * (_SLOTS + 1))
            self._memory = mmap.mmap(file.fileno(), 0)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(file.fileno()), str(os.getpid())],
                pass_fds=[file.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._pipe = cast(io.FileIO, self._process.stdin)
        os.set_blocking(self._pipe.fileno(), False)  # a watchdog that was stopped stops nothing
        self._beats = self._runs = 0
        self._free = deque(range(1, _SLOTS + 1))
        self._slots: dict[int, int] = {}
        self._lock = threading.RLock()  # a garbage collection inside of it may end a run

    def begin_run(self) -> None:
        with self._lock:
            self._runs += 1
            self.beat()
            if self._runs == 1:
                with contextlib.suppress(OSError):  # somebody ended it
                    self._pipe.write(b".")

    def end_run(self) -> None:
        with self._lock:
            self._runs -= 1
            self.beat()

    def beat(self) -> None:
        self._beats += 1
        _HEADER.pack_into(self._memory, 0, self._beats, self._runs)

    def enter(self, allowed: float, since: float, text: str) -> None:
        """This thread begins with a batch in a stage."""
        thread = threading.get_native_id()
        slot = self._slots.get(thread)
        if slot is None:
            if not self._free:
                return
            slot = self._slots[thread] = self._free.pop()
        said, start = text.encode(errors="replace")[:_TEXT_BYTES], slot * _SLOT_BYTES
        self._memory[start + _ENTRY.size : start + _ENTRY.size + len(said)] = said
        _ENTRY.pack_into(self._memory, start, thread, since, allowed, len(said))

    def leave(self) -> None:
        slot = self._slots.pop(threading.get_native_id(), None)
        if slot is not None:
            _ENTRY.pack_into(self._memory, slot * _SLOT_BYTES, 0, 0.0, 0.0, 0)
            self._free.append(slot)

    def close(self) -> None:
        self._pipe.close()  # that ends it
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            with contextlib.suppress(OSError):  # a process that has become another user may not
                self._process.kill()
            self._process.returncode = 0

    def forget(self) -> None:
        """In a forked process: let go of what belongs to the parent."""
        self._pipe.close()
        self._process.returncode = 0  # or Python would complain that it still runs


_shared: Watchdog | None = None
_forgotten: list[Watchdog] = []
_guard = threading.Lock()


def watchdog() -> Watchdog | None:
    """The watchdog of this process, started with the first call; None where there can be none."""
    global _shared
    if os.name != "posix":
        return None
    with _guard:
        if _shared is None:
            try:
                _shared = Watchdog()
            except OSError:  # no process or file can be had any more: the run has an error of its own, or needs none
                return None
            atexit.register(_shared.close)
        return _shared


def _forget() -> None:
    global _shared, _guard
    shared, _shared, _guard = _shared, None, threading.Lock()
    if shared is not None:
        atexit.unregister(shared.close)
        shared.forget()
        _forgotten.append(shared)  # threads of the fork may still be in its stages


if hasattr(os, "register_at_fork") and __name__ != "__main__":
    os.register_at_fork(after_in_child=_forget)


# The program of the watchdog


def _watch(memory: mmap.mmap, process: int) -> None:
    beats, held, last = -1, 0.0, time.monotonic()
    before: dict[int, float] = {}
    seen: list[_Entry] = []
    said = False
    while True:
        now_beats, runs = _HEADER.unpack_from(memory, 0)
        if select.select([0], [], [], _TICK if runs else None)[0] and not os.read(0, 1 << 10):
            return
        now = time.monotonic()
        passed, last = min(now - last, 2 * _TICK), now  # not the time for which both of us were suspended
        if now_beats != beats or not runs:
            beats, held, before, seen, said = now_beats, 0.0, _cpu_seconds(process) if runs else {}, [], False
            continue
        if _stopped(process):
            continue
        held += passed
        entries = _entries(memory)
        # One that is being written has no time allowed yet; what keeps the interpreter is the same at the next look.
        stuck = [entry for entry in entries if entry in seen and min(held, now - entry[1]) > entry[2]]
        seen = entries
        if not stuck:
            continue
        used = _cpu_seconds(process)
        burning = [entry for entry in stuck if used.get(entry[0], 0.0) - before.get(entry[0], 0.0) > _BURNING * held]
        if burning:
            _say(f"{_told(burning, now)}, in C code that lets no other thread of process {process} run, so that no "
                 "StalledError can be raised; the process is ended with SIGABRT (with `python -X faulthandler` it "
                 "shows its lines)")  # fmt: skip
            _end(process)
            return
        if not said:
            _say(f"no Python code of process {process} has run for {held:.1f} s: C code keeps the interpreter and "
                 f"waits; it is code outside of the pipeline, or {_told(stuck, now)}")  # fmt: skip
        said = True


def _entries(memory: mmap.mmap) -> list[_Entry]:
    found = []
    for slot in range(1, _SLOTS + 1):
        thread, since, allowed, size = _ENTRY.unpack_from(memory, slot * _SLOT_BYTES)
        if thread:
            start = slot * _SLOT_BYTES + _ENTRY.size
            found.append((thread, since, allowed, memory[start : start + size].decode(errors="replace")))
    return found


def _told(entries: list[_Entry], now: float) -> str:
    return " or ".join(
        f"{text}, for {now - since:.1f} s, longer than stall_seconds={allowed:g}" for _, since, allowed, text in entries
    )


def _cpu_seconds(process: int) -> dict[int, float]:
    """CPU time of each thread; nothing where there is no /proc."""
    used: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208 - pathlib is not needed otherwise
            with contextlib.suppress(OSError):
                facts = _facts(f"/proc/{process}/task/{thread}/stat")
                used[int(thread)] = (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _stopped(process: int) -> bool:
    """True while somebody holds the whole process: SIGSTOP, Ctrl-Z, a debugger."""
    with contextlib.suppress(OSError):
        return _facts(f"/proc/{process}/stat")[0] in ("T", "t")
    return False


def _facts(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"penstock: {text}\n".encode(errors="replace"))


def _end(process: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGABRT)
        select.select([0], [], [], 10.0)  # a handler of its own may not end it
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    _watch(mmap.mmap(int(sys.argv[1]), 0), int(sys.argv[2]))
