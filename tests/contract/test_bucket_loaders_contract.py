"""Loaders over stores in a bucket: the contract of all loaders, and the batches and states of the store on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.bucket_stores import upload_store
from tests.token_stores import make_masks, make_preferences, make_rows, make_store

from penstock import ConversationDataLoader, MixedDataLoader, PreferenceDataLoader, PretrainDataLoader
from penstock.loaders.base import DataLoader
from penstock.order.block_shuffle import BlockShuffle
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
