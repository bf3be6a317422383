"""Locks in buckets: one holder, takeover without clocks, and holders that have lost theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.waits import fight_for, wait_for

import penstock.files.object_lock as module
from penstock.errors import ConfigError
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import open_bucket

HOLD = """
import sys, time
from penstock.files.object_lock import ObjectLock
assert ObjectLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders seem to be on other machines, and leases are short."""
    monkeypatch.setattr(module, "_lives_here", lambda token: None)
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(module, "_PAUSE", 0.05)


def test_a_lock_in_a_bucket_is_held_by_one_and_its_object_goes_with_it(s3_url: str) -> None:
    url = f"{s3_url}/l"
    first, second = ObjectLock(url), ObjectLock(url)
    assert first.acquire()
    assert first.acquire()
    assert not second.acquire()
    assert f"process {os.getpid()} on " in second.owner()
    with pytest.raises(ConfigError, match=f"the run is in use by process {os.getpid()}"):
        second.hold("the run")
    assert second.acquire(take_over=True)
    assert (first.held, second.held) == (False, True)
    first.release()
    assert not first.acquire()
    second.release()
    bucket, key = open_bucket(url)
    assert bucket.info(key) is None


def test_a_killed_holder_on_the_same_machine_is_known_at_once(s3_url: str) -> None:
    url = f"{s3_url}/l"
    process = subprocess.Popen([sys.executable, "-c", HOLD, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    lock = ObjectLock(url)
    assert not lock.acquire(take_over=True)
    assert f"process {process.pid} on " in lock.owner()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert lock.acquire()
    lock.release()


def test_a_lock_is_taken_only_from_a_holder_that_does_not_renew_it(
    s3_url: str, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{s3_url}/l"
    live = ObjectLock(url)
    assert live.hold("x")
    with pytest.raises(ConfigError, match="x is in use by process"):
        ObjectLock(url).hold("x")
    live._stop.set()  # as a machine that was switched off
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 86_400)  # a clock that jumps changes nothing
    late = ObjectLock(url)
    assert late.hold("x")
    assert not live.held
    live._start()  # and on again
    wait_for(lambda: live._lost)
    with pytest.raises(ConfigError, match="x is in use by process"):
        live.check("x")
    live.release()
    assert late.held
    late.check("x")
    late.release()


def test_a_holder_that_was_stopped_asks_before_it_goes_on(s3_url: str, elsewhere: None) -> None:
    stopped, late = ObjectLock(f"{s3_url}/l"), ObjectLock(f"{s3_url}/l")
    assert stopped.hold("x")
    stopped._stop.set()  # none of its threads runs
    assert late.hold("x")
    with pytest.raises(ConfigError, match="x is in use by process"):
        stopped.check("x")
    assert not stopped.held
    late.check("x")
    late.release()


def test_a_holder_that_was_killed_on_another_machine_is_not_waited_for_in_vain(s3_url: str, elsewhere: None) -> None:
    killed, next_one = ObjectLock(f"{s3_url}/l"), ObjectLock(f"{s3_url}/l")
    assert killed.acquire()
    assert not next_one.acquire()
    killed._stop.set()
    assert next_one.acquire()
    next_one.release()


def test_a_waiting_process_gets_the_lock_when_it_is_released(s3_url: str, elsewhere: None) -> None:
    first, second = ObjectLock(f"{s3_url}/l"), ObjectLock(f"{s3_url}/l")
    first.acquire()
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(second.acquire(30)))
    waiting.start()
    first.release()
    waiting.join(30)
    assert got == [True]
    second.release()


def test_threads_that_fight_for_a_lock_in_a_bucket_hold_it_one_at_a_time(s3_url: str) -> None:
    fight_for(lambda: ObjectLock(f"{s3_url}/l"), threads=3, turns=5)
