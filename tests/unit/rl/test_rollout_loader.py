"""Rollouts that are all there: which come when, with which numbers, and what is refused."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections import Counter, defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.states import with_checksum
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl import advantages as known
from penstock.rl.advantages import ESTIMATORS
from penstock.rl.compute import AdvantageSpec, KLPenalty, OverlongPenalty
from penstock.rl.options import LengthLimits, RolloutBatching, RolloutSelection, Staleness

SIZES = (4, 2, 3, 4, 2, 4, 2, 3, 4, 4)


def make_rollouts(sizes: tuple[int, ...] = SIZES, seed: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Groups of these sizes; rollouts of all groups in turns, so that none lies together."""
    rng = np.random.default_rng(seed)
    found = []
    prompts: dict[int, list[int]] = {}
    for group, size in enumerate(sizes):
        for number in range(size):
            length = int(rng.integers(1, 9))
            mask = rng.random(length) < 0.7
            mask[rng.integers(length)] = True
            rollout = {
                "id": f"{group}.{number}",
                "group": f"g{group}",
                "prompt_ids": prompts.setdefault(group, rng.integers(1, 90, rng.integers(1, 6)).tolist()),
                "response_ids": rng.integers(1, 90, length).tolist(),
                "loss_mask": mask.astype(int).tolist(),
                "reward": float(rng.integers(0, 4)) / 2 + number / 8,
                "logprobs": (-rng.random(length)).round(3).tolist(),
                "ref_logprobs": (-rng.random(length)).round(3).tolist(),
                "values": rng.random(length).round(3).tolist(),
                "policy_version": 3,
                "metadata": {"baseline": 0.5},
            }
            found.append((number, rollout | columns))
    return [rollout for _, rollout in sorted(found, key=lambda pair: pair[0])]


def make(rollouts: Any = None, **more: Any) -> RolloutDataLoader:
    data = make_rollouts() if rollouts is None else rollouts
    return RolloutDataLoader(data, **{"batch_size": 6, "backend": "numpy", "prefetch": 0, **more})


def numbers_of(batch: Any, names: tuple[str, ...] = ("advantages",)) -> dict[str, Any]:
    """What a batch says of each rollout, without padding."""
    found, facts = {}, batch.metadata
    free = batch.layout.form.padding == "free"
    starts = batch.to_numpy()["cu_seqlens"].tolist() if free else [0] * batch.num_rollouts
    for row, name in enumerate(facts["ids"]):
        left, length = int(facts["prompt_length"][row]), int(facts["response_length"][row])
        at = slice(starts[row] + left, starts[row] + left + length) if free else slice(0, length)
        of = 0 if free else row
        found[name] = [np.asarray(facts[key])[of, at].tolist() for key in names] + [float(facts["rewards"][row])]
    return found


def divisors_of(batch: Any) -> dict[str, float]:
    """What the loss of each rollout is divided by; without padding, at its first token that is learned."""
    facts = np.asarray(batch.metadata["denominators"])
    if batch.layout.form.padding == "free":
        starts = batch.to_numpy()["cu_seqlens"].tolist()
        facts = np.array([facts[0, at + int(left)] for at, left in zip(starts, batch.metadata["prompt_length"])])
    return dict(zip(batch.ids, facts.tolist()))


def epoch(loader: RolloutDataLoader, names: tuple[str, ...] = ("advantages",)) -> dict[str, Any]:
    return {key: value for batch in loader for key, value in numbers_of(batch, names).items()}


def padded(rollouts: list[dict[str, Any]], name: str) -> np.ndarray:
    width = max(len(rollout["response_ids"]) for rollout in rollouts)
    return np.array([[*rollout[name], *[0] * (width - len(rollout[name]))] for rollout in rollouts], np.float64)


