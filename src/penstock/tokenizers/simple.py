"""Tokenizers without a model: `ByteTokenizer` and `CharTokenizer`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.arrays.ragged import Flags, Ints, Ragged, list_array, row_offsets, spliced
from penstock.arrays.text import checked_text, utf8
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import require_local, shown
from penstock.files.remote import fetched_path
from penstock.tokenizers.base import Encoded, SpecialTokens, narrowest

SPECIAL = ("<bos>", "<eos>", "<pad>")
ROLES = {"<bos>": "bos", "<eos>": "eos", "<pad>": "pad", "<unk>": "unk"}


class SimpleTokenizer:
    """Base of both: special tokens after the ordinary ones, no chat template."""

    name: str
    chat_template: str | None = None

    def __init__(self, ordinary: int, special: Sequence[str]) -> None:
        if len(set(special)) != len(special) or not all(special):
            raise ConfigError(f"special tokens must be different texts, none of them empty, got {list(special)}")
        named = {text: ordinary + number for number, text in enumerate(special)}
        roles = {role: named[text] for text, role in ROLES.items() if text in named}
        self.special = SpecialTokens(named=named, adds_bos=False, **roles)
        self.vocab_size = ordinary + len(named)
        self.dtype = narrowest(self.vocab_size)
        longest_first = sorted(named, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(re.escape(text.encode()) for text in longest_first)) if named else None

    def encode(self, texts: pa.Array, *, parse_special: bool = False) -> pa.ListArray:
        return list_array(self._encoded(texts, parse_special)[0], self.dtype, texts)

    def encode_spans(self, texts: pa.Array, *, parse_special: bool = True) -> Encoded:
        rows, lengths = self._encoded(texts, parse_special)
        return Encoded(list_array(rows, self.dtype, texts), *row_offsets(lengths, rows.offsets))

    def decode(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return b"".join(self.token_bytes(token) for token in ids.tolist()).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def _plain(self, data: npt.NDArray[np.uint8], bounds: Ints, owners: Ints) -> tuple[Ragged, Ints]:
        """Ids of segments of UTF-8, and the bytes of each id; `owners` are the rows of the segments."""
        raise NotImplementedError

    def _encoded(self, texts: pa.Array, parse_special: bool) -> tuple[Ragged, Ints]:
        data, bounds = utf8(checked_text(texts))
        found: list[re.Match[bytes]] = []
        if parse_special and self._pattern is not None:
            found = _matches(self._pattern, data, bounds)
        if not found:
            return self._plain(data, bounds, np.arange(len(texts)))
        # Every special token is a row of its own between the other segments; the rows are joined at the end.
        starts = np.array([match.start() for match in found], np.int64)
        ends = np.array([match.end() for match in found], np.int64)
        cuts = np.unique(np.concatenate((bounds, starts, ends)))
        special: Flags = np.isin(cuts[:-1], starts)
        tokens = np.array([self.special.named[match.group().decode()] for match in found], np.uint32)
        kept = np.repeat(~special, np.diff(cuts))
        owners = np.searchsorted(bounds, cuts[:-1][~special], "right") - 1
        plain, lengths = self._plain(data[kept], np.concatenate(([0], np.cumsum(np.diff(cuts)[~special]))), owners)
        one_each = np.arange(len(tokens) + 1)
        ids = spliced(special, Ragged(tokens, one_each), plain)
        widths = spliced(special, Ragged(ends - starts, one_each), Ragged(lengths, plain.offsets))
        return Ragged(ids.values, ids.offsets[np.searchsorted(cuts, bounds)]), widths.values

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"{self.name} has no token {token}; its ids are 0 to {self.vocab_size - 1}")


class ByteTokenizer(SimpleTokenizer):
    """Every byte of the UTF-8 text is a token: ids 0 to 255, special tokens from 256. Any text can be encoded.

    With `special=()` ids fit in eight bits.
    """

    def __init__(self, special: Sequence[str] = SPECIAL) -> None:
        super().__init__(256, special)
        self.name = "byte"

    @property
    def fingerprint(self) -> str:
        return _fingerprint("byte", list(self.special.named))

    def token_bytes(self, token: int) -> bytes:
        self._check(token)
        return bytes([token]) if token < 256 else list(self.special.named)[token - 256].encode()

    def _plain(self, data: npt.NDArray[np.uint8], bounds: Ints, owners: Ints) -> tuple[Ragged, Ints]:
        return Ragged(data, bounds.astype(np.int64)), np.ones(len(data), np.int64)

    def __repr__(self) -> str:
        return f"ByteTokenizer({list(self.special.named)})"


class CharTokenizer(SimpleTokenizer):
    """Every character of an alphabet is a token, in the alphabet's order; special tokens follow.

        CharTokenizer("abc ")
        CharTokenizer.fit(["the text", "that is there"])

    A character that is not in the alphabet becomes `<unk>` if that is one of the special tokens, else it is an error.
    """

    def __init__(self, alphabet: Iterable[str], special: Sequence[str] = (*SPECIAL, "<unk>")) -> None:
        characters = list(alphabet)
        wrong = [character for character in characters if len(character) != 1]
        if wrong or not characters or len(set(characters)) != len(characters):
            raise ConfigError(f"an alphabet is one or more different characters, got {characters[:20]!r}")
        super().__init__(len(characters), special)
        self.name, self.alphabet = "char", "".join(characters)
        code_points = np.array([ord(character) for character in characters])
        self._order = np.argsort(code_points)
        self._code_points = code_points[self._order]

    @classmethod
    def fit(cls, texts: Iterable[str], special: Sequence[str] = (*SPECIAL, "<unk>")) -> CharTokenizer:
        """The alphabet of these texts, in the order of code points."""
        return cls(sorted(set().union(*texts)), special)

    @classmethod
    def load(cls, path: str | Path) -> CharTokenizer:
        """The tokenizer that `save` wrote."""
        try:
            saved = orjson.loads(fetched_path(path).read_bytes())
            return cls(saved["alphabet"], saved["special"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{shown(path)} is not a saved CharTokenizer: {error!r}") from None

    def save(self, path: str | Path) -> None:
        """Write the alphabet and the special tokens as JSON."""
        saved = {"type": "CharTokenizer", "alphabet": self.alphabet, "special": list(self.special.named)}
        require_local(path, "the file of a saved tokenizer").write_bytes(orjson.dumps(saved))

    @property
    def fingerprint(self) -> str:
        return _fingerprint("char", [self.alphabet, *self.special.named])

    def token_bytes(self, token: int) -> bytes:
        self._check(token)
        ordinary = len(self.alphabet)
        return (self.alphabet[token] if token < ordinary else list(self.special.named)[token - ordinary]).encode()

    def _plain(self, data: npt.NDArray[np.uint8], bounds: Ints, owners: Ints) -> tuple[Ragged, Ints]:
        first = np.flatnonzero(data & 0xC0 != 0x80)
        code_points = np.frombuffer(data.tobytes().decode().encode("utf-32-le"), "<u4")
        places = np.minimum(np.searchsorted(self._code_points, code_points), len(self._code_points) - 1)
        ids = self._order[places].astype(np.uint32)
        unknown = self._code_points[places] != code_points
        rows = Ragged(ids, np.searchsorted(first, bounds).astype(np.int64))
        if unknown.any():
            if self.special.unk is None:
                at = int(unknown.argmax())
                missing = chr(code_points[at])
                row = int(owners[np.searchsorted(rows.offsets, at, "right") - 1])
                raise DataError(
                    f"row {row} of the batch: the character {missing!r} (U+{ord(missing):04X}) is not in the alphabet; "
                    "add it, or add '<unk>' to the special tokens",
                    row=row,
                )
            ids[unknown] = self.special.unk
        return rows, np.diff(np.append(first, len(data)))

    def __repr__(self) -> str:
        return f"CharTokenizer({len(self.alphabet)} characters, {list(self.special.named)})"


def _matches(pattern: re.Pattern[bytes], data: npt.NDArray[np.uint8], bounds: Ints) -> list[re.Match[bytes]]:
    """Matches of the pattern within rows."""
    view = data.data
    if pattern.search(view) is None:
        return []
    return [match for start, stop in pairwise(bounds.tolist()) for match in pattern.finditer(view, start, stop)]


def _fingerprint(kind: str, parts: list[str]) -> str:
    return f"{kind}-{xxhash.xxh3_128_hexdigest(orjson.dumps(parts))}"
