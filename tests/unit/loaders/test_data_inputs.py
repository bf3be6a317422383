"""Inputs that people have: datasets, tables, frames, rows and iterators in loaders, `prepare` and pipelines."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest

import penstock.sources.memory
from lazy_modules import LazyModule
from penstock import (
    ConversationDataLoader,
    MixedDataLoader,
    MLXDataLoader,
    Pipeline,
    PreferenceDataLoader,
    PretrainDataLoader,
    RolloutDataLoader,
    prepare,
)
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.loaders import StreamOptions
from penstock.sources import JsonlSource, open_source
from penstock.sources.inputs import fingerprints_of

datasets = LazyModule("datasets")
ROWS = [{"text": f"row {n} of the water " * (1 + n % 3), "n": n} for n in range(40)]
TABLE = pa.Table.from_pylist(ROWS)
CHATS = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n}"}]}
    for n in range(6)
]
TOKENIZER = "examples/sample/tokenizer"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.chdir(Path(__file__).parents[3])


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    (tmp_path / "parquet").mkdir()
    for part in range(2):
        pq.write_table(TABLE.slice(20 * part, 20), tmp_path / "parquet" / f"{part}.parquet")
    return tmp_path / "parquet"


def shuffled() -> Any:
    """The rows in their order, through an index mapping."""
    return datasets.Dataset.from_list(ROWS[::-1]).select(range(len(ROWS) - 1, -1, -1))


FORMS: dict[str, Callable[[], Any]] = {
    "list of dicts": lambda: ROWS,
    "dict of columns": TABLE.to_pydict,
    "Dataset": lambda: datasets.Dataset.from_list(ROWS),
    "Dataset with indices": shuffled,
    "pandas": lambda: pd.DataFrame(ROWS),
    "Polars": lambda: pl.DataFrame(ROWS),
    "Arrow table in chunks": lambda: pa.concat_tables([TABLE.slice(0, 7), TABLE.slice(7)]),
    "record batch": lambda: TABLE.to_batches()[0],
    "record batches": lambda: TABLE.to_batches(max_chunksize=9),
    "Arrow dataset in memory": lambda: pds.dataset(TABLE),
}
ITERATED: dict[str, Callable[[], Any]] = {
    "generator": lambda: (row for row in ROWS),
    "function": lambda: lambda: iter(ROWS),
    "IterableDataset": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "IterableDataset without features": lambda: datasets.IterableDataset.from_generator(lambda: iter(ROWS)),
    "RecordBatchReader": TABLE.to_reader,
}


def ids(data: Any, cache: Path, **options: Any) -> list[Any]:
    with PretrainDataLoader(data, "byte", 64, cache_dir=cache, shuffle=False, backend="numpy", **options) as loader:
        return [batch.input_ids.tolist() for batch in loader]


@pytest.mark.parametrize("form", FORMS)
def test_data_in_memory_is_prepared_as_its_rows_in_a_file_are(form: str, parquet: Path, tmp_path: Path) -> None:
    assert ids(FORMS[form](), tmp_path / "cache") == ids(parquet, tmp_path / "other")


def test_the_same_rows_in_any_form_find_one_store(tmp_path: Path) -> None:
    for make in FORMS.values():
        ids(make(), tmp_path)
    assert len([*(tmp_path / "stores").glob("[0-9a-f]*")]) == 1
    ids([*ROWS[:-1], {"text": "another", "n": 1}], tmp_path)
    ids(ROWS[::-1], tmp_path)
    assert len([*(tmp_path / "stores").glob("[0-9a-f]*")]) == 3


def test_arrow_data_is_not_copied() -> None:
    dataset = datasets.Dataset(datasets.table.InMemoryTable(TABLE))
    for data in (TABLE, dataset, pd.DataFrame({"text": pd.array(TABLE["text"].to_pylist(), "string[pyarrow]")})):
        before = pa.total_allocated_bytes()
        batch = open_source(data).next_batch(1000)
        assert batch is not None
        assert pa.total_allocated_bytes() - before < 100
    address = batch_address(open_source(dataset).next_batch(40))
    assert address == batch_address(TABLE.to_batches()[0])


def batch_address(batch: pa.RecordBatch | None) -> int:
    assert batch is not None
    return int(batch["text"].buffers()[2].address)


@pytest.mark.parametrize("form", ["pandas", "Polars", "Dataset", "list of dicts"])
def test_chats_in_any_form_have_the_tokens_of_the_file(form: str, tmp_path: Path) -> None:
    import json

    tools = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.0}}}]}
    mixed = [*CHATS, {"messages": [CHATS[0]["messages"][0], tools]}] if form == "list of dicts" else CHATS
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    make = {"pandas": pd.DataFrame, "Polars": pl.DataFrame, "Dataset": datasets.Dataset.from_list}.get(form, list)
    options: dict[str, Any] = {"backend": "numpy", "shuffle": False, "batch_size": 7}
    template = "qwen" if form == "list of dicts" else "chatml"
    found = [
        ConversationDataLoader(data, TOKENIZER, 256, template, cache_dir=tmp_path / "c", **options).get_batch()
        for data in (make(mixed), tmp_path / "chats.jsonl")
    ]
    assert found[0].labels.tolist() == found[1].labels.tolist()
    assert found[0].loss_mask.any()


def test_preferences_come_from_a_dataset_and_mixtures_from_several(tmp_path: Path) -> None:
    pairs = [{"prompt": f"say {n}", "chosen": "good", "rejected": "bad"} for n in range(4)]
    options: dict[str, Any] = {"backend": "numpy", "cache_dir": tmp_path, "batch_size": 2}
    dpo = PreferenceDataLoader(datasets.Dataset.from_list(pairs), TOKENIZER, 64, "chatml", **options)
    assert len(dpo.get_batch().input_ids) == 4
    sources = {"frame": pl.DataFrame(ROWS), "rows": ROWS[:20], "dataset": shuffled()}
    mixed = MixedDataLoader(sources, tokenizer="byte", chunk_size=64, **options)
    assert set(mixed.get_batch().metadata["sources"]) <= set(sources)
    with pytest.raises(ConfigError, match=r"\['train', 'test'\]"):
        MixedDataLoader(datasets.DatasetDict(train=sources["dataset"], test=sources["dataset"]), tokenizer="byte")


def test_rollouts_and_samples_come_from_datasets_too(tmp_path: Path) -> None:
    rollouts = [{"prompt_ids": [1, 2], "response_ids": [3, n], "reward": float(n), "group": "a"} for n in range(4)]
    for data in (datasets.Dataset.from_list(rollouts), pl.DataFrame(rollouts), pd.DataFrame(rollouts)):
        batch = RolloutDataLoader(data, backend="numpy", batch_size=4, shuffle=False).get_batch()
        assert sorted(batch.metadata["rewards"].tolist()) == [0, 1, 2, 3]
    samples = datasets.Dataset.from_list([{"input_ids": [1, 2, n]} for n in range(4)])
    samples.save_to_disk(tmp_path / "saved")
    for each in (samples, tmp_path / "saved", pl.DataFrame(samples.to_list())):
        loader = MLXDataLoader(each, batch_size=4, shuffle=False, backend="numpy")
        assert next(iter(loader))["input_ids"].tolist() == samples["input_ids"][:]


@pytest.mark.parametrize("form", [*FORMS, *ITERATED])
def test_streams_have_every_row_once_and_resume(form: str, tmp_path: Path) -> None:
    make = {**FORMS, **ITERATED}[form]

    def loader() -> PretrainDataLoader:
        options: dict[str, Any] = {"packing": None, "batch_size": 4, "truncation": "right", "backend": "numpy"}
        return PretrainDataLoader(make(), "byte", 256, streaming=StreamOptions(workers="thread"), **options)

    with loader() as whole:
        batches = iter(whole)
        found = [next(batches).input_ids.tolist()]
        state = whole.state_dict()
        found += [batch.input_ids.tolist() for batch in batches]
    texts = [bytes(token for token in row if token < 256).decode() for batch in found for row in batch]
    assert sorted(texts) == sorted(str(row["text"]) for row in ROWS)
    with loader() as second:
        second.load_state_dict(state)
        assert [batch.input_ids.tolist() for batch in second] == found[1:]


def test_a_stream_of_other_rows_does_not_take_the_state() -> None:
    def loader(rows: list[dict[str, Any]]) -> PretrainDataLoader:
        return PretrainDataLoader(rows, "byte", 64, streaming=True, backend="numpy")

    state = loader(ROWS).state_dict()
    loader(list(ROWS)).load_state_dict(state)
    with pytest.raises(ResumeError):
        loader([*ROWS[:-1], {"text": "other", "n": 1}]).load_state_dict(state)


def test_an_iterator_runs_for_one_epoch_and_a_function_for_more() -> None:
    def epoch_of(data: Any, epochs: int) -> list[int]:
        with PretrainDataLoader(data, "byte", 64, streaming=True, backend="numpy") as loader:
            return [sum(batch.num_tokens for batch in loader) for _ in range(epochs)]

    first, second = epoch_of(lambda: iter(ROWS), 2)
    assert first == second > 0
    with pytest.raises(ConfigError, match="runs only once"):
        epoch_of(iter(ROWS), 2)


def test_bad_rows_of_an_iterator_are_skipped_one_by_one_also_after_a_resume() -> None:
    rows: list[Any] = [dict(row) for row in ROWS * 20]
    rows[300]["text"] = rows[500]["text"] = 7

    def loader() -> PretrainDataLoader:
        options: dict[str, Any] = {"packing": None, "shuffle": False, "batch_size": 4, "backend": "numpy"}
        streaming = StreamOptions(workers="thread", on_error="skip")
        return PretrainDataLoader(lambda: iter(rows), "byte", 256, streaming=streaming, **options)

    with loader() as whole:
        batches = iter(whole)
        found = [next(batches).input_ids.tolist() for _ in range(150)]
        state = whole.state_dict()
        rest = [batch.input_ids.tolist() for batch in batches]
        assert sum(whole._engine.reader.counts.rejected.values()) == 2
    assert sum(map(len, found + rest)) == len(rows) - 2
    with loader() as second:
        second.load_state_dict(state)
        assert [batch.input_ids.tolist() for batch in second] == rest


def test_processes_read_what_can_travel_and_threads_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    options = StreamOptions(workers=1, worker_type="process")
    found = []
    for workers in (options, StreamOptions(workers="thread")):
        with PretrainDataLoader(shuffled(), "byte", 64, streaming=workers, backend="numpy") as loader:
            found.append([batch.input_ids.tolist() for batch in loader])
    assert found[0] == found[1]
    with caplog.at_level(logging.WARNING), PretrainDataLoader(iter(ROWS), "byte", 64, streaming=options) as loader:
        assert "1 thread (the rows of IteratorSource(list_iterator) come one after the other" in repr(loader)
    assert "threads, not processes" in caplog.text


def test_an_iterator_has_no_store_to_be_found_again_and_what_the_message_says_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"streaming=True.*prepare\(data"):
        ids(iter(ROWS), tmp_path)
    made = prepare(iter(ROWS), tmp_path / "made.store", Recipe(tokenizer="byte"))
    assert made.manifest.rows == len(ROWS)
    assert ids(tmp_path / "made.store", tmp_path) == ids(ROWS, tmp_path)


def test_prepare_knows_a_store_of_the_same_rows_again(tmp_path: Path) -> None:
    recipe = Recipe(tokenizer="byte")
    assert prepare(pd.DataFrame(ROWS), tmp_path / "a.store", recipe).report is not None
    assert prepare(TABLE, tmp_path / "a.store", recipe).report is None
    with pytest.raises(ConfigError, match="another input"):
        prepare(TABLE.slice(1), tmp_path / "a.store", recipe)


class Squares:
    """A source that somebody wrote."""

    def __init__(self, fingerprint: str | None = None) -> None:
        self._left, self.schema = 3, pa.schema([("text", pa.string())])
        if fingerprint is not None:
            self.fingerprints = lambda: fingerprint

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        self._left -= 1
        return None if self._left < 0 else pa.RecordBatch.from_pydict({"text": [str(self._left**2)]})


def test_a_source_of_ones_own_is_read_by_loaders(tmp_path: Path) -> None:
    with PretrainDataLoader(Squares(), "byte", 64, streaming=True, backend="numpy") as loader:
        assert sum(batch.num_tokens for batch in loader) == 6
        with pytest.raises(ConfigError, match=r"no reset\(\)"):
            list(loader)
    assert ids(Squares("version 1"), tmp_path) == ids([{"text": "4"}, {"text": "1"}, {"text": "0"}], tmp_path)
    with pytest.raises(ConfigError, match="not known before it is read"):
        ids(Squares(), tmp_path)


def test_a_file_source_is_known_by_its_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "more": "two"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "one", "more": "two"}\n')
    a, b = (JsonlSource(tmp_path / f"{name}.jsonl", columns=["text"]) for name in "ab")
    assert [each.xxh3 for each in fingerprints_of(a)] == [each.xxh3 for each in fingerprints_of(b)]
    assert fingerprints_of(a)[-1] != fingerprints_of(JsonlSource(tmp_path / "a.jsonl", columns=["more"]))[-1]


# -- saved datasets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    return tmp_path / "saved"


def test_a_saved_dataset_is_read_from_its_directory(saved: Path, tmp_path: Path) -> None:
    assert [row for batch in Pipeline(saved) for row in batch.to_pylist()] == ROWS
    assert ids(saved, tmp_path / "cache") == ids(ROWS, tmp_path / "cache")
    assert sum(map(len, ids(saved, tmp_path, streaming=True))) > 0
    assert ids(datasets.load_from_disk(saved), tmp_path / "cache") == ids(ROWS, tmp_path / "cache")


def test_a_saved_dataset_without_one_of_its_files_is_an_error(saved: Path) -> None:
    (saved / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="data-00001-of-00002"):
        open_source(saved)


def test_the_index_mapping_of_an_old_saved_dataset_is_followed(saved: Path, tmp_path: Path) -> None:
    order = list(range(39, -1, -2))
    table = pa.table({"indices": pa.array(order, pa.uint64())})
    with pa.ipc.new_stream(saved / "indices.arrow", table.schema) as writer:
        writer.write_table(table)
    import orjson

    state = orjson.loads((saved / "state.json").read_bytes())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (saved / "state.json").write_bytes(orjson.dumps(state))
    assert [row["n"] for batch in Pipeline(saved) for row in batch.to_pylist()] == order
    assert ids(saved, tmp_path / "cache") == ids([ROWS[n] for n in order], tmp_path / "cache")


def test_a_dataset_on_disk_is_hashed_once_until_its_files_change(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(saved.glob("*.arrow"))
    for file in files:
        os.utime(file, (1, 1))  # long ago: a file that has just changed is not remembered

    def found() -> str:
        return fingerprints_of(open_source(datasets.load_from_disk(saved)), memo=tmp_path / "memo.json")[0].xxh3

    first = found()
    assert first == fingerprints_of(open_source(ROWS))[0].xxh3
    monkeypatch.setattr(penstock.sources.memory, "content_hash", lambda _: "hashed again")
    assert found() == first
    assert (
        fingerprints_of(open_source(datasets.load_from_disk(saved).select([0])), memo=tmp_path / "memo.json") != first
    )
    os.utime(files[0], (2, 2))
    assert found() == "hashed again"


def test_of_a_saved_dict_a_split_is_chosen(tmp_path: Path) -> None:
    whole = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:3]))
    whole.save_to_disk(tmp_path / "dict")
    with pytest.raises(ConfigError, match=r"splits \['train', 'test'\].*/dict/train"):
        open_source(tmp_path / "dict")
    assert len(open_source(tmp_path / "dict" / "test").next_batch(10) or ()) == 3


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_inputs_that_cannot_be_meant_are_refused_in_words(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)

    def refused(data: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            PretrainDataLoader(data, "byte", 64, cache_dir=tmp_path)

    refused(datasets.DatasetDict(train=dataset, test=dataset), r"splits \['train', 'test'\].*data\['train'\]")
    refused({"train": dataset}, "splits")
    refused(dataset.with_transform(lambda rows: rows), r"dataset\.map")
    refused(pl.DataFrame(ROWS).lazy(), r"frame\.collect\(\)")
    for series in (pd.Series(["some text"]), pl.Series("a", ["some text"])):
        refused(series, r"series\.to_frame\('text'\)")
        assert len(PretrainDataLoader(series.to_frame("text"), "byte", 64, cache_dir=tmp_path)) == 1
    refused([], "empty list")
    refused(["a.jsonl", {"text": "x"}], "one kind")
    refused([1, 2], "list of int")
    refused(5, "got int")
    with pytest.raises(ConfigError, match="columns="):
        open_source(ROWS, columns=["text"])
    with pytest.raises(ConfigError, match="need a tokenizer"):
        PretrainDataLoader(ROWS)


@pytest.mark.parametrize("empty", [pd.DataFrame({"text": []}), TABLE.slice(0, 0), {"text": []}])
def test_no_rows_are_an_error_before_a_store_is_made(empty: Any, tmp_path: Path) -> None:
    for options in ({"streaming": True}, {"cache_dir": tmp_path}):
        with pytest.raises(DataError, match="no rows"):
            list(PretrainDataLoader(empty, "byte", 64, **options))
    with pytest.raises(DataError, match="no rows"):
        list(PretrainDataLoader(iter([]), "byte", 64, streaming=True))


def test_arrays_in_a_frame_are_lists_of_messages(tmp_path: Path) -> None:
    frame = datasets.Dataset.from_list(CHATS).to_pandas()
    assert isinstance(frame["messages"][0], np.ndarray)
    options: dict[str, Any] = {"cache_dir": tmp_path, "backend": "numpy", "shuffle": False}
    found = [ConversationDataLoader(data, TOKENIZER, 64, "chatml", **options).get_batch() for data in (frame, CHATS)]
    assert found[0].labels.tolist() == found[1].labels.tolist()


def test_pipelines_take_data_as_it_is(parquet: Path) -> None:
    for data in (ROWS, TABLE, str(parquet), pds.dataset(parquet), pl.DataFrame(ROWS), shuffled(), lambda: iter(ROWS)):
        assert [row for batch in Pipeline(data) for row in batch.to_pylist()] == ROWS
    assert sum(batch.num_rows for batch in Pipeline(np.arange(5))) == 5


def test_arrow_datasets_are_known_by_their_files(parquet: Path, tmp_path: Path) -> None:
    assert ids(pds.dataset(parquet), tmp_path) == ids(TABLE, tmp_path)
    first = fingerprints_of(open_source(pds.dataset(parquet)))
    pq.write_table(TABLE.slice(0, 3), parquet / "0.parquet")
    assert fingerprints_of(open_source(pds.dataset(parquet))) != first


@pytest.mark.parametrize("kind", ["generator", "map"])
def test_an_iterator_that_was_refused_keeps_its_first_row(kind: str, tmp_path: Path) -> None:
    rows = map(dict, ROWS) if kind == "map" else (row for row in ROWS)  # only the former has no weak references
    with pytest.raises(ConfigError, match="pass streaming=True"):
        PretrainDataLoader(rows, "byte", 256, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        PretrainDataLoader(rows, "missing/tokenizer.json", 256, streaming=True)
    loader = PretrainDataLoader(rows, "byte", 256, streaming=True, packing=None, shuffle=False, backend="numpy")
    texts = [bytes(row[row < 256].astype("u1")) for batch in loader for row in batch.input_ids]
    assert [text.rstrip(b"\0").decode() for text in texts] == [row["text"] for row in ROWS]


def test_an_iterator_that_was_looked_at_is_not_kept(tmp_path: Path) -> None:
    rows = (row for row in ROWS)
    gone = weakref.ref(rows)
    with pytest.raises(ConfigError, match="pass streaming=True"):
        PretrainDataLoader(rows, "byte", 256, cache_dir=tmp_path)
    del rows
    gc.collect()
    assert gone() is None


def test_texts_in_a_list_are_no_paths(tmp_path: Path) -> None:
    texts = ["Betty is saving money for a new wallet. " * 10, "Water runs."]
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=r"looks like text.*\{'text': text\}"):
            PretrainDataLoader(texts, "byte", 256, cache_dir=tmp_path, streaming=streaming)
    rows = [{"text": text} for text in texts]
    assert len(PretrainDataLoader(rows, "byte", 512, cache_dir=tmp_path, backend="numpy").get_batch().input_ids) == 1


def test_a_name_of_the_hub_is_not_taken_for_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="hf://datasets/openai/gsm8k"):
        PretrainDataLoader("openai/gsm8k", "byte", 256, cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        PretrainDataLoader("data/part.jsonl", "byte", 256, cache_dir=tmp_path)
    assert "hf://" not in str(error.value)
