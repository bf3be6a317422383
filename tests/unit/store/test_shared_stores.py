"""Stores and tables that machines share through a cache: found, verified, and never a reason to fail."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.servers import RedisServer

from penstock.connections import shared_cache as shared_caches
from penstock.connections.shared_cache import SharedCache, open_cache, shared_cache
from penstock.corpus import convert as converting
from penstock.corpus import prepare as preparing
from penstock.errors import ConfigError
from penstock.files.cache import CacheBackend, CacheEntry, DiskCache
from penstock.loaders import MixedDataLoader, PretrainDataLoader, Recipe, prepare
from penstock.store import shared_files
from penstock.store.shared_files import fetch_store, share_store

OPTIONS: dict[str, Any] = {"chunk_size": 16, "batch_size": 2, "backend": "numpy", "progress": False}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What one test finds down is up in the next."""
    yield
    shared_caches._of_url.cache_clear()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} " * (n % 9 + 1)}) + "\n" for n in range(200)))
    return path


@pytest.fixture(params=["disk", "redis", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "disk":
        return str(tmp_path / "shared")
    if request.param == "s3":
        found: str = request.getfixturevalue("s3_url")
        return found
    server: RedisServer = request.getfixturevalue("redis_server")
    return f"{server.url.rpartition('/')[0]}/{secrets.randbelow(14) + 1}"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of the pipelines that have prepared something."""
    made: list[str] = []

    class Counted(preparing.Pipeline):
        def run(self, *arguments: Any, **more: Any) -> Any:
            made.append(str(self.source))
            return super().run(*arguments, **more)

    monkeypatch.setattr(preparing, "Pipeline", Counted)
    return made


def batches(path: Any, machine: Path, cache: Any, **more: Any) -> list[Any]:
    """Batches of a loader on a machine with a directory of its own."""
    with PretrainDataLoader(path, "byte", cache_dir=machine, cache=cache, **OPTIONS | more) as loader:
        return [np.asarray(batch["input_ids"]).tolist() for batch in loader]


def test_a_second_machine_finds_what_the_first_prepared(url: str, texts: Path, tmp_path: Path, runs: list[str]) -> None:
    if url.startswith("redis"):
        for entry in list(open_cache(url).entries()):
            open_cache(url).delete(entry.key)
    expected = batches(texts, tmp_path / "one", None)
    assert len(runs) == 1
    assert batches(texts, tmp_path / "two", url) == expected
    assert len(runs) == 2
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copy(texts, copy)
    assert batches(copy, tmp_path / "three", url) == expected
    assert len(runs) == 2
    assert batches(copy, tmp_path / "three", "redis://127.0.0.1:1/0") == expected  # local: nobody is asked
    assert len(runs) == 2


def test_prepare_and_loaders_share_stores_and_mixtures_find_each_of_their_sources(
    texts: Path, tmp_path: Path, runs: list[str]
) -> None:
    cache = str(tmp_path / "shared")
    made = prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"), cache=cache)
    assert made.report is not None
    found = prepare(texts, tmp_path / "two.store", Recipe(tokenizer="byte"), cache=cache)
    assert found.report is None
    assert found.manifest == made.manifest
    assert (tmp_path / "two.store" / "losses.json").is_file()
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "another file"}\n' * 30)
    for machine, prepared in (("a", 2), ("b", 2)):
        sources = {"a": texts, "b": other}
        with MixedDataLoader(
            sources, {"a": 1, "b": 1}, tokenizer="byte", cache_dir=tmp_path / machine, cache=cache, **OPTIONS
        ) as loader:
            loader.get_batch()
        assert len(runs) == prepared
    with pytest.raises(ConfigError, match="mode"):
        prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"), cache=cache, mode="append")


def test_a_store_that_was_there_before_is_put_into_the_cache(texts: Path, tmp_path: Path, runs: list[str]) -> None:
    prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"))
    prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"), cache=tmp_path / "shared")
    assert prepare(texts, tmp_path / "two.store", Recipe(tokenizer="byte"), cache=tmp_path / "shared").report is None
    assert len(runs) == 1


class Faulty(DiskCache):
    """A cache whose use number `at` and all later ones fail."""

    def __init__(self, directory: Path, at: int, error: Exception, *, writes_only: bool = False) -> None:
        super().__init__(directory)
        self.at, self.error, self.writes_only, self.uses, self.errors = at, error, writes_only, 0, 0

    def _use(self) -> None:
        self.uses += 1
        if self.uses > self.at:
            self.errors += 1
            raise self.error

    def get(self, key: str) -> bytes | None:
        if not self.writes_only:
            self._use()
        return super().get(key)

    def stat(self, key: str) -> CacheEntry | None:
        if not self.writes_only:
            self._use()
        return super().stat(key)

    def put(self, key: str, data: bytes) -> None:
        self._use()
        super().put(key, data)


@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_a_cache_that_fails_at_any_point_changes_no_batch_and_is_reported_once(
    at: int, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "PART_BYTES", 4000)
    expected = batches(texts, tmp_path / "one", None)
    for full in (False, True):  # in the middle of writing, and of reading
        if full:
            assert batches(texts, tmp_path / "whole", tmp_path / "cache True") == expected
        caplog.clear()
        faulty = Faulty(tmp_path / f"cache {full}", at, ConnectionError("it is gone"))
        assert batches(texts, tmp_path / f"two {full} {at}", SharedCache(faulty)) == expected
        warned = [record for record in caplog.records if "shared cache" in record.getMessage()]
        assert len(warned) == (1 if faulty.errors else 0)
        assert faulty.errors <= 5  # requests that were on their way
        assert batches(texts, tmp_path / f"three {full} {at}", DiskCache(faulty.directory)) == expected


@pytest.mark.parametrize("error", [PermissionError("read only"), OSError("OOM"), ConfigError("too large")])
def test_a_cache_that_cannot_be_written_is_read_on(
    error: Exception, texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, runs: list[str]
) -> None:
    faulty = Faulty(tmp_path / "cache", 0, error, writes_only=True)
    cache = SharedCache(faulty)
    expected = batches(texts, tmp_path / "one", cache)
    assert caplog.text.count("the shared cache cannot be written") == 1
    assert batches(texts, tmp_path / "two", DiskCache(tmp_path / "cache")) == expected
    assert len(runs) == 2
    assert batches(texts, tmp_path / "three", cache) == expected
    assert len(runs) == 2


def test_a_part_that_is_gone_or_damaged_is_made_again_and_never_used(
    texts: Path, tmp_path: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "PART_BYTES", 3000)
    cache = DiskCache(tmp_path / "cache")
    expected = batches(texts, tmp_path / "one", cache)
    listed = next(entry.key for entry in cache.entries() if entry.key.startswith("store-"))
    count = len(parts_of(cache, listed))
    assert count > 4
    for number in range(count):
        part = parts_of(cache, listed)[number]
        if number % 2:
            cache.delete(part)
        else:
            cache.put(part, b"other bytes")
        assert batches(texts, tmp_path / f"machine {number}", cache) == expected
        assert not list((tmp_path / f"machine {number}" / "stores").glob(".*.fetching"))
    assert len(runs) == 1 + count
    assert batches(texts, tmp_path / "last", cache) == expected
    assert len(runs) == 1 + count


def parts_of(cache: CacheBackend, listed: str) -> list[str]:
    return [f"part-{part}" for file in json.loads(cache.get(listed) or b"")["files"] for part in file["parts"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts["files"][0].update(name="../../evil.arrow"),
        lambda facts: facts["files"][0].update(name="/etc/evil"),
        lambda facts: facts["files"][0].update(parts=["../x"]),
        lambda facts: facts["files"][0].update(size=1),
        lambda facts: facts["files"].pop(),
        lambda facts: facts["files"][0].update(parts=facts["files"][1]["parts"], size=facts["files"][1]["size"]),
        lambda facts: facts.update(version=99),
        lambda facts: facts.update(files="all"),
        lambda facts: facts.clear(),
    ],
)
def test_a_list_of_files_that_is_not_as_it_must_be_is_not_followed(
    change: Callable[[dict[str, Any]], object], texts: Path, tmp_path: Path
) -> None:
    cache = DiskCache(tmp_path / "cache")
    made = prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"), cache=cache)
    key = f"store-{made.manifest.key}"
    facts = json.loads(cache.get(key) or b"")
    before = json.dumps(facts)
    change(facts)
    assert json.dumps(facts) != before
    cache.put(key, json.dumps(facts).encode())
    files = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    assert not fetch_store(SharedCache(cache), made.manifest.key or "", tmp_path / "two.store")
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == files


def test_half_an_upload_is_not_seen(texts: Path, tmp_path: Path) -> None:
    made = prepare(texts, tmp_path / "one.store", Recipe(tokenizer="byte"))
    key = made.manifest.key or ""
    for at in range(20):
        faulty = Faulty(tmp_path / f"cache {at}", at, ConnectionError("killed"))
        done = share_store(SharedCache(faulty), made.path, key)
        assert fetch_store(SharedCache(DiskCache(faulty.directory)), key, tmp_path / f"{at}.store") == done
    assert done


SECRET = "hunter2-9c41"


def test_a_password_of_a_cache_is_in_no_log_repr_state_or_manifest(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for url in (f"redis://me:{SECRET}@127.0.0.1:1/0", f"redis://127.0.0.1:1/0?password={SECRET}"):
        home = tmp_path / secrets.token_hex(4)
        with PretrainDataLoader(texts, "byte", cache_dir=home, cache=url, **OPTIONS) as loader:
            seen = [repr(loader), repr(loader.options), str(loader.state_dict()), repr(loader.plan)]
        seen += [repr(shared_cache(url)), caplog.text]
        files = [file for file in home.rglob("*") if file.is_file()]
        assert files
        assert not any(SECRET.encode() in file.read_bytes() for file in files)
        assert not any(SECRET in text for text in seen)
        assert "the shared cache cannot be used" in caplog.text


def test_what_is_no_cache_is_refused_by_name_before_anything_is_made(texts: Path, tmp_path: Path) -> None:
    for wrong, words in (("ftp://host/x", "is no cache"), (7, "cache must be"), ("redis://host:x/0", "no address")):
        with pytest.raises(ConfigError, match=words):
            PretrainDataLoader(texts, "byte", cache=wrong, cache_dir=tmp_path / "home", **OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass the URL as cache="):
        PretrainDataLoader(texts, "byte", cache_dir="s3://bucket/x", **OPTIONS)
    assert not (tmp_path / "home").exists()


def test_rows_that_are_tokens_already_are_found_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    made: list[Path] = []

    class Counted(converting.StoreSink):
        def __init__(self, path: Path, **options: Any) -> None:
            made.append(path)
            super().__init__(path, **options)

    monkeypatch.setattr(converting, "StoreSink", Counted)
    rows = pa.table({"input_ids": [list(range(number, number + 20)) for number in range(30)]})
    pq.write_table(rows, tmp_path / "tokens.parquet")
    options: dict[str, Any] = {"cache": tmp_path / "shared", **OPTIONS}
    found = []
    for machine in ("one", "two"):
        with PretrainDataLoader(tmp_path / "tokens.parquet", cache_dir=tmp_path / machine, **options) as loader:
            found.append([np.asarray(batch["input_ids"]).tolist() for batch in loader])
    assert found[0] == found[1]
    assert len(made) == 1
