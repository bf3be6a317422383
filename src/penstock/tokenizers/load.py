"""`load_tokenizer`: any supported tokenizer as a `Tokenizer`.

`LoadedTokenizer` combines the fast path, where it is exact, with the reference, where it is not.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.arrays.ragged import MOST, Flags, Ints, Ragged, list_array, row_offsets, spliced
from penstock.arrays.text import arrow_of, checked_text, pieces, utf8
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import cut, is_remote, local_or_none, shown
from penstock.files.hub import TOKENIZER_FILES, fetch_tokenizer, is_repository_name
from penstock.tokenizers.base import (
    REFERENCE_BYTES,
    Encoded,
    Offsets,
    Reference,
    SpecialTokens,
    Tokenizer,
    VocabularyTable,
    narrowest,
    reference_ids,
)
from penstock.tokenizers.fast import FastPath, Refused
from penstock.tokenizers.huggingface import DeferredReference, DocumentFacts, HuggingFaceReference, as_named, deferred
from penstock.tokenizers.python import PythonReference, is_python_tokenizer
from penstock.tokenizers.sentencepiece import SentencePieceReference
from penstock.tokenizers.simple import ByteTokenizer, CharTokenizer
from penstock.tokenizers.tiktoken import PUBLISHED, SCHEMES, TiktokenReference, missing_package, named_encoding

FAST_BYTES, SPAN_BYTES = 16 << 20, 4 << 20
"""Text that the fast path takes at once, without and with spans, which take many times as much memory."""
_SENTENCEPIECE = re.compile(r"\.model(\.v\d\w*)?$")
"""Names of SentencePiece models; Mistral's end in a version, such as `tokenizer.model.v3`."""

