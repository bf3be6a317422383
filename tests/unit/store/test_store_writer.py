from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.store.build as build_module
import penstock.store.writer as module
from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.sinks import StoreSink
from penstock.store import Lineage, Manifest, StoreWriter, append, open_store
from penstock.types import from_numpy

ROWS = [
    {
        "input_ids": [i * j % 251 for j in range(i * 7 % 23)] if i % 9 else None,
        "loss_mask": [j % 3 == 0 for j in range(i * 7 % 23)] if i % 9 else None,
        "text": f"row {i} " + "é" * (i % 5) if i % 4 else None,
        "n": i if i % 5 else None,
        "turns": [{"role": "user", "words": ["x"] * (i % 4)}] * (i % 3),
    }
    for i in range(120)
]
SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.uint8()),
        "loss_mask": pa.list_(pa.bool_()),
        "text": pa.large_string(),
        "n": pa.int32(),
        "turns": pa.list_(pa.struct({"role": pa.string(), "words": pa.list_(pa.string())})),
    }
)
WHOLE = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)


def cut(batch: pa.RecordBatch, sizes: list[int]) -> Iterator[pa.RecordBatch]:
    """The rows in batches of these sizes, again and again: slices with offsets, as stages hand them on."""
    start, turn = 0, 0
    while start < batch.num_rows:
        yield batch.slice(start, sizes[turn % len(sizes)])
        start += sizes[turn % len(sizes)]
        turn += 1


def write(path: Path, batches: Any, **options: Any) -> Manifest:
    with StoreWriter(path, **options) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.publish()


def contents(path: Path) -> list[Any]:
    return [row for batch in open_store(path, verify="full").batches() for row in batch.to_pylist()]


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "shards").iterdir()}


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_rows_come_back_and_the_manifest_counts_them(tmp_path: Path) -> None:
    manifest = write(tmp_path / "s", cut(WHOLE, [13]), shard_bytes=700)
    assert contents(tmp_path / "s") == ROWS
    assert len(manifest.shards) > 5
    assert manifest.rows == sum(shard.rows for shard in manifest.shards) == 120
    assert manifest.tokens == sum(len(row["input_ids"] or []) for row in ROWS)
    assert manifest.supervised == sum(sum(row["loss_mask"] or []) for row in ROWS)
    assert manifest.bytes == sum(len(data) for data in files(tmp_path / "s").values())
    assert (manifest.version, manifest.parent, manifest.mask_column) == (1, None, "loss_mask")
    assert left_in(tmp_path) == ["s"]
    assert left_in(tmp_path / "s") == ["manifest.json", "shards", "versions"]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    stops=st.sets(st.integers(0, 12), max_size=3),
    piece_bytes=st.integers(1, 1000),
    lost=st.integers(0, 120),
)
def test_shards_are_the_same_for_any_batches_and_any_restarts(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], stops: set[int], piece_bytes: int, lost: int
) -> None:
    home = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_BYTES", piece_bytes)
        write(home / "whole", [WHOLE], shard_bytes=900)
        writer = StoreWriter(home / "cut", shard_bytes=900)
        writer.restore({})
        for number, batch in enumerate(cut(WHOLE, sizes)):
            if number in stops:
                token = json.loads(json.dumps(writer.checkpoint()))
                writer.write(WHOLE.slice(3, lost))  # the process dies before another checkpoint
                writer = StoreWriter(home / "cut", shard_bytes=900)
                writer.restore(token)
            writer.write(batch)
        writer.publish()
    assert files(home / "cut") == files(home / "whole")
    assert contents(home / "cut") == ROWS
    shutil.rmtree(home)


