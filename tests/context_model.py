"""A model of one attention layer, whose loss can be computed of whole batches, and of slices with keys of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.lazy_modules import LazyModule

torch = LazyModule("torch")
WIDTH, VOCABULARY, LONGEST = 8, 128, 64


def weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"words": (VOCABULARY, WIDTH), "places": (LONGEST, WIDTH), "out": (WIDTH, VOCABULARY)}
    shapes |= dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))
    return {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in shapes.items()}


def owners(batch: Any) -> Any:
    """Number of the document of each token of a batch or a slice, flat; equal on all ranks, -1 for padding."""
    real = batch.attention_mask if batch.document_ids is None else batch.document_ids
    rows = torch.arange(len(batch.input_ids))[:, None].expand(batch.input_ids.shape)
    if batch.metadata.get("context", {}).get("slicing") == "zigzag_documents":
        found = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.long().diff())
    else:
        found = rows.flatten() * 1000 + real.flatten()
    return torch.where(real.flatten() == 0, -1, found)


def projections(model: dict[str, Any], batch: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Queries, keys, values, documents and positions of the tokens of a batch, flat."""
    hidden = model["words"][batch.input_ids.flatten()] + model["places"][batch.position_ids.flatten()]
    return (*(hidden @ model[key] for key in ("q", "k", "v")), owners(batch), batch.position_ids.flatten())


def summed_loss(model: dict[str, Any], own: Sequence[Any], everyone: Sequence[Sequence[Any]], targets: Any) -> Any:
    """Loss of tokens that attend to those of all ranks, in their document and not after them."""
    query, _, _, owner, place = own
    _, keys, values, key_owner, key_place = (torch.cat(each) for each in zip(*everyone))
    seen = (owner[:, None] == key_owner[None]) & (place[:, None] >= key_place[None]) & (owner[:, None] >= 0)
    scores = (query @ keys.T).masked_fill(~seen, -1e30)
    logits = (query + scores.softmax(dim=-1) @ values) @ model["out"]
    return torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


def whole_loss(model: dict[str, Any], batch: Any) -> Any:
    """Loss of a whole batch: masked attention of torch, and labels shifted as trainers do it."""
    query, keys, values, _, _ = (each.reshape(*batch.input_ids.shape, -1) for each in projections(model, batch))
    mask = batch.block_mask()[:, 0]
    scores = (query @ keys.transpose(1, 2)).masked_fill(~mask, -1e30)
    logits = (query + scores.softmax(dim=-1) @ values) @ model["out"]
    targets = batch.labels[:, 1:].flatten()
    flat = logits[:, :-1].reshape(-1, VOCABULARY)
    total = torch.nn.functional.cross_entropy(flat, targets, ignore_index=-100, reduction="sum")
    assert batch.num_items_in_batch == int(np.count_nonzero(batch.labels != -100))
    return total / batch.num_items_in_batch
