"""A store in a bucket, read as one on disk: what is fetched, what is verified, and what is refused by name."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.bucket_stores import upload_store
from tests.buckets import upload
from tests.servers import SECRET_KEY, Proxy, S3Server, environment_of
from tests.token_stores import make_rows, make_store

from penstock import PretrainDataLoader
from penstock.errors import ChangedFileError, ConfigError, DataError
from penstock.files.objects import ChangedObjectError, open_bucket
from penstock.sources import ArrowSource, open_source
from penstock.store import Store, append, describe, open_store
from penstock.store.bucket_shards import part_cache
from penstock.store.manifest import bucket_stores


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return make_store(tmp_path / "a.store", make_rows(600, 40, seed=3), shard_bytes=4096)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A store of five shards of a megabyte, each of several pieces."""
    rows = np.random.default_rng(1).integers(0, 60_000, (640, 4096)).astype(np.uint16)
    return make_store(tmp_path / "wide.store", rows.tolist(), shard_bytes=1 << 20)


def opened(url: str, tmp_path: Path) -> Store:
    """The store with the cache of another process."""
    part_cache.cache_clear()
    return open_store(url, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("sums", [True, False])
def test_rows_are_those_of_the_store_on_disk(
    local: Path, tmp_path: Path, s3_url: str, sums: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_store(local)
    with caplog.at_level(logging.INFO), opened(upload_store(local, f"{s3_url}/a.store", sums=sums), tmp_path) as store:
        assert np.array_equal(store.lengths, disk.lengths)
        assert all(np.array_equal(store[row]["input_ids"], disk[row]["input_ids"]) for row in (0, 7, 311, 599, -1))
        assert store.take([5, 599, 3, 5]).equals(disk.take([5, 599, 3, 5]))
        assert [batch.to_pylist() for batch in store.batches(100, 300)] == [
            batch.to_pylist() for batch in disk.batches(100, 300)
        ]
        again = pickle.loads(pickle.dumps(store))  # noqa: S301
        assert again.take([8]).equals(disk.take([8]))
        there, here = describe(store), describe(disk)
        assert {**there, "path": ""} == {**here, "path": ""}
    assert ("fetched whole" in caplog.text) is not sums
    with pytest.raises(ValueError, match=r"s3://.* is closed"):
        store[3]
    with pytest.raises(ConfigError, match="has no directory"):
        _ = store.path


def test_a_row_costs_its_piece_and_the_index_of_its_shard(
    wide: Path, tmp_path: Path, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_store(wide, f"{s3_url}/a.store")
    disk = open_store(wide)
    assert len(disk.manifest.shards) >= 5
    with Proxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = opened(f"{s3_url}/a.store", tmp_path)
        opening = proxy.bytes_down
        assert opening < 40_000
        assert np.array_equal(store[333]["input_ids"], disk[333]["input_ids"])
        piece = store.open_shard(2).batch(0).nbytes
        assert proxy.bytes_down - opening < 1.05 * piece + 10_000
        assert store.bucket is not None
        before = proxy.bytes_down
        assert np.array_equal(store[334]["input_ids"], disk[334]["input_ids"])
        again = opened(f"{s3_url}/a.store", tmp_path)
        assert np.array_equal(again[333]["input_ids"], disk[333]["input_ids"])
        assert proxy.bytes_down - before < opening + 100


def test_a_part_damaged_on_this_disk_is_fetched_again(
    local: Path, tmp_path: Path, s3_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_store(local)
    url = upload_store(local, f"{s3_url}/a.store")
    rows = list(range(0, 600, 7))
    assert opened(url, tmp_path).take(rows).equals(disk.take(rows))
    for file in (tmp_path / "cache").glob("parts/??/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert opened(url, tmp_path).take(rows).equals(disk.take(rows))
    assert "is damaged" in caplog.text


def test_an_object_that_does_not_match_its_checksum_is_named(local: Path, tmp_path: Path, s3_url: str) -> None:
    url = upload_store(local, f"{s3_url}/a.store")
    entry = open_store(local).manifest.shards[0]
    bucket, key = open_bucket(f"{url}/{entry.file}")
    data = bytearray((local / entry.file).read_bytes())
    data[len(data) // 2] ^= 1
    bucket.write(key, bytes(data))
    with pytest.raises(DataError, match=r"checksum.*upload it again") as raised:
        opened(url, tmp_path)[:]
    assert entry.name in str(raised.value)
    with pytest.raises(DataError, match="checksum"):
        open_store(url, cache_dir=tmp_path / "other", verify="full")


@pytest.mark.parametrize("what", ["missing", "short"])
def test_a_store_that_was_uploaded_in_part_is_refused_by_name(
    local: Path, tmp_path: Path, s3_url: str, what: str
) -> None:
    url = upload_store(local, f"{s3_url}/a.store")
    entry = open_store(local).manifest.shards[1]
    bucket, key = open_bucket(f"{url}/{entry.file}")
    if what == "missing":
        bucket.delete(key)
    else:
        bucket.write(key, (local / entry.file).read_bytes()[:-5])
    with pytest.raises(DataError, match="uploaded in part") as raised:
        opened(url, tmp_path)
    assert entry.name in str(raised.value)


def test_a_store_without_its_manifest_is_not_taken_for_raw_files(local: Path, tmp_path: Path, s3_url: str) -> None:
    half = tmp_path / "half"
    shutil.copytree(local, half / "web")
    (half / "web" / "manifest.json").unlink()
    upload(half, s3_url)
    for place in (half, half / "web", s3_url, f"{s3_url}/web"):
        for read in (
            open_source,
            lambda given: PretrainDataLoader(given, "byte", 8, cache_dir=tmp_path / "cache"),
            lambda given: next(iter(PretrainDataLoader(given, "byte", 8, streaming=True, backend="numpy"))),
        ):
            with pytest.raises(ConfigError, match=r"web' has shards of a token store.*in part"):
                read(place)
    assert isinstance(open_source(half / "web" / "shards" / "*.arrow"), ArrowSource)


def test_a_prefix_without_a_store_is_named(s3_url: str, local: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a store"):
        open_store(f"{s3_url}/nothing.store")
    bucket, key = open_bucket(f"{s3_url}/half.store")
    for file in (local / "shards").iterdir():
        bucket.write(f"{key}/shards/{file.name}", file.read_bytes())
    with pytest.raises(FileNotFoundError, match="its upload has not ended"):
        open_store(f"{s3_url}/half.store")


def test_a_shard_that_is_replaced_or_pruned_under_the_reader_is_refused(
    local: Path, tmp_path: Path, s3_url: str
) -> None:
    url = upload_store(local, f"{s3_url}/a.store")
    store = opened(url, tmp_path)
    first, second = store.manifest.shards[:2]
    bucket, key = open_bucket(f"{url}/{first.file}")
    bucket.write(key, b"another")
    with pytest.raises(ChangedObjectError, match="replaced or deleted in the bucket"):
        store[0]
    bucket.delete(open_bucket(f"{url}/{second.file}")[1])
    with pytest.raises(ChangedObjectError, match="pruning"):
        store[store.manifest.shards[0].rows]


def test_versions_and_copies_share_parts_in_the_cache(local: Path, tmp_path: Path, s3_url: str) -> None:
    first = opened(upload_store(local, f"{s3_url}/a.store"), tmp_path)
    first.take(np.arange(len(first)))
    rows = len(first)
    append(local, [open_store(local).take(np.arange(50))])
    url = upload_store(local, f"{s3_url}/copy.store")
    second = open_store(url, cache_dir=tmp_path / "cache")
    assert second.bucket is not None
    before = second.bucket.cache.fetched_bytes
    assert second.take(np.arange(rows)).equals(open_store(local).take(np.arange(rows)))
    # The indexes and checksums of shards are shared too; only the last shard may be another one.
    assert second.bucket.cache.fetched_bytes - before < 3 * max(shard.bytes for shard in second.manifest.shards)
    assert open_store(url, 1, cache_dir=tmp_path / "cache").manifest.version == 1


def test_stores_below_a_prefix_are_found(local: Path, s3_url: str) -> None:
    for name in ("a.store", "b.store", "c.other"):
        upload_store(local, f"{s3_url}/all/{name}", sums=False)
    two = [f"{s3_url}/all/a.store", f"{s3_url}/all/b.store"]
    assert bucket_stores(f"{s3_url}/all") == two
    assert bucket_stores(f"{s3_url}/all/*.store") == two
    assert bucket_stores(two[0]) == bucket_stores(f"{two[0]}/") == two[:1]
    assert bucket_stores(f"{s3_url}/all/part.jsonl") == []
    assert bucket_stores(f"{s3_url}/nothing") == []


def test_nothing_shows_the_secret(
    local: Path, tmp_path: Path, s3_url: str, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    upload_store(local, f"{s3_url}/a.store")
    for name in environment_of(s3.endpoint):
        os.environ.pop(name)
    address = s3_url.replace("s3://", f"s3://penstock:{SECRET_KEY}@")
    url = f"{address}/a.store?endpoint={s3.endpoint}&region=us-east-1"
    with caplog.at_level(logging.DEBUG):
        store = opened(url, tmp_path)
        store.take([1, 2])
        texts = [repr(store), store.shown, repr(describe(store)), repr(store.bucket), caplog.text]
        for entry in store.manifest.shards:
            open_bucket(url)[0].delete(open_bucket(f"{s3_url}/a.store/{entry.file}")[1])
        with pytest.raises(ChangedFileError) as raised:
            store.take(np.arange(600))
        with pytest.raises(DataError) as again:
            opened(url, tmp_path)
    texts += [str(raised.value), str(again.value), *(str(file) for file in (tmp_path / "cache").rglob("*"))]
    assert not any(SECRET_KEY in text for text in texts)
