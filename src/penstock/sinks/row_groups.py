"""Groups of rows in a file, such as row groups and record batches: where one ends depends on the rows alone.

Neither batch sizes nor workers, restarts or the splits of a job change a byte of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from penstock.arrays.ragged import offsets_of
from penstock.memory.views import compact
from penstock.store.shard_writer import any_row_bytes, without_hidden

_LONG_BYTES = 1 << 20


class GroupCuts:
    """Cuts a stream of batches into groups: one ends with the row that fills it; a row that is much longer is alone."""

    def __init__(self, group_bytes: int) -> None:
        self._limit = group_bytes
        self._filled = 0

    def cut(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int, bool]]:
        """The batch in slices: rows (perhaps none), their bytes, and whether a group ends with them."""
        sizes = any_row_bytes(batch)
        reach = offsets_of(sizes)
        long = np.flatnonzero(sizes > self._limit + _LONG_BYTES)
        start, rows = 0, batch.num_rows
        while start < rows:
            stop = int(np.searchsorted(reach, reach[start] + self._limit - self._filled))
            ends = stop <= rows
            stop = min(stop, rows)
            # Those from `start` on, or after it if it is the first row of a group.
            following = int(np.searchsorted(long, start, side="left" if self._filled else "right"))
            if following < len(long) and long[following] < stop:
                stop, ends = int(long[following]), True
            nbytes = int(reach[stop] - reach[start])
            part = batch.slice(start, stop - start)
            self._filled = 0 if ends else self._filled + nbytes
            yield (part if ends or not start else compact(part)), nbytes, ends
            start = stop


def joined(parts: list[pa.RecordBatch], *, plain: bool = False) -> pa.RecordBatch:
    """Some batches as one, which does not tell where they began; categories in the order of the rows.

    With `plain`, no byte of its buffers tells it either: a slice still has those of its neighbours, and of nulls.
    """
    schema = parts[0].schema
    columns = [_joined([part.column(index) for part in parts]) for index in range(len(schema))]
    if plain:
        columns = [_plain(column) for column in columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(array: pa.Array) -> pa.Array:
    return array if pa.types.is_dictionary(array.type) else without_hidden(pa.concat_arrays([array]))


def _joined(arrays: list[pa.Array]) -> pa.Array:
    kind = arrays[0].type
    if not pa.types.is_dictionary(kind) or kind.ordered:
        return arrays[0] if len(arrays) == 1 else _concatenated(arrays)
    values = pa.concat_arrays([array.dictionary_decode() for array in arrays])
    made: pa.Array = values.dictionary_encode().cast(kind)
    return made


def _concatenated(arrays: list[pa.Array]) -> pa.Array:
    if pa.types.is_dictionary(arrays[0].type):
        arrays = pa.chunked_array(arrays).unify_dictionaries().chunks
    return pa.concat_arrays(arrays)
