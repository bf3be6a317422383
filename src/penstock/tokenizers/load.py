"""`load_tokenizer`: whatever a tokenizer is kept in, ready for use."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from penstock.errors import ConfigError
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.huggingface import HuggingFaceReference, as_named
from penstock.tokenizers.loaded import LoadedTokenizer
from penstock.tokenizers.reference import Reference
from penstock.tokenizers.sentencepiece import SentencePieceReference
from penstock.tokenizers.simple import ByteTokenizer, CharTokenizer
from penstock.tokenizers.tiktoken import SCHEMES, TiktokenReference, named_encoding

__all__ = ["TokenizerSpec", "load_tokenizer"]

log = logging.getLogger("penstock.transforms.tokenization")

TokenizerSpec: TypeAlias = Tokenizer | str | os.PathLike[str] | Any
"""A tokenizer of one of the supported libraries, a path, a name, or something with the methods of `Tokenizer`."""

METHODS = ("encode", "encode_spans", "decode", "token_bytes", "fingerprint", "vocab_size", "dtype", "special")


def load_tokenizer(
    spec: TokenizerSpec,
    *,
    bos: str | None = None,
    eos: str | None = None,
    pad: str | None = None,
    chat_template: str | None = None,
    fast: bool = True,
) -> Tokenizer:
    """The tokenizer that `spec` means:

    - a `tokenizers.Tokenizer`, or a `transformers` tokenizer with one inside (a "fast" one)
    - a path to `tokenizer.json`, or to a model directory with one; `tokenizer_config.json`, `special_tokens_map.json`
      and `chat_template.jinja` beside it are read too
    - a `tiktoken.Encoding`, the name of a published one ("cl100k_base"), or a `.tiktoken` file of such a name
    - a `SentencePieceProcessor`, or a path to a `.model` file
    - "byte", a `ByteTokenizer`, a `CharTokenizer`, or a path to what `CharTokenizer.save` wrote

    `bos`, `eos` and `pad` name these tokens by their texts where the files do not, or differently.

    With `fast=False` ids come from the library that defines them alone, which is slower and gives the same ids. A
    tokenizer that was loaded so stays so.
    """
    loaded = _loaded(spec)
    if isinstance(loaded, LoadedTokenizer):
        loaded = loaded if fast else loaded.without_fast()
        if bos is not None or eos is not None or pad is not None:
            loaded = loaded.with_special(bos=bos, eos=eos, pad=pad)
        return loaded if chat_template is None else loaded.with_template(chat_template)
    if (bos, eos, pad, chat_template) != (None, None, None, None):
        raise ConfigError(f"bos, eos, pad and chat_template cannot be changed for {loaded!r}; make it with them")
    return loaded


def _loaded(spec: Any) -> Tokenizer:
    if isinstance(spec, str | os.PathLike):
        return _from_text(os.fspath(spec))
    if isinstance(spec, LoadedTokenizer) or all(hasattr(spec, name) for name in METHODS):
        given: Tokenizer = spec
        return given
    if _is_backend(spec):
        return LoadedTokenizer(HuggingFaceReference(spec.to_str(), "tokenizer"))
    package = type(spec).__module__.partition(".")[0]
    backend = getattr(spec, "backend_tokenizer", None)
    if _is_backend(backend):
        return _from_transformers(spec, backend)
    if package == "tiktoken" and hasattr(spec, "encode_to_numpy"):
        return LoadedTokenizer(TiktokenReference(spec))
    if hasattr(spec, "serialized_model_proto"):
        return LoadedTokenizer(SentencePieceReference(spec.serialized_model_proto(), "sentencepiece"))
    if package == "transformers" or hasattr(spec, "convert_tokens_to_ids"):
        raise ConfigError(
            f"{type(spec).__name__} is a tokenizer written in Python, which makes an object for every token; "
            "load the fast one (AutoTokenizer.from_pretrained(..., use_fast=True)) or pass its .model file"
        )
    raise ConfigError(
        f"{type(spec).__module__}.{type(spec).__name__} is not a tokenizer; expected a tokenizers.Tokenizer, a fast "
        "transformers tokenizer, a tiktoken.Encoding, a SentencePieceProcessor, a path, or 'byte'"
    )


def _from_text(spec: str) -> Tokenizer:
    path = Path(spec)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_file(path)
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        raise ConfigError("'char' needs an alphabet; pass CharTokenizer('abc...'), or CharTokenizer.fit(texts)")
    encoding = named_encoding(spec)
    if encoding is not None:
        return LoadedTokenizer(TiktokenReference(encoding))
    raise ConfigError(
        f"{spec!r} is not a tokenizer: there is no such file or directory, and no encoding of that name; pass a "
        "tokenizer.json, a model directory, a .model file, a tiktoken encoding such as 'cl100k_base', or 'byte'"
    )


def _from_file(path: Path) -> Tokenizer:
    if path.suffix == ".model":
        return LoadedTokenizer(_sentencepiece(path))
    if path.suffix == ".tiktoken":
        return LoadedTokenizer(_ranks(path))
    document = _read_text(path)
    if document.lstrip()[:1] == "{" and '"CharTokenizer"' in document[:100]:
        return CharTokenizer.load(path)
    if path.name == "tokenizer.json":
        return _from_directory(path.parent)
    return LoadedTokenizer(HuggingFaceReference(document, path.name))


def _from_directory(folder: Path) -> Tokenizer:
    name = folder.resolve().name
    config = _json(folder / "tokenizer_config.json")
    named = as_named(_json(folder / "special_tokens_map.json")) | as_named(config)
    template = _template(config.get("chat_template"), folder)
    if (file := folder / "tokenizer.json").is_file():
        return LoadedTokenizer(HuggingFaceReference(_read_text(file), name, named=named), chat_template=template)
    models = sorted(folder.glob("*.model"))
    ranks = sorted(folder.glob("*.tiktoken"))
    if len(models) + len(ranks) != 1:
        found = [path.name for path in (*models, *ranks)]
        raise ConfigError(
            f"{folder} has no tokenizer.json and {found or 'no'} .model or .tiktoken files; expected one of them"
        )
    reference: Reference = _sentencepiece(models[0]) if models else _ranks(ranks[0])
    return LoadedTokenizer(reference, chat_template=template)


def _is_backend(spec: Any) -> bool:
    """A `tokenizers.Tokenizer`: there is none before somebody has imported the package."""
    tokenizers = sys.modules.get("tokenizers")
    return tokenizers is not None and isinstance(spec, tokenizers.Tokenizer)


def _from_transformers(spec: Any, backend: Any) -> Tokenizer:
    named = as_named({f"{kind}_token": getattr(spec, f"{kind}_token", None) for kind in ("bos", "eos", "pad", "unk")})
    name = Path(getattr(spec, "name_or_path", "") or type(spec).__name__).name
    template = _template(getattr(spec, "chat_template", None), None)
    return LoadedTokenizer(HuggingFaceReference(backend.to_str(), name, named=named), chat_template=template)


def _sentencepiece(path: Path) -> SentencePieceReference:
    return SentencePieceReference(path.read_bytes(), path.name)


def _ranks(path: Path) -> TiktokenReference:
    """A file of ranks, whose name tells the pattern and the special tokens that go with it."""
    import tiktoken

    known = {"r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}
    if path.stem not in known:
        raise ConfigError(
            f"{path.name} holds ranks only, and its name is none of {list(known)}, so how text is split is not known; "
            "pass tiktoken.Encoding(name, pat_str=..., mergeable_ranks=..., special_tokens=...)"
        )
    try:
        lines = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"{path} is not a file of ranks, lines of base64 and a number: {error}") from None
    special = {
        "r50k_base": {"<|endoftext|>": 50256},
        "cl100k_base": {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        "o200k_base": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    }[path.stem]
    pattern = SCHEMES[known[path.stem]][0]
    return TiktokenReference(
        tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    )


def _template(given: Any, folder: Path | None) -> str | None:
    """A template, the one called "default" of several, or the file beside the tokenizer."""
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    if isinstance(given, Mapping):
        if "default" not in given:
            log.warning("none of the chat templates %s is called 'default'; none is used", sorted(given))
        elif len(given) > 1:
            log.info("of the chat templates %s, 'default' is used", sorted(given))
        given = given.get("default")
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        return _read_text(file)
    return given if given is None else str(given)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected a tokenizer.json") from None
