"""Texts of tokens one by one, for people: on a terminal, in colour or between brackets, and on a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from rich.text import Text

Pieces = list[tuple[str, str]]
"""Kind and text of each token."""
STYLES = {
    "supervised": "bold green",
    "masked": "dim",
    "special": "yellow",
    "supervised special": "bold yellow",
    "padding": "dim red",
}
"""Styles of the kinds of tokens on a terminal."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def token_pieces(tokenizer: Tokenizer, tokens: Any, mask: Any = None) -> Iterator[tuple[str, str]]:
    """Kind and text of each token. A character of several tokens is the text of the last of them."""
    special = set(tokenizer.special.named.values())
    rest, kind = b"", "masked"
    ids = tokens.tolist()
    for position, token in enumerate(ids):
        supervised = mask is not None and bool(mask[position])
        data = tokenizer.token_bytes(token)
        if token in special:
            yield ("supervised special" if supervised else "special"), _text(rest) + _text(data)
            rest = b""
            continue
        kind = "supervised" if supervised else "masked"
        rest += data
        whole = len(rest) if position == len(ids) - 1 else whole_characters(rest)
        yield kind, _text(rest[:whole])
        rest = rest[whole:]


def id_pieces(tokens: Any, mask: Any = None) -> Iterator[tuple[str, str]]:
    """As `token_pieces` where no tokenizer is known: the numbers."""
    for position, token in enumerate(tokens.tolist()):
        yield ("supervised" if mask is not None and bool(mask[position]) else "masked"), f"{token} "


def whole_characters(data: bytes) -> int:
    """Number of bytes up to the end of the last complete character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)


def harmless(text: str) -> str:
    """Text in which control characters, which could steer a terminal, are escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def coloured(pieces: Iterable[tuple[str, str]], *, boundaries: bool = False) -> Text:
    """Text for a terminal with colours; with `boundaries`, every second token is underlined."""
    from rich.text import Text

    made = Text()
    if boundaries:
        for number, (kind, text) in enumerate(pieces):
            made.append(harmless(text), STYLES[kind] + (" underline" if number % 2 else ""))
        return made
    for kind, run in runs(pieces):
        made.append(harmless(run), STYLES[kind])
    return made


def bracketed(pieces: Iterable[tuple[str, str]], *, boundaries: bool = False) -> Text:
    """Supervised spans between [[ and ]], for output without colours; with `boundaries`, a bar between tokens."""
    from rich.text import Text

    made, inside, first = Text(), False, True
    for kind, run in pieces if boundaries else runs(pieces):
        if boundaries and not first:
            made.append("|")
        first = False
        if kind.startswith("supervised") != inside:
            made.append("]]" if inside else "[[")
            inside = not inside
        marked = kind.endswith("special") and not run.startswith("<")
        made.append(f"<{harmless(run)}>" if marked else harmless(run))
    return made.append("]]") if inside else made


def runs(pieces: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Neighbours of the same kind joined; special tokens stay apart."""
    kind, run = "", ""
    for now, text in pieces:
        if now != kind or "special" in now:
            if run:
                yield kind, run
            kind, run = now, ""
        run += text
    if run:
        yield kind, run


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
