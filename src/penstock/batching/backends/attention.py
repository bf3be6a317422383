"""Attention within documents of packed rows: block-diagonal masks, and a probe that a model keeps documents apart.

    model = load_causal_model("model/")
    for result in probe_isolation(model, batch):
        print(result)

Which mask a model derives from `position_ids` and `attention_mask` depends on its code, on the attention implementation
and on the release of transformers. So the probe calls the model: it changes one document and watches the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import Array
from penstock.batching.backends.lookup import backend_of
from penstock.errors import ConfigError


def block_diagonal_mask(
    document_ids: Array, causal: bool = True, *, padding: int | None = 0, dtype: str = "bool"
) -> Array:
    """Mask (rows, 1, tokens, tokens) of attention within one document of a row.

    `document_ids` is (rows, tokens) of any framework, and so is the mask, on the same device. With `causal`, a position
    attends to itself and to earlier ones. Positions whose id is `padding` attend to themselves only: an empty row of
    the mask would be NaN in a softmax. `padding=None`: every id is a document.

    The mask is bool, True where attention is allowed, as torch's `scaled_dot_product_attention`, MLX's and
    `jax.nn.dot_product_attention` take it. With a `dtype` such as "float32" or "bfloat16" it is to be added to the
    scores: 0, or the lowest number.

    It has rows x tokens x tokens entries: 2 GiB of bool for 8 rows of 16,384. FlashAttention with `cu_seqlens`, and
    FlexAttention, need no mask.
    """
    if len(document_ids.shape) != 2:
        raise ConfigError(f"document_ids must be of shape (rows, tokens), got {tuple(document_ids.shape)}")
    backend = backend_of(document_ids)
    at = backend.arange(int(document_ids.shape[1]), like=document_ids)
    allowed = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if causal:
        allowed = allowed & (at[:, None] >= at[None, :])
    if padding is not None:
        allowed = (allowed & (document_ids != padding)[:, None, None, :]) | (at[:, None] == at[None, :])
    return allowed if dtype == "bool" else backend.additive(allowed, dtype)


Span = tuple[int, int, int]
"""Document: row, start, end."""
AS_IT_IS = "model(**batch)"
LEAK_TOLERANCE = 1e-5
"""Largest change of the logits of other documents, relative to the largest logit. In float32 and with equal shapes,
masked positions add exact zeros, so a model that isolates documents changes nothing."""
LOSS_TOLERANCE = 1e-4
"""Largest relative difference of packed and unpacked loss, whose sums are taken in another order."""
_IGNORE = -100


class PackedBatch(Protocol):
    """Fields of a `TrainingBatch` of torch tensors that the probe needs."""

    input_ids: Any
    labels: Any
    position_ids: Any
    document_ids: Any

    def as_dict(self, *, block_mask: str | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Isolation:
    """Result for one way to call the model."""

    way: str
    attention: str
    """Attention implementation: eager, sdpa, ..."""
    leak: float
    """Largest change of a logit of another document, relative to the largest logit."""
    packed_loss: float
    unpacked_loss: float
    """Loss of the same documents one by one, weighted by their labels."""
    problem: str | None = None
    """Error of the call, if it failed."""

    @property
    def loss_difference(self) -> float:
        return abs(self.packed_loss - self.unpacked_loss) / max(abs(self.unpacked_loss), 1e-12)

    @property
    def isolates(self) -> bool:
        # NaN must not count as isolated.
        return self.problem is None and self.leak <= LEAK_TOLERANCE and self.loss_difference <= LOSS_TOLERANCE


def load_causal_model(path: str | Path) -> Any:
    """Model of a directory, in float32 on the CPU. Nothing is downloaded, and no code of the directory is run."""
    transformers = require("transformers", "hf")
    torch = require("torch", "torch")
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json; save the model there first")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be loaded as a causal language model: {error}") from error
    return model.eval()


def packed_rows(document_ids: npt.NDArray[Any]) -> int:
    """Number of rows with more than one document."""
    return int((document_ids.max(axis=1, initial=0) > 1).sum())


def probe_isolation(model: Any, batch: PackedBatch, *, seed: int = 0) -> list[Isolation]:
    """Results for all ways to call the model with a packed batch of torch tensors, `model(**batch)` first.

    The probe changes a middle document of the row with the most documents, and compares the loss with that of the
    documents one by one, with the same labels.
    """
    documents = _documents(batch.document_ids)
    victim = _in_the_middle(documents)
    changed = _changed(batch, victim, int(model.config.get_text_config().vocab_size), seed)
    unpacked = _unpacked_loss(model, batch, documents)
    own = str(getattr(model.config, "_attn_implementation", "eager"))
    found = []
    for way, attention, keywords in _ways(batch, own):
        if not _choose_attention(model, attention):
            continue
        try:
            found.append(_tried(model, way, attention, keywords, changed, documents, victim, unpacked))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            found.append(Isolation(way, attention, float("nan"), float("nan"), unpacked, str(error).partition("\n")[0]))
    _choose_attention(model, own)
    return found


def _ways(batch: PackedBatch, own: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, attention implementation, keywords) of each way."""
    yield AS_IT_IS, own, dict(batch.as_dict())
    for attention, mask in (("eager", "float32"), ("sdpa", "bool")):
        yield "block mask", attention, dict(batch.as_dict(block_mask=mask))
    if batch.position_ids is not None:
        for attention in ("eager", "sdpa"):
            only = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
            yield "position_ids only", attention, {**only, "use_cache": False}


