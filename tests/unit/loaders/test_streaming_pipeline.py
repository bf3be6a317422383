from __future__ import annotations

import gc
import json
import logging
import math
import re
import subprocess
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
from tests.waits import wait_for

from penstock.errors import ConfigError, DataError, ResumeError, StageError, StalledError
from penstock.loaders import sample_stream
from penstock.loaders.rate_limit import RateLimit
from penstock.loaders.streaming import StreamingConfig, StreamingPipeline
from penstock.memory import MemoryBudget
from penstock.sources.memory import MemorySource

LONG = 300.0
SMALL = StreamingConfig(buffer_size=64, chunk_size=16, num_workers=3)


class Rows:
    """A dataset that remembers what was asked of it."""

    def __init__(self, rows: int, make: Callable[[int], Any] = lambda row: {"row": row}) -> None:
        self.rows, self.make = rows, make
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        self.asked.append(row)
        return self.make(row)


OTHERS: set[threading.Thread] = set()
"""Threads that were there before a test, such as those of queues that other tests opened."""


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())
    yield
    assert not own_threads()


def own_threads(name: str = "penstock") -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name) and thread not in OTHERS]


def rows_of(pipeline: StreamingPipeline) -> list[int]:
    return [sample["row"] for sample in pipeline]


# -- the promised block, order, lifetimes --------------------------------------------------------------------------


def test_the_block_of_the_seed_runs_as_printed() -> None:
    def make(row: int) -> dict[str, Any]:
        tokens = np.arange(row % 5 + 1, dtype=np.int32)
        return {"input_ids": mx.array(tokens), "attention_mask": mx.ones(len(tokens)), "labels": row % 2}

    dataset, seen = Rows(2000, make), []

    config = StreamingConfig(
        buffer_size=1024,
        chunk_size=256,
        num_workers=4,
        target_throughput=1_000_000,  # samples/sec
    )

    pipeline = StreamingPipeline(dataset, config)
    pipeline.start()

    for sample in pipeline:
        seen.append(sample)

    pipeline.stop()

    assert len(seen) == 2000
    assert all(isinstance(sample["input_ids"], mx.array) for sample in seen)
    assert seen[7]["input_ids"].tolist() == [0, 1, 2]
    assert sorted(dataset.asked) == list(range(2000)), "each sample is made exactly once"


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_samples_come_in_the_order_of_the_dataset_whatever_the_workers(workers: int, chunk: int) -> None:
    delays = np.random.default_rng(0).random(200) * 0.001

    def make(row: int) -> dict[str, int]:
        time.sleep(float(delays[row]))
        return {"row": row}

    config = StreamingConfig(buffer_size=64, chunk_size=chunk, num_workers=workers)
    assert rows_of(StreamingPipeline(Rows(200, make), config)) == list(range(200))


def test_an_empty_dataset_has_no_samples() -> None:
    assert list(StreamingPipeline(Rows(0))) == []


def test_iterating_twice_gives_everything_twice() -> None:
    pipeline = StreamingPipeline(Rows(100), SMALL)
    assert rows_of(pipeline) == rows_of(pipeline) == list(range(100))


def test_starting_twice_is_starting_once() -> None:
    dataset = Rows(100)
    pipeline = StreamingPipeline(dataset, SMALL)
    assert pipeline.start() is pipeline.start()
    assert rows_of(pipeline) == list(range(100))
    assert sorted(dataset.asked) == list(range(100))


def test_start_reads_ahead_before_anybody_asks() -> None:
    dataset = Rows(1000)
    with StreamingPipeline(dataset, SMALL) as pipeline:
        assert not dataset.asked
        pipeline.start()
        wait_for(lambda: len(dataset.asked) >= 30)
        assert pipeline.running
        assert next(iter(pipeline)) == {"row": 0}
    assert not pipeline.running


def test_stop_before_start_and_twice_does_nothing() -> None:
    pipeline = StreamingPipeline(Rows(50), SMALL)
    pipeline.stop()
    pipeline.stop()
    assert rows_of(pipeline) == list(range(50))
    pipeline.stop()


