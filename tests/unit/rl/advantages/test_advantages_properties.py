"""What no input may break: shifts, orders, padding and ranks change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rl.advantages import (
    PRESETS,
    aggregate_loss,
    dr_grpo,
    gae,
    gpg,
    grpo,
    loss_denominators,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reward_to_go,
    rloo,
    token_rewards,
    whiten,
)

presets = st.sampled_from(sorted(PRESETS))
rewards = st.integers(-64, 64).map(lambda n: n / 16)


@st.composite
def grouped(draw: Any) -> tuple[Any, Any]:
    """Rewards in groups of two to six, in any order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    ids = draw(st.permutations([f"g{i}" for i, size in enumerate(sizes) for _ in range(size)]))
    return np.array(draw(st.lists(rewards, min_size=len(ids), max_size=len(ids))), np.float32), ids


@st.composite
def tokens(draw: Any) -> tuple[Any, Any, Any]:
    """Rewards, values and masks with gaps and padding, at least one token in each row."""
    rows, steps = draw(st.integers(1, 5)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = (rng.random((rows, steps)) < draw(st.sampled_from([0.3, 0.8, 1.0]))) & (
        np.arange(steps) < rng.integers(1, steps + 1, rows)[:, None]
    )
    mask[:, 0] |= ~mask.any(axis=1)
    return rng.normal(size=(rows, steps)).astype("f"), rng.normal(size=(rows, steps)).astype("f"), mask


@given(grouped(), rewards, presets)
def test_shifting_rewards_does_not_change_grpo(case: Any, shift: float, preset: str) -> None:
    given_rewards, ids = case
    shifted = grpo(given_rewards + np.float32(shift), ids, preset=preset)
    np.testing.assert_allclose(shifted, grpo(given_rewards, ids, preset=preset), atol=1e-6)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, gpg, opo, pass_at_k], ids=lambda f: f.__name__)
@given(case=grouped(), preset=presets, data=st.data())
@settings(max_examples=30)
def test_permuting_rows_permutes_advantages(estimator: Any, case: Any, preset: str, data: Any) -> None:
    given_rewards, ids = case
    given_rewards = given_rewards + np.arange(len(ids), dtype=np.float32) / 1024  # no ties, of which pass@k takes one
    lengths = np.arange(1, len(ids) + 1)
    order = np.array(data.draw(st.permutations(range(len(ids)))))
    options = [{"lengths": lengths[o]} if estimator is opo else {} for o in (order, slice(None))]
    permuted = estimator(given_rewards[order], [ids[i] for i in order], preset=preset, **options[0])
    np.testing.assert_allclose(
        permuted, estimator(given_rewards, ids, preset=preset, **options[1])[order], rtol=1e-6, atol=1e-6
    )


@given(tokens(), st.sampled_from(["skip", "plain", "through"]), st.integers(1, 40))
def test_padding_never_changes_a_number(case: Any, gap: Any, extra: int) -> None:
    reward, value, mask = case
    wide = [np.pad(array, ((0, 0), (0, extra)), constant_values=fill) for array, fill in zip(case, (np.nan, 9, False))]
    wide[0][:, -1] = np.inf  # whatever a framework left there
    if gap == "through":
        wide[0][:, mask.shape[1] :] = 7
    options: Any = {"gamma": 0.9, "lam": 0.8, "gap": gap}
    pairs = [
        (gae(reward, value, mask=mask, **options), gae(wide[0], wide[1], mask=wide[2], **options)),
        ([whiten(value, mask, epsilon=1e-3, ddof=0)], [whiten(wide[1], wide[2], epsilon=1e-3, ddof=0)]),
        ([token_rewards(reward[:, 0], mask)], [token_rewards(reward[:, 0], wide[2])]),
    ]
    for narrow, padded in pairs:
        for ours, theirs in zip(narrow, padded):
            np.testing.assert_allclose(theirs[:, : mask.shape[1]], ours, rtol=1e-6, atol=1e-6)
            assert not theirs[:, mask.shape[1] :].any()


@given(tokens())
def test_what_a_mask_hides_never_counts(case: Any) -> None:
    reward, value, mask = case
    dirty = [np.where(mask, array, np.nan) for array in (reward, value)]
    for gap in ("skip", "plain"):
        clean = gae(reward, value, mask=mask, gamma=0.9, lam=0.8, gap=gap)  # type: ignore[arg-type]
        found = gae(*dirty, mask=mask, gamma=0.9, lam=0.8, gap=gap)  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.stack(found), np.stack(clean))
    np.testing.assert_array_equal(reward_to_go(dirty[0], mask=mask), reward_to_go(reward, mask=mask))


@given(tokens())
def test_skipping_a_gap_is_leaving_it_out(case: Any) -> None:
    reward, value, mask = case
    found = gae(reward, value, mask=mask, gamma=0.9, lam=0.8)[0]
    for row, kept in enumerate(mask):
        alone, _ = gae(reward[row : row + 1, kept], value[row : row + 1, kept], gamma=0.9, lam=0.8)
        np.testing.assert_allclose(found[row, kept], alone[0], rtol=1e-6, atol=1e-6)


