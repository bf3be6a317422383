from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory.views import (
    MappedFile,
    batch_nbytes,
    compact,
    object_nbytes,
    owned_nbytes,
    slice_batch,
    split_batch,
)

MIB = 1 << 20
ROWS = 1000
WORDS = pa.array([f"word {i}" for i in range(ROWS)])

COLUMNS: dict[str, pa.Array] = {
    "int": pa.array(range(ROWS)),
    "bool with nulls": pa.array([True, None] * (ROWS // 2)),
    "string": WORDS,
    "large string": WORDS.cast(pa.large_string()),
    "list": pa.array([[i] * (i % 5) for i in range(ROWS)]),
    "list of strings": pa.array([["ab"] * (i % 5) for i in range(ROWS)]),
    "struct": pa.array([{"a": i, "b": str(i)} for i in range(ROWS)]),
    "map": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 2]),
        pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * ROWS, np.float32)), 4),
    ),
    "dictionary": WORDS.dictionary_encode(),
    "struct of dictionaries": pa.StructArray.from_arrays([WORDS.dictionary_encode()], ["d"]),
    "list of dictionaries": pa.FixedSizeListArray.from_arrays(WORDS.dictionary_encode(), 1),
    "map to dictionaries": pa.MapArray.from_arrays(
        pa.array(range(ROWS + 1), pa.int32()), WORDS, WORDS.dictionary_encode()
    ),
    "string view": WORDS.cast(pa.string_view()),
    "null": pa.nulls(ROWS),
}


@pytest.fixture(params=list(COLUMNS.values()), ids=list(COLUMNS))
def batch(request: pytest.FixtureRequest) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([request.param], ["x"])


def addresses(batch: pa.RecordBatch) -> set[int]:
    return {buffer.address for column in batch.columns for buffer in column.buffers() if buffer is not None}


