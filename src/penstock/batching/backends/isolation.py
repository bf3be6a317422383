"""Do packed documents see each other? Asked of the model itself: one document is changed, and the others watched.

    model = load_causal_model("model/")
    for way in probe_isolation(model, batch):
        print(way)

Which mask a model makes of `position_ids` and `attention_mask` depends on its code, on the attention implementation and
on the release of transformers, so it is tried out and not looked up.
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
from penstock.errors import ConfigError

__all__ = ["AS_IT_IS", "Isolation", "PackedBatch", "load_causal_model", "packed_rows", "probe_isolation"]

Span = tuple[int, int, int]
"""A document: its row, where it begins and where it ends."""
AS_IT_IS = "model(**batch)"
LEAK_TOLERANCE = 1e-5
"""The most that logits of other documents may move, relative to the largest. In float32 and with the same shapes,
masked positions add exact zeros: what isolates does not move them at all."""
LOSS_TOLERANCE = 1e-4
"""The most that packed and unpacked loss may differ, relative to the latter: sums are taken in another order."""
_IGNORE = -100


class PackedBatch(Protocol):
    """What is needed of a `TrainingBatch`, of torch's arrays."""

    input_ids: Any
    labels: Any
    position_ids: Any
    document_ids: Any

    def as_dict(self, *, block_mask: str | None = None) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Isolation:
    """What came of one way to call the model."""

    way: str
    attention: str
    """The implementation: eager, sdpa, ..."""
    leak: float
    """The most that a logit of another document moved, relative to the largest logit."""
    packed_loss: float
    unpacked_loss: float
    """The same documents one by one, weighed by their labels."""
    problem: str | None = None
    """Why the model could not be called this way."""

    @property
    def loss_difference(self) -> float:
        return abs(self.packed_loss - self.unpacked_loss) / max(abs(self.unpacked_loss), 1e-12)

    @property
    def isolates(self) -> bool:
        # Written so that NaN does not isolate.
        return self.problem is None and self.leak <= LEAK_TOLERANCE and self.loss_difference <= LOSS_TOLERANCE


def load_causal_model(path: str | Path) -> Any:
    """The model in a directory, in float32 on the CPU. Nothing is downloaded, and no code of the directory is run."""
    transformers = require("transformers", "hf")
    torch = require("torch", "torch")
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{path} is no model directory: there is no config.json in it; save the model there first")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be loaded as a causal language model: {error}") from error
    return model.eval()


def packed_rows(document_ids: npt.NDArray[Any]) -> int:
    """Rows with more than one document."""
    return int((document_ids.max(axis=1, initial=0) > 1).sum())


def probe_isolation(model: Any, batch: PackedBatch, *, seed: int = 0) -> list[Isolation]:
    """Every way to call the model with a packed batch of torch's: the way `model(**batch)` does it first.

    In the row with the most documents one in the middle is changed, so that those before and behind could notice. The
    loss is compared with that of each document by itself with the same labels.
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
    """(what it is called, attention implementation, keywords)."""
    yield AS_IT_IS, own, dict(batch.as_dict())
    for attention, mask in (("eager", "float32"), ("sdpa", "bool")):
        yield "block mask", attention, dict(batch.as_dict(block_mask=mask))
    if batch.position_ids is not None:
        for attention in ("eager", "sdpa"):
            only = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
            yield "position_ids only", attention, {**only, "use_cache": False}


def _choose_attention(model: Any, attention: str) -> bool:
    """Whether the model has that implementation, which it then uses."""
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
    """The mean over all labels, each document alone in its row."""
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
        raise ConfigError("nothing is learned from this batch, so there is no loss to compare; take another step")
    return total / count


def _documents(document_ids: Any) -> list[Span]:
    """Every document, padding left out."""
    ids = np.asarray(document_ids)
    found = []
    for row, marks in enumerate(ids):
        cuts = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), len(marks)]
        found += [(row, low, high) for low, high in pairwise(cuts) if marks[low]]
    return found


def _in_the_middle(documents: list[Span]) -> Span:
    """One in the middle of the row that has the most."""
    counts = np.bincount([row for row, _, _ in documents], minlength=1)
    if counts.max() < 2:
        raise ConfigError("no row of this batch holds two documents, so there is nothing to isolate")
    own = [document for document in documents if document[0] == int(counts.argmax())]
    return own[(len(own) - 1) // 2]


def _changed(batch: PackedBatch, victim: Span, vocabulary: int, seed: int) -> Any:
    """The ids with another token in every place of one document."""
    torch = require("torch", "torch")
    row, low, high = victim
    if int(batch.input_ids.max()) >= vocabulary:
        raise ConfigError(
            f"the batch has the token {int(batch.input_ids.max())}, and the model knows {vocabulary}; the model is not "
            "for this tokenizer"
        )
    shift = np.random.default_rng(seed).integers(1, vocabulary, high - low)
    ids = batch.input_ids.clone()
    ids[row, low:high] = (ids[row, low:high] + torch.from_numpy(shift)) % vocabulary
    return ids
