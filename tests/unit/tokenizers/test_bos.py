"""BOS by default: documents begin as `tokenizer(text)` of `transformers` does."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sentencepiece
import tokenizers
import transformers
from tests.corpus_files import TOKENIZERS, tokenizer_dir
from tokenizers import processors
from trained_tokenizers import HUGGING_FACE, encoding, sentencepiece_model
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.loaders import PretrainDataLoader
from penstock.transforms import Tokenize
from penstock.transforms.tokenization import load_tokenizer

TEXT = "All the water it can take"


def template(*names: str, before: bool = True) -> dict[str, Any]:
    single = " ".join([*names, "$A"] if before else ["$A", *names])
    ids = [(name, 1 + number) for number, name in enumerate(dict.fromkeys(names))]
    made = processors.TemplateProcessing(single=single, special_tokens=ids)
    return dict(json.loads(made.__getstate__()))


def framed(first: str, last: str) -> dict[str, Any]:
    return {"type": "RobertaProcessing", "sep": [last, 2], "cls": [first, 1], "trim_offsets": True,
            "add_prefix_space": False}  # fmt: skip


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
START, END = "<|im_start|>", "<|im_end|>"
NAMED = {"bos_token": START, "eos_token": END}
STYLES: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "gpt2": ("gpt2", BYTES, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "qwen, which has no BOS": ("qwen", BYTES, {"bos_token": None, "eos_token": END, "add_bos_token": False}),
    "llama 3": ("llama3", {"type": "Sequence", "processors": [BYTES, template(START)]}, NAMED),
    "mistral": ("llama3", template(START), {**NAMED, "add_bos_token": True, "add_eos_token": False}),
    "gemma": ("gemma", template("<s>"), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "deepseek, whose files differ": ("gpt2", BYTES, {**NAMED, "add_bos_token": True}),
    "the other way round": ("gpt2", template(START), {**NAMED, "add_bos_token": False}),
    "roberta": ("gpt2", framed(START, END), NAMED),
    "EOS alone": ("gpt2", template(START, before=False), {"bos_token": END, "eos_token": START}),
    "a token that is not BOS": ("gpt2", template(START), {"bos_token": END, "eos_token": END}),
    "no post-processor": ("gpt2", None, NAMED),
}
ADDING = {"llama 3", "mistral", "gemma", "the other way round", "roberta"}


def model_at(folder: Path, style: str) -> Path:
    base, post, config = STYLES[style]
    document = json.loads(HUGGING_FACE[base]().to_str()) | {"post_processor": post}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids(tokenizer: Any, **options: Any) -> list[int]:
    made = Tokenize(tokenizer, **options).transform(pa.record_batch({"text": [TEXT]}))
    return list(made.column("input_ids")[0].as_py())


def theirs_without_ends(theirs: Any) -> list[int]:
    """Ids with BOS where it is, and without anything else that is added."""
    plain = theirs(TEXT, add_special_tokens=False)["input_ids"]
    first = theirs(TEXT)["input_ids"][0]
    return [first, *plain] if first == theirs.bos_token_id else list(plain)


@pytest.mark.parametrize("style", STYLES)
def test_documents_begin_with_bos_where_transformers_puts_it(style: str, tmp_path: Path) -> None:
    folder = model_at(tmp_path, style)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs_without_ends(theirs)
    assert (wanted[0] == theirs.bos_token_id) == (style in ADDING)
    deferred = load_tokenizer(folder), load_tokenizer(folder)  # the facts of the second come from the cache
    for given in (*deferred, theirs, pickle.loads(pickle.dumps(deferred[1]))):  # noqa: S301 - made here
        assert ids(given) == wanted
        assert load_tokenizer(given).special.adds_bos == (style in ADDING)
        assert ids(given, add_bos=False) == theirs(TEXT, add_special_tokens=False)["input_ids"]
        if theirs.bos_token_id is not None:
            assert ids(given, add_bos=True)[0] == theirs.bos_token_id


@pytest.mark.parametrize("name", TOKENIZERS)
def test_documents_of_published_tokenizers_begin_as_in_transformers(name: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_dir(name))
    assert ids(str(tokenizer_dir(name)), fast=False) == theirs_without_ends(theirs)


def test_a_slow_tokenizer_begins_a_text_as_its_own_pattern_says() -> None:
    class Letters(transformers.PreTrainedTokenizer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            self._letters = {letter: number for number, letter in enumerate(["<s>", "</s>", "<unk>", *"abc "])}
            super().__init__(bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options)

        @property
        def vocab_size(self) -> int:
            return len(self._letters)

        def get_vocab(self) -> dict[str, int]:
            return self._letters

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return self._letters.get(token, 2)

        def _convert_id_to_token(self, index: int) -> str:
            return list(self._letters)[index]

    for pattern in ("none", "bos", "bos_eos", "eos"):
        theirs = Letters(special_tokens_pattern=pattern)
        assert ids(theirs) == theirs_without_ends(theirs), pattern
        assert load_tokenizer(theirs).special.adds_bos == pattern.startswith("bos")


def test_sentencepiece_models_say_it_by_their_settings(tmp_path: Path) -> None:
    model = sentencepiece_model()
    adding = sentencepiece.SentencePieceProcessor(model_proto=model, add_bos=True)
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ids(adding) == adding.encode(TEXT) == [plain.bos_id(), *plain.encode(TEXT)]
    assert ids(plain) == plain.encode(TEXT)
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert ids(tmp_path) == plain.encode(TEXT)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert ids(tmp_path) == adding.encode(TEXT)
    assert load_tokenizer(adding).fingerprint == load_tokenizer(plain).fingerprint


def test_tiktoken_bytes_and_functions_add_none() -> None:
    for given in (encoding(), "byte", lambda text: list(text.encode())):
        assert not load_tokenizer(given).special.adds_bos
    assert ids("byte") == list(TEXT.encode())


def test_a_configuration_that_the_file_overrules_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    load_tokenizer(model_at(tmp_path, "deepseek, whose files differ"))
    assert "add_bos=True" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_a_loader_begins_documents_with_bos_and_logs_it(
    streaming: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = model_at(tmp_path, "llama 3")
    data = tmp_path / "in.jsonl"
    data.write_text(json.dumps({"text": TEXT}) + "\n")
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    bos, eos = backend.token_to_id(START), backend.token_to_id(END)
    plain = backend.encode(TEXT, add_special_tokens=False).ids

    def first(**more: Any) -> list[int]:
        options: dict[str, Any] = {"packing": None, "cache_dir": tmp_path / "cache", "backend": "numpy", "prefetch": 0}
        with PretrainDataLoader(data, model, 64, streaming=streaming, progress=False, **options, **more) as loader:
            return list(next(iter(loader)).input_ids[0].tolist())

    assert first() == [bos, *plain, eos]
    assert "add_bos=False" in caplog.text
    caplog.clear()
    assert first(add_bos=False) == [*plain, eos]
    assert "BOS" not in caplog.text


def test_the_commands_show_it(tmp_path: Path) -> None:
    model = str(model_at(tmp_path, "llama 3"))
    data, store = tmp_path / "in.jsonl", str(tmp_path / "out.store")
    data.write_text(json.dumps({"text": TEXT}) + "\n")
    run = CliRunner().invoke
    shown = run(app, ["show", str(data), "--tokenizer", model])
    assert shown.output.splitlines()[1].startswith(START), shown.output
    assert START not in run(app, ["show", str(data), "--tokenizer", model, "--no-bos"]).output
    run(app, ["prepare", str(data), "--out", store, "--tokenizer", model], catch_exceptions=False)
    number = load_tokenizer(model).special.bos
    assert f"Tokenize, bos {number}," in " ".join(run(app, ["info", store]).output.split())
