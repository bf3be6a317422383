"""Reference for tokenizers in Python: functions from text to ids, objects with `encode`, slow ones of `transformers`.

They make a Python object for every token, so they are many times slower than the others.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import orjson
import xxhash

from penstock.arrays.ragged import Ints
from penstock.errors import ConfigError, DataError
from penstock.files.content_hash import UnnamedError, content_hash
from penstock.tokenizers.base import (
    MOST_UNUSED,
    FastModel,
    Offsets,
    Reference,
    SpecialTokens,
    VocabularyTable,
    encode_segments,
)

_PROBES = [
    *(chr(point) for point in (*range(0x20, 0x7F), *range(0xA0, 0x180), 0x4E2D, 0x1F389)),
    *(
        "the",
        " the",
        "The quick brown fox",
        "don't",
        "12345 6.78e9",
        "a  b\tc\nd\r\n",
        "naïve café",
        "日本語",
        "🎉🎉",
        "",
    ),
    *("def f(x):\n    return x + 1\n", "https://example.org/?q=1", "UPPER lower MiXeD", "<|endoftext|>", "</s><s>"),
]
_KINDS = ("bos", "eos", "pad", "unk")
_MOST_TOKENS_OF_A_CHARACTER = 16


class PythonReference:
    """Ids as a function or an object in Python gives them.

    Its options for special tokens, if it has any, are set so that it adds none. Calls come one at a time.
    """

    normalises = True

    def __init__(self, given: Any, *, name: str | None = None) -> None:
        self._given, self._calling = given, threading.Lock()
        own = name or getattr(given, "name_or_path", None) or getattr(given, "name", None)
        self.name = Path(own).name if isinstance(own, str) and own else _name_of(given)
        encode = getattr(given, "encode", None)
        self._encode: Callable[..., Any] = encode if callable(encode) else given
        self._parameters = _parameters(self._encode)
        self._decode = getattr(given, "decode", None)
        self._of_transformers = hasattr(given, "convert_tokens_to_ids") and hasattr(given, "get_vocab")
        self._fingerprint: str | None = None
        self.special = _special(given)
        self.vocab_size = _vocab_size(given, self.special)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (cloudpickle.dumps(self._given), self.name, self.fingerprint())

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self._hash()
        return self._fingerprint

    def _hash(self) -> str:
        """Hash of its own `fingerprint`, or of its vocabulary or code, and of the ids of some texts."""
        own = getattr(self._given, "fingerprint", None)
        own = own() if callable(own) else own
        if isinstance(own, str):
            return f"python-{xxhash.xxh3_128_hexdigest(own.encode())}"
        digest = xxhash.xxh3_128(self._content())
        for text in _PROBES:
            try:
                digest.update(repr(self._call(text, False).tolist()).encode())
            except Exception as error:  # noqa: BLE001 - a text that it cannot encode is part of what it does
                digest.update(type(error).__name__.encode())
        return f"python-{digest.hexdigest()}"

    def ids(self, texts: list[str], *, parse_special: bool) -> list[Ints]:
        if parse_special and not self._of_transformers and self.special.named:
            return [found.ids for found in self.offsets(texts, parse_special=True, with_places=False)]
        return [self._call(text, parse_special) for text in texts]

    def offsets(self, texts: list[str], *, parse_special: bool, with_places: bool = True) -> list[Offsets]:
        def places(parts: list[str]) -> list[Offsets]:
            return [self._placed(part, self._call(part, parse_special), with_places) for part in parts]

        if parse_special and not self._of_transformers:
            return encode_segments(texts, self.special.named, places)
        return places(texts)

    def decode(self, ids: Ints) -> str:
        return self._decoded(ids.tolist())

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"{self.name} has no token {token}; its ids are below {self.vocab_size}")
        named = next((text for text, number in self.special.named.items() if number == token), None)
        return (self._decoded([token]) if named is None else named).encode()

    def table(self) -> VocabularyTable | None:
        return None

    def fast(self, *, parse_special: bool) -> FastModel | str:
        return "it does not support tokenizers in Python"

    def splitter(self) -> Reference:
        return self

    def probes(self) -> list[str]:
        return []

    def _call(self, text: str, parse_special: bool) -> Ints:
        options: dict[str, Any] = {}
        if "add_special_tokens" in self._parameters or self._of_transformers:
            options["add_special_tokens"] = False
        if self._of_transformers and not parse_special:
            options["split_special_tokens"] = True
        options |= {kind: False for kind in ("bos", "eos", "add_bos", "add_eos") if kind in self._parameters}
        if "disallowed_special" in self._parameters:
            options |= {"disallowed_special": (), "allowed_special": "all" if parse_special else set()}
        with self._calling:
            found = self._encode(text, **options)
        return self._checked(found, text)

    def _checked(self, found: Any, text: str) -> Ints:
        if isinstance(found, Mapping) and "input_ids" in found:
            found = found["input_ids"]
        found = getattr(found, "ids", found)
        if hasattr(found, "detach"):  # of torch
            found = found.detach().cpu()
        try:
            ids = np.asarray(found)
        except (ValueError, TypeError):
            ids = np.zeros(0, np.object_)
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.ndim == 1 and not len(ids) and ids.dtype != np.object_:
            return np.zeros(0, np.uint32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ConfigError(
                f"the tokenizer {self.name} must return a list or an array of integers for a text, got "
                f"{found!r:.80} for {text!r:.40}"
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = int(ids.max() if ids.max() >= self.vocab_size else ids.min())
            raise DataError(
                f"the tokenizer {self.name} gave the id {wrong} for {text!r:.40}; its ids are below {self.vocab_size}, "
                "and not negative"
            )
        return ids.astype(np.uint32)

    def _decoded(self, ids: list[int]) -> str:
        if not callable(self._decode):
            raise ConfigError(
                f"the tokenizer {self.name} has no decode, which chats, `show` and `trace` need; pass an object with "
                "encode(text) and decode(ids)"
            )
        options = {"skip_special_tokens": False} if self._of_transformers else {}
        with self._calling:
            return str(self._decode(ids, **options))

    def _placed(self, text: str, ids: Ints, with_places: bool) -> Offsets:
        """Places of the tokens, found by decoding: several tokens that make up one character all have its place."""
        none = np.zeros(len(ids), np.int64)
        if not with_places:
            return Offsets(ids, none, none)
        starts, ends, at, first = none.copy(), none.copy(), 0, 0
        listed = ids.tolist()
        for number in range(len(listed)):
            piece = self._decoded(listed[first : number + 1])
            if piece and "\ufffd" not in piece and text.startswith(piece, at):
                starts[first : number + 1], ends[first : number + 1] = at, at + len(piece)
                at, first = at + len(piece), number + 1
            elif number - first >= _MOST_TOKENS_OF_A_CHARACTER:
                break
        if at != len(text) or first != len(ids):
            raise DataError(
                f"the tokens of {self.name} do not decode to the text: {text[at : at + 40]!r} is "
                f"{self._decoded(listed[first : first + 8])!r}; chats need the place of every token, so use a fast "
                "tokenizer (tokenizers, tiktoken, SentencePiece)"
            )
        return Offsets(ids, starts, ends)

    def _content(self) -> bytes:
        """Bytes that decide the ids: the vocabulary, or else the code with everything it refers to."""
        kind = type(self._given)
        if self._of_transformers:
            facts = [kind.__qualname__, sorted(self._given.get_vocab().items()), sorted(self.special.named.items())]
            try:
                return orjson.dumps(facts)
            except TypeError:  # a vocabulary of all code points has surrogates
                return json.dumps(facts).encode()
        try:
            return content_hash(self._given).encode()
        except UnnamedError as error:
            raise ConfigError(
                f"the tokenizer {self.name} has no content to tell it from others ({error}); give it an attribute "
                "`fingerprint`, a text that changes with its ids"
            ) from error


def is_python_tokenizer(given: Any) -> bool:
    """True for a function, or an object with `encode`."""
    return callable(getattr(given, "encode", None)) or callable(given)


def _rebuilt(pickled: bytes, name: str, fingerprint: str) -> PythonReference:
    made = PythonReference(cloudpickle.loads(pickled), name=name)
    made._fingerprint = fingerprint
    return made


def _name_of(given: Any) -> str:
    name = getattr(given, "__qualname__", None) or type(given).__name__
    return str(name).replace("<", "").replace(">", "")


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a compiled function
        return []


def _special(given: Any) -> SpecialTokens:
    """Special tokens by the usual names: `eos_token_id` and `eos_token`, or `eos_id`."""
    named: dict[str, int] = {}
    for token, number in zip(getattr(given, "all_special_tokens", ()), getattr(given, "all_special_ids", ())):
        named[str(token)] = int(number)
    own = getattr(given, "special_tokens", None)
    if isinstance(own, Mapping):
        named |= {str(token): number for token, number in own.items() if isinstance(number, int)}
    roles: dict[str, int | None] = {}
    for kind in _KINDS:
        found = getattr(given, f"{kind}_token_id", None)
        found = getattr(given, f"{kind}_id", None) if found is None else found
        found = found() if callable(found) else found
        roles[kind] = int(found) if isinstance(found, int) and found >= 0 else None
        text = getattr(given, f"{kind}_token", None)
        if isinstance(text, str) and roles[kind] is not None:
            named.setdefault(text, int(roles[kind] or 0))
        elif isinstance(text, str) and text in named:
            roles[kind] = named[text]
    return SpecialTokens(named=named, adds_bos=_adds_bos(given, roles["bos"]), **roles)


def _adds_bos(given: Any, bos: int | None) -> bool:
    """True for a tokenizer of `transformers` that begins a text with BOS."""
    build = getattr(given, "build_inputs_with_special_tokens", None)
    try:
        return bos is not None and callable(build) and list(build([]))[:1] == [bos]
    except ValueError:  # a token that it would add is not defined
        return False


def _vocab_size(given: Any, special: SpecialTokens) -> int:
    """One more than the largest id; a size that is large enough if it is not known."""
    sizes = []
    for name in ("vocab_size", "n_vocab", "get_vocab_size", "__len__"):
        found = getattr(given, name, None)
        found = found() if callable(found) else found
        if isinstance(found, int):
            sizes.append(found)
    if hasattr(given, "get_vocab"):
        sizes.append(max(given.get_vocab().values(), default=-1) + 1)
    known = max(sizes, default=MOST_UNUSED)
    return max(known, *(number + 1 for number in special.named.values()), 1)