def glue(parts: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(parts).combine_chunks()


def test_a_slice_shares_the_memory_of_its_batch(batch: pa.RecordBatch) -> None:
    part = slice_batch(batch, 10, 20)
    assert part.num_rows == 20
    assert addresses(part) == addresses(batch)
    assert part["x"].to_pylist() == batch["x"].to_pylist()[10:30]


def test_a_slice_beyond_the_end_has_what_is_left() -> None:
    numbers = pa.record_batch({"x": range(10)})
    assert slice_batch(numbers, 8, 5)["x"].to_pylist() == [8, 9]
    assert slice_batch(numbers, 20, 5).num_rows == 0
    for start, rows in ((-1, 5), (0, -1)):
        with pytest.raises(ValueError, match=r"\bstart\b"):
            slice_batch(numbers, start, rows)


def test_a_batch_is_split_by_rows_without_copying(batch: pa.RecordBatch) -> None:
    parts = list(split_batch(batch, max_rows=300))
    assert [part.num_rows for part in parts] == [300, 300, 300, 100]
    assert all(addresses(part) == addresses(batch) for part in parts)
    assert [x for part in parts for x in part["x"].to_pylist()] == batch["x"].to_pylist()


def test_a_batch_is_split_by_bytes_without_copying(batch: pa.RecordBatch) -> None:
    shared = batch_nbytes(batch.slice(0, 0))
    parts = list(split_batch(batch, max_bytes=500))
    assert all(batch_nbytes(part) - shared <= 500 for part in parts)
    assert all(addresses(part) == addresses(batch) for part in parts)
    assert [x for part in parts for x in part["x"].to_pylist()] == batch["x"].to_pylist()
    rows = [part.num_rows for part in parts]
    assert all(batch_nbytes(batch.slice(sum(rows[:i]), rows[i] + 1)) - shared > 500 for i in range(len(rows) - 1)), (
        "each part is as long as it may be"
    )


@given(lengths=st.lists(st.integers(0, 50), max_size=60), max_rows=st.integers(1, 20), max_bytes=st.integers(1, 200))
def test_any_split_gives_all_rows_in_order_within_both_limits(
    lengths: list[int], max_rows: int, max_bytes: int
) -> None:
    batch = pa.record_batch({"x": pa.array(["x" * n for n in lengths], pa.string()), "i": range(len(lengths))})
    parts = list(split_batch(batch, max_rows=max_rows, max_bytes=max_bytes))
    assert glue(parts).equals(glue([batch]))
    assert all(part.num_rows <= max_rows for part in parts)
    assert all(part.num_rows == 1 or batch_nbytes(part) <= max_bytes for part in parts if len(lengths))


def test_a_row_above_the_limit_comes_alone() -> None:
    texts = ["a", "b" * 1000, "c", "d"]
    parts = split_batch(pa.record_batch({"x": texts}), max_bytes=100)
    assert [part["x"].to_pylist() for part in parts] == [["a"], ["b" * 1000], ["c", "d"]]


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_a_batch_within_the_limits_is_given_as_it_is(rows: int) -> None:
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    (part,) = split_batch(batch, max_rows=10, max_bytes=80)
    assert part is batch


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, r"max_rows.*max_bytes"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_bytes": -1}, "max_bytes"),
    ],
)
def test_limits_that_cannot_be_met_are_refused_at_the_call(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(pa.record_batch({"x": [1]}), **limits)


def test_a_slice_weighs_its_own_rows_and_owns_all_of_the_buffers(batch: pa.RecordBatch) -> None:
    part = batch.slice(100, 10)
    shared = batch_nbytes(batch.slice(0, 0))
    assert batch_nbytes(part) - shared <= (batch_nbytes(batch) - shared) / 50
    assert owned_nbytes(part) == owned_nbytes(batch) == batch.get_total_buffer_size()


def test_shared_buffers_are_owned_once() -> None:
    numbers = pa.array(range(ROWS))
    batch = pa.RecordBatch.from_arrays(
        [numbers.slice(0, 500), numbers.slice(10, 500), numbers.slice(500)], ["a", "b", "c"]
    )
    assert batch_nbytes(batch) == 3 * 4000
    assert owned_nbytes(batch) == 8000


def test_memory_that_overlaps_in_separate_buffers_is_owned_once() -> None:
    memory = np.arange(100)
    arrays = [pa.Array.from_buffers(pa.int64(), 50, [None, pa.py_buffer(memory[i : i + 50])]) for i in (0, 25, 50)]
    assert owned_nbytes(pa.RecordBatch.from_arrays(arrays, ["a", "b", "c"])) == 800


def test_a_column_cut_from_a_message_owns_the_message() -> None:
    batch = pa.record_batch({"small": range(10), "large": ["x" * 1000] * 10})
    message = batch.serialize()
    small = pa.ipc.read_record_batch(message, batch.schema).select(["small"])
    assert batch_nbytes(small) == 80
    assert owned_nbytes(small) == message.size
    assert owned_nbytes(compact(small)) == 80


def test_compact_copies_a_small_slice_and_frees_the_rest(batch: pa.RecordBatch) -> None:
    part = batch.slice(100, 10)
    copy = compact(part)
    assert copy.equals(part)
    assert copy.schema == part.schema
    assert owned_nbytes(copy) <= owned_nbytes(part)
    if batch_nbytes(part) < owned_nbytes(part) / 2:
        assert not addresses(copy) & addresses(part)
        assert owned_nbytes(copy) <= 2 * batch_nbytes(part)
    else:
        assert copy is part


def test_compact_leaves_a_batch_that_uses_what_it_owns(batch: pa.RecordBatch) -> None:
    assert compact(batch) is batch
    most = batch.slice(0, 700)
    assert compact(most) is most


def test_compact_frees_what_an_empty_slice_pins_and_keeps_the_metadata() -> None:
    schema = pa.schema([pa.field("x", pa.int64(), metadata={"role": "id"})], metadata={"from": "here"})
    part = pa.RecordBatch.from_arrays([pa.array(range(ROWS))], schema=schema).slice(5, 0)
    copy = compact(part)
    assert owned_nbytes(copy) == 0
    assert copy.schema.equals(schema, check_metadata=True)


def test_compact_gives_up_where_arrow_cannot_shorten() -> None:
    union = pa.UnionArray.from_dense(pa.array([0] * ROWS, pa.int8()), pa.array(range(ROWS), pa.int32()), [WORDS])
    alone = pa.record_batch({"x": compact(pa.record_batch({"x": union}).slice(0, 1))["x"]})
    assert compact(alone) is alone


# Mapped files


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_mapped_file_is_read_without_copying(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    with MappedFile(write(tmp_path / "f", data)) as file:
        assert len(file) == len(data)
        whole, part = file.buffer(), file.buffer(1000, 50)
        assert whole.to_pybytes() == data
        assert part.to_pybytes() == data[1000:1050]
        assert part.address == whole.address + 1000
        assert not part.is_mutable
        assert file.buffer(len(data)).size == 0


@pytest.mark.parametrize(
    "make_view",
    [
        lambda buffer: buffer,
        lambda buffer: buffer.slice(8, 80),
        lambda buffer: np.frombuffer(buffer, np.uint8)[5:],
        lambda buffer: pa.Array.from_buffers(pa.uint8(), 100, [None, buffer]).slice(10),
    ],
    ids=["buffer", "slice", "array", "arrow array"],
)
def test_views_stay_valid_after_closing_and_the_mapping_goes_with_the_last(
    tmp_path: Path, make_view: Callable[[pa.Buffer], Any]
) -> None:
    path = write(tmp_path / "mapped-file", b"\x01" * 10_000)
    with MappedFile(path) as file:
        view = make_view(file.buffer(0, 800))
    file.close()
    assert int(np.asarray(view).view(np.uint8).max()) == 1
    if sys.platform == "linux":
        assert "mapped-file" in Path("/proc/self/maps").read_text()
        del view
        assert "mapped-file" not in Path("/proc/self/maps").read_text()


def test_an_empty_file_is_an_empty_buffer(tmp_path: Path) -> None:
    with MappedFile(write(tmp_path / "empty", b"")) as file:
        assert len(file) == 0
        assert file.buffer().size == 0
        file.drop()


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, 11), (11, None), (5, -1), (8, 3)])
def test_bytes_outside_the_file_are_refused(tmp_path: Path, offset: int, length: int | None) -> None:
    file = MappedFile(write(tmp_path / "f", b"x" * 10))
    for method in (file.buffer, file.drop):
        with pytest.raises(ValueError, match=r"\b10\b"):
            method(offset, length)


