"""Stores in buckets: the bytes of the local ones, resumed after kills, versions over shared shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.buckets import download, names_in, upload

import penstock.files.object_lock as lock_module
import penstock.store.writer as writer_module
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.objects import open_bucket
from penstock.store import StoreWriter, append, open_store
from penstock.store.bucket_build import BucketBuild
from penstock.store.history import checkout, diff, prune, versions
from penstock.store.home import store_home
from penstock.store.manifest import read_manifest
from penstock.store.piece_sums import PieceSums, read_sums

WHOLE = pa.RecordBatch.from_pydict(
    {"input_ids": pa.array([[n] * (n % 7) for n in range(400)], pa.list_(pa.uint16())), "n": pa.array(range(400))}
)
STEPS = [WHOLE.slice(start, 40) for start in range(0, 400, 40)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_PIECE_BYTES", 500)


def write(place: Any, batches: list[pa.RecordBatch] = STEPS, **options: Any) -> Any:
    with StoreWriter(place, shard_bytes=2000, **options) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.publish()


def files_of(folder: Path) -> dict[str, bytes]:
    """Files of a store but for the sums, and the manifests, which hold times."""
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in files.items() if file.suffix not in (".json", ".sums")}


def test_a_store_in_a_bucket_has_the_bytes_of_one_on_disk(s3_url: str, tmp_path: Path) -> None:
    url = f"{s3_url}/x.store"
    made, local = write(url), write(tmp_path / "x.store")
    assert made.shards == local.shards
    assert len(made.shards) > 3
    copy = download(url, tmp_path / "copy")
    assert files_of(copy) == files_of(tmp_path / "x.store")
    assert not [name for name in names_in(s3_url) if "/." in f"/{name}"]
    with open_store(copy, verify="full") as store:
        assert store.take(range(400)).equals(WHOLE)
    for entry in made.shards:
        assert read_sums(store_home(url), entry) == PieceSums.of(copy / entry.file, copy / entry.index_file)
    with pytest.raises(ConfigError, match="holds a store already"):
        write(url)


def test_versions_in_a_bucket_share_shards(s3_url: str, tmp_path: Path) -> None:
    url = f"{s3_url}/x.store"
    upload(tmp_path / "x.store", url) if write(tmp_path / "x.store", STEPS[:5]) else None
    assert append(url, STEPS[5:]).version == 2
    write(url, STEPS[:2], mode="overwrite")
    assert [(manifest.version, manifest.rows) for manifest in versions(url)] == [(1, 200), (2, 400), (3, 80)]
    assert diff(url, 1, 2).rows_added == 200
    assert diff(url, 1, 2).shards_removed == ()
    assert checkout(url, 2).rows == 400
    assert read_manifest(store_home(url)).version == 2
    before = set(names_in(url))
    done = prune(url, keep_versions=1)
    assert done.versions == (1,)
    assert {name for name in before if name.startswith("versions/")} - set(names_in(url)) == {"versions/000001.json"}
    with open_store(download(url, tmp_path / "copy"), verify="full") as store:
        assert store.take(range(400))["n"].to_pylist() == list(range(400))
    checkout(url, 3)
    bucket, key = open_bucket(f"{url}/versions/000002.json")
    bucket.delete(key)
    assert prune(url).files > 5
    assert len([name for name in names_in(url) if name.endswith(".arrow")]) == len(versions(url)[-1].shards)


@contextmanager
def uploads_noted() -> Iterator[list[str]]:
    real, names = BucketBuild._upload, []

    def noted(build: BucketBuild, file: Path, target: str, digest: str) -> None:
        names.append(target)
        real(build, file, target, digest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketBuild, "_upload", noted)
        yield names


@pytest.mark.parametrize("mode", ["create", "append"])
def test_a_killed_run_resumes_in_the_bucket_from_any_checkpoint(s3_url: str, tmp_path: Path, mode: str) -> None:
    """Each process is dropped as kill -9 does: nothing of it runs on, and nothing on its disk is left."""
    whole = tmp_path / "whole"
    write(whole)
    if mode == "append":
        append(whole, STEPS)
    for kill in (0, 1, 4, 9):
        url = f"{s3_url}/{kill}.store"
        if mode == "append":
            write(url)
        options: dict[str, Any] = {"mode": mode, "shard_bytes": 2000}
        token: dict[str, Any] = {}
        first = StoreWriter(url, **options)
        first.restore({})
        for number, step in enumerate(STEPS[: kill + 1]):
            if number == kill:
                token = first.checkpoint() if kill else {}
            first.write(step)
        assert first._in_bucket is not None
        first._in_bucket.close()
        with uploads_noted() as uploads:
            again = StoreWriter(url, **options)
            again.restore(token)
            for step in STEPS[kill:]:
                again.write(step)
            last = again.checkpoint() | {"finishing": True}
            manifest = again.publish()
        kept = {entry.file for entry in manifest.shards[: token.get("shards", 0)]}
        assert not kept & set(uploads), "what was uploaded is not uploaded again"
        assert len(uploads) == len(set(uploads))
        if mode == "create":
            assert files_of(download(url, tmp_path / str(kill))) == files_of(whole)
        assert not [name for name in names_in(url) if name.startswith(".build")]
        late = StoreWriter(url, **options)
        late.restore(last)
        assert late.publish() == manifest


def test_a_half_uploaded_store_is_named_as_one(s3_url: str) -> None:
    url = f"{s3_url}/x.store"
    writer = StoreWriter(url, shard_bytes=2000)
    writer.restore({})
    for step in STEPS:
        writer.write(step)
    with pytest.raises(FileNotFoundError, match="its upload has not ended, or was cut off"):
        read_manifest(store_home(url))
    with pytest.raises(ConfigError, match="is being written by process"):
        write(url)
    writer.abort()
    with pytest.raises(FileNotFoundError, match="its upload has not ended"):
        versions(url)
    write(url)
    assert len(versions(url)) == 1
    with pytest.raises(ConfigError, match=r"no store, such as"):
        upload_foreign(f"{s3_url}/other")


def upload_foreign(url: str) -> None:
    bucket, key = open_bucket(url)
    bucket.write(f"{key}/mine.txt", b"mine")
    write(url)


def test_a_run_that_was_aborted_leaves_nothing_in_the_bucket(s3_url: str) -> None:
    with StoreWriter(f"{s3_url}/x.store", shard_bytes=2000) as writer:
        for step in STEPS:
            writer.write(step)
    assert names_in(s3_url) == []


def test_a_manifest_is_not_replaced_over_another_writer(s3_url: str) -> None:
    """The lock of the first was taken over, which it has not noticed yet."""
    url = f"{s3_url}/x.store"
    write(url)
    stale = StoreWriter(url, mode="append", shard_bytes=2000)
    stale.write(STEPS[0])
    lock = stale._lock
    stale._lock.release()
    append(url, STEPS[1:2])
    assert lock.acquire()
    with pytest.raises(ConfigError, match="written by another writer meanwhile"):
        stale.publish()
    stale.abort()
    assert [manifest.rows for manifest in versions(url)] == [400, 440]


def test_a_checkpoint_whose_objects_are_gone_is_refused(s3_url: str) -> None:
    url = f"{s3_url}/x.store"
    writer = StoreWriter(url, shard_bytes=2000)
    writer.restore({})
    for step in STEPS:
        writer.write(step)
    token = writer.checkpoint()
    writer.abort()
    bucket, prefix = open_bucket(url)
    for folder, match in ((".build/shard", r"\.build/shard"), ("shards", r"shards/")):
        name = next(name for name in names_in(url) if name.startswith(folder))
        bucket.delete(f"{prefix}/{name}")
        with pytest.raises(ResumeError, match=match):
            StoreWriter(url, shard_bytes=2000).restore(token)


@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
def test_a_store_whose_manifest_is_gone_is_not_deleted_by_the_next_writer(s3_url: str, mode: str) -> None:
    url = f"{s3_url}/x.store"
    write(url)
    bucket, prefix = open_bucket(url)
    bucket.delete(f"{prefix}/manifest.json")
    before = names_in(url)
    with pytest.raises(ConfigError, match=r"has versions and no manifest\.json.*checkout\(path, version\)"):
        write(url, mode=mode)
    assert names_in(url) == before
    assert checkout(url, 1).rows == 400
    if mode != "create":
        write(url, mode=mode)


def test_shards_that_are_being_uploaded_are_not_deleted(s3_url: str) -> None:
    bucket, prefix = open_bucket(f"{s3_url}/x.store")
    bucket.write(f"{prefix}/shards/{'0' * 32}.arrow", b"1")
    with pytest.raises(ConfigError, match=r"has shards and no manifest\.json"):
        write(f"{s3_url}/x.store")
    assert len(names_in(s3_url)) == 1
    bucket.delete(f"{prefix}/shards/{'0' * 32}.arrow")
    write(f"{s3_url}/x.store")


def test_a_writer_that_was_cut_off_deletes_nothing_of_its_successor(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_lives_here", lambda token: None)  # the successor is on another machine
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(lock_module, "_registry", {})
    cut_off, successor = (StoreWriter(f"{s3_url}/x.store", shard_bytes=2000, wait_seconds=30) for _ in range(2))
    cut_off.write(STEPS[0])
    cut_off._lock._stop.set()  # type: ignore[union-attr]
    lock_module._registry.clear()
    for step in STEPS:
        successor.write(step)
    cut_off.abort()
    successor.publish()
    assert len(open_store(f"{s3_url}/x.store", cache_dir=tmp_path)) == 400


def test_a_stopped_writer_leaves_the_checkpoint_of_its_successor_alone(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_lives_here", lambda token: None)  # the successor is on another machine
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(lock_module, "_registry", {})
    stopped, successor = (StoreWriter(f"{s3_url}/x.store", shard_bytes=2000) for _ in range(2))
    stopped.restore({})
    stopped.write(STEPS[0])
    token = stopped.checkpoint()
    stopped._lock._stop.set()  # type: ignore[union-attr]
    lock_module._registry.clear()
    successor.restore(token)
    successor.write(STEPS[1])
    token = successor.checkpoint()
    for work in (stopped.checkpoint, stopped.publish):
        with pytest.raises(ConfigError, match="is in use by process"):
            work()
    successor.abort()
    last = StoreWriter(f"{s3_url}/x.store", shard_bytes=2000)
    last.restore(token)
    for step in STEPS[2:]:
        last.write(step)
    assert last.publish().rows == 400


def test_a_damaged_shard_that_was_deleted_is_uploaded_by_the_next_run(s3_url: str, tmp_path: Path) -> None:
    url = f"{s3_url}/x.store"
    entry = write(url).shards[0]
    bucket, prefix = open_bucket(url)
    bucket.write(f"{prefix}/{entry.file}", bytes(entry.bytes))
    with pytest.raises(DataError, match="upload it again, or delete it and prepare the store again"):
        open_store(url, cache_dir=tmp_path)[0]
    bucket.delete(f"{prefix}/{entry.file}")
    write(url, mode="overwrite")
    assert open_store(url, cache_dir=tmp_path)[0]["n"] == 0
