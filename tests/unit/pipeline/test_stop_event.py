"""A garbage collection may end a run in the middle of anything, also in a thread that holds the run's own locks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock import Pipeline, PipelineConfig
from penstock.pipeline.chain import Chain
from penstock.pipeline.context import StopEvent
from penstock.pipeline.control import PeriodicThread
from penstock.pipeline.processes import ProcessChain
from penstock.sources import MemorySource


def ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_an_event_is_waited_for_and_can_be_cleared() -> None:
    event = StopEvent()
    assert not event.wait(0)
    threading.Timer(0.01, event.set).start()
    assert event.wait(30)
    assert event.is_set()
    event.clear()
    assert not event.wait(0.001)


def test_an_event_can_be_set_by_a_thread_that_is_inside_of_it() -> None:
    event = StopEvent()

    def interrupted() -> None:
        with event._changed:
            event.set()

    assert ends(interrupted)
    assert event.is_set()


def test_a_run_can_be_halted_by_a_thread_that_is_inside_of_its_locks() -> None:
    pipeline = Pipeline(MemorySource([{"id": i} for i in range(100)]), config=PipelineConfig(batch_rows=10))
    loop = iter(pipeline)
    next(loop)
    runner = pipeline._runner
    assert runner is not None

    def interrupted() -> None:
        watchdog = runner.context.watchdog
        assert watchdog is not None
        with runner.workers.buffers._lock, runner.context.stop._changed, watchdog._lock:
            runner.halt()

    assert ends(interrupted)
    assert runner.stopping
    pipeline.stop()


def test_a_worker_process_can_be_closed_by_a_thread_that_is_starting_it() -> None:
    chain = ProcessChain(Chain([], []))

    def interrupted() -> None:
        with chain._lock:
            chain.close()

    assert ends(interrupted)


def test_a_periodic_thread_can_be_stopped_from_inside_of_its_own_wait() -> None:
    periodic = PeriodicThread(30.0, lambda: None)

    def interrupted() -> None:
        with periodic._stopping._changed:
            periodic.stop()

    assert ends(interrupted)
