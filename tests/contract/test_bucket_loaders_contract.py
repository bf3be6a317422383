"""Loaders over stores in a bucket: the contract of all loaders, and the batches and states of the store on disk."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from tests.bucket_stores import upload_store
from tests.servers import KILLS, Proxy, S3Server
from tests.token_stores import make_masks, make_preferences, make_rows, make_store

from penstock import ConversationDataLoader, MixedDataLoader, PreferenceDataLoader, PretrainDataLoader
from penstock.errors import ConfigError, ResumeError
from penstock.files.objects import ChangedObjectError, open_bucket
from penstock.loaders import look_ahead
from penstock.loaders.base import DataLoader
from penstock.order.block_shuffle import BlockShuffle
from penstock.store import StoreWriter, open_store
from penstock.store.bucket_shards import part_cache
from penstock.testing import assert_loader_contract

LENGTH = 24
BLOCKS = BlockShuffle(block_tokens=64, window_tokens=256)
SMALL = 6000
"""Bytes of a cache that does not hold the stores."""


@pytest.fixture
def stores(tmp_path: Path, s3_url: str) -> tuple[Path, str]:
    rows = make_rows(90, 24, seed=1)
    (tmp_path / "disk").mkdir()
    make_store(tmp_path / "disk" / "text.store", rows, shard_bytes=1200)
    make_store(tmp_path / "disk" / "chat.store", rows, make_masks(rows), shard_bytes=1200)
    make_preferences(tmp_path / "disk" / "pairs.store", 40, 20, shard_bytes=2000)
    make_preferences(tmp_path / "disk" / "labels.store", 40, 20, pairs=False, shard_bytes=2000)
    for store in (tmp_path / "disk").iterdir():
        upload_store(store, f"{s3_url}/{store.name}", sums=store.name != "labels.store")
    part_cache.cache_clear()
    return tmp_path / "disk", s3_url


Make = Callable[..., DataLoader]


def text(home: Any, **more: Any) -> DataLoader:
    return PretrainDataLoader(f"{home}/text.store", chunk_size=LENGTH, backend="numpy", **more)


def chat(home: Any, **more: Any) -> DataLoader:
    return ConversationDataLoader(f"{home}/chat.store", max_length=LENGTH, backend="numpy", **more)


def pairs(home: Any, **more: Any) -> DataLoader:
    return PreferenceDataLoader(f"{home}/pairs.store", max_length=LENGTH, backend="numpy", **more)


def labels(home: Any, **more: Any) -> DataLoader:
    return PreferenceDataLoader(f"{home}/labels.store", max_length=LENGTH, backend="numpy", **more)


def mixed(home: Any, **more: Any) -> DataLoader:
    sources = {"text": f"{home}/text.store", "chat": f"{home}/chat.store"}
    return MixedDataLoader(sources, {"text": 2, "chat": 1}, chunk_size=LENGTH, backend="numpy", **more)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "text": (text, {}),
    "text, small cache": (text, {"cache_bytes": SMALL}),
    "text, small cache, verified": (text, {"cache_bytes": SMALL, "verify": "touch"}),
    "text, blocks": (text, {"shuffle": BLOCKS, "cache_bytes": SMALL}),
    "text in order": (text, {"shuffle": False, "cache_bytes": SMALL}),
    "rows": (text, {"packing": None, "cache_bytes": SMALL}),
    "packed": (text, {"packing": "best_fit", "shuffle": BLOCKS, "cache_bytes": SMALL}),
    "packed, exact": (text, {"packing": "best_fit", "cache_bytes": SMALL}),
    "tokens": (chat, {"max_tokens": 96}),
    "chat": (chat, {"cache_bytes": SMALL}),
    "pairs": (pairs, {"cache_bytes": SMALL}),
    "labels": (labels, {}),
    "mixed": (mixed, {"cache_bytes": SMALL, "packing": None}),
}


def content(loader: DataLoader, epochs: int = 2) -> list[Any]:
    found = []
    for _ in range(epochs):
        for batch in loader:
            arrays = {name: np.asarray(value).tolist() for name, value in batch.to_numpy().items()}
            found.append((arrays, batch.metadata["row"].tolist(), loader.state_dict()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_batches_and_states_are_those_of_the_store_on_disk(name: str, stores: tuple[Path, str], tmp_path: Path) -> None:
    make, given = CASES[name]
    disk, bucket = stores
    for ranks in (1, 2):
        more = {**given, "rank": ranks - 1, "world_size": ranks, "batch_size": 6 // ranks, "cache_dir": tmp_path / "c"}
        if "max_tokens" in given:
            del more["batch_size"]
        with make(disk, **more) as there, make(bucket, **more) as here:
            wanted = content(there)
            assert content(here) == wanted
            here.load_state_dict(wanted[2][2])
            rest = [batch.metadata["row"].tolist() for batch in here]
            assert rest == [rows for _, rows, _ in wanted[3 : 3 + len(rest)]]
            assert rest
    cached = sum(file.stat().st_size for file in (tmp_path / "c").glob("parts/??/*"))
    assert cached <= more.get("cache_bytes", 1 << 40)


@pytest.mark.parametrize("name", ["text, small cache", "text, blocks", "chat", "pairs", "mixed"])
def test_loaders_keep_the_contract(name: str, stores: tuple[Path, str], tmp_path: Path) -> None:
    make, given = CASES[name]
    assert_loader_contract(
        lambda **more: make(stores[1], **{**given, "cache_dir": tmp_path / "c", **more}), steps=6, worlds=(1, 2)
    )


def make_wide_store(path: Path, rows: int, tokens: int, shard_bytes: int) -> npt.NDArray[np.uint16]:
    """A store of random rows of one length."""
    drawn = np.random.default_rng(1).integers(0, 60_000, (rows, tokens)).astype(np.uint16)
    with StoreWriter(path, shard_bytes=shard_bytes) as writer:
        offsets = np.arange(0, drawn.size + 1, tokens, dtype=np.int32)
        writer.write(pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, drawn.reshape(-1))}))
        writer.publish()
    part_cache.cache_clear()
    return drawn


def test_the_first_batch_waits_for_its_own_parts_alone(
    tmp_path: Path, s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_wide_store(tmp_path / "a.store", 64, 4096, 128 << 10)
    upload_store(tmp_path / "a.store", f"{s3_url}/a.store")
    manifest = open_store(tmp_path / "a.store").manifest
    with Proxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        url, given = f"{s3_url}/a.store", {"chunk_size": 4096, "batch_size": 2, "backend": "numpy"}
        loader = PretrainDataLoader(url, shuffle=False, cache_dir=tmp_path, **given)
        assert np.array_equal(loader.get_batch().input_ids, rows[:2])
        assert proxy.bytes_down < 1.05 * manifest.shards[0].bytes + 15_000
        # The rest of the epoch is fetched once, and another epoch costs nothing.
        assert sum(1 for _ in loader) == 31
        assert proxy.bytes_down < 1.05 * manifest.bytes + 20_000
        before = proxy.bytes_down
        assert sum(1 for _ in loader) == 32
        assert proxy.bytes_down == before


def test_a_small_cache_fetches_each_byte_about_once_an_epoch_with_blocks(tmp_path: Path, s3_url: str) -> None:
    make_wide_store(tmp_path / "a.store", 1024, 256, 4 << 10)
    upload_store(tmp_path / "a.store", f"{s3_url}/a.store")
    place, key = open_bucket(f"{s3_url}/a.store")
    nbytes = sum(info.size for info in place.objects(f"{key}/shards/"))
    loader = PretrainDataLoader(
        f"{s3_url}/a.store",
        chunk_size=256,
        batch_size=16,
        shuffle="blocks",
        cache_dir=tmp_path,
        cache_bytes=nbytes // 4,
        backend="numpy",
    )
    assert sum(len(batch.input_ids) for _ in range(2) for batch in loader) == 2 * 1024
    cache = part_cache(tmp_path / "parts", nbytes // 4)
    assert cache.evictions > 0
    assert cache.fetched_bytes < 1.05 * 2 * nbytes
    loader.close()
    until = time.monotonic() + 30
    while cached_bytes(cache.directory) > cache.limit_bytes and time.monotonic() < until:
        cache.evict()  # parts on their way may pass the limit for a moment
    assert cached_bytes(cache.directory) <= cache.limit_bytes


def cached_bytes(directory: Path) -> int:
    total = 0
    for file in directory.glob("??/*"):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            total += file.stat().st_size if file.name[0] != "." else 0
    return total


def test_ranks_and_processes_of_a_machine_fetch_a_part_once(stores: tuple[Path, str], tmp_path: Path) -> None:
    disk, bucket = stores
    fetched = []
    for rank in range(2):
        part_cache.cache_clear()  # as another process has it
        with text(bucket, rank=rank, world_size=2, batch_size=4, cache_dir=tmp_path / "c") as loader:
            assert len([*loader]) == len([*text(disk, rank=rank, world_size=2, batch_size=4)])
            fetched.append(part_cache(tmp_path / "c" / "parts", loader.options.cache_bytes).fetched_bytes)
    stored = open_store(disk / "text.store").manifest.bytes
    assert sum(fetched) < 1.6 * stored  # with the checksums, which are large for shards of a kilobyte
    assert fetched[1] < 0.2 * stored


def test_edits_and_states_of_another_shuffle_are_handled_as_on_disk(stores: tuple[Path, str], tmp_path: Path) -> None:
    disk, bucket = stores
    given = {"batch_size": 4, "shuffle": BLOCKS, "cache_dir": tmp_path / "c", "cache_bytes": SMALL}
    with text(disk, **given) as there, text(bucket, **given) as here:
        for loader in (there, here):
            loader.get_batch()
            loader.edit(loader.plan.skip(3, 6).ban([5, 17], step=7))
        assert content(here) == content(there)
    with text(bucket, **{**given, "shuffle": True}) as exact, pytest.raises(ResumeError, match="shuffle"):
        exact.load_state_dict(here.state_dict())


def test_a_cache_deleted_under_the_run_is_filled_again(stores: tuple[Path, str], tmp_path: Path) -> None:
    disk, bucket = stores
    with text(bucket, batch_size=4, cache_dir=tmp_path / "c", cache_bytes=SMALL, shuffle=BLOCKS) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch.input_ids.tolist())
            if number % 4 == 2:
                shutil.rmtree(tmp_path / "c", ignore_errors=True)
    assert found == [batch.input_ids.tolist() for batch in text(disk, batch_size=4, shuffle=BLOCKS)]


def test_a_version_that_is_pruned_under_the_run_is_refused_by_name(stores: tuple[Path, str], tmp_path: Path) -> None:
    bucket = stores[1]
    place, key = open_bucket(f"{bucket}/text.store")
    with text(bucket, batch_size=4, cache_dir=tmp_path / "c", shuffle=False) as loader:
        loader.get_batch()
        for info in list(place.objects(f"{key}/shards/")):
            place.delete(info.key)
        with pytest.raises(ChangedObjectError, match="pruning its version"):
            list(loader)


def test_users_hear_once_that_a_cache_is_small(
    stores: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "_told", set())
    for given in ({}, {}, {"shuffle": BlockShuffle(block_tokens=512, window_tokens=1 << 20)}):
        with text(stores[1], batch_size=4, cache_dir=tmp_path / "c", cache_bytes=900, **given) as loader:
            list(loader)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "shuffle='blocks'" in caplog.text


def test_streaming_refuses_a_store_in_a_bucket(stores: tuple[Path, str]) -> None:
    with pytest.raises(ConfigError, match="leave out streaming=True"):
        text(stores[1], streaming=True)


def test_a_server_that_is_killed_again_and_again_feeds_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make_store(tmp_path / "a.store", make_rows(400, 40, seed=2), shard_bytes=2000)
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        upload_store(disk, f"{server.url}/a.store")
        part_cache.cache_clear()
        given = {"chunk_size": 32, "batch_size": 4, "backend": "numpy", "shuffle": BLOCKS}
        wanted = [batch.input_ids.tolist() for batch in PretrainDataLoader(disk, **given)]
        restarts: list[threading.Thread] = []
        found = []
        with PretrainDataLoader(f"{server.url}/a.store", cache_dir=tmp_path / "c", cache_bytes=4000, **given) as loader:
            for number, batch in enumerate(loader):
                found.append(batch.input_ids.tolist())
                if number % (len(wanted) // KILLS) == 1:
                    for thread in restarts:
                        thread.join()
                    server.kill()  # in the middle of what is fetched ahead
                    restarts.append(threading.Thread(target=server.start))
                    restarts[-1].start()
        for thread in restarts:
            thread.join()
    assert len(restarts) >= KILLS
    assert found == wanted