def test_a_crash_between_a_checkpoint_and_its_saving_goes_back_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 200)
    writer = StoreWriter(tmp_path / "s", shard_bytes=900)
    writer.restore({})
    kept: dict[str, Any] = {}
    for start in range(0, 120, 10):
        writer.write(WHOLE.slice(start, 10))
        lost = writer.checkpoint()  # made, but never saved
        writer = StoreWriter(tmp_path / "s", shard_bytes=900)
        writer.restore(kept)
        writer.write(WHOLE.slice(start, 10))
        kept = writer.checkpoint()
        assert kept["checkpoints"] == lost["checkpoints"]
    writer.publish()
    assert contents(tmp_path / "s") == ROWS


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.none() | st.lists(st.integers(0, 255), max_size=40), min_size=1, max_size=60),
    kind=st.sampled_from(["uint8", "uint16", "uint32", "int64", "float32"]),
    large=st.booleans(),
    shard_bytes=st.integers(1, 600),
)
def test_any_rows_of_any_width_come_back_by_number_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], kind: str, large: bool, shard_bytes: int
) -> None:
    home = tmp_path_factory.mktemp("rows")
    values = pa.from_numpy_dtype(kind)
    column = pa.array(rows, pa.large_list(values) if large else pa.list_(values))
    write(home / "s", cut(pa.record_batch({"input_ids": column}), [7, 1]), shard_bytes=shard_bytes)
    store = open_store(home / "s", verify="full")
    assert len(store) == len(rows)
    for number, row in enumerate(rows):
        got = store[number]["input_ids"]
        assert (None if got is None else got.tolist()) == row
        assert got is None or got.dtype == kind
    assert store.lengths.tolist() == [len(row or []) for row in rows]
    assert [row for batch in store.batches() for row in batch["input_ids"].to_pylist()] == rows
    shutil.rmtree(home)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (pa.list_(pa.uint16(), 3), pa.list_(pa.uint8(), 3)),
        (pa.large_list(pa.uint32()), pa.list_(pa.float32())),
        (pa.list_(pa.uint8()), pa.list_(pa.bool_())),
    ],
)
def test_tokens_and_supervised_tokens_are_counted_for_every_kind_of_list(
    tmp_path: Path, ids: pa.DataType, mask: pa.DataType
) -> None:
    batch = pa.record_batch(
        {"t": pa.array([[1, 2, 3], None, [4, 5, 6]], ids), "m": pa.array([[0, 1, 1], None, [0, 0, 1]]).cast(mask)}
    )
    manifest = write(tmp_path / "s", [batch.slice(0, 1), batch.slice(1)], tokens="t", mask="m")
    assert (manifest.tokens, manifest.supervised) == (6, 3)
    store = open_store(tmp_path / "s")
    assert store.lengths.tolist() == [3, 0, 3]
    assert [list(store[2]["t"]), store[1]["t"]] == [[4, 5, 6], None]


def test_a_full_disk_is_an_error_of_the_system_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sink, writer = StoreSink(tmp_path / "s", shard_bytes=700), StoreWriter(tmp_path / "s", shard_bytes=700)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.store.shard_writer._HashedFile.write", full)
        for write_rows, stop in ((sink.consume, sink.abort), (writer.write, writer.abort)):
            with pytest.raises(OSError, match=r"No space left on device: .*/s'"):
                write_rows(WHOLE)
            stop()
    assert left_in(tmp_path) == []


def test_a_row_larger_than_a_shard_is_one_by_itself(tmp_path: Path) -> None:
    column = pa.array([[1], list(range(200)) * 5, [2], [3]], pa.list_(pa.uint8()))
    manifest = write(tmp_path / "s", [pa.record_batch({"input_ids": column})], shard_bytes=100)
    assert [shard.rows for shard in manifest.shards] == [1, 1, 2]


def test_no_rows_make_a_store_without_shards_that_knows_its_columns(tmp_path: Path) -> None:
    write(tmp_path / "s", [WHOLE.slice(0, 0)])
    store = open_store(tmp_path / "s")
    assert (len(store), store.tokens, store.lengths.tolist()) == (0, 0, [])
    assert store.schema.equals(SCHEMA)
    assert store.take([]).schema.equals(SCHEMA)
    with StoreWriter(tmp_path / "t") as writer:
        assert writer.publish().rows == 0


