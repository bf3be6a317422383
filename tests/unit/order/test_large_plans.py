"""Plans of a trillion rows and ten thousand sources: what is looked at, kept and saved, and that it changes nothing."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays.ragged import by_owner
from penstock.arrays.truncation import Truncation
from penstock.errors import ResumeError
from penstock.files.states import with_checksum
from penstock.order import BlockShuffle, Mixture, Plan, PlanSource, Position, Schedule, states
from penstock.order import sample_orders as orders
from penstock.order.plan import mixture_of
from penstock.order.positions import StepRanges, samples_left
from penstock.order.sample_orders import (
    BucketOrder,
    BudgetOrder,
    ChopOrder,
    FittedOrder,
    Order,
    OrderPosition,
    PackedOrder,
    RowOrder,
)
from penstock.order.states import from_state, to_state
from penstock.order.steps import MixedSteps

TRILLION = 10**12
KINDS = ("rows", "blocks", "concat", "packed", "fitted", "dropped", "buckets", "budget")
LENGTHS = np.random.default_rng(5).integers(1, 33, 64)
ENDS = np.cumsum(LENGTHS)


class Arithmetic:
    """Table whose lengths repeat every 64 rows; it counts those that were looked at."""

    def __init__(self, rows: int) -> None:
        self.rows, self.looked_at = rows, 0
        whole, rest = divmod(rows, 64)
        self.tokens = whole * int(ENDS[-1]) + (int(ENDS[rest - 1]) if rest else 0)

    def lengths(self, rows: Any) -> Any:
        self.looked_at += len(rows)
        return LENGTHS[np.asarray(rows) % 64]

    def find_tokens(self, positions: Any) -> tuple[Any, Any]:
        whole, rest = np.divmod(np.asarray(positions), int(ENDS[-1]))
        inside = np.searchsorted(ENDS, rest, side="right")
        return whole * 64 + inside, rest - (ENDS[inside] - LENGTHS[inside])


def make(kind: str, rows: int, name: str = "a", window: int = 256) -> Order:
    table, facts = Arithmetic(rows), {"shuffle": True, "seed": 3, "name": name}
    cut = Truncation(max_length=32)
    made: dict[str, Any] = {
        "rows": lambda: RowOrder(table, cut, **facts),
        "blocks": lambda: RowOrder(table, cut, **{**facts, "shuffle": BlockShuffle()}),
        "concat": lambda: ChopOrder(table, 40, **facts),
        "packed": lambda: PackedOrder(table, cut, window_rows=window, **facts),
        "fitted": lambda: FittedOrder(table, Truncation("split", 20), **facts),
        "dropped": lambda: PackedOrder(table, Truncation("drop", 12), window_rows=8, **facts),
        "buckets": lambda: BucketOrder(table, cut, size=4, **facts),
        "budget": lambda: BudgetOrder(table, cut, max_tokens=128, **facts),
    }
    found: Order = made[kind]()
    return found


def alone(kind: str, rows: int) -> Plan:
    return Plan((PlanSource("a", make(kind, rows)),), 4)


def mixed(kind: str, sizes: list[int], batch: int = 4, **more: Any) -> Plan:
    limits = more.pop("max_epochs", {})
    names = [f"s{number}" for number in range(len(sizes))]
    sources = tuple(
        PlanSource(name, make(kind, size, name, window=16), "", limits.get(number))
        for number, (name, size) in enumerate(zip(names, sizes))
    )
    weights = more.pop("weights", sizes)
    return Plan(sources, batch, schedule=Schedule.constant(dict(zip(names, weights))), **more)


def looked_at(plan: Plan) -> int:
    return sum(source.order.table.looked_at for source in plan.sources)  # type: ignore[attr-defined]


def steps_of(plan: Plan, count: int) -> list[Any]:
    """Number, epoch, sources, rows and starts of the first steps, and the position after each."""
    found, position = [], plan.start()
    while len(found) < count and not plan.ended(position):
        if not (block := plan.read_block(position, 3)):
            break  # an epoch in which every row is dropped
        for step, after in block:
            parts = (step.sources, step.samples.rows, step.samples.starts, step.samples.lengths)
            found.append((step.number, step.epoch, [each.tolist() for each in parts], after))
        position = block[-1][1]
    return found[:count]


# Before the first batch


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_batch_looks_at_as_many_lengths_of_a_trillion_rows_as_of_few(kind: str) -> None:
    seen = []
    for rows in (10**5, TRILLION):
        plan = alone(kind, rows)
        assert looked_at(plan) == 0
        plan.read_block(plan.start(), 1)
        seen.append(looked_at(plan))
    assert 0 < seen[1] <= max(2 * seen[0], 4096)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_a_trillion_rows_takes_no_memory_for_them(kind: str) -> None:
    tracemalloc.start()
    try:
        plan = alone(kind, TRILLION)
        ((_, position),) = plan.read_block(plan.start(), 1)
        state = to_state(plan.skip(10, 10**9), position)
        from_state(plan, state)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["rows", "concat", "buckets"])
def test_counts_and_seeks_are_arithmetic_where_windows_are_even(kind: str) -> None:
    plan = alone(kind, TRILLION)
    steps = plan.steps_in(0)
    assert plan.seek(steps - 1).cursors[0].epoch == 0
    assert plan.seek(10 * steps).epoch == 10
    assert len(plan.skip(5, 25).delivered_steps(0)) == steps - 20
    assert looked_at(plan) == 0


def test_the_last_tokens_of_ten_quadrillion_are_found() -> None:
    plan = alone("concat", 6 * 10**14)
    order = plan.sources[0].order
    assert order.table.tokens > 8 * 10**15
    last = order.cut(np.array([order.total - 1]))  # type: ignore[attr-defined]
    assert last.rows[-1] == order.table.rows - 1
    assert last.starts[-1] + last.lengths[-1] == order.table.lengths(np.array([order.table.rows - 1]))[0]


def test_a_seek_counts_the_windows_before_its_step_and_no_others() -> None:
    plan = alone("packed", TRILLION)
    position = plan.seek(200)
    used = position.cursors[0].window + 1
    assert 5 < used < 100
    assert looked_at(plan) <= 256 * (used + 1)  # the last one is counted, and planned


# Lazily counted, as if from all lengths


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 300),
    asked=st.lists(st.tuples(st.sampled_from(["place", "number", "has", "count"]), st.integers(0, 400)), max_size=8),
)
def test_windows_counted_as_needed_are_those_of_the_whole_epoch(
    kind: str, rows: int, asked: list[tuple[str, int]]
) -> None:
    order, fresh = make(kind, rows), make(kind, rows)
    places = [
        OrderPosition(1, window, index)
        for window in range(fresh.windows)
        for index in range(len(fresh.plan_window(1, window)))
    ]
    for what, number in asked:
        if what == "place":
            assert order.position_of(1, number) == (places[number] if number < len(places) else OrderPosition(2))
        elif what == "number" and number < len(places):
            assert order.number_of(places[number]) == number
        elif what == "has":
            assert order.has(1, number) == (len(places) >= number)
        elif what == "count":
            assert order.count(1) == len(places)


@given(
    start=st.integers(0, 9),
    size=st.integers(0, 30),
    skips=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), max_size=4),
)
def test_ranges_of_steps_are_the_steps_that_are_not_skipped(
    start: int, size: int, skips: list[tuple[int, int]]
) -> None:
    ranges = [(low, low + count) for low, count in skips]
    kept = [step for step in range(start, start + size) if not any(low <= step < high for low, high in ranges)]
    found = StepRanges(range(start, start + size), ranges)
    assert (list(found), len(found), list(found[1:-1])) == (kept, len(kept), kept[1:-1])
    assert [found[number] for number in range(-len(kept), len(kept))] == kept * 2
    with pytest.raises(IndexError):
        found[len(kept)]


@given(owners=st.lists(st.integers(0, 11), max_size=40), count=st.sampled_from([12, 30, 8]))
def test_what_each_owner_has_is_found_in_order(owners: list[int], count: int) -> None:
    numbers = np.array([owner % count for owner in owners], np.int64)
    found = {owner: which.tolist() for owner, which in by_owner(numbers, count) if len(which)}
    assert found == {owner: np.flatnonzero(numbers == owner).tolist() for owner in set(numbers.tolist())}


# Many sources


@settings(deadline=None, max_examples=30)
@given(
    weights=st.lists(st.integers(1, 10**9), min_size=2, max_size=9),
    change=st.integers(0, 60),
    moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=8),
)
def test_drawing_on_is_drawing_anew(weights: list[int], change: int, moves: list[tuple[int, int]]) -> None:
    names = [f"s{number}" for number in range(len(weights))]
    schedule = Schedule.constant(dict(zip(names, weights))).with_change(
        change, {name: number + 1 / 3 for number, name in enumerate(names)}
    )
    kept = Mixture(names, schedule, 1)
    known = [kept.start()]
    for back, count in moves:
        state = known[max(0, len(known) - 1 - back)]
        ids, after = kept.draw(state, count)
        anew, there = Mixture(names, schedule, 1).draw(state, count)
        assert (ids.tolist(), after) == (anew.tolist(), there)
        known.append(after)


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(["packed", "fitted", "dropped", "rows"]),
    sizes=st.lists(st.integers(5, 60), min_size=2, max_size=5),
    batch=st.integers(1, 9),
    stopping=st.sampled_from(["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]),
    most=st.sampled_from([{}, {0: 1}, {0: 1, 1: 2}]),
)
def test_sources_that_keep_little_give_the_same_steps(
    kind: str, sizes: list[int], batch: int, stopping: str, most: dict[int, int]
) -> None:
    whole = mixed(kind, sizes, batch, stopping=stopping, max_epochs=most, weights=sizes[::-1])
    expected = steps_of(whole, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders, "_MOST_WINDOWS", 0)
        patch.setattr(orders, "_LEAST_AHEAD", 2)
        patch.setattr(orders, "_MOST_AHEAD", 2)
        little = mixed(kind, sizes, batch, stopping=stopping, max_epochs=most, weights=sizes[::-1])
        assert steps_of(little, 20) == expected


class _AllLimits(MixedSteps):
    """Steps that know what is left of every source before each step."""

    def _draw(self, position: Position, count: int) -> Any:
        assert position.drawn is not None
        limits: list[int | None] = []
        for source, cursor, used, start in zip(
            self.sources, position.cursors, position.drawn.counts, position.epoch_starts
        ):
            last = self._last_epoch(source, start)
            left = None if last is None else samples_left(source.order, cursor, last, count)
            limits.append(None if left is None else used + left)
        ids, drawn = self.mixture.draw(position.drawn, count, limits if any(x is not None for x in limits) else None)
        return ids, position._replace(drawn=drawn, step=position.step + 1, samples=position.samples + len(ids))


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["packed", "dropped", "rows"]),
    sizes=st.lists(st.integers(5, 40), min_size=2, max_size=5),
    batch=st.integers(1, 12),
    once=st.booleans(),
    most=st.sampled_from([{0: 1}, {0: 1, 1: 2}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}]),
)
def test_ends_of_drawn_sources_are_all_ends(
    kind: str, sizes: list[int], batch: int, once: bool, most: dict[int, int]
) -> None:
    stopping = "all_exhausted_without_replacement" if once else "all_exhausted"
    more: dict[str, Any] = {"stopping": stopping, "max_epochs": most, "weights": [7, 1, 3, 2, 5][: len(sizes)]}
    plan, other = mixed(kind, sizes, batch, **more), mixed(kind, sizes, batch, **more)
    mixture = mixture_of(other)
    assert mixture is not None
    naive = _AllLimits(other.sources, mixture, drop_last=False, stopping=stopping)
    other.__dict__["_steps"] = naive
    assert steps_of(plan, 25) == steps_of(other, 25)


def test_the_first_batch_of_many_sources_plans_the_windows_of_those_drawn() -> None:
    for more in ({}, {"stopping": "all_exhausted_without_replacement"}):
        plan = mixed("packed", [10**9 + number for number in range(300)], 8, **more)
        ((step, after),) = plan.read_block(plan.start(), 1)
        assert len(set(step.sources.tolist())) == 8
        # Where sources may end, those of the next step are looked at too: the epoch might be over.
        assert looked_at(plan) == 16 * 8 * (2 if more else 1)
        fresh = mixed("packed", [10**9 + number for number in range(300)], 8, **more)
        resumed, there = from_state(fresh, json.loads(json.dumps(to_state(plan, after))))
        resumed.read_block(there, 1)
        assert there == after
        assert looked_at(fresh) == 16 * 8 * (2 if more else 1)


def test_checkpoints_of_a_long_seek_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.order.steps._MOST_CHECKPOINT_CURSORS", 4)
    plan = mixed("rows", [10**6, 10**6], 2)
    position = plan.seek(64 * 60 + 5)
    assert len(plan._steps._checkpoints) <= 17  # type: ignore[attr-defined]
    assert plan.seek(64 * 60 + 5) == position
    assert replace(plan).step(70).rows == plan.step(70).rows


# States


def test_the_state_of_ten_thousand_sources_is_below_4_kib() -> None:
    names = [f"source-{number}" for number in range(10_000)]
    sizes = np.random.default_rng(1).integers(200, 10**8, len(names)).tolist()
    sources = tuple(PlanSource(name, make("rows", size, name)) for name, size in zip(names, sizes))
    plan = Plan(sources, 512, schedule=Schedule.constant(dict(zip(names, sizes))))
    position = plan.start()
    for _ in range(3):
        ((_, position),) = plan.read_block(position, 1)
    state = json.dumps(to_state(plan, position))
    assert len(state) < 4096
    assert from_state(plan, json.loads(state))[1] == position


@settings(deadline=None, max_examples=20)
@given(
    kind=st.sampled_from(["rows", "concat", "packed", "dropped"]),
    sizes=st.lists(st.integers(5, 60), min_size=2, max_size=6),
    batch=st.integers(1, 9),
    stopping=st.sampled_from(["first_exhausted", "all_exhausted_without_replacement", "never"]),
    change=st.integers(1, 12),
)
def test_a_compact_state_is_the_position(kind: str, sizes: list[int], batch: int, stopping: str, change: int) -> None:
    plan = mixed(kind, sizes, batch, stopping=stopping, weights=sizes[::-1])
    plan = plan.reweight(change, {name: number + 0.7 for number, name in enumerate(plan.names)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "_MOST_PLAIN", 0)
        for *_, position in steps_of(plan, 20):
            state = json.loads(json.dumps(to_state(plan, position)))
            assert "compact" in state
            bare = mixed(kind, sizes, batch, stopping=stopping, weights=sizes[::-1])
            found, there = from_state(bare, state)
            assert (found.edits, there) == (plan.edits, position)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("counts", "1:00"),
        ("counts", "z8:!!!"),
        ("places", ["64:" + "0" * 40, "", ""]),
        ("places", ["", ""]),
        ("position", -1),
        ("start", 10**9),
        ("out", [99]),
        ("owed", ["1/0"]),
    ],
)
def test_a_damaged_compact_state_is_refused(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_PLAIN", 0)
    plan = mixed("rows", [30, 20, 50])
    state = to_state(plan, steps_of(plan, 3)[-1][-1])
    state["compact"][name] = value
    with pytest.raises(ResumeError):
        from_state(plan, with_checksum(state))
