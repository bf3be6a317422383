"""A forked process has none of the threads: what needs them is refused there, and everything else works."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import MemoryBudget, Pipeline, PipelineConfig, PretrainDataLoader
from penstock._forks import renewed
from penstock.files.locks import FileLock
from penstock.loaders.streaming import StreamingPipeline
from penstock.sources import JsonlSource, MemorySource

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork of POSIX")

ROWS = [{"id": i} for i in range(100)]


def in_fork(function: Callable[[], object]) -> str:
    """Text of what a function returns or raises in a forked process; a hang is ended."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # of JAX, if another test imported it
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            said = f"{function()}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "it hung"
    return said


def test_a_forked_process_that_continues_a_pipeline_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"id": {i}}}\n' for i in range(100)) + "broken\n" + '{"id": 100}\n')
    config = PipelineConfig(batch_rows=10, on_error="quarantine", quarantine=tmp_path / "bad.jsonl")
    pipeline = Pipeline(JsonlSource(source), config=config)
    batches = iter(pipeline)
    rows = next(batches).to_pylist()
    said = in_fork(lambda: next(batches))
    assert said.startswith("ConfigError: this run of a pipeline began in process")
    assert in_fork(pipeline.stop) == "None"
    rows += [row for batch in batches for row in batch.to_pylist()]
    assert rows == [{"id": i} for i in range(101)]
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_a_forked_process_that_continues_a_loop_is_refused_and_may_begin_its_own(
    streaming: bool, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "document number {i} of a few"}}\n' for i in range(40)))
    loader = PretrainDataLoader(corpus, "byte", chunk_size=16, batch_size=2, streaming=streaming, prefetch=2)
    with loader:
        expected = [batch["input_ids"].tolist() for batch in loader]
        loader.reset()
        loop = iter(loader)
        seen = [next(loop)["input_ids"].tolist()]
        state = loader.state_dict()
        said = in_fork(lambda: next(loop))
        assert said.startswith("ConfigError: this loop"), said
        loaded = in_fork(lambda: loader.load_state_dict(state) or next(iter(loader))["input_ids"].tolist())
        assert loaded == str(expected[1])
        seen += [batch["input_ids"].tolist() for batch in loop]
        assert seen == expected


def test_a_forked_process_that_continues_a_stream_of_samples_is_refused() -> None:
    stream = StreamingPipeline(MemorySource(ROWS))
    samples = iter(stream)
    next(samples)
    assert in_fork(lambda: next(samples)).startswith("ConfigError: this loop")
    assert len(list(samples)) == 99


def test_locks_that_another_thread_held_are_free_in_a_forked_process() -> None:
    lock, reentrant = renewed(threading.Lock()), renewed(threading.RLock())
    budget = MemoryBudget("1 KiB")
    budget.reserve(1000, by="a thread of the parent")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock, reentrant, budget._changed:
            held.set()
            done.wait(30)

    def use() -> str:
        with lock, reentrant, budget.reserve(1000, timeout_seconds=0, by="a thread of the parent"):
            return "used"

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    said = in_fork(use)
    done.set()
    thread.join()
    assert said == "used"


def test_a_charge_of_the_parent_is_given_back_once(tmp_path: Path) -> None:
    budget = MemoryBudget("1 KiB")
    charge = budget.reserve(100)
    assert in_fork(lambda: charge.release() or budget.used) == "0"
    assert budget.used == 100
    charge.release()
    assert budget.used == 0


def test_a_forked_process_neither_releases_nor_takes_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    assert in_fork(lambda: FileLock(tmp_path / "lock").acquire(take_over=True)) == "False"
    assert in_fork(lock.release) == "None"
    assert (tmp_path / "lock").exists()
    lock.release()
    assert not (tmp_path / "lock").exists()
