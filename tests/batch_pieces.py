"""Record batches of one column, and batches in slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa


def column_of(values: list[Any], dtype: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, dtype)})


def pieces(batch: pa.RecordBatch, at: list[int]) -> list[pa.RecordBatch]:
    """The batch in slices, some of them empty."""
    edges = [0, *sorted(min(cut, batch.num_rows) for cut in at), batch.num_rows]
    return [batch[start:stop] for start, stop in pairwise(edges)]
