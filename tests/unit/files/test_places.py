"""Places that must be local: a URL is refused by name at every door, and no directory `s3:` is left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from penstock import MemoryBudget, Pipeline, PretrainDataLoader
from penstock.batching.options import Options
from penstock.cli.main import app
from penstock.cli.serve import read_token
from penstock.config import load_shared_config
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.datasets.registry import DatasetRegistry
from penstock.datasets.sample_data import make_titanic
from penstock.datasets.spec_file import read_spec
from penstock.datasets.submission import write_submission
from penstock.datasets.titanic import TitanicDataset, titanic_spec
from penstock.distributed.synchronization import DirectoryRendezvous
from penstock.errors import ConfigError
from penstock.files.cache import DiskCache, default_cache_directory
from penstock.files.filesystems import beside, output_place, require_local, shown_place
from penstock.files.remote import RemotePath, clear_copies
from penstock.fsqueue import DatasetConsumer, QueueSink, QueueSource, purge
from penstock.fsqueue.provider import DataProviderBase
from penstock.fsqueue.status import find_queue
from penstock.loaders.samples.datasets import as_sample_dataset
from penstock.loaders.source import open_inputs
from penstock.loaders.streamed.windows import StreamCounts
from penstock.metrics import open_exporter
from penstock.metrics.metrics_file import MetricsFile
from penstock.pipeline.config import PipelineConfig
from penstock.rl.queue import RolloutQueue
from penstock.sinks import CsvSink, JsonlSink, ParquetSink, StoreSink, open_sink
from penstock.sources import MemorySource, StoreSource, open_source
from penstock.store import open_store
from penstock.store.history import prune, versions
from penstock.store.reader import find_store
from penstock.store.writer import StoreWriter
from penstock.templates import TextTemplateEngine
from penstock.transforms import ExactDedup
from penstock.transforms.tokenization import CharTokenizer

SAMPLE = Path(__file__).parents[3] / "examples" / "sample"
URL = "s3://bucket/x"
ROWS = pa.table({"n": [1, 2]})


class Digits(DataProviderBase):
    def build_meta(self) -> dict[str, Any]:
        raise NotImplementedError

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        raise NotImplementedError


def provider(**more: Any) -> Digits:
    return Digits({"dataset": "d", "batch_size": 1, "block_size": 1}, **more)


DOORS: dict[str, Callable[[Any], Any]] = {
    "cache_dir=": lambda url: PretrainDataLoader(SAMPLE / "documents.jsonl", "byte", 16, cache_dir=url),
    "Options(cache_dir=)": lambda url: Options(cache_dir=url),
    "quarantine of a stream": lambda url: StreamCounts("quarantine", url, None),  # type: ignore[arg-type]
    "find_store": lambda url: find_store(url, "key"),
    "DiskCache": DiskCache,
    "clear_copies": lambda url: clear_copies(cache_dir=url),
    "RolloutQueue": RolloutQueue,
    "QueueSink": QueueSink,
    "QueueSource": QueueSource,
    "DatasetConsumer": DatasetConsumer,
    "purge": purge,
    "find_queue": find_queue,
    "provider(queue_dir=)": lambda url: provider(queue_dir=url),
    "provider(data_dir=)": lambda url: provider(data_dir=url),
    "provider(data_root)": lambda url: Digits(
        {"dataset": "d", "batch_size": 1, "block_size": 1, "data_root": os.fspath(url)}
    ),
    "provider(config queue_dir)": lambda url: Digits(
        {"dataset": "d", "batch_size": 1, "block_size": 1, "queue_dir": os.fspath(url)}
    ),
    "ExactDedup(directory=)": lambda url: ExactDedup("text", directory=url),
    "CharTokenizer.save": lambda url: CharTokenizer("abc").save(url),
    "save_templates": lambda url: TextTemplateEngine().save_templates(url),
    "DirectoryRendezvous": DirectoryRendezvous,
    "registry": DatasetRegistry,
    "dataset(cache_dir=)": lambda url: TitanicDataset(titanic_spec("titanic"), cache_dir=url),
    "write_submission": lambda url: write_submission([1, 2], [0, 1], url),
    "make_titanic": make_titanic,
    "MetricsFile": MetricsFile,
    "metrics=jsonl:": lambda url: open_exporter(f"jsonl:{os.fspath(url)}"),
    "config file": load_shared_config,
    "competition.yaml": read_spec,
    "--token-file": read_token,
}


BUCKET_DOORS: dict[str, Callable[[Any], Any]] = {
    "prepare(out=)": lambda url: prepare(SAMPLE / "documents.jsonl", url, Recipe(tokenizer="byte")),
    "run(checkpoint=)": lambda url: Pipeline(MemorySource(ROWS), [], JsonlSink("out.jsonl")).run(checkpoint=url),
    "quarantine=": lambda url: PipelineConfig(on_error="quarantine", quarantine=url),
    "ParquetSink": ParquetSink,
    "JsonlSink": JsonlSink,
    "CsvSink": CsvSink,
    "StoreSink": StoreSink,
    "open_sink": lambda url: open_sink(f"{os.fspath(url)}.jsonl"),
    "StoreWriter": StoreWriter,
    "versions": versions,
    "prune": prune,
}
"""Doors that take a URL of an object store, and no other."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


SPELLINGS = [URL, RemotePath(URL), Path(URL), "gs://bucket/x", "redis://host/0", "S3://bucket/x"]
"""URLs as text, as paths, and what `Path` makes of one."""


