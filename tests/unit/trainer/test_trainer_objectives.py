"""Loss and accuracy against a loop over every target; roles of a schema; refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from penstock.errors import ConfigError, SchemaError
from penstock.trainer.fields import Batch, Fields
from penstock.trainer.objectives import Objective

META = {"training_type": "MLM", "vocab_size": 6, "ignore_index": -1}


def entry(name: str, role: str | None, shape: list[int], dtype: str = "int64") -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "role": role}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    length=st.integers(1, 5),
    padded=st.booleans(),
    weighted=st.booleans(),
)
def test_loss_and_accuracy_are_those_of_a_loop(seed: int, rows: int, length: int, padded: bool, weighted: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 6, generator=draw)
    y = torch.randint(-1, 6, (rows, length), generator=draw)
    attend = torch.rand(rows, length, generator=draw) < 0.7 if padded else None
    weight = torch.randint(0, 3, (rows, length), generator=draw) if weighted else None
    measured = Objective.of(META).measure(logits, Batch(torch.zeros_like(y), y, attend, weight))
    loss = total = correct = counted = 0.0
    for row in range(rows):
        for place in range(length):
            counts = float(weight[row, place]) if weight is not None else 1.0
            if y[row, place] == -1 or (attend is not None and not attend[row, place]):
                counts = 0.0
            numbers = [float(each) for each in logits[row, place]]
            if counts:
                normal = math.log(sum(math.exp(each) for each in numbers))
                loss += counts * (normal - numbers[int(y[row, place])])
                correct += numbers.index(max(numbers)) == int(y[row, place])
                counted += 1
            total += counts
    assert float(measured.loss) == pytest.approx(loss, abs=1e-4)
    found = (float(measured.weight), float(measured.correct), float(measured.counted))
    assert found == (total, correct, counted)


def test_one_class_of_every_sample() -> None:
    objective = Objective.of({"training_type": "classification", "vocab_size": 50, "class_names": ["a", "b", "c"]})
    assert (objective.answers, objective.per_sample, objective.causal) == (3, True, False)
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]])
    batch = Batch(torch.zeros(3, 4, dtype=torch.long), torch.tensor([0, 1, -100]), torch.zeros(3, 4).bool())
    measured = objective.measure(logits, batch)
    assert [float(each) for each in (measured.weight, measured.correct, measured.counted)] == [2, 1, 2]
    assert float(measured.loss) == pytest.approx(9.0, abs=1e-2)
    assert objective.tally(batch).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("training_type", "causal"), [("MLM", False), ("diffusion", False), ("CLM", True), ("LM", True), ("clm", True)]
)
def test_the_training_type_says_what_is_seen(training_type: str, causal: bool) -> None:
    objective = Objective.of(META | {"training_type": training_type})
    assert (objective.causal, objective.per_sample) == (causal, False)


def test_nothing_is_moved_for_the_next_token() -> None:
    """The queue's y lies at the position it is the target of."""
    y = torch.tensor([[1, 2, 3]])
    logits = torch.nn.functional.one_hot(y, 6).float() * 20
    measured = Objective.of(META | {"training_type": "CLM"}).measure(logits, Batch(torch.zeros_like(y), y))
    assert float(measured.correct) == 3


def test_a_mask_behind_the_vocabulary_has_its_own_row() -> None:
    assert Objective.of(META | {"mask_token_id": 6}).tokens == 7
    assert Objective.of(META | {"mask_token_id": 5}).tokens == 6


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (
            {"training_type": "GAN"},
            "training_type='GAN'",
        ),
        ({"training_type": None}, "training_type=None"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "65"}, "'65'"),
        ({"training_type": "classification"}, "num_classes"),
    ],
)
def test_metadata_that_lacks_something_is_refused_with_the_key(meta: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Objective.of(META | meta)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    objective, fine = Objective.of(META), torch.tensor([[0, 5]])
    objective.check(Batch(fine, torch.tensor([[-1, 5]])))
    with pytest.raises(SchemaError, match=r"\b0\b.*\b6\b"):
        objective.check(Batch(torch.tensor([[0, 6]]), fine))
    with pytest.raises(SchemaError, match=r"-2\b.*\b5\b"):
        objective.check(Batch(fine, torch.tensor([[-2, 5]])))


def test_roles_say_what_is_what_whatever_the_names() -> None:
    schema = [
        entry("label", "target", []),
        entry("answer", "target", [8]),
        entry("seen", "input", [8]),
        entry("real", "mask", [8], "bool"),
        entry("scored", "loss_mask", [8], "bool"),
        entry("origin", "source", []),
    ]
    fields = Fields.of(schema, block_size=8, per_sample=False)
    assert (fields.x, fields.y, fields.attend, fields.weight) == ("seen", "answer", "real", "scored")
    assert fields.unused == ("label", "origin")
    batch = {each["name"]: torch.ones([2, *each["shape"]], dtype=torch.int32) for each in schema}
    read = fields.read(batch)
    assert (read.x.dtype, read.y.dtype, read.attend.dtype) == (torch.int64, torch.int64, torch.bool)
    assert Fields.of([schema[0], schema[1], schema[2]], block_size=8, per_sample=True).y == "label"


def test_the_plain_pair_needs_no_roles() -> None:
    fields = Fields.of([entry("x", None, [8]), entry("y", None, [8])], block_size=9, per_sample=False)
    x, y = torch.zeros(2, 8), torch.ones(2, 8)
    read = fields.read((x, y))
    assert (read.x.sum(), read.y.sum(), read.attend, read.weight) == (0, 16, None, None)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, "no batch_schema"),
        ([entry("x", "input", [8])], r"'target'.*'label'"),
        ([entry("x", "input", [8, 8]), entry("y", "target", [8])], "'x'"),
        ([entry("x", "input", [8]), entry("z", "input", [8]), entry("y", "target", [8])], "batch_schema"),
        ([entry("x", "input", [8]), entry("y", "target", [4])], "batch_schema"),
    ],
)
def test_a_schema_that_cannot_be_trained_on_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        Fields.of(schema, block_size=8, per_sample=False)


def test_a_misspelt_role_of_an_array_that_is_needed_is_pointed_at() -> None:
    schema = [entry("x", "inptu", [4]), entry("y", "target", [4]), entry("z", "note", [4])]
    with pytest.raises(SchemaError, match=r"'inptu'.*'input'"):
        Fields.of(schema, block_size=4, per_sample=False)
