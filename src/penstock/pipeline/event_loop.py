"""Bridges between event loops and threads: rows that are awaited, and batches and runs to await."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.errors import ConfigError, StoppedError
from penstock.pipeline.prefetch import DemandLine, IteratorThread

Item = TypeVar("Item")
Result = TypeVar("Result")
_RESPONSIVE_SECONDS = 0.005
"""Longest time for which an async iterator that never waits keeps others from the event loop."""
_STOP_SECONDS = 0.05
"""Interval at which a call is told to stop until it has returned."""
_END: Any = object()


class IteratorTask(IteratorThread[Item]):
    """Items of an async iterator, read by one task: on `loop`, or without one on a loop of its own in a thread.

    Nothing is read that was not asked for. `make` makes the iterator, or a coroutine that returns it. `stop` cancels
    what it awaits.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        owned: bool,
        is_whole: Callable[[Item], bool] = lambda _: False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._line = self._awaited = line = _AwaitedLine(make, owned, is_whole)
        self._loop, self._started = loop, False
        # The thread knows the line, not this object, so that an unused object is not kept alive.
        self._thread = threading.Thread(target=lambda: asyncio.run(line.read()), name="penstock-async", daemon=True)

    def _start(self) -> None:
        if self._loop is None:
            super()._start()
        else:
            asyncio.run_coroutine_threadsafe(self._awaited.read(), self._loop)

    def _wait(self, seconds: float) -> None:
        if self._loop is None:
            super()._wait(seconds)
        elif not _is_running(self._loop):
            self._line.wait_done(seconds)