@pytest.mark.parametrize("door", DOORS)
def test_a_url_is_refused_where_a_local_path_is_needed(door: str, somewhere: Path) -> None:
    for url in SPELLINGS:
        with pytest.raises(ConfigError, match=r"\bURL\b"):
            DOORS[door](url)
    assert not [path for path in somewhere.rglob("*") if path.name.endswith(":")]


@pytest.mark.parametrize("door", BUCKET_DOORS)
def test_only_urls_of_object_stores_are_written_to(door: str, somewhere: Path) -> None:
    for url in ("hdfs://host/0", "hf://datasets/a/b", RemotePath("https://host/x"), "zip://a::s3://bucket/x"):
        with pytest.raises(ConfigError, match=r"\bURL\b.*s3://"):
            BUCKET_DOORS[door](url)
    assert not [path for path in somewhere.rglob("*") if path.name.endswith(":")]


def test_a_query_is_no_suffix_of_an_output() -> None:
    with pytest.raises(ConfigError, match=r"\bURL\b") as caught:
        open_sink("https://host/x.jsonl?sig=s3cr3t")
    assert "s3cr3t" not in str(caught.value)


def test_a_url_that_went_through_a_path_is_still_one() -> None:
    for url in (URL, Path(URL), RemotePath(URL)):
        assert output_place(url, "x") == URL
    assert output_place("file:///tmp/x", "x") == output_place(Path("/tmp/x"), "x") == Path("/tmp/x")
    assert beside(f"{URL}?region=eu", ".", ".lock") == "s3://bucket/.x.lock?region=eu"
    assert shown_place("s3://key:secret@bucket/x/?secret_key=y") == "s3://key:***@bucket/x"


HF = "hf://datasets/a/b"


@pytest.mark.parametrize(
    "words",
    [
        ["prepare", str(SAMPLE / "documents.jsonl"), "--tokenizer", "byte", "--out", HF],
        ["prepare", str(SAMPLE / "documents.jsonl"), "--tokenizer", "byte", "--out", "o", "--quarantine", HF],
        ["report", "x.store", "--out", HF],
        ["run", "run.yaml", "--metrics", URL],
        ["info", HF],
        ["versions", HF],
        ["run", "run.yaml", "--checkpoint", HF],
        ["run", "run.yaml", "--checkpoint", HF, "--dry-run"],
        ["queue", "purge", URL],
        ["queue", "status", URL],
        ["competitions", "list", "--registry", URL],
    ],
    ids=" ".join,
)
def test_a_command_that_is_given_a_url_for_a_local_path_says_so(words: list[str], somewhere: Path) -> None:
    Path("in.jsonl").write_text('{"n": 1}\n')
    Path("run.yaml").write_text("source: in.jsonl\nsink: out.jsonl\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert f"'{HF if HF in words else URL}'" in " ".join(result.output.split())
    assert not [path for path in somewhere.rglob("*") if path.name.endswith(":")]


def test_directories_of_the_environment_are_local_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", URL)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        default_cache_directory()
    monkeypatch.setenv("XDG_DATA_HOME", URL)
    with pytest.raises(ConfigError, match="XDG_DATA_HOME"):
        DatasetRegistry()


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a/b", "a/b"),
        ("/a/b", "/a/b"),
        ("C:/a", "C:/a"),
        ("C:\\a", "C:\\a"),
        ("./s3:/a", "./s3:/a"),
        ("file:///a/b", "/a/b"),
        (Path("file:///a/b"), "/a/b"),
        ("~nobody-of-this-name/x", "~nobody-of-this-name/x"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="paths of this kind")
def test_local_paths_pass(given: Any, found: str) -> None:
    assert require_local(given, "it") == Path(found)


def test_a_home_directory_is_found_and_a_password_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    assert require_local("~/x", "it") == Path("/home/me/x")
    with pytest.raises(ConfigError) as caught:
        require_local("ftp://me:secret@host/x", "it")
    assert "secret" not in str(caught.value)


# -- Stores ------------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[str], Any]] = {
    "PretrainDataLoader": lambda url: PretrainDataLoader(url, "byte", 16),
    "streaming": lambda url: PretrainDataLoader(url, "byte", 16, streaming=True),
    "open_inputs": lambda url: open_inputs(url, Recipe(tokenizer="byte"), Options()),
    "open_source": open_source,
    "samples": lambda url: as_sample_dataset(url, None),  # type: ignore[arg-type]
}


@pytest.fixture
def bucket() -> Any:
    """A store in a file system in memory, under a name that does not say so."""
    memory = fsspec.filesystem("memory")
    prepare(SAMPLE / "documents.jsonl", "local.store", Recipe(tokenizer="byte"), budget=MemoryBudget("256 MiB"))
    memory.put("local.store", "/bucket/corpus", recursive=True)
    yield "memory://bucket/corpus"
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("reader", READERS)
def test_a_store_in_a_bucket_is_not_taken_for_raw_files(reader: str, bucket: str) -> None:
    object_stores = () if reader in ("PretrainDataLoader", "open_inputs") else ("s3://b/*.store",)
    for url in (*object_stores, bucket):  # loaders read those of object stores
        with pytest.raises(ConfigError, match=r"\bURL\b"):
            READERS[reader](url)


def test_a_store_behind_a_file_url_is_read(somewhere: Path) -> None:
    prepare(SAMPLE / "documents.jsonl", (somewhere / "a.store").as_uri(), Recipe(tokenizer="byte"))
    url = (somewhere / "a.store").as_uri()
    rows = len(open_store(url))
    assert rows == 64
    assert isinstance(open_source(url), StoreSource)
    loader = PretrainDataLoader(url, "byte", 16)
    assert len(loader) > 0
    loader.close()
    shutil.rmtree(somewhere / "a.store")