# -- The numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["penstock", "trl", "verl", "openrlhf", "slime"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_those_of_the_function_over_all_rollouts(estimator: str, preset: str) -> None:
    rollouts = make_rollouts((4,) * 6)
    rewards, groups = np.array([r["reward"] for r in rollouts]), [r["group"] for r in rollouts]
    mask = padded(rollouts, "loss_mask") > 0
    function = getattr(known, estimator)
    if estimator == "gae":
        on_tokens = known.token_rewards(rewards, mask)
        wanted, returns = function(on_tokens, padded(rollouts, "values"), mask=mask, gamma=0.9, lam=0.8, preset=preset)
        wanted = known.whiten(wanted, mask, preset=preset)
    elif estimator == "reward_to_go":
        wanted = function(known.token_rewards(rewards, mask), mask=mask, gamma=0.9, preset=preset)
    elif estimator == "reinforce_plus_plus":
        wanted = function(rewards, mask, gamma=0.9, preset=preset)
    elif estimator == "remax":
        wanted = function(rewards, np.full(len(rewards), 0.5), mask=mask, gamma=0.9, preset=preset)
    else:
        wanted = function(rewards, groups, mask=mask, preset=preset)
    gamma = 0.9 if estimator in ("gae", "remax", "reward_to_go", "reinforce_plus_plus") else 1.0
    spec = AdvantageSpec(estimator=estimator, preset=preset, gamma=gamma, lam=0.8)
    found = epoch(make(rollouts, estimator=spec, batch_size=7))
    assert len(found) == 24
    for row, rollout in enumerate(rollouts):
        length = len(rollout["response_ids"])
        np.testing.assert_allclose(found[rollout["id"]][0], wanted[row, :length], atol=1e-6)
    if estimator == "gae":
        returned = epoch(make(rollouts, estimator=spec), ("returns",))
        for row, rollout in enumerate(rollouts):
            length = len(rollout["response_ids"])
            np.testing.assert_allclose(returned[rollout["id"]][0], returns[row, :length], atol=1e-6)


def test_a_function_may_stand_for_its_name() -> None:
    assert epoch(make(estimator=known.rloo)) == epoch(make(estimator="rloo")) != epoch(make(estimator="grpo"))


def test_a_function_of_ones_own_gives_numbers_for_rows_or_for_tokens() -> None:
    def of_rows(rewards: Any, groups: Any, *, mask: Any) -> Any:
        return rewards * len(set(groups))

    def of_tokens(rewards: Any, groups: Any, *, mask: Any, by: float) -> Any:
        return rewards[:, None] * mask / by

    for rollout in make_rollouts():
        expected = [rollout["reward"] * 10 * flag for flag in rollout["loss_mask"]]
        assert epoch(make(estimator=of_rows))[rollout["id"]][0] == pytest.approx(expected)
        spec = AdvantageSpec(estimator=of_tokens, options={"by": 0.1})
        assert epoch(make(estimator=spec))[rollout["id"]][0] == pytest.approx(expected)
    with pytest.raises(ConfigError, match=r"\b3\b.*\b32\b"):
        make(estimator=lambda rewards, groups, mask: np.zeros(3)).get_batch()


def test_penalties_change_rewards_before_advantages_are_computed() -> None:
    rollouts = make_rollouts()
    rewards = np.array([r["reward"] for r in rollouts])
    lengths = np.array([float(len(r["response_ids"])) for r in rollouts])
    ours, theirs, mask = (padded(rollouts, name) for name in ("logprobs", "ref_logprobs", "loss_mask"))
    shaped = rewards + known.overlong_penalty(lengths, 8, 4, penalty=2.0) - 0.1 * ((ours - theirs) * mask).sum(1)
    wanted = known.rloo(shaped, [r["group"] for r in rollouts])
    spec = AdvantageSpec(
        estimator="rloo", kl=KLPenalty(beta=0.1), overlong=OverlongPenalty(max_length=8, buffer=4, penalty=2.0)
    )
    for batch in make(rollouts, estimator=spec):
        for row, name in enumerate(batch.ids):
            number = next(number for number, rollout in enumerate(rollouts) if rollout["id"] == name)
            facts = batch.metadata
            assert facts["shaped_rewards"][row] == pytest.approx(shaped[number], abs=1e-6)
            assert facts["rewards"][row] == pytest.approx(rewards[number])
            learned = facts["advantages"][row][facts["response_mask"][row]]
            assert learned.tolist() == pytest.approx([wanted[number]] * len(learned), abs=1e-5)
    token_spec = AdvantageSpec(estimator="reward_to_go", kl=KLPenalty(beta=0.1, kind="k3"))
    kl = known.kl_estimate(ours, theirs, "k3")
    goal = known.reward_to_go(known.token_rewards(rewards, mask > 0, kl=kl, beta=0.1), mask=mask > 0)
    found = epoch(make(rollouts, estimator=token_spec))
    for row, rollout in enumerate(rollouts):
        assert found[rollout["id"]][0] == pytest.approx(goal[row, : len(rollout["response_ids"])], abs=1e-5)


