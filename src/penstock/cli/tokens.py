"""Tokens as people read them: decoded one by one, each with what it is, in colours or between brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from penstock.errors import ConfigError
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

__all__ = ["STYLES", "Pieces", "bracketed", "coloured", "pieces_of", "runs_of", "tokenizer_of"]

Pieces = list[tuple[str, str]]
"""What each token is, and its text."""
STYLES = {
    "supervised": "bold green",
    "masked": "dim",
    "special": "yellow",
    "supervised special": "bold yellow",
    "padding": "dim red",
}
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def tokenizer_of(manifest: Any, given: str | None) -> Tokenizer:
    """The tokenizer the store was made with: the one given, or the one it names, if it still is the same."""
    known = manifest.lineage[-1].notes.get("tokenizer_path") if manifest.lineage else None
    if given is None and known is None:
        raise ConfigError("the store does not say where its tokenizer is; pass --tokenizer")
    loaded = load_tokenizer(given or known)
    if manifest.tokenizer not in (None, loaded.fingerprint):
        raise ConfigError(
            f"{given or known} is not the tokenizer of this store: its fingerprint is {loaded.fingerprint}, the "
            f"store was made with {manifest.tokenizer}; pass the right one with --tokenizer"
        )
    return loaded


def pieces_of(tokenizer: Tokenizer, tokens: Any, mask: Any) -> Iterator[tuple[str, str]]:
    """What each token is, and its text. A character over several tokens stands with the last of them."""
    special = set(tokenizer.special.named.values())
    left, kind = b"", "masked"
    for position, token in enumerate(tokens.tolist()):
        supervised = mask is not None and bool(mask[position])
        if token in special:
            text = (_decoded(left) if left else "") + _decoded(tokenizer.token_bytes(token))
            yield ("supervised special" if supervised else "special"), text
            left = b""
            continue
        kind = "supervised" if supervised else "masked"
        left += tokenizer.token_bytes(token)
        whole = _whole_characters(left)
        yield kind, _decoded(left[:whole])
        left = left[whole:]
    if left:
        yield kind, _decoded(left)


def _whole_characters(data: bytes) -> int:
    """How many bytes can be decoded without cutting the last character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)


def _decoded(data: bytes) -> str:
    """As text; what would steer a terminal is spelled out."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), data.decode(errors="replace"))


def coloured(pieces: Pieces) -> Text:
    text = Text()
    for kind, run in runs_of(pieces):
        text.append(run, STYLES[kind])
    return text


def bracketed(pieces: Pieces) -> Text:
    """For where there are no colours."""
    text, inside = Text(), False
    for kind, run in runs_of(pieces):
        if kind.startswith("supervised") != inside:
            text.append("]]" if inside else "[[")
            inside = not inside
        text.append(f"<{run}>" if kind.endswith("special") and not run.startswith("<") else run)
    return text.append("]]") if inside else text


def runs_of(pieces: Pieces) -> Iterator[tuple[str, str]]:
    """Neighbours of one kind together; special tokens stay apart."""
    kind, run = "", ""
    for now, text in pieces:
        if now != kind or "special" in now:
            if run:
                yield kind, run
            kind, run = now, ""
        run += text
    if run:
        yield kind, run
