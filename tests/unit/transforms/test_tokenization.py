"""`Tokenize`: rows of ids from rows of text, with every token accounted for."""

from __future__ import annotations

import json
import logging
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from penstock import Pipeline, PipelineConfig
from penstock.arrays.truncation import Policy
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.pipeline.stages import Fitting
from penstock.sinks import MemorySink, ParquetSink
from penstock.sources import JsonlSource, MemorySource
from penstock.transforms.tokenization import ByteTokenizer, Tokenize, load_tokenizer

BOS, EOS = 256, 257


def trained() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the water feeds the turbine"] * 10, trainer)
    return made


def batch_of(texts: list[str], **columns: list[Any]) -> pa.RecordBatch:
    return pa.record_batch({"text": pa.array(texts, pa.string()), **{name: pa.array(v) for name, v in columns.items()}})


def ids_of(made: pa.RecordBatch) -> list[list[int]]:
    made.validate(full=True)
    return made.column("input_ids").to_pylist()  # type: ignore[no-any-return]


def test_ids_replace_the_text_and_other_columns_stay() -> None:
    made = Tokenize("byte").transform(batch_of(["ab", ""], id=[7, 8], more=["x", None]))
    assert made.schema.names == ["id", "more", "input_ids"]
    assert made.schema.field("input_ids").type == pa.list_(pa.uint16())
    assert made.to_pylist() == [
        {"id": 7, "more": "x", "input_ids": [97, 98]},
        {"id": 8, "more": None, "input_ids": []},
    ]


def test_keep_names_the_columns_that_stay() -> None:
    batch = batch_of(["ab"], id=[7], more=["x"])
    assert Tokenize("byte", keep=["text", "id"]).transform(batch).schema.names == ["text", "id", "input_ids"]
    assert Tokenize("byte", keep=[]).transform(batch).schema.names == ["input_ids"]
    assert Tokenize("byte", keep=(name for name in ["id"])).transform(batch).schema.names == ["id", "input_ids"]
    assert Tokenize("byte", keep="more").transform(batch).schema.names == ["more", "input_ids"]
    assert Tokenize("byte", into="text").transform(batch).column("text").to_pylist() == [[97, 98]]
    with pytest.raises(SchemaError, match="'none'"):
        Tokenize("byte", keep=["none"]).transform(batch)
    with pytest.raises(SchemaError, match="'id'"):
        Tokenize("byte", into="id").transform(batch)


def test_bos_and_eos_are_added_once() -> None:
    texts = ["ab", "", "<bos>ab", "ab<eos>", "<bos><eos>", "<eos>"]
    both = Tokenize("byte", add_bos=True, add_eos=True, parse_special=True).transform(batch_of(texts))
    ab = [BOS, 97, 98, EOS]
    assert ids_of(both) == [ab, [BOS, EOS], ab, ab, [BOS, EOS], [BOS, EOS]]
    eos = Tokenize("byte", add_eos=True, parse_special=True).transform(batch_of(texts))
    assert ids_of(eos) == [[97, 98, EOS], [EOS], ab, [97, 98, EOS], [BOS, EOS], [EOS]]
    text = Tokenize("byte", add_eos=True).transform(batch_of(["<eos>"]))
    assert ids_of(text) == [[*b"<eos>", EOS]], "what the data says is text"


def rows_in_python(
    document: list[int], *, bos: bool, eos: bool, most: int, how: Policy, stride: int
) -> tuple[list[list[int]], int]:
    """The rows of one document, and how many of its tokens are in none of them."""
    whole = [*document, *([EOS] if eos else [])]
    room = most - bos
    front = [BOS] if bos else []
    if len(whole) <= room:
        return [front + whole], 0
    if how == "drop":
        return [], len(whole)
    if how == "left":
        return [front + whole[-room:]], len(whole) - room
    if how == "right":
        return [front + whole[:room]], len(whole) - room
    rows = []
    at = 0
    while True:
        rows.append(front + whole[at : at + room])
        if at + room >= len(whole):
            return rows, 0
        at += room - stride


@given(
    texts=st.lists(st.text("ab", max_size=14), max_size=6),
    bos=st.booleans(),
    eos=st.booleans(),
    most=st.integers(4, 9),
    how=st.sampled_from(["drop", "left", "right", "split"]),
    stride=st.integers(0, 2),
    least=st.integers(0, 4),
)
def test_every_way_of_cutting_agrees_with_python(
    texts: list[str], bos: bool, eos: bool, most: int, how: Policy, stride: int, least: int
) -> None:
    stride = stride if how == "split" else 0
    tokenize = Tokenize(
        "byte", add_bos=bos, add_eos=eos, max_length=most, truncation=how, stride=stride, min_length=least
    )
    made = tokenize.transform(batch_of(texts, id=list(range(len(texts)))))
    expected = []
    lost = short = 0
    for number, text in enumerate(texts):
        rows, dropped = rows_in_python(list(text.encode()), bos=bos, eos=eos, most=most, how=how, stride=stride)
        lost += dropped
        for place, row in enumerate(rows):
            if len(row) < least:
                short += 1
                lost += max(len(row) - bos - (min(stride, len(row) - bos) if place else 0), 0)
            else:
                expected.append({"id": number, "input_ids": row})
    assert made.to_pylist() == expected
    assert sum(tokenize.dropped_tokens.values()) == lost
    assert tokenize.counts.get(f"shorter than {least} tokens", 0) == short


