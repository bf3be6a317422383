"""Loaders in event loops: `async for batch in loader`."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.batching.batch import TrainingBatch
from penstock.loaders import DataLoader, MixedDataLoader, PretrainDataLoader
from penstock.sources import AsyncIteratorSource, MemorySource

LONG = 20.0
TEXTS = [{"text": f"text number {number} of some"} for number in range(12)]
OPTIONS: dict[str, Any] = {"chunk_size": 8, "batch_size": 4, "seed": 3}


def texts(**options: Any) -> DataLoader:
    return PretrainDataLoader(MemorySource(TEXTS), "byte", **OPTIONS | options)


def mixture() -> DataLoader:
    return MixedDataLoader({"a": texts(), "b": texts(seed=4)}, {"a": 3, "b": 1}, batch_size=4)


LOADERS = {
    "prepared": texts,
    "prefetched": lambda: texts(prefetch=2),
    "streamed": lambda: texts(streaming=True),
    "mixture": mixture,
}


def ids(batch: Any) -> list[Any]:
    found: list[Any] = np.asarray(batch["input_ids"]).tolist()
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_an_async_loop_over_a_loader_has_its_batches_and_states(kind: str) -> None:
    make = LOADERS[kind]
    with make() as plain:
        expected = [(ids(batch), plain.state_dict()) for _ in range(2) for batch in plain]

    async def main() -> None:
        with make() as loader:
            found = []
            for _ in range(2):
                async for batch in loader:
                    found.append((ids(batch), loader.state_dict()))
            assert found == expected
            for number, (_, state) in enumerate(expected[:3]):
                loader.load_state_dict(state)
                async for batch in loader:
                    assert ids(batch) == expected[number + 1][0]
                    break

    assert len(expected) > 4
    asyncio.run(main())


def test_a_loader_with_four_methods_has_async_loops_too() -> None:
    class Own(DataLoader):
        def __init__(self) -> None:
            pass

        def get_iterator(self) -> Iterator[Any]:
            return iter([1, 2, 3])

    async def main() -> None:
        assert [batch async for batch in Own()] == [1, 2, 3]

    asyncio.run(main())


def test_a_loader_that_was_left_goes_on_after_the_last_batch_and_can_be_pickled() -> None:
    async def main() -> None:
        with texts() as loader, texts() as other:
            expected = [ids(batch) for batch in other]
            async for batch in loader:
                assert ids(batch) == expected[0]
                break
            assert loader.step == 1
            with pickle.loads(pickle.dumps(loader)) as copy:  # noqa: S301 - as a worker process has it
                assert [ids(batch) async for batch in copy] == expected[1:]
            assert [ids(batch) for batch in loader] == expected[1:]

    asyncio.run(main())


def test_the_second_loop_over_a_loader_ends_the_first() -> None:
    async def main() -> None:
        with texts() as loader:
            first, second = aiter(loader), aiter(loader)
            await anext(first)
            await anext(second)
            with pytest.raises(RuntimeError, match="another loop"):
                await anext(first)
            await second.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(second)

    asyncio.run(main())


class Words:
    """Texts, of which those after `rows` come when `more` is set."""

    def __init__(self, rows: int) -> None:
        self.rows, self.more, self.waits, self.left = rows, False, threading.Event(), 0

    async def __call__(self) -> AsyncIterator[dict[str, Any]]:
        try:
            for number, row in enumerate(TEXTS):
                while number == self.rows and not self.more:
                    self.waits.set()
                    await asyncio.sleep(0.001)
                yield row
        finally:
            self.left += 1


def test_a_cancelled_task_that_awaits_a_batch_of_a_slow_generator_leaves_a_loader_that_goes_on() -> None:
    options: dict[str, Any] = {"streaming": True, "shuffle": False, "batch_size": 1}
    with texts(**options) as plain:
        expected = [ids(batch) for batch in plain]

    async def main() -> None:
        words = Words(6)
        with PretrainDataLoader(
            AsyncIteratorSource(words, max_wait_seconds=0.01), "byte", **OPTIONS | options
        ) as loader:
            found: list[Any] = []

            async def loop() -> None:
                async for batch in loader:
                    found.append(ids(batch))

            task = asyncio.create_task(loop())
            while not (words.waits.is_set() and len(found) > 3):
                await asyncio.sleep(0.001)
            seen = -1
            while seen != len(found):
                seen = len(found)
                await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert found == expected[: len(found)]
            assert len(found) < len(expected)
            words.more = True
            await loop()
            assert found == expected

    asyncio.run(main())


def test_the_event_loop_is_free_while_a_batch_of_a_loader_is_awaited() -> None:
    async def main() -> None:
        free = threading.Event()

        class Slow(DataLoader):
            def __init__(self) -> None:
                pass

            def get_iterator(self) -> Iterator[TrainingBatch]:
                assert free.wait(LONG)
                return iter([])

        async def sets() -> None:
            free.set()

        async def loop() -> None:
            async for _ in Slow():
                pass

        await asyncio.gather(loop(), sets())
        assert free.is_set()

    asyncio.run(main())
