from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import Pipeline
from penstock.errors import ChangedFileError, DataError, ResumeError, SchemaError
from penstock.files.states import with_checksum
from penstock.sources import ArrowSource
from penstock.testing import assert_source_contract

TABLE = pa.table({"n": range(40), "s": [f"row {i}" for i in range(40)]})


def ipc(table: pa.Table, *, stream: bool = False, rows: int = 7, compression: str | None = None) -> bytes:
    out = io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
    return out.getvalue()


def read(source: ArrowSource, max_rows: int = 1000) -> pa.Table:
    batches = []
    while (batch := source.next_batch(max_rows)) is not None:
        batches.append(batch)
    source.close()
    return pa.Table.from_batches(batches, source.schema)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("suffix", [".arrow", ".feather", ".ipc", ".arrows"])
def test_files_and_streams_are_told_apart_by_their_bytes(
    tmp_path: Path, stream: bool, compression: str | None, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(ipc(TABLE, stream=stream, compression=compression))
    for max_rows in (1, 10, 1000):
        assert read(ArrowSource(tmp_path), max_rows).equals(TABLE)
    assert ArrowSource(path).size_hint() == (None if stream else 40)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_a_compressed_file_of_either_format_is_read_and_resumed(
    tmp_path: Path, stream: bool, suffix: str, compress: object
) -> None:
    (tmp_path / f"a.arrow{suffix}").write_bytes(compress(ipc(TABLE, stream=stream)))  # type: ignore[operator]
    assert_source_contract(lambda: ArrowSource(tmp_path), TABLE.to_pylist())


def test_an_arrow_source_keeps_the_contract_over_several_files(tmp_path: Path) -> None:
    (tmp_path / "1.arrow").write_bytes(ipc(TABLE.slice(0, 11)))
    (tmp_path / "2.arrows").write_bytes(ipc(TABLE.slice(11, 9), stream=True))
    (tmp_path / "3.arrow").write_bytes(ipc(TABLE.slice(0, 0)))
    (tmp_path / "4.arrow").write_bytes(ipc(TABLE.slice(20, 3)))
    assert_source_contract(lambda: ArrowSource(tmp_path), TABLE.slice(0, 23).to_pylist())


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("stream", [False, True])
def test_batches_that_are_in_use_outlive_a_truncated_file(
    tmp_path: Path, stream: bool, compression: str | None
) -> None:
    table = pa.table({"n": range(100_000), "s": [f"row {i}" for i in range(100_000)]})
    (tmp_path / "a.arrow").write_bytes(ipc(table, stream=stream, rows=10_000, compression=compression))
    source = ArrowSource(tmp_path / "a.arrow")
    batch = source.next_batch(100_000)
    os.truncate(tmp_path / "a.arrow", 100)
    assert batch is not None
    assert pa.Table.from_batches([batch]).equals(table.slice(0, 10_000))
    with pytest.raises(ChangedFileError, match=r"a\.arrow .* has 100 now"):
        source.next_batch(1)
    source.close()


def test_a_run_over_a_truncated_arrow_file_ends_with_its_name(tmp_path: Path) -> None:
    table = pa.table({"n": range(300_000), "s": [f"row {i}" for i in range(300_000)]})
    (tmp_path / "a.arrow").write_bytes(ipc(table, rows=2_000))  # small against the budget, or they would be mapped
    batches = iter(Pipeline(ArrowSource(tmp_path / "a.arrow"), [], budget="1 MiB"))  # too small to hold the rest
    next(batches)
    os.truncate(tmp_path / "a.arrow", 4_096)
    with pytest.raises(ChangedFileError, match=r"a\.arrow"):
        [batch.to_pylist() for batch in batches]


def test_large_batches_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(ipc(TABLE, rows=40))
    source = ArrowSource(tmp_path / "a.arrow")
    source.fit_budget(16 * 100)
    before = pa.total_allocated_bytes()
    batch = source.next_batch(40)
    assert pa.total_allocated_bytes() - before < 1000
    assert batch is not None
    assert batch.to_pylist() == TABLE.to_pylist()
    source.close()


def test_batches_of_a_file_are_views_of_it_and_outlive_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(ipc(TABLE, rows=40))
    before = pa.total_allocated_bytes()
    source = ArrowSource(tmp_path / "a.arrow", verify=False)
    batch = source.next_batch(40)
    assert pa.total_allocated_bytes() - before < 1000
    source.close()
    assert batch is not None
    assert batch.to_pylist() == TABLE.to_pylist()


def test_files_with_compatible_schemas_are_read_as_one_and_others_refused(tmp_path: Path) -> None:
    (tmp_path / "1.arrow").write_bytes(ipc(pa.table({"a": pa.array([1], pa.int16())})))
    (tmp_path / "2.arrow").write_bytes(ipc(pa.table({"b": ["x"], "a": [2.5]}), stream=True))
    source = ArrowSource(tmp_path)
    assert read(source).to_pylist() == [{"a": 1.0, "b": None}, {"a": 2.5, "b": "x"}]
    (tmp_path / "3.arrow").write_bytes(ipc(pa.table({"a": [{"x": 1}]})))
    with pytest.raises(SchemaError, match=r"3\.arrow"):
        read(ArrowSource(tmp_path))


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_file_is_damaged(tmp_path: Path, stream: bool) -> None:
    data = ipc(TABLE, stream=stream)
    (tmp_path / "a.arrow").write_bytes(data[: len(data) * 2 // 3])
    source = ArrowSource(tmp_path)
    rows = 0
    with pytest.raises(  # noqa: PT012
        DataError, match=r"a\.arrow"
    ) as caught:
        while (batch := source.next_batch(5)) is not None:
            rows += batch.num_rows
    assert caught.value.row == rows
    assert (rows > 0) == stream
    source.close()


@pytest.mark.parametrize("suffix", [".arrow", ".arrow.gz"])
def test_something_else_is_damaged_and_nothing_is_empty(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    text = b"this is not Arrow at all, whatever its name says"
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    with pytest.raises(DataError, match=r"a\.arrow"):
        read(ArrowSource(path))
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.arrow"):
        read(ArrowSource(path))


def test_a_state_behind_the_end_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(ipc(TABLE.slice(0, 10)))
    source = ArrowSource(tmp_path)
    source.load_state_dict(with_checksum(source.state_dict() | {"row": 30}))
    with pytest.raises(ResumeError, match=r"row 30\b"):
        source.next_batch(1)
    source.close()


def test_columns_with_dictionaries_and_extension_types_come_through(tmp_path: Path) -> None:
    table = pa.table({"d": pa.array(["x", "y", "x"]).dictionary_encode(), "j": pa.array(["{}", None, "1"], pa.json_())})
    (tmp_path / "a.arrow").write_bytes(ipc(table))
    assert read(ArrowSource(tmp_path)).equals(table)
