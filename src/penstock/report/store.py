"""Sections about a store: rows and lengths, supervision by role and turn, tokens, origins, and what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock._amounts import counted
from penstock.arrays.text import is_text
from penstock.chat.templates import built_in_name
from penstock.corpus.prepare import loss_record
from penstock.errors import PenstockError
from penstock.html import Html, Section, element, escape, facts, figure, note, section, subsection, table
from penstock.html.charts import bar_chart, histogram
from penstock.html.tokens import piece_text
from penstock.memory.budget import format_bytes
from penstock.report.draw import Side, drawn_lengths, sample_rows, sides_of
from penstock.report.turns import TurnLayout
from penstock.store import Store, describe
from penstock.store.origin import store_tokenizer
from penstock.tokenizers.base import Tokenizer

ORIGINS = ("source", "file", "language", "lang", "dataset", "subset", "domain", "category", "kind")
"""Columns that say where rows come from, or in which language they are."""
UNKNOWN = "unknown"
"""Role of the tokens of rows in which messages are not found for certain."""
_MOST_TURN_TOKENS = 400_000
_MOST_TURNS = 12
_MOST_SHOWN = 30


@dataclass
class StoreFigures:
    """Figures of a store, of all rows or of a draw."""

    lengths: np.ndarray[Any, Any]
    all_lengths: bool
    rows: np.ndarray[Any, Any]
    """Rows whose tokens were counted."""
    tokens: Counter[int] = field(default_factory=Counter)
    sides: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens and supervised tokens of each side in the counted rows."""
    unsupervised_rows: int = 0
    origins: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Values of columns that say where rows come from, with the number of counted rows."""
    roles: dict[str, tuple[int, int]] = field(default_factory=dict)
    turns: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens and supervised tokens of the contents of messages, by role and by number from 1."""
    turn_rows: int = 0


def open_tokenizer(store: Store, given: str | None) -> Tokenizer | None:
    """The tokenizer given, or that of the store; None if it has none, or its file is not there any more."""
    if given is not None:
        return store_tokenizer(store.manifest, given)
    try:
        return store_tokenizer(store.manifest)
    except (PenstockError, OSError, ImportError):
        return None


def lead_of(store: Store) -> str:
    """One sentence about a store."""
    created = f", made {store.manifest.created}" if store.manifest.created else ""
    return f"Token store {store.shown}, version {store.manifest.version}{created}"


def store_sections(store: Store, tokenizer: Tokenizer | None, *, seed: int = 0) -> list[Section]:
    """Sections about a store, all but its samples."""
    found = store_figures(store, tokenizer, seed=seed)
    made = [_overview(store, tokenizer, found)]
    if len(found.lengths):
        made.append(_lengths(store, found))
    if any(side.mask for side in sides_of(store)):
        made.append(_supervision(store, found))
    if found.tokens:
        made.append(_tokens(store, tokenizer, found))
    if found.origins:
        made.append(_origins(found, len(store)))
    made.append(_losses(store))
    return made


def store_figures(store: Store, tokenizer: Tokenizer | None, *, seed: int = 0) -> StoreFigures:
    """Figures of a store. Lengths are those of all rows up to 20 million; tokens are counted in a draw of rows."""
    lengths, every = drawn_lengths(store, seed)
    rows = sample_rows(store, seed)
    made = StoreFigures(lengths, every, rows)
    sides = sides_of(store)
    columns = [name for side in sides for name in (side.ids, side.mask) if name]
    origins = [name for name in ORIGINS if name in store.schema.names and _is_named(store.schema.field(name).type)]
    values: dict[str, Counter[str]] = {name: Counter() for name in origins}
    layout = TurnLayout.of(tokenizer, store.manifest.template) if tokenizer is not None else None
    for batch in _batches(store, rows, [*columns, *origins]):
        for side in sides:
            _count_side(made, batch, side)
        for name in origins:
            column = batch.column(name)
            values[name].update({str(each["values"]): each["counts"] for each in column.value_counts().to_pylist()})
    if layout is not None and layout.known and any(side.mask for side in sides):
        _count_turns(made, store, layout, sides)
    made.origins = {name: counted.most_common(_MOST_SHOWN) for name, counted in values.items() if counted}
    return made