def test_dictionaries_are_stored_as_their_values(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"kind": pa.array(kinds).dictionary_encode()}) for kinds in (["a", "b"], ["c", None, "a"])
    ]
    write(tmp_path / "s", batches, tokens=None)
    assert open_store(tmp_path / "s").schema.field("kind").type == pa.string()
    assert [row["kind"] for row in contents(tmp_path / "s")] == ["a", "b", "c", None, "a"]


def test_tensors_and_their_types_come_back(tmp_path: Path) -> None:
    batch = from_numpy({"v": np.arange(12, dtype=np.float32).reshape(3, 2, 2)})
    write(tmp_path / "s", [batch], tokens=None)
    assert next(open_store(tmp_path / "s").batches()).equals(batch)


def test_what_a_store_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])
    for odd in (union, pa.array(["a", "b"]).cast(pa.string_view())):
        with pytest.raises(SchemaError, match="'odd'"):
            write(tmp_path / "s", [pa.record_batch({"odd": odd})], tokens=None)
    nested = pa.array([["a"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))
    with pytest.raises(SchemaError, match="'odd'"):
        write(tmp_path / "s", [pa.record_batch({"odd": nested})], tokens=None)
    assert left_in(tmp_path) == []


def test_the_columns_of_tokens_and_mask_must_be_there_and_hold_lists(tmp_path: Path) -> None:
    batch = pa.record_batch({"ids": [1, 2]})
    with pytest.raises(SchemaError, match=r"'ids'.*tokens="):
        write(tmp_path / "s", [batch])
    with pytest.raises(SchemaError, match="'ids' is int64"):
        write(tmp_path / "s", [batch], tokens="ids")
    lists = pa.record_batch({"ids": pa.array([[1], [2]])})
    with pytest.raises(SchemaError, match=r"'mask'.*'ids'"):
        write(tmp_path / "s", [lists], tokens="ids", mask="mask")
    assert left_in(tmp_path) == []


def test_another_schema_in_the_middle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"'n'.*\bint64\b"):
        write(tmp_path / "s", [pa.record_batch({"n": [1]}), pa.record_batch({"n": ["1"]})], tokens=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "add"}, r"\bmode\b.*'add'"),
        ({"shard_bytes": 0}, "shard_bytes"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreWriter(tmp_path / "s", **options)


def test_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\bstore\b"):
        StoreWriter("hf://datasets/a/store")


def test_targets_that_are_taken_or_missing_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "s", [WHOLE])
    with pytest.raises(ConfigError, match="mode='append'"):
        write(tmp_path / "s", [WHOLE])
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("mine")
    for mode in ("create", "append", "overwrite"):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            write(tmp_path / "d", [WHOLE], mode=mode)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        write(tmp_path / "no" / "s", [WHOLE])
    assert left_in(tmp_path) == ["d", "s"]
    assert contents(tmp_path / "s") == ROWS


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    write(tmp_path / "s", [WHOLE])
    assert contents(tmp_path / "s") == ROWS


def test_a_second_writer_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as first, StoreWriter(tmp_path / "s", wait_seconds=0.02) as second:
        first.write(WHOLE)
        with pytest.raises(ConfigError, match=str(os.getpid())):
            second.write(WHOLE)
        first.publish()
        with pytest.raises(ConfigError, match="mode='append'"):
            second.write(WHOLE)
    assert contents(tmp_path / "s") == ROWS
    assert left_in(tmp_path) == ["s"]


def test_a_writer_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    first, second = StoreWriter(tmp_path / "s"), StoreWriter(tmp_path / "s")
    first.restore({})
    first.write(WHOLE)
    token = first.checkpoint()
    second.restore(token)
    for action in (lambda: first.write(WHOLE), first.checkpoint, first.publish):
        with pytest.raises(ConfigError, match="StoreWriter"):
            action()
    first.abort()
    second.publish()
    assert contents(tmp_path / "s") == ROWS


