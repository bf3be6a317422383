"""Bad input, and the rules for what is odd rather than wrong: each names its row."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages import (
    PRESETS,
    aggregate_loss,
    dr_grpo,
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

ONES = np.ones((2, 3), np.float32)
GROUPED = [grpo, dr_grpo, rloo, gpg, pass_at_k, zero_variance_groups]


@pytest.mark.parametrize("name", ["tlr", "TRL", "verl ", "open-rlhf", "ppo", None, 3])
def test_an_unknown_preset_is_named_with_those_there_are(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"preset.*'trl'"):
        grpo([1.0, 0.0], 2, preset=name)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match="'openrlhf'"):
        whiten([1.0, 2.0], preset="open_rlhf")
    with pytest.raises(ConfigError, match="'skip'"):
        gae(ONES, ONES, gap="skipp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'seq-mean-token-mean'"):
        loss_denominators(ONES, "seq_mean_token_mean")
    with pytest.raises(ConfigError, match=r"\bkind\b.*'k4'"):
        kl_estimate([0.0], [0.0], "k4")


@pytest.mark.parametrize("function", GROUPED, ids=lambda f: f.__name__)
def test_rewards_of_the_wrong_shape_are_refused(function: Any) -> None:
    with pytest.raises(DataError, match="rewards"):
        function(ONES, [0, 0])
    with pytest.raises(DataError, match="rewards"):
        function(1.0, [0])
    with pytest.raises(DataError, match="rewards"):
        function(np.zeros(0), [])


@pytest.mark.parametrize("function", GROUPED, ids=lambda f: f.__name__)
def test_groups_of_another_length_are_refused(function: Any) -> None:
    with pytest.raises(DataError, match=r"\bids\b"):
        function([1.0, 0.0], ["a", "a", "b"])
    with pytest.raises(ConfigError, match=r"\bids\b"):
        function([1.0, 0.0, 1.0], 2)
    with pytest.raises(DataError, match=r"row 1\b"):
        function([1.0, 0.0, 1.0], ["a", None, "a"])
    with pytest.raises(DataError, match="groups"):
        function([1.0, 0.0], ["a", 1])
    with pytest.raises(DataError, match="groups"):
        function([1.0, 0.0], [[1], [2]])


@pytest.mark.parametrize(
    ("function", "rules"),
    [
        (grpo, {"penstock": "raise", "openrlhf": "raise", "trl": 0.0, "slime": 0.0, "verl": 5 / (1 + 1e-6)}),
        (rloo, {"penstock": "raise", "openrlhf": "raise", "trl": 0.0, "slime": 0.0, "verl": 5.0}),
        (dr_grpo, {"penstock": "raise", "openrlhf": 0.0, "trl": 0.0, "slime": 0.0, "verl": 5.0}),
    ],
    ids=["grpo", "rloo", "dr_grpo"],
)
def test_a_group_of_one_goes_by_the_rule_of_the_preset(function: Any, rules: dict[str, Any]) -> None:
    rewards, groups = [1.0, 5.0, 0.0], ["a", "alone", "a"]
    for preset, expected in rules.items():
        own = replace(PRESETS[preset], unequal="group")
        if expected == "raise":
            with pytest.raises(DataError, match=r"'alone'.*single_member_group='zero'") as caught:
                function(rewards, groups, preset=own)
            assert caught.value.row == 1
        else:
            assert function(rewards, groups, preset=own)[1] == pytest.approx(expected, abs=1e-9)
    assert np.isnan(function(rewards, groups, single_member_group="nan")[1])
    assert function(rewards, groups, single_member_group="zero")[1] == 0


def test_pass_at_k_needs_two_whatever_the_preset() -> None:
    for preset in PRESETS:
        with pytest.raises(DataError, match=r"row 0\b"):
            pass_at_k([1.0], [7], preset=preset)
    assert pass_at_k([1.0, 3.0, 2.0], [7, 8, 8], single_member_group="zero", scale="none").tolist() == [0, 1, 0]


@pytest.mark.parametrize("function", GROUPED, ids=lambda f: f.__name__)
def test_a_reward_that_is_no_number_is_named_or_left_out(function: Any) -> None:
    rewards, groups = [1.0, np.nan, 0.0, 0.5], ["a", "a", "a", "a"]
    with pytest.raises(DataError, match=r"\bnan\b.*nan='exclude'") as caught:
        function(rewards, groups)
    assert caught.value.row == 1
    with pytest.raises(DataError, match=r"row 0\b"):
        function([np.inf, 1.0], 2, nan="exclude")
    found = function(rewards, groups, preset="trl")
    expected = function([1.0, 0.0, 0.5], 3, preset="trl")
    np.testing.assert_allclose(found[[0, 2, 3]], expected)
    if function is not zero_variance_groups:
        assert found[1] == 0


def test_none_is_a_missing_reward() -> None:
    assert grpo([1.0, None, 0.0], 3, preset="trl").tolist() == pytest.approx([0.707007, 0, -0.707007], abs=1e-6)


def test_a_group_with_one_number_left_is_a_group_of_one() -> None:
    rewards = [1.0, np.nan, 0.0, 2.0]
    assert grpo(rewards, ["a", "a", "b", "b"], preset="trl").tolist()[:2] == [0, 0]
    with pytest.raises(DataError, match=r"row 0\b.*'a'"):
        grpo(rewards, ["a", "a", "b", "b"], nan="exclude")


def test_lengths_that_disagree_are_named() -> None:
    with pytest.raises(DataError, match=r"\b2\b.*\b4\b"):
        gae(ONES, np.ones((2, 4)))
    with pytest.raises(DataError, match=r"\bmask\b.*row 1\b"):
        gae(ONES, ONES, mask=ONES[:1])
    with pytest.raises(DataError, match=r"row 1\b.*row 0\b") as caught:
        reward_to_go([[1, 2, 3], [1, 2]])
    assert caught.value.row == 1
    with pytest.raises(DataError, match="log_probs"):
        kl_estimate([0.0, 0.0, 0.0], [0.0, 0.0])
    with pytest.raises(DataError, match=r"\b2\b.*\b3\b"):
        token_rewards([1.0, 2.0], ONES, kl=np.ones((2, 2)), beta=0.1)
    with pytest.raises(DataError, match=r"row 2\b"):
        remax([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
        aggregate_loss(ONES, ONES, [1.0])
    with pytest.raises(DataError, match=r"denominators.*\(1, 1\)"):
        aggregate_loss(ONES, ONES, [[1.0]])
    with pytest.raises(DataError, match=r"\bmask\b"):
        grpo([1.0, 2.0, 3.0], 3, mask=ONES)
    with pytest.raises(DataError, match=r"\bmask\b"):
        token_rewards([1.0], [1, 1])


def test_empty_arrays_are_refused() -> None:
    with pytest.raises(DataError, match="rewards"):
        gae(np.zeros((0, 4)), np.zeros((0, 4)))
    with pytest.raises(DataError, match="rewards"):
        reward_to_go(np.zeros((3, 0)))
    with pytest.raises(DataError, match="ddof=1"):
        whiten(ONES, ONES * 0)
    with pytest.raises(DataError, match="ddof=1"):
        whiten([2.0])


@pytest.mark.parametrize(
    "work",
    [
        lambda mask, **kw: gae(ONES, ONES, mask=mask, **kw)[0],
        lambda mask, **kw: reward_to_go(ONES, mask=mask, **kw),
        lambda mask, **kw: token_rewards([1.0, 2.0], mask, **kw),
        lambda mask, **kw: reinforce_plus_plus([1.0, 2.0], mask, **kw),
        lambda mask, **kw: reinforce_plus_plus_baseline([1.0, 2.0], 2, mask=mask, **kw),
    ],
    ids=["gae", "reward_to_go", "token_rewards", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
def test_a_row_without_tokens_is_an_error_or_a_row_of_zeros(work: Any) -> None:
    mask = [[1, 1, 1], [0, 0, 0]]
    for preset in ("penstock", "slime"):
        with pytest.raises(DataError, match=r"\bmask\b.*empty='zero'") as caught:
            work(mask, preset=preset)
        assert caught.value.row == 1
    for preset in ("trl", "verl", "openrlhf"):
        assert work(mask, preset=preset)[1].tolist() == [0, 0, 0]


def test_empty_responses_have_no_place_in_opo() -> None:
    with pytest.raises(DataError, match=r"row 1\b"):
        opo([1.0, 0.0], 2, lengths=[3, 0])
    with pytest.raises(ConfigError, match=r"lengths=.*mask="):
        opo([1.0, 0.0], 2)


def test_a_token_that_is_no_number_is_named_if_it_counts() -> None:
    values = np.ones((3, 50))
    values[1, 40] = np.nan
    with pytest.raises(DataError, match=r"row 1\b.*token 40\b") as caught:
        gae(np.ones((3, 50)), values, gamma=0.9, lam=0.9)
    assert caught.value.row == 1
    with pytest.raises(DataError, match=r"row 1\b.*token 40\b"):
        reward_to_go(values)
    with pytest.raises(DataError, match="mask"):
        whiten(values)


def test_factors_and_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\bgamma\b"):
        gae(ONES, ONES, gamma=1.5)
    with pytest.raises(ConfigError, match=r"\blam\b"):
        gae(ONES, ONES, lam=-0.1)
    with pytest.raises(ConfigError, match=r"buffer.*max_length"):
        overlong_penalty([1], 10, 20)
    with pytest.raises(DataError, match=r"row 1\b"):
        overlong_penalty([1, -1], 10, 5)
    with pytest.raises(ConfigError, match="max_length="):
        loss_denominators(ONES, "dr-grpo")
    with pytest.raises(ConfigError, match=r"\branks\b"):
        loss_denominators(ONES, ranks=0)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 5], r"\b6\b.*\b0\b"),
        ([0, 4, 2, 6], r"row 1\b"),
        ([0.0, 6.0], "offsets"),
        ([0], "offsets"),
        ([0, 3, 3, 6], r"row 1\b"),
    ],
)
def test_offsets_must_fit_the_tokens(offsets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        gae_ragged(np.ones(6), np.ones(6), offsets)


def test_ragged_arrays_must_be_of_one_length() -> None:
    with pytest.raises(DataError, match=r"\b5\b.*\b6\b"):
        gae_ragged(np.ones(6), np.ones(5), [0, 6])
    with pytest.raises(DataError, match=r"\bmask\b"):
        gae_ragged(np.ones(6), np.ones(6), [0, 6], mask=[1])


def test_rows_of_later_blocks_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.batching.backends.numpy.NumpyOperations.at_once", 4)
    with pytest.raises(DataError, match=r"row 5\b") as caught:
        gae_ragged(np.ones(6), np.ones(6), [0, 1, 2, 3, 4, 5, 5, 6])
    assert caught.value.row == 5
    rewards = np.ones(6)
    rewards[4] = np.nan
    with pytest.raises(DataError, match=r"row 4\b.*token 0\b"):
        gae_ragged(rewards, np.ones(6), [0, 1, 2, 3, 4, 5, 6])


def test_arrays_of_two_frameworks_do_not_mix() -> None:
    torch: Any = pytest.importorskip("torch")
    mx: Any = pytest.importorskip("mlx.core")
    with pytest.raises(ConfigError, match=r"\btorch\b"):
        gae(torch.ones(1, 2), mx.ones((1, 2)))


def test_text_is_not_a_reward() -> None:
    with pytest.raises(DataError, match="rewards"):
        grpo(["good", "bad"], 2)


def test_presets_are_values() -> None:
    mine = replace(PRESETS["verl"], epsilon=1e-4)
    assert pickle.loads(pickle.dumps(mine)) == mine  # noqa: S301
    assert hash(mine) != hash(PRESETS["verl"])
    np.testing.assert_allclose(grpo([1.0, 0.0], 2, preset=mine), grpo([1.0, 0.0], 2, epsilon=1e-4))
