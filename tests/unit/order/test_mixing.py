"""Who is drawn when: close to target at every prefix, and the same however one asks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ResumeError
from penstock.order import mix_order as courses
from penstock.order.mixing import Drawn, Mixture
from penstock.order.schedules import Schedule

Weights = dict[str, float]


@st.composite
def weights_of(draw: st.DrawFn, names: Sequence[str]) -> Weights:
    weight = st.one_of(st.integers(0, 3), st.integers(1, 50), st.floats(0.001, 10))
    weights: Weights = {name: draw(weight) for name in names}
    return {**weights, names[-1]: weights[names[-1]] or 1}


@st.composite
def mixtures(draw: st.DrawFn, max_sources: int = 6, max_changes: int = 0) -> Mixture:
    names = [f"s{i}" for i in range(draw(st.integers(1, max_sources)))]
    steps = [0, *sorted(draw(st.sets(st.integers(1, 30), max_size=3)))]
    points = [(step, draw(weights_of(names))) for step in steps]
    schedule = Schedule.of(points, draw(st.sampled_from(["constant", "linear"])))
    for step in draw(st.lists(st.integers(0, 30), max_size=max_changes)):
        schedule = schedule.with_change(step, draw(weights_of(names)))
    return Mixture(names, schedule, draw(st.integers(1, 9)))


@st.composite
def limited_mixtures(draw: st.DrawFn) -> tuple[Mixture, list[int | None] | None]:
    mixture = draw(mixtures(max_changes=3))
    limit = st.none() | st.integers(0, 40)
    return mixture, draw(st.none() | st.lists(limit, min_size=len(mixture.names), max_size=len(mixture.names)))


def weights_in_order(mixture: Mixture, position: int) -> list[Fraction]:
    weights = mixture.schedule.weights_at(position // mixture.samples_per_step)
    return [weights[name] for name in mixture.names]


def furthest_off(mixture: Mixture, count: int) -> Fraction:
    """The largest distance of any count from its target at any prefix, added up sample by sample."""
    sources, _ = mixture.draw(mixture.start(), count)
    gap = [Fraction(0)] * len(mixture.names)
    worst = Fraction(0)
    for position, source in enumerate(sources.tolist()):
        gap = [behind + weight for behind, weight in zip(gap, weights_in_order(mixture, position))]
        gap[source] -= 1
        worst = max(worst, *map(abs, gap))
    return worst


def by_the_rule(mixture: Mixture, count: int) -> list[int]:
    """The order as the rule reads, looking ahead sample by sample."""
    ahead = count * 4
    sums = [[Fraction(0)] * len(mixture.names)]
    for position in range(ahead):
        sums.append([now + weight for now, weight in zip(sums[-1], weights_in_order(mixture, position))])
    parts = mixture.schedule.parts[0].points
    names = [mixture.schedule.names.index(name) for name in mixture.names]
    active = [i for i, at in enumerate(names) if any(shares[at] for _, shares in parts)]
    margin = Fraction(1, max(2, 2 * len(active) - 2))
    counts, order = [0] * len(mixture.names), []
    for t in range(1, count + 1):
        open_now = [i for i in active if sums[t][i] - counts[i] >= margin]
        closes = {i: next((u for u in range(t, ahead) if sums[u][i] - counts[i] > 1 - margin), ahead) for i in open_now}
        chosen = min(open_now, key=lambda i: (closes[i], i))
        counts[chosen] += 1
        order.append(chosen)
    return order


@settings(max_examples=100, deadline=None)
@given(mixture=mixtures(max_sources=20))
def test_every_source_is_within_one_of_its_target_at_every_prefix(mixture: Mixture) -> None:
    sources = len(mixture.names)
    assert furthest_off(mixture, 200) <= 1 - Fraction(1, max(2, 2 * sources - 2))


def test_many_even_sources_with_a_few_heavy_ones_stay_within_one() -> None:
    names = [f"s{i}" for i in range(40)]
    weights = {name: 1.0 if i < 36 else 100.0 for i, name in enumerate(names)}
    assert furthest_off(Mixture(names, Schedule.constant(weights), 16), 1000) < 1


@settings(max_examples=40, deadline=None)
@given(names=st.integers(1, 6), data=st.data())
def test_the_order_is_the_one_the_rule_says(names: int, data: st.DataObject) -> None:
    sources = [f"s{i}" for i in range(names)]
    weight = st.fixed_dictionaries({name: st.integers(1, 5) for name in sources})
    steps = data.draw(st.sets(st.integers(1, 12), max_size=2))
    points = [(step, data.draw(weight)) for step in [0, *sorted(steps)]]
    schedule = Schedule.of(points, data.draw(st.sampled_from(["constant", "linear"])))
    mixture = Mixture(sources, schedule, data.draw(st.integers(1, 5)))
    assert mixture.draw(mixture.start(), 40)[0].tolist() == by_the_rule(mixture, 40)


@settings(max_examples=80, deadline=None)
@given(given_=limited_mixtures(), cuts=st.lists(st.integers(0, 40), max_size=8), tabled=st.booleans())
def test_in_one_go_or_in_pieces_through_json_the_stream_is_the_same(
    given_: tuple[Mixture, list[int | None] | None], cuts: list[int], tabled: bool
) -> None:
    mixture, limits = given_
    whole, end = mixture.draw(mixture.start(), 120, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(courses, "_MOST_TABLED", courses._MOST_TABLED if tabled else -1)
        state, pieces = mixture.start(), []
        for count in [*cuts, 1, 1, 1]:
            # A fresh one each time: nothing may be kept anywhere but in the state.
            fresh = Mixture(mixture.names, mixture.schedule, mixture.samples_per_step)
            count = min(count, 120 - state.position)
            sources, state = fresh.draw(Drawn.from_json(json.loads(json.dumps(state.to_json()))), count, limits)
            pieces.append(sources)
        sources, state = mixture.draw(state, 120 - state.position, limits)
    assert np.concatenate([*pieces, sources]).tolist() == whole.tolist()
    assert state == end
    assert end.counts == tuple(np.bincount(whole, minlength=len(mixture.names)).tolist())


@settings(max_examples=80, deadline=None)
@given(given_=limited_mixtures(), positions=st.lists(st.integers(0, 400), max_size=6), tabled=st.booleans())
def test_seeking_gives_the_state_that_drawing_leads_to(
    given_: tuple[Mixture, list[int | None] | None], positions: list[int], tabled: bool
) -> None:
    mixture, limits = given_
    with pytest.MonkeyPatch.context() as patch:
        if not tabled:
            patch.setattr(courses, "_MOST_TABLED", -1)
            patch.setattr(courses, "_CHECKPOINT_EVERY", 16)
        sought = [mixture.seek(position, limits) for position in positions]
    states = [mixture.draw(mixture.start(), position, limits)[1] for position in positions]
    assert sought == states


@pytest.mark.parametrize(
    ("samples_per_step", "points", "stops"),
    [
        (3, [(0, (7, 0, 1, 3)), (32, (4, 1, 0, 2)), (67, (1, 1, 3, 3))], [74, 156]),
        (1, [(0, (7, 2, 3, 3)), (41, (1, 0, 1, 0)), (85, (8, 3, 1, 2))], [55, 87]),
    ],
)
def test_seeking_by_periods_minds_what_comes_after_them(
    samples_per_step: int,
    points: list[tuple[int, tuple[int, ...]]],
    stops: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(courses, "_MOST_TABLED", -1)
    schedule = Schedule.of([(step, dict(zip("abcd", weights))) for step, weights in points])
    mixture = Mixture("abcd", schedule, samples_per_step)
    # From one stop to the next: the periods that are skipped begin at the first.
    assert [mixture.seek(stop) for stop in stops] == [mixture.draw(mixture.start(), stop)[1] for stop in stops]


def test_seeking_skips_periods_of_a_schedule_in_no_time_and_lands_exactly() -> None:
    points = [(0, {"a": 7, "b": 3}), (1000, {"a": 1, "b": 2}), (2000, {"a": 0, "b": 1})]
    mixture = Mixture(["a", "b"], Schedule.of([(step * 10**6, weights) for step, weights in points]), 32)
    a_thousand_million = 32 * 1000 * 10**6
    target = a_thousand_million * Fraction(7, 10) + 1001 * Fraction(1, 3)
    assert abs(mixture.seek(a_thousand_million + 1001).counts[0] - target) < 1
    assert mixture.seek(a_thousand_million).counts == (a_thousand_million * 7 // 10, a_thousand_million * 3 // 10)


def test_a_trillion_samples_in_nothing_has_drifted() -> None:
    mixture = Mixture(["a", "b", "c"], Schedule.constant({"a": 0.7, "b": 0.2, "c": 0.1}), 512)
    assert mixture.seek(10**12).counts == (7 * 10**11, 2 * 10**11, 10**11)
    assert mixture.draw(mixture.seek(10**12), 10)[0].tolist() == mixture.draw(mixture.start(), 10)[0].tolist()


def test_weights_that_never_repeat_do_not_drift_either() -> None:
    mixture = Mixture(["a", "b"], Schedule.constant({"a": 2**0.5, "b": 1}), 8)
    _, state = mixture.draw(mixture.start(), 50_000)
    assert all(abs(target - count) <= Fraction(1, 2) for target, count in zip(mixture.targets(state), state.counts))
    assert state.counts[0] == round(mixture.schedule.weights_at(0)["a"] * 50_000)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), mixture=mixtures(), step=st.integers(1, 25))
def test_a_change_leaves_all_that_comes_before_it_as_it_was(data: st.DataObject, mixture: Mixture, step: int) -> None:
    changed_schedule = mixture.schedule.with_change(step, data.draw(weights_of(mixture.names)))
    changed = Mixture(mixture.names, changed_schedule, mixture.samples_per_step)
    count = step * mixture.samples_per_step
    before, state = mixture.draw(mixture.start(), count)
    same, same_state = changed.draw(changed.start(), count + 10)
    assert same[:count].tolist() == before.tolist()
    # Going on with a state from before the change: no count jumps.
    after, _ = changed.draw(state, 10)
    assert same[count:].tolist() == after.tolist()
    assert sum(same_state.counts) == count + 10


@settings(max_examples=100, deadline=None)
@given(mixture=mixtures(max_sources=3, max_changes=6))
def test_with_three_sources_any_number_of_changes_stays_within_one(mixture: Mixture) -> None:
    assert furthest_off(mixture, 250) <= (Fraction(1, 2) if len(mixture.names) < 3 else Fraction(99, 100))


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [((1, 4, 1), (3, 0, 4), 2), ((4, 2, 1), (0, 3, 4), 6), ((1, 4, 1), (2, 0, 4), 8), ((1, 1, 1), (0, 1, 2), 1)],
)
def test_those_who_miss_their_window_after_a_change_come_by_how_far_they_are_behind(
    before: Sequence[int], after: Sequence[int], step: int
) -> None:
    # By the end of their windows alone, each of these would be off by 1 or more.
    schedule = Schedule.constant(dict(zip("abc", before))).with_change(step, dict(zip("abc", after)))
    assert furthest_off(Mixture("abc", schedule, 1), 60) < 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sources=st.integers(2, 12), step=st.integers(1, 25))
def test_some_time_after_a_change_counts_are_within_one_again(data: st.DataObject, sources: int, step: int) -> None:
    names = [f"s{i}" for i in range(sources)]
    weights = st.fixed_dictionaries({name: st.integers(1, 9) for name in names})
    schedule = Schedule.constant(data.draw(weights)).with_change(step, data.draw(weights))
    mixture = Mixture(names, schedule, 3)
    state = mixture.seek(step * 3 + 4 * sources * 9)
    for _ in range(50):
        _, state = mixture.draw(state, 1)
        gaps = [abs(target - count) for target, count in zip(mixture.targets(state), state.counts)]
        assert max(gaps) <= 1 - Fraction(1, max(2, 2 * sources - 2))


@settings(deadline=None)
@given(data=st.data(), mixture=mixtures(max_changes=2))
def test_targets_are_the_sums_of_the_weights(data: st.DataObject, mixture: Mixture) -> None:
    position = data.draw(st.integers(0, 60))
    sums = [sum(column) for column in zip(*(weights_in_order(mixture, t) for t in range(position)))]
    targets = mixture.targets(mixture.seek(position))
    assert sum(targets) == position
    # Exact until a change; there, what is carried over may be rounded to 2**-64.
    exact = position <= min([part.step for part in mixture.schedule.parts[1:]], default=60) * mixture.samples_per_step
    for target, expected in zip(targets, sums or [0] * len(mixture.names)):
        assert abs(target - expected) <= (0 if exact else Fraction(1, 1 << 60))


def test_a_source_of_weight_0_is_never_drawn_and_one_set_to_0_not_any_more() -> None:
    names = ["a", "b", "c", "none"]
    schedule = Schedule.constant({"a": 1, "b": 1, "c": 1, "none": 0})
    for step in range(1, 9):
        changed = Mixture(names, schedule.with_change(step, {"a": 0, "b": 1, "c": 1, "none": 0}), 1)
        sources, _ = changed.draw(changed.start(), 100)
        assert 3 not in sources
        assert 0 not in sources[step:]


def test_a_source_at_its_limit_drops_out_and_the_others_share_by_their_weights() -> None:
    mixture = Mixture(["a", "b", "c"], Schedule.constant({"a": 0.5, "b": 0.3, "c": 0.2}), 8)
    limits = [20, None, None]
    sources, state = mixture.draw(mixture.start(), 1000, limits)
    gone = int(np.flatnonzero(sources == 0)[-1]) + 1
    assert np.bincount(sources[:gone]).tolist()[0] == 20
    rest = sources[gone:].tolist()
    for t in range(1, len(rest) + 1):
        assert abs(rest[:t].count(1) - t * Fraction(3, 5)) <= Fraction(1, 2)
    assert state.out == (0,)
    # The state remembers, also when it is not told again.
    assert 0 not in mixture.draw(state, 100)[0]


def test_the_stream_ends_when_every_source_has_reached_its_limit() -> None:
    mixture = Mixture(["a", "b", "c"], Schedule.constant({"a": 5, "b": 3, "c": 1}), 8)
    sources, state = mixture.draw(mixture.start(), 100, [10, 0, 7])
    assert np.bincount(sources, minlength=3).tolist() == [10, 0, 7]
    assert state.position == 17
    more, same = mixture.draw(state, 5, [10, 0, 7])
    assert len(more) == 0
    assert same.counts == state.counts
    assert mixture.seek(100, [10, 0, 7]).position == 17


def test_what_is_left_comes_early_when_its_time_is_still_to_come() -> None:
    early, late = {"a": 1, "b": 0}, {"a": 0, "b": 1}
    mixture = Mixture(["a", "b"], Schedule.of([(0, early), (100, late)]), 1)
    assert mixture.draw(mixture.start(), 6, [2, None])[0].tolist() == [0, 0, 1, 1, 1, 1]
    # Where it has no time any more the stream ends.
    over = Mixture(["a", "b"], Schedule.of([(0, late), (2, early)]), 1)
    assert over.draw(over.start(), 9, [3, None])[0].tolist() == [1, 1, 0, 0, 0]


def test_one_source_gives_everything() -> None:
    points: list[tuple[int, Weights]] = [(0, {"a": 0.3}), (10**6, {"a": 5})]
    mixture = Mixture(["a"], Schedule.of(points, "linear"), 512)
    sources, state = mixture.draw(mixture.seek(10**15), 1000)
    assert not sources.any()
    assert state.counts == (10**15 + 1000,)


def test_the_order_of_the_names_is_that_of_the_numbers() -> None:
    schedule = Schedule.constant({"b": 1, "a": 99})
    assert Mixture(["b", "a"], schedule, 1).seek(100).counts == (1, 99)
    assert Mixture(["a", "b"], schedule, 1).seek(100).counts == (99, 1)


def test_a_mixture_can_go_to_another_process() -> None:
    mixture = Mixture(["a", "b"], Schedule.constant({"a": 1, "b": 2}), 4)
    copy = pickle.loads(pickle.dumps(mixture))  # noqa: S301
    assert copy.draw(mixture.seek(10), 9)[0].tolist() == mixture.draw(mixture.seek(10), 9)[0].tolist()


def test_the_state_is_small() -> None:
    names = [f"s{i}" for i in range(20)]
    schedule = Schedule.constant({name: 0.01 * (i + 1) for i, name in enumerate(names)})
    changed = schedule.with_change(10**6, {name: i + 1 for i, name in enumerate(names)})
    mixture = Mixture(names, changed, 512)
    state = mixture.draw(mixture.seek(512 * 10**6 + 3), 10**5, [10**4, *[None] * 19])[1]
    assert len(json.dumps(state.to_json())) < 100 + 30 * 20
    assert len(json.dumps(mixture.seek(512 * 10**6 + 3).to_json())) < 100 + 50 * 20


def test_the_state_stays_small_when_weights_have_nothing_in_common() -> None:
    primes = [1009, 10_007, 100_003, 1_000_003, 10_000_019, 100_000_007]
    names = [f"s{i}" for i in range(20)]
    points = [(i, {name: prime - 19 if name == "s0" else 1 for name in names}) for i, prime in enumerate(primes)]
    schedule = Schedule.of(points).with_change(5, dict.fromkeys(names, 1)).with_change(6, dict(points[0][1]))
    mixture = Mixture(names, schedule, 7)
    state = mixture.draw(mixture.start(), 45)[1]
    assert state.owed
    assert len(json.dumps(state.to_json())) < 100 + 30 * 20
    assert Drawn.from_json(state.to_json()) == state


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        [3, [1, 1], 0, [], [], []],
        [2, [1, "1"], 0, [], [], []],
        [2, [3, -1], 0, [], [], []],
        [2, [1, 1], 1, [0, 0], [], []],
        [2, [2, 0], 1, [0, 1], [], []],
        [2, [1, 1], 0, [], [0, 1, 1], []],
        [2, [1, 1], 0, [], [2, 1], []],
        [2, [1, 1], 0, [], [], [2]],
    ],
)
def test_a_damaged_state_is_refused(damaged: Any) -> None:
    with pytest.raises(ResumeError):
        Drawn.from_json(damaged)


def test_a_state_of_another_number_of_sources_is_refused() -> None:
    two = Mixture(["a", "b"], Schedule.constant({"a": 1, "b": 1}), 1)
    one = Mixture(["a"], Schedule.constant({"a": 1}), 1)
    with pytest.raises(ResumeError, match=r"'a'.*'b'"):
        two.draw(one.start(), 1)


@pytest.mark.parametrize(
    ("names", "weights", "samples_per_step", "says"),
    [
        (["web"], {"wbe": 1}, 1, r"'wbe'.*'web'"),
        (["web", "code"], {"web": 1}, 1, r"'code'.*'web'"),
        (["web", "web"], {"web": 1}, 1, "'web'"),
        (["web"], {"web": 1}, 0, "samples_per_step"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused(names: Any, weights: Any, samples_per_step: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Mixture(names, Schedule.constant(weights), samples_per_step)


def test_counts_positions_and_limits_that_cannot_work_are_refused() -> None:
    mixture = Mixture(["a", "b"], Schedule.constant({"a": 1, "b": 1}), 1)
    with pytest.raises(ConfigError, match=r"-1\b"):
        mixture.draw(mixture.start(), -1)
    with pytest.raises(ConfigError, match=r"position -1\b"):
        mixture.seek(-1)
    with pytest.raises(ConfigError, match="limits"):
        mixture.draw(mixture.start(), 1, [3])
    with pytest.raises(ConfigError, match="'b'"):
        mixture.seek(1, [None, -3])
