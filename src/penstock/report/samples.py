"""Sections with rows: tokens with boundaries and loss mask in colour, and rows that were refused, with reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from penstock.files.filesystems import beside, is_remote
from penstock.files.objects import open_bucket
from penstock.html import Html, Section, element, escape, note, section, subsection
from penstock.html.tokens import token_legend, token_view
from penstock.report.draw import Side, drawn_rows, sides_of
from penstock.report.turns import TurnLayout
from penstock.store import Store
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.pieces import id_pieces, token_pieces

MOST_SHOWN_TOKENS = 40_000
"""Tokens of all samples of a page together."""
_MOST_REFUSED = 12
_MOST_QUARANTINE_BYTES = 64 << 20
_MESSAGE = re.compile(r"message (\d+)")
_CHOSEN = re.compile("(⟪.*?⟫|⟦.*?⟧)", re.DOTALL)
"""A lost part, and a supervised span, as the gate marks them."""


def sample_sections(
    store: Store,
    tokenizer: Tokenizer | None,
    *,
    count: int = 12,
    seed: int = 0,
    quarantine: str | None = None,
) -> list[Section]:
    """Samples of the rows, and the rows that the gate refused, if a quarantine file has them."""
    made = [_samples(store, tokenizer, count, seed)] if len(store) and count else []
    refused = _refused(store, quarantine)
    return [*made, *([refused] if refused is not None else [])]


def row_view(
    row: Mapping[str, Any],
    side: Side,
    tokenizer: Tokenizer | None,
    layout: TurnLayout | None,
    *,
    label: str,
    most: int,
) -> Html:
    """Tokens of one side of a row."""
    ids = np.asarray(row[side.ids])
    mask = np.asarray(row[side.mask], bool) if side.mask is not None else None
    shown = ids[:most]
    pieces = [text for _, text in (token_pieces(tokenizer, shown, mask) if tokenizer is not None else id_pieces(shown))]
    parts = layout.parts(shown)[0] if layout is not None else ["content"] * len(shown)
    view = token_view(pieces, shown, None if mask is None else mask[:most], parts=parts, label=label, most=most)
    more = len(ids) - len(shown)
    return Html(view + (note(f"{more:,} more tokens of this row are not shown.") if more else ""))


def _samples(store: Store, tokenizer: Tokenizer | None, count: int, seed: int) -> Section:
    rows = drawn_rows(store, count, seed, "samples")
    sides = sides_of(store)
    layout = TurnLayout.of(tokenizer, store.manifest.template) if tokenizer is not None else None
    most = max(50, MOST_SHOWN_TOKENS // max(1, len(rows) * max(1, len(sides))))
    shown: list[object] = []
    used: set[str] = set()
    for row in rows.tolist():
        found = store[row]
        views: list[object] = []
        names: list[str] = []
        for side in sides:
            ids = found[side.ids]
            trained = f", {int(np.sum(np.asarray(found[side.mask], bool))):,} supervised" if side.mask else ""
            name = f"row {row:,}{', ' + side.name if side.name else ''}: {len(ids):,} tokens{trained}"
            if layout is not None:
                used.update(layout.parts(np.asarray(ids)[:most])[0])
            names.append(name)
            if len(sides) > 1:
                views.append(element("p", name, class_="sampletitle"))
            views.append(row_view(found, side, tokenizer, layout, label=f"Tokens of {name}", most=most))
        rest = {key: value for key, value in found.items() if not any(key in (side.ids, side.mask) for side in sides)}
        title = names[0] if len(names) == 1 else f"row {row:,}"
        shown.append(subsection(title.capitalize(), _columns(rest), *views))
    whose = "all rows" if len(rows) == len(store) else f"{len(rows):,} of {len(store):,} rows, drawn with seed {seed}"
    lead = note(f"Shown are {whose}. Each stripe is a token; click one, or use the arrow keys, to see its id.")
    kinds = [name for name in ("template", "content", "thought", "tool call", "tool result") if name in used]
    masked = any(side.mask for side in sides)
    legend = token_legend(kinds or ["content"], masked=masked) if sides else None
    return section("Samples", lead, legend, *shown)


def _columns(values: Mapping[str, Any]) -> Html | None:
    """Columns of a row beside its tokens."""
    if not values:
        return None
    entries = []
    for name, value in values.items():
        shown = value if isinstance(value, str | int | float | bool) else _json(value)
        entries.append(element("div", element("dt", name), element("dd", escape(str(shown), 600))))
    return element("dl", *entries, class_="columns")


def _refused(store: Store, given: str | None) -> Section | None:
    """Rows of the quarantine file, a few for every reason."""
    lines = list(_quarantined(store, given))
    if not lines:
        return None
    picked: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for line in lines:
        kind = f"{line.get('stage')}: {str(line.get('reason'))[:40]}"
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= 3 and len(picked) < _MOST_REFUSED:
            picked.append(line)
    lead = note(f"{len(lines):,} rows are in the quarantine file; {len(picked):,} are shown, up to three for a reason.")
    return section("Refused rows", lead, *(_refused_row(line) for line in picked))


def _refused_row(line: Mapping[str, Any]) -> Html:
    reason = str(line.get("reason", "")).removeprefix("row 0 of the batch: ")
    title = f"{line.get('file') or 'row'}, row {line.get('row')}"
    stage = element("p", "refused by ", element("code", str(line.get("stage", ""))[:200]), class_="note plain")
    why, _, context = reason.partition("\n")
    messages = _messages(line)
    if messages is None:
        raw = line.get("raw", line.get("data", line.get("raw_base64", "")))
        text = raw if isinstance(raw, str) else _json(raw)
        return subsection(title, stage, _error(why, context), element("pre", escape(text, 2000)))
    at = _MESSAGE.search(why)
    place = int(at[1]) if at and int(at[1]) < len(messages) else None
    shown: list[object] = [stage]
    if place is None:
        shown.append(_error(why, context))
    for number, message in enumerate(messages[:40]):
        shown.append(_bubble(message, wrong=number == place))
        if number == place:
            shown.append(_error(why, context))
    if len(messages) > 40:
        shown.append(note(f"{len(messages) - 40:,} more messages are not shown."))
    return subsection(title, *shown)


def _error(why: str, context: str) -> Html:
    """The reason, with the place in the rendered text that the gate marks."""
    pieces: list[object] = []
    done = 0
    for found in _CHOSEN.finditer(context):
        pieces += [escape(context[done : found.start()]), _marked(found[1])]
        done = found.end()
    pieces.append(escape(context[done:]))
    where = element("pre", *pieces) if context.strip() else ""
    return Html(element("p", element("strong", "Refused: "), why, class_="note error") + where)


def _marked(text: str) -> Html:
    kind = "lost" if text.startswith("⟪") else "trained"
    return element("mark", text[1:-1], class_=kind, title="lost" if kind == "lost" else "supervised")


def _bubble(message: Any, *, wrong: bool) -> Html:
    if not isinstance(message, dict):
        return element("pre", escape(_json(message), 1000))
    role = str(message.get("role", message.get("from", "?")))
    content = message.get("content", message.get("value"))
    rest = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
    text = content if isinstance(content, str) else "" if content is None and rest else _json(content)
    body = [escape(text, 1500)]
    if rest:
        body.append(element("span", escape(_json(rest), 800), class_="remark"))
    classes = "bubble wrong" if wrong else "bubble"
    return element("div", element("span", role, class_="role"), element("div", *body), class_=classes)


def _messages(line: Mapping[str, Any]) -> list[Any] | None:
    """Messages of a refused row, if it is a conversation."""
    data = line.get("data")
    if data is None and isinstance(line.get("raw"), str):
        try:
            data = orjson.loads(line["raw"])
        except ValueError:
            return None
    if not isinstance(data, dict):
        return None
    for name in ("messages", "conversations", "conversation"):
        found = data.get(name)
        if isinstance(found, str):
            try:
                found = orjson.loads(found)
            except ValueError:
                continue
        if isinstance(found, list):
            return found
    return None


def _quarantined(store: Store, given: str | None) -> Iterator[dict[str, Any]]:
    """Lines of the quarantine file of a store; of a long one, its first 64 MiB."""
    place = given if given is not None else _default_place(store)
    if place is None:
        return
    for line in _lines(place, asked=given is not None):
        try:
            facts = orjson.loads(line)
        except ValueError:
            continue  # the last line of a file that is being written, or that was cut here
        if isinstance(facts, dict):
            yield facts


def _lines(place: str, *, asked: bool) -> Sequence[bytes]:
    if is_remote(place):
        bucket, key = open_bucket(place)
        info = bucket.info(key)
        if info is None or info.size > _MOST_QUARANTINE_BYTES:
            return []
        return bytes(bucket.read(key)).splitlines()
    path = Path(place)
    if not asked and not path.is_file():
        return []
    with path.open("rb") as file:
        return file.read(_MOST_QUARANTINE_BYTES).splitlines()


def _default_place(store: Store) -> str | None:
    if store.bucket is not None:
        return str(beside(store.bucket.home.url, suffix=".quarantine.jsonl"))
    return f"{store.path}.quarantine.jsonl"


def _json(value: Any) -> str:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, default=str, option=options).decode()
    except (TypeError, ValueError):
        return repr(value)
