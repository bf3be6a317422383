"""Windows, counts and cursors as arrays and plain values, for other processes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.loaders.streamed.rows import TokenRows
from penstock.loaders.streamed.sampled_windows import SampledWindow, WindowInput
from penstock.loaders.streamed.windows import StreamCursor, WindowCounts, WindowStart
from penstock.order.samples import Samples
from penstock.pipeline.array_worker import Answer
from penstock.pipeline.stages import Rejected


class PackedCursors(Mapping[int, StreamCursor]):
    """Cursors of streams by number, unpacked when they are looked at: most positions are never saved."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    @classmethod
    def pack(cls, cursors: Mapping[int, StreamCursor]) -> npt.NDArray[np.int64]:
        """Eight numbers a cursor."""
        rows = [
            (number, c.start.block, c.start.at, c.start.number, c.ahead, c.carry, c.index, c.ended)
            for number, c in cursors.items()
        ]
        return np.array(rows, np.int64).reshape(-1, 8)

    @cached_property
    def _cursors(self) -> dict[int, StreamCursor]:
        rows = np.frombuffer(self._packed, np.int64).reshape(-1, 8).tolist()
        return {
            number: StreamCursor(WindowStart(block, at, count), ahead, carry, index, bool(ended))
            for number, block, at, count, ahead, carry, index, ended in rows
        }

    def __getitem__(self, number: int) -> StreamCursor:
        return self._cursors[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._cursors)

    def __len__(self) -> int:
        return len(self._packed) // 64

    def __reduce__(self) -> tuple[type[PackedCursors], tuple[bytes]]:
        return PackedCursors, (self._packed,)


def counts_to(counts: WindowCounts) -> list[Any]:
    return [counts.read, counts.dropped, counts.changed, [_rejected_to(row) for row in counts.rejected]]


def counts_from(values: list[Any]) -> WindowCounts:
    read, dropped, changed, rejected = values
    return WindowCounts(read, Counter(dropped), Counter(changed), tuple(_rejected_from(row) for row in rejected))


def _rejected_to(row: Rejected) -> list[Any]:
    raw = isinstance(row.data, bytes)
    data = base64.b64encode(row.data).decode() if raw else _plain(row.data)
    return [row.file, row.row, row.offset, row.stage, row.kind, row.reason, data, raw]


def _rejected_from(values: list[Any]) -> Rejected:
    file, row, offset, stage, kind, reason, data, raw = values
    return Rejected(file, row, offset, stage, kind, reason, base64.b64decode(data) if raw else data)


def _plain(value: Any) -> Any:
    """Bytes in a row as the quarantine file has them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def window_to(window: SampledWindow) -> Answer:
    rows, samples, following = window.rows, window.samples, window.following
    arrays: dict[str, npt.NDArray[Any]] = {
        "values": rows.ids.values,
        "offsets": rows.ids.offsets,
        "blocks": rows.blocks,
        "places": rows.places,
        "sample_offsets": samples.offsets,
        "rows": samples.rows,
        "starts": samples.starts,
        "lengths": samples.lengths,
    }
    if rows.mask is not None:
        arrays["mask"] = rows.mask
    notes: dict[str, Any] = {
        "single": samples.single,
        "cursor": _cursor_to(window.cursor),
        "counts": counts_to(window.counts),
        "following": None,
    }
    if following is not None:
        trail = [[*_start_to(start), tokens] for start, tokens in following.trail]
        left = 0 if following.carry is None else following.carry.tokens
        notes["following"] = [_start_to(following.start), trail, left]
    return Answer(notes, arrays)


def window_from(answer: Answer) -> SampledWindow:
    """The window of an answer, with memory of its own."""
    notes, arrays = answer.notes, {name: array.copy() for name, array in answer.arrays.items()}
    rows = TokenRows(
        Ragged(arrays["values"], arrays["offsets"]), arrays.get("mask"), arrays["blocks"], arrays["places"]
    )
    samples = Samples(arrays["sample_offsets"], arrays["rows"], arrays["starts"], arrays["lengths"], notes["single"])
    following = None
    if notes["following"] is not None:
        start, trail, left = notes["following"]
        behind = tuple((WindowStart(*at), tokens) for *at, tokens in trail)
        following = WindowInput(WindowStart(*start), behind, rows.tail(left) if left else None)
    *start, ahead, carry = notes["cursor"]
    cursor = StreamCursor(WindowStart(*start), ahead, carry)
    return SampledWindow(rows, samples, cursor, following, counts_from(notes["counts"]))


def _start_to(start: WindowStart) -> list[int]:
    return [start.block, start.at, start.number]


def _cursor_to(cursor: StreamCursor) -> list[int]:
    return [*_start_to(cursor.start), cursor.ahead, cursor.carry]
