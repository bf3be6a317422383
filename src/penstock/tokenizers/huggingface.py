"""Reference for Hugging Face `tokenizers`: one JSON document with everything that decides the ids.

Parsing a vocabulary of 150,000 tokens takes about a second. A loader whose store exists needs only the fingerprint and
the special tokens, so these facts are kept on disk, by the content of the document (`deferred`). Where they are known,
the library parses the document when it is first asked for ids, which is after the fast path is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash

from penstock._forks import renewed
from penstock._optional import package_version
from penstock.arrays.ragged import Ints
from penstock.errors import ConfigError
from penstock.files.cache import DiskCache, default_cache_directory
from penstock.tokenizers.base import (
    FastModel,
    Offsets,
    Reference,
    SpecialTokens,
    VocabularyTable,
    as_token_table,
    check_largest_id,
)
from penstock.tokenizers.documents import (
    ModelPlace,
    TokenizerDocument,
    conflict_of,
    fingerprint_of,
    model_place,
    passed_over_conflict,
)
from penstock.tokenizers.normal_form import changed_by_nfc, made_by_nfc
from penstock.tokenizers.verification import BYTE_PAIRS

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger("penstock.transforms.tokenization")

# Well-known names, used when there is no configuration that names these tokens.
KNOWN = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"),
    "pad": ("<pad>", "<|pad|>", "[PAD]"),
    "unk": ("<unk>", "<|unk|>", "[UNK]"),
}
FORMS = {"NFC", "NFD", "NFKC", "NFKD"}


@dataclass(frozen=True, slots=True)
class DocumentFacts:
    """Facts of the tokenizer of a document, as the library has understood it."""

    fingerprint: str
    vocab_size: int
    normalises: bool
    special: SpecialTokens
    renumbered: bool = False
    """True if the library gives added tokens other ids than the document."""
    model: ModelPlace | None = None
    """Place of the model in the document, if it can be passed over."""


class HuggingFaceReference:
    """Ids as `tokenizers` gives them, without post-processing, padding and truncation.

    The library returns ids as Python lists, document by document; that is one reason why it is not the fast path. The
    vocabulary is parsed once, with `facts` when it is first needed; the two modes, with special tokens and without,
    share it.
    """

    def __init__(
        self, document: str, name: str, *, named: Mapping[str, str] | None = None, facts: DocumentFacts | None = None
    ) -> None:
        self.name, self._named = name, dict(named or {})
        parsed = TokenizerDocument.parsed(document, name, None if facts is None else facts.model)
        config = self._config = parsed.config
        self._model = parsed.model
        self._steps = {part: config.get(part) for part in ("normalizer", "pre_tokenizer")}
        self._normalizing = list(_parts(config.get("normalizer"), "normalizers"))
        self.normalises = any(step["type"] not in ("Replace", "Prepend") for step in self._normalizing)
        self._splitting = list(_parts(config.get("pre_tokenizer"), "pretokenizers"))
        self._added: list[dict[str, Any]] = config.get("added_tokens") or []
        self._modes: dict[bool, tokenizers.Tokenizer] = {}
        self._loading = renewed(threading.Lock())
        self._unused: tokenizers.Tokenizer | None = None
        if facts is None or facts.renumbered:
            self._unused = self._load()
            vocab = self._unused.get_vocab(with_added_tokens=True)
            check_largest_id(vocab, name)
            renumbered = self._renumber(vocab)
            facts = DocumentFacts(
                fingerprint=fingerprint_of(orjson.loads(self._document)) if renumbered else parsed.fingerprint,
                vocab_size=max(vocab.values(), default=-1) + 1,
                normalises=self.normalises,
                special=self._special(vocab, *_around(parsed.around, vocab)),
                renumbered=renumbered,
            )
        self.facts = facts
        self.vocab_size, self.special = facts.vocab_size, facts.special

    def __reduce__(self) -> tuple[Any, ...]:
        # The document has the ids of the library, and no post-processor: what that adds is in the facts.
        facts = replace(self.facts, special=self.special, renumbered=False, model=None)
        return _rebuilt, (self._document.decode(), self.name, self._named, facts)

    def fingerprint(self) -> str:
        return self.facts.fingerprint

    def ids(self, texts: list[str], *, parse_special: bool) -> list[Ints]:
        given = self._mode(parse_special).encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in given]

    def offsets(self, texts: list[str], *, parse_special: bool) -> list[Offsets]:
        found = []
        for one in self._mode(parse_special).encode_batch(texts, add_special_tokens=False):
            ids = np.array(one.ids, np.uint32)
            flat = np.fromiter(itertools.chain.from_iterable(one.offsets), np.int64, 2 * len(ids))
            found.append(Offsets(ids, flat[::2], flat[1::2]))
        return found

    def decode(self, ids: Ints) -> str:
        if self._byte_level:
            return b"".join(self.token_bytes(token) for token in ids.tolist()).decode("utf-8", "replace")
        either = self._mode(False not in self._modes)
        return str(either.decode(ids.tolist(), skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"{self.name} has no token {token}; its ids are 0 to {self.vocab_size - 1}")
        text = self._tokens[token]
        if token in self._added_ids:
            return text.encode()
        if self._byte_level:
            return _bytes_of(text)
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        prefix = self._model.get("continuing_subword_prefix")
        if self._model.get("type") == "WordPiece" and prefix and text.startswith(prefix):
            return text[len(prefix) :].encode()
        return text.replace("▁", " ").encode()

    def table(self) -> VocabularyTable | None:
        kinds = [step["type"] for step in self._normalizing]
        if self._byte_level:
            if not FORMS.issuperset(kinds) or any(step.get("add_prefix_space") for step in self._splitting):
                return None
            prefixed, compare = False, "non-ascii" if kinds else "never"
        else:
            spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
            if not self._byte_fallback or self._splitting or spaces not in self._normalizing:
                return None
            prefixed, compare = {"type": "Prepend", "prepend": "▁"} in self._normalizing, "always"
        tokens = self._all_bytes()
        return as_token_table(tokens, list(self._added_ids), prefixed=prefixed, compare=compare)

    def _all_bytes(self) -> list[bytes]:
        """The bytes of every token; a byte-level vocabulary is translated as one text, as a letter is a byte."""
        if self._byte_level:
            texts = ["" if token in self._added_ids else text for token, text in enumerate(self._tokens)]
            with contextlib.suppress(UnicodeEncodeError):  # a letter outside of the byte alphabet
                data = "".join(texts).translate(_LATIN).encode("latin-1")
                bounds = itertools.accumulate(map(len, texts), initial=0)
                found = [data[start:stop] for start, stop in itertools.pairwise(bounds)]
                for token in self._added_ids:
                    found[token] = self._tokens[token].encode()
                return found
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    def fast(self, *, parse_special: bool) -> FastModel | str:
        try:
            import gigatoken
        except ImportError as error:
            return f"it cannot be imported ({error}); install it with: pip install 'penstock[fast]'"
        if any(token.get("single_word") for token in self._added):
            return "it does not support added tokens that match single words only"
        if self._model.get("type") not in ("BPE", None):
            return f"it does not support {self._model.get('type')} models"

        added = [token for token in self._added if parse_special or not token["special"]]
        text = [token for token in self._added if token["special"] and not parse_special]
        conflict = conflict_of(added, prefixed=any(step.get("add_prefix_space") for step in self._splitting))
        conflict = conflict or passed_over_conflict(self._looked_for(text), self._looked_for(added))
        conflict = conflict or self._normal_conflict(added)
        if conflict:
            return f"it does not support {conflict}"
        traps = changed_by_nfc() if self._in_raw_text(added) or self._in_normal_words(added) else None
        document = orjson.dumps(self._config | {"added_tokens": added})
        return FastModel(lambda: gigatoken.Tokenizer.from_json(document).backend, traps=traps)

    def _in_raw_text(self, added: list[dict[str, Any]]) -> bool:
        """True if gigatoken looks in the text as it is for tokens that `tokenizers` looks for in the normalised text.

        With byte fallback it normalises first, as `tokenizers` does.
        """
        normalized = any(token.get("normalized") for token in added)
        return normalized and bool(self._normalizing) and not self._byte_fallback

    def _in_normal_words(self, added: list[dict[str, Any]]) -> bool:
        """True if gigatoken may find in the normalised text a token that `tokenizers` looks for in the text as it is.

        It takes a normalised word for an added token if that is all of the word.
        """
        if not self._normalizing or not self._byte_level:
            return False
        return any(made_by_nfc(token["content"]) for token in added if not token.get("normalized"))

    def _normal_conflict(self, added: list[dict[str, Any]]) -> str | None:
        """Property of added tokens with which normalisation changes where they are found; None without.

        A text in NFC is the same before normalisation and after it, and so is every part of it. So with NFC only rows
        that may not be in it go to the reference (`changed_by_nfc`): those with decomposed letters or marks, but not
        those with composed letters or ideographs, which are most. A token that NFC changes is found in these as well.
        """
        normalized = [token for token in added if token.get("normalized")]
        contents = [token["content"] for token in self._looked_for(normalized)]
        if len(set(contents)) < len(contents):
            return "added tokens that normalisation makes the same"
        if not self._in_raw_text(added):
            return None
        kinds = {step["type"] for step in self._normalizing}
        if kinds != {"NFC"} or not self._byte_level:
            return f"added tokens that are matched after normalisation ({', '.join(sorted(kinds))})"
        if contents != [token["content"] for token in normalized]:
            return "added tokens that normalisation changes"
        return None

    def _looked_for(self, added: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tokens with the contents that `tokenizers` looks for: it normalises those of some."""
        if not self._normalizing or not any(token.get("normalized") for token in added):
            return added
        import tokenizers

        steps = {"normalizer": self._steps["normalizer"], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        normalizer = tokenizers.Tokenizer.from_buffer(orjson.dumps({"version": "1.0"} | steps)).normalizer
        return [
            token | {"content": normalizer.normalize_str(token["content"])} if token.get("normalized") else token
            for token in added
        ]

    def splitter(self) -> Reference:
        if not self._byte_level:
            return self
        letters = {byte[0]: letter for letter, byte in _BYTE_OF.items()}
        merges = [(letters[first], letters[second]) for first, second in BYTE_PAIRS]
        tokens = [*(letters[byte] for byte in range(256)), *(first + second for first, second in merges)]
        model = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
        document = {"version": "1.0", "added_tokens": [], "model": model} | self._steps
        facts = DocumentFacts(
            fingerprint=fingerprint_of(document),
            vocab_size=len(tokens),
            normalises=self.normalises,
            special=SpecialTokens(),
        )
        return HuggingFaceReference(orjson.dumps(document).decode(), self.name, facts=facts)

    def probes(self) -> list[str]:
        texts = [token["content"] for token in self._added]
        return [probe for text in texts for probe in (text, f"a{text}b", f" {text} {text}\n")]

    @property
    def _document(self) -> bytes:
        return orjson.dumps(self._config)

    @functools.cached_property
    def _tokens(self) -> list[str]:
        """The text of each token; empty for an id without one."""
        tokens = [""] * self.vocab_size
        for token, number in self._mode(False not in self._modes).get_vocab(with_added_tokens=True).items():
            tokens[number] = token
        return tokens

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(int(token["id"]) for token in self._added)

    @functools.cached_property
    def _byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._splitting)

    @property
    def _byte_fallback(self) -> bool:
        return bool(self._model.get("byte_fallback"))

    def _load(self) -> tokenizers.Tokenizer:
        import tokenizers

        try:
            return tokenizers.Tokenizer.from_buffer(self._document)
        except Exception as error:  # the library raises no other class
            raise ConfigError(f"{self.name} is not a tokenizer.json that `tokenizers` can load: {error}") from error

    def _copy(self) -> tokenizers.Tokenizer:
        """Another tokenizer over the same vocabulary, which is not parsed again."""
        import tokenizers

        first = next(iter(self._modes.values()))
        made = tokenizers.Tokenizer(first.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (step := getattr(first, part)) is not None:
                setattr(made, part, step)
        tokens = first.get_added_tokens_decoder()
        listed = (tokens[token["id"]] for token in self._added if token["id"] in tokens)
        for special, group in itertools.groupby(listed, lambda token: bool(token.special)):
            (made.add_special_tokens if special else made.add_tokens)(list(group))
        return made if made.get_added_tokens_decoder() == tokens else self._load()

    def _mode(self, parse_special: bool) -> tokenizers.Tokenizer:
        """The tokenizer of one of the two modes: switching the mode of one object would not be thread-safe."""
        if not any(token["special"] for token in self._added):
            parse_special = True  # the same either way
        if parse_special not in self._modes:
            with self._loading:
                if parse_special not in self._modes:
                    made = self._unused or (self._copy() if self._modes else self._load())
                    self._unused = None
                    made.encode_special_tokens = not parse_special
                    self._modes[parse_special] = made
        return self._modes[parse_special]

    def _renumber(self, vocab: Mapping[str, int]) -> bool:
        """Use the ids that `tokenizers` gives to added tokens; True if there are others in the document.

        It ignores the ids in the file for added tokens that are not in the model's own vocabulary, and counts on from
        the number of tokens: if ids have gaps, that is another id, or even the id of another token.
        """
        wrong = [token for token in self._added if vocab.get(token["content"], token["id"]) != token["id"]]
        if not wrong:
            return False
        added = {token["content"] for token in wrong}
        others = {number: text for text, number in vocab.items() if text not in added}
        for token in wrong:
            if vocab[token["content"]] in others:
                raise ConfigError(
                    f"added token {token['content']!r} of {self.name} has id {token['id']} in the file, but "
                    f"`tokenizers`, which defines the ids, gives it {vocab[token['content']]}, the id of "
                    f"{others[vocab[token['content']]]!r}; put it into the model's vocabulary with its id"
                )
        log.warning(
            "%s: %d added tokens have other ids in the file than `tokenizers`, which defines the ids, gives them; the "
            "first is %r, %d in the file and %d in use",
            self.name,
            len(wrong),
            wrong[0]["content"],
            wrong[0]["id"],
            vocab[wrong[0]["content"]],
        )
        for token in self._added:
            token["id"] = vocab.get(token["content"], token["id"])
        return True

    def _special(self, vocab: Mapping[str, int], first: int | None, last: int | None) -> SpecialTokens:
        """From the configuration if there is one, else from the post-processor, else by well-known names."""
        special = {token["content"]: int(token["id"]) for token in self._added if token["special"]}
        found: dict[str, int | None] = {}
        for kind, names in KNOWN.items():
            text = self._named.get(kind)
            if text is not None:
                if text not in vocab:
                    raise ConfigError(f"the {kind} token {text!r} of {self.name} is not in its vocabulary")
                found[kind] = special.setdefault(text, vocab[text])
            elif not self._named:  # a configuration that names some tokens has no others
                added = {"bos": first, "eos": last}.get(kind)
                known = next((special[name] for name in names if name in special), None)
                found[kind] = known if added is None else added
        return SpecialTokens(named=special, adds_bos=first is not None and first == found.get("bos"), **found)


def _rebuilt(document: str, name: str, named: Mapping[str, str], facts: DocumentFacts) -> HuggingFaceReference:
    return HuggingFaceReference(document, name, named=named, facts=facts)


def _parts(step: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """A step, or the steps of a sequence."""
    if step is not None and step["type"] == "Sequence":
        for part in step[key]:
            yield from _parts(part, key)
    elif step is not None:
        yield step


def _around(step: dict[str, Any] | None, vocab: Mapping[str, int]) -> tuple[int | None, int | None]:
    """The ids that a post-processor adds before and after a text."""
    first = last = None
    for part in _parts(step, "processors"):
        if part["type"] == "TemplateProcessing":
            names = [next(iter(item.values()))["id"] if "SpecialToken" in item else None for item in part["single"]]
            ids = {name: vocab.get(name, token["ids"][0]) for name, token in part["special_tokens"].items()}
            if names and names[0] is not None:
                first = ids.get(names[0])
            if names and names[-1] is not None:
                last = ids.get(names[-1])
        elif part["type"] in ("BertProcessing", "RobertaProcessing"):
            first, last = (vocab.get(text, number) for text, number in (part["cls"], part["sep"]))
    return first, last


def _byte_characters() -> dict[str, bytes]:
    """The character of each byte in byte-level vocabularies: itself if it prints, else one from U+0100."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    characters = {chr(byte): bytes([byte]) for byte in printing}
    return characters | {chr(0x100 + number): bytes([byte]) for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
_LATIN = dict.fromkeys(range(256), "\uffff") | {ord(letter): chr(byte[0]) for letter, byte in _BYTE_OF.items()}
"""Letters of the byte alphabet to characters of Latin-1; others that Latin-1 has to one that it does not have."""


def _bytes_of(text: str) -> bytes:
    """Bytes of a text in the byte alphabet; a character outside of it stands for itself."""
    try:
        return text.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return b"".join(_BYTE_OF.get(character, character.encode()) for character in text)


def as_named(tokens: Mapping[str, Any]) -> dict[str, str]:
    """`{"bos": "<s>", ...}` from a configuration, in which a token is a text or an object with `content`."""
    named = {}
    for kind in KNOWN:
        token = tokens.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if token is not None:
            named[kind] = str(token)
    return named


FACTS_VERSION = 3
"""Goes up when the same files would give other facts."""
_CACHE_BYTES = 16 << 20


def deferred(
    load: Callable[[DocumentFacts | None], HuggingFaceReference], name: str, content: bytes, named: Mapping[str, str]
) -> Reference:
    """The reference that `load` makes of these bytes: loaded now, or deferred if its facts are known.

    `named` are the special tokens that the configuration names.
    """
    options = {"version": FACTS_VERSION, "named": dict(named), "tokenizers": package_version("tokenizers")}
    digest = xxhash.xxh3_128(orjson.dumps(options, option=orjson.OPT_SORT_KEYS))
    digest.update(content)
    key = digest.hexdigest()
    cache = DiskCache(default_cache_directory() / "tokenizers", _CACHE_BYTES)
    try:
        facts = cache.get(key)
    except OSError as error:
        log.info("facts of %s cannot be read from the cache: %s", name, error)
        facts = None
    if facts is not None:
        known = orjson.loads(facts)
        known["special"] = SpecialTokens(**known["special"])
        known["model"] = ModelPlace(**known["model"]) if known["model"] is not None else None
        return DeferredReference(load, name, DocumentFacts(**known))
    made = load(None)
    try:
        cache.put(key, orjson.dumps(asdict(replace(made.facts, model=model_place(content.decode())))))
    except OSError as error:
        log.info("facts of %s cannot be written to the cache: %s", name, error)
    return made


class DeferredReference:
    """A reference whose facts are known and whose document is parsed when something is encoded."""

    def __init__(self, load: Callable[[DocumentFacts | None], Reference], name: str, facts: DocumentFacts) -> None:
        self.name, self._loading = name, renewed(threading.Lock())
        self._load: Callable[[DocumentFacts | None], Reference] | None = load
        self._facts = facts
        self.vocab_size, self.normalises, self.special = facts.vocab_size, facts.normalises, facts.special
        self._made: Reference | None = None

    def loaded(self) -> Reference:
        """The reference itself; the first call loads it, and other threads wait."""
        with self._loading:
            if self._made is None:
                assert self._load is not None
                self._made = self._load(self._facts)
                self._load = None  # it holds the content of the file
            return self._made

    def __reduce__(self) -> tuple[Any, ...]:
        return self.loaded().__reduce__()  # type: ignore[return-value]  # the same bytes, so the same identity

    def fingerprint(self) -> str:
        return self._facts.fingerprint

    def ids(self, texts: list[str], *, parse_special: bool) -> Sequence[Ints]:
        return self.loaded().ids(texts, parse_special=parse_special)

    def offsets(self, texts: list[str], *, parse_special: bool) -> Sequence[Offsets]:
        return self.loaded().offsets(texts, parse_special=parse_special)

    def decode(self, ids: Ints) -> str:
        return self.loaded().decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self.loaded().token_bytes(token)

    def table(self) -> VocabularyTable | None:
        return self.loaded().table()

    def fast(self, *, parse_special: bool) -> FastModel | str:
        return self.loaded().fast(parse_special=parse_special)

    def splitter(self) -> Reference:
        return self.loaded().splitter()

    def probes(self) -> list[str]:
        return self.loaded().probes()
