"""Page of one row: its tokens with the loss mask in colour, its other values, the record as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import numpy as np
import orjson

from penstock._amounts import counted
from penstock.html import Html, element, escape, note, table
from penstock.html.tokens import token_legend, token_view
from penstock.ui.frame import document, field_box, form, link, panel
from penstock.ui.matches import MOST_QUERY
from penstock.ui.params import Params
from penstock.ui.rows import Deadline, RowDetail, RowPlace, TokenPart
from penstock.ui.site import Site
from penstock.ui.targets import Target
from penstock.ui.token_parts import parts_of
from penstock.ui.vocabulary import Vocabulary

TOKENS_SHOWN = 2_000
_TEXT_TOKENS = 20_000
_MOST_TURNS, _MOST_TEXT = 200, 20_000
_ROLES = ("role", "from", "speaker")
_CONTENTS = ("content", "value", "text")
_ANY = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2


def row_page(site: Site, target: Target, place: str, given: Mapping[str, str]) -> str:
    """The row at a place."""
    params, rows, at = Params(given), site.rows(target.number), RowPlace.parse(place)
    detail = rows.row(at)
    first = params.number("token") or 0
    name = f"row {at.row:,}" + (f" of file {at.file}" if at.file else "")
    query = {key: params.text(key, MOST_QUERY) for key in ("q", "min", "max") if params.text(key, MOST_QUERY)}
    back = f"{target.address}?{urlencode({'at': str(at), **query})}"
    return document(
        name,
        _turns(site, target, detail, back, query),
        note(detail.problem, kind="error") if detail.problem else None,
        *_token_panels(site, target, detail, first),
        *_value_panels(detail),
        _uses(site, target, at),
        crumbs=[(target.name, target.address), (name, None)],
    )


def _turns(site: Site, target: Target, detail: RowDetail, back: str, query: Mapping[str, str]) -> Html:
    at = detail.place
    address = f"{target.address}/row"
    before = after = None
    if at.row > 0:
        place, known = site.rows(target.number).find(at.file, at.row - 1, Deadline())
        before = link("Previous row", f"{address}/{place}", "p", **query) if known else None
    if detail.following is not None:
        after = link("Next row", f"{address}/{detail.following}", "n", **query)
    up = element("a", "To the list", element("kbd", "u"), href=back, data_key="u")
    goto = form(
        target.address,
        element("input", type="hidden", name="file", value=at.file) if at.file else None,
        field_box("Go to row", "row", "", key="g", inputmode="numeric", pattern="[0-9]*", required=True),
        element("button", "Go"),
        label="Go to a row",
    )
    turns = element("nav", before, after, up, class_="turns", aria_label="Rows")
    return element("div", turns, goto, class_="forms")


# -- tokens ------------------------------------------------------------------------------------------------------------


def _token_panels(site: Site, target: Target, detail: RowDetail, first: int) -> list[Html]:
    if target.kind == "store":
        rows = site.store(target.number)
        vocabulary, parts, reason = rows.vocabulary, list(detail.tokens), ""
        template = rows.store.manifest.template
    else:
        tokenizer = site.row_tokenizer()
        if tokenizer is None or detail.problem:
            return []
        parts, reason = tokenizer.tokens(detail.values)
        vocabulary, template = tokenizer.vocabulary, tokenizer.template
    if reason:
        return [panel("tokens", "Tokens", note(reason, kind="error"))]
    return [_tokens(target, detail.place, part, vocabulary, template, first) for part in parts]


def _tokens(
    target: Target, at: RowPlace, part: TokenPart, vocabulary: Vocabulary | None, template: str | None, first: int
) -> Html:
    count = len(part.ids)
    first = min(first, max(0, count - 1))
    ids = np.asarray(part.ids[first : first + TOKENS_SHOWN])
    mask = None if part.mask is None else part.mask[first : first + TOKENS_SHOWN]
    pieces = vocabulary.pieces(ids) if vocabulary is not None else [f"{token} " for token in ids.tolist()]
    parts = None if vocabulary is None else vocabulary.parts(part.ids, template)
    if parts is None:
        parts = parts_of(pieces, ids.tolist(), vocabulary.special if vocabulary is not None else ())
    else:
        parts = parts[first : first + TOKENS_SHOWN]
    said = counted(count, "token")
    if part.mask is not None and count:
        trained = int(part.mask.sum())
        said += f", {trained:,} of them supervised ({trained / count:.1%})"
    name = part.name or "tokens"
    title = "Tokens" if not part.name else f"Tokens: {part.name}"
    anchor = "tokens" if not part.name else f"tokens-{part.name}"
    kinds = [each for each in ("template", "content", "thought", "tool call", "tool result") if each in parts]
    return panel(
        anchor,
        title,
        element("p", said, class_="sentence"),
        token_legend(kinds, masked=mask is not None),
        token_view(
            pieces, ids, mask, parts=parts, label=f"{name} {first:,} to {first + len(ids):,}", most=TOKENS_SHOWN
        ),
        _token_turns(target, at, count, first),
        _text(part, vocabulary),
    )


def _token_turns(target: Target, at: RowPlace, count: int, first: int) -> Html | None:
    if count <= TOKENS_SHOWN:
        return None
    address = f"{target.address}/row/{at}"
    before = link("Earlier tokens", address, token=max(0, first - TOKENS_SHOWN)) if first else None
    after = link("Later tokens", address, token=first + TOKENS_SHOWN) if first + TOKENS_SHOWN < count else None
    last = min(count, first + TOKENS_SHOWN)
    said = element("span", f"Tokens {first:,} to {last:,} of {count:,}", class_="soft")
    return element("nav", said, before, after, class_="turns", aria_label="Parts of the row")


def _text(part: TokenPart, vocabulary: Vocabulary | None) -> Html | None:
    if vocabulary is None:
        return None
    text = vocabulary.text(np.asarray(part.ids[:_TEXT_TOKENS]))
    body = element("pre", escape(text, _MOST_TEXT), tabindex="0")
    return element("details", element("summary", "As plain text"), body)


# -- values ------------------------------------------------------------------------------------------------------------


def _value_panels(detail: RowDetail) -> list[Html]:
    if not detail.values and not detail.raw:
        return []
    conversations: list[Html] = []
    plain: dict[str, Any] = {}
    for name, value in detail.values.items():
        if is_conversation(value):
            conversations.append(panel(f"chat-{len(conversations)}", f"Conversation: {name}", *_bubbles(value)))
        else:
            plain[name] = value
    made = list(conversations)
    if plain:
        rows = [
            (name, element("span", escape(_written(value), _MOST_TEXT), class_="value"))
            for name, value in plain.items()
        ]
        made.append(panel("values", "Values", table(rows, ["column", "value"], caption=counted(len(rows), "column"))))
    raw = detail.raw or _written(dict(detail.values))
    body = element("pre", escape(raw, _MOST_TEXT), tabindex="0")
    made.append(panel("raw", "Raw row", element("details", element("summary", "As it stands in the file"), body)))
    return made


def is_conversation(value: Any) -> bool:
    """True for a list of messages, each with a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, Mapping) and any(role in turn for role in _ROLES) for turn in value)
    )


