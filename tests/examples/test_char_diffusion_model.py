"""Model and objective: visibility and padding, loss and accuracy against a loop, roles of a schema, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from char_diffusion.model import ModelSizes, Transformer, parameter_groups
from char_diffusion.objective import Batch, BatchFields, Objective

from penstock.errors import ConfigError, SchemaError

SIZES = ModelSizes(tokens=11, block_size=8, n_layer=2, n_head=2, n_embd=16, causal=False)


def make(sizes: ModelSizes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(sizes).eval()


def seen_by(model: Transformer, changed: int, mask: torch.Tensor | None = None) -> list[int]:
    """The positions whose answer depends on the token at `changed`."""
    x = torch.zeros(1, 8, dtype=torch.long)
    other = x.clone()
    other[0, changed] = 5
    with torch.no_grad():
        differs = (model(x, mask) - model(other, mask)).abs().amax(dim=-1)[0]
    return [position for position in range(8) if differs[position] > 1e-7]


def test_every_position_gets_a_number_for_every_token() -> None:
    assert make(SIZES)(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 11)
    assert make(SIZES)(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 11)


def test_with_classes_every_sample_gets_a_number_for_every_class() -> None:
    assert make(replace(SIZES, classes=4))(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 4)


@pytest.mark.parametrize("changed", range(8))
@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_model_sees_nothing_ahead_and_any_other_sees_everything(changed: int, padded: bool) -> None:
    mask = torch.ones(1, 8, dtype=torch.bool) if padded else None
    assert seen_by(make(SIZES), changed, mask) == list(range(8))
    assert seen_by(make(replace(SIZES, causal=True)), changed, mask) == list(range(changed, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_the_order_of_tokens_matters(causal: bool) -> None:
    model = make(replace(SIZES, causal=causal))
    with torch.no_grad():
        one, other = (model(torch.tensor([tokens]))[0, -1] for tokens in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert not torch.allclose(one, other, atol=1e-6)


def test_what_a_token_sees_depends_on_distances_and_not_on_where_it_stands() -> None:
    model = make(replace(SIZES, causal=True, n_layer=1))
    mask = torch.tensor([[False, False, False, True, True, True]])
    with torch.no_grad():
        early = model(torch.tensor([[1, 2, 3]]))[0]
        late = model(torch.tensor([[9, 9, 9, 1, 2, 3]]), mask)[0, 3:]
    assert torch.allclose(early, late, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_seen_by_nobody_but_itself(causal: bool) -> None:
    mask = torch.arange(8)[None] < 6
    assert seen_by(make(replace(SIZES, causal=causal)), 6, mask) == [6]


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    x = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1))
    for causal in (False, True):
        model = make(replace(SIZES, causal=causal))
        assert torch.allclose(model(x), model(x, torch.ones(2, 8, dtype=torch.bool)), atol=1e-6)


def test_a_class_does_not_depend_on_what_padding_holds() -> None:
    model, mask = make(replace(SIZES, classes=3)), torch.arange(8)[None] < 5
    x = torch.arange(8)[None]
    assert torch.equal(model(x, mask), model(torch.where(mask, x, 9), mask))
    assert not torch.equal(model(x, mask), model(torch.where(mask, 9, x), mask))


def test_a_row_of_nothing_but_padding_gives_numbers() -> None:
    model = make(replace(SIZES, classes=3))
    assert model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.bool)).isfinite().all()


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = make(replace(SIZES, classes=3))
    decaying, other = parameter_groups(model, 0.3)
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.3, 0.0)
    shapes = [{weights.dim() for weights in group["params"]} for group in (decaying, other)]
    assert shapes == [{2}, {1}]
    counted = sum(weights.numel() for group in (decaying, other) for weights in group["params"])
    assert counted == sum(weights.numel() for weights in model.parameters())


def test_every_weight_takes_part() -> None:
    for sizes in (SIZES, replace(SIZES, classes=3)):
        model = make(sizes)
        model(torch.arange(8)[None]).square().sum().backward()
        assert not [name for name, weights in model.named_parameters() if weights.grad is None]


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
    mask = torch.rand(rows, length, generator=draw) < 0.7 if padded else None
    weight = torch.randint(0, 3, (rows, length), generator=draw) if weighted else None
    measured = Objective.from_meta(META).measure(logits, Batch(torch.zeros_like(y), y, mask, weight))
    loss = total = correct = counted = 0.0
    for row in range(rows):
        for place in range(length):
            counts = float(weight[row, place]) if weight is not None else 1.0
            if y[row, place] == -1 or (mask is not None and not mask[row, place]):
                counts = 0.0
            numbers = [float(each) for each in logits[row, place]]
            if counts:
                normal = math.log(sum(math.exp(each) for each in numbers))
                loss += counts * (normal - numbers[int(y[row, place])])
                correct += numbers.index(max(numbers)) == int(y[row, place])
                counted += 1
            total += counts
    assert measured.tolist() == pytest.approx([loss, total, correct, counted], abs=1e-4)


def test_one_class_of_every_sample() -> None:
    objective = Objective.from_meta(
        {"training_type": "classification", "vocab_size": 50, "class_names": ["a", "b", "c"]}
    )
    assert (objective.answers, objective.per_sample, objective.causal) == (3, True, False)
    logits = torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 0, 9.0]])
    batch = Batch(torch.zeros(3, 4, dtype=torch.long), torch.tensor([0, 1, -100]), torch.zeros(3, 4).bool())
    measured = objective.measure(logits, batch)
    assert measured.tolist() == pytest.approx([9.0, 2, 1, 2], abs=1e-2)
    assert objective.histogram(batch).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("training_type", "causal"), [("MLM", False), ("diffusion", False), ("CLM", True), ("LM", True), ("clm", True)]
)
def test_the_training_type_says_what_is_seen(training_type: str, causal: bool) -> None:
    objective = Objective.from_meta(META | {"training_type": training_type})
    assert (objective.causal, objective.per_sample) == (causal, False)


def test_nothing_is_moved_for_the_next_token() -> None:
    """The queue's y lies at the position it is the target of."""
    y = torch.tensor([[1, 2, 3]])
    logits = torch.nn.functional.one_hot(y, 6).float() * 20
    measured = Objective.from_meta(META | {"training_type": "CLM"}).measure(logits, Batch(torch.zeros_like(y), y))
    assert float(measured[2]) == 3


