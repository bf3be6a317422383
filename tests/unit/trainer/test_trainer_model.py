"""The transformer: shapes, which positions see which, padding, and the groups of the optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from penstock.trainer.model import ModelSizes, Transformer, parameter_groups

SIZES = ModelSizes(tokens=11, block_size=8, n_layer=2, n_head=2, n_embd=16, causal=False)


def make(sizes: ModelSizes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(sizes).eval()


def seen_by(model: Transformer, changed: int, attend: torch.Tensor | None = None) -> list[int]:
    """The positions whose answer depends on the token at `changed`."""
    x = torch.zeros(1, 8, dtype=torch.long)
    other = x.clone()
    other[0, changed] = 5
    with torch.no_grad():
        differs = (model(x, attend) - model(other, attend)).abs().amax(dim=-1)[0]
    return [position for position in range(8) if differs[position] > 1e-7]


def test_every_position_gets_a_number_for_every_token() -> None:
    assert make(SIZES)(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 11)
    assert make(SIZES)(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, 11)


def test_with_classes_every_sample_gets_a_number_for_every_class() -> None:
    assert make(replace(SIZES, classes=4))(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 4)


@pytest.mark.parametrize("changed", range(8))
@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_model_sees_nothing_ahead_and_any_other_sees_everything(changed: int, padded: bool) -> None:
    attend = torch.ones(1, 8, dtype=torch.bool) if padded else None
    assert seen_by(make(SIZES), changed, attend) == list(range(8))
    assert seen_by(make(replace(SIZES, causal=True)), changed, attend) == list(range(changed, 8))


@pytest.mark.parametrize("causal", [False, True])
def test_the_order_of_tokens_matters(causal: bool) -> None:
    model = make(replace(SIZES, causal=causal))
    with torch.no_grad():
        one, other = (model(torch.tensor([tokens]))[0, -1] for tokens in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert not torch.allclose(one, other, atol=1e-6)


def test_what_a_token_sees_depends_on_distances_and_not_on_where_it_stands() -> None:
    model = make(replace(SIZES, causal=True, n_layer=1))
    attend = torch.tensor([[False, False, False, True, True, True]])
    with torch.no_grad():
        early = model(torch.tensor([[1, 2, 3]]))[0]
        late = model(torch.tensor([[9, 9, 9, 1, 2, 3]]), attend)[0, 3:]
    assert torch.allclose(early, late, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_seen_by_nobody_but_itself(causal: bool) -> None:
    attend = torch.arange(8)[None] < 6
    assert seen_by(make(replace(SIZES, causal=causal)), 6, attend) == [6]


def test_a_mask_that_allows_everything_changes_nothing() -> None:
    x = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1))
    for causal in (False, True):
        model = make(replace(SIZES, causal=causal))
        assert torch.allclose(model(x), model(x, torch.ones(2, 8, dtype=torch.bool)), atol=1e-6)


def test_a_class_does_not_depend_on_what_padding_holds() -> None:
    model, attend = make(replace(SIZES, classes=3)), torch.arange(8)[None] < 5
    x = torch.arange(8)[None]
    assert torch.equal(model(x, attend), model(torch.where(attend, x, 9), attend))
    assert not torch.equal(model(x, attend), model(torch.where(attend, 9, x), attend))


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