def test_rewards_per_token_are_used_as_they_are_and_summed_where_one_is_needed() -> None:
    rollouts = [
        {"prompt_ids": [1], "response_ids": [2, 3, 4], "token_rewards": [1.0, 0.0, 2.0], "group": "a", "id": "x"},
        {"prompt_ids": [1], "response_ids": [2, 3], "token_rewards": [0.0, 1.0], "group": "a", "id": "y"},
    ]
    assert epoch(make(rollouts, estimator="reward_to_go"))["x"] == [[3.0, 2.0, 2.0], 3.0]
    assert epoch(make(rollouts, estimator="dr_grpo"))["y"] == [[-1.0, -1.0], 1.0]


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(4, 40),
    padding=st.sampled_from(["sides", "free"]),
    multiple=st.sampled_from([None, 8]),
    keep_groups=st.booleans(),
    seed=st.integers(0, 3),
    estimator=st.sampled_from(["grpo", "gae", "reinforce_plus_plus"]),
)
def test_neither_minibatches_nor_padding_change_a_number(
    size: int, padding: Any, multiple: Any, keep_groups: bool, seed: int, estimator: str
) -> None:
    wanted = epoch(make(estimator=estimator, shuffle=False, batch_size=32))
    found = make(
        estimator=estimator,
        batch_size=size,
        padding=padding,
        pad_to_multiple_of=multiple,
        keep_groups=keep_groups,
        seed=seed,
    )
    assert epoch(found) == wanted


def test_rewards_alone_come_without_advantages() -> None:
    batch = make(compute_advantages=False).get_batch()
    assert "advantages" not in batch.metadata
    assert batch.metadata["rewards"].shape == batch.metadata["denominators"].shape == (batch.batch_size,)


# -- What comes when ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    batch_size=st.integers(4, 14),
    ppo_epochs=st.integers(1, 3),
    rows=st.sampled_from([None, 1, 5, 11, 31, 32, 99]),
    keep_groups=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_rollout_comes_once_a_ppo_epoch_and_groups_stay_whole(
    batch_size: int, ppo_epochs: int, rows: int | None, keep_groups: bool, seed: int
) -> None:
    loader = make(
        batch_size=batch_size, ppo_epochs=ppo_epochs, rollout_batch_size=rows, keep_groups=keep_groups, seed=seed
    )
    seen: Counter[Any] = Counter()
    places: dict[Any, set[Any]] = defaultdict(set)
    count = len(loader)
    batches = list(loader)
    assert len(batches) == count
    for batch in batches:
        facts = batch.metadata
        assert len(facts["ids"]) <= batch_size
        seen.update((name, facts["ppo_epoch"]) for name in facts["ids"])
        for group in facts["groups"]:
            places[group, facts["ppo_epoch"]].add(facts["step"])
    assert set(seen.values()) == {1}
    assert len(seen) == 32 * ppo_epochs
    if keep_groups:
        assert all(len(steps) == 1 for steps in places.values())
    assert loader.epoch == 1


def test_rollout_batches_are_whole_groups_with_at_least_so_many_rollouts() -> None:
    loader = make(rollout_batch_size=6, shuffle=False, batch_size=40, estimator="dr_grpo", ppo_epochs=2)
    batches = [(batch.metadata["rollout_batch"], batch.metadata["ppo_epoch"], batch.num_rollouts) for batch in loader]
    assert batches == [(n, e, size) for n, size in enumerate([6, 7, 6, 9, 4]) for e in (0, 1)]


def test_each_ppo_epoch_and_each_epoch_has_an_order_of_its_own() -> None:
    loader = make(ppo_epochs=2)
    orders = [tuple(name for batch in loader for name in batch.groups) for _ in range(2)]
    assert len({orders[0][:32], orders[0][32:], orders[1][:32], orders[1][32:]}) == 4
    assert orders[0] != tuple(name for batch in make(ppo_epochs=2, seed=1) for name in batch.groups)