def test_abort_leaves_an_older_version_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "s", [WHOLE])
    before = sorted(str(file) for file in tmp_path.rglob("*"))
    with StoreWriter(tmp_path / "s", mode="append") as writer:
        writer.write(WHOLE)
    assert sorted(str(file) for file in tmp_path.rglob("*")) == before


def test_what_a_killed_plain_run_left_behind_is_cleared(tmp_path: Path) -> None:
    for name in (".s.penstock-store/.build", ".s.penstock-store/shards"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".s.penstock-store/.build/shard-000001").write_bytes(b"half")
    (tmp_path / ".s.penstock-lock").write_text("{}")
    write(tmp_path / "s", [WHOLE])
    assert left_in(tmp_path) == ["s"]
    assert contents(tmp_path / "s") == ROWS


# -- modes -----------------------------------------------------------------------------------------------------------


def test_append_adds_a_version_over_shared_shards(tmp_path: Path) -> None:
    first = write(tmp_path / "s", [WHOLE.slice(0, 70)], shard_bytes=900)
    kept = files(tmp_path / "s")
    second = append(tmp_path / "s", cut(WHOLE.slice(70), [4]))
    assert (second.version, second.parent, second.rows) == (2, 1, 120)
    assert second.shards[: len(first.shards)] == first.shards
    assert kept.items() <= files(tmp_path / "s").items()
    assert contents(tmp_path / "s") == ROWS
    assert len(open_store(tmp_path / "s", 1)) == 70


def test_append_to_nothing_creates(tmp_path: Path) -> None:
    assert write(tmp_path / "s", [WHOLE], mode="append").version == 1


def test_append_of_nothing_keeps_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "s", [WHOLE])
    manifest = append(tmp_path / "s", [])
    assert (manifest.version, manifest.rows, manifest.tokens_column) == (2, 120, "input_ids")
    assert contents(tmp_path / "s") == ROWS


def test_overwrite_puts_other_rows_in_a_new_version(tmp_path: Path) -> None:
    write(tmp_path / "s", [WHOLE])
    other = pa.record_batch({"input_ids": pa.array([[7]], pa.list_(pa.uint16()))})
    assert write(tmp_path / "s", [other], mode="overwrite").version == 2
    assert contents(tmp_path / "s") == [{"input_ids": [7]}]
    assert len(open_store(tmp_path / "s", 1)) == 120


@pytest.mark.parametrize(
    ("first", "second"),
    [({}, {"tokens": None}), ({"tokens": None}, {}), ({"tokens": "a", "mask": "b"}, {"tokens": "b", "mask": "a"})],
)
def test_the_same_rows_with_other_tokens_leave_the_older_version_as_it_was(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    ids = pa.array([[1, 2], [3], [0, 5]], pa.list_(pa.uint16()))
    batch = pa.record_batch({"input_ids": ids, "a": ids, "b": pa.array([[1], [1, 0, 1], [0]], pa.list_(pa.uint16()))})
    write(tmp_path / "s", [batch], **first)
    before = None if first.get("tokens", "") is None else open_store(tmp_path / "s").lengths.tolist()
    write(tmp_path / "s", [batch], mode="overwrite", **second)
    for version in (1, 2):
        store = open_store(tmp_path / "s", version, verify="full")
        assert [row["a"].tolist() for row in store] == [[1, 2], [3], [0, 5]]
    if before is not None:
        assert open_store(tmp_path / "s", 1).lengths.tolist() == before
    assert len(list((tmp_path / "s" / "shards").glob("*.arrow"))) == 1


def test_an_empty_store_knows_which_column_its_tokens_will_be_in(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        writer.publish()
    assert open_store(tmp_path / "s").lengths.tolist() == []
    manifest = append(tmp_path / "s", [WHOLE])
    assert (manifest.tokens_column, manifest.mask_column) == ("input_ids", "loss_mask")
    assert manifest.tokens == sum(len(row["input_ids"] or []) for row in ROWS)
    with StoreWriter(tmp_path / "t", tokens="ids", mask="m") as writer:
        writer.publish()
    lists = pa.array([[1], [2, 3]])
    again = append(tmp_path / "t", [pa.record_batch({"ids": lists, "m": lists})])
    assert (again.tokens, again.supervised, again.tokens_column) == (3, 3, "ids")


def test_a_store_can_be_written_from_inside_its_directory_but_not_made_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "s", [WHOLE])
    monkeypatch.chdir(tmp_path / "s")
    assert write(Path(), [WHOLE], mode="append").rows == 240
    assert len(open_store(".")) == 240
    (tmp_path / "s" / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "s" / "inner")
    assert append("..", [WHOLE]).rows == 360
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"\bempty\b"):
        write(Path(), [WHOLE])
    with pytest.raises(ConfigError, match="'/'"):
        StoreWriter("/")
    assert left_in(tmp_path) == ["empty", "s"]