def test_stop_right_after_start_ends_every_thread() -> None:
    for _ in range(20):
        pipeline = StreamingPipeline(Rows(10_000), SMALL).start()
        pipeline.stop()
        assert not own_threads()


def test_stop_in_the_middle_ends_every_thread_and_the_loop() -> None:
    dataset = Rows(10_000)
    pipeline = StreamingPipeline(dataset, SMALL)
    seen = []
    for sample in pipeline:
        seen.append(sample["row"])
        if len(seen) == 100:
            pipeline.stop()
            assert not own_threads()
    assert seen == list(range(100))
    assert len(dataset.asked) < 300
    assert rows_of(pipeline)[:3] == [0, 1, 2], "the next loop begins again"


def test_stop_from_another_thread_ends_a_loop_that_waits() -> None:
    waiting, go = threading.Event(), threading.Event()

    def make(row: int) -> dict[str, int]:
        if row == 20:
            waiting.set()
            assert go.wait(LONG)
        return {"row": row}

    pipeline = StreamingPipeline(Rows(100_000, make), SMALL)

    def stop() -> None:
        assert waiting.wait(LONG)
        threading.Timer(0.1, go.set).start()
        pipeline.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    seen = rows_of(pipeline)
    stopping.join()
    assert seen == list(range(len(seen)))
    assert len(seen) <= 20


def test_leaving_the_loop_ends_every_thread() -> None:
    for sample in StreamingPipeline(Rows(10_000), SMALL):
        if sample["row"] == 50:
            break
    del sample


