"""Plans: what a step is made of, which steps use a row, and edits that lose and repeat nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.length_tables import Lengths

from penstock.arrays.truncation import Truncation
from penstock.errors import ConfigError
from penstock.order import steps
from penstock.order.plan import Plan, PlanSource, Position, Step
from penstock.order.sample_orders import ChopOrder, FittedOrder, Order, PackedOrder, RowOrder
from penstock.order.schedules import Schedule
from penstock.order.steps import MixedSteps, next_epoch

KINDS = ("rows", "concat", "packed", "fitted")


def make_order(kind: str, lengths: list[int], seed: int = 0, name: str = "a", *, shuffle: bool = True) -> Order:
    table, facts = Lengths(lengths), {"shuffle": shuffle, "seed": seed, "name": name}
    if kind == "rows":
        return RowOrder(table, Truncation(max_length=9), **facts)  # type: ignore[arg-type]
    if kind == "concat":
        return ChopOrder(table, 5, **facts)  # type: ignore[arg-type]
    if kind == "fitted":
        return FittedOrder(table, Truncation("split", 4), **facts)  # type: ignore[arg-type]
    return PackedOrder(table, Truncation(max_length=9), window_rows=7, **facts)  # type: ignore[arg-type]


def alone(kind: str = "rows", rows: int = 23, size: int = 4, **more: Any) -> Plan:
    lengths = np.random.default_rng(rows).integers(1, 10, rows).tolist()
    return Plan((PlanSource("a", make_order(kind, lengths)),), size, **more)


def mixed(kind: str = "rows", size: int = 4, weights: dict[str, float] | None = None, **more: Any) -> Plan:
    limits = more.pop("max_epochs", {})
    sources = tuple(
        PlanSource(
            name, make_order(kind, np.random.default_rng(n).integers(1, 10, n).tolist(), n, name), "", limits.get(name)
        )
        for name, n in {"a": 30, "b": 11, "c": 17}.items()
    )
    return Plan(sources, size, schedule=Schedule.constant(weights or {"a": 3, "b": 1, "c": 2}), **more)


@st.composite
def plans(draw: st.DrawFn, **more: Any) -> Plan:
    kind, size = draw(st.sampled_from(KINDS)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        return alone(kind, draw(st.integers(8, 40)), size, **more)
    weights = {name: draw(st.integers(1, 6)) for name in "abc"}
    stopping = draw(st.sampled_from(["first_exhausted", "all_exhausted", "never", "all_exhausted_without_replacement"]))
    return mixed(kind, size, weights, stopping=stopping, **more)


def walk(plan: Plan, position: Position | None = None) -> Iterator[Step]:
    """The steps that are delivered, over the ends of epochs."""
    position = position or plan.start()
    dry = 0
    while dry < 3:
        step, position = plan.read(position)
        if step is None:
            dry += 1
            if plan.ended(position):
                return
            position = next_epoch(position)
            continue
        dry = 0
        yield step
        position = plan.next_delivered(position)


def some(plan: Plan, count: int) -> list[Step]:
    return [step for step, _ in zip(walk(plan), range(count))]


def parts(step: Step) -> list[tuple[int, int, int, int, int]]:
    """(sample, source, row, start, tokens) of every part."""
    samples = step.samples
    columns = (samples.numbers(), step.sources, samples.rows, samples.starts, samples.lengths)
    return list(zip(*(column.tolist() for column in columns)))


def seen(plan: Plan, count: int) -> dict[int, list[tuple[int, int, int, int, int]]]:
    return {step.number: parts(step) for step in some(plan, count)}


def at_most(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails the test when it is called for ever."""
    left = iter(range(calls))

    def limited(*arguments: Any) -> Any:
        assert next(left, None) is not None, f"called more than {calls} times"
        return function(*arguments)

    return limited


# Reading


