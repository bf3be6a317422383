"""Homes of stores on disk and in buckets, manifests in both, and checksums of the parts of a shard."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import xxhash
from tests.token_stores import make_rows, make_store

from penstock.errors import ConfigError, DataError
from penstock.store import open_store
from penstock.store.home import BucketHome, LocalHome, StoreHome, store_home
from penstock.store.manifest import is_store, read_manifest, version_numbers
from penstock.store.piece_sums import INDEX_STEP, PieceSums, read_sums, write_sums


@pytest.fixture(params=["disk", "bucket"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> StoreHome:
    if request.param == "disk":
        return store_home(tmp_path / "x.store")
    return store_home(f"{request.getfixturevalue('s3_url')}/x.store")


def upload(store: Path, home: StoreHome) -> None:
    for file in store.rglob("*"):
        if file.is_file():
            home.write(file.relative_to(store).as_posix(), file.read_bytes())


def test_files_are_written_read_listed_and_deleted_by_name(home: StoreHome, tmp_path: Path) -> None:
    (tmp_path / "x.store").mkdir()
    assert home.list("versions") == {}
    home.write("versions/b", b"12")
    home.write("versions/a", b"1")
    home.write("versions/a", b"123")
    assert home.list("versions") == {"a": 3, "b": 2}
    assert (home.read("versions/a"), home.size("versions/a"), home.exists("versions/c")) == (b"123", 3, False)
    with pytest.raises(FileNotFoundError):
        home.read("versions/c")
    home.delete("versions/a")
    home.delete("versions/a")
    assert home.list("versions") == {"b": 2}


def test_the_manifest_in_a_bucket_is_that_of_the_disk(s3_url: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "x.store", make_rows(50, 20))
    home = store_home(f"{s3_url}/x.store")
    assert isinstance(home, BucketHome)
    with pytest.raises(FileNotFoundError, match="no objects below it"):
        read_manifest(home)
    upload(store, home)
    assert is_store(home)
    assert version_numbers(home) == [1]
    assert read_manifest(home).checksum == read_manifest(home, 1).checksum == read_manifest(store).checksum
    with pytest.raises(DataError, match="no version 2; it has"):
        read_manifest(home, 2)
    home.delete("manifest.json")
    with pytest.raises(FileNotFoundError, match=r"though it has the versions \[1\]: check one out"):
        read_manifest(home)
    home.delete("versions/000001.json")
    with pytest.raises(FileNotFoundError, match="its upload has not ended, or was cut off"):
        read_manifest(home)
    with pytest.raises(ConfigError, match="name a store in it"):
        store_home("s3://pen")


def test_every_piece_and_step_of_a_shard_has_a_checksum(home: StoreHome, tmp_path: Path) -> None:
    path = tmp_path / "y.store"
    (tmp_path / "x.store").mkdir()
    make_store(path, [[row % 60_000] * 8 for row in range(300_000)])
    (entry,) = (manifest := read_manifest(path)).shards
    files = path / entry.file, path / entry.index_file
    assert read_sums(home, entry) is None
    write_sums(home, entry, *files)
    sums = read_sums(home, entry)
    assert sums == PieceSums.of(*files)
    assert len(sums.index) == 2
    assert sums.index[0][:2] == (0, INDEX_STEP)
    assert sum(length for _, length, _ in sums.index) == entry.index_bytes
    assert len(sums.pieces) > 3
    data, rows = files[0].read_bytes(), 0
    with open_store(path) as store:
        for offset, length, digest in sums.pieces:
            part = data[offset : offset + length]
            assert xxhash.xxh3_128_hexdigest(part) == digest
            batch = pa.ipc.read_record_batch(pa.py_buffer(part), manifest.schema)
            assert batch.equals(next(store.batches(rows, rows + batch.num_rows)))
            rows += batch.num_rows
    assert rows == manifest.rows


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 2}', b'{"version": 1, "pieces": [[1, 2]], "index": []}'])
def test_damaged_checksums_are_named(tmp_path: Path, content: bytes) -> None:
    path = make_store(tmp_path / "x.store", make_rows(5, 5))
    (entry,) = read_manifest(path).shards
    (path / entry.sums_file).write_bytes(content)
    with pytest.raises(DataError, match="checksums of a shard are damaged"):
        read_sums(LocalHome(path), entry)
