"""The golden vectors, to 1e-6, in every framework that is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.rl.advantages import (
    aggregate_loss,
    dr_grpo,
    dynamic_sampling,
    gae,
    gae_ragged,
    gpg,
    grpo,
    kl_estimate,
    loss_denominators,
    opo,
    overlong_penalty,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_to_go,
    rloo,
    token_rewards,
    whiten,
    zero_variance_groups,
)

BINARY = [1.0, 0.0, 0.0, 1.0]
MIXED = [0.2, 0.5, 0.9, -1.0]
ONE = ["g", "g", "g", "g"]
REWARDS = [[0, 0, 0, 1], [0, 0.5, 0, 0]]
VALUES = [[0.1, 0.2, 0.3, 0.4], [0.2, 0.1, 0, 0]]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0]]


def close(array: Any, expected: Any, make: Any) -> None:
    assert isinstance(array, make.kind)
    assert str(array.dtype).endswith("float32")
    np.testing.assert_allclose(np.asarray(array), np.asarray(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("preset", "size"),
    [("verl", 0.866024), ("slime", 0.866024), ("penstock", 0.866024), ("trl", 0.865875), ("openrlhf", 0.866025)],
)
def test_grpo_divides_by_the_deviation_and_the_epsilon_of_each_stack(make: Any, preset: str, size: float) -> None:
    close(grpo(make(BINARY), ONE, preset=preset), [size, -size, -size, size], make)


def test_grpo_of_rewards_that_all_differ(make: Any) -> None:
    close(grpo(make(MIXED), ONE, preset="verl"), [0.061085, 0.427593, 0.916270, -1.404947], make)
    close(grpo(make(MIXED), ONE, preset="trl"), [0.061077, 0.427541, 0.916159, -1.404777], make)


def test_dr_grpo_only_subtracts_the_mean(make: Any) -> None:
    close(dr_grpo(make(BINARY), ONE), [0.5, -0.5, -0.5, 0.5], make)
    close(dr_grpo(make(MIXED), 4), [0.05, 0.35, 0.75, -1.15], make)


def test_rloo_compares_with_the_others(make: Any) -> None:
    close(rloo(make(BINARY), ONE), [2 / 3, -2 / 3, -2 / 3, 2 / 3], make)
    close(rloo(make(MIXED), ONE), [0.066667, 0.466667, 1.0, -1.533333], make)


def test_opo_weighs_the_baseline_by_length(make: Any) -> None:
    expected = [-0.21, 0.09, 0.49, -1.41]
    close(opo(make(MIXED), ONE, lengths=make([2, 4, 3, 1])), expected, make)
    mask = np.arange(4) < np.array([2, 4, 3, 1])[:, None]
    close(opo(make(MIXED), ONE, mask=make(mask)), np.asarray(expected)[:, None] * mask, make)


def test_pass_at_k_rewards_the_lead_of_the_best(make: Any) -> None:
    close(pass_at_k(make(MIXED), ONE, scale="none"), [0, 0, 0.4, 0], make)
    close(pass_at_k(make(MIXED), ONE), [0, 0, 0.488677, 0], make)


def test_gpg_scales_up_for_rewards_of_zero(make: Any) -> None:
    close(gpg(make(BINARY), ONE), [1, -1, -1, 1], make)


def test_gae_without_discount(make: Any) -> None:
    advantages, returns = gae(make(REWARDS), make(VALUES), mask=make(MASK), gamma=1.0, lam=1.0)
    close(advantages, [[0.9, 0.8, 0.7, 0.6], [0.3, 0.4, 0, 0]], make)
    close(returns, [[1, 1, 1, 1], [0.5, 0.5, 0, 0]], make)
    unbiased = [[1.223053, 0.791387, 0.359722, -0.071944], [-1.366942, -0.935276, 0, 0]]
    close(whiten(advantages, make(MASK)), unbiased, make)
    biased = [[1.339788, 0.866921, 0.394055, -0.078811], [-1.497410, -1.024544, 0, 0]]
    close(whiten(advantages, make(MASK), preset="openrlhf"), biased, make)
    close(whiten(advantages, make(MASK), ddof=0), biased, make)


def test_gae_with_discount(make: Any) -> None:
    advantages, _ = gae(make(REWARDS), make(VALUES), mask=make(MASK), gamma=0.99, lam=0.95)
    close(advantages, [[0.773290, 0.718012, 0.6603, 0.6], [0.2752, 0.4, 0, 0]], make)
    expected = [[1.042299, 0.757290, 0.459732, 0.148831], [-1.525805, -0.882348, 0, 0]]
    close(whiten(advantages, make(MASK)), expected, make)


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"gap": "skip"}, 0.670200),
        ({"gap": "plain"}, 0.558181),
        ({"preset": "verl"}, 0.670200),
        ({"preset": "openrlhf"}, 0.558181),
        ({}, 0.670200),
        # by hand: d = [.591, -.009, -.306, .4], A_0 = .591 + .9405 (-.009 + .9405 (-.306 + .9405 * .4))
        ({"preset": "slime"}, 0.591 + 0.9405 * (-0.009 + 0.9405 * (-0.306 + 0.9405 * 0.4))),
    ],
)
def test_gae_has_three_ways_over_a_gap(make: Any, options: Any, first: float) -> None:
    inputs = make([[0, 0, 0, 1]]), make([[0.3, 0.9, 0.9, 0.6]])
    advantages, returns = gae(*inputs, mask=make([[1, 0, 0, 1]]), gamma=0.99, lam=0.95, **options)
    close(advantages, [[first, 0, 0, 0.4]], make)
    close(returns, [[first + 0.3, 0, 0, 1]], make)


def test_gae_of_ragged_rows_is_that_of_padded_ones(make: Any) -> None:
    advantages, returns = gae_ragged(
        make([0, 0, 0, 1, 0, 0.5]), make([0.1, 0.2, 0.3, 0.4, 0.2, 0.1]), [0, 4, 6], gamma=0.99, lam=0.95
    )
    close(advantages, [0.773290, 0.718012, 0.6603, 0.6, 0.2752, 0.4], make)
    close(returns, [0.873290, 0.918012, 0.9603, 1.0, 0.4752, 0.5], make)


def test_reward_to_go(make: Any) -> None:
    close(reward_to_go(make(REWARDS), gamma=0.9), [[0.729, 0.81, 0.9, 1], [0.45, 0.5, 0, 0]], make)
    close(reward_to_go(make([[1, 1, 1]]), mask=make([[1, 0, 1]]), gamma=0.5), [[1.5, 0, 1]], make)
    close(reward_to_go(make([[1, 1, 1]]), mask=make([[1, 0, 1]]), gamma=0.5, gap="plain"), [[1.25, 0, 1]], make)


def test_reinforce_plus_plus_whitens_the_returns(make: Any) -> None:
    expected = [[0.645497] * 4, [-1.290994] * 2 + [0, 0]]
    close(reinforce_plus_plus(make(REWARDS), make(MASK)), expected, make)
    close(reinforce_plus_plus(make([1, 0.5]), make(MASK)), expected, make)


def test_reinforce_plus_plus_baseline_whitens_what_dr_grpo_gives(make: Any) -> None:
    # 0.25 on four tokens and -0.25 on two: mean 1/12, unbiased variance (4 / 36 + 2 / 9) / 4 / 5 ... by numpy
    tokens = np.array([0.25] * 4 + [-0.25] * 2)
    high, low = (tokens[[0, 4]] - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    expected = [[high] * 4, [low] * 2 + [0, 0]]
    close(reinforce_plus_plus_baseline(make([1, 0.5]), ["p", "p"], mask=make(MASK)), expected, make)


def test_remax_subtracts_the_greedy_reward(make: Any) -> None:
    close(remax(make([1.0, 0.5]), make([0.25, 1.0])), [0.75, -0.5], make)
    expected = [[0.75] * 4, [-0.5, -0.5, 0, 0]]
    close(remax(make(REWARDS), make([0.25, 1.0]), mask=make(MASK)), expected, make)
    close(remax(make([1.0, 0.5]), make([0.25, 1.0]), mask=make(MASK)), expected, make)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", [0.2, -0.5, 0]), ("k2", [0.02, 0.125, 0]), ("k3", [0.018731, 0.148721, 0])]
)
@pytest.mark.parametrize("preset", ["penstock", "trl", "verl", "openrlhf", "slime"])
def test_kl_estimates(make: Any, kind: str, expected: list[float], preset: str) -> None:
    close(kl_estimate(make([-0.8, -1.5, -1]), make([-1, -1, -1]), kind, preset=preset), expected, make)


@pytest.mark.parametrize(
    ("kind", "preset", "expected"),
    [
        ("k1", "openrlhf", [10, -10]),
        ("k1", "verl", [30, -30]),
        ("k2", "openrlhf", [10, 10]),
        ("k2", "slime", [450, 450]),
        ("k3", "verl", [10, 10]),
        ("k3", "openrlhf", [10, 10]),
        ("low_var_kl", "slime", [10, 10]),
        ("k3", "slime", [29, np.exp(30) - 31]),
        ("k3", "trl", [29, np.exp(30) - 31]),
    ],
)
def test_kl_clamps_of_each_stack(make: Any, kind: str, preset: str, expected: list[float]) -> None:
    estimate = kl_estimate(make([0, -30]), make([-30, 0]), kind, preset=preset)
    np.testing.assert_allclose(np.asarray(estimate), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "preset", "expected"),
    [
        ("token-mean", "trl", 1.666667),
        ("dapo", "trl", 1.666667),
        ("sequence-mean", "trl", 1.5),
        ("seq-mean-token-mean", "verl", 1.5),
        ("sequence-sum", "verl", 5.0),
        ("dr-grpo", "trl", 1.25),
        ("seq-mean-token-sum-norm", "verl", 2.5),
        (None, "slime", 1.5),
        (None, "penstock", 1.666667),
    ],
)
def test_losses_add_up_by_the_denominator(make: Any, aggregation: Any, preset: str, expected: float) -> None:
    mask = make([[1, 1, 0, 0], [1, 1, 1, 1]])
    denominators = loss_denominators(mask, aggregation, preset=preset, max_length=4)
    assert isinstance(denominators, make.kind)
    loss = aggregate_loss(make([[1, 1, 7, np.nan], [2, 2, 2, 2]]), mask, denominators)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_a_loss_may_be_divided_token_by_token(make: Any) -> None:
    """As rollouts lie in one row without padding; what stands where nothing counts is never used."""
    losses, mask = make([[1, np.nan, 2, 6, 5]]), make([[1, 0, 1, 1, 0]])
    assert float(aggregate_loss(losses, mask, make([[2, 0, 4, 3, np.nan]]))) == pytest.approx(3.0)


def test_token_rewards_put_the_score_on_the_last_token_that_counts(make: Any) -> None:
    mask = make([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    close(token_rewards(make([2, -1]), mask), [[0, 0, 0, 2, 0], [-1, 0, 0, 0, 0]], make)
    kl = make([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    expected = [[-0.1, -0.2, 0, 1.6, 0], [-1.1, 0, 0, 0, 0]]
    close(token_rewards(make([2, -1]), mask, kl=kl, beta=0.1), expected, make)


def test_overlong_responses_are_penalised_in_a_line(make: Any) -> None:
    close(overlong_penalty(make([10, 80, 90, 100, 120]), 100, 20), [0, 0, -0.5, -1, -1], make)
    close(overlong_penalty(make([90]), 100, 20, penalty=0.5), [-0.25], make)


def test_dynamic_sampling_keeps_groups_whose_rewards_differ(make: Any) -> None:
    rewards, groups = make([0.1, 1, 0.1, 0, 0.1, 0.5]), ["a", "b", "a", "b", "a", "c"]
    assert np.asarray(dynamic_sampling(rewards, groups)).tolist() == [False, True, False, True, False, False]
    assert np.asarray(zero_variance_groups(rewards, groups)).tolist() == [True, False, True, False, True, True]
    assert np.asarray(dynamic_sampling(rewards, groups, preset="verl")).tolist()[-1] is True
    close_to = make([1, 1 + 5e-7, 0, 1])
    assert np.asarray(dynamic_sampling(close_to, 2, preset="slime")).tolist() == [False, False, True, True]
    assert np.asarray(dynamic_sampling(close_to, 2)).tolist() == [True, True, True, True]


@pytest.mark.parametrize("epsilon", [1e-4, 1e-9])
def test_equal_rewards_are_exactly_zero_apart(make: Any, epsilon: float) -> None:
    rewards = make([0.1] * 7 + [1 / 3] * 5)
    advantages = grpo(rewards, ["a"] * 7 + ["b"] * 5, epsilon=epsilon)
    assert np.asarray(advantages).tolist() == [0.0] * 12


def test_every_token_of_a_row_gets_its_advantage(make: Any) -> None:
    close(dr_grpo(make([1, 0]), 2, mask=make([[1, 1], [1, 0]])), [[0.5, 0.5], [-0.5, 0]], make)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_float64_stays_float64(name: str) -> None:
    module: Any = pytest.importorskip(name)
    array = {"numpy": np.asarray, "torch": getattr(module, "from_numpy", None)}[name]
    for result in (
        grpo(array(np.array(MIXED)), ONE),
        gae(array(np.array(REWARDS, float)), array(np.array(VALUES)), lam=0.9)[0],
        whiten(array(np.array(MIXED))),
        reward_to_go(array(np.array(REWARDS, float))),
    ):
        assert result.dtype == module.float64


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_comes_back_as_float32(kind: str) -> None:
    torch: Any = pytest.importorskip("torch")
    assert grpo(torch.tensor(BINARY, dtype=getattr(torch, kind)), ONE).dtype == torch.float32
    assert gae(*(torch.ones(1, 3, dtype=getattr(torch, kind)) for _ in range(2)))[0].dtype == torch.float32


def test_what_is_given_is_not_written_to() -> None:
    for dtype in (np.float32, np.float64):
        rewards, values = np.ones((2, 64), dtype), np.full((2, 64), 0.5, dtype)
        rewards.flags.writeable = values.flags.writeable = False
        gae(rewards, values, lam=0.9)
        reward_to_go(rewards, gamma=0.9)
        grpo(rewards[:, 0], 2)
        assert rewards.sum() == 128


def test_gradients_pass_through_losses_and_not_through_advantages() -> None:
    torch: Any = pytest.importorskip("torch")
    values = torch.full((1, 3), 0.5, requires_grad=True)
    assert not gae(torch.ones(1, 3), values)[0].requires_grad
    log_probs = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2)
    estimate = kl_estimate(log_probs, torch.tensor([[-1.0, -1.0]]), "k2")
    aggregate_loss(estimate, mask, loss_denominators(mask)).backward()
    np.testing.assert_allclose(log_probs.grad, [[0.25, 0.0]])


def test_losses_can_be_traced_by_jax() -> None:
    jax: Any = pytest.importorskip("jax")
    jnp = jax.numpy
    mask = jnp.ones((1, 2))
    denominators = loss_denominators(mask)

    def loss(log_probs: Any) -> Any:
        return aggregate_loss(kl_estimate(log_probs, jnp.full((1, 2), -1.0), "k2"), mask, denominators)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.array([[-0.5, -1.0]])), [[0.25, 0.0]], atol=1e-7)


def test_estimators_can_be_traced_by_jax() -> None:
    jax: Any = pytest.importorskip("jax")
    rewards, mask = jax.numpy.asarray(REWARDS, "float32"), jax.numpy.asarray(MASK)
    compiled = jax.jit(lambda r, v, m: gae(r, v, mask=m, gamma=0.99, lam=0.95)[0])
    found = compiled(rewards, jax.numpy.asarray(VALUES, "float32"), mask)
    np.testing.assert_allclose(found, [[0.773290, 0.718012, 0.6603, 0.6], [0.2752, 0.4, 0, 0]], atol=1e-6)
    grouped = jax.jit(lambda r, g: grpo(r, g, preset="verl"))(jax.numpy.asarray(MIXED), jax.numpy.asarray([7, 7, 7, 7]))
    np.testing.assert_allclose(grouped, [0.061085, 0.427593, 0.916270, -1.404947], atol=1e-6)