@given(text=st.text("abc", max_size=40), most=st.integers(2, 9), stride=st.integers(0, 7))
def test_pieces_of_a_split_document_put_together_are_the_document(text: str, most: int, stride: int) -> None:
    if stride >= most:
        return
    made = Tokenize("byte", max_length=most, truncation="split", stride=stride).transform(batch_of([text]))
    rows = ids_of(made)
    assert [*rows[0], *(token for row in rows[1:] for token in row[stride:])] == list(text.encode())
    assert all(row[:stride] == before[-stride:] for before, row in pairwise(rows) if stride)


def test_what_is_left_out_is_counted_by_reason_in_rows_and_tokens() -> None:
    batch = batch_of(["a" * 10, "b" * 3, "c" * 12])
    dropping = Tokenize("byte", max_length=5, truncation="drop", min_length=4)
    dropping.begin_attempt()
    assert ids_of(dropping.transform(batch)) == []
    assert dropping.end_attempt()[0] == {"longer than 5 tokens": 2, "shorter than 4 tokens": 1}
    assert dropping.dropped_tokens == {"in rows longer than 5 tokens": 22, "in rows shorter than 4 tokens": 3}
    cutting = Tokenize("byte", max_length=5, truncation="right")
    cutting.begin_attempt()
    cutting.transform(batch)
    assert cutting.counts == {"cut to 5 tokens": 2, "tokens left out: cut off on the right": 12}
    assert cutting.end_attempt()[0] == {}, "no row was dropped"
    cutting.reset()
    assert cutting.dropped_tokens == {}
    splitting = Tokenize("byte", max_length=5, truncation="split")
    splitting.transform(batch)
    assert splitting.counts == {"split into rows of at most 5 tokens": 2}


def test_a_row_too_long_is_an_error_that_names_it_and_the_ways_out() -> None:
    tokenize = Tokenize("byte", add_eos=True, max_length=4)
    assert ids_of(tokenize.transform(batch_of(["abc"]))) == [[*b"abc", EOS]]
    with pytest.raises(DataError, match=r"max_length=4.*'split'") as caught:
        tokenize.transform(batch_of(["abc", "abcd"]))
    assert caught.value.row == 1