@settings(deadline=None, max_examples=50)
@given(plan=plans(), data=st.data())
def test_a_step_asked_for_is_the_step_that_comes(plan: Plan, data: st.DataObject) -> None:
    steps = some(plan, 25)
    assert [step.number for step in steps] == list(range(len(steps)))
    fresh = replace(plan)
    step = data.draw(st.sampled_from(steps))
    found = fresh.step(step.number)
    assert (found.number, found.epoch, parts(found)) == (step.number, step.epoch, parts(step))
    assert found.rows == [(plan.names[source], row) for _, source, row, _, _ in parts(step)]


@settings(deadline=None, max_examples=50)
@given(plan=plans(), data=st.data())
def test_going_on_from_any_step_gives_the_steps_that_follow(plan: Plan, data: st.DataObject) -> None:
    steps = some(plan, 20)
    number = data.draw(st.integers(0, len(steps) - 1))
    there = [(step.number, step.epoch, parts(step)) for step, _ in zip(walk(plan, plan.seek(number)), range(5))]
    assert there == [(step.number, step.epoch, parts(step)) for step in steps[number:]][:5] or number + 5 > len(steps)
    assert there[: len(steps) - number] == [(s.number, s.epoch, parts(s)) for s in steps[number : number + 5]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_token_of_every_row_is_in_one_sample_of_an_epoch(kind: str, drop_last: bool) -> None:
    plan = alone(kind, drop_last=drop_last)
    tokens = []
    for step in some(plan, plan.steps_in(0)):
        assert step.epoch == 0
        tokens += [(row, token) for _, _, row, start, n in parts(step) for token in range(start, start + n)]
    assert len(tokens) == len(set(tokens))
    everything = set(Lengths(plan.sources[0].order.table.lengths(np.arange(23)).tolist()).flat)
    if drop_last:
        samples = plan.sources[0].order.count(0)
        assert plan.steps_in(0) == samples // 4
        assert set(tokens) <= everything
    else:
        assert set(tokens) == everything


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_hold_the_same_rows_in_another_order(kind: str) -> None:
    plan = alone(kind)
    count = plan.steps_in(0) + plan.steps_in(1)
    epochs: dict[int, list[tuple[str, int]]] = {0: [], 1: []}
    for step in some(plan, count):
        epochs[step.epoch] += step.rows
    assert sorted(set(epochs[0])) == sorted(set(epochs[1])) == [("a", row) for row in range(23)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("order", [RowOrder, FittedOrder, PackedOrder])
def test_a_printed_plan_names_its_orders_and_no_addresses(order: type[Any]) -> None:
    made = order(Lengths([3, 4]), Truncation("right", 5), shuffle=True, seed=7)
    shown = repr(Plan((PlanSource("web", made, "x"),), 2))
    assert f"{order.__name__}(shuffle=True, seed=7, " in shown
    assert " at 0x" not in shown


def test_without_shuffling_rows_come_as_they_stand() -> None:
    plan = Plan((PlanSource("a", make_order("rows", [1] * 9, shuffle=False)),), 4)
    assert [step.samples.rows.tolist() for step in some(plan, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_another_seed_is_another_order_and_another_plan() -> None:
    one, other = (Plan((PlanSource("a", make_order("rows", [1] * 50, seed)),), 8) for seed in (1, 2))
    assert one.step(0).rows != other.step(0).rows
    assert one.fingerprint != other.fingerprint


def test_the_number_of_steps_is_the_number_that_comes() -> None:
    for kind in KINDS:
        for drop_last in (False, True):
            plan = alone(kind, drop_last=drop_last)
            numbers = [step.epoch for step in some(plan, 40)]
            assert plan.steps_in(0) == numbers.count(0)
            assert plan.steps_in(1) == numbers.count(1)


def test_a_step_behind_the_end_says_how_many_there_are() -> None:
    plan = mixed(max_epochs={"a": 1, "b": 1, "c": 1}, stopping="all_exhausted")
    last = len(list(walk(plan))) - 1
    plan.step(last)
    with pytest.raises(IndexError, match=str(last + 1)):
        plan.step(last + 1)
    with pytest.raises(IndexError, match=r"(?i)steps.*\b0\b"):
        plan.step(-1)


def test_the_fingerprint_names_what_decides_the_steps_but_not_the_size_of_batches() -> None:
    plan = alone()
    assert replace(plan, global_batch=8).fingerprint == plan.fingerprint
    assert plan.skip(1, 2).fingerprint == plan.fingerprint
    others = [
        alone("packed"),
        alone("concat"),
        alone(drop_last=True),
        Plan((PlanSource("b", plan.sources[0].order),), 4),
        Plan((PlanSource("a", plan.sources[0].order, "other rows"),), 4),
        mixed(),
        mixed(weights={"a": 1, "b": 1, "c": 1}),
        mixed(stopping="never"),
        mixed(max_epochs={"a": 2}),
    ]
    assert len({other.fingerprint for other in others} | {plan.fingerprint}) == len(others) + 1


# Tracing


@settings(deadline=None, max_examples=40)
@given(plan=plans(), data=st.data())
def test_tracing_a_row_names_every_step_epoch_and_sample_that_uses_it(plan: Plan, data: st.DataObject) -> None:
    steps = some(plan, 10)
    source = data.draw(st.sampled_from(plan.names))
    which = plan.names.index(source)
    row = data.draw(st.integers(0, plan.sources[which].order.table.rows - 1))
    uses = plan.trace(source, row, epochs=10)
    wanted = {(step.number, sample) for step in steps for sample, s, r, _, _ in parts(step) if (s, r) == (which, row)}
    assert {(use.step, use.sample) for use in uses if use.step < len(steps)} == wanted
    assert [use.step for use in uses] == sorted(use.step for use in uses)
    assert not any(use.skipped for use in uses)


@pytest.mark.parametrize("drop_last", [False, True])
def test_tracing_finds_rows_in_later_epochs_of_a_mixture_without_replacement(drop_last: bool) -> None:
    plan = mixed(size=4, stopping="all_exhausted_without_replacement", drop_last=drop_last)
    steps = some(plan, 50)
    for source, name in enumerate(plan.names):
        for row in range(5):
            wanted = [s.number for s in steps for _, there, r, _, _ in parts(s) if (there, r) == (source, row)]
            assert [use.step for use in plan.trace(name, row, epochs=5) if use.step < 50] == wanted


def test_what_is_skipped_or_banned_is_still_found_and_said_to_be_withheld() -> None:
    plan = alone(rows=20, size=4)
    row = int(plan.step(2).samples.rows[1])
    assert [use.skipped for use in plan.trace("a", row, epochs=2)] == [False, False]
    assert [use.skipped for use in plan.skip(2, 3).trace("a", row, epochs=2)] == [True, False]
    assert [use.skipped for use in plan.ban([row], step=3).trace("a", row, epochs=2)] == [False, True]
    assert [use.skipped for use in plan.ban([row]).trace("a", row, epochs=2)] == [True, True]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_ban_does_not_move_what_tracing_says_of_other_rows(data: st.DataObject) -> None:
    plan = mixed(data.draw(st.sampled_from(["rows", "packed"])), 5, {"a": 1, "b": 5, "c": 1})
    banned = data.draw(st.sets(st.integers(0, 10), min_size=1, max_size=6))
    row = data.draw(st.sampled_from([row for row in range(11) if row not in banned]))
    before = [(use.step, use.sample) for use in plan.trace("b", row, epochs=2)]
    assert [(use.step, use.sample) for use in plan.ban({"b": banned}).trace("b", row, epochs=2)] == before


def test_tracing_an_unknown_source_or_row_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'d'.*'a'"):
        mixed().trace("d", 0)
    with pytest.raises(IndexError, match=r"row 11\b.*'b'"):
        mixed().trace("b", 11)


# Edits


@settings(deadline=None, max_examples=60)
@given(plan=plans(), start=st.integers(0, 12), length=st.integers(1, 9))
def test_after_a_skip_every_other_step_is_unchanged(plan: Plan, start: int, length: int) -> None:
    before = seen(plan, 30)
    after = seen(plan.skip(start, start + length), 30)
    gone = range(start, start + length)
    assert not set(after) & set(gone)
    assert {number: after[number] for number in before if number in after} == {
        number: rows for number, rows in before.items() if number in after
    }
    shared = [number for number in before if number not in gone and number <= max(after, default=-1)]
    assert set(shared) <= set(after)


def test_a_skip_over_whole_epochs_goes_on_behind_them() -> None:
    plan = alone(rows=20, size=4).skip(5, 18)
    assert [step.number for step in some(plan, 9)] == [0, 1, 2, 3, 4, 18, 19, 20, 21]
    assert [len(plan.delivered_steps(epoch)) for epoch in range(4)] == [5, 0, 0, 2]


@settings(deadline=None, max_examples=60)
@given(plan=plans(), data=st.data())
def test_after_a_ban_every_other_row_is_in_the_same_sample_of_the_same_step(plan: Plan, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(plan.sources) - 1))
    rows = plan.sources[source].order.table.rows
    banned = data.draw(st.sets(st.integers(0, rows - 1), max_size=8))
    since = data.draw(st.integers(0, 10))
    before, edited = some(plan, 25), plan.ban({plan.names[source]: banned}, step=since)
    after = some(edited, 25)
    assert [len(step) for step in after] == [len(step) for step in before]
    for was, now in zip(before, after, strict=True):
        gone = [part for part in parts(was) if part[1] == source and part[2] in banned and was.number >= since]
        assert parts(now) == [part for part in parts(was) if part not in gone]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kind=st.sampled_from(KINDS), size=st.integers(1, 6), changes=st.integers(1, 3))
def test_after_a_reweighting_each_source_goes_on_in_order_without_loss_or_repeat(
    data: st.DataObject, kind: str, size: int, changes: int
) -> None:
    plan = mixed(kind, size, stopping="never")
    steps = sorted(data.draw(st.sets(st.integers(0, 20), min_size=changes, max_size=changes)))
    edited = plan
    for step in steps:
        weights = {name: data.draw(st.integers(0, 5)) for name in "abc"}
        weights["a"] += not any(weights.values())
        edited = edited.reweight(step, weights)
    before, after = some(plan, 30), some(edited, 30)
    for was, now in zip(before, after):
        if was.number < steps[0]:
            assert parts(was) == parts(now)
    for source in range(3):
        streams = []
        for found in (before, after):
            each = [part[1:] for step in found for part in parts(step) if part[1] == source]
            streams.append(each)
        shorter = min(len(stream) for stream in streams)
        assert streams[0][:shorter] == streams[1][:shorter]


def test_edits_are_versioned_and_the_plan_they_were_made_of_stays_as_it_was() -> None:
    plan = mixed()
    edited = plan.skip(3, 5).ban({"a": [1, 2]}, step=6).reweight(9, {"a": 1, "b": 1, "c": 1})
    assert (len(plan.edits), len(edited.edits)) == (0, 3)
    assert [str(edit) for edit in edited.edits] == [
        "skip(3, 5)",
        "ban(2 rows of 'a' from step 6)",
        "reweight(9, {'a': 1, 'b': 1, 'c': 1})",
    ]
    assert seen(plan, 10) == seen(mixed(), 10)


def test_a_reweighting_takes_effect_at_its_step() -> None:
    plan = mixed(size=10, stopping="never").reweight(5, {"a": 0, "b": 0, "c": 1})
    assert {source for step in some(plan, 5) for source in step.sources.tolist()} == {0, 1, 2}
    assert {source for step in some(plan, 12)[5:] for source in step.sources.tolist()} == {2}


def test_a_later_reweighting_of_an_earlier_step_holds_from_there_on() -> None:
    plan = mixed(size=6, stopping="never")
    there = plan.reweight(8, {"a": 1, "b": 1, "c": 1}).reweight(4, {"a": 0, "b": 1, "c": 0})
    assert {source for step in some(there, 14)[4:] for source in step.sources.tolist()} == {1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan.skip(5, 5), r"\b340\b.*\b360\b"),
        (lambda plan: plan.skip(-1, 5), r"(?i)range"),
        (lambda plan: plan.skip("1", 5), "'1'"),
        (lambda plan: plan.skip(1.5, 5), r"(?i)range"),
        (lambda plan: plan.ban([3]), r"'a'.*'b'"),
        (lambda plan: plan.ban({"d": [3]}), "'d'"),
        (lambda plan: plan.ban({"b": [3, 11]}), "'b'"),
        (lambda plan: plan.ban({"b": [-1]}), "'b'"),
        (lambda plan: plan.ban({"b": [1]}, step=-1), "step=-1"),
        (lambda plan: plan.reweight(-1, {"a": 1, "b": 1, "c": 1}), "-1"),
        (lambda plan: plan.reweight(3, {"a": 1, "b": 1}), "'c'"),
        (lambda plan: plan.reweight(3, {"a": 1, "b": 1, "c": -1}), "'c'"),
        (lambda plan: plan.reweight(3, {"a": 0, "b": 0, "c": 0}), r"step 3\b"),
        (lambda plan: plan.reweight(3, {"a": 1, "b": 1, "d": 1}), "'d'"),
    ],
)
def test_an_edit_that_cannot_be_is_refused(edit: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        edit(mixed())


def test_rows_to_ban_are_whole_numbers() -> None:
    with pytest.raises((ConfigError, TypeError)):
        alone().ban([1.5])  # type: ignore[list-item]


def test_a_single_source_has_nothing_to_reweight() -> None:
    with pytest.raises(ConfigError, match=r"(?i)weights"):
        alone().reweight(3, {"a": 1})


# What cannot be a plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan((), 4), "(?i)source"),
        (lambda: alone(size=0), r"(?i)batch.*\b0\b"),
        (lambda: mixed(stopping="all_exausted"), "'all_exhausted'"),
        (lambda: Plan(mixed().sources, 4), r"\b3 sources.*weights"),
        (
            lambda: Plan((alone().sources[0],) * 2, 4, schedule=Schedule.constant({"a": 1})),
            "'a'",
        ),
        (lambda: Plan((PlanSource("a", make_order("rows", [])),), 4), "'a'"),
        (lambda: alone(rows=3, size=4, drop_last=True), r"\b3\b.*\b4\b"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_too_small_for_one_batch_is_refused_where_nothing_would_be_delivered(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "next_epoch", at_most(100, steps.next_epoch))
    with pytest.raises(ConfigError, match="drop_last=True"):
        mixed(kind, 500, stopping="all_exhausted_without_replacement", drop_last=True).steps_in(0)


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted"])
def test_a_mixture_whose_sources_come_again_fills_any_batch(stopping: str) -> None:
    plan = mixed(size=500, drop_last=True, stopping=stopping)
    assert [len(step) for step in some(plan, 2)] == [500, 500]


def test_rows_without_a_token_are_nothing_to_train_on() -> None:
    with pytest.raises(ConfigError, match="'a'"):
        Plan((PlanSource("a", make_order("concat", [0, 0, 0])),), 4)


def test_a_mixture_that_never_stops_has_no_number_of_steps() -> None:
    with pytest.raises(TypeError, match="'first_exhausted'"):
        mixed(stopping="never").steps_in(0)


@pytest.mark.parametrize(
    "plan",
    [
        mixed(weights={"a": 1, "b": 0, "c": 1}, stopping="all_exhausted"),
        replace(
            mixed(stopping="all_exhausted"),
            schedule=Schedule.of([(0, {"a": 1, "b": 1, "c": 1}), (2, {"a": 1, "b": 0, "c": 1})]),
        ),
        mixed(stopping="all_exhausted", max_epochs={"b": 1}),
    ],
    ids=["weight 0", "weight 0 later", "used up in the first epoch"],
)
def test_an_epoch_does_not_wait_for_a_source_that_gives_nothing(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedSteps, "_draw", at_most(2000, MixedSteps._draw))
    epochs = [step.epoch for step in some(plan, plan.steps_in(0) + plan.steps_in(1))]
    assert (plan.steps_in(0), plan.steps_in(1)) == (epochs.count(0), epochs.count(1))
    assert plan.steps_in(1) < 60
