"""Tokenizers whose ids have holes: tables reach to the largest id, and ids are those that the library gives."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import orjson
import pyarrow as pa
import pytest
import tiktoken
import tokenizers
from trained_tokenizers import HUGGING_FACE, encoding

from penstock.chat.format_chat import FormatChat
from penstock.errors import ConfigError
from penstock.tokenizers.load import LoadedTokenizer
from penstock.transforms.tokenization import load_tokenizer

CHAT = {"messages": [[{"role": "user", "content": "the water"}, {"role": "assistant", "content": "feeds"}]]}


def added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True} | flags


def with_holes(first: int, *, vocabulary: dict[str, int] | None = None) -> dict[str, Any]:
    """As some publish them: a vocabulary that ends with a hole and one more token, and added tokens behind that."""
    document: dict[str, Any] = orjson.loads(HUGGING_FACE["gpt2"]().to_str())
    vocab = {text: number for text, number in document["model"]["vocab"].items() if "im_" not in text}
    used = {number: text for text, number in vocab.items()}
    # The places of <|im_start|> and <|im_end|> are taken by the last two, so that the hole is at the end.
    for number in (1, 2):
        vocab[used[max(used)]] = number
        del used[max(used)]
    document["model"]["vocab"] = vocab | {"<|endofprompt|>": 600} | (vocabulary or {})
    ends = [added(vocab["<|endoftext|>"], "<|endoftext|>"), added(600, "<|endofprompt|>")]
    document["added_tokens"] = [*ends, added(first, "<|im_start|>"), added(first + 1, "<|im_end|>")]
    return document


def saved(tmp_path: Any, document: Any) -> Any:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(orjson.dumps(document))
    return file


def test_added_tokens_have_the_ids_that_the_library_gives_them(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = saved(tmp_path, with_holes(601))
    right = tokenizers.Tokenizer.from_file(str(file))
    assert right.token_to_id("<|im_end|>") not in (None, 602), "the library does not read the id in the file"
    tokenizer = load_tokenizer(file)
    assert isinstance(tokenizer, LoadedTokenizer)
    assert "'<|im_start|>', 601 in the file" in caplog.text
    assert tokenizer.vocab_size == 601
    for text in ("<|im_start|>", "<|im_end|>", "<|endofprompt|>"):
        assert tokenizer.special.named[text] == right.token_to_id(text)
    texts = ["<|im_start|>the water<|im_end|>", "<|endofprompt|>"]
    got = tokenizer.encode(pa.array(texts), parse_special=True).to_pylist()
    assert got == [right.encode(text).ids for text in texts]
    assert tokenizer.slow_because(parse_special=True) is None
    assert tokenizer.token_bytes(550) == b""
    copied = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 - our own
    assert copied.special == tokenizer.special
    assert copied.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("fast", [True, False])
def test_a_chat_with_added_tokens_behind_a_hole(tmp_path: Any, fast: bool) -> None:
    tokenizer = load_tokenizer(saved(tmp_path, with_holes(601)), fast=fast)
    row = FormatChat(tokenizer, template="chatml").transform(pa.record_batch(CHAT)).to_pylist()[0]
    start, end = tokenizer.special.named["<|im_start|>"], tokenizer.special.named["<|im_end|>"]
    assert [row["input_ids"].count(start), row["input_ids"].count(end)] == [2, 2]
    supervised = [token for token, used in zip(row["input_ids"], row["loss_mask"]) if used]
    assert supervised[-1] == end


def test_a_file_that_agrees_with_the_library_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load_tokenizer(HUGGING_FACE["gpt2"]())
    assert not caplog.records


def test_an_added_token_with_the_id_of_another_is_refused(tmp_path: Any) -> None:
    document = with_holes(601)
    vocab = document["model"]["vocab"]
    number = len(vocab)
    moved = next(text for text in reversed(vocab) if text not in ("<|endofprompt|>", "<|endoftext|>"))
    vocab[moved] = number  # where the library puts the first added token
    with pytest.raises(ConfigError, match=rf"'<\|im_start\|>'.*{number}"):
        load_tokenizer(saved(tmp_path, document))


def test_an_absurd_id_is_refused_by_name(tmp_path: Any) -> None:
    document = with_holes(601, vocabulary={"far": 4294967295})
    with pytest.raises(ConfigError, match=r"'far'.*vocabulary"):
        load_tokenizer(saved(tmp_path, document))
    made = encoding()
    far = tiktoken.Encoding(
        "far", pat_str=made._pat_str, mergeable_ranks=made._mergeable_ranks, special_tokens={"<|far|>": 2**31}
    )
    with pytest.raises(ConfigError, match=r"'<\|far\|>'.*\bfar\b"):
        load_tokenizer(far)


def test_a_hole_between_ids_of_tiktoken_is_an_empty_token() -> None:
    made = encoding()
    last = max(made._mergeable_ranks.values())
    holes = tiktoken.Encoding(
        "holes", pat_str=made._pat_str, mergeable_ranks=made._mergeable_ranks, special_tokens={"<|end|>": last + 10}
    )
    tokenizer = load_tokenizer(holes)
    assert tokenizer.vocab_size == last + 11
    assert tokenizer.token_bytes(last + 5) == b""
    with pytest.raises(ConfigError, match=r"\bholes\b"):
        tokenizer.token_bytes(last + 11)
    spans = tokenizer.encode_spans(pa.array(["the<|end|>"]))
    assert spans.ids.to_pylist()[0][-1] == last + 10
