"""Micro-batches of an optimizer step: their losses add up to the loss of the step, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.masked_lm import MaskedLM
from penstock.errors import DataError, ResumeError
from penstock.loaders.mlx_loader import MLXDataLoader
from penstock.transforms.tokenization import load_tokenizer

MLM = MaskedLM(mask_id=3, vocab_size=200, special_ids=(0, 1, 2, 3), probability=0.3, seed=5)
QUICK = settings(max_examples=20, deadline=None)


def make_samples(count: int, seed: int = 0, by_token: bool = False) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = []
    for _ in range(count):
        ids = rng.integers(4, 200, rng.integers(2, 9))
        labels: Any = np.where(rng.random(len(ids)) < 0.5, -100, ids) if by_token else int(rng.integers(0, 3))
        samples.append({"input_ids": ids, "labels": labels})
    return samples


class Asked:
    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples, self.asked = samples, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.asked += 1
        return self.samples[row]


def summed_loss(batch: Any, objective: str | None) -> float:
    """A loss of each row, or of each token with a label, that depends on everything in it; blanks have none."""
    arrays = batch.to_numpy()
    ids, mask, labels = arrays["input_ids"], arrays["attention_mask"], arrays["labels"]
    if objective in ("classification", "regression"):
        each = (ids * mask).sum(axis=1) * 0.01 + (labels + 1) ** 2
        return float((each * arrays.get("loss_mask", np.ones(len(each)))).sum())
    learned = labels != -100
    return float(((ids * 0.5 + labels) * learned).sum())


def step_losses(loaders: list[MLXDataLoader], objective: str | None, epochs: int = 2) -> dict[tuple[int, int], float]:
    """By (epoch, step): the losses of all micro-batches of all ranks, each divided by what its batch says."""
    found: dict[tuple[int, int], float] = {}
    for loader in loaders:
        with loader:
            for _ in range(epochs):
                for batch in loader:
                    key = batch.metadata["epoch"], batch.metadata["step"]
                    items = batch.num_items_in_batch
                    found[key] = found.get(key, 0.0) + (summed_loss(batch, objective) / items if items else 0.0)
    return found


@pytest.mark.parametrize("objective", ["classification", "regression", None, "masked_lm"])
@pytest.mark.parametrize("asked", [False, True])
@QUICK
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9))
def test_micro_batches_add_up_to_the_loss_of_the_whole_step(
    objective: Any, asked: bool, rows: int, size: int, steps: int, world: int, seed: int
) -> None:
    samples = make_samples(rows, seed, by_token=objective is None)
    data: Any = Asked(samples) if asked else samples
    more: dict[str, Any] = {"objective": objective, "mlm": MLM if objective == "masked_lm" else None}
    whole = MLXDataLoader(samples, batch_size=size * steps * world, num_workers=0, **more)
    parts = [
        MLXDataLoader(
            data,
            batch_size=size,
            gradient_accumulation_steps=steps,
            rank=rank,
            world_size=world,
            num_workers=rank % 3,
            **more,
        )
        for rank in range(world)
    ]
    wanted, found = step_losses([whole], objective), step_losses(parts, objective)
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key]) for key in wanted)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_are_not_to_be_learned_are_not_counted(steps: int, world: int) -> None:
    samples = [{"input_ids": [1, 2], "labels": -100 if row % 3 == 0 else row} for row in range(22)]
    table = pa.Table.from_pylist(samples)
    for data in (samples, table, {"input_ids": [[1, 2]] * 22, "labels": [sample["labels"] for sample in samples]}):
        wanted: Counter[int] = Counter()
        told: dict[int, set[int | None]] = {}
        for rank in range(world):
            for batch in MLXDataLoader(
                data, batch_size=3, gradient_accumulation_steps=steps, rank=rank, world_size=world
            ):
                wanted[batch.metadata["step"]] += int((batch["labels"] != -100).sum())
                told.setdefault(batch.metadata["step"], set()).add(batch.num_items_in_batch)
        assert told == {step: {count} for step, count in wanted.items()}


def test_rows_that_are_not_to_be_learned_are_counted_of_samples_that_are_fetched() -> None:
    samples = [{"input_ids": [1, 2], "labels": -100 if row == 4 else row} for row in range(9)]
    found = {batch.metadata["step"]: batch for batch in MLXDataLoader(Asked(samples), batch_size=3, shuffle=False)}
    assert [batch.num_items_in_batch for batch in found.values()] == [3, 2, 3]
    loader = MLXDataLoader(Asked(samples), batch_size=3, shuffle=False, gradient_accumulation_steps=2)
    with loader, pytest.raises(DataError, match=r"labels.*row 4\b") as caught:
        list(loader)
    assert caught.value.row == 4


def test_a_step_without_a_label_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"input_ids": [1, 2], "labels": -100}] * 8
    for data in (samples, Asked(samples)):
        caplog.clear()
        assert {batch.num_items_in_batch for batch in MLXDataLoader(data, batch_size=2)} == {0}
        assert caplog.text.count("-100") == 1


def test_gradients_of_micro_batches_add_up_in_mlx() -> None:
    samples = make_samples(22)
    model = nn.Linear(1, 3)

    def loss(model: nn.Linear, batch: Any) -> mx.array:
        mean = (batch["input_ids"] * batch["attention_mask"]).sum(axis=1, keepdims=True) / 500
        return nn.losses.cross_entropy(model(mean), batch["labels"], reduction="sum") / batch.num_items_in_batch

    gradients = nn.value_and_grad(model, loss)

    def gradient_of(loaders: list[MLXDataLoader], step: int) -> Any:
        total: Any = None
        for loader in loaders:
            for batch in loader:
                if batch.metadata["step"] == step and not batch.metadata.get("blank"):
                    found = gradients(model, batch)[1]["weight"]
                    total = found if total is None else total + found
        return np.array(total)

    for step in (0, 2):  # the last one has 6 rows of 8
        whole = gradient_of([MLXDataLoader(samples, batch_size=8)], step)
        ranks = [
            MLXDataLoader(samples, batch_size=2, gradient_accumulation_steps=2, rank=rank, world_size=2)
            for rank in range(2)
        ]
        np.testing.assert_allclose(gradient_of(ranks, step), whole, rtol=1e-5, atol=1e-6)


def test_a_step_says_where_it_is_updated_also_the_last_one() -> None:
    with MLXDataLoader(make_samples(22), batch_size=4, gradient_accumulation_steps=3) as loader:
        told = [
            tuple(batch.metadata[name] for name in ("step", "micro_step", "micro_steps", "update")) for batch in loader
        ]
        assert len(told) == len(loader) == 6
        items = [batch.num_items_in_batch for batch in loader]
    assert told == [
        (0, 0, 3, False),
        (0, 1, 3, False),
        (0, 2, 3, True),
        (1, 0, 3, False),
        (1, 1, 3, False),
        (1, 2, 3, True),
    ]
    assert items == [12, 12, 12, 10, 10, 10]
    with MLXDataLoader(make_samples(17), batch_size=4, gradient_accumulation_steps=3) as loader:
        assert [batch.metadata["micro_steps"] for batch in loader] == [3, 3, 3, 2, 2]


def test_samples_of_a_step_are_fetched_once_for_counting_its_labels() -> None:
    data = Asked(make_samples(24))
    options: dict[str, Any] = {"objective": "masked_lm", "mlm": MLM, "gradient_accumulation_steps": 3}
    for workers in (0, 2):
        data.asked = 0
        with MLXDataLoader(data, batch_size=4, num_workers=workers, **options) as loader:
            assert len(list(loader)) == 6
        assert data.asked == 25  # and row 0, for what samples are like


def test_what_is_masked_depends_on_the_row_and_the_epoch_alone() -> None:
    samples = make_samples(20)

    def by_row(**more: Any) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        found = {}
        with MLXDataLoader(samples, objective="masked_lm", mlm=MLM, **more) as loader:
            for _ in range(2):
                for batch in loader:
                    arrays = batch.to_numpy()
                    for at, row in enumerate(batch.metadata["row"].tolist()):
                        length = len(samples[row]["input_ids"])
                        told = arrays["input_ids"][at, :length].tolist(), arrays["labels"][at, :length].tolist()
                        assert (arrays["labels"][at, length:] == -100).all()
                        found[batch.metadata["epoch"], row] = told
        return found

    wanted = by_row(batch_size=20)
    assert len(wanted) == 40
    assert any(wanted[0, row] != wanted[1, row] for row in range(20))
    for row in range(20):
        ids, labels = wanted[0, row]
        given = samples[row]["input_ids"].tolist()
        assert any(label != -100 for label in labels)
        for there, label, own in zip(ids, labels, given):
            assert label in (-100, own)
            assert label != -100 or there == own
    assert by_row(batch_size=3, bucket_by_length=True, pad_to_multiple_of=8) == wanted
    assert by_row(batch_size=7, gradient_accumulation_steps=2, seed=9, num_workers=3) == wanted


def test_the_mask_and_the_padding_are_those_of_the_tokenizer_of_the_dataset() -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, "[MASK]": 2, "a": 3, "b": 4}, "[UNK]")
    )
    made.add_special_tokens(["[UNK]", "[PAD]", "[MASK]"])
    data = Asked([{"input_ids": [3, 4] * n, "labels": 0} for n in range(1, 30)])
    data.tokenizer = load_tokenizer(made)  # type: ignore[attr-defined]
    with MLXDataLoader(data, batch_size=29, objective="masked_lm", seed=3) as loader:
        (batch,) = loader
    arrays = batch.to_numpy()
    ids, mask, labels = arrays["input_ids"], arrays["attention_mask"], arrays["labels"]
    assert (ids[mask == 0] == 1).all()
    assert set(labels.ravel().tolist()) == {-100, 3, 4}
    assert (ids[labels == -100][mask[labels == -100] == 1] > 2).all()
    assert ((labels != -100).sum(axis=1) > 0).all()
    hidden = (ids == 2) & (labels != -100)
    assert 0.6 < hidden.sum() / (labels != -100).sum() < 0.95


def test_another_corruption_is_another_plan() -> None:
    samples = make_samples(9)
    with MLXDataLoader(samples, objective="masked_lm", mlm=MLM) as loader:
        state = loader.state_dict()
    other = MLXDataLoader(samples, objective="masked_lm", mlm=replace(MLM, probability=0.2))
    with other, pytest.raises(ResumeError, match="data"):
        other.load_state_dict(state)