def test_a_closed_file_gives_no_more_views(tmp_path: Path) -> None:
    file = MappedFile(write(tmp_path / "f", b"x" * 10))
    file.close()
    file.close()
    assert repr(file).endswith("f', 10 bytes, closed)")
    for method in (file.buffer, file.drop):
        with pytest.raises(ValueError, match=str(tmp_path)):
            method()


def test_files_that_cannot_be_opened_are_the_usual_errors_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        MappedFile(tmp_path / "missing")
    if os.name == "posix":
        with pytest.raises(IsADirectoryError, match=tmp_path.name):
            MappedFile(tmp_path)
    secret = write(tmp_path / "secret", b"x")
    secret.chmod(0)
    if not os.access(secret, os.R_OK):  # root may read everything
        with pytest.raises(PermissionError, match="secret"):
            MappedFile(secret)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take the advice, but promise nothing")
def test_dropped_pages_leave_the_resident_memory_and_can_be_read_again(tmp_path: Path) -> None:
    process = psutil.Process()
    block = np.arange(MIB, dtype=np.uint32).astype(np.uint8)
    path = write(tmp_path / "large", block.tobytes() * 64)
    with MappedFile(path) as file:
        view = np.frombuffer(file.buffer(), np.uint8)
        total = int(view[::512].sum(dtype=np.int64))
        touched = process.memory_info().rss
        file.drop(1000, len(file) - 2000)
        assert touched - process.memory_info().rss > 60 * MIB
        assert int(view[::512].sum(dtype=np.int64)) == total
        assert (view[17 * MIB : 18 * MIB] == block).all()
        assert process.memory_info().rss > touched - 8 * MIB
        file.drop()
        assert touched - process.memory_info().rss > 60 * MIB


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize(("offset", "length"), [(0, None), (0, 1), (1, None)])
def test_dropping_any_range_keeps_the_data(tmp_path: Path, size: int, offset: int, length: int | None) -> None:
    data = os.urandom(size)
    with MappedFile(write(tmp_path / "f", data)) as file:
        view = file.buffer()
        assert view.to_pybytes() == data
        file.drop(offset, length)
        assert view.to_pybytes() == data


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (7, 8),
        ("text", 4),
        (np.zeros((3, 4)), 96),
        (np.zeros((300, 4))[::2], 4800),
        ({"a": [1, 2, 3], "b": UserDict({"c": b"xyz"})}, 27),
        (list(range(1000)), 8000),
        (["word" * 10] * 1000, 40_000),
        ({"a", "b"}, 2),
    ],
)
def test_the_size_of_an_object_counts_everything_in_it(value: Any, nbytes: int) -> None:
    assert nbytes <= object_nbytes(value) <= 8 * nbytes + 1000


def test_the_size_of_a_value_that_contains_itself_is_a_number() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert object_nbytes({"x": endless}) < 1000