def test_a_writer_stays_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with StoreWriter("s", shard_bytes=700) as writer:
        writer.write(WHOLE)
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write(WHOLE)
        writer.publish()
    assert left_in(tmp_path) == ["elsewhere", "s"]
    assert contents(tmp_path / "s") == ROWS * 2
    assert repr(writer) == "StoreWriter('s')"


def test_a_run_that_cannot_even_begin_leaves_nothing_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with StoreWriter(tmp_path / "s") as writer:
        with monkeypatch.context() as patch:
            patch.setattr(module.Build, "own", full)
            with pytest.raises(OSError, match=r"No space left on device: .*/s'"):
                writer.write(WHOLE)
        assert left_in(tmp_path) == []
    write(tmp_path / "s", [WHOLE])


def masked(kind: pa.DataType, values: list[Any], nulls: list[bool]) -> pa.Array:
    """An array with these values beneath its nulls, as a mask makes it."""
    array = pa.array(values, kind)
    bits = pa.array([not null for null in nulls]).buffers()[1]
    children: list[pa.Array] = []
    if pa.types.is_struct(kind):
        children = [array.field(i) for i in range(kind.num_fields)]
    elif pa.types.is_nested(kind):
        children = [array.values]
    own = array.buffers()[1 : kind.num_buffers]
    return pa.Array.from_buffers(kind, len(array), [bits, *own], children=children)


PAIR = pa.struct({"x": pa.int32(), "y": pa.list_(pa.string())})
KINDS: list[tuple[pa.DataType, Any, Any]] = [
    (pa.list_(pa.uint16()), [1, 2, 3], [9]),
    (pa.large_list(pa.string()), ["a", None, "b"], ["c"]),
    (pa.list_(pa.list_(pa.bool_())), [[True], None], [[False, True]]),
    (pa.list_(pa.int32(), 2), [4, 5], [6, None]),
    (pa.list_(pa.string(), 1), ["long"], ["x"]),
    (pa.string(), "beneath", "x"),
    (pa.large_binary(), b"beneath", b"x"),
    (pa.int64(), 77, 5),
    (pa.float32(), 1.5, 2.5),
    (pa.bool_(), True, True),
    (pa.binary(3), b"abc", b"xyz"),
    (pa.decimal128(10, 2), Decimal("1.25"), Decimal("7.00")),
    (pa.timestamp("us"), 10**15, 5),
    (PAIR, {"x": 3, "y": ["a", None]}, {"x": None, "y": ["b"]}),
    (pa.list_(PAIR), [{"x": 3, "y": ["a", None]}], [{"x": None, "y": ["b"]}, None]),
    (pa.map_(pa.string(), pa.int32()), [("k", 1)], [("l", None)]),
]