def test_a_pipeline_that_is_forgotten_ends_its_threads(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Rows(100_000)
    pipeline = StreamingPipeline(dataset, SMALL).start()
    wait_for(lambda: len(dataset.asked) > 30)
    del pipeline
    with caplog.at_level(logging.WARNING):
        gc.collect()
        wait_for(lambda: not own_threads())
    assert not caplog.records


@pytest.mark.parametrize("left", ["next(it)", "list(islice(it, 3))", "p.start(); del it"])
def test_a_process_ends_while_a_loop_is_open(left: str) -> None:
    code = f"""
from itertools import islice
from penstock.loaders.streaming import StreamingPipeline
p = StreamingPipeline([{{"row": row}} for row in range(100_000)])
it = iter(p)
{left}
print("the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=True)
    assert (done.stdout, done.stderr) == ("the end\n", "")


@pytest.mark.parametrize("leave", ["stop", "break"])
def test_stopping_waits_for_a_sample_and_not_for_a_chunk(leave: str) -> None:
    busy, go = threading.Event(), threading.Event()

    def make(row: int) -> dict[str, int]:
        if row == 20:
            busy.set()
            assert go.wait(LONG)
        return {"row": row}

    dataset = Rows(1000, make)
    pipeline = StreamingPipeline(dataset, buffer_size=1000, chunk_size=500, num_workers=1)

    def release() -> None:
        wait_for(lambda: not pipeline.running or pipeline.stats()["running"] is False)
        go.set()

    releasing = threading.Thread(target=release)
    loop = iter(pipeline)
    next(loop)
    releasing.start()
    assert busy.wait(LONG)
    pipeline.stop() if leave == "stop" else loop.close()  # type: ignore[attr-defined]
    releasing.join()
    assert dataset.asked == list(range(21))


def test_an_iterable_that_hangs_is_left_behind_and_cannot_disturb_the_next_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sample_stream, "_STOP_SECONDS", 0.1)
    hanging, go, loops = threading.Event(), threading.Event(), []

    def items() -> Iterator[dict[str, int]]:
        loops.append(1)
        first = len(loops) == 1
        for row in range(100):
            if row == 10 and first:
                hanging.set()
                assert go.wait(LONG)
            yield {"row": row}

    pipeline = StreamingPipeline(items, SMALL)
    for _ in pipeline:
        assert hanging.wait(LONG)
        break
    assert "abandoned" in caplog.text
    loop = iter(pipeline)
    seen = [next(loop)["row"]]
    go.set()
    wait_for(lambda: len(own_threads()) <= 2)
    seen.extend(sample["row"] for sample in loop)
    assert seen == list(range(100))


def test_two_loops_at_once_are_an_error() -> None:
    pipeline = StreamingPipeline(Rows(100), SMALL)
    first = iter(pipeline)
    next(first)
    with pytest.raises(ConfigError):
        iter(pipeline)
    pipeline.stop()
    assert list(first) == []


# -- memory --------------------------------------------------------------------------------------------------------


def test_no_more_than_the_buffer_is_made_ahead_of_a_slow_consumer() -> None:
    dataset = Rows(1000)
    config = StreamingConfig(buffer_size=40, chunk_size=8, num_workers=3)
    pipeline = StreamingPipeline(dataset, config)
    furthest = 0
    for number, _ in enumerate(pipeline):
        if number % 50 == 0:
            time.sleep(0.02)  # a chance to read too far; not needed for the test to be right
        furthest = max(furthest, len(dataset.asked) - number)
    assert furthest <= 40
    assert sorted(dataset.asked) == list(range(1000))


def test_memory_stays_inside_the_budget_with_a_slow_consumer() -> None:
    budget = MemoryBudget("8 MiB")
    width = 100_000
    dataset = Rows(300, lambda row: {"row": row, "image": np.full(width, row % 256, np.uint8)})
    pipeline = StreamingPipeline(dataset, StreamingConfig(budget=budget))
    for number, sample in enumerate(pipeline):
        assert sample["row"] == number
        assert sample["image"][0] == number % 256
        if number % 30 == 0:
            time.sleep(0.02)
            assert budget.used <= budget.capacity
        # What was fetched and not taken fits, though the buffer would hold 1024 of them.
        assert (len(dataset.asked) - number) * width < budget.capacity
    assert 0 < budget.peak <= budget.capacity
    assert budget.used == 0


def test_a_sample_larger_than_the_budget_comes_through() -> None:
    dataset = Rows(5, lambda row: {"row": row, "image": np.zeros(1 << 20, np.uint8)})
    assert rows_of(StreamingPipeline(dataset, StreamingConfig(budget="64 KiB"))) == list(range(5))


def growing(row: int) -> dict[str, Any]:
    return {"row": row, "x": np.full(10 if row < 100 else 60_000, row % 256, np.uint8)}


def test_rows_that_grow_stay_inside_the_budget() -> None:
    budget, dataset = MemoryBudget("4 MiB"), Rows(500, growing)
    for number, sample in enumerate(StreamingPipeline(dataset, budget=budget, buffer_size=256, chunk_size=64)):
        assert sample["row"] == number
        assert sample["x"].tolist() == growing(number)["x"].tolist()
    assert sorted(dataset.asked) == list(range(500)), "each is made once, also those of a chunk that was cut short"
    assert budget.peak <= budget.capacity
    assert budget.used == 0


def test_rows_that_grow_are_skipped_and_counted_once_each() -> None:
    def make(row: int) -> dict[str, Any]:
        if row in (50, 150):
            raise ValueError("no such row")
        return growing(row)

    budget, dataset = MemoryBudget("4 MiB"), Rows(200, make)
    pipeline = StreamingPipeline(dataset, budget=budget, on_error="skip")
    assert rows_of(pipeline) == [row for row in range(200) if row not in (50, 150)]
    assert sorted(dataset.asked) == list(range(200))
    assert pipeline.stats()["skipped"] == {"ValueError": 2}
    assert budget.peak <= budget.capacity


@pytest.mark.parametrize("stop_at", [90, 101, 103, 120, 170])
def test_a_state_amid_rows_that_grow_goes_on_with_the_next_sample(stop_at: int) -> None:
    def make() -> StreamingPipeline:
        return StreamingPipeline(Rows(200, growing), budget="4 MiB", buffer_size=256, chunk_size=64)

    first = make()
    loop = iter(first)
    seen = [next(loop)["row"] for _ in range(stop_at)]
    first.stop()
    second = make()
    second.load_state_dict(first.state_dict())
    assert seen + rows_of(second) == list(range(200))


def test_an_iterable_whose_rows_grow_is_taken_a_few_at_a_time() -> None:
    budget = MemoryBudget("4 MiB")
    assert rows_of(StreamingPipeline(map(growing, range(200)), budget=budget)) == list(range(200))
    assert 60_000 < budget.peak <= budget.capacity
    assert budget.used == 0


# -- errors --------------------------------------------------------------------------------------------------------


def broken_at(bad: int) -> Callable[[int], dict[str, int]]:
    def make(row: int) -> dict[str, int]:
        if row == bad:
            raise KeyError("Age")
        return {"row": row}

    return make


@pytest.mark.parametrize("bad", [0, 1, 77])
def test_an_error_in_the_dataset_names_the_row(bad: int, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = StreamingPipeline(Rows(100_000, broken_at(bad)), SMALL)
    seen: list[int] = []
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(StageError, match=rf"row {bad}.*'Age'") as caught,
    ):
        seen.extend(sample["row"] for sample in pipeline)
    assert not caplog.records, "no thread was left behind"
    assert isinstance(caught.value.__cause__, KeyError)
    assert seen == list(range(len(seen)))
    assert len(seen) <= bad


def test_an_error_in_an_iterable_names_the_row() -> None:
    def make() -> Iterator[dict[str, int]]:
        yield from ({"row": row} for row in range(30))
        raise OSError("gone")

    with pytest.raises(StageError, match=r"\bmake\b.*row 30\b"):
        list(StreamingPipeline(make, SMALL))


def test_an_array_that_another_thread_has_not_computed_is_an_error_with_a_remedy() -> None:
    kept = mx.zeros((4, 3)) + 1
    with pytest.raises(DataError, match=r"row 0\b.*mlx\.core\.eval"):
        list(StreamingPipeline(Rows(4, lambda row: {"x": kept[row]}), SMALL))
    mx.eval(kept)
    assert [sample["x"].tolist() for sample in StreamingPipeline(Rows(4, lambda row: {"x": kept[row]}))] == [
        [1.0] * 3
    ] * 4


def test_samples_that_cannot_be_made_are_left_out_and_counted_when_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    def make(row: int) -> dict[str, Any]:
        if row % 10 == 0:
            raise ValueError(f"row {row} is odd")
        if row % 10 == 5:
            raise DataError("unreadable")
        return {"row": row}

    config = StreamingConfig(buffer_size=16, chunk_size=8, num_workers=2, on_error="skip")
    pipeline = StreamingPipeline(Rows(200, make), config)
    with caplog.at_level(logging.WARNING, "penstock.loaders"):
        assert rows_of(pipeline) == [row for row in range(200) if row % 10 not in (0, 5)]
    assert pipeline.stats()["skipped"] == {"ValueError": 20, "DataError": 20}
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"buffer_size": 0}, "buffer_size"),
        ({"chunk_size": -1}, "chunk_size"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": True}, "num_workers"),
        ({"buffer_size": 10, "chunk_size": 20}, r"\b20\b.*\b10\b"),
        ({"target_throughput": 0}, "target_throughput"),
        ({"target_throughput": math.nan}, "target_throughput"),
        ({"on_error": "ignore"}, "on_error"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamingConfig(**wrong)


def test_options_may_be_passed_by_name() -> None:
    assert StreamingPipeline(Rows(9), chunk_size=8).config == StreamingConfig(chunk_size=8)
    assert StreamingPipeline(Rows(9), SMALL, num_workers=1).config == StreamingConfig(
        buffer_size=64, chunk_size=16, num_workers=1
    )
    with pytest.raises(ConfigError, match=r"'num_worker'.*'num_workers'"):
        StreamingPipeline(Rows(9), num_worker=3)
    with pytest.raises(ConfigError, match=r"config.*StreamingConfig"):
        StreamingPipeline(Rows(9), 8)  # type: ignore[arg-type]


def test_what_cannot_be_streamed_is_refused() -> None:
    with pytest.raises(ConfigError):
        StreamingPipeline(7)


# -- other inputs --------------------------------------------------------------------------------------------------

TABLE = pa.table({"row": list(range(40)), "text": [f"text {row}" for row in range(40)]})


def test_tables_files_sources_and_iterables_are_streamed_too(tmp_path: Path) -> None:
    rows = TABLE.to_pylist()
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (
        TABLE,
        TABLE.to_pandas(),
        TABLE.to_pydict(),
        MemorySource(TABLE),
        path,
        str(path),
        rows,
        lambda: iter(rows),
        iter(rows),
    ):
        assert list(StreamingPipeline(data, SMALL)) == rows, type(data)


def test_an_endless_iterable_is_read_no_further_than_the_buffer() -> None:
    made = []

    def endless() -> Iterator[dict[str, int]]:
        row = 0
        while True:
            made.append(row)
            yield {"row": row}
            row += 1

    with StreamingPipeline(endless, StreamingConfig(buffer_size=20, chunk_size=5)) as pipeline:
        for number, sample in enumerate(pipeline):
            assert sample["row"] == number
            assert len(made) <= number + 21
            if number == 200:
                break


def test_what_an_iterable_makes_slowly_is_passed_on_before_a_chunk_is_full() -> None:
    more = threading.Event()

    def slow() -> Iterator[int]:
        for row in range(3):
            time.sleep(2 * sample_stream._GATHER_SECONDS)
            yield row
        assert more.wait(LONG)
        yield 3

    loop = iter(StreamingPipeline(slow, buffer_size=64, chunk_size=16))
    assert [next(loop) for _ in range(3)] == [0, 1, 2]
    more.set()
    assert list(loop) == [3]


def test_an_iterator_runs_only_once_and_says_so() -> None:
    pipeline = StreamingPipeline(iter([{"row": 0}]), SMALL)
    assert rows_of(pipeline) == [0]
    with pytest.raises(ConfigError):
        rows_of(pipeline)


def test_samples_of_any_type_are_passed_on_with_arrays_of_their_own() -> None:
    samples: list[Any] = ["text", 3, None, [1, "a"], {"x": {1}}, UserDict(x=1), object(), {1: 2}, (1, "b")]
    out = list(StreamingPipeline(Rows(len(samples), lambda row: samples[row]), SMALL))
    assert out == samples
    assert [type(got) for got in out] == [type(sample) for sample in samples]
    array = np.ones(2)
    ((_, got),) = StreamingPipeline(Rows(1, lambda row: (row, array)), SMALL)
    assert got.tolist() == [1, 1]
    assert not np.shares_memory(got, array)


# -- arrays ---------------------------------------------------------------------------------------------------------

MLX_DTYPES = [
    *(mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.float64, mx.complex64),
]


@pytest.mark.parametrize("dtype", MLX_DTYPES, ids=str)
def test_lazy_mlx_arrays_of_every_type_can_be_used_by_the_loop(dtype: Any) -> None:
    def make(row: int) -> dict[str, Any]:
        array = mx.array(np.arange(row % 4, dtype=np.int8)).astype(dtype, stream=mx.cpu)
        return {"x": array, "nested": [{"y": array + array}]}

    for row, sample in enumerate(StreamingPipeline(Rows(20, make), SMALL)):
        assert sample["x"].dtype == dtype
        assert sample["x"].astype(mx.bool_).tolist() == [0, 1, 1, 1][: row % 4]
        assert len(sample["nested"][0]["y"].tolist()) == row % 4


# -- pace ----------------------------------------------------------------------------------------------------------


class Time:
    """A clock that only moves when somebody sleeps, or is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_samples_are_held_back_to_the_target() -> None:
    fake = Time()
    config = StreamingConfig(buffer_size=64, chunk_size=16, target_throughput=50)
    pipeline = StreamingPipeline(Rows(200), config, clock=fake.clock, sleep=fake.sleep)
    times = [fake.now for _ in pipeline]
    assert times == pytest.approx([100 + row / 50 for row in range(200)])
    stats = pipeline.stats()
    assert stats["behind"] is False
    assert stats["samples_per_sec"] == pytest.approx(50, rel=0.02)
    assert stats["paced_seconds"] == pytest.approx(199 / 50)
    assert "is met" in stats["reason"]


def test_at_a_high_target_samples_come_a_few_at_a_time_and_on_average_right() -> None:
    fake = Time()
    pace = RateLimit(10_000, fake.clock, fake.sleep)
    for _ in range(5000):
        pace.step()
    assert min(fake.slept) >= 0.002
    assert fake.now == pytest.approx(100.5, abs=0.003)


def test_after_a_pause_only_a_second_is_caught_up_on() -> None:
    fake = Time()
    pace = RateLimit(100, fake.clock, fake.sleep)
    pace.step()
    fake.now += 600
    before = fake.now
    for _ in range(300):
        pace.step()
    assert fake.now - before == pytest.approx(2, abs=0.05)


def test_the_figures_are_of_this_moment_while_a_loop_waits() -> None:
    fake, reports = Time(), []
    pace = RateLimit(100, fake.clock, fake.sleep, lambda: reports.append(fake.now))
    fake.now += 10  # nobody asks yet: that is not slowness
    assert (pace.behind, pace.recent) == (False, None)
    pace.begin()
    for _ in range(150):
        pace.step()
    assert (pace.behind, reports) == (False, [])
    pace.wait()
    fake.now += 4
    assert pace.behind is True
    assert pace.recent is not None
    assert pace.recent < 40
    assert pace.wait_share > 0.8
    assert pace.waited == pytest.approx(4)
    pace.look()
    pace.look()
    assert reports == [fake.now]
    pace.arrived()
    fake.now += 1
    assert pace.waited == pytest.approx(4)
    assert pace.wait_share < 0.1


def test_a_source_that_stalls_is_reported_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    fake, go = Time(), threading.Event()
    seen: list[Any] = []

    def make(row: int) -> dict[str, int]:
        if row == 20:
            assert go.wait(LONG)
        return {"row": row}

    config = StreamingConfig(buffer_size=8, chunk_size=4, num_workers=1, target_throughput=1000)
    pipeline = StreamingPipeline(Rows(30, make), config, clock=fake.clock, sleep=fake.sleep)

    def loop() -> None:
        for sample in pipeline:
            seen.append(sample)

    looping = threading.Thread(target=loop)
    with caplog.at_level(logging.WARNING, "penstock.loaders.streaming"):
        looping.start()
        wait_for(lambda: len(seen) == 19 and pipeline._last.rate._wait[1] is not None)  # type: ignore[union-attr]
        assert pipeline.stats()["behind"] is False
        fake.now += 30
        wait_for(lambda: "row 20 of Rows" in pipeline.stats()["reason"])
        stats = pipeline.stats()
        assert (stats["behind"], stats["samples"]) == (True, 19)
        assert stats["waited_seconds"] == pytest.approx(30)
        assert stats["recent_samples_per_sec"] < 1
        wait_for(lambda: caplog.records)
        go.set()
        looping.join(LONG)
    assert "1000" in caplog.messages[0]
    assert len(seen) == 30


def test_a_sample_that_hangs_is_an_error_that_names_it() -> None:
    go = threading.Event()

    def make(row: int) -> dict[str, int]:
        if row == 20:
            assert go.wait(LONG)
        return {"row": row}

    pipeline = StreamingPipeline(Rows(100, make), SMALL, stall_seconds=0.1)
    with pytest.raises(StalledError, match=r"row 20 of Rows(.|\n)*go\.wait"):
        rows_of(pipeline)
    go.set()
    wait_for(lambda: not own_threads())


def test_all_workers_are_busy_with_a_buffer_smaller_than_their_chunks() -> None:
    met = threading.Barrier(4)

    def make(row: int) -> dict[str, int]:
        if row:
            met.wait(LONG)
        return {"row": row}

    assert rows_of(StreamingPipeline(Rows(17, make), buffer_size=8, chunk_size=8, num_workers=4)) == list(range(17))


def test_a_full_budget_is_named_as_the_reason() -> None:
    budget = MemoryBudget("1 MiB")
    pipeline = StreamingPipeline(Rows(3, lambda row: {"x": bytes(1000)}), budget=budget)
    list(pipeline)
    with budget.reserve(1 << 20):
        assert "budget" in pipeline._feed.bottleneck()


def test_a_slow_loop_is_reported_once_as_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    fake = Time()
    config = StreamingConfig(buffer_size=64, chunk_size=16, target_throughput=1000)
    pipeline = StreamingPipeline(Rows(100), config, clock=fake.clock, sleep=fake.sleep)
    with caplog.at_level(logging.WARNING, "penstock.loaders.streaming"):
        for _ in pipeline:
            fake.now += 0.1
    assert len(caplog.records) == 1
    assert re.search(r"10\.0 samples.*1000", caplog.messages[0])
    assert "100%" in caplog.messages[0]
    stats = pipeline.stats()
    assert stats["behind"] is True
    assert stats["recent_samples_per_sec"] == pytest.approx(10, rel=0.1)


def test_a_slow_dataset_is_reported_with_the_reason_of_the_engine() -> None:
    def make(row: int) -> dict[str, int]:
        time.sleep(0.002)
        return {"row": row}

    list(StreamingPipeline(Rows(1)))  # what is imported on first use does not count
    config = StreamingConfig(buffer_size=16, chunk_size=8, num_workers=1, target_throughput=100_000)
    pipeline = StreamingPipeline(Rows(150, make), config)
    assert rows_of(pipeline) == list(range(150))
    stats = pipeline.stats()
    assert stats["behind"] is True
    assert "Rows(150 samples)" in stats["reason"]
    assert stats["waited_seconds"] > 0.5 * stats["seconds"]


def test_without_a_target_nothing_is_behind() -> None:
    pipeline = StreamingPipeline(Rows(50), SMALL)
    assert pipeline.stats() == {"samples": 0, "running": False}
    list(pipeline)
    stats = pipeline.stats()
    assert (stats["samples"], stats["behind"], stats["running"]) == (50, None, False)


# -- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "iterable", "table"])
@pytest.mark.parametrize("stop_at", [0, 1, 15, 16, 37, 99, 100])
def test_a_saved_state_goes_on_with_the_next_sample(kind: str, stop_at: int) -> None:
    def make(config: StreamingConfig) -> StreamingPipeline:
        rows = [{"row": row} for row in range(100)]

        def items() -> Iterator[dict[str, int]]:
            return iter(rows)

        data: Any = {"rows": Rows(100), "iterable": items, "table": pa.Table.from_pylist(rows)}[kind]
        return StreamingPipeline(data, config)

    first = make(SMALL)
    seen: list[int] = []
    state = first.state_dict()
    for sample in first:
        if len(seen) == stop_at:
            break
        seen.append(sample["row"])
        state = first.state_dict()
    first.stop()
    other = StreamingConfig(buffer_size=30, chunk_size=5, num_workers=1)
    second = make(other)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert second.state_dict() == state
    again = []
    for sample in second:
        again.append(sample["row"])
        if len(again) == 10:
            break
    second.stop()
    state = second.state_dict()
    assert state["samples"] == len(seen) + len(again)
    third = make(SMALL)
    third.load_state_dict(state)
    assert seen + again + rows_of(third) == list(range(100))


def test_the_state_of_a_second_pass_is_not_that_of_the_first() -> None:
    pipeline = StreamingPipeline(Rows(100), SMALL)
    list(pipeline)
    loop = iter(pipeline)
    next(loop)
    state = pipeline.state_dict()
    pipeline.stop()
    pipeline.load_state_dict(state)
    assert rows_of(pipeline) == list(range(1, 100))


def test_a_resumed_pipeline_has_a_state_in_its_second_loop_too() -> None:
    first = StreamingPipeline(Rows(100), SMALL)
    loop = iter(first)
    for _ in range(37):
        next(loop)
    first.stop()
    second = StreamingPipeline(Rows(100), SMALL)
    second.load_state_dict(first.state_dict())
    assert rows_of(second) == list(range(37, 100))
    loop = iter(second)
    next(loop)
    state = second.state_dict()
    second.stop()
    assert state["samples"] == 1
    third = StreamingPipeline(Rows(100), SMALL)
    third.load_state_dict(state)
    assert rows_of(third) == list(range(1, 100))


def test_a_state_of_something_else_is_refused() -> None:
    pipeline = StreamingPipeline(Rows(100), SMALL)
    state = pipeline.state_dict()
    with pytest.raises(ResumeError, match=r"100.*99"):
        StreamingPipeline(Rows(99), SMALL).load_state_dict(state)
    with pytest.raises(ResumeError, match="StreamingPipeline"):
        pipeline.load_state_dict({"version": 99})
    pipeline.start()
    with pytest.raises(ResumeError):
        pipeline.load_state_dict(state)
    pipeline.stop()
