from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError, SchemaError
from penstock.sinks import ArrowSink, ParquetSink, formats
from penstock.types import from_numpy

COMPRESSIONS = ["zstd", "snappy", "gzip", "lz4", "brotli", "none"]
NESTED = pa.table(
    {
        "id": range(50),
        "turns": [[{"role": "user", "content": f"{i}"}] * (i % 3) for i in range(50)],
        "score": [None if i % 2 else i / 3 for i in range(50)],
        "when": pa.array(range(50), pa.timestamp("us", "UTC")),
        "raw": [bytes([i]) for i in range(50)],
    }
)


def write(sink: Any, table: pa.Table, rows: int = 7) -> Path:
    for batch in table.to_batches(max_chunksize=rows):
        sink.consume(batch)
    sink.flush()
    path: Path = sink.path
    return path


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_parquet_of_every_compression_is_what_pyarrow_reads(tmp_path: Path, compression: str) -> None:
    path = write(ParquetSink(tmp_path / "a.parquet", compression=compression), NESTED)
    assert pq.read_table(path).equals(NESTED)
    used = pq.read_metadata(path).row_group(0).column(0).compression
    assert used.lower() == {"none": "uncompressed"}.get(compression, compression)


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_row_groups_are_closed_by_size_and_a_few_are_what_the_sink_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(formats, "available_cores", lambda: cores)
    sink = ParquetSink(tmp_path / "a.parquet", row_group_bytes="64 KiB")
    sink.fit_budget(4 << 20)
    held = []
    for _ in range(40):
        sink.consume(pa.record_batch({"n": np.arange(4096)}))
        held.append(sink.memory_usage())
    sink.flush()
    assert 0 < max(held) < min(cores, 8) * (64 << 10)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 20
    assert sink.memory_usage() == 0


def test_the_bytes_do_not_depend_on_the_number_of_row_groups_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {}
    for cores in (1, 3, 16):
        monkeypatch.setattr(formats, "available_cores", lambda cores=cores: cores)
        written[cores] = write(ParquetSink(tmp_path / f"{cores}.parquet", row_group_bytes=256), NESTED).read_bytes()
    assert pq.read_metadata(tmp_path / "16.parquet").num_row_groups > 3
    assert written[1] == written[3] == written[16]


def test_a_budget_without_room_for_two_row_groups_encodes_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "available_cores", lambda: 16)
    sink = ParquetSink(tmp_path / "a.parquet", row_group_bytes="64 KiB")
    for budget, expected in ((1 << 10, 2), (1 << 20, 2), (4 << 20, 8), (1 << 30, 8)):
        sink.fit_budget(budget)
        assert sink._groups_at_once == expected
    sink.fit_budget(0)
    assert sink._groups_at_once == 1


def test_an_encoder_that_fails_ends_the_run_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "available_cores", lambda: 4)

    def refuse(table: pa.Table, options: Any) -> pa.Buffer:
        raise pa.ArrowInvalid("no")

    monkeypatch.setattr(formats, "_one_group", refuse)
    sink = ParquetSink(tmp_path / "a.parquet", row_group_bytes=64)
    with pytest.raises(SchemaError, match="no"):
        write(sink, NESTED)
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_only_text_that_repeats_gets_a_dictionary(tmp_path: Path) -> None:
    table = pa.table({"same": ["x"] * 2000, "other": [f"text {i}" for i in range(2000)]})

    def encodings(path: Path) -> list[bool]:
        group = pq.read_metadata(path).row_group(0)
        return ["RLE_DICTIONARY" in group.column(i).encodings for i in range(2)]

    assert encodings(write(ParquetSink(tmp_path / "a.parquet"), table, 2000)) == [True, False]
    assert encodings(write(ParquetSink(tmp_path / "b.parquet", dictionary=False), table, 2000)) == [False, False]
    assert encodings(write(ParquetSink(tmp_path / "c.parquet", dictionary=["other"]), table, 2000)) == [False, True]


