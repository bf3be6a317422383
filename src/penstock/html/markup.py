"""Markup that is safe by type: `Html` is markup, every other value is text and is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any, Final, SupportsFloat

MOST_CHARACTERS: Final = 10_000
"""Characters of one text that are shown; a longer one is cut, and the page says how much is missing."""
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.IGNORECASE)
_VOID = {"br", "hr", "img", "input", "link", "meta", "circle", "line", "path", "polygon", "polyline", "rect"}
_WORDS = {"alt", "aria-label", "placeholder", "title"}
_MOST_IN_WORDS = 500
_ADDRESSES = {"action", "formaction", "href", "src"}
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\U000e0000-\U000e0fff]"
)
"""Control characters, invisible ones, marks that turn the direction of text, and halves of surrogate pairs."""


class Html(str):
    """Markup that is put into a page as it is. Only `escape` and `element` make it from text."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def visible(text: str, most: int | None = MOST_CHARACTERS) -> str:
    r"""Text with control, invisible and direction characters as `\x00` or `\u202e`; cut after `most` characters."""
    cut = 0 if most is None else max(0, len(text) - most)
    shown = _HIDDEN.sub(_escaped, text[:most] if cut else text)
    return f"{shown} … ({cut:,} more characters)" if cut else shown


def escape(value: object, most: int | None = MOST_CHARACTERS) -> Html:
    """Markup of a value: `Html` as it is, None as nothing, numbers with separators, anything else as visible text."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("")
    if isinstance(value, str):
        return Html(html.escape(visible(value, most)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Html(shown_number(value))
    if isinstance(value, list | tuple) or (isinstance(value, Iterable) and not isinstance(value, bytes | dict | set)):
        return Html("".join(escape(each, most) for each in value))
    return Html(html.escape(visible(str(value), most)))


def element(name: str, /, *children: object, **attributes: Any) -> Html:
    """An element. Children are escaped; `class_` stands for class, `data_id` for data-id; None and False leave out.

    Handlers (`onclick`) and addresses that run code are refused: a page has one script, which its policy names.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected the name of an element such as 'div', got {name!r}")
    start = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID and not children:
        return Html(f"<{start}/>")
    return Html(f"<{start}>{''.join(escape(child) for child in children)}</{name}>")


def shown_number(value: SupportsFloat) -> str:
    """`12,345`, `0.25`, `1.2e-05`: separators of thousands, about four digits of a fraction."""
    if isinstance(value, int):
        return f"{value:,}"
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return str(number)
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def _attribute(key: str, value: Any) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    if not _NAME.fullmatch(name) or name.lower().startswith("on"):
        raise ValueError(
            f"attribute {name!r}: expected a plain name, not a handler; add behaviour with page(script=...)"
        )
    if value is True:
        return f" {name}"
    text = html.escape(visible(str(value), _MOST_IN_WORDS if name in _WORDS else None))
    if name.lower() in _ADDRESSES and re.match(r"\s*(javascript|vbscript|data):", text, re.IGNORECASE):
        raise ValueError(f"{name}={text[:40]!r}: expected an address that runs no code")
    return f' {name}="{text}"'


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