class _AwaitedLine(DemandLine[Item]):
    """Queue between the task that reads and the thread that takes."""

    _task: asyncio.Task[Any] | None = None

    async def read(self) -> None:
        """Read what is asked for until the end."""
        self._loop, self._task, self._wake = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        iterator: Any = None
        try:
            iterator = await self._open()
            while await self._demand() and await self._read_some(iterator):
                pass
        except asyncio.CancelledError:
            if not self._stopped:
                self._error = StoppedError("the task that reads an async iterator was cancelled; its event loop ended?")
        except BaseException as error:  # noqa: BLE001 - it is raised where the item would have been
            self._error = error
        finally:
            try:
                if self._owned and hasattr(iterator, "aclose"):
                    await iterator.aclose()
            except Exception as error:  # noqa: BLE001 - as above
                self._error = self._error or error
            finally:
                self._finish()

    async def _open(self) -> Any:
        made: Any = self._make()
        if inspect.isawaitable(made):
            made = await made
        if not hasattr(made, "__aiter__"):
            raise ConfigError(
                f"expected an async iterator or a function that returns one, got {type(made).__name__}; rows that need "
                "no await are read by IteratorSource"
            )
        return aiter(made)

    async def _demand(self) -> bool:
        while not self._stopped and self._goal <= self._read:
            self._wake.clear()
            if self._stopped or self._goal > self._read:
                break  # between the look and the clear
            await self._wake.wait()
        return not self._stopped

    async def _read_some(self, iterator: Any) -> bool:
        """Read what was asked for; False at the end."""
        wanted, count, whole = self._wanted(), 0, False
        since, now = time.monotonic(), time.monotonic
        while count < wanted and not whole and not self._stopped:
            try:
                item = await anext(iterator)
            except StopAsyncIteration:
                self._count(count, whole=False)
                self._ended = True
                return False
            count += 1
            self._ready.append(item)
            if self._awaited:
                self._first_came()
            whole = type(item) is not dict and self._is_whole(item)
            if now() - since > _RESPONSIVE_SECONDS:
                await asyncio.sleep(0)
                since = now()
        self._count(count, whole=whole or self._stopped)
        return True

    def _asked(self) -> None:
        self._tell(lambda: self._wake.set())

    def stop(self) -> None:
        super().stop()
        self._tell(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None and not self._done:
            self._task.cancel()

    def _tell(self, action: Callable[[], object]) -> None:
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the task is over
                self._loop.call_soon_threadsafe(action)


class CallThread:
    """Thread that makes blocking calls for event loops, one after the other. It starts with the first call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._started = False

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Make a call after those before it."""
        if not self._started:
            self._started = True
            # It knows the queue, not this object, and ends with it.
            threading.Thread(target=_make_calls, args=(self._calls,), name="penstock-calls", daemon=True).start()
        future: Future[Result] = Future()
        self._calls.put((work, future))
        return future

    async def call(
        self, work: Callable[[], Result], stop: Callable[[], object], grace_seconds: float | None = None
    ) -> Result:
        """Result of a call. If the task is cancelled, `stop` has to make the call return, and is awaited, for at most
        `grace_seconds`."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(over.set)

        future = self.submit(work)
        future.add_done_callback(done)
        try:
            await over.wait()
        except asyncio.CancelledError:
            future.cancel()  # if it has not begun
            until = None if grace_seconds is None else time.monotonic() + grace_seconds
            while not future.done() and (until is None or time.monotonic() < until):
                stop()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_SECONDS):
                        await over.wait()
            raise
        return future.result()

    def __del__(self) -> None:
        if hasattr(self, "_calls"):
            self._calls.put(None)


def _make_calls(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        work, future = call
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it is raised in the task that awaits it
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del call, work, future


class AsyncBatches(AsyncIterator[Item]):
    """Items of an iterator for `async for`: a thread takes the next one when it is awaited, and the loop stays free.

    `begin` makes the iterator, in that thread, for an event loop. `mark` is the position before an item, and `rewind`
    goes back there when a task was cancelled that awaited the item: then the iteration is over, and nothing is lost.
    `stop` makes a call that waits return; `leave` is called when the loop is left early, and `receive` with each item,
    both in the thread of the event loop.
    """

    def __init__(
        self,
        thread: CallThread,
        begin: Callable[[asyncio.AbstractEventLoop], Iterator[Item]],
        *,
        stop: Callable[[], object],
        mark: Callable[[], Any],
        rewind: Callable[[Any], object],
        leave: Callable[[], object] | None = None,
        receive: Callable[[Item], object] | None = None,
        grace_seconds: float | None = None,
    ) -> None:
        self._thread, self._begin, self._stop, self._grace_seconds = thread, begin, stop, grace_seconds
        self._mark, self._rewind, self._leave, self._receive = mark, rewind, leave, receive
        self._items: Iterator[Item] | None = None
        self._lock = threading.Lock()
        self._before: tuple[Any] | None = None
        """Position before the item that was made and not delivered."""
        self._over = self._awaited = False

    def __aiter__(self) -> AsyncBatches[Item]:
        return self

    async def __anext__(self) -> Item:
        if self._awaited:
            raise RuntimeError("another task awaits the next batch of this loop already; use one task for each loop")
        if self._over:
            raise StopAsyncIteration
        self._awaited, loop = True, asyncio.get_running_loop()
        try:
            item = await self._thread.call(lambda: self._next(loop), self._stop, self._grace_seconds)
        except BaseException:
            self._end()
            raise
        finally:
            self._awaited = False
        self._before = None
        if item is _END:
            self._over = True
            raise StopAsyncIteration
        if self._receive is not None:
            self._receive(item)
        return item

    async def aclose(self) -> None:
        """End the loop, and wait until its threads have ended."""
        if not self._over:
            self._end()
            await self._thread.call(lambda: None, self._stop, self._grace_seconds)

    def __del__(self) -> None:
        if not getattr(self, "_over", True) and self._items is not None and not sys.is_finalizing():
            self._end()

    def _next(self, loop: asyncio.AbstractEventLoop) -> Item:
        """In the thread: the next item, or `_END`."""
        if self._items is None:
            self._items = self._begin(loop)
        before = self._mark()
        item = next(self._items, _END)
        with self._lock:
            if self._over:
                self._rewind(before)
            elif item is not _END:
                self._before = (before,)
        return item

    def _end(self) -> None:
        """End without waiting; an item that nobody got is the next one again."""
        with self._lock:
            self._over = True
            before, self._before = self._before, None
            if before is not None:
                self._rewind(before[0])
        items, self._items = self._items, None
        if self._leave is not None:
            self._leave()
        if items is not None and hasattr(items, "close"):
            self._thread.submit(items.close)


def called_on(loop: asyncio.AbstractEventLoop, function: Callable[[Item], object]) -> Callable[[Item], None]:
    """A function that is called in the thread of an event loop, and waited for in another."""

    def call(argument: Item) -> None:
        async def called() -> None:
            function(argument)

        asyncio.run_coroutine_threadsafe(called(), loop).result()

    return call


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """True if this is the thread of the loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
