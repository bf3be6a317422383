"""Text for pretraining: every token of every document, end to end or packed, from any kind of path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import PretrainDataLoader
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError, DataError
from penstock.loaders import StreamOptions
from penstock.transforms.tokenization import ByteTokenizer
from token_stores import make_rows, make_store

BYTES = ByteTokenizer(("<eos>",))
EOS = 256


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("pretrain") / "store", make_rows(29, 11), shard_bytes=300)


def make(store: Path, **more: Any) -> PretrainDataLoader:
    return PretrainDataLoader(store, **{"chunk_size": 8, "batch_size": 3, "backend": "numpy", "prefetch": 0, **more})


def tokens_of(loader: PretrainDataLoader) -> list[int]:
    """All tokens of an epoch, in order; 0 is padding."""
    return [token for batch in loader for token in batch.input_ids.reshape(-1).tolist() if token]


ALL = [token for row in make_rows(29, 11) for token in row]


def test_without_shuffling_the_chunks_are_the_text(store: Path) -> None:
    loader = make(store, shuffle=False)
    assert tokens_of(loader) == ALL
    loader.reset()
    batches = list(loader)
    assert {batch.input_ids.shape for batch in batches[:-1]} == {(3, 8)}
    assert len(loader) == -(-len(ALL) // 24)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    packing=st.sampled_from(["concat", "best_fit", "first_fit", "bfd", "ffd", "wrapped", True]),
    length=st.integers(11, 30),
    size=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_every_token_comes_once_an_epoch(store: Path, packing: Any, length: int, size: int, shuffle: bool) -> None:
    loader = make(store, packing=packing, chunk_size=length, batch_size=size, shuffle=shuffle)
    for _ in range(2):
        found = [token for batch in loader for token in batch.input_ids.reshape(-1).tolist() if token]
        assert sorted(found) == ALL


def test_samples_that_are_cut_from_the_text_have_one_length(store: Path) -> None:
    for batch in make(store, drop_last=True):
        assert batch.input_ids.shape == (3, 8)
        assert batch.num_tokens >= 16


def test_packed_documents_are_never_split(store: Path) -> None:
    rows = make_rows(29, 11)
    for batch in make(store, packing="best_fit", chunk_size=16):
        for place in range(batch.batch_size):
            which = batch.metadata["row"][batch.metadata["sample"] == place].tolist()
            tokens = [token for row in which for token in rows[row]]
            assert batch.input_ids[place, : len(tokens)].tolist() == tokens
            assert (batch.input_ids[place, len(tokens) :] == 0).all()
            begins = np.cumsum([0, *(len(rows[row]) for row in which)])[:-1]
            assert (batch.labels[place, begins] == IGNORE).all(), "nothing predicts the first token of a document"


@pytest.mark.parametrize(
    ("truncation", "wanted"),
    [
        ("right", [[1, 2, 3, 4], [7, 8], [9, 10, 11, 12]]),
        ("left", [[3, 4, 5, 6], [7, 8], [14, 15, 16, 17]]),
        ("split", [[1, 2, 3, 4], [5, 6], [7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [17]]),
        ("drop", [[7, 8]]),
    ],
)
def test_documents_longer_than_a_sample_are_treated_as_asked(
    tmp_path: Path, truncation: Any, wanted: list[list[int]]
) -> None:
    store = make_store(tmp_path / "store", [[1, 2, 3, 4, 5, 6], [7, 8], list(range(9, 18))])
    for packing in (None, "best_fit"):
        loader = make(store, packing=packing, truncation=truncation, chunk_size=4, shuffle=False, padding_free=True)
        found = []
        for batch in loader:
            parts = np.split(batch.input_ids[0], batch.cu_seqlens[1:-1])
            found += [part.tolist() for part in parts]
        assert sorted(found) == wanted


@pytest.mark.parametrize("packing", [None, "best_fit", "first_fit"])
def test_a_document_longer_than_a_sample_is_an_error_that_names_it(tmp_path: Path, packing: Any) -> None:
    store = make_store(tmp_path / "store", [[1], [2] * 6, [3]])
    with pytest.raises(DataError, match=r"truncation='right'.*'drop'"):
        list(make(store, packing=packing, chunk_size=4))


@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_when_all_documents_are_dropped_the_error_says_so(tmp_path: Path, packing: Any) -> None:
    store = make_store(tmp_path / "store", [[1] * 9] * 5)
    with pytest.raises(ConfigError, match="truncation='drop'"):
        list(make(store, packing=packing, truncation="drop", chunk_size=4))


# Raw files


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def encoded(texts: list[str]) -> list[int]:
    return [token for text in texts for token in [*text.encode(), EOS]]


def raw(tmp_path: Path, path: Any, **more: Any) -> PretrainDataLoader:
    options = {"chunk_size": 16, "shuffle": False, "backend": "numpy", "cache_dir": tmp_path / "cache", "pad_id": 0}
    return PretrainDataLoader(path, BYTES, **(options | more))  # type: ignore[arg-type]


def test_raw_text_is_tokenized_with_an_end_to_every_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one", "two ü"])
    assert tokens_of(raw(tmp_path, path)) == encoded(["one", "two ü"])


def test_another_column_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    assert tokens_of(raw(tmp_path, tmp_path / "a.jsonl", text_column="body")) == encoded(["one"])
    with pytest.raises(ConfigError, match=r"'txt'.*'body'"):
        raw(tmp_path, tmp_path / "a.jsonl", text_column="txt")


def test_filters_and_deduplication_are_part_of_what_is_prepared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one", "two", "one"])
    assert tokens_of(raw(tmp_path, path, dedup=["exact"])) == encoded(["one", "two"])
    assert tokens_of(raw(tmp_path, path)) == encoded(["one", "two", "one"])


def test_what_is_done_to_raw_files_is_not_left_undone_in_silence_for_a_store(tmp_path: Path, store: Path) -> None:
    given: list[dict[str, Any]] = [{"dedup": ["exact"]}, {"filters": ["gopher"]}, {"transforms": ["drop_nulls"]}]
    for more in [*given, {"columns": ["text"]}, {"add_bos": True}]:
        (name,) = more
        with pytest.raises(ConfigError, match=rf"{name}.*{name}"):
            raw(tmp_path, store, **more)
        with pytest.raises(ConfigError, match=rf"{name}.*tokenizer="):
            make(store, **more)


def test_raw_files_need_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(ConfigError, match=r"a\.jsonl.*tokenizer="):
        PretrainDataLoader(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"chunk_size": 0}, r"length.*\b0\b"),
        ({"chunk_size": 16.0}, r"\b16\.0\b"),
        ({"chunk_size": "16"}, "'16'"),
        ({"chunk_size": True}, "True"),
        ({"chunk_size": None}, "chunk_size"),
        ({"packing": "bestfit"}, "'best_fit'"),
        ({"packing": 3}, "packing"),
        ({"packing": None, "truncation": "rigth"}, "'right'"),
    ],
)
def test_what_cannot_work_is_refused(store: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(store, **more)


def test_a_misspelt_truncation_is_refused_whatever_the_packing(store: Path) -> None:
    with pytest.raises(ConfigError, match="'right'"):
        make(store, packing="concat", truncation="rigth")


@pytest.mark.parametrize("streaming", ["process", {"workers": "process"}, {}, 1, None, StreamOptions])
def test_streaming_is_true_false_or_options(streaming: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", make_rows(10, 8))
    with pytest.raises(ConfigError, match="StreamOptions"):
        PretrainDataLoader(store, chunk_size=8, streaming=streaming)


def test_a_slice_of_batches_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", make_rows(10, 8))
    with PretrainDataLoader(store, chunk_size=8, backend="numpy") as loader, pytest.raises(TypeError, match="islice"):
        loader[0:2]  # type: ignore[index]


def test_empty_rows_are_left_out_of_batches_that_are_collated_together(tmp_path: Path) -> None:
    rows = [[] if number % 5 == 2 else row for number, row in enumerate(make_rows(64, 8))]
    store = make_store(tmp_path / "s", rows)
    options: dict[str, Any] = {"chunk_size": 8, "packing": None, "shuffle": False, "backend": "numpy"}
    with PretrainDataLoader(store, batch_size=4, pad_to_multiple_of=8, **options) as loader:
        alone = [loader[number].to_numpy() for number in range(len(loader))]
        together = [batch.to_numpy() for batch in loader]
    for one, other in zip(alone, together, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)
