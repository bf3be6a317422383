"""Cases of the contract tests: every source and every sink, over real files."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyiceberg.catalog import load_catalog

from foreign_tokens import FILES, write_megatron, written_row
from penstock.connections.sql import Database
from penstock.errors import ConfigError, StoppedError
from penstock.pipeline import Sink, Source
from penstock.sinks import (
    ArrowSink,
    CsvSink,
    DeltaSink,
    IteratorSink,
    JsonlSink,
    KafkaSink,
    MemorySink,
    NatsSink,
    ParquetSink,
    RedisStreamSink,
    SqlSink,
    StoreSink,
)
from penstock.sources import (
    ArrowSource,
    AsyncIteratorSource,
    CsvSource,
    DeltaSource,
    IcebergSource,
    IteratorSource,
    JsonlSource,
    JsonSource,
    KafkaSource,
    MdsSource,
    MemorySource,
    NatsSource,
    ParquetSource,
    RedisStreamSource,
    SqlSource,
    StoreSource,
    TextSource,
    TokenFileSource,
    WebDatasetSource,
    open_source,
)
from penstock.store import Manifest, StoreWriter

Row = dict[str, Any]


# -- sources ---------------------------------------------------------------------------------------------------------

COUNT = 40
FLAT = [{"id": i, "text": f'row {i}: "é", {"x" * (i % 50)}', "score": i / 4 if i % 7 else None} for i in range(COUNT)]
NESTED = [{**row, "turns": [{"role": "user", "n": row["id"]}] * (row["id"] % 3)} for row in FLAT]
HALF = COUNT // 2


@dataclass(frozen=True)
class SourceCase:
    """How to make a source, the rows it must give, and where each of them stands."""

    make: Callable[[], Source]
    rows: list[Row]
    places: list[tuple[str, int]]
    bad: Callable[[], tuple[Source, str, int]] | None = None


def places_in(first: Path, second: Path, count: int = HALF) -> list[tuple[str, int]]:
    return [(str(first), i) for i in range(count)] + [(str(second), i) for i in range(count)]


def jsonl(home: Path) -> SourceCase:
    first, second = home / "1.jsonl", home / "2.jsonl"
    # A blank line behind every tenth row, a byte order mark, Windows line ends, no newline at the end.
    lines = ["\n" if i % 10 == 9 else "" for i in range(HALF)]
    first.write_text("\ufeff" + "".join(json.dumps(row) + "\n" + gap for row, gap in zip(NESTED[:HALF], lines)))
    second.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in NESTED[HALF:]).encode())
    places = [(str(first), i + i // 10) for i in range(HALF)] + [(str(second), i) for i in range(HALF)]

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in FLAT) + '{"id": 1\n' + json.dumps(FLAT[0]))
        return JsonlSource(path), str(path), COUNT

    return SourceCase(lambda: JsonlSource([first, second]), NESTED, places, bad)


def jsonl_gzip(home: Path) -> SourceCase:
    first, second = home / "1.jsonl.gz", home / "2.jsonl.gz"
    for path, rows in ((first, NESTED[:HALF]), (second, NESTED[HALF:])):
        path.write_bytes(b"".join(gzip.compress(json.dumps(row).encode() + b"\n") for row in rows))

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.jsonl.gz"
        whole = gzip.compress(b"".join(json.dumps({"n": os.urandom(30).hex()}).encode() + b"\n" for _ in range(4000)))
        path.write_bytes(whole[: len(whole) // 2])
        kept = gzip_rows(path)
        return JsonlSource(path), str(path), kept

    return SourceCase(lambda: JsonlSource(str(home / "?.jsonl.gz")), NESTED, places_in(first, second), bad)


def gzip_rows(path: Path) -> int:
    """How many whole lines can be had from a gzip file that is cut short."""
    return zlib.decompressobj(31).decompress(path.read_bytes()).count(b"\n")


def jsonl_mixed(home: Path) -> SourceCase:
    path = home / "mixed.jsonl"
    path.write_text("".join(json.dumps({"id": i, "v": [i, str(i), [i]][i % 3]}) + "\n" for i in range(COUNT)))
    rows = [{"id": i, "v": json.dumps([i, str(i), [i]][i % 3])} for i in range(COUNT)]
    return SourceCase(lambda: JsonlSource(path, mixed="json"), rows, [(str(path), i) for i in range(COUNT)])


def json_array(home: Path) -> SourceCase:
    first, second = home / "1.json", home / "2.json"
    first.write_text(json.dumps(NESTED[:HALF], indent=2))
    second.write_text(" ".join(json.dumps(row) for row in NESTED[HALF:]))

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.json"
        path.write_text(json.dumps(FLAT)[:-30])
        return JsonSource(path), str(path), COUNT - 1

    return SourceCase(lambda: JsonSource([first, second]), NESTED, places_in(first, second), bad)


def csv_text(rows: list[Row], **options: Any) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def csv_files(home: Path) -> SourceCase:
    first, second = home / "1.csv", home / "2.tsv"
    first.write_bytes(csv_text(FLAT[:HALF]).encode())
    swapped = [{"score": row["score"], "text": row["text"], "id": row["id"]} for row in FLAT[HALF:]]
    second.write_text(csv_text(swapped, delimiter="\t", lineterminator="\n"))

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.csv"
        path.write_text(csv_text(FLAT) + "1,2,3,4,5\n" + "1,2,3\n")
        return CsvSource(path), str(path), COUNT

    return SourceCase(lambda: CsvSource([first, second]), FLAT, places_in(first, second), bad)


def parquet(home: Path) -> SourceCase:
    first, second = home / "1.parquet", home / "2.parquet"
    pq.write_table(pa.Table.from_pylist(NESTED[:HALF]), first, row_group_size=6)
    pq.write_table(pa.Table.from_pylist(NESTED[HALF:]), second)

    def bad() -> tuple[Source, str, int]:
        directory = home / "bad"
        directory.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(FLAT), directory / "1.parquet")
        (directory / "2.parquet").write_bytes(first.read_bytes()[:200])
        return ParquetSource(directory), str(directory / "2.parquet"), 0

    return SourceCase(lambda: ParquetSource([first, second]), NESTED, places_in(first, second), bad)


def ipc(rows: list[Row], *, stream: bool, per_batch: int = 6) -> bytes:
    out, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=per_batch):
            writer.write_batch(batch)
    return out.getvalue()


def arrow(home: Path) -> SourceCase:
    first, second = home / "1.arrow", home / "2.arrows.gz"
    first.write_bytes(ipc(NESTED[:HALF], stream=False))
    second.write_bytes(gzip.compress(ipc(NESTED[HALF:], stream=True)))

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.arrows"
        whole = ipc(FLAT, stream=True, per_batch=10)
        path.write_bytes(whole[: len(whole) - 200])
        return ArrowSource(path), str(path), 30

    return SourceCase(lambda: ArrowSource([first, second]), NESTED, places_in(first, second), bad)


def text_lines(home: Path) -> SourceCase:
    first, second = home / "1.txt", home / "2.md"
    lines = [f"line {i} é" if i % 4 else "" for i in range(COUNT)]
    first.write_text("".join(f"{line}\n" for line in lines[:HALF]))
    second.write_bytes("".join(f"{line}\r\n" for line in lines[HALF:]).encode())

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.txt"
        path.write_bytes(b"fine\n" * 7 + b"\xff\n" + b"fine\n")
        return TextSource(path), str(path), 7

    return SourceCase(
        lambda: TextSource([first, second]), [{"text": line} for line in lines], places_in(first, second), bad
    )


def text_files(home: Path) -> SourceCase:
    paths = [home / f"{i}.txt" for i in range(10)]
    for i, path in enumerate(paths):
        path.write_text(f"file {i}\n" * (i + 1))
    rows = [{"text": f"file {i}\n" * (i + 1)} for i in range(10)]
    return SourceCase(lambda: TextSource(paths, per="file"), rows, [(str(path), 0) for path in paths])


def in_memory(data: Any, rows: list[Row]) -> SourceCase:
    return SourceCase(lambda: MemorySource(data), rows, [("<memory>", i) for i in range(len(rows))])


def memory_rows(home: Path) -> SourceCase:
    return in_memory(NESTED, NESTED)


def memory_table(home: Path) -> SourceCase:
    parts = [pa.Table.from_pylist(NESTED[i : i + 9]) for i in range(0, COUNT, 9)]
    return in_memory(pa.concat_tables(parts), NESTED)


def memory_frame(home: Path) -> SourceCase:
    return in_memory(pd.DataFrame({"id": range(COUNT)}), [{"id": i} for i in range(COUNT)])


def memory_arrays(home: Path) -> SourceCase:
    data = {"a": np.arange(COUNT), "v": np.arange(2 * COUNT, dtype=np.float32).reshape(COUNT, 2)}
    return in_memory(data, [{"a": i, "v": [2.0 * i, 2.0 * i + 1]} for i in range(COUNT)])


def iterator_rows(home: Path) -> SourceCase:
    def bad() -> tuple[Source, str, int]:
        return IteratorSource([{"a": i} for i in range(300)] + [{"a": "x"}]), "<iterator>", 300

    return SourceCase(lambda: IteratorSource(NESTED), NESTED, [("<iterator>", i) for i in range(COUNT)], bad)


def iterator_batches(home: Path) -> SourceCase:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from pa.Table.from_pylist(NESTED).to_batches(max_chunksize=7)

    return SourceCase(lambda: IteratorSource(batches), NESTED, [("<iterator>", i) for i in range(COUNT)])


def async_rows(home: Path) -> SourceCase:
    def source(rows: list[Row]) -> Source:
        async def awaited() -> AsyncIterator[Row]:
            for row in rows:
                await asyncio.sleep(0)
                yield row

        return AsyncIteratorSource(awaited)

    def bad() -> tuple[Source, str, int]:
        return source([{"a": i} for i in range(300)] + [{"a": "x"}]), "<iterator>", 300

    return SourceCase(lambda: source(NESTED), NESTED, [("<iterator>", i) for i in range(COUNT)], bad)


def async_batches(home: Path) -> SourceCase:
    async def batches() -> AsyncIterator[pa.RecordBatch]:
        for batch in pa.Table.from_pylist(NESTED).to_batches(max_chunksize=7):
            yield batch

    return SourceCase(lambda: AsyncIteratorSource(batches), NESTED, [("<iterator>", i) for i in range(COUNT)])


def write_store(path: Path, rows: list[Row]) -> Manifest:
    with StoreWriter(path, tokens=None, shard_bytes=700) as writer:
        for row in rows:
            writer.write(pa.RecordBatch.from_pylist([row], schema=pa.Table.from_pylist(rows).schema))
        return writer.publish()


def store(home: Path) -> SourceCase:
    manifest = write_store(home / "a.store", NESTED)
    places = [(str(home / "a.store" / s.file), i) for s in manifest.shards for i in range(s.rows)]

    def bad() -> tuple[Source, str, int]:
        there = write_store(home / "bad.store", FLAT)
        file = home / "bad.store" / there.shards[-1].file
        file.write_bytes(file.read_bytes()[:-7])
        return StoreSource(home / "bad.store"), str(file), 0

    return SourceCase(lambda: StoreSource(home / "a.store"), NESTED, places, bad)


def mds(home: Path) -> SourceCase:
    folder, rows = FILES / "mds/tokens", [{"tokens": written_row(row), "uid": row} for row in range(20)]
    places = [(str(folder / "shard.00000.mds"), row) for row in range(12)]
    places += [(str(folder / "shard.00001.mds"), row) for row in range(8)]

    def bad() -> tuple[Source, str, int]:
        shutil.copytree(folder, home / "bad")
        path = home / "bad/shard.00001.mds"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return MdsSource(home / "bad"), str(path), 0

    return SourceCase(lambda: MdsSource(folder), rows, places, bad)


def webdataset(home: Path) -> SourceCase:
    first, second = (FILES / f"webdataset/tokens-00000{number}.tar" for number in range(2))
    rows = [{"__key__": f"row{n:04d}", "json": f'{{"row": {n}}}', "tokens.npy": written_row(n)} for n in range(10)]

    def bad() -> tuple[Source, str, int]:
        path = home / "bad.tar"
        path.write_bytes(second.read_bytes()[: 3 * 4096])  # the third sample is whole, but nothing says so
        return WebDatasetSource([first, path]), str(path), 2

    return SourceCase(lambda: WebDatasetSource([first, second]), rows, places_in(first, second, 5), bad)


def token_file(home: Path) -> SourceCase:
    path, rows = FILES / "megatron/docs", [{"input_ids": written_row(row)} for row in range(20)]
    places = [(str(path.with_suffix(".bin")), row) for row in range(20)]

    def bad() -> tuple[Source, str, int]:
        write_megatron(home / "bad", [[-4, 1], [3]], "int32")
        return TokenFileSource(home / "bad"), str(home / "bad.bin"), 0

    return SourceCase(lambda: TokenFileSource(path), rows, places, bad)


def database_rows(url: str, **options: Any) -> SourceCase:
    """Rows in a table of its own, in another order than that of the key; few, since each source logs in."""
    rows, table = FLAT[:12], f"rows_{secrets.token_hex(6)}"
    with Database(url).connect() as connection:
        connection.ingest([table], pa.Table.from_pylist([*reversed(rows)]), create=True)
    there = SqlSource(url, table=table, key="id")

    return SourceCase(
        lambda: SqlSource(url, table=table, key="id", **options), rows, [(there.name, i) for i in range(len(rows))]
    )


def delta(home: Path) -> SourceCase:
    write_deltalake(home / "t", pa.Table.from_pylist(NESTED[:HALF]))
    write_deltalake(home / "t", pa.Table.from_pylist(NESTED[HALF:]), mode="append")
    first, second = DeltaSource(home / "t").files

    def bad() -> tuple[Source, str, int]:
        write_deltalake(home / "bad", pa.Table.from_pylist(FLAT))
        source = DeltaSource(home / "bad")
        source.files[0].write_bytes(source.files[0].read_bytes()[:-9])
        return source, str(source.files[0]), 0

    rows = [*pq.read_table(first).to_pylist(), *pq.read_table(second).to_pylist()]  # of one millisecond: by name
    return SourceCase(lambda: DeltaSource(home / "t"), rows, places_in(first, second), bad)


def delta_filtered(home: Path) -> SourceCase:
    write_deltalake(home / "t", pa.Table.from_pylist(NESTED))
    (file,) = DeltaSource(home / "t").files
    kept = [i for i, row in enumerate(NESTED) if i % 7]
    return SourceCase(
        lambda: DeltaSource(home / "t", filter=[("score", ">=", 0)]),
        [NESTED[i] for i in kept],
        [(str(file), i) for i in kept],
    )


def iceberg(home: Path) -> SourceCase:
    table = pa.Table.from_pylist(NESTED)
    catalog = load_catalog("test", type="sql", uri=f"sqlite:///{home}/catalog.db", warehouse=f"file://{home}")
    catalog.create_namespace("ns")
    made = catalog.create_table("ns.t", schema=table.schema)
    made.append(table)
    catalog.engine.dispose()
    (file,) = IcebergSource(home / "ns" / "t").files
    return SourceCase(lambda: IcebergSource(home / "ns" / "t"), NESTED, [(str(file), i) for i in range(COUNT)])


SOURCES: dict[str, Callable[[Path], SourceCase]] = {
    "JSON lines": jsonl,
    "JSON lines, gzip": jsonl_gzip,
    "JSON lines, mixed types": jsonl_mixed,
    "JSON": json_array,
    "CSV": csv_files,
    "Parquet": parquet,
    "Arrow": arrow,
    "text, by line": text_lines,
    "text, by file": text_files,
    "memory, rows": memory_rows,
    "memory, table": memory_table,
    "memory, DataFrame": memory_frame,
    "memory, arrays": memory_arrays,
    "iterator, rows": iterator_rows,
    "iterator, batches": iterator_batches,
    "async iterator, rows": async_rows,
    "async iterator, batches": async_batches,
    "store": store,
    "MDS": mds,
    "WebDataset": webdataset,
    "Megatron": token_file,
    "SQLite": lambda home: database_rows(f"sqlite:///{home}/a.db"),
    "DuckDB": lambda home: database_rows(f"duckdb:///{home}/a.db"),
    "Delta table": delta,
    "Delta table, filtered": delta_filtered,
    "Iceberg table": iceberg,
}
SERVED_SOURCES: dict[str, Callable[[Any], SourceCase]] = {
    "PostgreSQL": lambda server: database_rows(server.url, batch_bytes=1000),
    "PostgreSQL, ranges at once": lambda server: database_rows(server.url, batch_bytes=1000, connections=2),
}

WITH_BAD_INPUT = [
    "JSON lines",
    "JSON lines, gzip",
    "JSON",
    "CSV",
    "Parquet",
    "Arrow",
    "text, by line",
    "iterator, rows",
    "async iterator, rows",
    "store",
    "MDS",
    "WebDataset",
    "Megatron",
    "Delta table",
]


@pytest.fixture(params=[*SOURCES, *SERVED_SOURCES])
def source_case(request: pytest.FixtureRequest, tmp_path: Path) -> SourceCase:
    if request.param in SERVED_SOURCES:
        return SERVED_SOURCES[request.param](request.getfixturevalue("postgres"))
    home = tmp_path / "in"
    home.mkdir()
    return SOURCES[request.param](home)


@pytest.fixture(params=WITH_BAD_INPUT)
def bad_source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], tuple[Source, str, int]]:
    """Makes a source whose data is bad somewhere: the source, the file, the row."""
    bad = SOURCES[request.param](tmp_path).bad
    assert bad is not None
    return bad


@pytest.fixture
def source_kinds() -> set[type]:
    """The class of each source that the cases cover."""
    files = {JsonlSource, JsonSource, CsvSource, ParquetSource, ArrowSource, TextSource, StoreSource}
    archives = {MdsSource, WebDatasetSource, TokenFileSource}
    messages = {NatsSource, RedisStreamSource, KafkaSource}  # with their servers in test_log_sources.py
    elsewhere = {SqlSource, DeltaSource, IcebergSource}
    return files | archives | messages | elsewhere | {MemorySource, IteratorSource, AsyncIteratorSource}


# -- sinks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SinkCase:
    """How to make a sink in a directory, and how to see what it has published."""

    make: Callable[[Path], Sink]
    see: Callable[[Sink], list[Row]]
    durable: bool = True


def see_file(sink: Any) -> list[Row]:
    if not sink.path.exists():
        return []
    names = [part.name for part in sink.path.iterdir()] if sink.path.is_dir() else [sink.path.name]
    is_text = any(kind in name for name in names for kind in (".jsonl", ".csv", ".tsv"))
    source = open_source(sink.path, **({"allow_empty": True} if is_text else {}))
    rows: list[Row] = []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.to_pylist()
    return rows


def see_store(sink: Any) -> list[Row]:
    if not sink.path.exists():
        return []
    source, rows = StoreSource(sink.path), []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.to_pylist()
    return rows


def see_table(sink: Any) -> list[Row]:
    if not sink.path.exists():
        return []
    source, rows = DeltaSource(sink.path), []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.to_pylist()
    return rows


class Collecting(IteratorSink):
    """An iterator sink with its consumer, which a pipeline would otherwise wait for."""

    def __init__(self) -> None:
        super().__init__(max_batches=2)
        self.seen: list[Row] = []
        self._consumer: threading.Thread | None = None

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._consumer is None:
            self._consumer = threading.Thread(target=self._collect, daemon=True)
            self._consumer.start()
        super().consume(batch)

    def _collect(self) -> None:
        with contextlib.suppress(StoppedError):  # the pipeline's own error is what the tests look at
            for batch in self:
                self.seen += batch.to_pylist()

    def rows(self) -> list[Row]:
        if self._consumer is not None:
            self._consumer.join(10)
        return self.seen


def file_case(name: str, kind: Any, **options: Any) -> SinkCase:
    return SinkCase(lambda directory: kind(directory / name, **options), see_file)


SINKS = {
    "JSON lines": file_case("out.jsonl", JsonlSink),
    "JSON lines, gzip": file_case("out.jsonl.gz", JsonlSink),
    "JSON lines, zstd": file_case("out.jsonl.zst", JsonlSink),
    "CSV": file_case("out.csv", CsvSink),
    "CSV, bzip2": file_case("out.csv.bz2", CsvSink),
    "TSV, lz4": file_case("out.tsv.lz4", CsvSink),
    "JSON lines, xz": file_case("out.jsonl.xz", JsonlSink),
    "Parquet": file_case("out.parquet", ParquetSink),
    "Parquet, small row groups": file_case("out.parquet", ParquetSink, row_group_bytes=500, compression="snappy"),
    "Parquet directory": file_case("out", ParquetSink, rows_per_file=7),
    "Arrow": file_case("out.arrow", ArrowSink),
    "Arrow, lz4": file_case("out.arrow", ArrowSink, compression="lz4"),
    "Arrow directory": file_case("out", ArrowSink),
    "JSON lines directory": file_case("out", JsonlSink, rows_per_file=11),
    "CSV directory": file_case("out", CsvSink, rows_per_file=11),
    "store": SinkCase(lambda directory: StoreSink(directory / "out.store", tokens=None, shard_bytes=300), see_store),
    "Delta table": SinkCase(lambda directory: DeltaSink(directory / "t"), see_table),
    "Delta table, small files": SinkCase(lambda directory: DeltaSink(directory / "t", file_bytes=1), see_table),
    "memory": SinkCase(lambda directory: MemorySink(), lambda sink: sink.rows(), durable=False),  # type: ignore[attr-defined]
    "iterator": SinkCase(lambda directory: Collecting(), lambda sink: sink.rows(), durable=False),  # type: ignore[attr-defined]
}


def table_case(url: str, **options: Any) -> SinkCase:
    """A table for each directory."""

    def name(directory: Path) -> str:
        return "t" + hashlib.blake2b(str(directory).encode(), digest_size=8).hexdigest()

    def see(sink: Any) -> list[Row]:
        source = SqlSource(url, table=sink._table, key="n")
        try:
            return [
                {**row, "even": bool(row["even"])} if "even" in row else row
                for batch in iter(lambda: source.next_batch(1000), None)
                for row in batch.to_pylist()
            ]
        except ConfigError:  # no such table
            return []
        finally:
            source.close()

    return SinkCase(lambda directory: SqlSink(url, name(directory), **options), see)


SERVED_SINKS: dict[str, Callable[[Any], SinkCase]] = {
    "PostgreSQL": lambda server: table_case(server.url),
    "PostgreSQL, replace": lambda server: table_case(server.url, mode="replace", batch_bytes=100),
}
FILE_SINKS: dict[str, Callable[[Path], SinkCase]] = {
    "SQLite, upsert": lambda home: table_case(f"sqlite:///{home}/out.db", mode="upsert", key="n"),
    "DuckDB": lambda home: table_case(f"duckdb:///{home}/out.db", batch_bytes=100),
}


@pytest.fixture(params=[*SINKS, *SERVED_SINKS, *FILE_SINKS])
def sink_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SinkCase:
    if request.param in SERVED_SINKS:
        return SERVED_SINKS[request.param](request.getfixturevalue("postgres"))
    if request.param in FILE_SINKS:
        return FILE_SINKS[request.param](tmp_path_factory.mktemp("databases"))
    return SINKS[request.param]


@pytest.fixture
def sink_kinds() -> set[type]:
    """The class of each sink that the cases cover."""
    messages = {NatsSink, RedisStreamSink, KafkaSink}  # with their servers in test_log_sinks.py
    files = {JsonlSink, CsvSink, ParquetSink, ArrowSink, StoreSink, DeltaSink}
    return files | messages | {MemorySink, IteratorSink, SqlSink}
