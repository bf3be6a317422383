"""Rollouts that cannot be right are refused by name in every form they come in; groups of equal prompts are made."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl.advantages import grpo, rloo
from penstock.rl.advantages import statistics as group_rules
from penstock.rl.compute import AdvantageSpec
from penstock.rl.live import LiveBuffer
from penstock.rl.queue import RolloutQueue
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.rollout import Rollout, RolloutTable

Rows = list[dict[str, Any]]


def rollout(number: int, **changes: Any) -> dict[str, Any]:
    return {"prompt_ids": [1, 2], "response_ids": [3 + number], "reward": float(number % 2), "group": "a"} | changes


def make(data: Any, **more: Any) -> RolloutDataLoader:
    return RolloutDataLoader(data, **{"batch_size": 16, "backend": "numpy", "prefetch": 0, "shuffle": False, **more})


def as_table(rows: Rows) -> RolloutTable:
    """A table that nobody has checked."""

    def objects(cells: list[Any]) -> Any:
        found = np.empty(len(cells), object)
        found[:] = cells
        return found

    count = len(rows)
    ids = [row.get("id", f"row {number}") for number, row in enumerate(rows)]
    logprobs = [row["logprobs"] for row in rows] if "logprobs" in rows[0] else None
    return RolloutTable(
        prompt_ids=Ragged.of([row["prompt_ids"] for row in rows], np.int64),
        response_ids=Ragged.of([row["response_ids"] for row in rows], np.int64),
        loss_mask=Ragged.of([[True] * len(row["response_ids"]) for row in rows], np.bool_),
        rewards=np.array([row["reward"] for row in rows]),
        groups=objects([row["group"] for row in rows]),
        versions=np.full(count, -1, np.int64),
        tokenized=np.zeros(count, np.bool_),
        ids=objects(ids),
        finish_reasons=objects([None] * count),
        metadata=objects([{}] * count),
        logprobs=None if logprobs is None else Ragged.of(logprobs, np.float32),
    )


def from_jsonl(rows: Rows, folder: Path) -> Any:
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def from_parquet(rows: Rows, folder: Path) -> Any:
    path = folder / "rollouts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


FORMS: dict[str, Callable[[Rows, Path], Any]] = {
    "rollouts": lambda rows, _: [Rollout(**row) for row in rows],
    "dicts": lambda rows, _: rows,
    "generator": lambda rows, _: iter(rows),
    "columns": lambda rows, _: {name: [row[name] for row in rows] for name in rows[0]},
    "arrow": lambda rows, _: pa.Table.from_pylist(rows),
    "table": lambda rows, _: as_table(rows),
    ".jsonl": from_jsonl,
    ".parquet": from_parquet,
}


def ways_in(rows: Rows, form: str, folder: Path) -> list[Callable[[], object]]:
    """The loader, and the live sources, given the rows in one form."""
    make_data = FORMS[form]
    return [
        lambda: make(make_data(rows, folder)),
        lambda: make(make_data(rows, folder), preset="trl", compute_advantages=False),
        lambda: LiveBuffer().append(make_data(rows, folder)),
        lambda: RolloutQueue(folder / "queue", durable=False).append(make_data(rows, folder)),
    ]


BAD: dict[str, tuple[Rows, str]] = {
    "prompts": (
        [rollout(0), rollout(1), rollout(2, prompt_ids=[1, 9])],
        r"row 2.*'a'.*row 0.*token 1\b.*\b9\b.*\b2\b.*group_prompts='any'",
    ),
    "lengths": (
        [rollout(0), rollout(1, prompt_ids=[1])],
        r"row 1.*'a'.*row 0.*\b1\b.*\b2\b",
    ),
    "probabilities": (
        [rollout(0, logprobs=[-0.5]), rollout(1, logprobs=[0.9])],
        r"row 1.*logprobs.*0\.9.*token 0\b",
    ),
    "ids": (
        [rollout(0, id="x"), rollout(1, id="y"), rollout(2, id="x")],
        r"row 2.*'x'.*row 0.*columns=\{'group': 'id'\}",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", BAD)
def test_rollouts_that_cannot_be_right_are_refused_in_every_form(what: str, form: str, tmp_path: Path) -> None:
    rows, facts = BAD[what]
    for enter in ways_in(rows, form, tmp_path):
        with pytest.raises(DataError, match=f"(?s){facts}"):
            enter()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "table"])
def test_a_group_that_only_some_rollouts_name_is_refused(form: str, tmp_path: Path) -> None:
    for enter in ways_in([rollout(0), rollout(1, group=None)], form, tmp_path):
        with pytest.raises(DataError, match=r"row 1\b.*\bgroup\b"):
            enter()


# -- Prompts and groups ------------------------------------------------------------------------------------------------


def test_the_case_of_the_trial_is_refused() -> None:
    rows = [
        {"prompt_ids": prompt, "response_ids": [5], "reward": reward, "group": "a"}
        for prompt, reward in (([1, 2], 1.0), ([3, 4], 0.0), ([1, 2], 0.0))
    ]
    with pytest.raises(DataError, match=r"\bgroup\b.*'a'"):
        make(rows)


def test_groups_of_different_prompts_pass_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = [rollout(0), rollout(1, prompt_ids=[9])]
    assert make(rows, group_prompts="any").get_batch().advantages.ravel().tolist() == pytest.approx(
        [-0.7071, 0.7071], abs=1e-3
    )
    buffer, queue = (
        LiveBuffer(group_prompts="any"),
        RolloutQueue(tmp_path / "queue", durable=False, group_prompts="any"),
    )
    for live in (buffer, queue):
        live.append(rows)
        with make(live, group_prompts="any", rollout_batch_size=2) as loader:
            assert loader.get_batch().num_rollouts == 2
        live.close()
    for refuse in (make, read_rollouts):
        with pytest.raises(ConfigError, match="group_prompts"):
            refuse(rows, group_prompts="some")
    for refuse_live in (LiveBuffer, lambda **more: RolloutQueue(tmp_path / "queue", **more)):
        with pytest.raises(ConfigError, match=r"group_prompts.*'some'"):
            refuse_live(group_prompts="some")


def test_groups_that_come_in_several_appends_are_compared_too(tmp_path: Path) -> None:
    buffer, queue = LiveBuffer(), RolloutQueue(tmp_path / "queue", durable=False)
    for live in (buffer, queue):
        live.append(rollout(0, id="x"))
        live.append(rollout(1, id="y", prompt_ids=[1, 9]))
        with (
            make(live, rollout_batch_size=2, group_size=2) as loader,
            pytest.raises(DataError, match=r"'y'.*'a'"),
        ):
            loader.get_batch()
        live.close()


def without_groups(prompts: int = 3, answers: int = 4) -> Rows:
    rng = np.random.default_rng(1)
    return [
        {"prompt_ids": [7, number], "response_ids": [1, 2], "reward": float(rng.random())}
        for _ in range(answers)
        for number in range(prompts)
    ]


@pytest.mark.parametrize("preset", ["penstock", "trl", "verl", "openrlhf", "slime"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "table"])
def test_rollouts_without_a_group_are_grouped_by_equal_prompts_and_told(
    form: str, preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = without_groups()
    wanted = grpo([row["reward"] for row in rows], [row["prompt_ids"][1] for row in rows], preset=preset)
    batch = make(FORMS[form](rows, tmp_path), preset=preset).get_batch()
    assert batch.advantages[:, 0].tolist() == pytest.approx(wanted[[int(name) for name in batch.ids]], abs=1e-6)
    assert len(set(batch.groups)) == 3
    assert re.search(r"3 groups.*4", caplog.text)


def test_rollouts_of_an_append_without_a_group_are_grouped_by_equal_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = without_groups()
    wanted = sorted(rloo([row["reward"] for row in rows], [row["prompt_ids"][1] for row in rows]).tolist())
    for live in (LiveBuffer(), RolloutQueue(tmp_path / "queue", durable=False)):
        for _ in range(2):
            live.append(rows)
        caplog.clear()
        with make(live, rollout_batch_size=12, estimator="rloo") as loader:
            for _ in range(2):
                (batch,) = loader
                assert sorted(batch.advantages[:, 0].tolist()) == pytest.approx(wanted, abs=1e-6)
        assert caplog.text.count("first append") == 1
        live.close()


def test_estimators_that_look_at_no_group_leave_rollouts_alone(caplog: pytest.LogCaptureFixture) -> None:
    loader = make(without_groups(), estimator="reward_to_go", batch_size=2)
    assert {batch.num_rollouts for batch in loader} == {2}
    assert not caplog.records
    assert make(without_groups(), estimator="reward_to_go", drop_zero_variance=True).get_batch().num_rollouts == 12
    assert "3 groups of 4" in caplog.text


def test_two_texts_that_are_the_same_prompt_are_a_group() -> None:
    rows = [{"prompt": "2 + 2 =", "response": f" {n}", "reward": float(n == 4)} for n in (3, 4, 5)]
    batch = make(rows, tokenizer="byte").get_batch()
    assert batch.advantages[:, 0].tolist() == pytest.approx(grpo([0.0, 1.0, 0.0], 3), abs=1e-6)


# -- Groups of one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "preset"), [("grpo", "trl"), ("rloo", "trl"), ("grpo", "slime"), ("dr_grpo", "openrlhf")]
)
@pytest.mark.parametrize("named", [False, True])
def test_rollouts_that_are_each_alone_are_refused_where_every_advantage_would_be_0(
    estimator: str, preset: str, named: bool
) -> None:
    rows = [rollout(n, prompt_ids=[n], group=f"g{n}" if named else None) for n in range(4)]
    with pytest.raises(DataError, match=rf"\bgroup\b.*preset='{preset}'"):
        make(rows, estimator=estimator, preset=preset).get_batch()
    meant = AdvantageSpec(estimator=estimator, preset=preset, options={"single_member_group": "zero"})
    assert not make(rows, estimator=meant).get_batch().advantages.any()


def test_a_live_source_whose_rollouts_are_each_alone_is_refused() -> None:
    buffer = LiveBuffer()
    for number in range(4):
        buffer.append(rollout(number, group=None))
    with pytest.raises(DataError, match="group_size="):
        make(buffer, preset="trl", rollout_batch_size=4).get_batch()


def test_what_a_preset_gives_to_some_lone_rollouts_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = [rollout(0), rollout(1), rollout(2, prompt_ids=[5], group="b", reward=3.0)]
    for preset, facts, number in (("trl", "an advantage of 0", 0.0), ("verl", "their reward as advantage", 3.0)):
        caplog.clear()
        loader = make(rows, preset=preset)
        for _ in range(2):
            (batch,) = loader
        assert batch.advantages[2, 0] == pytest.approx(number, abs=1e-4)
        assert len(re.findall(r"1 of 3 rollouts.*'2'.*'b'", caplog.text)) == 1
        assert facts in caplog.text
    make(rows, preset="slime").get_batch()
    assert "preset='slime'" in caplog.text


def test_the_functions_tell_of_rows_that_are_all_alone(caplog: pytest.LogCaptureFixture) -> None:
    group_rules._log_all_single.cache_clear()
    caplog.set_level(logging.WARNING)
    assert grpo([1.0, 2.0], ["a", "b"], preset="trl", single_member_group="zero").tolist() == [0.0, 0.0]
    assert grpo([1.0, 2.0, 3.0], ["a", "b", "b"], preset="trl")[0] == 0.0
    assert not caplog.records
    for _ in range(2):
        assert grpo([1.0, 2.0], ["a", "b"], preset="trl").tolist() == [0.0, 0.0]
    assert caplog.text.count("preset='trl'") == 1


# -- Log-probs ---------------------------------------------------------------------------------------------------------


def test_log_probs_that_are_above_0_by_rounding_stay_as_they_are() -> None:
    numbers = [1e-7, 1e-3, 0.0099]
    rows = [rollout(n, response_ids=[1, 2, 3], logprobs=numbers, ref_logprobs=numbers) for n in range(2)]
    batch = make(rows).get_batch()
    assert batch.old_log_probs[0].tolist() == batch.ref_log_probs[0].tolist() == np.float32(numbers).tolist()


def test_log_probs_of_masked_tokens_are_not_looked_at() -> None:
    rows = [rollout(n, response_ids=[1, 2], logprobs=[-0.5, 7.0], loss_mask=[1, 0]) for n in range(2)]
    assert make(rows).get_batch().num_rollouts == 2
    with pytest.raises(DataError, match=r"ref_logprobs.*token 1\b"):
        make([row | {"loss_mask": [1, 1], "logprobs": [-1, -1], "ref_logprobs": [0.0, 0.02]} for row in rows])


# -- Ids ---------------------------------------------------------------------------------------------------------------


def test_an_id_that_names_the_prompt_is_read_as_the_group() -> None:
    rows = [rollout(n) | {"id": "question 7"} for n in range(2)]
    for row in rows:
        del row["group"]
    with pytest.raises(DataError, match="'group'"):
        make(rows)
    assert make(rows, columns={"group": "id"}).get_batch().groups == ["question 7"] * 2


def test_rollouts_without_an_id_get_none_that_another_has() -> None:
    table = read_rollouts([rollout(0, id="1"), rollout(1), rollout(2)])
    assert len(set(table.ids.tolist())) == 3


def test_an_id_of_a_rollout_that_waits_is_refused_and_one_that_was_used_is_not() -> None:
    buffer = LiveBuffer()
    pair = [rollout(n, id=f"{n}") for n in range(2)]
    buffer.append(pair)
    with pytest.raises(DataError, match="'1'"):
        buffer.append(pair[1])
    loader = make(buffer, rollout_batch_size=2)
    for _ in range(3):
        assert sorted(loader.get_batch().ids) == ["0", "1"]
        buffer.append(pair)


def test_an_append_that_is_sent_twice_is_refused_by_the_loader_or_dropped(tmp_path: Path) -> None:
    pair = [rollout(n, id=f"{n}") for n in range(2)]
    with RolloutQueue(tmp_path / "queue", durable=False) as queue:
        for rows in (pair, pair, [rollout(n, id=f"{n}") for n in (2, 3)]):
            queue.append(rows)
    reading = RolloutQueue(tmp_path / "queue", durable=False)
    with (
        make(reading, rollout_batch_size=4) as loader,
        pytest.raises(DataError, match=r"'0'.*duplicate_ids='drop'"),
    ):
        loader.get_batch()
    with make(reading, rollout_batch_size=4, duplicate_ids="drop") as loader:
        assert sorted(loader.get_batch().ids) == ["0", "1", "2", "3"]
        assert loader.counts == {"duplicate id": 2}