def _bubbles(messages: list[Mapping[str, Any]]) -> list[Html]:
    made = []
    for message in messages[:_MOST_TURNS]:
        role = str(next(message[name] for name in _ROLES if name in message))
        content = next((message[name] for name in _CONTENTS if name in message), None)
        others = {k: v for k, v in message.items() if k not in (*_ROLES, *_CONTENTS) and v not in (None, [], "")}
        known = {"assistant": "assistant", "gpt": "assistant", "user": "user", "human": "user", "tool": "tool"}.get(
            role
        )
        made.append(
            element(
                "div",
                element("h3", escape(role, 100)),
                element("p", escape(_written(content), _MOST_TEXT)) if content not in (None, "") else None,
                element("pre", escape(_written(others), _MOST_TEXT), tabindex="0") if others else None,
                class_=f"bubble {known or ''}".strip(),
            )
        )
    if len(messages) > _MOST_TURNS:
        made.append(note(f"{len(messages) - _MOST_TURNS:,} more messages are not shown."))
    return made


def _written(value: Any) -> str:
    """A value as text: a text as it is, anything else as JSON, as far as it is shown."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value[:_MOST_TEXT].decode(errors="backslashreplace")
    if isinstance(value, np.ndarray):
        more = f" ... ({value.size - 1000:,} more values)" if value.size > 1000 else ""
        return f"{value.ravel()[:1000].tolist()}{more}"
    try:
        return orjson.dumps(value, default=str, option=_ANY).decode()
    except (TypeError, ValueError):  # lone surrogates, integers beyond 64 bits
        return str(value)


def _uses(site: Site, target: Target, at: RowPlace) -> Html | None:
    loaders = site.of_kind("loader") if target.kind == "store" else []
    if not loaders:
        return None
    links = [
        link(f"Where row {at.row:,} goes in {loader.name}", f"{loader.address}/trace", store=target.number, row=at.row)
        for loader in loaders
    ]
    return panel("plan", "In plans", element("ul", *(element("li", each) for each in links)))
