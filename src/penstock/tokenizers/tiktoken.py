"""Reference for `tiktoken` encodings: ranks of byte strings, a split pattern, and special tokens."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from penstock.arrays.ragged import Ints
from penstock.errors import ConfigError
from penstock.tokenizers.base import (
    FastModel,
    Offsets,
    Reference,
    SpecialTokens,
    VocabularyTable,
    as_token_table,
    check_largest_id,
)
from penstock.tokenizers.verification import BYTE_PAIRS

# Patterns of the published encodings, by the name of the scheme in gigatoken.
SCHEMES = {
    "gpt2": (
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    ),
    "gpt4": (
        r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
        r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
        r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ),
    "o200k": (
        "|".join(
            [
                r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
                r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
                r"""\p{N}{1,3}""",
                r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
                r"""\s*[\r\n]+""",
                r"""\s+(?!\S)""",
                r"""\s+""",
            ]
        ),
    ),
}


class TiktokenReference:
    """Ids as a `tiktoken.Encoding` gives them."""

    normalises = False

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.name = str(encoding.name)
        self.vocab_size = int(encoding.max_token_value) + 1
        self._ranks: dict[bytes, int] = encoding._mergeable_ranks
        self._named: dict[str, int] = dict(encoding._special_tokens)
        check_largest_id(self._named, self.name)
        self.special = SpecialTokens(eos=self._named.get("<|endoftext|>"), named=self._named)

    def __reduce__(self) -> tuple[Any, ...]:
        encoding = self._encoding
        return _rebuilt, (self.name, encoding._pat_str, self._ranks, self._named)

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %s\n" % (rank, base64.b64encode(token)))
        digest.update(orjson.dumps([self._encoding._pat_str, self._named], option=orjson.OPT_SORT_KEYS))
        return f"tiktoken-{digest.hexdigest()}"

    def ids(self, texts: list[str], *, parse_special: bool) -> list[Ints]:
        allowed: Any = "all" if parse_special else set()
        encode = self._encoding.encode_to_numpy
        return [encode(text, allowed_special=allowed, disallowed_special=()) for text in texts]

    def offsets(self, texts: list[str], *, parse_special: bool) -> list[Offsets]:
        """Offsets in characters; a character that spans several tokens belongs to each of them."""
        found = []
        for text, ids in zip(texts, self.ids(texts, parse_special=parse_special)):
            lengths = np.array([len(self.token_bytes(token)) for token in ids.tolist()], np.int64)
            ends = np.cumsum(lengths)
            begins = np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80
            character = np.concatenate(([0], np.cumsum(begins)))
            found.append(Offsets(ids, np.maximum(character[ends - lengths + 1] - 1, 0), character[ends]))
        return found

    def decode(self, ids: Ints) -> str:
        return b"".join(self.token_bytes(token) for token in ids.tolist()).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token))
        except KeyError:
            if 0 <= token < self.vocab_size:
                return b""  # a gap between the ids
            raise ConfigError(f"{self.name} has no token {token}; its ids are below {self.vocab_size}") from None

    def table(self) -> VocabularyTable:
        tokens = [b""] * self.vocab_size
        for token, rank in self._ranks.items():
            tokens[rank] = token
        for text, number in self._named.items():
            tokens[number] = text.encode()
        return as_token_table(tokens, list(self._named.values()))

    def fast(self, *, parse_special: bool) -> FastModel | str:
        try:
            import gigatoken
        except ImportError as error:
            return f"it cannot be imported ({error}); install it with: pip install 'penstock[fast]'"
        pattern = self._encoding._pat_str
        scheme = next((name for name, patterns in SCHEMES.items() if pattern in patterns), None)
        if scheme is None:
            return "the pattern that splits text is not one it knows"
        special = self._named if parse_special else {}

        def load() -> Any:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "ranks.tiktoken"
                lines = sorted(self._ranks.items(), key=lambda item: item[1])
                file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in lines))
                return gigatoken.Tokenizer.from_tiktoken(file, scheme, special).backend

        return FastModel(load)

    def splitter(self) -> Reference:
        tokens = [*(bytes([byte]) for byte in range(256)), *BYTE_PAIRS]
        ranks = {token: rank for rank, token in enumerate(tokens)}
        return _rebuilt(self.name, self._encoding._pat_str, ranks, {})

    def probes(self) -> list[str]:
        return [probe for text in self._named for probe in (text, f"a{text}b", f" {text} {text}\n")]


PUBLISHED = ("r50k_base", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base", "o200k_harmony")
"""Names of encodings that are names of nothing else: `gpt2` is on the Hub too."""


def missing_package(name: str) -> ConfigError:
    """The error for an encoding where tiktoken is not installed."""
    return ConfigError(
        f"{name} is an encoding of tiktoken, which is not installed; install it with: pip install 'penstock[tiktoken]'"
    )


def named_encoding(name: str) -> Any | None:
    """The published encoding of that name; None if there is none. Its ranks are fetched once and cached by tiktoken."""
    try:
        import tiktoken
    except ImportError as error:
        if name in PUBLISHED:
            raise missing_package(repr(name)) from error
        return None
    if name not in tiktoken.list_encoding_names():
        return None
    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # its HTTP client raises many classes
        raise ConfigError(
            f"the ranks of {name!r} could not be fetched ({type(error).__name__}); go online once, "
            "set TIKTOKEN_CACHE_DIR to a folder that has them, or pass a tiktoken.Encoding"
        ) from error


def _rebuilt(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> TiktokenReference:
    import tiktoken

    return TiktokenReference(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))