class WaitingError(Exception):
    """A rank has come to a sum that the others have not added to yet."""


def over_ranks(parts: list[Any], work: Callable[[Any, Any], Any], make: Any = np.asarray) -> list[Any]:
    """`work(part, reduce)` of each rank, where `reduce` adds up over all of them: from one sum to the next, each rank
    starting again when a sum is known. Nothing runs at the same time, which not every framework would allow."""
    totals: list[Any] = []
    met: list[Any] = []

    def run(part: Any) -> Any:
        known = iter(totals)

        def reduce(array: Any) -> Any:
            total = next(known, None)
            if total is None:
                met.append(np.asarray(array).copy())
                raise WaitingError
            return make(total, str(total.dtype))

        try:
            return work(part, reduce)
        except WaitingError:
            return None

    while results := list(map(run, parts)):
        if not met:
            break
        assert len(met) == len(parts), "ranks call reduce a different number of times"
        totals.append(np.sum(np.stack(met), axis=0))
        met.clear()
    return results


ACROSS_RANKS: dict[str, Callable[..., Any]] = {
    "whiten": lambda case, **kw: whiten(case["tokens"], case["mask"], **kw),
    "whiten, biased": lambda case, **kw: whiten(case["tokens"], case["mask"], preset="openrlhf", **kw),
    "reinforce++": lambda case, **kw: reinforce_plus_plus(case["rewards"], case["mask"], gamma=0.9, **kw),
    "baseline": lambda case, **kw: reinforce_plus_plus_baseline(
        case["rewards"], case["groups"], mask=case["mask"], kl=case["tokens"], beta=0.1, **kw
    ),
    "gpg": lambda case, **kw: gpg(case["rewards"], case["groups"], **kw),
    "grpo, batch": lambda case, **kw: grpo(case["rewards"], case["groups"], scale="batch", **kw),
    "denominators": lambda case, **kw: loss_denominators(case["mask"], **kw),
    "denominators of sequences": lambda case, **kw: loss_denominators(case["mask"], "sequence-mean", **kw),
}


def rank_case(make: Any, rows: Any) -> dict[str, Any]:
    rng = np.random.default_rng(11)
    whole = {
        "tokens": rng.normal(3.0, 2.0, (24, 9)),
        "mask": np.arange(9) < rng.integers(1, 10, 24)[:, None],
        "rewards": rng.integers(0, 3, 24) / 2,
    }
    return {name: make(array[rows]) for name, array in whole.items()} | {"groups": (np.arange(24) // 4)[rows]}


@pytest.mark.parametrize("name", ACROSS_RANKS)
def test_splitting_over_ranks_never_changes_a_number(make: Any, name: str) -> None:
    work = ACROSS_RANKS[name]
    parts = [slice(0, 8), slice(8, 16), slice(16, 24)]
    expected = np.asarray(work(rank_case(make, slice(None))))
    found = over_ranks([rank_case(make, part) for part in parts], lambda case, reduce: work(case, reduce=reduce), make)
    assert all(isinstance(part, make.kind) for part in found)
    np.testing.assert_allclose(np.concatenate([np.asarray(part) for part in found]), expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(np.asarray(work(rank_case(make, parts[0]))), expected[:8], atol=1e-3), "nothing was shared"


def test_reduce_gets_arrays_of_the_framework_and_may_work_in_place(make: Any) -> None:
    seen: list[Any] = []

    def reduce(array: Any) -> None:
        seen.append(array)

    case = rank_case(make, slice(None))
    alone = ACROSS_RANKS["baseline"](case)
    np.testing.assert_array_equal(np.asarray(ACROSS_RANKS["baseline"](case, reduce=reduce)), np.asarray(alone))
    assert len(seen) == 2
    assert all(isinstance(array, make.kind) for array in seen)


def test_a_rank_without_rows_takes_part() -> None:
    values = np.random.default_rng(0).normal(size=(4, 3))
    found = over_ranks([values, values[:0]], lambda part, reduce: whiten(part, reduce=reduce))
    np.testing.assert_allclose(found[0], whiten(values))
    assert found[1].shape == (0, 3)


@given(tokens(), st.sampled_from(["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]), st.integers(1, 4))
def test_micro_batches_add_up_to_the_loss_of_the_batch(case: Any, aggregation: str, size: int) -> None:
    losses, _, mask = case
    denominators = loss_denominators(mask, aggregation, max_length=80)
    whole = aggregate_loss(losses, mask, denominators)
    cuts = [slice(start, start + size) for start in range(0, len(mask), size)]
    parts = sum(aggregate_loss(losses[cut], mask[cut], denominators[cut]) for cut in cuts)
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_denominators_make_up_for_gradients_that_are_averaged_over_ranks() -> None:
    mask = np.ones((4, 5))
    np.testing.assert_allclose(loss_denominators(mask, ranks=2), loss_denominators(mask) / 2)
