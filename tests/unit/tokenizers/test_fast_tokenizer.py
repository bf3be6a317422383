"""The fast path is used where it is exact; its mistakes stay inside the tokenizer, or end the run."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
import tiktoken
import tokenizers
from tokenizers import AddedToken, pre_tokenizers
from trained_tokenizers import HUGGING_FACE, encoding, sentencepiece_model

from penstock import Pipeline, PipelineConfig
from penstock.arrays.text import utf8
from penstock.errors import PenstockError, StageError
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.tokenizers import fast
from penstock.tokenizers import verification as comparing
from penstock.tokenizers.base import FastModel
from penstock.tokenizers.fast import FastBackend
from penstock.tokenizers.huggingface import HuggingFaceReference
from penstock.tokenizers.load import LoadedTokenizer
from penstock.tokenizers.sentencepiece import SentencePieceReference
from penstock.tokenizers.verification import compared_rows
from penstock.transforms.tokenization import Tokenize, load_tokenizer

LOGGER = "penstock.transforms.tokenization"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a spoiled gigatoken is found to do is not kept for other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def fresh(name: str = "gpt2") -> LoadedTokenizer:
    made = load_tokenizer(HUGGING_FACE[name]())
    assert isinstance(made, LoadedTokenizer)
    return made


def spoil(monkeypatch: pytest.MonkeyPatch, wrong: bytes) -> list[int]:
    """From now on gigatoken gets rows with these bytes wrong. Returns the rows of each of its calls."""
    calls: list[int] = []
    encode = FastBackend.encode

    def spoiled(self: FastBackend, data: Any) -> Any:
        rows = encode(self, data)
        calls.append(len(data.offsets) - 1)
        values = rows.values.copy()
        for row, (start, stop) in enumerate(zip(data.offsets, data.offsets[1:])):
            if wrong in data.data[start:stop].tobytes():
                values[rows.offsets[row]] += 1
        return replace(rows, values=values)

    monkeypatch.setattr(FastBackend, "encode", spoiled)
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


def sampled(name: str = "turbine") -> list[str]:
    """Rows without the first ones compared, but with some that are in the sample."""
    values = [f"{name} number {number} in a row" for number in range(8_000)]
    chosen = np.flatnonzero(compared_rows(utf8(pa.array(values))))
    assert len(chosen), "one of these rows must be in the sample"
    assert chosen[0] > 100, "and not among the first"
    return values


@pytest.mark.parametrize("spans", [False, True])
def test_a_difference_in_the_first_batch_has_the_whole_batch_done_again(
    monkeypatch: pytest.MonkeyPatch, spans: bool
) -> None:
    monkeypatch.setattr("penstock.tokenizers.load.FAST_BYTES", 2000)
    spoil(monkeypatch, b"turbine")
    tokenizer = fresh()
    assert len(tokenizer.encode(pa.array([], pa.string()))) == 0  # delivers nothing
    values = [*["the water"] * 300, *sampled()]
    if spans:
        ids = tokenizer.encode_spans(pa.array(values), parse_special=False).ids
    else:
        ids = tokenizer.encode(pa.array(values))
    assert ids.to_pylist() == ids_of("gpt2", values)
    assert "turbine" in (tokenizer.slow_because() or "")


def test_a_difference_after_the_first_batch_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = fresh()
    tokenizer.encode(pa.array(["the first rows, which are right"] * 100))
    assert tokenizer.slow_because() is None
    spoil(monkeypatch, b"turbine")
    with pytest.raises(PenstockError) as caught:
        tokenizer.encode(pa.array(sampled()))
    for words in ("turbine number", "ids", "fast=False"):
        assert words in str(caught.value)
    assert "gigatoken" in caplog.text
    monkeypatch.undo()
    with pytest.raises(PenstockError, match="turbine number"):
        tokenizer.encode(pa.array(["the water"]))  # not even if all is well again
    assert tokenizer.without_fast().encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_pipeline_that_skips_bad_rows_does_not_skip_a_difference(
    monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    encode = FastBackend.encode

    def wrong(self: FastBackend, data: Any) -> Any:
        rows = encode(self, data)
        return replace(rows, values=rows.values + (b"turbine" in data.data.tobytes()))

    monkeypatch.setattr(FastBackend, "encode", wrong)
    values = [*["the water"] * 1000, *sampled()]
    with pytest.raises(StageError, match="fast=False"):
        Pipeline(
            MemorySource([{"text": value} for value in values]),
            [Tokenize(fresh())],
            MemorySink(),
            config=PipelineConfig(on_error=on_error, workers=2, batch_rows=200),
        ).run()


def test_a_copy_does_not_know_what_others_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    copy: LoadedTokenizer = pickle.loads(pickle.dumps(fresh()))  # noqa: S301 - our own
    spoil(monkeypatch, b"turbine")
    with pytest.raises(PenstockError, match=r"(?i)ids"):
        copy.encode(pa.array(["a turbine"]))
    spoil(monkeypatch, "日本語".encode())  # in the probes: the same in every copy
    copy = pickle.loads(pickle.dumps(fresh()))  # noqa: S301 - our own
    assert copy.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])


def test_ids_made_before_another_thread_found_a_difference_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh()
    tokenizer.fit_budget(1 << 30)
    path = tokenizer._fast_path(False)
    deliver = path.deliver

    def late() -> None:
        """By then, the other thread has found one."""
        with pytest.raises(fast.Refused):
            path._found("it is wrong")
        deliver()

    spoil(monkeypatch, b"row 700")
    monkeypatch.setattr(path, "deliver", late)
    values = [f"in row {number}" for number in range(800)]
    assert not compared_rows(utf8(pa.array(values)))[700]
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)


def test_without_the_fast_path_gigatoken_is_never_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    monkeypatch.setattr(FastBackend, "__init__", lambda *_: pytest.fail("gigatoken was loaded"))
    given = load_tokenizer(HUGGING_FACE["gpt2"](), fast=False, eos="<|im_end|>")
    copied = pickle.loads(pickle.dumps(given))  # noqa: S301 - our own
    for tokenizer in (given, load_tokenizer(given), copied):
        assert tokenizer.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])
        assert tokenizer.slow_because() == "fast=False was given"
    assert {(record.levelname, "fast=False" in record.message) for record in caplog.records} == {("INFO", True)}
    slow, quick = Tokenize(HUGGING_FACE["gpt2"](), fast=False), Tokenize(HUGGING_FACE["gpt2"]())
    batch = pa.record_batch({"text": ["the water"]})
    assert slow.transform(batch)["input_ids"].to_pylist() == ids_of("gpt2", ["the water"])
    assert slow.fingerprint == quick.fingerprint
    assert load_tokenizer("byte", fast=False).encode(pa.array(["a"])).to_pylist() == [[97]]


@pytest.mark.parametrize("place", ["head", "tail"])
def test_long_rows_are_compared_at_both_ends(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(comparing, "WHOLE_BYTES", 4000)
    monkeypatch.setattr(comparing, "STRETCH_BYTES", 1000)
    encode = FastBackend.encode

    def wrong(self: FastBackend, data: Any) -> Any:
        rows = encode(self, data)
        values = rows.values.copy()
        for start, stop in zip(rows.offsets, rows.offsets[1:]):
            if stop - start > 1000:
                values[start + 20 if place == "head" else stop - 20] += 1
        return replace(rows, values=values)

    monkeypatch.setattr(FastBackend, "encode", wrong)
    tokenizer = fresh()
    long = "the water feeds 日本語 turbine " * 300
    assert tokenizer.encode(pa.array(["short", long])).to_pylist() == ids_of("gpt2", ["short", long])
    assert "the water" in (tokenizer.slow_because() or "")


def test_long_rows_that_a_cut_changes_are_settled_by_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "WHOLE_BYTES", 4000)
    monkeypatch.setattr(comparing, "STRETCH_BYTES", 1001)
    tokenizer = fresh()
    asked: list[int] = []
    reference = tokenizer._reference.ids
    tokenizer.fit_budget(1 << 30)
    monkeypatch.setattr(
        tokenizer._reference,
        "ids",
        lambda texts, **mode: asked.extend(map(len, texts)) or reference(texts, **mode),
    )
    monkeypatch.setattr(comparing, "LONG_ONE_IN", 1)
    words, one_word = "the water feeds " * 400, "the" * 3000 + "x"
    assert tokenizer.encode(pa.array([words])).to_pylist() == ids_of("gpt2", [words])
    assert asked == [1001, 1001], "the ends are enough"
    monkeypatch.setattr(comparing, "_ends_agree", lambda *_: False)
    assert tokenizer.encode(pa.array([one_word])).to_pylist() == ids_of("gpt2", [one_word])
    assert asked[2:] == [len(one_word)]
    assert tokenizer.slow_because() is None


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

    monkeypatch.setattr(FastBackend, "encode", fail)
    assert tokenizer.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])
    assert str(error) in (tokenizer.slow_because() or "")


def _raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (type("PanicException", (BaseException,), {})("index out of range"), "index out of range"),
        (ValueError(), "ValueError"),
        (ValueError("no\nmore"), "no"),
    ],
)
def test_a_model_that_gigatoken_cannot_load_is_left_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    monkeypatch.setattr("gigatoken.Tokenizer.from_json", _raiser(error))
    tokenizer = fresh()
    assert tokenizer.encode(pa.array(["the water"])).to_pylist() == ids_of("gpt2", ["the water"])
    assert tokenizer.slow_because() == f"it does not support this model: {words}"


def test_an_interrupt_while_loading_is_not_mistaken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gigatoken.Tokenizer.from_json", _raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fresh().encode(pa.array(["the water"]))


def test_ranks_that_make_gigatoken_panic_are_left_to_the_reference() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in (b"he", b"ll", b"hell", b" w", b"the", b" th"):
        ranks[text] = len(ranks)
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    made = tiktoken.Encoding("my", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 262})
    tokenizer = load_tokenizer(made)
    for parse_special in (False, True):
        ids = tokenizer.encode(pa.array(["hello the water"]), parse_special=parse_special)
        assert ids.to_pylist() == [made.encode("hello the water")]


def test_an_interrupt_is_not_mistaken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = fresh()
    tokenizer.encode(pa.array(["warm"]))

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(FastBackend, "encode", interrupt)
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


def test_sentencepiece_rules_of_ones_own_are_left_to_the_reference() -> None:
    reference = SentencePieceReference(sentencepiece_model(), "m")
    reference._rule = "user_defined"
    assert "user_defined" in str(reference.fast(parse_special=False))


class _Encoder:
    """Stands for a gigatoken backend; its first `together` calls wait for each other."""

    def __init__(self, together: int = 1) -> None:
        self.now = self.most = 0
        self.sizes: list[int] = []
        self.together = threading.Barrier(together)
        self._lock = threading.Lock()

    def encode_batch(self, rows: Any, *, parallel: bool) -> Any:
        import awkward

        assert parallel
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.sizes.append(sum(map(len, rows)))
            early = len(self.sizes) <= self.together.parties
        if early:
            self.together.wait(30)
        with self._lock:
            self.now -= 1
        return awkward.Array([[len(row)] for row in rows])


@pytest.mark.parametrize(("cores", "allowed", "together"), [(4, 1 << 30, 3), (2, 1 << 30, 2), (4, 2 * 700 * 1000, 1)])
def test_threads_encode_together_as_far_as_cores_and_memory_go(
    cores: int, allowed: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "available_cores", lambda: cores)
    encoder = _Encoder(together)
    loads: list[int] = []
    backend = FastBackend(FastModel(lambda: loads.append(1) or encoder), allowed, 1000)
    data = utf8(pa.array(["the water feeds", "the turbine"]))
    threads = [threading.Thread(target=backend.encode, args=(data,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert encoder.most == together
    assert len(loads) == 1, "one backend serves all threads"


def test_many_rows_go_in_pieces_that_the_calling_thread_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "PIECE_BYTES", 100)
    encoder = _Encoder()
    backend = FastBackend(FastModel(lambda: encoder), 1 << 30, 1000)
    lengths = [10, 80, 30, 250, 0, 99, 1, 100, 5]
    rows = backend.encode(utf8(pa.array(["x" * length for length in lengths])))
    assert rows.values.tolist() == lengths
    assert rows.offsets.tolist() == list(range(len(lengths) + 1))
    assert encoder.sizes == [90, 30, 250, 99, 1, 100, 5]
    assert rows.values.dtype == np.uint16, "ids are narrow before they are joined"


@pytest.mark.filterwarnings("ignore:os.fork.. was called")  # by JAX, if another test has imported it
def test_a_forked_process_encodes_without_the_threads_it_lost() -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("this system cannot fork")
    tokenizer = fresh()
    values = ["the water feeds the turbine"] * 3000
    expected = tokenizer.encode(pa.array(values)).to_pylist()

    def encode() -> None:
        assert not fast._parallel()
        assert tokenizer.encode(pa.array(values)).to_pylist() == expected

    child = multiprocessing.get_context("fork").Process(target=encode)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert fast._parallel()


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
    tokenizer.fit_budget(1000)
    backend = tokenizer._fast_path(False)._backend
    assert backend is not None
    load = backend._load
    monkeypatch.setattr(backend, "_load", lambda: loads.append(1) or load())
    monkeypatch.setattr(backend, "_least_text", 100)
    values = ["the water feeds the turbine"] * 10
    # Allowed are 1000 bytes above the least since the last time.
    for now, expected in ((5000, 0), (6000, 0), (4000, 0), (4900, 0), (5001, 1), (5001, 1), (6000, 1), (6100, 2)):
        resident.bytes = now
        for _ in range(2):
            assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("gpt2", values)
        assert len(loads) == expected
    monkeypatch.setattr(backend, "_least_text", 1 << 20)
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


def test_the_probes_are_compared_once_and_a_difference_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str | None:
        tokenizer = fresh()
        tokenizer.encode(pa.array(["the water"]))
        return tokenizer.slow_because()

    with monkeypatch.context() as spoiled:
        spoil(spoiled, "日本語".encode())
        assert ["日本語" in (refusal() or "") for _ in range(2)] == [True, True]
    calls = spoil(monkeypatch, b"\xff")
    assert [refusal() for _ in range(2)] == [None, None]
    assert sum(rows >= len(fast.PROBES) for rows in calls) == 1


def with_added(name: str, *added: dict[str, Any]) -> tokenizers.Tokenizer:
    """One of the trained tokenizers with more added tokens."""
    config = orjson.loads(HUGGING_FACE[name]().to_str())
    first = HUGGING_FACE[name]().get_vocab_size(with_added_tokens=True)
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    config["added_tokens"] += [off | token | {"id": first + number} for number, token in enumerate(added)]
    return tokenizers.Tokenizer.from_str(orjson.dumps(config).decode())


@pytest.mark.parametrize(
    ("name", "added", "text"),
    [
        ("gpt2", [{"content": "   ", "normalized": True}, {"content": "[MASK]", "lstrip": True}], "a   [MASK] b"),
        ("gpt2", [{"content": " sp"}, {"content": "<x>", "rstrip": True}], "a<x> sp"),
        ("llama3", [{"content": "ab|", "normalized": True}, {"content": "|cd"}], "x ab|cd y"),
        ("gpt2 with a space before", [{"content": " sp"}, {"content": "   "}], "   sp"),
    ],
)
def test_added_tokens_that_share_characters_are_those_of_the_reference(
    name: str, added: list[dict[str, Any]], text: str
) -> None:
    theirs = with_added(name, *added)
    tokenizer = load_tokenizer(theirs)
    expected = theirs.encode(text, add_special_tokens=False).ids
    rows = [["plain text"] * 99, ["plain text", text] * 9]  # not among the first rows, which are compared
    for texts in rows:
        made = tokenizer.encode(pa.array(texts), parse_special=True).to_pylist()
    assert made[1::2] == [expected] * 9


def test_added_tokens_that_share_no_characters_take_the_fast_path() -> None:
    theirs = with_added("gpt2", {"content": "   ", "normalized": True}, {"content": "<|>"})
    tokenizer = load_tokenizer(theirs)
    assert isinstance(tokenizer, LoadedTokenizer)
    texts = ["a   b", "<|>   <|>", " <|> "]
    expected = [one.ids for one in theirs.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer.encode(pa.array(texts), parse_special=True).to_pylist() == expected
    assert not tokenizer.slow_because(parse_special=True)


def test_every_added_token_is_compared_before_the_first_row() -> None:
    names = [f"<{number}>" for number in range(99)]
    tokenizer = load_tokenizer(with_added("gpt2", *({"content": name} for name in names)))
    assert isinstance(tokenizer, LoadedTokenizer)
    assert set(names) <= set(tokenizer._reference.probes())


def compared_probes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time difficult texts are compared from now on."""
    calls: list[int] = []
    compare = fast.FastPath._compare_probes

    def counted(self: fast.FastPath, *given: Any) -> None:
        calls.append(1)
        compare(self, *given)

    monkeypatch.setattr(fast.FastPath, "_compare_probes", counted)
    return calls


