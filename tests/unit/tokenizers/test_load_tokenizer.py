"""Tokenizers from objects, files, folders and names."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import sentencepiece
import tiktoken
import tokenizers
from tests.lazy_modules import LazyModule
from tokenizers import models, processors
from trained_tokenizers import HUGGING_FACE, encoding, sentencepiece_model

from penstock.errors import ConfigError, DataError
from penstock.transforms.tokenization import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

transformers = LazyModule("transformers")

TEXTS = pa.array(["the water feeds 日本 🎉", "", "it's 12<|im_end|>"])


def write_model(folder: Path, *, config: Any = None, special: Any = None, template: str | None = None) -> Path:
    folder.mkdir()
    HUGGING_FACE["gpt2"]().save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        if content is not None:
            (folder / name).write_bytes(orjson.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def same(one: Tokenizer, other: Tokenizer) -> bool:
    ids = [tokenizer.encode(TEXTS, parse_special=True) for tokenizer in (one, other)]
    return bool(ids[0].equals(ids[1]))


def test_an_object_a_file_and_a_folder_are_the_same_tokenizer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    made = [load_tokenizer(spec) for spec in (HUGGING_FACE["gpt2"](), folder, str(folder), folder / "tokenizer.json")]
    assert all(same(made[0], other) for other in made)
    assert len({tokenizer.fingerprint for tokenizer in made}) == 1
    assert made[1].name == "model"
    copied = folder / "other-name.json"
    copied.write_bytes((folder / "tokenizer.json").read_bytes())
    assert load_tokenizer(copied).fingerprint == made[0].fingerprint


def test_the_configuration_beside_it_names_special_tokens_and_template(tmp_path: Path) -> None:
    config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ from_config }}"}
    tokenizer = load_tokenizer(write_model(tmp_path / "a", config=config, special={"pad_token": "<|endoftext|>"}))
    named = tokenizer.special.named
    assert (tokenizer.special.bos, tokenizer.special.eos) == (None, named["<|im_end|>"])
    assert tokenizer.special.pad == named["<|endoftext|>"]
    assert set(named) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.chat_template == "{{ from_config }}"
    several = {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}
    assert load_tokenizer(write_model(tmp_path / "b", config=several)).chat_template == "d"
    assert load_tokenizer(write_model(tmp_path / "c", config=several, template="file")).chat_template == "file"
    assert load_tokenizer(write_model(tmp_path / "d")).chat_template is None


@pytest.mark.parametrize(
    "junk", [[1], ["a"], [None], [{}], [{"name": 1}], [{"template": "x"}], 7, {"default": 7}, [[]], True]
)
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, junk: Any) -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        load_tokenizer(write_model(tmp_path / "a", config={"chat_template": junk}))


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_multiply_a_text_are_refused(tmp_path: Path, part: str) -> None:
    folder = write_model(tmp_path / "a")
    config = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000} for _ in range(3)]
    config[part] = {"type": "Sequence", f"{part}s": steps}
    (folder / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{part}.*1,000,000,000 times"):
        load_tokenizer(folder)


@pytest.mark.parametrize("number", [2**32 - 1, 2**31, 10**8])
def test_an_id_far_outside_the_vocabulary_is_refused(tmp_path: Path, number: int) -> None:
    folder = write_model(tmp_path / "a")
    config = json.loads((folder / "tokenizer.json").read_text())
    config["model"]["vocab"]["far"] = number
    (folder / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="far"):
        load_tokenizer(folder)


def test_without_a_configuration_the_post_processor_or_well_known_names_tell() -> None:
    bert = load_tokenizer(HUGGING_FACE["wordpiece"]()).special
    assert (bert.bos, bert.eos, bert.unk) == (1, 2, 0)
    unigram = load_tokenizer(HUGGING_FACE["unigram"]()).special
    assert (unigram.bos, unigram.eos) == (unigram.named["<s>"], unigram.named["</s>"])
    gpt2 = load_tokenizer(HUGGING_FACE["gpt2"]()).special
    assert (gpt2.bos, gpt2.eos) == (None, gpt2.named["<|endoftext|>"])
    framed = tokenizers.Tokenizer.from_str(HUGGING_FACE["gpt2"]().to_str())
    framed.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert load_tokenizer(framed).special.bos == 1
    assert load_tokenizer(framed).encode(pa.array(["a"])).to_pylist() == [framed.encode("a").ids[1:]]


def test_special_tokens_can_be_named_by_the_caller() -> None:
    tokenizer = load_tokenizer(HUGGING_FACE["gpt2"](), bos="<|im_start|>", eos="<|im_end|>", chat_template="{{ x }}")
    named = tokenizer.special.named
    assert (tokenizer.special.bos, tokenizer.special.eos) == (named["<|im_start|>"], named["<|im_end|>"])
    assert tokenizer.chat_template == "{{ x }}"
    assert tokenizer.fingerprint != load_tokenizer(HUGGING_FACE["gpt2"]()).fingerprint
    with pytest.raises(ConfigError, match=r"eos='<nothing>'.*'<\|im_end\|>'"):
        load_tokenizer(HUGGING_FACE["gpt2"](), eos="<nothing>")
    with pytest.raises(ConfigError, match="ByteTokenizer"):
        load_tokenizer("byte", eos="x")


def test_a_fast_transformers_tokenizer_brings_its_names_and_template() -> None:
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=HUGGING_FACE["gpt2"](), eos_token="<|endoftext|>", pad_token="<|im_end|>"
    )
    wrapped.chat_template = "{{ messages }}"
    tokenizer = load_tokenizer(wrapped)
    assert tokenizer.encode(TEXTS, parse_special=True).to_pylist() == [
        wrapped.encode(text, add_special_tokens=False) for text in TEXTS.to_pylist()
    ]
    assert (tokenizer.special.eos, tokenizer.special.pad) == (wrapped.eos_token_id, wrapped.pad_token_id)
    assert tokenizer.special.bos is None
    assert tokenizer.chat_template == "{{ messages }}"


def test_padding_truncation_and_dropout_of_the_file_are_switched_off_and_said(caplog: pytest.LogCaptureFixture) -> None:
    made = tokenizers.Tokenizer.from_str(HUGGING_FACE["gpt2"]().to_str())
    made.enable_truncation(4)
    made.enable_padding(length=4)
    config = orjson.loads(made.to_str())
    config["model"]["dropout"] = 0.5
    made = tokenizers.Tokenizer.from_str(orjson.dumps(config).decode())
    tokenizer = load_tokenizer(made)
    plain = load_tokenizer(HUGGING_FACE["gpt2"]())
    assert same(tokenizer, plain)
    assert tokenizer.fingerprint == plain.fingerprint
    for setting in ("padding", "truncation", "dropout"):
        assert any(setting in record.message and "switched off" in record.message for record in caplog.records)


def test_the_fingerprint_follows_what_decides_the_ids() -> None:
    prints = {name: load_tokenizer(make()).fingerprint for name, make in HUGGING_FACE.items()}
    assert len(set(prints.values())) == len(prints)
    made = tokenizers.Tokenizer.from_str(HUGGING_FACE["gpt2"]().to_str())
    made.add_tokens(["another"])
    assert load_tokenizer(made).fingerprint != prints["gpt2"]
    small = encoding()
    other = tiktoken.Encoding("x", pat_str=small._pat_str, mergeable_ranks=small._mergeable_ranks, special_tokens={})
    assert load_tokenizer(small).fingerprint == load_tokenizer(encoding()).fingerprint
    assert load_tokenizer(small).fingerprint != load_tokenizer(other).fingerprint


def test_the_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    code = (
        "import sys\nfrom penstock.transforms.tokenization import load_tokenizer\n"
        "print(load_tokenizer(sys.argv[1]).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load_tokenizer(folder).fingerprint


def test_sentencepiece_models_load_from_processor_file_and_folder(tmp_path: Path) -> None:
    model = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer.model.v7m1").write_bytes(model)  # as Mistral publishes them
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for spec in (processor, tmp_path / "tokenizer.model", tmp_path / "tokenizer.model.v7m1", tmp_path):
        tokenizer = load_tokenizer(spec)
        assert tokenizer.encode(TEXTS).to_pylist() == processor.encode(TEXTS.to_pylist())
        assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.special.pad) == (1, 2, None)
        ids = tokenizer.encode(pa.array(["the water</s>"]), parse_special=True)[0].values.to_numpy()
        assert tokenizer.decode(ids) == "the water</s>"
        byte = processor.piece_to_id("<0x41>")
        assert (tokenizer.token_bytes(byte), tokenizer.token_bytes(1)) == (b"A", b"<s>")


def test_a_file_of_ranks_is_known_by_its_name(tmp_path: Path) -> None:
    ranks = encoding()._mergeable_ranks
    lines = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    (tmp_path / "cl100k_base.tiktoken").write_bytes(lines)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXTS).to_pylist() == [encoding().encode_ordinary(text) for text in TEXTS.to_pylist()]
    assert tokenizer.special.eos == 100257
    (tmp_path / "mine.tiktoken").write_bytes(lines)
    with pytest.raises(ConfigError, match=r"mine\.tiktoken.*tiktoken\.Encoding"):
        load_tokenizer(tmp_path / "mine.tiktoken")
    (tmp_path / "cl100k_base.tiktoken").write_bytes(b"not ranks\n")
    with pytest.raises(ConfigError, match="cl100k_base"):
        load_tokenizer(tmp_path / "cl100k_base.tiktoken")


def test_an_encoding_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ConfigError, match=r"'cl100k_base'.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("cl100k_base")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding())
    assert load_tokenizer("cl100k_base").name == "small"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such/model", "'no/such/model'"),
        (42, r"builtins\.int"),
        ("char", "CharTokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused_with_what_would_be(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(spec)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "is not JSON"),
        ("tokenizer.json", b"[]", "no 'model'"),
        ("tokenizer.json", b'{"model": {"type": "Strange"}}', r"tokenizer\.json"),
        ("other.json", b"\xff\xfe", r"other\.json"),
        ("bad.model", b"not a model", "SentencePiece"),
    ],
)
def test_files_that_are_something_else_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path / name)


def test_folders_that_miss_something_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    folder = write_model(tmp_path / "model", config={"eos_token": "<missing>"})
    with pytest.raises(ConfigError, match="'<missing>'"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def _makers() -> dict[str, Callable[[], Any]]:
    return {
        "tokenizers": HUGGING_FACE["wordpiece"],
        "tiktoken": encoding,
        "sentencepiece": lambda: sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model()),
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer.fit(TEXTS.to_pylist()),
    }


@pytest.mark.parametrize("kind", _makers())
def test_a_tokenizer_travels_to_another_process(kind: str) -> None:
    tokenizer = load_tokenizer(_makers()[kind]())
    tokenizer.encode(TEXTS)
    copied = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301 - our own
    assert same(tokenizer, copied)
    assert copied.fingerprint == tokenizer.fingerprint
    assert copied.special == tokenizer.special


@pytest.mark.parametrize("kind", _makers())
def test_a_token_that_does_not_exist_is_refused(kind: str) -> None:
    tokenizer = load_tokenizer(_makers()[kind]())
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises((ConfigError, OverflowError)):
            tokenizer.token_bytes(token)


@pytest.mark.parametrize("kind", _makers())
def test_bytes_that_are_not_utf8_are_refused_with_their_row(kind: str) -> None:
    texts = pa.array([b"fine", b"\xed\xa0\x80 a lone surrogate"], pa.binary()).view(pa.string())
    with pytest.raises(DataError, match=r"row 1\b") as caught:
        load_tokenizer(_makers()[kind]()).encode(texts)
    assert caught.value.row == 1
    with pytest.raises(DataError, match="large_string"):
        load_tokenizer(_makers()[kind]()).encode(texts.view(pa.binary()))


def test_a_vocabulary_of_nothing_is_no_reason_to_fail() -> None:
    empty = tokenizers.Tokenizer(models.BPE())
    assert load_tokenizer(empty).encode(pa.array(["text", ""])).to_pylist() == [[], []]


def test_the_libraries_of_tokenizers_are_not_imported_before_they_are_needed() -> None:
    code = (
        "import sys, penstock.transforms as t; t.load_tokenizer('byte'); "
        "libraries = {'tokenizers', 'tiktoken', 'sentencepiece', 'gigatoken', 'awkward', 'transformers'}; "
        "print(sorted(libraries & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
