"""View of tokens: boundaries, supervision in colour, parts of a template apart, ids on a click or by the keyboard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from penstock.html.markup import Html, element, escape, visible

PARTS = {
    "template": "template",
    "content": "content",
    "thought": "thought",
    "tool call": "tool call",
    "tool result": "tool result",
    "padding": "padding",
}
"""Parts that the style of the page knows, by name; any other name is shown as content."""
MOST_TOKENS = 2000


def token_view(
    pieces: Sequence[str],
    ids: Sequence[int] | np.ndarray[Any, Any],
    supervised: Sequence[bool] | np.ndarray[Any, Any] | None = None,
    *,
    parts: Sequence[str] | None = None,
    label: str,
    most: int = MOST_TOKENS,
    tooltips: bool = False,
) -> Html:
    """Tokens of a row, in order; `pieces` has the text of each, empty for one that ends inside a character.

    Without `supervised` no token is marked. `parts` has the name of a part for each token. More than `most` tokens are
    cut, with their number. `tooltips` gives every token its own, for a notebook, which runs no script of ours.
    """
    count = len(pieces)
    if len(ids) != count or (supervised is not None and len(supervised) != count):
        raise ValueError(f"expected an id and a mask for each of {count} pieces, got {len(ids)} ids")
    if parts is not None and len(parts) != count:
        raise ValueError(f"expected a part for each of {count} pieces, got {len(parts)}")
    mask = np.zeros(count, bool) if supervised is None else np.asarray(supervised, bool)
    shown = min(count, most)
    numbers = [int(each) for each in ids[:shown]]
    kinds = [(parts[at] if parts is not None else "content", bool(mask[at])) for at in range(shown)]
    runs = []
    for (part, trained), group in groupby(range(shown), key=kinds.__getitem__):
        tokens = [_token(pieces[at], numbers[at], tooltips=tooltips) for at in group]
        classes = f"run {part.replace(' ', '-') if part in PARTS else 'content'}" + " trained" * trained
        runs.append(element("span", *tokens, class_=classes, data_part=part))
    more = count - shown
    left = element("p", f"{more:,} more tokens are not shown.", class_="note plain") if more else None
    box = element(
        "div",
        *runs,
        class_="tokens",
        role="group",
        tabindex=None if tooltips else "0",
        aria_label=label,
        data_ids=None if tooltips else " ".join(map(str, numbers)),
        data_unmasked=supervised is None and not tooltips,
    )
    detail = None if tooltips else element("p", class_="detail", aria_live="polite")
    return element("div", box, left, detail, class_="tokenview")


def token_legend(parts: Sequence[str] = tuple(PARTS), *, masked: bool = True) -> Html:
    """Meaning of the colours of `token_view`; rows that are not `masked` say nothing of supervision."""
    named = [element("li", element("i", class_=f"key run {part.replace(' ', '-')}"), part) for part in parts]
    trained = element("li", element("i", class_="key run trained"), "supervised: has a loss") if masked else None
    return element("ul", trained, *named, class_="legend")


def piece_text(piece: str, most: int = 200) -> str:
    """Text of a token on a page: a line end has its sign, a token inside of a character is a small square."""
    if not piece:
        return "\u25ab"
    return visible(piece, most).replace("\n", "\u21b5\n").replace("\t", "\u21e5\t")


def _token(piece: str, number: int, *, tooltips: bool) -> Html:
    text = escape(piece_text(piece), None)
    return element("i", text, title=f"id {number}") if tooltips else Html(f"<i>{text}</i>")
