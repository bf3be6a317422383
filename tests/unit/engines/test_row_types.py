"""Types found split by split are those of one scan of the whole, for any rows and any splits."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.engines.row_types import merge_scans, scan_splits
from penstock.engines.splits import Bundle, bundles_of
from penstock.errors import SchemaError
from penstock.sources import CsvSource, JsonlSource, JsonSource
from penstock.sources.record_source import RecordSource

ODD = [
    b"",
    b"   ",
    b"{bad",
    b"[1]",
    b"null",
    b'{"a": "\xff", "late": 1}',
    b'{"a": "\\ud800", "half": {"x": 2}}',
    b'{"a": "tab\there", "raw": true}',
    b'{"a": "\\q", "escape": 1}',
    b'{"a": "x", "quote": "}',
    b'{"a": -NaN, "nan": NaN}',
    b'{"a": 1, "a": "twice"}',
    b'{"a": 123456789012345678901234567890}',
    b'{"a": "2024-01-02T03:04:05"}',
    b"{}",
]
leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.just(1.5) | st.sampled_from(["", "x", "long " * 40])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abxy"), inner, max_size=2),
    max_leaves=3,
)
rows = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), values, max_size=3).map(lambda r: json.dumps(r).encode())
same_rows = st.fixed_dictionaries(
    {"a": st.none() | st.just("word " * 30)}, optional={"n": st.none() | st.integers(), "s": st.just({"k": 1.5})}
).map(lambda r: json.dumps(r).encode())
files = st.lists(
    st.lists(rows | same_rows | st.sampled_from(ODD), min_size=1, max_size=12)
    | st.lists(same_rows, min_size=1, max_size=12)
    | st.lists(same_rows | st.sampled_from(ODD), min_size=1, max_size=12),
    min_size=1,
    max_size=3,
)


def in_splits(source: RecordSource, split_bytes: int) -> Any:
    """The schema by way of tasks, or the error."""
    bundles = bundles_of(source, split_bytes)
    records = [scan_splits(source, Bundle.of(bundle.to_json()).splits) for bundle in bundles]
    assert not source.has_schema
    try:
        source._take_schema(merge_scans(source, bundles, iter(records)))
    except SchemaError as error:
        return str(error)
    return source.schema


def in_one_scan(source: RecordSource, block_bytes: int) -> Any:
    source._scan_bytes = block_bytes
    try:
        return source.schema
    except SchemaError as error:
        return str(error)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, pa.Schema) and isinstance(right, pa.Schema):
        return left.equals(right, check_metadata=True)
    return bool(left == right)


@settings(max_examples=60, deadline=None)
@given(
    files=files,
    split_bytes=st.sampled_from([1, 40, 200, 1 << 20]),
    block_bytes=st.sampled_from([1, 100, 1 << 22]),
    mixed=st.sampled_from(["error", "json"]),
    columns=st.sampled_from([None, None, ["a"]]),
    verbatim=st.sampled_from([None, {"a": ["x"]}]),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    packed=st.booleans(),
    whole=st.booleans(),
)
@example([[b"", b'{"a": "\\ud800", "half": {"x": 2}}']], 1, 1, "error", None, None, b"\n", False, False)
@example([[b'{"a": 1}'], [b'{"b": 1}', b'{"a": "x"}']], 1, 1 << 22, "error", None, None, b"\n", False, False)
def test_types_of_splits_are_those_of_one_scan(
    files: list[list[bytes]],
    split_bytes: int,
    block_bytes: int,
    mixed: Any,
    columns: list[str] | None,
    verbatim: dict[str, list[str]] | None,
    ending: bytes,
    packed: bool,
    whole: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, lines in enumerate(files):
            data = ending.join(lines)
            place = Path(folder) / f"part={number % 2}"
            place.mkdir(exist_ok=True)
            suffix = ".json" if whole else ".jsonl"
            pack = packed and not number
            path = place / f"{number}{suffix}{'.gz' if pack else ''}"
            path.write_bytes(gzip.compress(data) if pack else data)
        kind = JsonSource if whole else JsonlSource

        def source() -> RecordSource:
            return kind(folder, mixed=mixed, columns=columns, verbatim=verbatim, max_row_bytes=220, allow_empty=True)

        split, scanned = in_splits(source(), split_bytes), in_one_scan(source(), block_bytes)
        assert same(split, scanned), (split, scanned)


cells = st.sampled_from(
    ["", "1", "0", "2.5", "true", "false", "2024-01-02", "2024-01-02 03:04:05", "x", "NA", '"q,\n"']
)
tables = st.lists(
    st.tuples(st.permutations(["a", "b", "c"]), st.integers(1, 3), st.lists(st.lists(cells, min_size=1, max_size=4))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(tables=tables, split_bytes=st.sampled_from([1, 60, 1 << 20]), block_bytes=st.sampled_from([1, 1 << 22]))
def test_types_of_csv_files_are_those_of_one_scan(
    tables: list[tuple[list[str], int, list[list[str]]]], split_bytes: int, block_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, (names, width, lines) in enumerate(tables):
            text = "\n".join([",".join(names[:width]), *map(",".join, lines)])
            (Path(folder) / f"{number}.csv").write_text(text)
        split, scanned = in_splits(CsvSource(folder), split_bytes), in_one_scan(CsvSource(folder), block_bytes)
        assert same(split, scanned), (split, scanned)


@pytest.mark.parametrize("split_bytes", [30, 1 << 20])
def test_the_first_row_that_does_not_go_with_the_others_is_named(tmp_path: Path, split_bytes: int) -> None:
    file = tmp_path / "rows.jsonl"
    lines = ['{"a": {"b": 1}}'] * 20 + [""] + ['{"a": {"b": "text"}}', '{"a": {"b": "text"}}', '{"a": 1}']
    file.write_text("\n".join(lines))
    told = in_splits(JsonlSource(file), split_bytes)
    assert told == in_one_scan(JsonlSource(file), 1 << 22)
    assert "row 21: field 'a.b' is string here and int64 before" in told
