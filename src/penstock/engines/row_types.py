"""Types of text formats, found by tasks: each scans its splits, and their types are merged in the order of the input.

The result is that of one scan of the whole: the same columns in the same order, and for fields whose types do not go
together the same error, with the same row.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa

from penstock.engines.parts import schema_of, schema_text
from penstock.engines.splits import Bundle, RecordSplit
from penstock.errors import DataError, SchemaError
from penstock.pipeline.stages import Block
from penstock.sources.json_types import TypeConflictError
from penstock.sources.record_source import RecordSource
from penstock.sources.splits import InputSplit

_SCAN_BYTES = 4 << 20


def types_missing(source: Any) -> bool:
    """True if all rows of a source have to be looked at before the first one leaves."""
    return isinstance(source, RecordSource) and not source.has_schema


def scan_splits(source: RecordSource, splits: Sequence[InputSplit]) -> dict[str, Any]:
    """Types of the rows of some splits as text (None: they do not go together), and the records of each split."""
    records: list[int] = []
    try:
        blocks = (block for split in splits for block in _blocks(source, split, 0, records))
        kind = _types_of(source, blocks, pa.struct([]))
    except SchemaError:  # an earlier row, in another task, may not go with these either: the first one is named
        return {"types": None, "records": []}
    return {"types": schema_text(pa.schema(list(kind))), "records": records}


def merge_scans(source: RecordSource, bundles: Sequence[Bundle], records: Iterator[dict[str, Any]]) -> pa.Schema:
    """Schema of the files, from the types of the splits; an error that names the first row that does not go with those
    before it."""
    known: pa.DataType = pa.struct([])
    before: Counter[int] = Counter()
    for bundle, record in zip(bundles, records, strict=True):
        found = schema_of(record["types"])
        try:
            if found is None:
                raise TypeConflictError("", known, known)
            known = source._merge_types(known, pa.struct(list(found)))
        except TypeConflictError:  # the row is in these splits
            known = _types_of(source, _numbered(source, bundle, before), known)
        for split, count in zip(bundle.splits, record["records"]):
            before[split.file] += count
    return source._typed(known)


def _types_of(source: RecordSource, blocks: Iterator[Block], known: pa.DataType) -> pa.DataType:
    """Types of the rows of some blocks, merged into those of all rows before them."""
    scan = source._scan_types(blocks, known)
    while True:
        try:
            next(scan)
        except StopIteration as end:
            return end.value


def _numbered(source: RecordSource, bundle: Bundle, before: Counter[int]) -> Iterator[Block]:
    """Blocks of some splits, with the numbers that their records have in the files."""
    before = before.copy()
    for split in bundle.splits:
        counts: list[int] = []
        yield from _blocks(source, split, before[split.file], counts)
        before[split.file] += counts[0]


def _blocks(source: RecordSource, split: InputSplit, first: int, counts: list[int]) -> Iterator[Block]:
    """Blocks of a split, with the first record numbered; adds the number of its records when it ends."""
    untyped = copy.copy(source)
    untyped._schema = pa.schema([])  # or it would look for types before the first block
    with closing(RecordSplit(untyped, split)) as reader:
        while True:
            try:
                block = reader.next_block(_SCAN_BYTES)
            except DataError:
                reader.skip_file()  # it is reported, in its place, when the rows are read
                continue
            if block is None:
                break
            yield replace(block, origin=replace(block.origin, row=block.origin.row + first))
        counts.append(reader.records)
