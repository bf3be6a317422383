"""What a loader may be pointed at: stores, directories and globs of them, raw files made into a store once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    ConversationDataLoader,
    MixedDataLoader,
    Pipeline,
    PreferenceDataLoader,
    PretrainDataLoader,
    observe,
    open_store,
)
from penstock.batching.options import Options
from penstock.corpus import prepare as preparation
from penstock.errors import ConfigError, PenstockError, SchemaError
from penstock.loaders.source import open_inputs
from penstock.transforms.tokenization import ByteTokenizer
from token_stores import make_store

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
BYTES = ByteTokenizer(("<eos>",))
A, B = [[1, 2, 3], [4, 5]], [[6], [7, 8, 9]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    make_store(tmp_path / "stores" / "a", A)
    make_store(tmp_path / "stores" / "b", B)
    raw = tmp_path / "raw"
    (raw / "deep").mkdir(parents=True)
    (raw / "one.jsonl").write_text('{"text": "one"}\n')
    (raw / "two.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    (raw / "deep" / "four.jsonl").write_text('{"text": "four"}\n')
    return tmp_path


def make(home: Path, path: Any, tokenizer: Any = None, **more: Any) -> PretrainDataLoader:
    options = {"chunk_size": 6, "packing": None, "shuffle": False, "backend": "numpy", "cache_dir": home / "cache"}
    return PretrainDataLoader(path, tokenizer, **(options | more))


def rows(loader: PretrainDataLoader) -> list[list[int]]:
    """The rows of an epoch, without padding."""
    return [
        row[: int(mask.sum())].tolist() for batch in loader for row, mask in zip(batch.input_ids, batch.attention_mask)
    ]


def texts(loader: PretrainDataLoader) -> list[str]:
    return [bytes(token for token in row if token < 256).decode() for row in rows(loader)]


def test_stores_may_be_named_in_any_way(home: Path) -> None:
    stores = home / "stores"
    assert rows(make(home, stores / "a")) == A
    assert rows(make(home, str(stores / "a"))) == A
    assert rows(make(home, open_store(stores / "a"))) == A
    assert rows(make(home, stores)) == A + B
    assert rows(make(home, stores / "*")) == A + B
    assert rows(make(home, str(stores / "[b]"))) == B
    assert rows(make(home, [stores / "b", str(stores / "a")])) == B + A
    assert rows(make(home, (path for path in [stores / "a", stores / "b"]))) == A + B
    assert rows(make(home, home / "*" / "b")) == B


def test_raw_files_may_be_named_in_any_way(home: Path) -> None:
    raw = home / "raw"
    assert texts(make(home, raw / "one.jsonl", BYTES)) == ["one"]
    assert texts(make(home, raw / "*.jsonl", BYTES)) == ["one", "two", "three"]
    assert sorted(texts(make(home, raw, BYTES))) == ["four", "one", "three", "two"]
    assert texts(make(home, [raw / "two.jsonl", raw / "one.jsonl"], BYTES)) == ["two", "three", "one"]
    assert texts(make(home, (path for path in [raw / "one.jsonl"]), BYTES)) == ["one"]


def test_the_home_directory_may_be_written_with_a_tilde(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    assert rows(make(home, "~/stores/a")) == A
    assert texts(make(home, "~/raw/one.jsonl", BYTES)) == ["one"]


def test_raw_files_are_prepared_once_and_found_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(home, home / "raw", BYTES)
    monkeypatch.setattr(preparation.Pipeline, "run", lambda *_, **__: pytest.fail("it was prepared before"))
    second = make(home, home / "raw", BYTES)
    assert second.plan.fingerprint == first.plan.fingerprint
    assert texts(second) == texts(first)
    assert len([path for path in (home / "cache" / "stores").iterdir() if not path.name.startswith(".")]) == 1


def test_of_several_that_come_at_once_one_prepares(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = preparation.Pipeline.run
    monkeypatch.setattr(preparation.Pipeline, "run", lambda *given, **more: runs.append(1) or run(*given, **more))
    with ThreadPoolExecutor(4) as pool:
        loaders = list(pool.map(lambda _: make(home, home / "raw", BYTES), range(4)))
    assert len(runs) == 1
    assert len({loader.plan.fingerprint for loader in loaders}) == 1


def test_a_changed_file_or_another_tokenizer_is_prepared_anew(home: Path) -> None:
    path = home / "raw" / "one.jsonl"
    first = make(home, path, BYTES)
    other = make(home, path, ByteTokenizer(("<eos>", "<x>")))
    path.write_text('{"text": "changed"}\n')
    changed = make(home, path, BYTES, chunk_size=12)
    assert texts(changed) == ["changed"]
    assert len({loader.sources[0].inputs.identity for loader in (first, changed)}) == 2
    assert other.sources[0].inputs.table.stores[0].path != first.sources[0].inputs.table.stores[0].path


def test_where_a_store_lies_does_not_matter_but_what_is_in_it_does(home: Path) -> None:
    make_store(home / "elsewhere", A)
    there, here = make(home, home / "elsewhere"), make(home, home / "stores" / "a")
    there.load_state_dict(here.state_dict())
    assert there.plan.fingerprint == here.plan.fingerprint
    assert make(home, home / "stores" / "b").plan.fingerprint != here.plan.fingerprint
    forth, back = [make(home, [home / "stores" / name for name in names]).plan for names in ("ab", "ba")]
    assert forth.fingerprint != back.fingerprint


def test_the_tokenizer_of_the_store_is_checked(home: Path) -> None:
    made = make(home, home / "raw", BYTES).sources[0].inputs.table.stores[0].path
    assert open_inputs(made, None, Options()).tokenizer is None
    make(home, made, BYTES)
    other = ByteTokenizer(("<eos>", "<pad>"))
    with pytest.raises(ConfigError, match=rf"{BYTES.fingerprint}.*{other.fingerprint}"):
        make(home, made, other)


def test_stores_of_other_tokenizers_are_not_read_as_one(home: Path) -> None:
    one = make(home, home / "raw", BYTES).sources[0].inputs.table.stores[0].path
    two = make(home, home / "raw", ByteTokenizer(("<eos>", "<x>"))).sources[0].inputs.table.stores[0].path
    with pytest.raises(SchemaError):
        make(home, [one, two])


def test_padding_is_the_padding_token_or_else_the_end_of_a_text(home: Path) -> None:
    raw = home / "raw" / "*.jsonl"
    assert make(home, raw, BYTES).get_batch().input_ids[0, -1] == 256
    assert make(home, raw, BYTES, pad_id=7).get_batch().input_ids[0, -1] == 7
    assert make(home, home / "stores" / "a").get_batch().input_ids[1, -1] == 0


@pytest.mark.parametrize("tokenizer", [None, BYTES])
@pytest.mark.parametrize("name", ["nothing", "nothing.jsonl", "noth*ng", "raw/*.parquet"])
def test_a_path_that_is_not_there_is_said_to_be_missing(home: Path, name: str, tokenizer: Any) -> None:
    with pytest.raises(FileNotFoundError):
        make(home, home / name, tokenizer)
    with pytest.raises(FileNotFoundError):
        make(home, [home / "stores" / "a", home / name], tokenizer)


def test_an_empty_directory_holds_nothing(home: Path) -> None:
    (home / "empty").mkdir()
    for tokenizer in (None, BYTES):
        with pytest.raises(FileNotFoundError, match=r"\bempty\b"):
            make(home, home / "empty", tokenizer)


@pytest.mark.parametrize("path", [None, 3, [None], [3], 1.5])
def test_what_is_no_path_is_refused(home: Path, path: Any) -> None:
    with pytest.raises(ConfigError, match=r"\bpath\b"):
        make(home, path)


def test_an_empty_list_of_paths_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError):
        make(home, [])


def test_stores_and_raw_files_together_are_refused(home: Path) -> None:
    for paths in ([home / "stores" / "a", home / "raw"], [home / "raw", home / "stores" / "a"]):
        with pytest.raises(ConfigError, match=r"stores.*\braw\b"):
            make(home, paths, BYTES)


def test_a_url_of_an_unknown_kind_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError):
        make(home, "nope://bucket/corpus", BYTES)


def test_a_file_that_cannot_be_read_leaves_no_store_behind(home: Path) -> None:
    (home / "raw" / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(PenstockError, match=r"bad.jsonl"):
        make(home, home / "raw" / "bad.jsonl", BYTES)
    (home / "raw" / "bad.jsonl").write_text(json.dumps({"text": "fine"}) + "\n")
    assert texts(make(home, home / "raw" / "bad.jsonl", BYTES)) == ["fine"]


def test_closing_a_loader_leaves_a_store_that_was_handed_to_it_open(home: Path) -> None:
    store = open_store(home / "stores" / "a")
    make(home, store).close()
    assert store[0]["input_ids"].tolist() == A[0]


@pytest.mark.parametrize("kind", ["pretrain", "conversation", "preference", "mixed"])
def test_raw_files_are_prepared_with_progress_unless_it_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [{"role": "assistant", "content": "b"}]
    row: dict[str, object] = {"messages": [{"role": "user", "content": "a"}, *answer]}
    if kind == "preference":
        row = {"prompt": [{"role": "user", "content": "a"}], "chosen": answer, "rejected": answer}
    elif kind in ("pretrain", "mixed"):
        row = {"text": "some words"}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 4)
    seen: list[str] = []
    real = observe.pipeline_progress

    def noted(pipeline: Pipeline) -> observe.LiveProgress | observe.LineProgress:
        seen.append(repr(pipeline.source))
        return real(pipeline)

    monkeypatch.setattr(observe, "pipeline_progress", noted)
    options: dict[str, Any] = {"batch_size": 2, "backend": "numpy"}
    template = {"chat_template": "chatml"} if kind in ("conversation", "preference") else {}
    for number, progress in enumerate((False, True, True)):
        options |= {"cache_dir": tmp_path / f"cache{min(number, 1)}", "progress": progress}
        if kind == "mixed":
            MixedDataLoader({"one": path}, {"one": 1.0}, tokenizer="byte", **options).close()
        else:
            loaders = {
                "pretrain": PretrainDataLoader,
                "conversation": ConversationDataLoader,
                "preference": PreferenceDataLoader,
            }
            loaders[kind](path, TOKENIZER, **template, **options).close()
        assert len(seen) == min(number, 1)  # the third time the store is there
    assert str(path) in seen[0]
    with pytest.raises(ConfigError, match="progress must be True or False"):
        PretrainDataLoader(path, "byte", batch_size=2, backend="numpy", progress="no")  # type: ignore[arg-type]
