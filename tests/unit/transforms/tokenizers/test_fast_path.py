"""The fast path is used where it is exact, and its mistakes never leave the tokenizer."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import AddedToken, pre_tokenizers
from trained_tokenizers import HUGGING_FACE, encoding

from penstock.transforms._tokenizers import fast
from penstock.transforms._tokenizers.fast import Backends, compared_rows
from penstock.transforms._tokenizers.loaded import LoadedTokenizer
from penstock.transforms.text import utf8
from penstock.transforms.tokenization import load_tokenizer

LOGGER = "penstock.transforms.tokenization"


def fresh(name: str = "gpt2") -> LoadedTokenizer:
    made = load_tokenizer(HUGGING_FACE[name]())
    assert isinstance(made, LoadedTokenizer)
    return made


def spoil(monkeypatch: pytest.MonkeyPatch, wrong: bytes) -> list[int]:
    """From now on gigatoken gets rows with these bytes wrong. Returns the rows of each of its calls."""
    calls: list[int] = []
    encode = Backends.encode

    def spoiled(self: Backends, data: Any) -> Any:
        rows = encode(self, data)
        calls.append(len(data.bounds) - 1)
        values = rows.values.copy()
        for row, (start, stop) in enumerate(zip(data.bounds, data.bounds[1:])):
            if wrong in data.data[start:stop].tobytes():
                values[rows.bounds[row]] += 1
        return rows._replace(values=values)

    monkeypatch.setattr(Backends, "encode", spoiled)
    return calls


def ids_of(name: str, values: list[str]) -> list[list[int]]:
    return [one.ids for one in HUGGING_FACE[name]().encode_batch(values, add_special_tokens=False)]


def test_the_log_says_once_which_path_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for name, level, words in (("gpt2", "INFO", "with gigatoken"), ("wordpiece", "WARNING", "WordPiece models")):
        caplog.clear()
        tokenizer = fresh(name)
        for _ in range(3):
            tokenizer.encode(pa.array(["the water"]))
        assert [(record.levelname, words in record.message) for record in caplog.records] == [(level, True)]


def test_a_difference_in_the_first_rows_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = spoil(monkeypatch, b"turbine")
    tokenizer = fresh()
    values = ["the water", "a turbine", "the pipe"]
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)
    assert "a turbine" in (tokenizer.slow_because() or "")
    assert "a turbine" in caplog.text
    before = len(calls)
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)
    assert len(calls) == before, "once it was wrong, it is not asked again"
    assert caplog.text.count("slower reference") == 1


def test_a_difference_found_in_passing_has_the_whole_batch_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transforms._tokenizers.loaded.FAST_BYTES", 2000)
    tokenizer = fresh()
    tokenizer.encode(pa.array(["the first rows, which are right"] * 100))
    assert tokenizer.slow_because() is None
    spoil(monkeypatch, b"turbine")
    values = [f"turbine number {number} in a row" for number in range(20_000)]
    sampled = np.flatnonzero(compared_rows(utf8(pa.array(values))))
    assert len(sampled), "one of these rows must be in the sample"
    assert sampled[0] > 100, "and not in the first piece"
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)
    assert "turbine" in (tokenizer.slow_because() or "")


def test_a_difference_in_the_probes_refuses_before_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spoil(monkeypatch, "日本語".encode())
    tokenizer = fresh()
    assert tokenizer.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])
    assert len(calls) == 1
    assert tokenizer.slow_because() is not None


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), type("PanicException", (BaseException,), {})("index out of range")]
)
def test_a_failure_of_the_fast_path_is_answered_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    tokenizer = fresh()
    tokenizer.encode(pa.array(["warm"]))

    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Backends, "encode", fail)
    assert tokenizer.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])
    assert str(error) in (tokenizer.slow_because() or "")


def test_an_interrupt_is_not_mistaken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh()
    tokenizer.encode(pa.array(["warm"]))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Backends, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(pa.array(["the water"]))
    assert tokenizer.slow_because() is None


def test_without_gigatoken_the_reference_is_used_and_the_remedy_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    for spec, expected in ((HUGGING_FACE["gpt2"](), ids_of("gpt2", ["the water"])[0]), (encoding(), None)):
        caplog.clear()
        tokenizer = load_tokenizer(spec)
        ids = tokenizer.encode(pa.array(["the water"])).to_pylist()[0]
        assert ids == (expected or encoding().encode("the water"))
        assert "penstock[fast]" in caplog.text


def _no_splitting(made: tokenizers.Tokenizer) -> None:
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _single_word(made: tokenizers.Tokenizer) -> None:
    made.add_tokens([AddedToken("[X]", single_word=True)])


@pytest.mark.parametrize("change", [_no_splitting, _single_word])
def test_models_that_gigatoken_loads_but_gets_wrong_are_refused(change: Any) -> None:
    made = tokenizers.Tokenizer.from_str(HUGGING_FACE["gpt2"]().to_str())
    change(made)
    tokenizer = load_tokenizer(made)
    values = ["a[X]b", "the water feeds 12 pipes", "[X] x"]
    assert tokenizer.encode(pa.array(values)).to_pylist() == [made.encode(text).ids for text in values]
    assert isinstance(tokenizer, LoadedTokenizer)
    assert tokenizer.slow_because() is not None


def test_the_sample_depends_on_the_row_alone() -> None:
    values = [f"row {number} of text" * (number % 5 + 1) for number in range(3000)] + ["", "short"]
    whole = compared_rows(utf8(pa.array(values)), 64)
    assert 20 < whole.sum() < 100
    parts = [compared_rows(utf8(pa.array(values)[at : at + 7]), 64) for at in range(0, len(values), 7)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(compared_rows(utf8(pa.array(values[::-1], pa.large_string())), 64), whole[::-1])


def test_the_first_rows_are_compared_and_then_only_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh()
    tokenizer.encode(pa.array(["warm"]))
    compared: list[int] = []
    reference = tokenizer._reference.ids
    monkeypatch.setattr(
        tokenizer._reference,
        "ids",
        lambda texts, **mode: compared.append(len(texts)) or reference(texts, **mode),
    )
    values = pa.array([f"row number {number}" for number in range(500)])
    tokenizer.encode(values)
    assert compared[0] >= 63
    seen = sum(compared)
    tokenizer.encode(values)
    assert sum(compared) - seen == compared_rows(utf8(values)).sum()


def test_what_is_remembered_is_forgotten_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = SimpleNamespace(bytes=5000)
    loads: list[int] = []
    monkeypatch.setattr(fast, "resident_bytes", lambda: resident.bytes)
    tokenizer = fresh()
    tokenizer.fit_budget(1334)
    backends = tokenizer._fast[False]._backends
    assert backends is not None
    load = backends._load
    monkeypatch.setattr(backends, "_load", lambda: loads.append(1) or load())
    monkeypatch.setattr(backends, "_least_text", 100)
    values = ["the water feeds the turbine"] * 10
    # Allowed are three quarters of 1334 bytes above the least since the last time.
    for now, expected in ((5000, 0), (6000, 0), (4000, 0), (4900, 0), (5001, 1), (5001, 1), (6000, 1), (6100, 2)):
        resident.bytes = now
        for _ in range(2):
            assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)
        assert len(loads) == expected
    monkeypatch.setattr(backends, "_least_text", 1 << 20)
    resident.bytes = 100_000
    tokenizer.encode(pa.array(values))
    tokenizer.encode(pa.array(values))
    assert len(loads) == 2, "not before enough text was encoded to make up for the loading"


def test_special_tokens_are_text_unless_they_are_asked_for_on_both_paths() -> None:
    document = orjson.loads(HUGGING_FACE["gpt2"]().to_str())
    assert any(token["special"] for token in document["added_tokens"])
    for name in ("gpt2", "wordpiece"):
        tokenizer = fresh(name)
        text = "a<|im_end|>b" if name == "gpt2" else "a [SEP] b"
        special = set(tokenizer.special.named.values()) - {tokenizer.special.unk}
        assert special & set(tokenizer.encode(pa.array([text]), parse_special=True).to_pylist()[0])
        assert not special & set(tokenizer.encode(pa.array([text])).to_pylist()[0])


def test_few_rows_and_many_rows_give_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ["", "the water", "日本 🎉", "<|im_end|>", ""]
    texts = pa.array(["left out", *values], pa.large_string())[1:]
    few = fresh().encode(texts)
    monkeypatch.setattr(fast, "FEW_ROWS", 0)
    tokenizer = fresh()
    assert tokenizer.encode(texts).equals(few)
    assert tokenizer.slow_because() is None


@pytest.mark.parametrize("name", ["gpt2", "wordpiece"])
def test_threads_that_begin_together_get_the_same_ids(name: str) -> None:
    tokenizer = fresh(name)
    values = [f"the water feeds turbine {number}" for number in range(200)]
    together = threading.Barrier(6)

    def encode(parse_special: bool) -> list[list[int]]:
        together.wait()
        return [
            ids for _ in range(5) for ids in tokenizer.encode(pa.array(values), parse_special=parse_special).to_pylist()
        ]

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(encode, [True, False] * 3))
    assert all(ids == ids_of(name, values) * 5 for ids in made)
