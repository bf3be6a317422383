"""Figures of a stage, and the sentence about the bottleneck."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.metrics import StageMetrics, bottleneck, percentile
from penstock.pipeline.stages import Origin


def stage(name: str, kind: str, busy: float, threads: int = 1) -> StageMetrics:
    one = StageMetrics(name, kind)
    one.add(busy, 10, 10, 100, 100)
    one.threads = threads
    return one


def test_a_snapshot_has_rows_bytes_times_and_percentiles() -> None:
    one = StageMetrics("x", "transform")
    one.add(0.010, 100, 90, 1000, 900)
    one.waited(for_input=0.5, for_room=0.25)
    seen = one.snapshot(2.0)
    assert (seen["rows_in"], seen["rows_out"], seen["bytes_in"], seen["bytes_out"]) == (100, 90, 1000, 900)
    assert (seen["busy_seconds"], seen["wait_input_seconds"], seen["wait_room_seconds"]) == (0.01, 0.5, 0.25)
    assert seen["rows_per_second"] == 50
    assert seen["utilisation"] == 0.005
    assert 7.5 < seen["latency_ms"]["p50"] < 13.4


@given(st.lists(st.floats(1e-5, 100), min_size=1, max_size=200))
def test_percentiles_are_right_to_within_a_bucket(seconds: list[float]) -> None:
    one = StageMetrics("x", "transform")
    for value in seconds:
        one.add(value, 1, 1, 1, 1)
    middle = statistics.median_low(seconds)
    assert middle / 1.34 <= percentile(one.histogram, 0.5) <= middle * 1.34


def test_an_empty_histogram_has_no_percentile() -> None:
    assert percentile([0] * 10, 0.5) == 0.0


def test_a_thread_at_work_is_visible_until_it_leaves() -> None:
    one = StageMetrics("x", "transform")
    since = one.begin(Origin("f", 3))
    assert next(iter(one.working.values())) == (since, Origin("f", 3))
    one.leave(since)
    assert not one.working
    assert one.busy >= 0


@pytest.mark.parametrize(
    ("loads", "sentence"),
    [
        ((0.95, 0.2, 0.1), "src is the bottleneck: reading takes 95% of the time"),
        ((0.2, 0.3, 0.9), "out is the bottleneck: writing takes 90% of the time"),
        ((0.2, 1.8, 0.3), "slow is the bottleneck: 2 workers busy 100% of the time, 90% of it there"),
        ((0.1, 0.1, 0.1), "no stage is busy"),
    ],
)
def test_the_sentence_names_the_busiest_stage(loads: tuple[float, float, float], sentence: str) -> None:
    source, work, sink = loads
    transforms = [stage("quick", "transform", 0.2 if work > 1 else 0.0, 2), stage("slow", "transform", work, 2)]
    said = bottleneck(stage("src", "source", source), transforms, stage("out", "sink", sink), 1.0)
    assert said.startswith(sentence), said


def test_before_the_first_batch_there_is_nothing_to_say() -> None:
    nothing = StageMetrics("src", "source")
    assert bottleneck(nothing, [], StageMetrics("out", "sink"), 1.0) == "nothing has been read yet"
