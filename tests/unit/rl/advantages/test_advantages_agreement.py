"""Agreement with others: with TRL's own functions, and with the published formulas as plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.rl.advantages import (
    gae,
    gae_ragged,
    gpg,
    grpo,
    opo,
    overlong_penalty,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    reward_to_go,
    rloo,
    whiten,
)

Floats = npt.NDArray[np.float64]


def batch(seed: int, rows: int, tokens: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Rewards, values, and masks with padding on the right and gaps in the middle."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) < rng.integers(1, tokens + 1, rows)[:, None]) & (rng.random((rows, tokens)) < 0.7)
    mask[:, 0] |= ~mask.any(axis=1)
    return rng.normal(size=(rows, tokens)), rng.normal(size=(rows, tokens)), mask


def loop(rewards: Floats, values: Floats, mask: Any, gamma: float, lam: float, gap: str) -> tuple[Floats, Floats]:
    """GAE one token at a time."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for i, row in enumerate(mask):
        following = running = 0.0
        last = np.flatnonzero(row)[-1]
        for t in range(last, -1, -1):
            reward, value = rewards[i, t], values[i, t]
            if not row[t] and gap == "skip":
                continue
            if not row[t] and gap == "plain":
                reward = value = 0.0
            running = reward + gamma * following - value + gamma * lam * running
            following = value
            if row[t]:
                advantages[i, t], returns[i, t] = running, running + value
    return advantages, returns


@pytest.mark.parametrize("gap", ["skip", "plain", "through"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.1), (0.9, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 200])
def test_gae_is_what_a_loop_over_tokens_gives(gap: Any, gamma: float, lam: float, tokens: int) -> None:
    rewards, values, mask = batch(tokens, 6, tokens)
    found = gae(rewards, values, mask=mask, gamma=gamma, lam=lam, gap=gap)
    np.testing.assert_allclose(found, loop(rewards, values, mask, gamma, lam, gap), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gap", ["skip", "plain", "through"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_what_a_loop_gives_in_every_framework(make: Any, gap: Any, gamma: float, lam: float) -> None:
    rewards, values, mask = batch(0, 6, 70)
    single = rewards.astype(np.float32), values.astype(np.float32)
    expected = loop(*(array.astype(float) for array in single), mask, gamma, lam, gap)
    found = gae(make(single[0]), make(single[1]), mask=make(mask), gamma=gamma, lam=lam, gap=gap)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6, atol=1e-6 * max(1, np.abs(theirs).max()))


@pytest.mark.parametrize("gap", ["skip", "plain"])
def test_gae_of_values_that_are_narrower_than_rewards_keeps_its_digits(gap: Any) -> None:
    jax = pytest.importorskip("jax")
    rewards, values, mask = batch(0, 6, 70)
    single = values.astype(np.float32)
    expected = loop(rewards, single.astype(float), mask, 0.99, 0.95, gap)
    with jax.enable_x64(True):
        given = jax.numpy.asarray(rewards), jax.numpy.asarray(single)
        found = gae(*given, mask=jax.numpy.asarray(mask), gamma=0.99, lam=0.95, gap=gap)
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-12, atol=1e-12)


def test_gae_of_long_rows_keeps_its_digits() -> None:
    rewards, values, mask = batch(0, 40, 4096)  # more than one block of rows
    found = gae(rewards.astype(np.float32), values.astype(np.float32), mask=mask, gamma=1.0, lam=1.0)
    exact = loop(rewards.astype(np.float32).astype(float), values.astype(np.float32).astype(float), mask, 1, 1, "skip")
    np.testing.assert_allclose(found[0], exact[0], rtol=2e-7, atol=2e-7)
    np.testing.assert_allclose(found[1], exact[1], rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("gap", ["skip", "plain", "through"])
def test_ragged_rows_give_what_padded_ones_do(make: Any, gap: Any) -> None:
    rewards, values, mask = batch(3, 6, 70)
    lengths = np.array([70, 1, 33, 64, 20, 5])
    inside = np.arange(70) < lengths[:, None]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask &= inside
    options = {"gamma": 0.97, "lam": 0.9, "gap": gap, "empty": "zero"}
    padded = gae(make(rewards), make(values), mask=make(mask), **options)
    ragged = gae_ragged(make(rewards[inside]), make(values[inside]), offsets, mask=make(mask[inside]), **options)
    for ours, theirs in zip(ragged, padded):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs)[inside], rtol=1e-6, atol=2e-6)


