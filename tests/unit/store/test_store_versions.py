from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock.store.build as build_module
from penstock.errors import ConfigError, DataError
from penstock.files.locks import FileLock
from penstock.store import Lineage, StoreWriter, append, checkout, diff, open_store, prune, versions
from penstock.store.history import lock_of


def rows(first: int, count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {"input_ids": pa.array([[n] * 3 for n in range(first, first + count)], pa.list_(pa.uint8()))}
    )


def shard_files(path: Path) -> int:
    return len(list((path / "shards").iterdir()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three versions: ten rows, ten more, and in the third five others in their place."""
    with StoreWriter(tmp_path / "s", lineage=Lineage(tokenizer="a")) as writer:
        writer.write(rows(0, 10))
        writer.publish()
    append(tmp_path / "s", [rows(10, 10)])
    with StoreWriter(tmp_path / "s", mode="overwrite", lineage=Lineage(tokenizer="b")) as writer:
        writer.write(rows(100, 5))
        writer.publish()
    return tmp_path / "s"


def test_versions_are_listed_with_their_parents(path: Path) -> None:
    assert [(v.version, v.parent, v.rows, v.tokens) for v in versions(path)] == [
        (1, None, 10, 30),
        (2, 1, 20, 60),
        (3, 2, 5, 15),
    ]
    assert open_store(path).manifest.version == 3
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        versions(path.parent)


def test_every_version_can_be_read(path: Path) -> None:
    assert [len(open_store(path, number, verify="full")) for number in (1, 2, 3)] == [10, 20, 5]


def test_a_difference_counts_rows_tokens_and_shards_both_ways(path: Path) -> None:
    grown = diff(path, 1, 2)
    assert (grown.rows_added, grown.rows_removed, grown.tokens_added) == (10, 0, 30)
    assert (len(grown.shards_added), grown.shards_removed) == (1, ())
    other = diff(path, 2)
    assert (other.new, other.rows_added, other.rows_removed, other.tokens_removed) == (3, 5, 20, 60)
    assert other.changed == {"tokenizer": (None, "b")}
    assert diff(path, 1, 3).changed == {"tokenizer": ("a", "b")}
    same = diff(path, 2, 2)
    assert (same.rows_added, same.rows_removed, same.changed) == (0, 0, {})


def test_the_same_rows_twice_count_twice(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s") as writer:
        writer.write(rows(0, 4))
        writer.publish()
    append(tmp_path / "s", [rows(0, 4)])
    assert shard_files(tmp_path / "s") == 2
    assert diff(tmp_path / "s", 1, 2).rows_added == 4
    assert [row["input_ids"][0] for row in open_store(tmp_path / "s")] == [0, 1, 2, 3] * 2


def test_checkout_makes_a_version_current_and_the_next_one_builds_on_it(path: Path) -> None:
    opened = open_store(path)
    assert checkout(path, 1).version == 1
    assert (len(opened), len(open_store(path))) == (5, 10)
    after = append(path, [rows(50, 1)])
    assert (after.version, after.parent, after.rows) == (4, 1, 11)
    with pytest.raises(DataError, match=r"version 9\b"):
        checkout(path, 9)


def test_prune_removes_only_what_no_version_needs(path: Path) -> None:
    assert prune(path).files == 0
    assert shard_files(path) == 6
    stray = path / "shards" / ("0" * 32 + ".arrow")
    stray.write_bytes(b"x" * 100)
    done = prune(path)
    assert (done.versions, done.files, done.bytes) == ((), 1, 100)
    assert not stray.exists()


def test_prune_can_drop_old_versions_but_never_the_current_one(path: Path) -> None:
    checkout(path, 1)
    done = prune(path, keep_versions=1)
    assert (done.versions, done.files) == ((2,), 2)
    assert [v.version for v in versions(path)] == [1, 3]
    assert len(open_store(path, verify="full")) == 10
    assert len(open_store(path, 3, verify="full")) == 5
    with pytest.raises(ConfigError, match="keep_versions"):
        prune(path, keep_versions=0)


def test_prune_leaves_an_unfinished_run_alone(path: Path) -> None:
    writer = StoreWriter(path, mode="append")
    writer.restore({})
    writer.write(rows(0, 3))
    token = writer.checkpoint()
    with pytest.raises(ConfigError, match=r"process \d+"):
        prune(path)
    writer.abort()
    with pytest.raises(ConfigError, match=r"\.build"):
        prune(path)
    writer.restore(token)
    assert writer.publish().rows == 8
    assert prune(path).files == 0


@pytest.mark.parametrize("how", ["truncated", "lost"])
def test_a_damaged_manifest_is_mended_by_checking_out_a_version(path: Path, how: str) -> None:
    file = path / "manifest.json"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
            append(path, [rows(50, 1)])
        with pytest.raises(DataError, match=r"\b1\b.*\b2\b"):
            prune(path)
    else:
        file.unlink()
        with pytest.raises(FileNotFoundError, match=r"\b1\b.*\b2\b"):
            open_store(path)
    assert [manifest.version for manifest in versions(path)] == [1, 2, 3]
    assert checkout(path, 2).rows == 20
    assert len(open_store(path, verify="full")) == 20
    assert append(path, [rows(50, 1)]).version == 4


def killed_after(path: Path, monkeypatch: pytest.MonkeyPatch, step: str, *, durable: bool) -> None:
    """A run that dies when the step is done; what it did until then is on the disk."""

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    writer = StoreWriter(path, mode="append")
    if durable:
        writer.restore({})
    writer.write(rows(200, 3))
    with monkeypatch.context() as patch:
        if step == "published":
            patch.setattr(shutil, "rmtree", die)
        else:
            patch.setattr(build_module, "write_manifest", die)
        with pytest.raises(Killed):
            writer.publish()
    assert writer._lock._handle is not None
    os.close(writer._lock._handle)
    writer._lock._handle = None
    assert (path / ".build").exists()


@pytest.mark.parametrize(("step", "durable"), [("published", False), ("published", True), ("placed", False)])
def test_prune_removes_what_a_killed_run_left_if_nobody_can_finish_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, durable: bool
) -> None:
    killed_after(path, monkeypatch, step, durable=durable)
    done = prune(path)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "shards", "versions"]
    assert len(open_store(path, verify="full")) == (8 if step == "published" else 5)
    assert (done.files >= 2) == (step == "placed"), "its shards, which are in no version"
    assert shard_files(path) == (8 if step == "published" else 6)


def test_prune_keeps_what_a_killed_run_needs_to_be_finished(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(path, monkeypatch, "placed", durable=True)
    with pytest.raises(ConfigError, match=r"\.build"):
        prune(path)


def test_half_written_manifests_of_killed_processes_go_with_the_next_run(path: Path) -> None:
    def left() -> list[str]:
        return [file.name for file in path.rglob(".*.tmp")]

    for use in (lambda: prune(path), lambda: append(path, [rows(0, 1)])):
        for folder in (path, path / "versions"):
            (folder / ".manifest.json.4711-0a1b2c3d.tmp").write_bytes(b"{")
        assert len(left()) == 2
        use()
        assert left() == []
    (path / ".manifest.json.4711-0a1b2c3d.tmp").write_bytes(b"12345")
    done = prune(path)
    assert (done.files, done.bytes) == (1, 5)


def test_versions_are_not_moved_under_a_writer(path: Path) -> None:
    with FileLock(lock_of(path)) as lock:
        assert lock.acquire()
        with pytest.raises(ConfigError, match=r"process \d+"):
            checkout(path, 1)
    assert checkout(path, 1).version == 1
    assert [file.name for file in path.parent.iterdir()] == ["s"]
