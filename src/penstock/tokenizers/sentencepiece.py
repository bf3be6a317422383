"""Reference for SentencePiece models."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.arrays.ragged import Ints
from penstock.errors import ConfigError
from penstock.tokenizers.base import (
    FastModel,
    Offsets,
    Reference,
    SpecialTokens,
    VocabularyTable,
    encode_segments,
    literal,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class ModelFacts(NamedTuple):
    """`kinds` has one of the constants above for each piece; `rule` is "" if the model does not normalise text."""

    kinds: list[int]
    rule: str


def model_facts(model: bytes) -> ModelFacts:
    """Facts of a model that SentencePiece has loaded before, so it is valid."""
    kinds: list[int] = []
    rule, rules = "", b""
    for number, value in _fields(model):
        if number == 1:
            kinds.append(next((kind for field, kind in _fields(value) if field == 3 and isinstance(kind, int)), NORMAL))
        elif number == 3:
            for field, part in _fields(value):
                if field == 1 and isinstance(part, bytes):
                    rule = part.decode()
                elif field == 2 and isinstance(part, bytes):
                    rules = part
    return ModelFacts(kinds, (rule or "unnamed") if rules else "")


def _fields(message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protobuf message: numbers as numbers, everything else as its bytes."""
    assert isinstance(message, bytes)
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        match key & 7:
            case 0:
                value, at = _number(message, at)
                yield key >> 3, value
                continue
            case 2:
                length, at = _number(message, at)
            case other:
                length = 8 if other == 1 else 4
        yield key >> 3, message[at : at + length]
        at += length


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A varint (groups of seven bits, the lowest first), and the position after it."""
    value = shift = 0
    while (byte := message[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


# Rules that change single characters, and clusters of them.
RULES = {"nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"}


class SentencePieceReference:
    """Ids as a `SentencePieceProcessor` gives them.

    SentencePiece never reads a control token such as `</s>` from text. With `parse_special` the text is split at
    control tokens, and each segment is encoded alone, with the space that the model adds before a text, if it does.
    User-defined symbols, such as `<|im_start|>`, are special tokens too, unless they are white space; SentencePiece
    reads them from any text, with or without `parse_special`.
    """

    normalises = False
    """Rows with characters that depend on their neighbours match `trap_pattern` and go to the reference."""

    def __init__(self, model: bytes, name: str) -> None:
        import sentencepiece

        self.name, self._model = name, model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # noqa: BLE001 - several classes, by release
            raise ConfigError(f"{name} is not a SentencePiece model: {error}") from None
        count = self.vocab_size = int(self._processor.get_piece_size())
        pieces = [self._processor.id_to_piece(number) for number in range(count)]
        self._pieces = pieces
        self._kinds, self._rule = model_facts(model)
        self._control = {piece: number for number, piece in enumerate(pieces) if self._kinds[number] == CONTROL}
        defined = {piece: number for number, piece in enumerate(pieces) if self._kinds[number] == USER_DEFINED}
        named = self._control | {piece: number for piece, number in defined.items() if piece.strip("▁ \t\r\n")}
        known = {kind: int(getattr(self._processor, f"{kind}_id")()) for kind in ("bos", "eos", "pad", "unk")}
        roles = {kind: number for kind, number in known.items() if number >= 0}
        self.special = SpecialTokens(named=named, adds_bos=False, **roles)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceReference, (self._model, self.name)

    def fingerprint(self) -> str:
        return f"sentencepiece-{xxhash.xxh3_128_hexdigest(self._model)}"

    def ids(self, texts: list[str], *, parse_special: bool) -> list[Ints]:
        if not parse_special:
            return self._plain(texts)
        found = list(self._plain(texts))
        marked = [row for row, text in enumerate(texts) if any(token in text for token in self._control)]
        cut = encode_segments([texts[row] for row in marked], self._control, self._plain_offsets)
        for row, one in zip(marked, cut):
            found[row] = one.ids
        return found

    def offsets(self, texts: list[str], *, parse_special: bool) -> list[Offsets]:
        return encode_segments(texts, self._control if parse_special else {}, self._plain_offsets)

    def decode(self, ids: Ints) -> str:
        """The text with control tokens, which SentencePiece would drop."""
        parts = []
        control = set(self._control.values())
        for special, run in itertools.groupby(ids.tolist(), key=control.__contains__):
            numbers = list(run)
            parts.append(
                "".join(self._pieces[number] for number in numbers) if special else self._processor.decode(numbers)
            )
        return "".join(parts)

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"{self.name} has no token {token}; its ids are 0 to {self.vocab_size - 1}")
        if self._kinds[token] == BYTE:
            return bytes.fromhex(self._pieces[token][3:5])
        return self._pieces[token].replace("▁", " ").encode()

    def table(self) -> VocabularyTable | None:
        return None

    def fast(self, *, parse_special: bool) -> FastModel | str:
        try:
            import gigatoken
        except ImportError as error:
            return f"it cannot be imported ({error}); install it with: pip install 'penstock[fast]'"
        if UNUSED in self._kinds:
            return "it does not support pieces that are not used"
        if self._rule and self._rule not in RULES:
            return f"it does not support custom normalisation rules ({self._rule})"
        model = self._model
        return FastModel(lambda: gigatoken.Tokenizer.from_sentencepiece(model).backend, traps=self._traps())

    def splitter(self) -> Reference:
        return self

    def probes(self) -> list[str]:
        return [probe for text in self.special.named for probe in (text, f"a{text}b", f" {text} {text}\n")]

    def _traps(self) -> str:
        symbols = [piece for piece, kind in zip(self._pieces, self._kinds) if kind not in (NORMAL, BYTE)]
        squeezed = self._processor.encode("a  b") == self._processor.encode("a b")
        return trap_pattern(symbols, normalised=bool(self._rule), folded=self._rule.endswith("_cf"), squeezed=squeezed)

    def _plain(self, texts: list[str]) -> list[Ints]:
        if hasattr(self._processor, "encode_as_numpy"):
            found: list[Ints] = self._processor.encode_as_numpy(texts)
            return found
        return [np.array(ids, np.int32) for ids in self._processor.encode(texts)]

    def _plain_offsets(self, texts: list[str]) -> list[Offsets]:
        if not hasattr(self._processor, "encode_as_offset_mapping"):
            raise ConfigError(f"offsets of {self.name} need sentencepiece 0.2.2 or later; upgrade it")
        found = []
        for text in texts:
            given = self._processor.encode_as_offset_mapping(text)
            flat = np.fromiter(itertools.chain.from_iterable(given["offsets"]), np.int64)
            found.append(Offsets(np.array(given["ids"], np.int64), flat[::2], flat[1::2]))
        return found


# White space that SentencePiece does not treat as a space.
SPACES = r"\t\n\v\f\r\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# Characters that may form one user-perceived character with a neighbour: marks, formatting characters and unassigned
# ones; Thai and Lao AM, the sound marks of narrow Kana, parts of Hangul syllables, flags, skin tones,
# and letters of Brahmic scripts that are written before the next.
CLUSTERS = (
    r"[^\p{L}\p{N}\p{P}\p{S}\p{Z}\p{Cc}\p{Co}]|[\x{e33}\x{eb3}\x{ff9e}\x{ff9f}"
    r"\x{1100}-\x{11ff}\x{a960}-\x{a97f}\x{d7b0}-\x{d7ff}\x{1f1e6}-\x{1f1ff}\x{1f3fb}-\x{1f3ff}"
    r"\x{d4e}\x{111c2}\x{111c3}\x{113d1}\x{1193f}\x{11941}\x{11a3a}\x{11a84}-\x{11a89}\x{11d46}\x{11f02}"
    r"\x{16d63}-\x{16d6a}\x{3131}-\x{318e}\x{ffa0}-\x{ffdc}]"
)
CONTROLS = r"\x{1}-\x{8}\x{b}\x{c}\x{e}-\x{1f}\x{7f}-\x{9f}"
CODE_POINTS = 0x32000
"""No character from here on normalises to another, except ideographs."""


def trap_pattern(symbols: Sequence[str], *, normalised: bool, folded: bool, squeezed: bool) -> str:
    """The pattern (RE2) for a model with these control tokens and user-defined symbols.

    gigatoken reads all of them from the given text; SentencePiece reads only the user-defined ones, also from
    normalised text and after the space that it adds. In models that normalise, SentencePiece applies the longest rule
    and gigatoken goes by clusters. gigatoken also strips white space that SentencePiece keeps.
    """
    patterns = [literal("\u0085"), literal("▁")]
    for symbol in symbols:
        spaced = literal(symbol).replace(literal("▁"), rf"[ \x{{2581}}{SPACES}]")
        patterns.append(f"(?i:{spaced})" if folded else spaced)
        if symbol.startswith("▁"):
            patterns.append(rf"\A(?:{patterns[-1].replace(spaced, spaced.partition(']')[2])})")
    if normalised:
        patterns.append(CLUSTERS)
        whole = "".join(symbols).replace("▁", " ")
        characters = set(whole.casefold() if folded else whole)
        patterns += _class(point for point in range(0x80, CODE_POINTS) if characters & _normal(chr(point), folded))
        if not squeezed:
            patterns.append(r"\r\n")
        if not squeezed or any("▁" in symbol for symbol in symbols):
            patterns.append(f"[{CONTROLS}]")
    if squeezed:
        patterns += [rf"\A *[{SPACES}]", rf"[{SPACES}] *\z"]
    return "|".join(patterns)


def _normal(character: str, folded: bool) -> set[str]:
    """Characters that one normalises to; none if it stays."""
    normal = unicodedata.normalize("NFKC", character)
    normal = normal.casefold() if folded else normal
    return set(normal) if normal != character else set()


def _class(points: Iterable[int]) -> list[str]:
    """A regex class of these characters; empty if there are none."""
    runs = itertools.groupby(enumerate(points), key=lambda pair: pair[1] - pair[0])
    ranges = [[point for _, point in run] for _, run in runs]
    return ["[" + "".join(rf"\x{{{run[0]:x}}}-\x{{{run[-1]:x}}}" for run in ranges) + "]"] if ranges else []