def test_what_parquet_has_no_form_for_is_a_matter_of_the_schema(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"ParquetSink\(.*a\.parquet'\)"):
        write(sink, pa.table({"e": [{}, {}]}))
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_segments_of_a_durable_run_are_joined_into_row_groups_of_the_usual_size(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "a.parquet")
    sink.restore({})
    for batch in NESTED.to_batches(max_chunksize=7):
        sink.consume(batch)
        sink.checkpoint()
    sink.flush()
    assert pq.read_table(tmp_path / "a.parquet").equals(NESTED)
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_of_every_compression_is_what_pyarrow_reads(tmp_path: Path, compression: str | None) -> None:
    path = write(ArrowSink(tmp_path / "a.arrow", compression=compression), NESTED)
    with pa.memory_map(str(path)) as file:
        assert pa.ipc.open_file(file).read_all().equals(NESTED)


@pytest.mark.parametrize("durable", [False, True])
def test_dictionaries_that_differ_from_batch_to_batch_become_one_that_grows(tmp_path: Path, durable: bool) -> None:
    values = [["a", "b"], ["c", "a", None], ["b"], ["d", "e", "a"]]
    sink = ArrowSink(tmp_path / "a.arrow")
    if durable:
        sink.restore({})
    for part in values:
        sink.consume(pa.record_batch({"n": range(len(part)), "d": pa.array(part).dictionary_encode()}))
        if durable:
            sink.checkpoint()
    sink.flush()
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table["d"].to_pylist() == [value for part in values for value in part]
        assert pa.types.is_dictionary(table.schema.field("d").type)


@pytest.mark.parametrize("kind", [ParquetSink, ArrowSink])
def test_tensors_and_their_types_come_back(tmp_path: Path, kind: Any) -> None:
    batch = from_numpy({"v": np.arange(12, dtype=np.float32).reshape(3, 2, 2)})
    path = write(kind(tmp_path / f"a{kind.suffix}"), pa.Table.from_batches([batch]))
    with pa.memory_map(str(path)) as file:
        table = pq.read_table(path) if kind is ParquetSink else pa.ipc.open_file(file).read_all()
        assert table.schema == batch.schema
        assert table["v"].combine_chunks().to_numpy_ndarray().tolist() == batch["v"].to_numpy_ndarray().tolist()


def test_unknown_compressions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compression.*'rar'"):
        ParquetSink(tmp_path / "a.parquet", compression="rar")
    with pytest.raises(ConfigError, match=r"compression.*'gzip'"):
        ArrowSink(tmp_path / "a.arrow", compression="gzip")


def test_small_batches_of_many_columns_are_kept_together_and_charged_for_their_columns(tmp_path: Path) -> None:
    batch = pa.record_batch({f"c{number}": [number] for number in range(300)})
    sink = ParquetSink(tmp_path / "wide.parquet")
    most = 0
    for _ in range(100):
        sink.consume(batch)
        most = max(most, sink.memory_usage())
    sink.flush()
    assert 100 * batch.nbytes < most < 100 * batch.nbytes + 12 * 300 * 640
    assert pq.read_table(tmp_path / "wide.parquet") == pa.Table.from_batches([batch] * 100)


def test_a_row_longer_than_a_row_group_stands_alone_in_one_without_statistics(tmp_path: Path) -> None:
    small, long = (
        pa.record_batch({"id": [1, 2], "text": ["a", "b"]}),
        pa.record_batch({"id": [3], "text": ["x" * (3 << 20)]}),
    )
    sink = ParquetSink(tmp_path / "long.parquet", row_group_bytes="64 KiB")
    for batch in (small, long, small):
        sink.consume(batch)
    sink.flush()
    with pq.ParquetFile(tmp_path / "long.parquet") as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        assert [group.num_rows for group in groups] == [2, 1, 2]
        assert [group.column(1).statistics is None for group in groups] == [False, True, False]
        assert groups[1].column(0).statistics.min == 3
        assert file.read() == pa.Table.from_batches([small, long, small])
