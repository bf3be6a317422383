"""Random pipelines for both engines: inputs, steps and sinks, each by name and a random generator."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.corpus.decontamination import Decontaminate
from penstock.pipeline.stages import Transform
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, ParquetSink, StoreSink
from penstock.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    SqlSource,
    StoreSource,
    TextSource,
)
from penstock.store import StoreWriter
from penstock.transforms import ByteTokenizer, ExactDedup, Filter, FlatMap, Map, MinHashDedup, Tokenize

_WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


class Every(Transform):
    """Keeps every second row of all: its state is the number of rows so far."""

    def __init__(self) -> None:
        self._at = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keep = [(self._at + row) % 2 == 0 for row in range(batch.num_rows)]
        self._at += batch.num_rows
        return batch.filter(pa.array(keep, pa.bool_()))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]

    def reset(self) -> None:
        self._at = 0

    def __repr__(self) -> str:
        return "Every(2)"


class Tail(Transform):
    """Holds the last three rows back until the end; a row whose text begins with `kappa` is bad."""

    def __init__(self) -> None:
        self._held: pa.RecordBatch | None = None

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if "text" in batch.schema.names and any((t or "").startswith("kappa") for t in batch["text"].to_pylist()):
            raise ValueError("kappa")
        rows = batch if self._held is None else pa.concat_batches([self._held, batch])
        at = max(0, rows.num_rows - 3)
        self._held = rows.slice(at)
        return rows.slice(0, at)

    def finish(self) -> pa.RecordBatch | None:
        held, self._held = self._held, None
        return held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = state["held"]

    def reset(self) -> None:
        self._held = None

    def __repr__(self) -> str:
        return "Tail(3)"


def text_of(rng: random.Random, rows: int) -> list[str]:
    """Texts that repeat, exactly and nearly; some of them are empty or long."""
    made: list[str] = []
    for _ in range(rows):
        roll = rng.random()
        if made and roll < 0.2:
            made.append(rng.choice(made))
        elif made and roll < 0.3:
            made.append(rng.choice(made) + " " + rng.choice(_WORDS))
        elif roll < 0.35:
            made.append("")
        else:
            made.append(" ".join(rng.choices(_WORDS, k=rng.choice([1, 3, 8, 20, 200 if roll > 0.98 else 12]))))
    return made


def table_of(rng: random.Random, rows: int) -> pa.Table:
    """Text, a number that may be null, a list, a struct and categories."""
    numbers = [rng.choice([None, rng.randrange(100)]) for _ in range(rows)]
    return pa.table(
        {
            "text": text_of(rng, rows),
            "n": pa.array(numbers, pa.int64()),
            "tags": pa.array([rng.choices(_WORDS, k=rng.randrange(3)) for _ in range(rows)], pa.list_(pa.string())),
            "kind": pa.array([rng.choice(["a", "b", None]) for _ in range(rows)], pa.string()).dictionary_encode(),
        }
    )


# -- inputs: each makes files in a folder, and a function that makes a source of them -------------------------------

Input = Callable[[], Any]


def jsonl(rng: random.Random, folder: Path) -> Input:
    allow_empty = rng.random() < 0.5
    paths = []
    for number in range(rng.choice([1, 1, 2, 7])):
        ending = rng.choice(["\n", "\r\n"])
        lines = []
        for text in text_of(rng, rng.choice([0, 1, 5, 40, 150]) if allow_empty else rng.choice([1, 5, 40, 150])):
            row: dict[str, Any] = {"text": text, "n": rng.choice([None, 1, 2, 99])}
            if rng.random() < 0.3:
                row["more"] = {"a": rng.randrange(3), "b": [rng.random()] * rng.randrange(3)}
            lines.append(json.dumps(row))
            if rng.random() < 0.1:
                lines.append(rng.choice(["", "{bad", "[1]", '{"text": 1}x', "  "]))
        data = ending.join(lines).encode() + (ending.encode() if rng.random() < 0.5 and lines else b"")
        if rng.random() < 0.2 and data:
            data = b"\xef\xbb\xbf" + data
        if rng.random() < 0.1 and data:
            data += b'\n{"text": "\xff"}\n'
        packed = rng.random() < 0.25 and bool(data)
        path = folder / f"in-{number}.jsonl{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data) if packed else data)
        paths.append(path)
    if all(not path.stat().st_size for path in paths):
        (folder / "in-0.jsonl").write_text('{"text": "one", "n": 1}\n')
    most = rng.choice([None, None, 400])
    options: dict[str, Any] = {} if most is None else {"max_row_bytes": most}
    return lambda: JsonlSource(paths, allow_empty=allow_empty, **options)


def csv(rng: random.Random, folder: Path) -> Input:
    paths = []
    for number in range(rng.choice([1, 3])):
        lines = ["text,n"]
        for text in text_of(rng, rng.choice([0, 1, 60])):
            lines.append(f'"{text}",{rng.randrange(9)}')
            if rng.random() < 0.08:
                lines.append(rng.choice(["", "1,2,3,4", '"two\nlines",4']))
        path = folder / f"in-{number}.csv"
        path.write_text("\n".join(lines) + rng.choice(["", "\n"]))
        paths.append(path)
    return lambda: CsvSource(paths)


def plain_text(rng: random.Random, folder: Path) -> Input:
    path = folder / "in.txt"
    data = "\n".join(text_of(rng, rng.choice([1, 80]))).encode() or b"x"
    path.write_bytes(data + rng.choice([b"", b"\n", b"\n\xff\xfe\n"]))
    return lambda: TextSource(path)


def parquet(rng: random.Random, folder: Path) -> Input:
    hive = rng.random() < 0.4
    for number in range(rng.choice([1, 3])):
        home = folder / (f"day={number}" if hive else "")
        home.mkdir(exist_ok=True)
        pq.write_table(
            table_of(rng, rng.choice([0, 1, 90])), home / f"in-{number}.parquet", row_group_size=rng.choice([7, 50])
        )
    if rng.random() < 0.2:
        (folder / "in-9.parquet").write_bytes(b"")
        return lambda: ParquetSource(sorted(folder.rglob("*.parquet")), allow_empty=True)
    if rng.random() < 0.2:
        damage(folder / "in-0.parquet" if not hive else folder / "day=0" / "in-0.parquet")
    if rng.random() < 0.3:
        return lambda: ParquetSource(folder, columns=["n", "text"])
    return lambda: ParquetSource(folder)


def damage(path: Path) -> None:
    """Other bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    if len(data) > 4000:
        data[len(data) // 3 : len(data) // 3 + 40] = b"\xa5" * 40
        path.write_bytes(data)


def arrow(rng: random.Random, folder: Path) -> Input:
    stream = rng.random() < 0.3
    for number in range(rng.choice([1, 2])):
        table = table_of(rng, rng.choice([1, 120])).combine_chunks()
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(str(folder / f"in-{number}.arrow"), table.schema) as writer:
            for batch in table.to_batches(max_chunksize=11):
                writer.write_batch(batch)
    return lambda: ArrowSource(folder)


def store(rng: random.Random, folder: Path) -> Input:
    path = folder / "in.store"
    table = table_of(rng, rng.choice([1, 200])).combine_chunks()
    with StoreWriter(path, tokens=None, shard_bytes=rng.choice([600, 4000, 100_000])) as writer:
        for batch in table.to_batches():
            writer.write(batch)
        writer.publish()
    columns = rng.choice([None, ["n", "text"]])
    return lambda: StoreSource(path, columns=columns)


def memory(rng: random.Random, folder: Path) -> Input:
    table = pa.concat_tables([table_of(rng, 40), table_of(rng, 3)]).unify_dictionaries()
    rows = [{"text": text, "n": 3} for text in text_of(rng, rng.choice([0, 30]))]
    data = rng.choice([table, table.slice(0, 0), rows or table])
    return lambda: MemorySource(data)


def sql(rng: random.Random, folder: Path) -> Input:
    path = folder / "in.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table t (id integer primary key, text text, n integer)")
        step = rng.choice([1, 7])
        database.executemany(
            "insert into t values (?, ?, ?)",
            [(step * row, text, rng.choice([None, row])) for row, text in enumerate(text_of(rng, rng.choice([0, 90])))],
        )
    database.close()
    return lambda: SqlSource(f"sqlite:///{path}", query="select id, text, n from t", key="id")