def test_ragged_rows_in_many_blocks_are_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, values, _ = batch(5, 1, 1000)
    offsets = np.concatenate([[0], np.sort(np.random.default_rng(6).integers(0, 1001, 99)), [1000]])
    whole = gae_ragged(rewards[0], values[0], offsets, gamma=0.9, lam=0.9, empty="zero")
    monkeypatch.setattr("penstock.batching.backends.numpy.NumpyOperations.at_once", 100)
    cut = gae_ragged(rewards[0], values[0], offsets, gamma=0.9, lam=0.9, empty="zero")
    np.testing.assert_allclose(np.stack(cut), np.stack(whole), rtol=1e-12, atol=1e-12)


def test_reward_to_go_is_gae_without_values(make: Any) -> None:
    rewards, _, mask = batch(7, 6, 70)
    advantages, _ = gae(make(rewards), make(np.zeros_like(rewards)), mask=make(mask), gamma=0.9, lam=1.0)
    found = reward_to_go(make(rewards), mask=make(mask), gamma=0.9)
    np.testing.assert_allclose(np.asarray(found), np.asarray(advantages), rtol=1e-6, atol=1e-6)


def groups_of(seed: int, rows: int = 200) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, rows) / 3, rng.integers(0, 30, rows)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "pass_at_k"])
def test_groups_of_any_size_and_order_give_what_a_loop_over_them_gives(make: Any, name: str) -> None:
    rewards, groups = groups_of(1)
    lengths = np.random.default_rng(2).integers(1, 50, len(rewards))
    expected = np.zeros_like(rewards)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        r = rewards[rows]
        if len(rows) == 1:
            expected[rows] = 0
        elif name == "grpo":
            expected[rows] = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
        elif name == "rloo":
            expected[rows] = [r[i] - np.delete(r, i).mean() for i in range(len(r))]
        elif name == "opo":
            expected[rows] = r - (r * lengths[rows]).sum() / lengths[rows].sum()
        elif name == "gpg":
            expected[rows] = (r - r.mean()) * len(rewards) / np.count_nonzero(rewards)
        else:
            top = np.sort(r)[::-1]
            expected[rows[np.argmax(r)]] = (top[0] - top[1]) / (r.std(ddof=1) + 1e-6)
    function: Any = {"grpo": grpo, "rloo": rloo, "opo": opo, "gpg": gpg, "pass_at_k": pass_at_k}[name]
    options = {"lengths": make(lengths)} if name == "opo" else {}
    found = function(make(rewards), groups, single_member_group="zero", **options)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=2e-6)


def test_slime_takes_the_whole_batch_where_groups_are_unequal(make: Any) -> None:
    rewards = np.array([1.0, 0.0, 3.0, 2.0, 5.0])
    found = grpo(make(rewards), ["a", "a", "b", "b", "b"], preset="slime")
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6)