def _choose_attention(model: Any, attention: str) -> bool:
    """Switch the model to an attention implementation; False if it does not have it."""
    if getattr(model.config, "_attn_implementation", None) == attention:
        return True
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError, AttributeError):
        return False
    return bool(model.config._attn_implementation == attention)


def _tried(
    model: Any,
    way: str,
    attention: str,
    keywords: Mapping[str, Any],
    changed: Any,
    documents: list[Span],
    victim: Span,
    unpacked: float,
) -> Isolation:
    torch = require("torch", "torch")
    with torch.no_grad():
        before = model(**keywords)
        after = model(**{**keywords, "input_ids": changed})
    moved = (after.logits - before.logits).abs()
    others = torch.zeros(moved.shape[:2], dtype=torch.bool)
    for document in documents:
        row, low, high = document
        others[row, low:high] = document != victim
    scale = max(float(before.logits[others].abs().max()), 1e-12)
    return Isolation(way, attention, float(moved[others].max()) / scale, float(before.loss), unpacked)


def _unpacked_loss(model: Any, batch: PackedBatch, documents: list[Span]) -> float:
    """Mean loss over all labels, each document alone in its row."""
    torch = require("torch", "torch")
    total, count = 0.0, 0
    with torch.no_grad():
        for row, low, high in documents:
            labels = batch.labels[row : row + 1, low:high]
            learned = int((labels[:, 1:] != _IGNORE).sum())
            if learned:
                loss = model(input_ids=batch.input_ids[row : row + 1, low:high], labels=labels, use_cache=False).loss
                total, count = total + float(loss) * learned, count + learned
    if not count:
        raise ConfigError("this batch has no labels, so there is no loss to compare; take another step")
    return total / count


def _documents(document_ids: Any) -> list[Span]:
    """All documents, without padding."""
    ids = np.asarray(document_ids)
    found = []
    for row, marks in enumerate(ids):
        cuts = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
        found += [(row, low, high) for low, high in pairwise(cuts) if marks[low]]
    return found


def _in_the_middle(documents: list[Span]) -> Span:
    """Middle document of the row with the most documents."""
    counts = np.bincount([row for row, _, _ in documents], minlength=1)
    if counts.max() < 2:
        raise ConfigError("no row of this batch has two documents, so there is nothing to isolate")
    own = [document for document in documents if document[0] == int(counts.argmax())]
    return own[(len(own) - 1) // 2]


def _changed(batch: PackedBatch, victim: Span, vocabulary: int, seed: int) -> Any:
    """Ids with another token in every place of one document."""
    torch = require("torch", "torch")
    row, low, high = victim
    if int(batch.input_ids.max()) >= vocabulary:
        raise ConfigError(
            f"the batch has token {int(batch.input_ids.max())}, and the model a vocabulary of {vocabulary}; use the "
            "model of this tokenizer"
        )
    shift = np.random.default_rng(seed).integers(1, vocabulary, high - low)
    ids = batch.input_ids.clone()
    ids[row, low:high] = (ids[row, low:high] + torch.from_numpy(shift)) % vocabulary
    return ids
