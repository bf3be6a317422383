"""Processes that answer with arrays: in order, in shared memory or through the pipe, and quiet at their end."""

from __future__ import annotations

import gc
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from tests.waits import wait_for

from penstock.errors import ConfigError, DataError
from penstock.pipeline import array_worker
from penstock.pipeline.array_server import Frames
from penstock.pipeline.array_worker import (
    REQUEST,
    SUPERSEDING,
    Answer,
    ArrayWorker,
    ArrayWorkers,
    describe_error,
    on_release,
    raise_error,
    table_of,
    views_of,
)
from penstock.pipeline.processes import SETUP, RemoteError, is_readable, write_frame


class Doubled:
    """Answers a number with that many numbers, once and twice each."""

    def answer(self, request: bytes) -> Answer:
        count = int(request)
        if count < 0:
            raise DataError("cannot be negative", file="numbers", row=count)
        return Answer({"count": count}, {"once": np.arange(count), "twice": np.arange(count, dtype=np.int32) * 2})


class Prepared(Doubled):
    """Loads something before it answers, which fails."""

    def __init__(self, error: type[BaseException]) -> None:
        self.loaded, self.error = 0, error

    def prepare(self) -> None:
        self.loaded += 1
        raise self.error("an answer tells of it")

    def answer(self, request: bytes) -> Answer:
        return Answer({"loaded": self.loaded})


@pytest.mark.parametrize("error", [DataError, BaseException])
def test_a_service_loads_what_it_needs_before_it_is_ready(error: type[BaseException]) -> None:
    workers = ArrayWorkers(Prepared(error), 1)
    try:
        workers.add(1)
        wait_for(lambda: not workers.starting)
        assert len(workers) == 2
        found = [workers.submit(key, b"", lambda answer: answer.notes["loaded"]).result() for key in (0, 1)]
    finally:
        workers.close()
    assert found == [1, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are not numbered like that")
def test_a_process_with_many_open_files_sees_whether_a_worker_has_answered() -> None:
    import fcntl
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1100 if hard == resource.RLIM_INFINITY else min(1100, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    reading, writing = os.pipe()
    try:
        far = fcntl.fcntl(reading, fcntl.F_DUPFD, wanted - 50)
        assert not is_readable(far)
        os.write(writing, b"x")
        assert is_readable(far)
        os.read(far, 1)
        os.close(writing)
        assert is_readable(far)  # the end is known without a wait, too
        os.close(far)
    finally:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Large(Doubled):
    """More than a pipe takes."""

    def __init__(self) -> None:
        self.data = b"x" * (4 << 20)


@pytest.mark.skipif(os.name != "posix", reason="memory is shared on POSIX only")
def test_a_process_starts_without_waiting_for_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    workers = ArrayWorkers(Large(), 2)
    start = threading.Thread(target=workers.start, daemon=True)
    start.start()
    start.join(30)
    waits = start.is_alive()
    workers.close()
    assert not waits


@pytest.mark.parametrize("shared", [True, False])
def test_answers_come_in_order_and_errors_in_their_place(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_worker, "_CAN_SHARE", shared and array_worker._CAN_SHARE)
    worker = ArrayWorker(Doubled(), slots=3)
    try:
        worker.send([(0, b"3"), (1, b"-1"), (2, b"100000")])
        first = worker.receive()
        with pytest.raises(DataError, match="numbers, row -1: cannot be negative") as caught:
            worker.receive()
        assert (caught.value.file, caught.value.row) == ("numbers", -1)
        third = worker.receive()
    finally:
        worker.close()
    for answer, count in ((first, 3), (third, 100_000)):  # the arrays outlive the worker
        assert answer.notes == {"count": count}
        assert np.array_equal(answer.arrays["once"], np.arange(count))
        assert np.array_equal(answer.arrays["twice"], np.arange(count, dtype=np.int32) * 2)
        assert answer.arrays["twice"].flags.writeable
    with pytest.raises(RemoteError, match="stopped"):
        worker.send([(0, b"1")])


def test_requests_that_a_later_one_supersedes_are_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    pipe = io.BytesIO()
    for kind in (SETUP, REQUEST, SUPERSEDING, REQUEST):
        write_frame(pipe, kind, bytes([kind]))
    pipe.seek(0)
    frames = Frames(pipe)
    frames.fill()
    assert ended == [0]
    taken = [frames.take() for _ in range(4)]
    assert [(kind, useless) for kind, _, useless in taken[1:]] == [
        (REQUEST, True),
        (SUPERSEDING, False),
        (REQUEST, False),
    ]


def test_a_slot_is_free_when_its_last_view_has_gone() -> None:
    arrays = {"one": np.arange(5), "two": np.arange(3.0)}
    table, nbytes = table_of(arrays)
    views: dict[str, Any] = views_of(np.frombuffer(bytearray(nbytes), np.uint8), table)
    freed: list[int] = []
    on_release(views, freed.append, 7)
    part = views.pop("two")[1:].reshape(2, 1)
    del views
    gc.collect()
    assert not freed
    del part
    assert freed == [7]


def test_errors_of_other_packages_keep_their_name_and_message() -> None:
    class OddError(Exception):
        pass

    with pytest.raises(RemoteError, match="OddError: too odd") as caught:
        raise_error(describe_error(OddError("too odd"), "where it was"))
    assert caught.value.kind == "OddError"
    assert "where it was" in caught.value.__notes__[0]
    with pytest.raises(KeyError):
        raise_error(describe_error(KeyError("name"), ""))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "UnicodeDecodeError: .*invalid start byte"),
        (ExceptionGroup("both failed", [ValueError("one"), OSError("other")]), "ExceptionGroup: both failed"),
    ],
)
def test_errors_that_cannot_be_made_from_their_message_keep_it(error: Exception, told: str) -> None:
    with pytest.raises(RemoteError, match=told):
        raise_error(describe_error(error, ""))


