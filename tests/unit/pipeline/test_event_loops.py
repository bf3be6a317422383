"""Pipelines and event loops: rows that are awaited, `async for`, `run_async`, cancelled tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, StageError, StoppedError
from penstock.pipeline.event_loop import AsyncBatches, CallThread
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import AsyncIteratorSource, IteratorSource, open_source

LONG = 20.0
THREES = PipelineConfig(batch_rows=3)


def numbers(low: int, high: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(low, high)]


async def ten() -> AsyncIterator[dict[str, Any]]:
    for row in numbers(0, 10):
        await asyncio.sleep(0)
        yield row


def ten_at_once() -> Iterator[dict[str, Any]]:
    yield from numbers(0, 10)


async def rows_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    return [row async for batch in pipeline for row in batch.to_pylist()]


class Stuck:
    """Rows, then none for ever; `left` is set when the generator is closed."""

    def __init__(self, rows: int) -> None:
        self.rows, self.stuck, self.left = rows, asyncio.Event(), False

    async def __call__(self) -> AsyncIterator[dict[str, Any]]:
        try:
            for row in numbers(0, self.rows):
                yield row
            self.stuck.set()
            await asyncio.Event().wait()
        finally:
            self.left = True


@pytest.mark.parametrize("source", [AsyncIteratorSource(ten), IteratorSource(ten_at_once)])
def test_an_async_loop_has_the_batches_of_a_loop_and_begins_anew_each_time(source: Any) -> None:
    pipeline = Pipeline(source, lambda row: {"n": row["n"] + 1}, config=THREES)
    expected = [batch.to_pylist() for batch in pipeline]

    async def main() -> None:
        for _ in range(2):
            assert [batch.to_pylist() async for batch in pipeline] == expected

    assert len(expected) == 4
    asyncio.run(main())


def test_a_state_between_awaited_batches_resumes_exactly() -> None:
    async def main() -> None:
        pipeline = Pipeline(AsyncIteratorSource(ten), config=THREES)
        states = [(batch.to_pylist()[-1]["n"] + 1, pipeline.state_dict()) async for batch in pipeline]
        assert [row for row, _ in states] == [3, 6, 9, 10]
        for row, state in states:
            resumed = Pipeline(AsyncIteratorSource(ten), config=THREES)
            resumed.load_state_dict(state)
            assert await rows_of(resumed) == numbers(row, 10)

    asyncio.run(main())


@pytest.mark.parametrize("cancelled_by", ["cancel", "timeout"])
def test_a_cancelled_loop_ends_at_once_closes_its_generator_and_is_resumed(cancelled_by: str) -> None:
    async def main() -> None:
        stuck = Stuck(5)
        pipeline = Pipeline(AsyncIteratorSource(stuck, max_wait_seconds=0.01))
        found: list[dict[str, Any]] = []

        async def loop() -> None:
            async with asyncio.timeout(0.05 if cancelled_by == "timeout" else None):
                async for batch in pipeline:
                    found.extend(batch.to_pylist())

        task = asyncio.create_task(loop())
        await stuck.stuck.wait()
        if cancelled_by == "cancel":
            while len(found) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
        with pytest.raises(TimeoutError if cancelled_by == "timeout" else asyncio.CancelledError):
            await task
        async with asyncio.timeout(30):
            while not stuck.left:  # closed by another task of this loop
                await asyncio.sleep(0.001)
        resumed = Pipeline(AsyncIteratorSource(stuck, max_wait_seconds=0.01))
        resumed._mark = pipeline._mark  # type: ignore[method-assign] # the same generator, which now ends
        stuck.rows = 10
        resumed.load_state_dict(pipeline.state_dict())
        async with aclosing(aiter(resumed)) as batches:
            while len(found) < 10:
                found.extend((await anext(batches)).to_pylist())
        assert found == numbers(0, 10)

    asyncio.run(main())


def test_a_batch_that_was_made_for_a_cancelled_task_is_the_next_one_again() -> None:
    made, position = threading.Event(), [0]

    def count(_: object) -> Iterator[int]:
        for number in range(3):
            position[0] += 1
            yield number

    class Seen:
        """An iterator that says when its caller has the item."""

        def __init__(self, items: Iterator[int]) -> None:
            self.items = items

        def __iter__(self) -> Seen:
            return self

        def __next__(self) -> int:
            item = next(self.items)
            if item == 1:
                made.set()
            return item

    def rewind(to: int) -> None:
        position[0] = to

    async def main() -> None:
        thread = CallThread()
        batches = AsyncBatches(
            thread, lambda loop: Seen(count(loop)), stop=lambda: None, mark=lambda: position[0], rewind=rewind
        )
        assert await anext(batches) == 0
        task = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        assert made.wait(LONG)  # the event loop is held, so the batch cannot be delivered
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert position == [1]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(main())


def test_a_cancelled_run_keeps_its_checkpoint_and_the_next_one_writes_every_row_once(tmp_path: Path) -> None:
    async def main() -> None:
        stuck = Stuck(7)

        def pipeline() -> Pipeline:
            sink = JsonlSink(tmp_path / "out.jsonl")
            return Pipeline(AsyncIteratorSource(endless_or_ten, max_wait_seconds=0.01), sink=sink)

        async def endless_or_ten() -> AsyncIterator[dict[str, Any]]:
            source = stuck() if not stuck.left else ten()
            async with aclosing(source):  # type: ignore[type-var]
                async for row in source:
                    yield row

        first = pipeline()
        task = asyncio.create_task(first.run_async(tmp_path / "state"))
        await stuck.stuck.wait()
        while first.snapshot()["stages"][-1]["rows_in"] < 7:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stuck.left
        assert not (tmp_path / "out.jsonl").exists()
        report = await pipeline().run_async(tmp_path / "state")
        assert report.resumed
        assert (tmp_path / "out.jsonl").read_text().count("\n") == 10

    asyncio.run(main())


def test_errors_of_the_generator_and_of_the_stages_travel_to_the_task() -> None:
    async def broken() -> AsyncIterator[dict[str, Any]]:
        yield {"n": 1}
        raise LookupError("no more")

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("by zero")

    async def main() -> None:
        with pytest.raises(StageError, match="no more"):
            await rows_of(Pipeline(AsyncIteratorSource(broken)))
        with pytest.raises(StageError, match="no more"):
            await Pipeline(AsyncIteratorSource(broken), sink=MemorySink()).run_async()
        with pytest.raises(StageError, match="by zero"):
            await Pipeline(AsyncIteratorSource(ten), fails, sink=MemorySink()).run_async()
        with pytest.raises(ConfigError, match="has a sink"):
            await rows_of(Pipeline(AsyncIteratorSource(ten), sink=MemorySink()))

    asyncio.run(main())


def test_the_event_loop_is_free_while_a_batch_or_a_run_is_awaited() -> None:
    async def main() -> None:
        free = threading.Event()

        def waits(row: dict[str, Any]) -> dict[str, Any]:
            assert free.wait(LONG)
            return row

        async def sets() -> None:
            free.set()

        assert len((await asyncio.gather(rows_of(Pipeline(AsyncIteratorSource(ten), waits)), sets()))[0]) == 10
        free.clear()
        sink = MemorySink()
        await asyncio.gather(Pipeline(AsyncIteratorSource(ten), waits, sink).run_async(), sets())
        assert len(sink.rows()) == 10

    asyncio.run(main())


def test_a_generator_that_never_waits_leaves_the_event_loop_free() -> None:
    async def main() -> None:
        turns, stop = 0, False

        async def busy() -> AsyncIterator[dict[str, Any]]:
            number = 0
            while not stop:
                yield {"n": number}
                number += 1

        async def other() -> None:
            nonlocal turns, stop
            for _ in range(5):
                turns += 1
                await asyncio.sleep(0)
            stop = True

        pipeline = Pipeline(AsyncIteratorSource(busy), sink=MemorySink(), budget="16 MiB")
        await asyncio.gather(pipeline.run_async(), other())
        assert turns == 5

    asyncio.run(main())


def test_a_generator_uses_connections_of_the_running_loop() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(b"%d\n" % (int(line) ** 2))
            await writer.drain()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            threads = set()

            async def squares() -> AsyncIterator[dict[str, Any]]:
                for number in range(20):
                    writer.write(b"%d\n" % number)
                    threads.add(threading.get_ident())
                    yield {"n": int(await reader.readline())}

            expected = [{"n": n * n} for n in range(20)]
            assert await rows_of(Pipeline(AsyncIteratorSource(squares), config=THREES)) == expected
            sink = MemorySink()
            await Pipeline(AsyncIteratorSource(squares), sink=sink).run_async()
            assert sink.rows() == expected
            assert threads == {threading.get_ident()}
            writer.close()
            await writer.wait_closed()
            await ended.wait()

    asyncio.run(main())


def test_without_a_running_loop_the_generator_has_one_of_its_own_in_one_thread() -> None:
    threads = set()

    async def seen() -> AsyncIterator[dict[str, Any]]:
        async for row in ten():
            threads.add(threading.get_ident())
            yield row

    async def opens() -> AsyncIterator[dict[str, Any]]:
        return seen()

    async def main() -> None:
        assert Pipeline(AsyncIteratorSource(seen), sink=MemorySink()).run().rows_out == 10

    assert sum(batch.num_rows for batch in Pipeline(AsyncIteratorSource(opens), config=THREES)) == 10
    assert len(threads) == 1
    asyncio.run(main())
    assert threading.get_ident() not in threads


def test_two_event_loops_run_at_once_and_two_pipelines_in_one() -> None:
    found: list[int] = []

    async def main() -> None:
        met = asyncio.Event()

        async def first() -> AsyncIterator[dict[str, Any]]:
            await met.wait()
            yield {"n": 1}

        async def second() -> AsyncIterator[dict[str, Any]]:
            met.set()
            yield {"n": 2}

        both = await asyncio.gather(*(rows_of(Pipeline(AsyncIteratorSource(make))) for make in (first, second)))
        barrier.wait(LONG)
        found.extend(row["n"] for rows in both for row in rows)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert sorted(found) == [1, 1, 2, 2]


@pytest.mark.parametrize("config", [PipelineConfig(), PipelineConfig(batch_rows=100)])
def test_rows_of_a_slow_generator_leave_after_the_longest_wait(config: PipelineConfig) -> None:
    async def main() -> None:
        seen = asyncio.Event()

        async def slow() -> AsyncIterator[dict[str, Any]]:
            yield {"n": 0}
            async with asyncio.timeout(LONG):
                await seen.wait()
            yield {"n": 1}

        pipeline = Pipeline(
            AsyncIteratorSource(slow), config=PipelineConfig(batch_rows=config.batch_rows, max_wait_seconds=0.01)
        )
        found = []
        async for batch in pipeline:
            found += batch.to_pylist()
            seen.set()
        assert found == numbers(0, 2)

    asyncio.run(main())


def test_the_number_of_threads_does_not_grow_with_the_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    begin = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread.name)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)

    async def threads_for(rows: int) -> int:
        async def some() -> AsyncIterator[dict[str, Any]]:
            for row in numbers(0, rows):
                yield row

        started.clear()
        config = PipelineConfig(batch_rows=1, workers=1)
        assert len(await rows_of(Pipeline(AsyncIteratorSource(some), config=config))) == rows
        return len(started)

    assert asyncio.run(threads_for(3)) == asyncio.run(threads_for(200))


def test_a_loop_that_is_left_stops_its_run_and_the_next_one_begins(tmp_path: Path) -> None:
    async def main() -> None:
        pipeline = Pipeline(AsyncIteratorSource(ten), config=THREES)
        async for batch in pipeline:
            assert batch.num_rows == 3
            break
        state = pipeline.state_dict()
        assert await rows_of(pipeline) == numbers(0, 10)
        pipeline.load_state_dict(state)
        assert await rows_of(pipeline) == numbers(3, 10)

    asyncio.run(main())


def test_progress_is_called_in_the_thread_of_the_event_loop_and_its_error_ends_the_run() -> None:
    async def main() -> None:
        threads = set()
        pipeline = Pipeline(AsyncIteratorSource(ten), sink=MemorySink())
        report = await pipeline.run_async(progress=lambda _: threads.add(threading.get_ident()))
        assert report.rows_out == 10
        assert threads == {threading.get_ident()}

        def fails(_: object) -> None:
            raise KeyError("progress")

        with pytest.raises(KeyError, match="progress"):
            await Pipeline(AsyncIteratorSource(Stuck(3)), sink=MemorySink()).run_async(progress=fails)

    asyncio.run(main())


def test_an_iterator_that_starts_once_says_so_and_a_wrong_one_is_refused_by_name() -> None:
    async def main() -> None:
        pipeline = Pipeline(AsyncIteratorSource(ten()))
        assert await rows_of(pipeline) == numbers(0, 10)
        with pytest.raises(ConfigError, match="AsyncIteratorSource a function"):
            await rows_of(pipeline)
        with pytest.raises(ConfigError, match="IteratorSource"):
            await rows_of(Pipeline(AsyncIteratorSource(lambda: numbers(0, 3))))  # type: ignore[arg-type,return-value]

    asyncio.run(main())
    for wrong in (ten, ten()):
        with pytest.raises(ConfigError, match="AsyncIteratorSource"):
            IteratorSource(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="IteratorSource reads"):
        AsyncIteratorSource(3)  # type: ignore[arg-type]
    assert repr(open_source(ten)) == "AsyncIteratorSource(ten)"


def test_a_generator_whose_inner_task_is_cancelled_is_an_error_and_not_the_end() -> None:
    async def main() -> None:
        async def cancels() -> AsyncIterator[dict[str, Any]]:
            yield {"n": 0}
            inner = asyncio.ensure_future(asyncio.sleep(LONG))
            inner.cancel()
            await inner

        with pytest.raises(StoppedError, match="cancelled"):
            await rows_of(Pipeline(AsyncIteratorSource(cancels)))

    asyncio.run(main())


def test_record_batches_that_are_awaited_are_not_copied() -> None:
    batch = pa.RecordBatch.from_pydict({"n": list(range(1000))})

    async def one() -> AsyncIterator[pa.RecordBatch]:
        yield batch

    async def main() -> None:
        async for got in Pipeline(AsyncIteratorSource(one)):
            assert got.column(0).buffers()[1].address == batch.column(0).buffers()[1].address

    asyncio.run(main())