def test_difficult_texts_are_compared_again_where_anything_about_them_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = compared_probes(monkeypatch)
    for _ in range(2):
        fresh().fit_budget(1 << 30)
    assert len(calls) == 1
    probes = HuggingFaceReference.probes
    monkeypatch.setattr(HuggingFaceReference, "probes", lambda self: [*probes(self), "one more"])
    fresh().fit_budget(1 << 30)
    assert len(calls) == 2
    monkeypatch.setattr("platform.machine", lambda: "another")  # a home directory may be shared
    comparing._versions.cache_clear()
    fresh().fit_budget(1 << 30)
    assert len(calls) == 3
    comparing._versions.cache_clear()


def test_a_view_of_texts_is_for_awkward_the_array_it_stands_for() -> None:
    ak = pytest.importorskip("awkward")
    texts = ["the water", "", "é🎉", "", "x"]
    plain, made = ak.Array(texts), fast.text_view(ak, utf8(pa.array(["before", *texts])[1:]))
    assert made.to_list() == texts
    for given in (ak.without_parameters(made), made):
        bare = ak.without_parameters(plain)
        assert np.asarray(ak.flatten(given)).tolist() == ak.flatten(bare).to_list()
        assert np.asarray(ak.num(given)).tolist() == ak.num(bare).to_list()
    assert ak.str.upper(made).to_list() == [text.upper() for text in texts]
    assert ak.concatenate([made, plain]).to_list() == texts * 2


def test_one_row_in_so_many_is_compared_whatever_rows_have_in_common() -> None:
    alike = [f"The same beginning, number {number} and the same end" for number in range(200_000)]
    for values in (alike, [f"{number:08d}" for number in range(200_000)]):
        assert 50 <= compared_rows(utf8(pa.array(values))).sum() <= 150
    for length in range(8):  # nothing but their length distinguishes them: all or none
        assert not compared_rows(utf8(pa.array(["x" * length] * 9))).any()
