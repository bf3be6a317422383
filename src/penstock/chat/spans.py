"""From marked texts to columns: the bytes without the marks, the spans between them, the tokens that begin in a span.

All rows of a batch are handled at once. A token is supervised if its first byte lies in a span: what begins in the
prompt is not for the model to write, even if it reaches into the answer, and what begins in the answer is, even if it
takes a byte of the template along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.chat.marks import END, ROW, START
from penstock.chat.problems import RenderError, SpansNotFoundError
from penstock.errors import ConfigError
from penstock.tokenizers.base import Encoded

__all__ = ["Flags", "Ints", "SpanTokens", "Spans", "as_texts", "read_marks", "shown"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_NUMBER = {mark: mark.encode("utf-8", "surrogatepass")[2] for mark in (START, END, ROW)}


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of the rows of a text column, in bytes counted from the first byte of the column."""

    texts: pa.Array
    offsets: Ints
    """Row i is bytes `bounds[i]` to `bounds[i + 1]`."""
    rows: Ints
    starts: Ints
    stops: Ints


@dataclass(slots=True)
class SpanTokens:
    """The tokens of a batch, row after row, and for each span the tokens that begin in it: `first` up to `stop`."""

    ids: npt.NDArray[Any]
    offsets: Ints
    starts: Ints
    """In bytes of the column."""
    ends: npt.NDArray[np.int32]
    """In bytes of the row: few are ever looked at."""
    first: Ints
    stop: Ints

    @classmethod
    def of(cls, encoded: Encoded, spans: Spans) -> SpanTokens:
        ids = encoded.ids.values.to_numpy()
        bounds = encoded.ids.offsets.to_numpy().astype(np.int64)
        ids, bounds = ids[bounds[0] : bounds[-1]], bounds - bounds[0]
        if len(encoded.starts) != len(ids):
            raise ConfigError(f"the tokenizer gave {len(encoded.starts)} offsets for {len(ids)} tokens")
        starts = np.repeat(spans.offsets[:-1], np.diff(bounds))
        starts += encoded.starts
        # A token of no width at the end of a row stands where the next row begins: a span stays in its row.
        first = np.maximum(np.searchsorted(starts, spans.starts), bounds[spans.rows])
        stop = np.minimum(np.searchsorted(starts, spans.stops), bounds[spans.rows + 1])
        return cls(ids, bounds, starts, encoded.ends, first, np.maximum(first, stop))

    def mask(self) -> Flags:
        """Which tokens are supervised."""
        turns = np.concatenate(([0], np.stack((self.first, self.stop), axis=1).ravel(), [len(self.ids)]))
        runs = np.diff(turns)
        if (runs >= 0).all():
            return np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        edges = np.zeros(len(self.ids) + 1, np.int8)
        np.add.at(edges, self.first, 1)
        np.add.at(edges, self.stop, -1)
        return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


def read_marks(marked: list[str]) -> Spans:
    """Take the marks out of the texts and say where they were."""
    blob = np.frombuffer("".join(text + ROW for text in marked).encode("utf-8", "surrogatepass"), np.uint8)
    at = np.flatnonzero(blob == 0xED)  # the first byte of every surrogate, and of some Hangul
    at = at[blob[at + 1] >= 0xA0]
    numbers = blob[at + 2]
    _check(blob[at + 1], numbers)
    keep = np.ones(len(blob), np.bool_)
    for i in range(3):
        keep[at + i] = False
    data = blob[keep]
    places = at - 3 * np.arange(len(at))
    row_ends = numbers == _NUMBER[ROW]
    opens = numbers == _NUMBER[START]
    bounds = np.concatenate(([0], places[row_ends]))
    return Spans(
        as_texts(data, bounds),
        bounds,
        (np.cumsum(row_ends) - row_ends)[opens],
        places[opens],
        places[numbers == _NUMBER[END]],
    )


def shown(text: bytes, spans: list[tuple[int, int]], limit: int = 1200) -> str:
    """The text with its supervised parts between ⟦ and ⟧, shortened in the middle of what is long."""
    parts, done = [], 0
    for start, stop in spans:
        parts += [_shortened(text[done:start], limit), "⟦", _shortened(text[start:stop], limit), "⟧"]
        done = stop
    return "".join([*parts, _shortened(text[done:], limit)])


def _check(second: npt.NDArray[np.uint8], numbers: npt.NDArray[np.uint8]) -> None:
    """Marks come in pairs within a row, and there are no other surrogates."""
    foreign = (second != 0xA0) | (numbers > max(_NUMBER.values()))
    ends = numbers == _NUMBER[ROW]
    rows = np.cumsum(ends) - ends
    if foreign.any():
        raise RenderError("the template wrote a lone surrogate, which is not text", row=int(rows[foreign.argmax()]))
    inner, rows = numbers[~ends], rows[~ends]
    expected = np.where(np.arange(len(inner)) % 2, _NUMBER[END], _NUMBER[START])
    wrong = inner != expected
    wrong[: len(rows) // 2 * 2] |= np.repeat(rows[0 : len(rows) // 2 * 2 : 2] != rows[1::2], 2)
    if wrong.any():
        raise SpansNotFoundError("the template has one generation block inside another", row=int(rows[wrong.argmax()]))


def as_texts(data: npt.NDArray[np.uint8], bounds: Ints) -> pa.Array:
    wide = len(data) >= 2**31
    offsets = bounds.astype(np.int64 if wide else np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_string() if wide else pa.string(), len(bounds) - 1, buffers)


def _shortened(text: bytes, limit: int) -> str:
    if len(text) > limit:
        text = text[: limit // 2] + b" ... " + text[-limit // 2 :]
    return text.decode("utf-8", "replace")