Made = TypeVar("Made")
Encode: TypeAlias = Callable[[pa.Array], Ragged]
Spans: TypeAlias = tuple[Ragged, npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids, and the first byte and the end of each."""


class LoadedTokenizer:
    """A tokenizer as every stage uses it, over the library that defines its ids.

    Ids come from gigatoken where it gives the ids of the reference: this is checked before the first row, on the first
    rows, and on a sample chosen by content. A difference in the first batch turns gigatoken off, and the batch is
    encoded again; a later difference is an error, because delivered rows may be wrong. With `fast=False` gigatoken is
    not used. A copy in another process (`alone=False`) does not know what was delivered elsewhere, so every difference
    is an error there, except before the first row.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        chat_template: str | None = None,
        special: SpecialTokens | None = None,
        fast: bool | None = True,
        alone: bool = True,
    ) -> None:
        self._given, self._wanted, self._alone = reference, fast, alone
        self._special = reference.special if special is None else special
        self._chat_template = chat_template
        self._fast: dict[bool, FastPath] = {}
        self._table: VocabularyTable | None = None
        self._has_table: bool | None = None
        self._fingerprint: str | None = None

    @property
    def _reference(self) -> Reference:
        """The library behind it, which parses the vocabulary now if it was deferred."""
        return self._given.loaded() if isinstance(self._given, DeferredReference) else self._given

    @property
    def name(self) -> str:
        return self._given.name

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            special = self._special
            self._fingerprint = f"{self._given.fingerprint()}-bos={special.bos}-eos={special.eos}-pad={special.pad}"
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        return self._given.vocab_size

    @property
    def dtype(self) -> pa.DataType:
        return narrowest(self.vocab_size)

    @property
    def special(self) -> SpecialTokens:
        return self._special

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode(self, texts: pa.Array, *, parse_special: bool = False) -> pa.ListArray:
        given = checked_text(texts)
        return list_array(self._exactly(given, lambda encode: encode(given), parse_special), self.dtype, texts)

    def encode_spans(self, texts: pa.Array, *, parse_special: bool = True) -> Encoded:
        table = self._token_table()
        given = checked_text(texts)
        if table is None:
            rows, starts, ends = self._all_spans(given, REFERENCE_BYTES, self._reference_spans, parse_special)
        else:
            rows, starts, ends = self._exactly(
                given,
                lambda encode: self._all_spans(
                    given, SPAN_BYTES, lambda part, parse: self._table_spans(part, table, encode, parse), parse_special
                ),
                parse_special,
            )
        return Encoded(list_array(rows, self.dtype, texts), starts, ends)

    def decode(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return self._reference.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self._reference.token_bytes(token)

    def fit_budget(self, nbytes: int, *, parse_special: bool = False) -> None:
        """Load what encoding needs, and drop its cache once the process has grown by `nbytes`.

        The size of the cache cannot be read, only the size of the process. For usual text it is some hundred
        megabytes; a smaller limit only costs reloads.
        """
        self._fast_path(parse_special).fit(nbytes)

    def slow_because(self, *, parse_special: bool = False) -> str | None:
        """Reason why the fast path is not used; None while it is, or before it was tried."""
        return self._fast_path(parse_special).refusal

    def reference_rows(self, *, parse_special: bool = False) -> int:
        """Number of rows that went to the reference because of their characters."""
        return self._fast_path(parse_special).reference_rows

    def with_special(self, **tokens: str | None) -> LoadedTokenizer:
        """The same tokenizer with another `bos`, `eos`, `pad` or `unk` token, given by its text."""
        ids = {}
        for kind, text in tokens.items():
            if text is not None:
                ids[kind] = self._special.named.get(text, self._only_id(text))
                if ids[kind] is None:
                    known = list(self._special.named)
                    raise ConfigError(f"{kind}={text!r} is not a token of {self.name}; its special tokens are {known}")
        return self._with(special=replace(self._special, **ids))  # type: ignore[arg-type]

    def with_template(self, chat_template: str) -> LoadedTokenizer:
        """The same tokenizer with another chat template."""
        return self._with(chat_template=chat_template)

    def without_fast(self, *, quietly: bool = False) -> LoadedTokenizer:
        """The same tokenizer, with ids from the reference alone; `quietly` does not log it."""
        return self._with(fast=None if quietly else False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.vocab_size:,} ids)"

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments() | {"alone": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _arguments(self) -> dict[str, Any]:
        return {
            "reference": self._given,
            "special": self._special,
            "chat_template": self._chat_template,
            "fast": self._wanted,
            "alone": self._alone,
        }

    def _with(self, **changed: Any) -> LoadedTokenizer:
        return LoadedTokenizer(**(self._arguments() | changed))

    def _exactly(self, texts: pa.Array, work: Callable[[Encode], Made], parse_special: bool) -> Made:
        """The result of `work` with the ids of the fast path or, if it is refused, of the reference.

        All ids come from one of the two, so that nothing is delivered before everything is checked.
        """
        fast = self._fast_path(parse_special)
        try:
            made = work(
                lambda some: Ragged.joined(
                    [fast.encode(part) for part in pieces(some, FAST_BYTES)] or [Ragged.of([], np.uint32)]
                )
            )
            if len(texts):
                fast.deliver()
        except Refused:
            return work(lambda some: reference_ids(self._reference, some, parse_special=parse_special))
        return made

    def _fast_path(self, parse_special: bool) -> FastPath:
        if parse_special not in self._fast:  # of two threads that make one, the first counts
            made = FastPath(self._given, parse_special=parse_special, wanted=self._wanted, alone=self._alone)
            self._fast.setdefault(parse_special, made)
        return self._fast[parse_special]

    def _only_id(self, text: str) -> int | None:
        ids = self._reference.ids([text], parse_special=True)[0]
        return int(ids[0]) if len(ids) == 1 else None

    def _token_table(self) -> VocabularyTable | None:
        if self._has_table is None:
            self._table = self._reference.table()
            self._has_table = self._table is not None
        return self._table

    def _all_spans(
        self, texts: pa.Array, piece_bytes: int, spans: Callable[[pa.Array, bool], Spans], parse_special: bool
    ) -> Spans:
        rows: list[Ragged] = []
        starts = [np.zeros(0, np.int32)]
        ends = [np.zeros(0, np.int32)]
        for piece in pieces(texts, piece_bytes):
            if utf8(piece).offsets[-1] > MOST:
                raise DataError(f"a text of {utf8(piece).offsets[-1]:,} bytes has no 32-bit offsets; split it before")
            part = spans(piece, parse_special)
            rows.append(part[0])
            starts.append(part[1])
            ends.append(part[2])
        return Ragged.joined(rows), np.concatenate(starts), np.concatenate(ends)

    def _table_spans(self, texts: pa.Array, table: VocabularyTable, encode: Encode, parse_special: bool) -> Spans:
        rows = encode(texts)
        lengths: Ints = np.diff(table.offsets)[rows.values]
        if table.prefixed:
            lengths = lengths - _added_spaces(rows, table)
        starts, ends = row_offsets(lengths, rows.offsets)
        wrong = _rows_that_differ(texts, rows, table, lengths)
        if not wrong.any():
            return rows, starts, ends
        mended = self._reference_spans(texts.filter(arrow_of(wrong)), parse_special)
        right = np.repeat(~wrong, np.diff(rows.offsets))
        kept = np.concatenate(([0], np.cumsum(np.diff(rows.offsets)[~wrong])))
        whole = [
            spliced(wrong, Ragged(new, mended[0].offsets), Ragged(old[right], kept))
            for new, old in zip((mended[0].values, *mended[1:]), (rows.values, starts, ends))
        ]
        return whole[0], whole[1].values.astype(np.int32, copy=False), whole[2].values.astype(np.int32, copy=False)

    def _reference_spans(self, texts: pa.Array, parse_special: bool) -> Spans:
        given = texts.to_pylist()
        found = self._reference.offsets(given, parse_special=parse_special)
        spans = [_in_bytes(text, one) for text, one in zip(given, found)]
        none = np.zeros(0, np.int32)
        return (
            Ragged.of([one.ids for one in found], np.uint32),
            np.concatenate([none, *(starts for starts, _ in spans)]),
            np.concatenate([none, *(ends for _, ends in spans)]),
        )


def _in_bytes(text: str, found: Offsets) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Offsets in characters as offsets in UTF-8 bytes."""
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) == len(text):
        return found.starts.astype(np.int32), found.ends.astype(np.int32)
    first_bytes = np.append(np.flatnonzero(data & 0xC0 != 0x80), len(data)).astype(np.int32)
    return first_bytes[found.starts], first_bytes[found.ends]


def _added_spaces(rows: Ragged, table: VocabularyTable) -> Ints:
    """1 for each token that begins with an added space: at the beginning of a row or after a special token."""
    opening = np.zeros(len(rows.values), np.bool_)
    opening[1:] = table.special[rows.values[:-1]]
    opening[rows.offsets[:-1][np.diff(rows.offsets) > 0]] = True
    first = np.zeros(len(table.offsets) - 1, np.uint8)
    filled = np.diff(table.offsets) > 0
    first[filled] = table.data[table.offsets[:-1][filled]]
    added: Ints = (opening & (first == 32)[rows.values] & ~table.special[rows.values]).astype(np.int64)
    return added


def _rows_that_differ(texts: pa.Array, rows: Ragged, table: VocabularyTable, lengths: Ints) -> Flags:
    """The rows whose joined tokens are not the text."""
    data, bounds = utf8(texts)
    sums = np.concatenate(([0], np.cumsum(lengths)))
    wrong: Flags = np.diff(sums[rows.offsets]) != np.diff(bounds)
    if table.compare == "never" or len(data) == 0 or (table.compare == "non-ascii" and data.max() < 0x80):
        return wrong
    # Lengths agree row by row, so the bytes can be compared as arrays.
    right = ~wrong
    of_token, of_byte = np.repeat(right, np.diff(rows.offsets)), np.repeat(right, np.diff(bounds))
    ids, taken = rows.values[of_token], lengths[of_token]
    ends = np.cumsum(taken)
    first = table.offsets[1:][ids] - taken  # an added space comes first
    places = np.repeat(first - (ends - taken), taken) + np.arange(ends[-1] if len(ends) else 0)
    owner = np.repeat(np.flatnonzero(right), np.diff(bounds)[right])
    wrong[owner[table.data[places] != data[of_byte]]] = True
    return wrong


log = logging.getLogger("penstock.transforms.tokenization")

TokenizerSpec: TypeAlias = Tokenizer | str | os.PathLike[str] | Any
"""A tokenizer of one of the supported libraries, a path, a name, a function from text to ids, or something with the
methods of `Tokenizer`."""

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
    """The tokenizer of `spec`:

    - a name on the Hugging Face Hub, `"Qwen/Qwen3-8B"`, or `"Qwen/Qwen3-8B@revision"`: its tokenizer files are fetched
      once into the Hub's own cache
    - a `tokenizers.Tokenizer`, or a `transformers` tokenizer; those without one inside ("slow" ones) are slow
    - a path to `tokenizer.json`, or to a model directory with one; `tokenizer_config.json`, `special_tokens_map.json`
      and `chat_template.jinja` in the same directory are read too
    - a `tiktoken.Encoding`, the name of a published one ("cl100k_base"), or a `.tiktoken` file of such a name
    - a `SentencePieceProcessor`, or a path to a `.model` file
    - a function from text to ids (a list or an array), or an object with `encode`, and for chats `decode`; slow
    - "byte", a `ByteTokenizer`, a `CharTokenizer`, or a path to a file of `CharTokenizer.save`

    `bos`, `eos` and `pad` are the texts of these tokens, where the files name none or others.

    With `fast=False` ids come from the reference library alone, which is slower and gives the same ids. A tokenizer
    that was loaded so stays so.
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
        return _with_bos(SentencePieceReference(spec.serialized_model_proto(), "sentencepiece"), spec, "_add_bos")
    inner: Any = getattr(spec, "_tokenizer", None)
    if _is_backend(inner):  # an implementation of the package `tokenizers`
        return LoadedTokenizer(HuggingFaceReference(inner.to_str(), "tokenizer"))
    if is_python_tokenizer(spec):
        template = getattr(spec, "chat_template", None)
        return LoadedTokenizer(PythonReference(spec), chat_template=_template(template, None))
    raise ConfigError(
        f"{type(spec).__module__}.{type(spec).__name__} is not a tokenizer; expected a tokenizers.Tokenizer, a "
        "transformers tokenizer, a tiktoken.Encoding, a SentencePieceProcessor, a path, a name on the Hub, a function "
        "from text to ids, or 'byte'"
    )


def _from_url(url: str) -> Tokenizer:
    """The tokenizer at a URL, read from local copies of its files, which are kept."""
    from penstock.files.remote import fetch  # for those who have URLs

    address, query = cut(url)
    folder, _, name = address.rstrip("/").rpartition("/")
    if "." in name and name != "tokenizer.json":
        return _from_file(fetch(url))
    folder = folder if name == "tokenizer.json" else address.rstrip("/")
    copies: list[Path] = []
    for each in (file for file in TOKENIZER_FILES if "*" not in file):
        with contextlib.suppress(FileNotFoundError):
            copies.append(fetch(f"{folder}/{each}{query}"))
    if not copies:
        raise ConfigError(
            f"{shown(url)!r} is not a tokenizer: there is no tokenizer.json; pass the URL of a file, or of its folder"
        )
    with tempfile.TemporaryDirectory() as together:
        for copy in copies:
            shutil.copyfile(copy, Path(together) / copy.name)
        return _from_directory(Path(together), name=folder.rpartition("/")[2])


def _from_text(spec: str) -> Tokenizer:
    if is_remote(spec) and local_or_none(spec) is None:
        return _from_url(spec)
    path = Path(spec)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_file(path)
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        raise ConfigError("'char' needs an alphabet; pass CharTokenizer('abc...'), or CharTokenizer.fit(texts)")
    if not is_repository_name(spec):
        raise ConfigError(
            f"{spec!r} is not a tokenizer: there is no such file or directory; pass a tokenizer.json, a model "
            "directory, a .model file, a name on the Hub such as 'Qwen/Qwen3-8B', a tiktoken encoding such as "
            "'cl100k_base', or 'byte'"
        )
    try:
        encoding = named_encoding(spec)
    except ConfigError:
        if spec in PUBLISHED:
            raise
        encoding = None  # the Hub may have it
    if encoding is not None:
        return LoadedTokenizer(TiktokenReference(encoding))
    try:
        folder = fetch_tokenizer(spec)
    except ConfigError as error:
        raise ConfigError(f"{spec!r} is not a tokenizer here (no such file or directory), and {error}") from error
    return _from_directory(folder, name=spec)


def _from_file(path: Path) -> Tokenizer:
    if _SENTENCEPIECE.search(path.name):
        return LoadedTokenizer(_sentencepiece(path))
    if path.suffix == ".tiktoken":
        return LoadedTokenizer(_ranks(path))
    document = _read_text(path)
    if document.lstrip()[:1] == "{" and '"CharTokenizer"' in document[:100]:
        return CharTokenizer.load(path)
    if path.name == "tokenizer.json":
        return _from_directory(path.parent)
    return LoadedTokenizer(_parsed_on_use(document.encode(), path, path.name, {}))


def _from_directory(folder: Path, *, name: str | None = None) -> Tokenizer:
    shown, name = name or folder, name or folder.resolve().name
    config = _json(folder / "tokenizer_config.json")
    named = as_named(_json(folder / "special_tokens_map.json")) | as_named(config)
    template = _template(config.get("chat_template"), folder)
    if (file := folder / "tokenizer.json").is_file():
        made = LoadedTokenizer(_parsed_on_use(file.read_bytes(), file, name, named), chat_template=template)
        if config.get("add_bos_token") and not made.special.adds_bos:
            log.info(
                "%s: tokenizer_config.json has add_bos_token, and the post-processor in tokenizer.json, which decides "
                "(as in transformers 5), adds no BOS; pass add_bos=True to begin documents with it",
                name,
            )
        return made
    models = sorted(folder.glob("*.model"))
    ranks = sorted(folder.glob("*.tiktoken"))
    if len(models) + len(ranks) != 1:
        found = [path.name for path in (*models, *ranks)]
        raise ConfigError(
            f"{shown} has no tokenizer.json and {found or 'no'} .model or .tiktoken files; expected one of them; "
            "where transformers can load it, AutoTokenizer.from_pretrained(...).save_pretrained('model') makes a "
            "tokenizer.json"
        )
    reference: Reference = _sentencepiece(models[0]) if models else _ranks(ranks[0])
    return _with_bos(reference, config, "add_bos_token", chat_template=template)


def _with_bos(reference: Reference, settings: Any, name: str, **options: Any) -> LoadedTokenizer:
    """The tokenizer of a model whose file does not say if a text begins with BOS: its settings do."""
    adds = settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
    special = replace(reference.special, adds_bos=bool(adds) and reference.special.bos is not None)
    return LoadedTokenizer(reference, special=special, **options)


def _parsed_on_use(document: bytes, path: Path, name: str, named: Mapping[str, str]) -> Reference:
    def load(facts: DocumentFacts | None) -> HuggingFaceReference:
        return HuggingFaceReference(_text(document, path), name, named=named, facts=facts)

    return deferred(load, name, document, named)


def _is_backend(spec: Any) -> bool:
    """True for a `tokenizers.Tokenizer`; there is none before the package is imported."""
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
    """A file of ranks, whose name determines the pattern and the special tokens."""
    try:
        import tiktoken
    except ImportError as error:
        raise missing_package(path.name) from error

    known = {"r50k_base": "gpt2", "cl100k_base": "gpt4", "o200k_base": "o200k"}
    if path.stem not in known:
        raise ConfigError(
            f"{path.name} holds ranks only, and its name is none of {list(known)}, so its split pattern is unknown; "
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
    """A template, the one called "default" of several, or the file next to the tokenizer."""
    if isinstance(given, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in given):
            raise ConfigError(f"chat_template must be text, or a list of names and templates, got {given!r:.80}")
        given = {entry["name"]: entry.get("template") for entry in given}
    if isinstance(given, Mapping):
        if "default" not in given:
            log.warning("none of the chat templates %s is called 'default'; none is used", sorted(given))
        elif len(given) > 1:
            log.info("of the chat templates %s, 'default' is used", sorted(given))
        given = given.get("default")
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        return _read_text(file)
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"chat_template must be text, or a list of names and templates, got {given!r:.80}")
    return given


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
    return _text(path.read_bytes(), path)


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; expected a tokenizer.json") from None