def test_a_null_text_and_a_column_that_is_no_text_are_errors() -> None:
    with pytest.raises(DataError, match=r"'text'.*row 1\b"):
        Tokenize("byte").transform(pa.record_batch({"text": ["a", None]}))
    with pytest.raises(SchemaError, match=r"'text'.*\bint64\b"):
        Tokenize("byte").transform(pa.record_batch({"text": [1]}))
    with pytest.raises(SchemaError, match="'body'"):
        Tokenize("byte", "body").transform(batch_of(["a"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": "middle", "max_length": 3}, "truncation"),
        ({"truncation": "right"}, "max_length"),
        ({"stride": 1}, "max_length"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": 1, "add_bos": True}, "max_length"),
        ({"max_length": 3, "min_length": 4}, "max_length"),
        ({"max_length": 4, "truncation": "right", "stride": 1}, r"stride=1.*truncation='split'"),
        ({"max_length": 4, "truncation": "split", "stride": 4}, "stride=4"),
        ({"min_length": -1}, "min_length"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenize("byte", **options)


def test_a_token_the_tokenizer_does_not_have_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"add_eos=True.*load_tokenizer"):
        Tokenize(ByteTokenizer(special=()), add_eos=True)
    plain = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ConfigError, match="add_bos=True"):
        Tokenize(plain, add_bos=True)


@pytest.mark.parametrize("layout", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_text_in_other_layouts_and_slices_gives_the_same_ids(layout: pa.DataType) -> None:
    texts = pa.array(["left out", "the water", "日本", ""]).cast(layout)
    batch = pa.record_batch({"text": texts, "id": [0, 1, 2, 3]})[1:]
    made = Tokenize("byte", add_eos=True).transform(batch)
    assert ids_of(made) == [[*text.encode(), EOS] for text in ("the water", "日本", "")]
    assert made.column("id").to_pylist() == [1, 2, 3]


def test_an_empty_batch_keeps_its_columns() -> None:
    made = Tokenize("byte", max_length=3, truncation="split").transform(batch_of(["abcd"], id=[1])[:0])
    assert (made.num_rows, made.schema.names) == (0, ["id", "input_ids"])


def test_the_fingerprint_follows_tokenizer_and_options() -> None:
    same = (
        Tokenize("byte", max_length=4, truncation="right"),
        Tokenize(ByteTokenizer(), max_length=4, truncation="right"),
    )
    assert same[0].fingerprint == same[1].fingerprint
    options: list[dict[str, Any]] = [
        {},
        {"add_bos": True},
        {"add_eos": True},
        {"max_length": 5},
        {"max_length": 5, "truncation": "left"},
        {"max_length": 5, "truncation": "split"},
        {"max_length": 5, "truncation": "split", "stride": 1},
        {"min_length": 1},
        {"parse_special": True},
        {"keep": ["id"]},
        {"into": "ids"},
    ]
    prints = [Tokenize("byte", **given).fingerprint for given in options]
    prints += [Tokenize(ByteTokenizer(special=())).fingerprint, Tokenize(trained()).fingerprint, same[0].fingerprint]
    assert len(set(prints)) == len(prints)
    assert json.loads(prints[0])["version"] == 1


def write_jsonl(path: Path, rows: int) -> list[str]:
    texts = [f"the water feeds turbine {number}: 日本 🎉 " * (number % 5) for number in range(rows)]
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": number, "text": text}) + "\n")
    return texts


@pytest.mark.parametrize("workers", ["auto", "process"])
def test_a_pipeline_tokenizes_files_into_files(tmp_path: Path, workers: str) -> None:
    texts = write_jsonl(tmp_path / "in.jsonl", 500)
    tokenizer = trained()
    tokenize = Tokenize(tokenizer, add_eos=True, max_length=64, truncation="right")
    report = Pipeline(
        JsonlSource(tmp_path / "in.jsonl"),
        [tokenize],
        ParquetSink(tmp_path / "out.parquet"),
        config=PipelineConfig(workers=workers),  # type: ignore[arg-type]
    ).run()
    table = pq.read_table(tmp_path / "out.parquet")
    eos = tokenizer.token_to_id("</s>")
    whole = [[*tokenizer.encode(text).ids, eos] for text in texts]
    assert table["input_ids"].to_pylist() == [ids[:64] for ids in whole]
    assert table["id"].to_pylist() == list(range(500))
    lost = sum(max(len(ids) - 64, 0) for ids in whole)
    assert lost > 0
    assert report.changed["tokens left out: cut off on the right"] == lost
    assert report.changed["cut to 64 tokens"] == sum(len(ids) > 64 for ids in whole)
    assert sum(tokenize.dropped_tokens.values()) == lost


def test_a_bad_row_in_a_pipeline_is_left_out_alone() -> None:
    sink = MemorySink()
    rows = [{"text": text} for text in ("ab", "abcdef", None, "cd")]
    report = Pipeline(
        MemorySource(rows), [Tokenize("byte", max_length=4)], sink, config=PipelineConfig(on_error="skip")
    ).run()
    assert sink.rows() == [{"input_ids": [97, 98]}, {"input_ids": [99, 100]}]
    assert sum(report.skipped.values()) == 2


def test_a_copy_in_another_process_gives_the_same_ids() -> None:
    tokenize = Tokenize(load_tokenizer(trained(), eos="</s>"), add_eos=True)
    batch = batch_of(["the water", "日本 🎉"])
    copied = pickle.loads(pickle.dumps(tokenize))  # noqa: S301 - our own
    assert copied.transform(batch).equals(tokenize.transform(batch))
    assert copied.fingerprint == tokenize.fingerprint


def test_the_budget_has_the_tokenizer_loaded_before_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tokenize = Tokenize(trained())
    assert isinstance(tokenize, Fitting)
    tokenize.fit_budget(1 << 30)
    assert "with gigatoken" in caplog.text
    Tokenize("byte").fit_budget(1 << 30)


def test_texts_with_nuls_controls_and_lone_surrogate_bytes() -> None:
    texts = ["nul\0 in the middle", "\x01\x02\x7f\u0085", "\ufffe\uffff\U0010ffff"]
    for spec in ("byte", trained()):
        tokenize = Tokenize(spec)
        for text, ids in zip(texts, tokenize.transform(batch_of(texts)).column("input_ids")):
            assert tokenize.tokenizer.decode(ids.values.to_numpy()) == text
        surrogate = pa.array([b"fine", b"\xed\xb0\x80"], pa.binary()).view(pa.string())
        with pytest.raises(DataError, match=r"row 1\b"):
            tokenize.transform(pa.record_batch({"text": surrogate}))
