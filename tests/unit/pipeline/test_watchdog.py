"""C code that keeps the interpreter to itself: a process outside of it says which stage that is."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys

import pytest

from penstock.pipeline import watchdog

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are told apart on Linux only")

PROGRAM = """
import ctypes
from penstock import Pipeline, PipelineConfig
from penstock.errors import StalledError
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.transforms import Map
def hold(row):
    {call}
    return row
try:
    Pipeline(MemorySource([{{"id": 1}}]), [Map(hold)], MemorySink(), PipelineConfig(stall_seconds=0.3)).run()
except StalledError:
    pass
print("over")
"""


def _run(call: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_stage_that_computes_in_c_code_without_end_is_named_and_ends_the_process() -> None:
    done = _run("10 ** 300_000_000 % 7")
    assert done.returncode == -6
    assert "penstock: Map(hold) has been working" in done.stderr
    assert "stall_seconds=0.3" in done.stderr
    assert not done.stdout


def test_a_stage_that_waits_in_c_code_is_named_and_goes_on() -> None:
    # A library loaded so keeps the interpreter while it sleeps. Who does that cannot be seen from outside.
    done = _run("ctypes.PyDLL(None).usleep(1_500_000)")
    assert done.returncode == 0, done.stderr
    assert "or Map(hold) has been working" in done.stderr
    assert done.stdout == "over\n"


@pytest.mark.parametrize(("entries", "ended"), [([7, 8, 9, 10], 0), ([7, 7], 1)], ids=["half written", "stuck"])
def test_an_entry_that_is_half_written_is_no_stage_that_hangs(
    monkeypatch: pytest.MonkeyPatch, entries: list[int], ended: int
) -> None:
    """Another thread each time, with no time allowed yet: so a stage looks that begins with a batch just now."""
    looks, seconds, ends = iter(entries), iter(range(100)), []
    monkeypatch.setattr(watchdog, "_entries", lambda memory: [(next(looks), 0.0, 0.0, "")])
    monkeypatch.setattr(watchdog, "_cpu_seconds", lambda process: dict.fromkeys(entries, next(seconds)))
    monkeypatch.setattr(watchdog, "_stopped", lambda process: False)
    monkeypatch.setattr(watchdog, "_end", ends.append)
    monkeypatch.setattr(watchdog.select, "select", lambda *_: ([], [], []))
    with mmap.mmap(-1, 1 << 10) as memory, contextlib.suppress(StopIteration):
        watchdog._HEADER.pack_into(memory, 0, 1, 1)
        watchdog._watch(memory, os.getpid())
    assert len(ends) == ended


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of os.fork in JAX and Python
def test_a_forked_process_has_a_watchdog_of_its_own() -> None:
    ours = watchdog.watchdog()
    assert ours is not None
    assert watchdog.watchdog() is ours
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        theirs = watchdog.watchdog()
        os.write(writing, b"other" if theirs is not None and theirs is not ours else b"same")
        if theirs is not None:
            theirs.close()
        os._exit(0)
    assert os.read(reading, 9) == b"other"
    os.waitpid(child, 0)
    ours.begin_run()  # it is still ours, and still there
    ours.end_run()
    assert ours._process.poll() is None
