from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from queues import LENGTH, PAIR, ROWS, Numbered, consumer, fill, given, ks, names, numbers, provider, take

from penstock.errors import ConfigError, DataError, SchemaError, StaleQueueError
from penstock.fsqueue import DatasetConsumer, Queue
from penstock.fsqueue.batch_file import BatchColumns, Encoder, KnownFrames, read, write
from penstock.fsqueue.layout import QueueFile
from penstock.fsqueue.queue import schema_of

SHAPES: dict[str, tuple[dict[str, Any], Any]] = {
    "int8": ({"dtype": "int8", "shape": [2, 3]}, lambda rng: rng.integers(-9, 9, (ROWS, 2, 3), dtype=np.int8)),
    "uint16": ({"dtype": "uint16", "shape": [5]}, lambda rng: rng.integers(9, size=(ROWS, 5), dtype=np.uint16)),
    "float16": ({"dtype": "float16", "shape": [5]}, lambda rng: rng.random((ROWS, 5)).astype(np.float16)),
    "float32": ({"dtype": "float32", "shape": [1]}, lambda rng: rng.random((ROWS, 1), np.float32)),
    "float64": ({"dtype": "float64", "shape": [3]}, lambda rng: np.array([[np.nan, -0.0, np.inf]] * ROWS)),
    "bool": ({"dtype": "bool", "shape": [7]}, lambda rng: rng.random((ROWS, 7)) < 0.5),
    "one": ({"dtype": "int64"}, lambda rng: rng.integers(9, size=ROWS)),
    "one_bool": ({"dtype": "bool"}, lambda rng: rng.random(ROWS) < 0.5),
    "empty_shape": ({"dtype": "int32", "shape": []}, lambda rng: rng.integers(9, size=ROWS, dtype=np.int32)),
    "varying": ({"dtype": "int64", "shape": [None]}, lambda rng: rng.integers(9, size=(ROWS, rng.integers(1, 9)))),
    "varying_2d": ({"dtype": "float32", "shape": [None, 2]}, lambda rng: rng.random((ROWS, 3, 2), np.float32)),
}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("what", SHAPES)
def test_arrays_come_out_as_they_went_in(what: str, compression: str | None, tmp_path: Path) -> None:
    entry, draw = SHAPES[what]
    source = given(
        tmp_path / "q",
        lambda k, rng: {"field": draw(rng)},
        [{"name": "field", "role": "input", **entry}],
        compression=compression,
    )
    source.run(max_batches=6)
    with consumer(tmp_path / "q") as reader:
        for k in range(6):
            wanted = source.make_batch("train", k)["field"]
            found = reader.get_batch()["field"]
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert found.tobytes() == wanted.tobytes()
            found[...] = 0  # may be written to


