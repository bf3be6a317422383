from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waits import fight_for

import penstock.files.locks as module
from penstock.files.locks import FileLock

HOLD = """
import sys, time
from penstock.files.locks import FileLock
lock = FileLock(sys.argv[1])
assert lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_is_held_by_one_and_its_file_goes_with_it(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    assert first.acquire()
    assert first.acquire(), "asking again for what one has is no trouble"
    assert not second.acquire()
    assert f"process {os.getpid()} on " in second.owner()
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert second.acquire()
    assert (first.held, second.held) == (False, True)
    second.release()


def test_a_waiting_thread_gets_the_lock_when_it_is_released(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    first.acquire()
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(second.acquire(30)))
    waiting.start()
    first.release()
    waiting.join(30)
    assert got == [True]
    second.release()


def test_only_within_a_process_a_lock_can_be_taken_over(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    first.acquire()
    assert second.acquire(take_over=True)
    assert (first.held, second.held) == (False, True)
    first.release()
    assert not first.acquire()
    second.release()
    assert first.acquire(take_over=True), "nobody to take it from"
    first.release()


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "l")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    lock = FileLock(tmp_path / "l")
    assert not lock.acquire(take_over=True)
    assert f"process {process.pid} on " in lock.owner()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "l").exists()
    assert lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_threads_that_fight_for_a_lock_hold_it_one_at_a_time(tmp_path: Path) -> None:
    fight_for(lambda: FileLock(tmp_path / "l"), threads=4, turns=20)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = module._lock, []

    def removed_first(handle: int) -> bool:
        if not times:
            (tmp_path / "l").unlink()  # its owner released it between opening and locking
        times.append(1)
        return real(handle)

    monkeypatch.setattr(module, "_lock", removed_first)
    first, second = FileLock(tmp_path / "l"), FileLock(tmp_path / "l")
    assert first.acquire()
    assert len(times) == 2
    assert not second.acquire(), "two held the lock"
    first.release()


@pytest.mark.parametrize("call", ["write", "truncate"])
def test_a_full_disk_does_not_keep_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    lock = FileLock(tmp_path / "l")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        assert lock.acquire(), "the text in the file is for messages only"
        assert FileLock(tmp_path / "l").owner() in ("another process", lock.owner())
    lock.release()
    assert not (tmp_path / "l").exists()
    assert lock.acquire()
    lock.release()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), KeyboardInterrupt()])
def test_an_error_while_locking_leaves_the_lock_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> bool:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FileLock, "_has_the_name", fail)
        with pytest.raises(type(error)):
            FileLock(tmp_path / "l").acquire()
    lock = FileLock(tmp_path / "l")
    assert lock.acquire()
    lock.release()


def test_an_owner_that_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("?")
    assert FileLock(tmp_path / "l").owner() == "another process"


def test_a_lock_that_a_garbage_collection_releases_inside_of_another_call_does_not_block(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "l")
    assert lock.acquire()
    assert module._registry_guard.acquire(timeout=1)
    try:
        released = module._registry_guard.acquire(blocking=False)
        assert released, "the thread that holds the guard has to get it again"
        module._registry_guard.release()
        lock.release()
    finally:
        module._registry_guard.release()
    assert not lock.held