@pytest.mark.parametrize(("kind", "hidden", "shown"), KINDS, ids=lambda value: str(value)[:30])
def test_what_lies_beneath_a_null_leaves_no_trace(tmp_path: Path, kind: pa.DataType, hidden: Any, shown: Any) -> None:
    nulls = [True, False, True, False, False, True] * 3
    dirty = masked(kind, [hidden if null else shown for null in nulls], nulls)
    dirty.validate(full=True)
    clean = pa.array([None if null else shown for null in nulls], kind)
    assert dirty.equals(clean)
    for name, column in (("dirty", dirty), ("clean", clean)):
        batch = pa.record_batch({"n": range(18), "c": column})
        write(tmp_path / name, cut(batch, [5, 1, 3]), tokens=None, shard_bytes=60)
        assert [row["c"] for row in contents(tmp_path / name)] == clean.to_pylist()
    assert files(tmp_path / "dirty") == files(tmp_path / "clean")


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (pa.int32(), 5),
        (pa.bool_(), True),
        (pa.string(), "x"),
        (pa.list_(pa.int32()), [1, None]),
        (pa.list_(pa.int32(), 2), [1, 2]),
        (pa.map_(pa.string(), pa.int32()), [("k", 1)]),
        (pa.struct([pa.field("y", pa.int8(), nullable=False)]), {"y": 1}),
    ],
    ids=str,
)
def test_fields_that_have_no_nulls_have_none_beneath_one_either(tmp_path: Path, kind: pa.DataType, shown: Any) -> None:
    """Or others would refuse such columns: Parquet does."""
    rows = [{"x": shown}, None, {"x": shown}]
    lists = [[shown, shown], None]
    for name, outer, values in (
        ("struct", pa.struct([pa.field("x", kind, nullable=False)]), rows),
        ("block", pa.list_(pa.field("item", kind, nullable=False), 2), lists),
    ):
        write(tmp_path / name, [pa.record_batch({"c": pa.array(values, outer)})], tokens=None)
        column = next(open_store(tmp_path / name).batches())["c"]
        column.validate(full=True)
        assert (column.type, column.to_pylist()) == (outer, values)
        child = column.field(0) if name == "struct" else column.values
        assert child.null_count == 0
        assert column.null_count == 1


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.list_(pa.int32(), 1), pa.struct({"x": pa.int32()})], ids=str)
def test_what_lies_beneath_a_null_inside_a_list_or_struct_leaves_no_trace(tmp_path: Path, kind: pa.DataType) -> None:
    inner = masked(pa.int32(), [1, 2, 3, 4], [False, True, False, True])
    plain = pa.array([1, None, 3, None], pa.int32())
    for name, values in (("dirty", inner), ("clean", plain)):
        if pa.types.is_struct(kind):
            column = pa.StructArray.from_arrays([values], ["x"])
        elif pa.types.is_fixed_size_list(kind):
            column = pa.FixedSizeListArray.from_arrays(values, 1)
        else:
            column = pa.ListArray.from_arrays(pa.array([0, 0, 3, 4], pa.int32()), values)
        write(tmp_path / name, [pa.record_batch({"c": column})], tokens=None)
    assert files(tmp_path / "dirty") == files(tmp_path / "clean")