INPUTS = [jsonl, csv, plain_text, parquet, arrow, store, memory, sql]

# -- steps ----------------------------------------------------------------------------------------------------------


def longer(row: dict[str, Any]) -> dict[str, Any]:
    """A row with another column; texts that begin with `zeta` are bad."""
    text = row["text"] or ""
    if text.startswith("zeta"):
        raise ValueError(f"zeta at {len(text)}")
    return {**row, "length": len(text)}


def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
    texts = batch["text"]
    if any((text or "").startswith("theta") for text in texts.to_pylist()):
        raise KeyError("theta")
    return batch.set_column(batch.schema.get_field_index("text"), "text", pc.utf8_upper(texts))


def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row] * (len(row["text"] or "") % 3)


STEPS: dict[str, Callable[[], Any]] = {
    "row function": lambda: Map(longer),
    "batch function": lambda: Map(upper, batch=True),
    "expression": lambda: Map({"half": "len(text) / 2"}),
    "filter": lambda: Filter("len(text) > 8"),
    "nothing": lambda: Filter("len(text) > 100000"),
    "flat": lambda: FlatMap(twice),
    "exact": lambda: ExactDedup("text"),
    "near": lambda: MinHashDedup("text", ngram=2, bands=4, rows=2),
    "clean": lambda: Decontaminate({"eval": ["alpha beta gamma", "eta theta"]}, n=2),
    "tokens": lambda: Tokenize(ByteTokenizer(), "text"),
    "every": Every,
    "tail": Tail,
}
KEYED = {"exact", "near"}
ORDERED = {"every", "tail"}

# -- sinks ----------------------------------------------------------------------------------------------------------


def sink_of(rng: random.Random, name: str) -> Callable[[Path], Any]:
    rows = rng.choice([None, 1, 17])
    parts = {} if rows is None else {"rows_per_file": rows}
    suffix = "" if parts else f".{name}"
    if name == "jsonl":
        end = "" if parts else rng.choice(["", ".gz", ".zst"])
        return lambda out: JsonlSink(out / f"made{suffix}{end}", **parts)
    if name == "csv":
        return lambda out: CsvSink(out / f"made{suffix}", **parts)
    if name == "parquet":
        size = rng.choice([2000, 1 << 20])
        return lambda out: ParquetSink(out / f"made{suffix}", row_group_bytes=size, **parts)
    if name == "arrow":
        return lambda out: ArrowSink(out / f"made{suffix}", **parts)
    size, mode = rng.choice([300, 5000, 1 << 20]), rng.choice(["create", "append", "overwrite"])
    return lambda out: StoreSink(out / "made", mode=mode, tokens=None, shard_bytes=size)


SINKS = ["jsonl", "csv", "parquet", "arrow", "store"]
