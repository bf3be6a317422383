"""Loaders of files in a bucket: the first batch after little was read, exact resume, stores made by reading once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import SECRET_KEY, Proxy, S3Server, environment_of

from penstock import PretrainDataLoader, prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import ChangedFileError, ResumeError
from penstock.files.objects import open_bucket
from penstock.loaders import StreamOptions


@pytest.fixture
def proxy(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3.port) as between:
        for name, value in environment_of(between.endpoint).items():
            monkeypatch.setenv(name, value)
        yield between


def lines(first: int, rows: int, words: int = 30) -> bytes:
    return "".join(json.dumps({"text": f"{first + row} " * words}) + "\n" for row in range(rows)).encode()


def put(url: str, data: bytes) -> None:
    bucket, key = open_bucket(url)
    bucket.write(key, data)


def loader(url: str, rank: int = 0, ranks: int = 1) -> Any:
    streaming = StreamOptions(steps_per_epoch=1000, streams=8, window_bytes=1 << 16)
    return PretrainDataLoader(url, "byte", 64, batch_size=4 // ranks, streaming=streaming, rank=rank, world_size=ranks)


def tokens(batch: Any) -> Any:
    return np.asarray(batch["input_ids"])


def test_the_first_batch_comes_after_little_was_read_and_nothing_is_copied(
    s3_url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(4):
        put(f"{s3_url}/{number}.jsonl", lines(number * 30_000, 30_000))
    total = sum(one.size for one in open_bucket(s3_url)[0].objects(open_bucket(s3_url)[1]))
    before = proxy.bytes_down
    with loader(s3_url) as stream:
        next(iter(stream))
        assert proxy.bytes_down - before < total / 3  # 4 MiB of it to find the columns
    before = proxy.bytes_down
    with PretrainDataLoader(s3_url, "byte", 64, batch_size=4) as indexed:
        next(iter(indexed))
    assert proxy.bytes_down - before < 1.5 * total
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_stream_resumes_exactly_also_on_other_ranks(s3_url: str, s3: S3Server) -> None:
    for number in range(3):
        put(f"{s3_url}/{number}.jsonl", lines(number * 2000, 2000))
    with loader(s3_url) as stream:
        batches = iter(stream)
        for _ in range(30):
            next(batches)
        state = json.loads(json.dumps(stream.state_dict()))
        expected = [tokens(next(batches)) for _ in range(3)]
    assert SECRET_KEY not in json.dumps(state)
    with loader(s3_url) as stream:
        stream.load_state_dict(state)
        assert all(np.array_equal(tokens(batch), wanted) for batch, wanted in zip(stream, expected))
    halves = []
    for rank in range(2):
        with loader(s3_url, rank, 2) as stream:
            stream.load_state_dict(state)
            halves.append(tokens(next(iter(stream))))
    assert np.array_equal(np.concatenate(halves), expected[0])
    put(f"{s3_url}/1.jsonl", lines(2001, 2000))
    assert len(lines(2001, 2000)) == len(lines(2000, 2000))
    with loader(s3_url) as stream, pytest.raises(ResumeError, match=r"'1\.jsonl' was replaced"):
        stream.load_state_dict(state)


def test_a_stream_from_a_bucket_is_that_from_disk(s3_url: str, tmp_path: Path) -> None:
    for number in range(2):
        data = lines(number * 500, 500)
        put(f"{s3_url}/{number}.jsonl", data)
        (tmp_path / f"{number}.jsonl").write_bytes(data)
    with loader(s3_url) as remote, loader(str(tmp_path)) as local:
        for _, mine, its in zip(range(50), remote, local):
            assert np.array_equal(tokens(mine), tokens(its))


@pytest.mark.parametrize(("suffix", "budget"), [("jsonl", "1GiB"), ("jsonl", "4MiB"), ("txt", "4MiB")])
def test_an_epoch_of_many_small_splits_reads_the_data_about_once(
    s3_url: str, proxy: Proxy, tmp_path: Path, suffix: str, budget: str
) -> None:
    total = 0
    for number in range(3):
        texts = (f"{number * 2000 + row} " * (40 + row * 7 % 120) for row in range(2000))
        data = "".join((json.dumps({"text": text}) if suffix == "jsonl" else text) + "\n" for text in texts).encode()
        put(f"{s3_url}/{number}.{suffix}", data)
        (tmp_path / f"{number}.{suffix}").write_bytes(data)
        total += len(data)

    def opened(url: str) -> Any:
        streaming = StreamOptions(streams=8, window_bytes=1 << 16)
        return PretrainDataLoader(url, "byte", 2048, batch_size=8, streaming=streaming, budget=budget)

    before = proxy.bytes_down
    with opened(s3_url) as remote, opened(str(tmp_path)) as local:
        for mine, its in zip(remote, local, strict=True):
            assert np.array_equal(tokens(mine), tokens(its))
            assert remote.state_dict()["streams"] == local.state_dict()["streams"]
    # Of JSON Lines a part is read before, for the columns.
    assert proxy.bytes_down - before < (1.5 if suffix == "txt" else 2) * total


def test_an_object_that_is_replaced_under_a_stream_ends_it(s3_url: str) -> None:
    put(f"{s3_url}/a.jsonl", lines(0, 40_000))
    with loader(s3_url) as stream:
        batches = iter(stream)
        next(batches)
        put(f"{s3_url}/a.jsonl", lines(1, 40_000))
        with pytest.raises(ChangedFileError, match=f"{s3_url}/a.jsonl changed while it was read"):
            list(batches)


def test_a_store_is_prepared_and_recognised_by_the_etag(
    s3_url: str, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    data = lines(0, 500)
    put(f"{s3_url}/a.jsonl", data)
    put(f"{s3_url}/other/a.jsonl", data)
    recipe = Recipe(tokenizer="byte")
    made = prepare(f"{s3_url}/a.jsonl", tmp_path / "a.store", recipe)
    before = proxy.bytes_down
    again = prepare(f"{s3_url}/other/a.jsonl", tmp_path / "a.store", recipe)
    assert proxy.bytes_down - before < 1.5 * len(data)  # once, for its columns
    assert again.report is None
    assert again.manifest.checksum == made.manifest.checksum
    assert made.manifest.rows == 500
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or SECRET_KEY.encode() not in file.read_bytes()
    assert SECRET_KEY not in caplog.text
    put(f"{s3_url}/a.jsonl", lines(1, 500))
    assert prepare(f"{s3_url}/a.jsonl", tmp_path / "b.store", recipe).manifest.checksum != made.manifest.checksum
