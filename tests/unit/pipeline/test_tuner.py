"""Batch sizes and worker counts follow the bottleneck, inside the budget."""

from __future__ import annotations

import time

import pytest

from penstock import PipelineConfig
from penstock.pipeline import context as tuning
from penstock.pipeline.context import Tuner

MIB = 1 << 20


def tuner(limit: int = 512 * MIB, **options: object) -> Tuner:
    return Tuner(PipelineConfig(**options), lambda: limit)  # type: ignore[arg-type]


def test_batches_grow_while_they_are_done_in_no_time_and_shrink_when_they_take_long() -> None:
    one = tuner()
    start = one.batch_bytes
    one.adjust_batch(0.001)
    assert one.batch_bytes == 2 * start
    one.adjust_batch(0.1)
    assert one.batch_bytes == 2 * start
    for _ in range(20):
        one.adjust_batch(0.001)
    assert one.batch_bytes <= 512 * MIB // 128
    for _ in range(20):
        one.adjust_batch(1.0)
    assert one.batch_bytes == 32 << 10


def test_a_shrunken_budget_shrinks_the_batches_at_once() -> None:
    limit = [512 * MIB]
    one = Tuner(PipelineConfig(), lambda: limit[0])
    assert one.batch_bytes == MIB
    limit[0] = 16 * MIB
    assert one.batch_bytes == 128 << 10


def test_rows_are_asked_for_by_their_width() -> None:
    one = tuner()
    assert one.batch_rows == 256
    one.saw_read(256, 256 * 1024)
    assert one.batch_rows == one.batch_bytes // 1024
    one.saw_read(10, 10 * MIB)  # wider rows count at once
    assert one.batch_rows == 1


def test_a_fixed_batch_size_is_kept() -> None:
    one = tuner(batch_rows=77)
    one.saw_read(77, 77 * MIB)
    assert one.batch_rows == 77


def test_what_is_reserved_follows_what_was_needed_quickly_up_and_slowly_down() -> None:
    one = tuner()
    before = one.to_reserve(100)
    one.saw_need(100, 1000)
    assert one.to_reserve(100) == 1500 > before
    one.saw_need(100, 200)
    assert 1400 < one.to_reserve(100) < 1500


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [time.monotonic()]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])
    return now


def test_workers_are_added_when_work_waits_and_kept_if_that_helped(clock: list[float]) -> None:
    one = tuner(max_workers=4)
    assert one.workers == 2, "half of them at first"
    one.workers = 4
    clock[0] += 1
    assert one.adjust_workers(1000, backlog=0, starving=False, idle=0.95) == 3
    clock[0] += 1
    assert one.adjust_workers(2000, backlog=10, starving=True, idle=0.0) == 4
    clock[0] += 1
    assert one.adjust_workers(4000, backlog=0, starving=False, idle=0.0) == 4


def test_a_worker_that_brings_nothing_is_taken_back_and_not_tried_again_for_a_while(clock: list[float]) -> None:
    one = tuner(max_workers=4)
    one.workers = 2
    rows = 0
    for step, expected in enumerate([3, 2, 2, 2]):
        clock[0] += 1
        rows += 1000
        assert one.adjust_workers(rows, backlog=10, starving=True, idle=0.0) == expected, step


def test_a_given_number_of_workers_is_left_alone(clock: list[float]) -> None:
    one = tuner(workers=3)
    clock[0] += 10
    assert one.adjust_workers(10, backlog=100, starving=True, idle=0.0) == 3
    assert one.adjust_workers(10, backlog=0, starving=False, idle=1.0) == 3


def test_a_batch_that_took_a_thousand_times_its_size_reserves_no_more_than_the_budget() -> None:
    one = tuner(limit=32 * MIB)
    one.saw_need(100, 100 * MIB)
    assert one.to_reserve(one.batch_bytes) == 32 * MIB