@pytest.mark.parametrize("preset", ["verl", "openrlhf", "slime"])
def test_reinforce_plus_plus_baseline_has_each_stack_put_its_kl_elsewhere(make: Any, preset: str) -> None:
    rng = np.random.default_rng(3)
    rewards, kl = rng.normal(size=4), rng.normal(size=(4, 5))
    mask = np.arange(5) < np.array([5, 2, 3, 4])[:, None]
    masked, groups = kl * mask * 0.1, np.array([0, 0, 1, 1])
    if preset == "verl":
        rewards_ = rewards - masked.sum(1)
        tokens = (rewards_ - rewards_.reshape(2, 2).mean(1).repeat(2))[:, None] * mask
    else:
        tokens = (rewards - rewards.reshape(2, 2).mean(1).repeat(2))[:, None] * mask
        tokens = tokens - (masked if preset == "slime" else masked[:, ::-1].cumsum(1)[:, ::-1] * mask)
    picked = tokens[mask]
    variance = picked.var(ddof=0 if preset == "openrlhf" else 1)
    expected = (tokens - picked.mean()) / np.sqrt(variance + 1e-8) * mask
    found = reinforce_plus_plus_baseline(make(rewards), groups, mask=make(mask), kl=make(kl), beta=0.1, preset=preset)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=2e-6)


def test_reinforce_plus_plus_takes_the_kl_off_each_token(make: Any) -> None:
    kl = np.array([[1.0, 2.0, 3.0], [1.0, 0.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 0, 0]], bool)
    tokens = np.array([[-0.1, -0.2, 1.7], [-0.1 + 3, 0, 0]])
    returns = tokens[:, ::-1].cumsum(1)[:, ::-1]
    picked = returns[mask]
    expected = (returns - picked.mean()) / np.sqrt(picked.var(ddof=1) + 1e-8) * mask
    found = reinforce_plus_plus(make([2.0, 3.0]), make(mask), kl=make(kl), beta=0.1)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-6)


def test_whitening_may_keep_the_mean(make: Any) -> None:
    values = np.array([1.0, 2.0, 6.0])
    expected = (values - 3) / np.sqrt(values.var(ddof=1) + 1e-8) + 3
    np.testing.assert_allclose(np.asarray(whiten(make(values), shift_mean=False)), expected, rtol=1e-6)


def test_openrlhf_clamps_the_variance_where_others_add_to_it() -> None:
    values = np.array([0.0, 1e-5])
    assert whiten(values, preset="openrlhf").tolist() == pytest.approx([-0.05, 0.05])  # over sqrt(1e-8)
    assert whiten(values, ddof=0)[1] == pytest.approx(5e-6 / np.sqrt(2.5e-11 + 1e-8))


# -- TRL's own functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_is_what_trl_makes_of_its_own_functions(missing: bool, size: int, scale: Any) -> None:
    torch: Any = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = torch.randn(64, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    if missing:
        rewards[[3, 10, 11, 20, 21, 22, 23]] = torch.nan
    grouped = rewards.view(-1, size)
    apart = rewards - torch.nanmean(grouped, dim=1).repeat_interleave(size)
    std = torch.zeros_like(rewards)
    if scale == "batch":
        std = nanstd(rewards).expand_as(rewards)
    elif size > 1:
        std = nanstd(grouped, dim=1).repeat_interleave(size)
    expected = torch.nan_to_num(apart if scale == "none" else apart / (std + 1e-4), nan=0.0)
    np.testing.assert_allclose(grpo(rewards, size, preset="trl", scale=scale), expected, rtol=1e-6, atol=1e-6)
    ids = [f"prompt-{row // size}" for row in range(64)]
    np.testing.assert_allclose(grpo(rewards, ids, preset="trl", scale=scale), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("missing", [False, True])
def test_rloo_is_what_trl_does(missing: bool) -> None:
    torch: Any = pytest.importorskip("torch")
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(0))
    if missing:
        rewards[[0, 5, 6, 7]] = torch.nan
    grouped = rewards.view(-1, 4)
    others = (~torch.isnan(grouped)).sum(dim=1, keepdim=True) - 1
    baselines = (torch.nansum(grouped, dim=1, keepdim=True) - grouped) / others
    expected = torch.nan_to_num(rewards - baselines.view(-1), nan=0.0)
    np.testing.assert_allclose(rloo(rewards, 4, preset="trl"), expected, rtol=1e-6, atol=1e-6)


def test_the_overlong_penalty_is_trls() -> None:
    theirs = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(100, 20)
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 150]
    expected = theirs([[0] * length for length in lengths])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), expected, atol=1e-7)