def _batches(store: Store, rows: np.ndarray[Any, Any], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The drawn rows, about a million tokens at a time."""
    if not columns:
        return
    mean = max(1.0, store.tokens / max(1, len(store)))
    step = max(1, int(1_000_000 / mean))
    if len(rows) == len(store):
        yield from store.batches(columns=columns)
        return
    for start in range(0, len(rows), step):
        yield store.take(rows[start : start + step], columns)


def _count_side(made: StoreFigures, batch: pa.RecordBatch, side: Side) -> None:
    ids = batch.column(side.ids)
    flat = ids.flatten().to_numpy(zero_copy_only=False)
    tokens, counts = np.unique(flat, return_counts=True)
    made.tokens.update(dict(zip(tokens.tolist(), counts.tolist())))
    total, supervised = made.sides.get(side.name, (0, 0))
    added = 0
    if side.mask is not None:
        mask = batch.column(side.mask)
        flags = mask.flatten().cast(pa.int64())
        added = pc.sum(flags).as_py() or 0
        lengths = np.asarray(pc.list_value_length(mask).fill_null(0))
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        summed = np.concatenate([[0], np.cumsum(np.asarray(flags))])
        made.unsupervised_rows += int(np.count_nonzero(summed[bounds[1:]] == summed[bounds[:-1]]))
    made.sides[side.name] = (total + len(flat), supervised + added)


def _count_turns(made: StoreFigures, store: Store, layout: TurnLayout, sides: Sequence[Side]) -> None:
    """Tokens of messages by role and by number, in as many of the counted rows as the limit allows."""
    roles: dict[str, list[int]] = {}
    turns: dict[int, list[int]] = {}
    left = _MOST_TURN_TOKENS
    stride = max(1, int(len(made.rows) * max(1.0, store.tokens / max(1, len(store))) / _MOST_TURN_TOKENS))
    for row in made.rows[::stride].tolist():
        found = store[row]
        for side in sides:
            ids = np.asarray(found[side.ids])
            mask = np.asarray(found[side.mask], bool) if side.mask else np.zeros(len(ids), bool)
            left -= len(ids)
            _, spans = layout.parts(ids)
            inside = 0
            for span in spans:
                size, trained = span.stop - span.start, int(mask[span.start : span.stop].sum())
                _add(roles, span.role, size, trained)
                _add(turns, span.number + 1, size, trained)
                inside += size
            trained = int(mask.sum()) - sum(int(mask[span.start : span.stop].sum()) for span in spans)
            _add(roles, "template" if spans or not len(ids) else UNKNOWN, len(ids) - inside, trained)
        made.turn_rows += 1
        if left <= 0:
            break
    made.roles = {name: (size, trained) for name, (size, trained) in roles.items()}
    made.turns = {number: (size, trained) for number, (size, trained) in sorted(turns.items())}


def _add(counted: dict[Any, list[int]], key: Any, size: int, trained: int) -> None:
    pair = counted.setdefault(key, [0, 0])
    pair[0] += size
    pair[1] += trained


def _overview(store: Store, tokenizer: Tokenizer | None, found: StoreFigures) -> Section:
    known = describe(store)
    share = known["supervised_share"]
    shown: list[Sequence[object]] = [("rows", len(store))]
    if known["tokens"] is not None:
        shown.append(("tokens", known["tokens"], _short(known["tokens"])))
    if known["lengths"]:
        shown.append(("median length", known["lengths"]["p50"], f"longest {known['lengths']['max']:,}"))
    if share is not None:
        shown.append(("supervised", f"{share:.1%}", f"{known['supervised']:,} tokens"))
    shown.append(("size", format_bytes(known["bytes"]), counted(known["shards"], "shard")))
    named = known["tokenizer_name"] or (tokenizer.name if tokenizer is not None else None)
    shown.append(("tokenizer", named or "not known", f"{tokenizer.vocab_size:,} ids" if tokenizer else None))
    if known["template"]:
        shown.append(("template", built_in_name(known["template"]) or f"own ({known['template'][:8]})"))
    rows = [[name, kind.replace("item: ", "")] for name, kind in known["columns"].items()]
    inputs = [[name] for name in known["inputs"]]
    steps = [[step] for step in known["transforms"]]
    more = [table(rows, ["column", "type"], caption="Columns")]
    if inputs:
        more.append(table(inputs, ["file"], caption=f"Made of {len(inputs):,} files", most=20))
    if steps:
        more.append(table(steps, ["step"], caption="Steps"))
    details = element("details", element("summary", "Columns, input files and steps"), *more)
    if tokenizer is None and found.tokens:
        details = Html(
            note(
                "The tokenizer of the store was not found, so tokens are shown as ids; pass --tokenizer.",
                kind="warning",
            )
            + details
        )
    return section("Overview", facts(shown), details)


def _lengths(store: Store, found: StoreFigures) -> Section:
    lengths = found.lengths
    points = np.percentile(lengths, [0, 1, 25, 50, 75, 90, 99, 100], method="lower").astype(int).tolist()
    names = ["min", "1%", "25%", "50%", "75%", "90%", "99%", "max"]
    whose = "all rows" if found.all_lengths else f"a draw of {len(lengths):,} rows of {len(store):,}"
    label = f"Histogram of row lengths: half of the rows have up to {points[3]:,} tokens, the longest {points[-1]:,}"
    wide = points[-1] > 20 * max(1, points[0])
    chart = histogram(lengths, label=label, unit="tokens", log=wide, x_label="tokens (log scale)" if wide else "tokens")
    # Few long rows are most of the tokens, which a count of rows hides.
    order = np.sort(lengths)
    weight = np.cumsum(order, dtype=np.int64)
    half = int(order[np.searchsorted(weight, weight[-1] / 2)]) if len(order) and weight[-1] else 0
    return section(
        "Lengths",
        figure(chart, _captioned("Tokens of a row", f"lengths of {whose}")),
        table([["tokens", *points]], ["share of rows up to", *names], caption="Quantiles of row lengths"),
        note(f"Half of all tokens are in rows of {half:,} tokens or more."),
    )


def _supervision(store: Store, found: StoreFigures) -> Section:
    children: list[object] = []
    sample = _counted(store, found)
    for name, (tokens, supervised) in found.sides.items():
        whole = f"{name}: " if name else ""
        share = supervised / tokens if tokens else 0.0
        children.append(note(f"{whole}{supervised:,} of {tokens:,} tokens are supervised ({share:.1%}), in {sample}."))
    if found.unsupervised_rows:
        children.append(
            note(f"{found.unsupervised_rows:,} of the counted rows have no supervised token.", kind="warning")
        )
    if found.roles:
        said = f"messages of {found.turn_rows:,} rows"
        roles = [(role, _percent(pair)) for role, pair in found.roles.items()]
        turns = [(f"message {number}", _percent(pair)) for number, pair in list(found.turns.items())[:_MOST_TURNS]]
        charts = [
            figure(bar_chart(roles, label="Supervised share by role", unit="%", high=100), _captioned("By role", said)),
            figure(
                bar_chart(turns, label="Supervised share by message", unit="%", high=100), _captioned("By turn", said)
            ),
        ]
        children.append(element("div", *charts, class_="grid"))
        rows = [
            [role, tokens, trained, f"{trained / tokens:.1%}" if tokens else ""]
            for role, (tokens, trained) in found.roles.items()
        ]
        children.append(table(rows, ["role", "tokens", "supervised", "share"], caption="Tokens by role"))
        children.append(
            note("The end of an answer is part of the template, and is supervised if a model learns to stop.")
        )
        if UNKNOWN in found.roles:
            children.append(note(f"{UNKNOWN}: rows in which the messages of the template are not found for certain."))
    elif store.manifest.template:
        children.append(
            note("Roles are not shown: the template of the store is not a built-in one, nor the tokenizer's.")
        )
    return section("Supervision", *children)


def _tokens(store: Store, tokenizer: Tokenizer | None, found: StoreFigures) -> Section:
    total = found.tokens.total()
    often = [
        (f"{_token_name(tokenizer, token)}  ({token})", 100 * count / total)
        for token, count in found.tokens.most_common(20)
    ]
    chart = bar_chart(often, label="Shares of the most frequent tokens", unit="%")
    children: list[object] = [
        figure(chart, _captioned("Most frequent tokens", f"token counts of {_counted(store, found)}, {total:,} tokens"))
    ]
    if tokenizer is not None:
        used = np.zeros(tokenizer.vocab_size, bool)
        ids = np.fromiter(found.tokens, np.int64)
        used[ids[(ids >= 0) & (ids < len(used))]] = True
        unused = np.flatnonzero(~used)
        special = {number: text for text, number in tokenizer.special.named.items()}
        named = [text for number, text in sorted(special.items()) if number < len(used) and not used[number]]
        share = f"{len(unused):,} of {len(used):,} ids ({len(unused) / max(1, len(used)):.1%})"
        shown = [f"{_token_name(tokenizer, token)} ({token})" for token in unused[:200].tolist()]
        body: list[object] = [note(f"{share} never occur in {_counted(store, found)}.")]
        if named:
            body.append(note("Special tokens among them: ", ", ".join(named[:40]), "."))
        if shown:
            inside = element("pre", "  ".join(shown))
            body.append(element("details", element("summary", f"The first {len(shown):,} of them"), inside))
        children.append(subsection("Never used", *body))
    return section("Tokens", *children)


def _origins(found: StoreFigures, rows: int) -> Section:
    whose = "all rows" if len(found.rows) == rows else f"a draw of {len(found.rows):,} rows"
    charts = [
        figure(bar_chart(values, label=f"Rows by {name}", unit="rows"), _captioned(f"Rows by {name}", whose))
        for name, values in found.origins.items()
    ]
    return section("Sources and languages", element("div", *charts, class_="grid"))


def _losses(store: Store) -> Section:
    """Counts that `prepare` has written next to the store, with rows that it kept as examples."""
    record = loss_record(store)
    title = "Left out while preparing"
    if record is None:
        return section(title, note("There is no record of dropped rows: the store was not made by `penstock prepare`."))
    examples = record.get("examples", {})
    children: list[object] = []
    kinds = (
        ("rows", "Rows dropped: filters and duplicates", "rows"),
        ("bad", "Bad rows: skipped or quarantined", "rows"),
        ("tokens", "Tokens lost to truncation", "tokens"),
        ("changed", "Rows changed and kept", "rows"),
    )
    for kind, caption, unit in kinds:
        reasons = sorted(((why, n) for why, n in record.get(kind, {}).items()), key=lambda item: (-item[1], item[0]))
        reasons = [(why, n) for why, n in reasons if kind != "changed" or not why.startswith("tokens left out")]
        if reasons:
            children.append(figure(bar_chart(reasons, label=caption, unit=unit), caption))
    for reason, rows in examples.items():
        shown = [element("pre", escape(row, 600)) for row in rows]
        summary = element("summary", f"Examples: {reason}")
        children.append(element("details", summary, *shown))
    if not children:
        children = [note("Nothing was dropped, cut or refused.")]
    return section(title, *children)


def _captioned(text: str, remark: str) -> Html:
    return Html(escape(text) + element("span", f"({remark})", class_="remark"))


def _counted(store: Store, found: StoreFigures) -> str:
    return "all rows" if len(found.rows) == len(store) else f"a sample of {len(found.rows):,} rows"


def _token_name(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None or not 0 <= token < tokenizer.vocab_size:
        return f"id {token}"
    try:
        data = tokenizer.token_bytes(token)
    except (PenstockError, KeyError, IndexError, ValueError):
        return f"id {token}"
    text = piece_text(data.decode(errors="backslashreplace"), 60)
    return text.replace("\u21b5\n", "\u21b5").replace(" ", "\u2423").replace("\t", "")


def _percent(pair: tuple[int, int]) -> float:
    return round(100 * pair[1] / pair[0], 1) if pair[0] else 0.0


def _short(value: int) -> str | None:
    for size, mark in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.2f} {mark}"
    return None


def _is_named(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return is_text(kind) or bool(pa.types.is_integer(kind))