def test_rows_that_do_not_go_with_those_before_are_refused(tmp_path: Path) -> None:
    ids = pa.record_batch({"ids": pa.array([[1]], pa.list_(pa.uint16()))})
    write(tmp_path / "s", [ids], tokens="ids", lineage=Lineage(tokenizer="one"))
    wide = pa.record_batch({"ids": pa.array([[1]], pa.list_(pa.uint32()))})
    with pytest.raises(SchemaError, match=r"'ids'.*\buint16\b"):
        append(tmp_path / "s", [wide])
    with pytest.raises(SchemaError, match=r"tokens.*'ids'"):
        write(tmp_path / "s", [ids], mode="append", tokens=None)
    with pytest.raises(ConfigError, match="tokenizer"):
        append(tmp_path / "s", [ids], lineage=Lineage(tokenizer="two"))
    assert append(tmp_path / "s", [ids], lineage=Lineage(tokenizer="one")).rows == 2


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoint_needs_restore_first(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer, pytest.raises(ConfigError, match=r"checkpoint\(\)"):
        writer.checkpoint()


def test_finished_shards_are_kept_and_not_written_again(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path / "s", shard_bytes=700)
    first.restore({})
    first.write(WHOLE)
    token = first.checkpoint()
    assert token["shards"] > 3
    build = tmp_path / ".s.penstock-store" / ".build"
    finished = {file.name: file.stat().st_ino for file in build.glob("shard-*")}
    second = StoreWriter(tmp_path / "s", shard_bytes=700)
    second.restore(token)
    second.publish()
    placed = {file.stat().st_ino for file in (tmp_path / "s" / "shards").iterdir()}
    assert len(placed & set(finished.values())) >= 2 * token["shards"]


def test_the_token_stays_small_however_many_shards_there_are(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s", shard_bytes=1)
    writer.restore({})
    sizes = []
    for _ in range(3):
        writer.write(WHOLE)
        sizes.append(len(json.dumps(writer.checkpoint())))
    writer.abort()
    assert sizes[-1] - sizes[0] < 20


@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
@pytest.mark.parametrize("point", ["complete", "placed", "version", "manifest", "renamed"])
@pytest.mark.parametrize("resumed", [False, True])
def test_publishing_can_be_repeated_after_a_crash_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, point: str, resumed: bool
) -> None:
    """The process dies just before a step; what it did until then is on the disk. The next one may die, too."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 200)
    path = tmp_path / "s"
    if mode != "create":
        write(path, [WHOLE.slice(0, 20)], shard_bytes=700)
    writer = StoreWriter(path, mode=mode, shard_bytes=700)
    writer.restore({})
    writer.write(WHOLE)
    token = writer.checkpoint() | {"finishing": True}

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    real, calls = build_module.write_manifest, []

    def once(*args: Any, **options: Any) -> None:
        if calls:
            raise Killed
        calls.append(args)
        real(*args, **options)

    with monkeypatch.context() as patch:
        match point:
            case "complete":
                patch.setattr(module.Build, "place", die)
            case "placed":
                patch.setattr(build_module, "write_manifest", die)
            case "version":
                patch.setattr(build_module, "write_manifest", once)
            case "manifest":
                patch.setattr(Path, "rename", die)
                patch.setattr(shutil, "rmtree", die)
            case "renamed":
                patch.setattr(shutil, "rmtree", die)
        with pytest.raises(Killed):
            writer.publish()

    def release_lock(dead: StoreWriter) -> None:
        """Do what the system does with what a dead process held."""
        if dead._lock._handle is not None:
            os.close(dead._lock._handle)
            dead._lock._handle = None

    assert writer._lock._handle is not None
    release_lock(writer)
    if resumed:
        second = StoreWriter(path, mode=mode, shard_bytes=700)
        second.restore(token)
        second.checkpoint()  # and dies before the token is saved
        release_lock(second)
    before = ROWS[:20] if mode == "append" else []
    for _ in range(2):
        again = StoreWriter(path, mode=mode, shard_bytes=700)
        again.restore(token)
        manifest = again.publish()
        assert contents(path) == before + ROWS
        assert manifest.version == (1 if mode == "create" else 2)
    assert left_in(tmp_path) == ["s"]
    assert left_in(path) == ["manifest.json", "shards", "versions"]


def test_a_store_that_another_run_made_is_not_taken_for_our_own(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s")
    writer.restore({})
    writer.write(WHOLE)
    token = writer.checkpoint() | {"finishing": True}
    writer.abort()
    write(tmp_path / "s", [WHOLE.slice(0, 3)])
    with pytest.raises(ConfigError, match="mode='append'"):
        StoreWriter(tmp_path / "s").restore(token)
    with pytest.raises(ResumeError, match=r"version 1\b"):
        StoreWriter(tmp_path / "s", mode="append").restore(token)


@pytest.mark.parametrize("lost", ["journal.jsonl", "shard-000001", "tail-000001"])
def test_a_file_the_checkpoint_counts_on_that_is_gone_is_named(tmp_path: Path, lost: str) -> None:
    writer = StoreWriter(tmp_path / "s", shard_bytes=1500)
    writer.restore({})
    writer.write(WHOLE)
    token = writer.checkpoint()
    writer.abort()
    (tmp_path / ".s.penstock-store" / ".build" / lost).unlink()
    with pytest.raises(ResumeError, match=str(lost)):
        StoreWriter(tmp_path / "s").restore(token)


def test_reset_runs_again_in_place_of_the_first(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s")
    for rows in (WHOLE, WHOLE.slice(5)):
        writer.write(rows)
        writer.publish()
        with pytest.raises(ConfigError, match=str(tmp_path)):
            writer.write(rows)
        assert contents(tmp_path / "s") == rows.to_pylist()
        writer.reset()


def test_what_is_held_is_less_than_a_piece(tmp_path: Path) -> None:
    ids = pa.array([list(range(1000))] * 700, pa.list_(pa.uint16()))
    with StoreWriter(tmp_path / "s") as writer:
        for _ in range(8):
            writer.write(pa.record_batch({"input_ids": ids}))
            assert writer.memory_usage() < 1 << 20
        assert writer.publish().tokens == 5_600_000
    assert writer.memory_usage() == 0


def test_a_checkpoint_does_not_take_the_files_of_another_run_for_its_own(tmp_path: Path) -> None:
    def begun(value: int) -> dict[str, Any]:
        writer = StoreWriter(tmp_path / "a.store")
        writer.restore({})
        writer.write(pa.record_batch({"input_ids": pa.array([[value] * 1000] * 2000, pa.list_(pa.uint16()))}))
        token = writer.checkpoint()
        writer.abort()
        return token

    first, second = begun(1), begun(2)
    with pytest.raises(ResumeError, match=str(tmp_path)):
        StoreWriter(tmp_path / "a.store").restore(first)
    with StoreWriter(tmp_path / "a.store") as writer:  # the lock is free, and the second run can go on
        writer.restore(second)
        writer.publish()
    with open_store(tmp_path / "a.store") as store:
        assert {int(store[i]["input_ids"][0]) for i in (0, 1999)} == {2}


def test_what_a_checkpoint_counts_on_is_refused_if_it_was_damaged_meanwhile(tmp_path: Path) -> None:
    def writer() -> StoreWriter:
        return StoreWriter(tmp_path / "s", shard_bytes=4096)

    def rows(first: int) -> pa.RecordBatch:
        ids = [list(range(number, number + 90)) for number in range(first, first + 80)]
        return pa.RecordBatch.from_pydict({"input_ids": pa.array(ids, pa.list_(pa.uint16()))})

    begun = writer()
    begun.restore({})
    begun.write(rows(0))
    token = json.loads(json.dumps(begun.checkpoint()))
    assert token["shards"]
    assert token["open"]
    assert token["tail"]
    begun.abort()
    build = tmp_path / ".s.penstock-store" / ".build"
    for name in ("journal.jsonl", token["tail"][0], token["open"][0]):
        whole = (build / name).read_bytes()
        damaged = bytearray(whole)
        damaged[len(damaged) // 2] ^= 1
        (build / name).write_bytes(damaged)
        with pytest.raises(ResumeError, match=str(name)):
            writer().restore(token)
        (build / name).write_bytes(whole)
    resumed = writer()
    resumed.restore(token)
    resumed.write(rows(80))
    resumed.publish()
    with open_store(tmp_path / "s", verify="full") as store:
        assert len(store) == 160
