"""Tokenizers and data by their names on the Hub, from a server on this machine and from the Hub's cache."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fake_hub import SHA, FakeHub, serving, use_hub
from penstock import Pipeline, PretrainDataLoader, open_store
from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.files.hub import fetch_url
from penstock.sources import open_source
from penstock.transforms.tokenization import load_tokenizer

SAMPLE = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(tmp_path / "hf", monkeypatch) as made:
        files = {file.name: file.read_bytes() for file in SAMPLE.iterdir()}
        others = {"model.safetensors": b"weights", "modeling_tiny.py": b"raise SystemExit", "tokenizer.py": b"raise"}
        made.repositories["models/acme/tiny"] = files | others
        yield made


def test_a_tokenizer_is_loaded_by_its_name(hub: FakeHub, tmp_path: Path) -> None:
    found = load_tokenizer("acme/tiny")
    assert found.fingerprint == load_tokenizer(SAMPLE).fingerprint
    assert found.name == "acme/tiny"
    assert found.chat_template == load_tokenizer(SAMPLE).chat_template
    fetched = {file.name for file in (tmp_path / "hf").rglob("snapshots/*/*")}
    assert fetched == {file.name for file in SAMPLE.iterdir()}, "code and weights stay where they are"
    assert load_tokenizer(f"acme/tiny@{SHA}").fingerprint == load_tokenizer("acme/tiny@v1").fingerprint


def test_a_loader_takes_the_name_and_the_store_keeps_it(hub: FakeHub, tmp_path: Path) -> None:
    with PretrainDataLoader([{"text": "water"}], "acme/tiny", 16, cache_dir=tmp_path, backend="numpy") as loader:
        notes = loader.sources[0].inputs.table.stores[0].manifest.lineage[-1].notes
    assert notes["tokenizer"] == notes["tokenizer_path"] == "acme/tiny"


def test_the_cache_is_used_where_the_hub_cannot_be_reached(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_tokenizer("acme/tiny")
    asked = len(hub.requests)
    for url, offline in ((NOWHERE, False), (hub.url, True)):
        use_hub(monkeypatch, url, tmp_path / "hf", offline=offline)
        assert load_tokenizer("acme/tiny").vocab_size == 893
    assert len(hub.requests) == asked


def test_what_cannot_be_fetched_says_why(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories |= {"models/acme/gated": {}, "models/acme/empty": {"README.md": b""}}
    hub.gated.add("models/acme/gated")

    def refused(name: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            load_tokenizer(name)

    refused("acme/none", "no such file or directory.*no repository 'acme/none'.*check the name")
    refused("acme/gated", "is gated: accept its terms at http.*acme/gated")
    refused("acme/tiny@v9", "no revision 'v9'")
    refused("acme/empty", "acme/empty has no tokenizer.json")
    use_hub(monkeypatch, NOWHERE, tmp_path / "elsewhere")
    refused("acme/tiny", f"{NOWHERE} cannot be reached.*HF_ENDPOINT")
    with pytest.raises(ConnectionError, match=f"dataset 'acme/rows'.*{NOWHERE} cannot be reached.*HF_ENDPOINT"):
        open_source("hf://datasets/acme/rows/a.jsonl")
    use_hub(monkeypatch, hub.url, tmp_path / "elsewhere", offline=True)
    refused("acme/tiny", "HF_HUB_OFFLINE is set")


@pytest.mark.parametrize("name", ["model/", "./model", "a/b/c", "tokenizer.json", "missing/tokenizer.json", "~/model"])
def test_a_path_is_no_name_on_the_hub(name: str, hub: FakeHub) -> None:
    with pytest.raises(ConfigError, match="no such file or directory; pass"):
        load_tokenizer(name)
    assert not hub.requests


def test_a_directory_of_that_name_comes_first(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").symlink_to(SAMPLE)
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("acme/tiny").vocab_size == 893
    assert not hub.requests


def test_the_command_line_takes_a_name(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the water"}\n')
    out = tmp_path / "out.store"
    command = ["prepare", str(tmp_path / "in.jsonl"), "--out", str(out), "--tokenizer"]
    assert CliRunner().invoke(app, [*command, "acme/tiny"]).exit_code == 0
    assert open_store(out).manifest.rows == 1
    missing = CliRunner().invoke(app, [*command, "acme/no"])
    assert missing.exit_code == 1
    assert "has no repository 'acme/no'" in " ".join(missing.output.split())


def test_a_missing_tiktoken_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "tiktoken":
            raise ModuleNotFoundError("No module named 'tiktoken'", name=name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path / "cl100k_base.tiktoken").write_text("IQ== 0\n")
    for spec in ("cl100k_base", tmp_path / "cl100k_base.tiktoken"):
        with pytest.raises(ConfigError, match=r"tiktoken, which is not installed.*penstock\[tiktoken\]"):
            load_tokenizer(spec)


# -- data --------------------------------------------------------------------------------------------------------------

ROWS = [{"text": f"row {n}"} for n in range(6)]


@pytest.fixture
def corpus(hub: FakeHub, tmp_path: Path) -> str:
    files = {"README.md": b"about", "other/c.jsonl": b'{"text": "other"}\n'}
    for part in range(2):
        pq.write_table(pa.Table.from_pylist(ROWS[3 * part : 3 * part + 3]), tmp_path / "part.parquet")
        files[f"data/train-{part}.parquet"] = (tmp_path / "part.parquet").read_bytes()
    hub.repositories["datasets/acme/corpus"] = files
    return "hf://datasets/acme/corpus"


@pytest.mark.parametrize("path", ["data", "data/*.parquet", "data/train-*", "**/train-*.parquet", "**/*.parquet"])
def test_data_of_the_hub_is_read_by_its_url(corpus: str, path: str, hub: FakeHub, tmp_path: Path) -> None:
    assert [row for batch in Pipeline(f"{corpus}/{path}") for row in batch.to_pylist()] == ROWS
    assert not [url for url in hub.requests if "resolve" in url and ("other" in url or "README" in url)]
    assert not list((tmp_path / "hf").rglob("*.parquet"))
    pinned = corpus.replace("corpus", "corpus@v1")
    assert len(next(iter(Pipeline(f"{pinned}/data/train-0.parquet")))) == 3


def test_data_in_the_cache_is_read_offline_and_a_part_of_it_is_not_taken_for_all(
    corpus: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(path: str) -> int:
        with PretrainDataLoader(f"{corpus}/{path}", "byte", 8, cache_dir=tmp_path / "c", backend="numpy") as loader:
            return sum(batch.num_tokens for batch in loader)

    one = tokens("data/train-0.parquet")
    fetch_url(f"{corpus}/data/train-0.parquet")
    use_hub(monkeypatch, hub.url, tmp_path / "hf", offline=True)
    assert tokens("data/train-0.parquet") == one
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        tokens("data")


def test_what_the_hub_does_not_have_is_named(corpus: str, hub: FakeHub) -> None:
    for url, error, words in (
        (f"{corpus}/nothing/*.parquet", FileNotFoundError, "no file matches 'hf://datasets/acme/corpus/nothing"),
        (f"{corpus}/nothing", FileNotFoundError, "hf://datasets/acme/corpus/nothing"),
        ("hf://datasets/acme/no/data", ConfigError, "no repository 'acme/no'"),
        ("hf://datasets/corpus", ConfigError, "owner/name"),
    ):
        with pytest.raises(error, match=words):
            Pipeline(url)
