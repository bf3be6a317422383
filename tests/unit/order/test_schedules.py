"""Weights over steps: what they mean exactly, and what is refused."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.order.schedules import Schedule, temperature_weights

EVEN = {"code": 1, "web": 1}


def test_a_float_is_the_decimal_it_reads_as() -> None:
    weights = Schedule.constant({"a": 0.7, "b": 0.2, "c": np.float64(0.1)}).weights_at(5)
    assert weights == {"a": Fraction(7, 10), "b": Fraction(1, 5), "c": Fraction(1, 10)}


def test_integers_fractions_and_floats_that_say_the_same_are_equal() -> None:
    assert Schedule.constant({"a": 3, "b": 1}) == Schedule.constant({"b": 0.25, "a": 0.75})
    assert Schedule.constant({"a": Fraction(1, 3), "b": Fraction(2, 3)}) == Schedule.constant({"a": 1, "b": 2})
    assert Schedule.constant({"a": 3, "b": 1}) != Schedule.constant({"a": 3, "b": 2})


def test_weights_without_a_small_denominator_are_rounded_to_two_to_the_minus_forty() -> None:
    weights = Schedule.constant({"a": math.sqrt(2), "b": math.pi, "tiny": 1e-300}).weights_at(0)
    assert sum(weights.values()) == 1
    assert all((1 << 40) % weight.denominator == 0 for weight in weights.values())
    assert abs(weights["a"] - Fraction(math.sqrt(2) / (math.sqrt(2) + math.pi))) < Fraction(4, 1 << 40)
    assert weights["tiny"] == Fraction(1, 1 << 40)


def test_constant_points_hold_until_the_next_and_linear_ones_move_towards_it() -> None:
    points: list[tuple[int, dict[str, float]]] = [(0, {"a": 1, "b": 0}), (10, {"a": 0.5, "b": 0.5})]
    held, moving = Schedule.of(points), Schedule.of(points, interpolation="linear")
    assert [held.weights_at(step)["b"] for step in (0, 9, 10, 99)] == [0, 0, Fraction(1, 2), Fraction(1, 2)]
    assert [moving.weights_at(step)["b"] for step in (0, 3, 10, 99)] == [
        0,
        Fraction(3, 20),
        Fraction(1, 2),
        Fraction(1, 2),
    ]


def test_a_change_holds_from_its_step_on_and_replaces_what_was_to_come() -> None:
    schedule = Schedule.of([(0, EVEN), (10, {"code": 1, "web": 3})]).with_change(5, {"code": 4, "web": 1})
    assert [schedule.weights_at(step)["code"] for step in (4, 5, 10)] == [
        Fraction(1, 2),
        Fraction(4, 5),
        Fraction(4, 5),
    ]
    again = schedule.with_change(5, EVEN)
    assert again.weights_at(5)["code"] == Fraction(1, 2)
    assert again.weights_at(4)["code"] == Fraction(1, 2)
    assert schedule.with_change(0, {"code": 1, "web": 9}) == Schedule.constant({"code": 1, "web": 9})


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 10**9), max_size=4, unique=True),
    changes=st.lists(st.integers(0, 10**9), max_size=3),
    interpolation=st.sampled_from(["constant", "linear"]),
    data=st.data(),
)
def test_to_dict_and_back_through_json_gives_an_equal_schedule(
    steps: list[int], changes: list[int], interpolation: Any, data: st.DataObject
) -> None:
    weight = st.floats(0.001, 1e6) | st.integers(0, 10)
    weights = st.fixed_dictionaries({"a": weight, "b": weight, "c": st.just(1)})
    schedule = Schedule.of([(step, data.draw(weights)) for step in [0, *sorted(steps)]], interpolation)
    for step in changes:
        schedule = schedule.with_change(step, data.draw(weights))
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"web": -0.5, "code": 1}, r"'web'.*step 0\b"),
        ({"web": math.nan, "code": 1}, r"'web'.*step 0\b"),
        ({"web": math.inf, "code": 1}, r"'web'.*step 0\b"),
        ({"web": "much", "code": 1}, r"'web'.*'much'"),
        ({"web": None, "code": 1}, r"'web'.*step 0\b"),
        ({"web": True, "code": 1}, r"'web'.*step 0\b"),
        ({"web": 0, "code": 0.0}, r"step 0\b"),
        ({}, "(?i)schedule"),
    ],
)
def test_weights_that_cannot_work_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Schedule.constant(weights)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([], "(?i)schedule"),
        ([(5, EVEN)], r"step 0.*step 5\b"),
        ([(0, EVEN), (7, EVEN), (7, EVEN)], r"\b7\b.*\b7\b"),
        ([(0, EVEN), (9, EVEN), (7, EVEN)], r"\b7\b.*\b9\b"),
        ([(0, EVEN), (7, {"web": 1})], r"'code'.*step 7\b"),
        ([(0, EVEN), (7, {**EVEN, "wbe": 1})], r"'wbe'.*'web'"),
        ([(0, EVEN), (1.5, EVEN)], r"\b0\b.*\b1\.5\b"),
        ([(-1, EVEN)], r"\b0\b.*-1\b"),
    ],
)
def test_a_schedule_with_a_gap_or_out_of_order_is_refused(points: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Schedule.of(points)


def test_an_unknown_interpolation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'liner'.*'linear'"):
        Schedule.of([(0, EVEN)], interpolation="liner")  # type: ignore[arg-type]


def test_a_change_that_names_an_unknown_source_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'cod'.*'code'"):
        Schedule.constant(EVEN).with_change(3, {"cod": 1, "web": 1})


@pytest.mark.parametrize(
    "data", [{}, {"names": ["a"], "parts": []}, {"names": ["a"], "parts": [{"points": [[0, [1, 2]]]}]}]
)
def test_from_dict_refuses_what_is_not_a_schedule(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="to_dict"):
        Schedule.from_dict(data)


def test_temperature_goes_from_the_sizes_to_even_shares() -> None:
    sizes = {"big": 900.0, "small": 100.0}
    assert temperature_weights(sizes, 1) == {"big": 0.9, "small": 0.1}
    assert temperature_weights(sizes, 2) == pytest.approx({"big": 0.75, "small": 0.25})
    assert temperature_weights(sizes, 1e9) == pytest.approx({"big": 0.5, "small": 0.5})
    assert temperature_weights({"big": 1e300, "none": 0.0}, 0.01) == {"big": 1.0, "none": 0.0}


@pytest.mark.parametrize(
    ("sizes", "temperature", "says"),
    [
        ({"a": 1.0}, 0, "temperature"),
        ({"a": 1.0}, math.inf, "temperature"),
        ({"a": -1.0}, 1, "'a'"),
        ({"a": math.nan}, 1, "'a'"),
        ({"a": 0.0}, 1, "'a'"),
        ({}, 1, "temperature_weights"),
    ],
)
def test_sizes_and_temperatures_that_cannot_work_are_refused(sizes: Any, temperature: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        temperature_weights(sizes, temperature)