def test_a_service_that_cannot_be_loaded_is_an_error() -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return int, ("no number",)

        def answer(self, request: bytes) -> Answer:
            return Answer()

    worker = ArrayWorker(Unloadable())
    worker.send([(0, b"")] * 2)
    with pytest.raises(ConfigError, match="could not load the functions: ValueError"):
        worker.receive()
    os.kill(worker.pid, signal.SIGKILL)  # type: ignore[arg-type]  # or the next answer would be waited for in vain
    with pytest.raises(ConfigError, match="could not load the functions: ValueError"):
        worker.receive()
    worker.close()


@pytest.mark.skipif(os.name != "posix", reason="there is no Ctrl-C for a process group")
def test_a_process_that_starts_at_ctrl_c_goes_on() -> None:
    worker = ArrayWorker(Doubled())
    try:
        worker.start()
        os.kill(worker.pid, signal.SIGINT)  # type: ignore[arg-type]  # before it can say that it ignores that
        worker.send([(0, b"3")])
        assert worker.receive().notes == {"count": 3}
        os.kill(worker.pid, signal.SIGINT)  # type: ignore[arg-type]
        worker.send([(0, b"4")])
        assert worker.receive().notes == {"count": 4}
        blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text("utf-8"))
        assert blocked is None or not int(blocked[1], 16) >> signal.SIGINT - 1 & 1, "what it starts gets no signals"
    finally:
        worker.close()


def test_a_process_imports_what_its_parent_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("queue.py", "numpy.py"):
        (tmp_path / name).write_text("raise ValueError('a module of the working directory')")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    worker = ArrayWorker(Doubled())
    try:
        worker.send([(0, b"3")])
        assert worker.receive().notes == {"count": 3}
    finally:
        worker.close()


def test_a_process_whose_reader_is_gone_ends_quietly() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock.pipeline.array_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    write_frame(child.stdin, SETUP, cloudpickle.dumps(3))
    write_frame(child.stdin, REQUEST, b"0000")
    assert child.stderr.read() == b""
    assert child.wait() == 0
    child.stdin.close()
    child.stderr.close()