def test_a_mask_behind_the_vocabulary_has_its_own_row() -> None:
    assert Objective.from_meta(META | {"mask_token_id": 6}).tokens == 7
    assert Objective.from_meta(META | {"mask_token_id": 5}).tokens == 6


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
        Objective.from_meta(META | meta)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    objective, fine = Objective.from_meta(META), torch.tensor([[0, 5]])
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
    fields = BatchFields.from_schema(schema, block_size=8, per_sample=False)
    assert (fields.x, fields.y, fields.mask, fields.weight) == ("seen", "answer", "real", "scored")
    assert fields.unused == ("label", "origin")
    batch = {each["name"]: torch.ones([2, *each["shape"]], dtype=torch.int32) for each in schema}
    read = fields.read(batch)
    assert (read.x.dtype, read.y.dtype, read.mask.dtype) == (torch.int64, torch.int64, torch.bool)
    assert BatchFields.from_schema([schema[0], schema[1], schema[2]], block_size=8, per_sample=True).y == "label"


def test_the_plain_pair_needs_no_roles() -> None:
    fields = BatchFields.from_schema([entry("x", None, [8]), entry("y", None, [8])], block_size=9, per_sample=False)
    x, y = torch.zeros(2, 8), torch.ones(2, 8)
    read = fields.read((x, y))
    assert (read.x.sum(), read.y.sum(), read.mask, read.weight) == (0, 16, None, None)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "batch_schema"),
        ([entry("x", "input", [8])], r"'target'.*'label'"),
        ([entry("x", "input", [8, 8]), entry("y", "target", [8])], "'x'"),
        ([entry("x", "input", [8]), entry("z", "input", [8]), entry("y", "target", [8])], "batch_schema"),
        ([entry("x", "input", [8]), entry("y", "target", [4])], "batch_schema"),
    ],
)
def test_a_schema_that_cannot_be_trained_on_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        BatchFields.from_schema(schema, block_size=8, per_sample=False)
