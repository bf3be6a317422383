"""Texts of tokens: the tokenizer of a store as a table of bytes, for snippets, the token view and search."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import PenstockError
from penstock.report.turns import TurnLayout
from penstock.store.manifest import Manifest
from penstock.store.origin import store_tokenizer
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.pieces import whole_characters

Ints = npt.NDArray[np.int64]
_MOST_PARSED = 500_000
"""Tokens of a row of which messages are looked for: a few tenths of a second."""


class Vocabulary:
    """Bytes of every token. Made once for a target, some tenths of a second for a hundred thousand tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name = tokenizer.name
        self._tokenizer = tokenizer
        self._layouts: dict[str, TurnLayout] = {}
        self.special = frozenset(tokenizer.special.named.values())
        size = tokenizer.vocab_size
        # The last entry stands for every id that the tokenizer does not have.
        self._table = pa.array([*(_bytes_of(tokenizer, token) for token in range(size)), b"\xef\xbf\xbd"], pa.binary())

    def __len__(self) -> int:
        return len(self._table) - 1

    def joined(self, ids: npt.NDArray[Any]) -> tuple[bytes, Ints]:
        """Bytes of all tokens, joined, and the offset of each in them."""
        wanted = np.minimum(np.asarray(ids, np.int64), len(self))
        wanted[wanted < 0] = len(self)
        taken = self._table.take(pa.array(wanted)).cast(pa.large_binary())
        offsets = np.frombuffer(taken.buffers()[1], np.int64)[: len(taken) + 1]
        data = taken.buffers()[2]
        return b"" if data is None else data.slice(0, int(offsets[-1])).to_pybytes(), offsets

    def text(self, ids: npt.NDArray[Any]) -> str:
        return self.joined(ids)[0].decode(errors="replace")

    def pieces(self, ids: npt.NDArray[Any]) -> list[str]:
        """Text of each token. A character of several tokens is the text of the last of them."""
        data, offsets = self.joined(ids)
        found, rest = [], b""
        for low, high in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
            rest += data[low:high]
            whole = whole_characters(rest)
            found.append(rest[:whole].decode(errors="replace"))
            rest = rest[whole:]
        if rest and found:
            found[-1] += rest.decode(errors="replace")
        return found

    def parts(self, ids: npt.NDArray[Any], template: str | None) -> list[str] | None:
        """Part of each token by the template with this fingerprint; None if it is not known, or the row is too long."""
        if template is None or len(ids) > _MOST_PARSED:
            return None
        layout = self._layouts.get(template)
        if layout is None:
            layout = self._layouts[template] = TurnLayout.of(self._tokenizer, template)
        return layout.parts(ids)[0] if layout.known else None


def vocabulary_of(manifest: Manifest, given: str | None) -> tuple[Vocabulary | None, str]:
    """Vocabulary of a store, from the tokenizer that it names, or the one given; or None, with the reason."""
    reason = ""
    for place in (None, given) if given is not None else (None,):
        try:
            return Vocabulary(store_tokenizer(manifest, place)), ""
        except (PenstockError, OSError, ImportError) as error:
            reason = f"{error}; without it, rows are shown as ids"
    return None, reason


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    try:
        return tokenizer.token_bytes(token)
    except (PenstockError, LookupError, ValueError, TypeError, OverflowError):
        return b"\xef\xbf\xbd"  # a hole in the vocabulary
