"""Rewards of responses and of tokens on their way into advantages: none is lost, none counts twice; and what a loss is
divided by, in every form of a batch."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl import compute as specs
from penstock.rl.advantages import aggregate_loss
from penstock.rl.compute import AdvantageSpec, OverlongPenalty


def make(rollouts: list[dict[str, Any]], **more: Any) -> RolloutDataLoader:
    given_ = {"batch_size": len(rollouts), "backend": "numpy", "prefetch": 0, "shuffle": False, **more}
    return RolloutDataLoader([{"prompt_ids": [1], "group": "g", **rollout} for rollout in rollouts], **given_)


def one(rollouts: list[dict[str, Any]], **more: Any) -> Any:
    return make(rollouts, **more).get_batch()


def test_a_reward_at_the_end_of_a_tools_answer_counts() -> None:
    rollouts = [
        {"response_ids": [2, 3, 4], "loss_mask": [1, 1, 0], "token_rewards": [0.0, 0.0, last]} for last in (1.0, 0.0)
    ]
    batch = one(rollouts)
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.advantages[:, 0] == pytest.approx([0.7071, -0.7071], abs=1e-3)
    batch = one(rollouts, estimator=AdvantageSpec(estimator="reward_to_go", gamma=0.5))
    assert batch.advantages.tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 1.0, -2.0])), min_size=1, max_size=9),
    most=st.integers(1, 9),
)
def test_the_first_token_is_to_have_all_rewards_of_its_response(tokens: list[tuple[bool, float]], most: int) -> None:
    """Undiscounted, whatever is masked and wherever the response is cut; and no token has those of before it."""
    mask, rewards = [int(learned) for learned, _ in tokens], [reward for _, reward in tokens]
    batch = one(
        [{"response_ids": [2] * len(tokens), "loss_mask": mask, "token_rewards": rewards}],
        estimator="reward_to_go",
        all_masked="keep",
        max_response_length=most,
        response_truncation="right",
    )
    assert batch.rewards.tolist() == [sum(rewards)]
    kept, first = mask[:most], True
    for token, learned in enumerate(kept):
        wanted = 0.0
        if learned:  # rewards of masked tokens before it are of the learned token before them, if there is any
            wanted = sum(rewards) if first else sum(rewards[token:])
            first = False
        assert batch.advantages[0, token] == pytest.approx(wanted)


def test_a_response_that_is_cut_keeps_its_rewards_and_its_length() -> None:
    rollouts = [{"response_ids": [2] * n, "token_rewards": [0.0] * (n - 1) + [float(n)]} for n in (4, 10)]
    cut: dict[str, Any] = {"max_response_length": 8, "response_truncation": "right"}
    batch = one(rollouts, estimator="reward_to_go", **cut)
    assert batch.advantages[:, 0].tolist() == batch.rewards.tolist() == [4.0, 10.0]
    assert batch.as_verl()["token_level_scores"][1].tolist() == [0.0] * 7 + [10.0]
    rule = AdvantageSpec(estimator="rloo", overlong=OverlongPenalty(max_length=10, buffer=4))
    assert one(rollouts, estimator=rule, **cut).metadata["shaped_rewards"].tolist() == [4.0, 9.0]


BOTH = [
    {"id": "a", "response_ids": [2, 3], "reward": 10.0, "token_rewards": [0.125, 0.125]},
    {"id": "b", "response_ids": [2, 3], "reward": 0.5, "token_rewards": [0.25, 0.25]},
]


@pytest.mark.parametrize("estimator", ["reward_to_go", "grpo"])
def test_a_reward_beside_others_of_its_tokens_is_refused_or_added(estimator: str) -> None:
    with pytest.raises(DataError, match=r"'a'.*both_rewards='add'"):
        one(BOTH, estimator=estimator)
    alike = one([BOTH[1], BOTH[1] | {"id": "c"}], estimator=estimator)  # says the same twice
    assert alike.rewards.tolist() == [0.5, 0.5]
    batch = one(BOTH, estimator=AdvantageSpec(estimator=estimator, both_rewards="add"))
    assert batch.rewards.tolist() == [10.25, 1.0]
    assert batch.as_verl()["token_level_scores"].tolist() == [[0.125, 10.125], [0.25, 0.75]]
    if estimator == "reward_to_go":
        assert batch.advantages.tolist() == [[10.25, 10.125], [1.0, 0.75]]
    assert one(BOTH, compute_advantages=False).rewards.tolist() == [10.0, 0.5]


def test_what_is_added_up_decides_whether_rewards_vary() -> None:
    rollouts = [{"response_ids": [2], "reward": 1.0, "token_rewards": [step]} for step in (0.0, 0.5)]
    added = AdvantageSpec(both_rewards="add")
    assert one(rollouts, estimator=added, drop_zero_variance=True).num_rollouts == 2


def test_how_two_rewards_go_together_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"both_rewards.*'sum'"):
        AdvantageSpec(both_rewards="sum")  # type: ignore[arg-type]
    assert "both_rewards" not in AdvantageSpec().describe()
    assert "both_rewards=add" in AdvantageSpec(both_rewards="add").describe()


def test_estimators_with_one_number_a_response_give_trl_one() -> None:
    rollouts = [
        {"response_ids": [2, 3], "loss_mask": [0, 1], "reward": 1.0},
        {"response_ids": [2], "reward": 0.0},
        {"response_ids": [2], "loss_mask": [0], "reward": 2.0},
    ]
    keep: dict[str, Any] = {"all_masked": "keep"}
    assert one(rollouts, estimator="dr_grpo", **keep).as_trl()["advantages"].tolist() == [0.0, -1.0, 0.0]
    own = one(rollouts, estimator=lambda rewards, groups, mask: rewards * 2, **keep)
    assert own.as_trl()["advantages"].tolist() == [2.0, 0.0, 0.0]
    assert one(rollouts, estimator="reward_to_go", **keep).as_trl()["advantages"].shape == (3, 2)


def test_verl_is_given_no_nan_for_excluded_rollouts() -> None:
    rollouts = [{"response_ids": [2, 3], "reward": reward} for reward in (1.0, 0.0, None)]
    for estimator in ("grpo", "reward_to_go"):
        view = one(rollouts, missing_rewards="exclude", estimator=estimator).as_verl()
        assert view["token_level_scores"].tolist() == [[0, 1], [0, 0], [0, 0]]
        assert all(np.isfinite(value).all() for key, value in view.items() if key != "uid")


def test_dr_grpo_divides_by_rows_and_the_longest_that_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [{"response_ids": [2, 3], "reward": reward} for reward in (1.0, 0.0)]
    assert one(rollouts, estimator="dr_grpo", max_response_length=50).denominators.tolist() == [100.0, 100.0]
    assert one(rollouts, estimator=AdvantageSpec(estimator="dr_grpo", max_length=10)).denominators[0] == 20.0
    chosen = AdvantageSpec(estimator="dr_grpo", aggregation="token-mean", max_length=10)
    assert one(rollouts, estimator=chosen).denominators[0] == 4.0
    assert not caplog.records
    specs._log_missing_length.cache_clear()
    with caplog.at_level(logging.WARNING):
        loader = make(rollouts, estimator="dr_grpo")
        assert loader.get_batch().denominators[0] == loader.get_batch().denominators[0] == 4.0
    assert [record.message for record in caplog.records if "pass max_response_length=" in record.message]
    assert len(caplog.records) == 1


def loss_of(batch: Any) -> float:
    """What the documentation says: of tokens, wherever they lie."""
    tokens = batch.input_ids if batch.layout.form.padding == "free" else batch.responses
    return float(aggregate_loss(tokens * 1.0 * batch.advantages, batch.response_mask, batch.denominators))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "dr-grpo"])
@pytest.mark.parametrize("padding", ["sides", "free"])
def test_micro_batches_of_uneven_ranks_are_equally_many_and_add_up(padding: Any, aggregation: str) -> None:
    rng = np.random.default_rng(3)
    rollouts = [
        {
            "id": str(number),
            "group": f"g{number // 5}",
            "prompt_ids": [1] * (2 + number // 5),
            "response_ids": rng.integers(1, 90, int(rng.integers(5, 9))).tolist(),
            "reward": float(rng.random()),
        }
        for number in range(15)
    ]
    fixed: dict[str, Any] = {
        "estimator": AdvantageSpec(aggregation=aggregation, max_length=9),
        "padding": padding,
        "shuffle": True,
        "micro_batch_tokens": 14,  # one rollout in each
    }
    alone = [loss_of(batch) for batch in make(rollouts, **fixed | {"batch_size": 5})]
    found: dict[int, float] = defaultdict(float)
    for batches in zip(
        *(make(rollouts, rank=rank, world_size=2, **fixed | {"batch_size": 3}) for rank in range(2)), strict=True
    ):
        parts = [batch.micro_batches() for batch in batches]
        assert [len(part) for part in parts] == [3, 3]
        names = [name for part in parts for micro in part if not micro.metadata["blank"] for name in micro.ids]
        assert sorted(names) == sorted(name for batch in batches for name in batch.ids)
        assert len(names) == 5
        for micro in (micro for part in parts for micro in part):
            assert micro.input_ids.size <= 14
            found[batches[0].metadata["step"]] += loss_of(micro)
    assert list(found.values()) == pytest.approx(alone)


def test_a_rollout_that_fits_into_no_micro_batch_is_named() -> None:
    rollouts = [{"id": f"r{n}", "response_ids": [2] * n, "reward": float(n)} for n in (3, 9, 4)]
    with pytest.raises(ConfigError, match="'r9'"):
        one(rollouts, micro_batch_tokens=6)
    with pytest.raises(ConfigError, match="'r9'"):
        one(rollouts).micro_batches(6)
