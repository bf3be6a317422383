"""States: small, exact, and refused where they do not belong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.length_tables import Lengths

from penstock.arrays.truncation import Truncation
from penstock.errors import ResumeError
from penstock.files.states import with_checksum
from penstock.order.plan import Plan, PlanSource, Position
from penstock.order.sample_orders import PackedOrder, RowOrder
from penstock.order.schedules import Schedule
from penstock.order.states import from_state, to_state
from penstock.order.steps import next_epoch


def source(name: str, rows: int, *, packed: bool = False) -> PlanSource:
    table = Lengths(np.random.default_rng(rows).integers(1, 9, rows).tolist())
    if packed:
        return PlanSource(
            name, PackedOrder(table, Truncation(max_length=9), window_rows=8, shuffle=True, seed=1, name=name)
        )
    return PlanSource(name, RowOrder(table, Truncation(max_length=9), shuffle=True, seed=1, name=name))


def alone(size: int = 4, *, packed: bool = False, **more: Any) -> Plan:
    return Plan((source("a", 31, packed=packed),), size, **more)


def mixed(size: int = 4, *, packed: bool = False, **more: Any) -> Plan:
    sources = tuple(source(name, rows, packed=packed) for name, rows in {"a": 31, "b": 12}.items())
    return Plan(sources, size, schedule=more.pop("schedule", Schedule.constant({"a": 2, "b": 1})), **more)


PLANS = {
    "rows": alone(),
    "rows, drop_last": alone(drop_last=True),
    "packed": alone(packed=True),
    "mixed": mixed(),
    "mixed, packed": mixed(packed=True),
    "mixed, once": mixed(stopping="all_exhausted_without_replacement"),
}


def positions(plan: Plan) -> Iterator[Position]:
    """In front of every step, over the ends of epochs."""
    position = plan.start()
    while True:
        yield position
        step, behind = plan.read(position)
        position = plan.next_delivered(behind) if step is not None else next_epoch(behind)


def at(plan: Plan, number: int) -> Position:
    return next(position for position, n in zip(positions(plan), range(number + 1)) if n == number)


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_state_stands_for_its_position_at_every_step_and_at_the_ends_of_epochs(name: str) -> None:
    plan = PLANS[name]
    for position, _ in zip(positions(plan), range(30)):
        state = through_json(to_state(plan, position))
        found, there = from_state(plan, state)
        assert (found.edits, there) == (plan.edits, position)
        assert through_json(to_state(found, there)) == state


def test_the_state_of_many_sources_and_many_edits_is_below_4_kib() -> None:
    names = [f"source-{number:02}" for number in range(32)]
    schedule = Schedule.constant({name: number + 1 for number, name in enumerate(names)})
    plan = Plan(tuple(source(name, 40 + n) for n, name in enumerate(names)), 64, schedule=schedule, stopping="never")
    for number in range(40):
        plan = plan.skip(100 + 10 * number, 105 + 10 * number)
    position = at(plan, 60)
    assert len(json.dumps(to_state(plan, position))) < 4096
    plan = plan.reweight(10**6, dict.fromkeys(names, 1.0 / 3))
    assert len(json.dumps(to_state(plan, at(plan, 60)))) < 4096


# Edits


def test_edits_come_with_the_state() -> None:
    plan = mixed().skip(3, 5).ban({"a": [1, 2]}, step=7).reweight(9, {"a": 1, "b": 3})
    state = through_json(to_state(plan, at(plan, 4)))
    found, there = from_state(mixed(), state)
    assert found.edits == plan.edits
    assert there == at(plan, 4)
    assert through_json(to_state(found, there)) == state
    assert [found.step(n).rows for n in range(12)] == [plan.step(n).rows for n in range(12)]


def test_a_large_ban_is_not_in_the_state_but_has_to_be_made_again() -> None:
    big = source("a", 2000)
    plan = Plan((big,), 4).ban(range(0, 2000, 2), step=1)
    state = through_json(to_state(plan, at(plan, 2)))
    assert state["edits"] is None
    assert len(json.dumps(state)) < 1024
    with pytest.raises(ResumeError, match=r"\bedits\b"):
        from_state(Plan((big,), 4), state)
    with pytest.raises(ResumeError, match=r"\bedits\b"):
        from_state(Plan((big,), 4).ban(range(0, 2000, 2), step=2), state)
    assert from_state(plan, state)[1] == at(plan, 2)


def test_edits_made_since_the_state_are_kept_if_they_begin_behind_it() -> None:
    state = to_state(alone().skip(2, 3), at(alone().skip(2, 3), 3))
    later = alone().skip(2, 3).skip(8, 9)
    assert from_state(later, state)[0].edits == later.edits
    with pytest.raises(ResumeError, match=r"'skip\(2, 3\)'.*skip\(0, 1\)"):
        from_state(alone().skip(2, 3).skip(0, 1), state)


def test_edits_the_state_does_not_know_are_refused_naming_both_sides() -> None:
    state = to_state(alone().skip(5, 6), alone().start())
    with pytest.raises(ResumeError, match=r"'skip\(5, 6\)'.*'skip\(7, 8\)'"):
        from_state(alone().skip(7, 8), state)


# What is refused


@pytest.mark.parametrize(
    "other",
    [
        alone(packed=True),
        alone(drop_last=True),
        mixed(),
        Plan((source("b", 31),), 4),
        Plan((PlanSource("a", source("a", 31).order, "other content"),), 4),
    ],
)
def test_the_state_of_another_plan_is_refused_naming_both_sides(other: Plan) -> None:
    plan = alone()
    with pytest.raises(ResumeError, match=rf"{other.fingerprint}.*{plan.fingerprint}"):
        from_state(plan, to_state(other, other.start()))


def test_the_state_of_a_newer_release_is_refused_with_a_remedy() -> None:
    state = to_state(alone(), alone().start()) | {"version": 2}
    with pytest.raises(ResumeError, match=r"version 2\b"):
        from_state(alone(), state)


def test_another_global_batch_is_refused_unless_asked_for() -> None:
    state = to_state(alone(4), at(alone(4), 3))
    with pytest.raises(ResumeError, match="new_batch_size=True"):
        from_state(alone(6), state)
    plan, there = from_state(alone(6), state, new_batch_size=True)
    step, _ = plan.read(there)
    assert step is not None
    rows = [row for number in (3, 4) for row in alone(4).step(number).samples.rows.tolist()]
    assert step.samples.rows.tolist() == rows[:6]


@pytest.mark.parametrize(
    "plan",
    [
        alone(4).skip(9, 10),
        mixed(4).reweight(9, {"a": 1, "b": 1}),
        mixed(4, schedule=Schedule.of([(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 2})])),
    ],
)
def test_what_is_said_in_steps_does_not_go_on_with_another_global_batch(plan: Plan) -> None:
    state = to_state(plan, plan.start())
    other = Plan(plan.sources, 6, schedule=plan.schedule)
    with pytest.raises(ResumeError, match=r"\b4\b.*\b6\b"):
        from_state(other, state, new_batch_size=True)


def damage(state: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", ["rows", "packed", "mixed"])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((["version"], value) for value in (..., 0, -1, "1", None, True, 1.0)),
        *((["plan"], value) for value in (..., None, 7)),
        *((["global_batch"], value) for value in (..., None, "4", -4)),
        *(([key], value) for key in ("epoch", "step", "samples") for value in (..., -1, "2", 2.0, None, True, [1])),
        *(([key], value) for key in ("places", "marks") for value in (..., None, 3, [], [[0, 0]], "abc", {})),
        *(([key, 0], [0, 0, 0, 0]) for key in ("places", "marks")),
        *(
            ([key, 0, part], value)
            for key in ("places", "marks")
            for part in (0, 1, 2)
            for value in (-1, "1", 1.5, None)
        ),
        (["places", 0, 0], 99),
        (["places", 0, 1], 10**9),
        (["places", 0, 2], 10**9),
        (["marks", 0, 1], 10**9),
        (["marks", 0, 0], 99),
        (["edits"], ...),
        (["edits"], 5),
        (["edits"], [["skip", 1, 2]]),
        (["edits_digest"], ...),
        (["edits_digest"], "0" * 16),
    ],
)
def test_a_damaged_state_is_refused(name: str, path: list[Any], value: Any) -> None:
    plan = PLANS[name]
    state = to_state(plan, at(plan, 3))
    if (path, value) == (["places", 0, 0], 99) and name == "mixed":
        pytest.skip("sources of a mixture may be in any epoch of their own")
    if path == ["edits"] and isinstance(value, (int, list)):
        state["edits_digest"] = "1" * 16
    with pytest.raises(ResumeError):
        from_state(plan, with_checksum(damage(state, path, value)))  # the checksum alone would refuse it


@pytest.mark.parametrize(
    "drawn",
    [None, 5, [], [12, [8, 4, 0], 0, [], [], []], [12, [8, 5], 0, [], [], []], [12, [8, -4], 0, [], [], []], [0.5] * 6],
)
def test_damaged_counts_of_a_mixture_are_refused_when_they_are_loaded(drawn: Any) -> None:
    plan = mixed()
    with pytest.raises(ResumeError):
        from_state(plan, with_checksum(to_state(plan, at(plan, 3)) | {"drawn": drawn}))


@pytest.mark.parametrize("state", [None, 5, [], "x", {}, {"plan": "x"}])
def test_what_is_no_state_is_refused_with_a_remedy(state: Any) -> None:
    with pytest.raises(ResumeError, match=r"state_dict\(\)"):
        from_state(alone(), state)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_state_with_any_one_thing_changed_is_refused_or_can_be_gone_on_from(data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(list(PLANS.values())))
    state = to_state(plan, at(plan, data.draw(st.integers(0, 12))))
    key = data.draw(st.sampled_from(sorted(state)))
    value = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers(-3, 40) | st.floats(allow_nan=False) | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=8,
        )
    )
    try:
        found, there = from_state(plan, with_checksum(state | {key: value}))
    except ResumeError:
        return
    found.read(there)
