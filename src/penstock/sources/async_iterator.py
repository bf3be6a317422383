"""Rows that are awaited: async generators and other async iterables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.pipeline.event_loop import IteratorTask
from penstock.pipeline.prefetch import IteratorThread
from penstock.sources.memory import MAX_WAIT_SECONDS, IteratorSource, is_whole


class AsyncIteratorSource(IteratorSource):
    """Any async iterable of rows (dicts), RecordBatches or Tables; or a function that makes one.

        async def events():
            async for message in client.subscribe("events"):
                yield {"text": message.body}

        async for batch in Pipeline(AsyncIteratorSource(events)): ...

    Give a function, usually an async generator function, to be able to resume and to run twice. One task reads all
    rows: during `async for batch in pipeline` and `run_async` on the event loop of the caller, so that the generator
    may use its connections; otherwise, as in `run` and in loaders, on an event loop of its own in one thread. Nothing
    is read that was not asked for. When a run stops, what the generator awaits is cancelled.

    Batches, `schema`, `max_wait_seconds` and resume are those of `IteratorSource`.
    """

    def __init__(
        self,
        items: AsyncIterable[Any] | Callable[[], AsyncIterable[Any] | Awaitable[AsyncIterable[Any]]],
        *,
        schema: pa.Schema | Any | None = None,
        max_wait_seconds: float | None = MAX_WAIT_SECONDS,
    ) -> None:
        super().__init__(items, schema=schema, max_wait_seconds=max_wait_seconds)  # type: ignore[arg-type]
        self._loop: asyncio.AbstractEventLoop | None = None

    _advice = "give AsyncIteratorSource a function that makes it, such as an async generator function"

    def use_loop(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Await rows on this event loop from now on, or on one of its own; a run calls it."""
        if loop is not self._loop:
            self.close()
            self._loop = loop

    def _check_items(self, items: Any) -> None:
        if not callable(items) and not isinstance(items, AsyncIterable):
            raise ConfigError(
                f"expected an async iterable or a function that returns one, got {items!r}; IteratorSource reads "
                "rows that need no await"
            )

    def _repeatable(self) -> bool:
        return callable(self._items) or not isinstance(self._items, AsyncIterator)

    def _open_reader(self) -> IteratorThread[Any]:
        items = self._items
        return IteratorTask(
            lambda: items() if callable(items) else items,
            owned=not isinstance(items, AsyncIterator),
            is_whole=is_whole,
            loop=self._loop,
        )
