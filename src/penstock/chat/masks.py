"""Loss mask of a batch: from supervised turns in texts to supervised tokens.

A `Turn` is a piece of one text, in characters. `Spans` are the turns of all rows of a batch, in bytes. `SpanTokens`
are the tokens of the batch with the tokens of each span; `mask` is what becomes the column `loss_mask`.

A token is supervised if its first byte lies in a span. A token that begins in the prompt and reaches into the answer is
not supervised; a token that begins in the answer and takes a byte of the template along is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import offsets_of
from penstock.errors import ConfigError
from penstock.tokenizers.base import Encoded

__all__ = ["NO_PROMPT", "Flags", "Ints", "SpanTokens", "Spans", "Turn", "as_texts", "shown"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_PROMPT = -1


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """Supervised piece of a text, in characters, and the end of the prompt that it answers."""

    start: int
    stop: int
    prompt: int = NO_PROMPT
    message: int = -1


@dataclass(frozen=True, slots=True)
class Spans:
    """Supervised spans of the rows of a text column, in bytes from the first byte of the column."""

    texts: pa.Array
    offsets: Ints
    """Row i is bytes `offsets[i]` to `offsets[i + 1]`."""
    rows: Ints
    starts: Ints
    stops: Ints
    prompts: Ints
    """End of the prompt of each span; -1 for a span that answers no prompt."""

    @classmethod
    def of(cls, texts: Sequence[str], turns: Sequence[Sequence[Turn]]) -> Spans:
        """Spans of texts that were rendered one by one."""
        data = [text.encode() for text in texts]
        offsets = offsets_of([len(text) for text in data])
        rows = np.repeat(np.arange(len(texts)), [len(of_row) for of_row in turns])
        places = [
            _in_bytes(text, len(row_bytes), (turn.start, turn.stop, turn.prompt))
            for text, row_bytes, of_row in zip(texts, data, turns)
            for turn in sorted(of_row)
        ]
        starts, stops, prompts = np.array(places, np.int64).reshape(-1, 3).T
        begins = offsets[rows]
        ends = np.where(prompts < 0, NO_PROMPT, prompts + begins)
        blob = np.frombuffer(b"".join(data), np.uint8)
        return cls(as_texts(blob, offsets), offsets, rows, starts + begins, stops + begins, ends)


@dataclass(slots=True)
class SpanTokens:
    """Tokens of a batch, row after row, and the tokens that begin in each span: `first` up to `stop`."""

    ids: npt.NDArray[Any]
    offsets: Ints
    starts: Ints
    """First byte of each token, counted in the column."""
    ends: npt.NDArray[np.int32]
    """End of each token, counted in its row: only a few are ever needed in the column."""
    first: Ints
    stop: Ints

    @classmethod
    def of(cls, encoded: Encoded, spans: Spans) -> SpanTokens:
        ids = encoded.ids.values.to_numpy()
        offsets = encoded.ids.offsets.to_numpy().astype(np.int64)
        ids, offsets = ids[offsets[0] : offsets[-1]], offsets - offsets[0]
        if len(encoded.starts) != len(ids):
            raise ConfigError(f"the tokenizer gave {len(encoded.starts)} offsets for {len(ids)} tokens")
        starts = np.repeat(spans.offsets[:-1], np.diff(offsets))
        starts += encoded.starts
        # A token of no width at the end of a row stands where the next row begins: a span stays in its row.
        first = np.maximum(np.searchsorted(starts, spans.starts), offsets[spans.rows])
        stop = np.minimum(np.searchsorted(starts, spans.stops), offsets[spans.rows + 1])
        return cls(ids, offsets, starts, encoded.ends, first, np.maximum(first, stop))

    def mask(self) -> Flags:
        """True for each supervised token."""
        turns = np.concatenate(([0], np.stack((self.first, self.stop), axis=1).ravel(), [len(self.ids)]))
        runs = np.diff(turns)
        if (runs >= 0).all():
            return np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        edges = np.zeros(len(self.ids) + 1, np.int8)
        np.add.at(edges, self.first, 1)
        np.add.at(edges, self.stop, -1)
        return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


def as_texts(data: npt.NDArray[np.uint8], offsets: Ints) -> pa.Array:
    """A text column over these bytes, without a copy of them."""
    wide = len(data) >= 2**31
    buffers = [None, pa.py_buffer(offsets.astype(np.int64 if wide else np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string() if wide else pa.string(), len(offsets) - 1, buffers)


def shown(text: bytes, spans: list[tuple[int, int]], limit: int = 1200) -> str:
    """The text with its supervised parts between ⟦ and ⟧; long parts are shortened in the middle."""
    parts, done = [], 0
    for start, stop in spans:
        parts += [_shortened(text[done:start], limit), "⟦", _shortened(text[start:stop], limit), "⟧"]
        done = stop
    return "".join([*parts, _shortened(text[done:], limit)])


def _in_bytes(text: str, length: int, places: tuple[int, ...]) -> tuple[int, ...]:
    """Character positions of a text as byte positions of its UTF-8, which has this length; -1 stays."""
    if length == len(text):
        return places
    return tuple(place if place < 0 else len(text[:place].encode()) for place in places)


def _shortened(text: bytes, limit: int) -> str:
    if len(text) > limit:
        text = text[: limit // 2] + b" ... " + text[-limit // 2 :]
    return text.decode("utf-8", "replace")