def test_strings_and_ragged_rows_come_out_as_lists(tmp_path: Path) -> None:
    ragged = [np.arange(3), np.arange(5)]
    schema = [{"name": "text", "dtype": "string"}, {"name": "ids", "dtype": "int64", "shape": [None]}]
    given(tmp_path / "q", lambda k, rng: {"text": [f"é{k}", ""], "ids": ragged}, schema).run(max_batches=2)
    with consumer(tmp_path / "q") as reader:
        batch = reader.get_batch()
    assert batch["text"] == ["é0", ""]
    assert [row.tolist() for row in batch["ids"]] == [[0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_arrays_outlive_their_file_and_change_nothing_in_it(compression: str | None, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8, compression=compression)
    with consumer(path, acknowledge="committed") as reader:
        first = [reader.get_batch()[0] for _ in range(4)]
        for x in first:
            x += 100
    with consumer(path) as reader:
        again = [reader.get_batch()[0] for _ in range(5)]
        assert numbers(path) == [1], "the first file is deleted"
    assert [int(x[0, 0]) for x in first] == [100, 101, 102, 103]
    assert [int(x[0, 0]) for x in again] == [0, 1, 2, 3, 4]


def test_compression_makes_files_smaller(tmp_path: Path) -> None:
    def sample(k: int, rng: np.random.Generator) -> dict[str, Any]:
        return {name: np.zeros((ROWS, 1000), np.int64) for name in "xy"}

    schema = [{**entry, "shape": [1000]} for entry in PAIR]
    sizes = []
    for compression in (None, "zstd"):
        path = tmp_path / str(compression)
        given(path, sample, schema, block_size=1000, compression=compression).run(max_batches=4)
        sizes.append((path / "train" / names(path)[0]).stat().st_size)
    assert sizes[1] < sizes[0] / 10
    with pytest.raises(ConfigError, match="compression"):
        Encoder(fingerprint="", split="train", compression="gzip")


def test_any_arrow_reader_opens_a_file(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with pa.ipc.open_file(str(path / "train" / names(path)[0])) as file:
        assert file.num_record_batches == 4
        assert file.get_batch(1).num_rows == ROWS
        assert file.schema.names == ["x", "y"]


def open_one(path: Path, name: str | None = None) -> Any:
    queue = Queue.open(path)
    name = names(path)[0] if name is None else name
    file = QueueFile.parse(name)
    assert file is not None
    return read(path / "train" / name, file, queue, "train")


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed", "longer"])
def test_a_file_that_is_not_whole_is_found_out(damage: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    target = path / "train" / names(path)[0]
    data = bytearray(target.read_bytes())
    if damage == "cut":
        data = data[:-1]
    elif damage == "emptied":
        data = bytearray()
    elif damage == "changed":
        data[len(data) // 2] ^= 1
    else:
        data += b"\0"
    target.write_bytes(data)
    with pytest.raises(DataError, match=str(tmp_path)) as caught:
        open_one(path)
    assert target.name in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
@pytest.mark.parametrize("name", ["the first file", "queue.json"])
def test_a_named_pipe_in_place_of_a_file_is_an_error_and_nobody_waits_for_its_writer(name: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    target = path / "queue.json" if name == "queue.json" else path / "train" / names(path)[0]
    target.unlink()
    os.mkfifo(target)
    with (
        pytest.raises((DataError, OSError), match="no regular file") as caught,
        contextlib.closing(consumer(path)) as broken,
    ):
        take(broken, 1)
    assert str(path) in str(caught.value)


def test_a_file_that_was_renamed_by_hand_is_found_out(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    old, new = names(path)
    for wrong in (new.replace("000001", "000003"), new.replace("-n4", "-n3"), new.replace("-s0", "-s5")):
        (path / "train" / new).rename(path / "train" / wrong)
        with pytest.raises(DataError, match="renamed"):
            open_one(path, wrong)
        (path / "train" / wrong).rename(path / "train" / new)
    open_one(path, old)


@pytest.mark.parametrize("content", [b"half a fi", b"ARROW1\0\0", b"\x80\x04\x95pickle"])
def test_bytes_of_a_foreign_program_under_a_right_name_are_found_out(content: bytes, tmp_path: Path) -> None:
    import xxhash

    path = fill(tmp_path / "q", 4)
    name = QueueFile(7, 4, xxhash.xxh3_64_hexdigest(content)).name
    (path / "train" / name).write_bytes(content)
    with pytest.raises(DataError, match=str(tmp_path)):
        open_one(path, name)


def test_an_arrow_file_of_another_program_is_found_out(tmp_path: Path) -> None:
    import xxhash

    path = fill(tmp_path / "q", 4)
    stream = pa.BufferOutputStream()
    batch = pa.record_batch({"x": [1]})
    with pa.ipc.new_file(stream, batch.schema) as writer:
        writer.write_batch(batch)
    data = stream.getvalue().to_pybytes()
    name = QueueFile(7, 1, xxhash.xxh3_64_hexdigest(data)).name
    (path / "train" / name).write_bytes(data)
    with pytest.raises(DataError, match=str(tmp_path)):
        open_one(path, name)


def test_a_file_made_with_other_metadata_is_refused_with_the_command_that_purges_it(tmp_path: Path) -> None:
    path, other = fill(tmp_path / "q", 4), fill(tmp_path / "other", 12, seed=1)
    for stale in (name for name in names(other) if int(name[:12]) == 2):
        (other / "train" / stale).rename(path / "train" / stale)
        with pytest.raises(StaleQueueError, match=rf"\bother\b.*{path}"):
            open_one(path, stale)
    with consumer(path) as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
        with pytest.raises(StaleQueueError, match=r"prepare\.py"):
            reader.get_batch()
    with consumer(path, on_error="skip") as reader:
        assert ks(reader) == []
        assert reader.counts().skipped == 4


def test_a_full_disk_leaves_nothing_and_gives_the_number_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q"
    source, real, calls = provider(path), os.write, []

    def full(handle: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: len(data) // 2 + 1])  # a disk that takes a part at a time, then nothing

    monkeypatch.setattr("penstock.fsqueue.batch_file.os.write", full)
    with pytest.raises(OSError, match=r"'.*train/000000000000-n4-s0-r0-\w{16}\.arrow'"):
        source.run(max_batches=8)
    assert names(path) == []
    assert sorted(file.name for file in (path / "train" / "lanes").iterdir())[:2] == ["000000000000", "000000000001"]
    assert list((path / "members").iterdir()) == []
    monkeypatch.undo()
    provider(path).run(max_batches=8)
    with consumer(path) as reader:
        assert len(list(reader)) == 8


@pytest.mark.skipif(sys.platform == "win32", reason="there are no limits on the size of files")
def test_a_real_limit_on_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from queues import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = provider(Path(sys.argv[1]))
Queue.create(source.queue_dir, source.description())
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
source.run(max_batches=4)
"""
    path = tmp_path / "q"
    command = [sys.executable, "-c", code, str(path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "File too large: " in done.stderr
    assert "train/000000000000-n4-s0-r0-" in done.stderr.splitlines()[-1]
    assert names(path) == []
    assert all(".by-" not in lane.name for lane in (path / "train" / "lanes").iterdir())


def test_batches_may_share_their_memory(tmp_path: Path) -> None:
    buffer = np.zeros((ROWS, LENGTH), np.int64)

    def sample(k: int, rng: np.random.Generator) -> dict[str, Any]:
        buffer[...] = k
        return {"x": buffer, "y": buffer[::-1]}

    given(tmp_path / "q", sample).run(max_batches=8)
    with DatasetConsumer(tmp_path / "q", backend="numpy") as reader:
        assert [int(x[0, 0]) for x, _ in reader] == list(range(8))


def test_the_bytes_of_a_file_are_the_same_whoever_makes_it(tmp_path: Path) -> None:
    assert names(fill(tmp_path / "a", 12)) == names(fill(tmp_path / "b", 12))
    assert Numbered.settings == {}


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("what", SHAPES)
def test_bytes_of_filled_in_arrays_are_those_that_arrow_writes(what: str, compression: str | None) -> None:
    entry, draw = SHAPES[what]
    columns = BatchColumns(schema_of({"batch_schema": [{"name": "a", **entry}, {"name": "b", **entry}]}))
    encoder = Encoder(fingerprint="f", split="train", compression=compression)
    rng = np.random.default_rng(7)
    for number, count in ((0, 3), (1, 3), (9, 1), (10, 1), (11, 1), (999999999999, 2), (1000000000000, 2), (5, 3)):
        batches = [{"a": draw(rng), "b": draw(rng)} for _ in range(count)]
        again = encoder.encode_arrays(iter(batches), number, count, columns)
        fresh = Encoder(fingerprint="f", split="train", compression=compression)
        wanted = fresh.encode([columns.to_batch(arrays) for arrays in batches], number)
        assert (again.data.to_pybytes(), again.file) == (wanted.data.to_pybytes(), wanted.file)


def test_arrays_that_hold_the_metadata_of_their_file_change_nothing() -> None:
    columns = BatchColumns(schema_of({"batch_schema": [{"name": "x", "dtype": "uint8", "shape": [100]}]}))
    encoder = Encoder(fingerprint="f", split="train")
    for number in (7, 8):
        text = orjson.dumps({"fingerprint": "f", "split": "train", "number": number})
        x = np.frombuffer(text.ljust(100), np.uint8).reshape(1, 100)
        again = encoder.encode_arrays([{"x": x}], number, 1, columns)
        assert again.file == Encoder(fingerprint="f", split="train").encode([columns.to_batch({"x": x})], number).file


def test_a_batch_of_another_number_of_rows_is_not_filled_in() -> None:
    columns = BatchColumns(schema_of({"batch_schema": PAIR}))
    encoder = Encoder(fingerprint="f", split="train")
    whole = {name: np.ones((ROWS, LENGTH), np.int64) for name in "xy"}
    one = {name: array[:1] for name, array in whole.items()}
    with pytest.raises(SchemaError, match="'x' has shape"):
        encoder.encode_arrays([whole, one], 0, 2, columns)


@pytest.mark.parametrize("change", ["number", "split", "fingerprint", "batches"])
def test_a_file_that_only_looks_like_the_one_before_is_found_out(change: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    queue, columns = Queue.open(path), BatchColumns(schema_of({"batch_schema": PAIR}))
    frames, batches = KnownFrames(), [{name: np.zeros((ROWS, LENGTH), np.int64) for name in "xy"}] * 4
    first = QueueFile.parse(names(path)[0])
    assert first is not None
    read(path / "train" / names(path)[0], first, queue, "train", frames).arrays(0, columns)
    split = "eval!" if change == "split" else "train"
    fingerprint = queue.fingerprint[::-1] if change == "fingerprint" else queue.fingerprint
    made = Encoder(fingerprint=fingerprint, split=split).encode(map(columns.to_batch, batches), 5)
    claimed = replace(made.file, number=6 if change == "number" else 5, batches=5 if change == "batches" else 4)
    (path / "train" / claimed.name).write_bytes(made.data)
    with pytest.raises(StaleQueueError if change == "fingerprint" else DataError, match=r"was made with|was renamed"):
        read(path / "train" / claimed.name, claimed, queue, "train", frames)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("what", SHAPES)
def test_a_known_frame_gives_the_arrays_that_arrow_gives(what: str, compression: str | None, tmp_path: Path) -> None:
    entry, draw = SHAPES[what]
    schema = [{"name": "field", "role": "input", **entry}]
    source = given(tmp_path / "q", lambda k, rng: {"field": draw(rng)}, schema, compression=compression)
    source.run(max_batches=14)
    queue, columns, frames = (
        Queue.open(tmp_path / "q"),
        BatchColumns(schema_of({"batch_schema": schema})),
        KnownFrames(),
    )
    for name in names(tmp_path / "q"):
        file, path = QueueFile.parse(name), tmp_path / "q" / "train" / name
        assert file is not None
        known, slow = read(path, file, queue, "train", frames), read(path, file, queue, "train")
        for index in range(file.batches):
            left, right = known.arrays(index, columns)["field"], slow.arrays(index, columns)["field"]
            assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
            assert left.flags.writeable
            assert known.record_batch(index).serialize() == slow.record_batch(index).serialize()


@pytest.mark.parametrize("left", ["nothing", "file", "link"])
def test_a_file_is_written_anew_whatever_a_failed_call_left_under_its_name(left: str, tmp_path: Path) -> None:
    path, other = tmp_path / ".000000000001~p1.tmp", tmp_path / "other"
    other.write_bytes(b"of somebody else")
    if left == "file":
        path.write_bytes(b"x" * 100)
    elif left == "link":
        path.symlink_to(other)
    write(path, pa.py_buffer(b"new"), durable=False, shown=path)
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"
    assert other.read_bytes() == b"of somebody else"