@settings(deadline=None, max_examples=16)
@given(
    world=st.sampled_from([2, 3, 6]),
    keep_groups=st.booleans(),
    padding=st.sampled_from(["sides", "free"]),
    aggregation=st.sampled_from(["token-mean", "sequence-mean", "sequence-sum"]),
)
def test_ranks_together_have_the_minibatches_and_the_numbers_of_one(
    world: int, keep_groups: bool, padding: Any, aggregation: str
) -> None:
    spec = AdvantageSpec(estimator="gae", aggregation=aggregation)
    fixed = {"keep_groups": keep_groups, "padding": padding, "estimator": spec, "ppo_epochs": 2}
    ranks = [make(batch_size=6 // world, rank=rank, world_size=world, **fixed) for rank in range(world)]
    names = ("advantages", "returns", "old_log_probs")
    alone = list(make(**fixed))
    parts = [list(rank) for rank in ranks]
    assert [len(part) for part in parts] == [len(alone)] * world
    for batch, *shares in zip(alone, *parts):
        wanted = numbers_of(batch, names)
        found = [numbers_of(share, names) for share in shares if not share.metadata["blank"]]
        assert sum(map(len, found)) == len(wanted)
        assert {name: value for share in found for name, value in share.items()} == wanted
        assert max(map(len, found)) - min(map(len, found)) <= 1
        divided = divisors_of(batch)
        for share in shares:
            assert share.num_items_in_batch == batch.num_items_in_batch
            if not share.metadata["blank"]:
                assert divisors_of(share).items() <= divided.items()


def test_a_rank_for_which_there_is_no_rollout_gets_one_that_teaches_nothing() -> None:
    rollouts = make_rollouts((2, 2))[:4]
    ranks = [
        make(rollouts, batch_size=1, rank=rank, world_size=3, keep_groups=True, estimator="dr_grpo")
        for rank in range(3)
    ]
    for batches in zip(*map(list, ranks), strict=True):
        assert [batch.metadata["blank"] for batch in batches] == [False, False, True]
        blank = batches[2]
        assert blank.batch_size == 1
        assert not blank.metadata["response_mask"].any()
        assert not blank.metadata["advantages"].any()
        assert (blank.labels == -100).all()
        assert blank.metadata["denominators"].tolist() == [1.0]


@pytest.mark.parametrize("gradients", ["summed", "averaged"])
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"])
def test_losses_divided_by_the_denominators_add_up_over_ranks(aggregation: str, gradients: Any) -> None:
    spec = AdvantageSpec(aggregation=aggregation)
    fixed = {"estimator": spec, "max_response_length": 8, "gradients": gradients}

    def loss(batch: Any) -> float:
        tokens = batch.responses * 1.0
        return float(known.aggregate_loss(tokens, batch.response_mask, batch.denominators))

    alone = []
    for batch in make(**fixed):
        wanted = known.loss_denominators(batch.response_mask, aggregation, max_length=8)
        assert batch.metadata["denominators"].tolist() == pytest.approx(wanted.tolist())
        assert batch.num_items_in_batch == batch.response_mask.sum()
        alone.append(loss(batch))
    ranks = [[loss(b) for b in make(batch_size=2, rank=rank, world_size=3, **fixed)] for rank in range(3)]
    together = np.sum(ranks, axis=0) if gradients == "summed" else np.mean(ranks, axis=0)
    assert together.tolist() == pytest.approx(alone)


def test_micro_batches_hold_so_many_tokens_and_every_rank_has_equally_many() -> None:
    fixed = {"micro_batch_tokens": 30, "batch_size": 8, "padding": "sides"}
    ranks = [list(make(rank=rank, world_size=2, **fixed)) for rank in range(2)]
    for batches in zip(*ranks, strict=True):
        assert len({len(batch.metadata["micro_batches"]) for batch in batches}) == 1
        for batch in batches:
            rows = [row for part in batch.metadata["micro_batches"] for row in part]
            assert sorted(rows) == list(range(batch.batch_size))
            for part in batch.metadata["micro_batches"]:
                assert batch.take(part).input_ids.size <= 30


def test_batches_by_number_are_those_of_a_loop() -> None:
    loader = make(ppo_epochs=2)
    batches = [batch.ids for batch in loader]
    loader.reset()
    assert [loader[number].ids for number in range(len(loader))] == batches
    loader.seek(3)
    assert loader.get_batch().ids == batches[3]
    loader.set_epoch(2)
    assert (loader.epoch, loader.step) == (2, 2 * len(batches))


def test_get_batch_takes_other_sizes_and_goes_on_in_the_next_epoch() -> None:
    loader = make()
    seen = [name for size in (16, 4, 32, 32) for name in loader.get_batch(size).ids]
    assert len(seen) == 64
    assert set(Counter(seen).values()) == {2}
    assert loader.epoch == 2


def test_files_give_what_a_list_gives(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
    assert epoch(make(path)) == epoch(make(rollouts))


def test_workers_of_another_process_can_have_it() -> None:
    loader = copy.deepcopy(make())
    pickle.dumps(loader)
    assert epoch(loader) == epoch(make())


def test_torch_gets_tensors() -> None:
    torch = pytest.importorskip("torch")
    batch = make(backend="torch").get_batch()
    assert batch.metadata["advantages"].dtype == torch.float32
    assert batch.metadata["rewards"].shape == batch.metadata["denominators"].shape == (batch.batch_size,)
    assert isinstance(batch.input_ids, torch.Tensor)


# -- What is left out --------------------------------------------------------------------------------------------------


def aged(*versions: int | None) -> list[dict[str, Any]]:
    rollouts = make_rollouts((2,) * len(versions))
    for rollout in rollouts:
        rollout["policy_version"] = versions[int(rollout["group"][1:])]
    return rollouts


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_arrays_that_the_caller_reuses_change_no_batch(framework: str, dtype: str) -> None:
    mask = np.arange(5) != np.arange(4)[:, None]
    given: dict[str, Any] = {
        "prompt_ids": np.full((4, 3), 7, dtype),
        "response_ids": np.arange(20, dtype=dtype).reshape(4, 5),
        "loss_mask": mask,
        "logprobs": np.full((4, 5), -1, np.float32),
        "reward": np.arange(4.0),
    }
    buffers = list(given.values())
    if framework == "torch":
        torch: Any = pytest.importorskip("torch")
        given = {name: torch.from_numpy(array) for name, array in given.items()}
    loader = make(given, batch_size=4, shuffle=False, ppo_epochs=2)
    batches = iter(loader)
    batch = next(batches)
    expected = batch.response_mask.copy(), batch.responses.copy()
    for buffer in buffers:
        buffer[:] = 0
    for each in (batch, next(batches)):
        assert np.array_equal(each.loss_mask[:, 3:], expected[0])
        assert np.array_equal(each.labels[:, 3:], np.where(expected[0], expected[1], -100))
        assert np.array_equal(each.responses, expected[1])
        assert (each.prompts == 7).all()
        assert (each.old_log_probs == -1).all()


def test_stale_groups_are_dropped_and_counted_kept_or_flagged() -> None:
    rollouts = aged(5, 4, 3, 2)
    fixed = {"max_staleness": 1, "policy_version": 5, "batch_size": 8}
    loader = make(rollouts, **fixed)
    assert set(loader.get_batch().groups) == {"g0", "g1"}
    assert loader.counts == {"stale": 4}
    kept = make(rollouts, on_stale="keep", **fixed).get_batch()
    flagged = make(rollouts, on_stale="flag", **fixed).get_batch()
    assert kept.num_rollouts == flagged.num_rollouts == 8
    assert not kept.metadata["stale"].any()
    for group, stale, age in zip(flagged.groups, flagged.metadata["stale"], flagged.metadata["staleness"]):
        assert (bool(stale), int(age)) == {"g0": (False, 0), "g1": (False, 1), "g2": (True, 2), "g3": (True, 3)}[group]


def test_a_group_of_which_one_rollout_is_stale_goes_as_a_whole() -> None:
    rollouts = aged(5, 5)
    rollouts[-1]["policy_version"] = 1
    loader = make(rollouts, max_staleness=1, policy_version=5)
    assert set(loader.get_batch().groups) == {"g0"}
    assert loader.counts == {"stale": 2}


def test_a_version_from_the_future_is_an_error_that_names_the_sample() -> None:
    with pytest.raises(DataError, match=r"'3\.0'.*policy_version"):
        make(aged(5, 4, 3, 9), policy_version=5).get_batch()


def test_staleness_needs_to_know_both_versions() -> None:
    with pytest.raises(ConfigError, match="policy_version="):
        make(aged(5), max_staleness=1).get_batch()
    with pytest.raises(DataError, match=r"'1\.0'"):
        make(aged(5, None), max_staleness=1, policy_version=5).get_batch()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_new_version_holds_for_rollout_batches_that_are_not_begun(prefetch: int) -> None:
    rollouts = aged(5, 5, 5, 5)
    loader = make(
        rollouts, max_staleness=1, policy_version=5, rollout_batch_size=4, batch_size=2, ppo_epochs=2, prefetch=prefetch
    )
    seen = []
    for batch in loader:
        seen.append((batch.metadata["rollout_batch"], batch.metadata["policy_version"]))
        if len(seen) == 3:
            loader.policy_version = 7
            state = json.loads(json.dumps(loader.state_dict()))
    assert seen == [(0, 5)] * 4
    assert loader.counts == {"stale": 4}
    again = make(rollouts, max_staleness=1, rollout_batch_size=4, batch_size=2, ppo_epochs=2)
    again.load_state_dict(state)
    assert again.policy_version == 7
    assert [batch.metadata["policy_version"] for batch in again] == [5]


def test_groups_whose_rewards_are_all_alike_teach_nothing_and_are_dropped() -> None:
    rollouts = make_rollouts((3, 3, 3))
    for rollout in rollouts:
        if rollout["group"] != "g1":
            rollout["reward"] = 1.0
    loader = make(rollouts, drop_zero_variance=True)
    assert set(loader.get_batch().groups) == {"g1"}
    assert loader.counts == {"zero variance": 6}
    with pytest.raises(DataError, match=r"\b9 zero variance"):
        make([rollout | {"reward": 0.0} for rollout in rollouts], drop_zero_variance=True).get_batch()


def test_rollouts_without_a_reward_are_treated_by_rule() -> None:
    rollouts = make_rollouts((3, 3))
    rollouts[0]["reward"], rollouts[1]["reward"] = float("nan"), None
    with pytest.raises(DataError, match=r"0\.0"):
        make(rollouts)
    zero = epoch(make(rollouts, missing_rewards="zero"))
    assert zero["0.0"][1] == 0.0
    left_out = [rollout for rollout in rollouts if rollout["id"] not in ("0.0", "1.0")]
    wanted = epoch(make(left_out))
    excluded = make(rollouts, missing_rewards="exclude")
    found = epoch(excluded)
    assert not any(found["0.0"][0])
    assert {name: value for name, value in found.items() if name in wanted} == wanted
    assert not any(epoch(make(rollouts, preset="trl"))["0.0"][0])
    dropped = make(rollouts, missing_rewards="drop")
    assert epoch(dropped) == wanted
    assert dropped.counts == {"missing reward": 2}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_excluded_rollouts_have_no_advantage_with_any_estimator(estimator: str) -> None:
    rollouts = make_rollouts((4, 4))
    rollouts[0]["reward"] = None
    found = epoch(make(rollouts, missing_rewards="exclude", estimator=estimator))
    assert not any(found["0.0"][0])
    assert all(np.isfinite(value[0]).all() for value in found.values())


def test_rollouts_without_a_token_to_learn_are_treated_by_rule() -> None:
    rollouts = make_rollouts((3, 3))
    rollouts[2]["loss_mask"] = [0] * len(rollouts[2]["response_ids"])
    with pytest.raises(DataError, match=r"0\.1"):
        make(rollouts)
    dropped = make(rollouts, all_masked="drop")
    assert len(epoch(dropped)) == 5
    assert dropped.counts == {"all masked": 1}
    assert len(epoch(make(rollouts, all_masked="keep"))) == len(epoch(make(rollouts, preset="trl"))) == 6


def test_what_is_cut_off_is_counted_and_is_cut_before_numbers_are_computed() -> None:
    rollouts = make_rollouts((4, 4))
    for rollout in rollouts:
        rollout["loss_mask"] = [1] * len(rollout["response_ids"])
    with pytest.raises(DataError, match="max_response_length=3"):
        make(rollouts, max_response_length=3).get_batch()
    loader = make(rollouts, max_response_length=3, response_truncation="right", estimator="opo", batch_size=8)
    batch = loader.get_batch()
    facts = batch.metadata
    for name, length, cut in zip(batch.ids, facts["response_length"], facts["truncated_tokens"]):
        whole = len(next(rollout for rollout in rollouts if rollout["id"] == name)["response_ids"])
        assert length + cut == whole
        assert length <= 3
    short = [{**r, **{k: r[k][:3] for k in ("response_ids", "loss_mask", "logprobs", "ref_logprobs", "values")}}
             for r in rollouts]  # fmt: skip
    assert numbers_of(batch) == epoch(make(short, estimator="opo", batch_size=8))


# -- State -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_run_that_was_stopped_goes_on_exactly_on_any_number_of_ranks(data: st.DataObject) -> None:
    fixed = {
        "ppo_epochs": data.draw(st.integers(1, 2)),
        "rollout_batch_size": data.draw(st.sampled_from([None, 5, 12])),
        "drop_last": data.draw(st.booleans()),
        "drop_zero_variance": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 3)),
    }
    rollouts = make_rollouts((4, 2, 3, 4, 2, 3))
    for rollout in rollouts:
        if rollout["group"] in ("g2", "g5"):
            rollout["reward"] = 0.0
    alone = make(rollouts, **fixed)
    wanted = []
    try:
        wanted = [numbers_of(alone.get_batch()) for _ in range(9)]
    except ConfigError:  # drop_last leaves nothing
        assert fixed["drop_last"]
        return
    state, done = None, 0
    while done < len(wanted):
        world = data.draw(st.sampled_from([1, 2, 3]))
        count = data.draw(st.integers(1, len(wanted) - done))
        states = []
        found: list[dict[str, Any]] = [{} for _ in range(count)]
        for rank in range(world):
            loader = make(rollouts, batch_size=6 // world, rank=rank, world_size=world, **fixed)
            if state is not None:
                loader.load_state_dict(state)
                assert json.loads(json.dumps(loader.state_dict())) == state
            for number in range(count):
                batch = loader.get_batch()
                if not batch.metadata["blank"]:
                    found[number] |= numbers_of(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
        assert found == wanted[done : done + count]
        assert all(other == states[0] for other in states)
        assert len(json.dumps(states[0])) < 4096
        state = states[0]
        done += count


def test_a_state_refuses_what_it_was_not_made_for() -> None:
    rollouts = make_rollouts()
    loader = make(rollouts)
    loader.get_batch()
    state = loader.state_dict()
    for other, message in {
        "data": r"source\.fingerprint.*'\w+'",
        "seed": r"\bseed\b",
        "estimator": r"estimator=grpo.*'estimator=rloo",
        "ppo_epochs": "ppo_epochs",
        "batch_size": r"\b6\b.*\b7\b",
    }.items():
        changed = {"data": {}, "seed": {"seed": 1}, "estimator": {"estimator": "rloo"}}
        more: Any = changed.get(other, {other: 2 if other == "ppo_epochs" else 7})
        data = [*rollouts[:-1], rollouts[-1] | {"reward": 9.0}] if other == "data" else rollouts
        with pytest.raises(ResumeError, match=message):
            make(data, **more).load_state_dict(state)
    with pytest.raises(ResumeError, match="RolloutDataLoader"):
        loader.load_state_dict({"version": 1})
    with pytest.raises(ResumeError, match="version 99"):
        loader.load_state_dict(state | {"version": 99})
    for damaged in (state | {"position": {"step": 1}}, with_checksum(state | {"position": {"step": 1}})):
        with pytest.raises(ResumeError, match="state"):
            loader.load_state_dict(damaged)
    with pytest.raises(ResumeError, match="RolloutDataLoader"):
        loader.commit({"position": 3})
    loader.commit()
    more_rows = make(rollouts, batch_size=7)
    more_rows.load_state_dict(state, new_batch_size=True)
    assert more_rows.step == 1


def test_rules_may_become_others_between_two_rollout_batches_and_not_within_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = make(rollout_batch_size=16, batch_size=16)
    states = [loader.state_dict()]
    for _ in range(3):
        loader.get_batch()
        states.append(loader.state_dict())
    places = [state["position"] for state in states]
    assert [(place["number"], place["unit"] > 0) for place in places] == [(0, False), (0, True), (1, False), (0, False)]
    other: dict[str, Any] = {"ppo_epochs": 2, "estimator": "rloo", "missing_rewards": "drop", "batch_size": 16}
    for number, state in enumerate(states):
        again = make(rollout_batch_size=16, **other)
        if state["position"]["unit"]:
            with pytest.raises(ResumeError, match="ppo_epochs"):
                again.load_state_dict(state)
            continue
        again.load_state_dict(state)
        assert "ppo_epochs" in caplog.text
        assert again.get_batch().metadata["rollout_batch"] == (number == 2)
    with pytest.raises(ResumeError, match="rollout_batch_size"):
        make(rollout_batch_size=8, batch_size=16).load_state_dict(states[2])
    make(rollout_batch_size=8, batch_size=16).load_state_dict(states[3])


# -- Bad input ---------------------------------------------------------------------------------------------------------


def test_a_group_that_does_not_fit_into_a_minibatch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'g\d'"):
        list(make(batch_size=3))
    assert len(epoch(make(batch_size=3, keep_groups=False))) == 32


def test_a_group_of_one_is_treated_as_the_preset_has_it() -> None:
    rollouts = make_rollouts((3, 1))
    with pytest.raises(DataError, match=r"'1\.0'.*'g1'") as facts:
        make(rollouts).get_batch()
    assert "pass single_member_group=" not in str(facts.value)
    assert "options={'single_member_group'" in str(facts.value)
    assert not any(epoch(make(rollouts, estimator=AdvantageSpec(options={"single_member_group": "zero"})))["1.0"][0])
    assert not any(epoch(make(rollouts, preset="trl"))["1.0"][0])
    alone = epoch(make(rollouts, preset="verl"))["1.0"]
    assert max(alone[0]) == pytest.approx(alone[1], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gpro"}, r"estimator.*'gpro'"),
        ({"preset": "verll"}, r"preset.*'verl'"),
        ({"estimator": AdvantageSpec(), "preset": "trl"}, "preset"),
        ({"ppo_epochs": 0}, "ppo_epochs"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"on_stale": "dorp"}, r"on_stale.*'dorp'"),
        ({"missing_rewards": "ignore"}, "missing_rewards"),
        ({"keep_groups": 1}, "keep_groups"),
        ({"compute_advantages": "yes"}, "compute_advantages"),
        ({"max_tokens": 100}, "micro_batch_tokens="),
        ({"group_size": 4}, "group_size"),
        ({"on_error": "skip"}, "missing_rewards="),
        ({"estimater": "grpo"}, "did you mean 'estimator'.*preset"),
        ({"max_pending_appends": 4}, "max_pending_appends"),
        ({"padding": "left"}, r"padding.*'sides'"),
        ({"estimator": AdvantageSpec(aggregation="dr-grpo")}, "max_length="),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'ppo_epoch'.*ppo_epochs"):
        make(ppo_epoch=2)
    with pytest.raises(ConfigError, match="'epsilom'"):
        AdvantageSpec(options={"epsilom": 1})
    with pytest.raises(ConfigError, match=r"aggregation.*'token-men'"):
        AdvantageSpec(aggregation="token-men")
    with pytest.raises(ConfigError, match=r"\bbeta\b"):
        KLPenalty(beta=-1)


def test_errors_name_the_keywords_that_the_loader_has() -> None:
    rollouts = make_rollouts()
    empty: dict[str, Any] = {"response_ids": [], "loss_mask": [], "logprobs": [], "ref_logprobs": [], "values": []}
    for change, facts in (
        (empty, "all_masked="),
        ({"reward": None}, "missing_rewards="),
    ):
        with pytest.raises(DataError) as error:
            make([*rollouts[:3], rollouts[3] | change, *rollouts[4:]])
        assert str(error.value).startswith("row 3 (id '3.0')")
        assert facts in str(error.value)
        assert error.value.row == 3


def test_what_an_estimator_needs_has_to_be_there() -> None:
    rollouts = [{k: v for k, v in r.items() if k not in ("values", "ref_logprobs")} for r in make_rollouts()]
    with pytest.raises(ConfigError, match=r"\bgae\b"):
        make(rollouts, estimator="gae").get_batch()
    with pytest.raises(ConfigError, match="ref_logprobs"):
        make(rollouts, estimator=AdvantageSpec(kl=KLPenalty(beta=1.0))).get_batch()
    bare = [{k: v for k, v in r.items() if k != "metadata"} for r in make_rollouts()]
    with pytest.raises(DataError, match=r"'0\.0'.*metadata\['baseline'\]"):
        make(bare, estimator="remax").get_batch()


def test_no_rollouts_are_an_error() -> None:
    with pytest.raises(DataError):
        make([])


def test_there_is_no_plan_to_look_at() -> None:
    with pytest.raises(ConfigError, match="rollout_batch_size"):
        print(make().plan)


def test_a_policy_version_is_a_whole_number() -> None:
    loader = make()
    for wrong in (-1, 1.5, True, "3"):
        with pytest.raises(ConfigError, match="policy_version"):
            loader.policy_version = wrong  # type: ignore[assignment]
    loader.policy_version = 4
    assert loader.policy_version == 4
    assert not loader.ended


def test_the_signature_of_the_loader_has_every_option() -> None:
    shown = inspect.signature(RolloutDataLoader).parameters
    own = [
        field.name for kind in (LengthLimits, RolloutBatching, RolloutSelection, Staleness) for field in fields(kind)
    ]
    assert {*own, "batching", "staleness", "selection", "limits", "batch_size", "backend"} <= shown.keys()
    assert shown["ppo_epochs"].default == 1
    assert "max_tokens" not in shown


def test_options_can_be_passed_in_groups() -> None:
    flat = make(ppo_epochs=2, max_staleness=1, policy_version=3, max_response_length=3, response_truncation="right")
    grouped = make(
        batching=RolloutBatching(ppo_epochs=2),
        staleness=Staleness(max_staleness=1),
        policy_version=3,
        limits=LengthLimits(max_response_length=3, response_truncation="right"),
    )
    assert flat.state_dict() == grouped.state_dict()
    assert epoch(flat) == epoch(grouped)
    with pytest.raises(ConfigError, match=r"staleness.*Staleness"):
        make(staleness=1)


def test_a_registered_estimator_needs_nothing_but_its_function() -> None:
    def centred_tokens(rewards: Any, *, mask: Any, gamma: float, preset: Any) -> Any:
        return known.reward_to_go(rewards, mask=mask, gamma=gamma, preset=preset) - 1.0 * mask

    known.estimator(per="token", rewards="token", needs=("gamma",))(centred_tokens)
    known.estimator(per="row")(scored)
    try:
        found = epoch(make(estimator=AdvantageSpec(estimator="centred_tokens", gamma=0.5)))
        wanted = epoch(make(estimator=AdvantageSpec(estimator="reward_to_go", gamma=0.5)))
        rows = epoch(make(estimator=AdvantageSpec(estimator="scored", options={"by": 2.0})))
    finally:
        del known.ESTIMATORS["centred_tokens"], known.ESTIMATORS["scored"]
    for rollout in make_rollouts():
        mask = np.array(rollout["loss_mask"])
        assert found[rollout["id"]][0] == pytest.approx(np.array(wanted[rollout["id"]][0]) - mask, abs=1e-6)
        assert rows[rollout["id"]][0] == pytest.approx(rollout["reward"] * 2 * mask)


def scored(rewards: Any, *, preset: Any, by: float) -> Any:
    return rewards * by
