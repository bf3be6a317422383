"""Pages of two plans or two stores side by side: marked differences, lines and histograms over each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.corpus.prepare import losses_of
from penstock.html import Html, Section, element, note, section, table
from penstock.html.charts import bar_chart, bin_edges, histogram_bars, line_chart
from penstock.loaders.loader_file import LoaderConfig
from penstock.report.page_parts import chart_figure, flat, short_name
from penstock.report.plan import figures_of, mixture_points, open_planned, overview_facts
from penstock.report.plan_figures import MOST_SOURCES, PlanFigures, largest_sources
from penstock.store import Store

Ints = npt.NDArray[np.int64]
_MOST_LENGTHS = 4_000_000
_MARK = "different"


def compare_plans(first: LoaderConfig, second: LoaderConfig) -> list[Section]:
    """Sections of two loaders' files. Both plans are counted as their own pages count them."""
    found: list[PlanFigures] = []
    for config in (first, second):
        with open_planned(config) as loader:
            found.append(figures_of(config, loader))
    names = pair_names(first.name, second.name)
    pair = dict(zip(names, found))
    made = [_plan_facts(pair), _plan_lines(pair)]
    if any(len(figures.plan.sources) > 1 for figures in found):
        made.append(_plan_sources(pair))
    settings = dict(flat(first.shown_tree)), dict(flat(second.shown_tree))
    made.append(section("Settings", differences(names, *settings, caption="Settings of both files")))
    return made


def compare_stores(first: Store, second: Store) -> list[Section]:
    """Sections of two stores: facts, lengths over each other, losses."""
    names = pair_names(first.shown, second.shown)
    stores = dict(zip(names, (first, second)))
    known = [_store_facts(store) for store in stores.values()]
    made = [section("Stores", differences(names, *known, caption="Facts of both stores"))]
    made.append(_store_lengths(stores))
    lost = [{reason: float(n) for reason, n in losses_of(store).items()} for store in stores.values()]
    reasons = sorted({*lost[0], *lost[1]}, key=lambda reason: -max(lost[0].get(reason, 0), lost[1].get(reason, 0)))
    if reasons:
        bars = [(reason, (lost[0].get(reason, 0.0), lost[1].get(reason, 0.0))) for reason in reasons]
        chart = bar_chart(bars, label="Tokens lost when the stores were prepared", unit="tokens", series=names)
        made.append(section("Losses", chart_figure(chart, "Tokens lost when the stores were prepared, by reason")))
    return made


def differences(names: tuple[str, str], first: Mapping[str, Any], second: Mapping[str, Any], *, caption: str) -> Html:
    """Table of facts of two sides. A row whose sides differ is marked by a word and by weight, not by colour alone."""
    rows: list[tuple[object, ...]] = []
    different = 0
    for key in dict.fromkeys([*first, *second]):
        one, other = first.get(key), second.get(key)
        if one == other:
            rows.append((key, _shown(one), _shown(other), ""))
        else:
            different += 1
            mark = element("strong", _change(one, other))
            rows.append((element("strong", key), _strong(one), _strong(other), mark))
    counted = f"{different:,} of {len(rows):,} differ." if different else "Nothing differs."
    return Html(note(counted) + table(rows, ["", *names, "change"], caption=caption))


def pair_names(first: str, second: str) -> tuple[str, str]:
    """Short names of two paths that differ."""
    one, other = PurePath(first.rstrip("/")), PurePath(second.rstrip("/"))
    for parts in range(1, 4):
        names = "/".join(one.parts[-parts:]), "/".join(other.parts[-parts:])
        if names[0] != names[1]:
            return names
    return f"{one.name} (first)", f"{other.name} (second)"


def _plan_facts(pair: Mapping[str, PlanFigures]) -> Section:
    known = [{name: value for name, value, _ in overview_facts(figures)} for figures in pair.values()]
    for facts, figures in zip(known, pair.values()):
        facts |= {f"tokens lost: {reason}": tokens for reason, tokens in figures.summary.lost_tokens.items()}
    first, second = pair.values()
    names: Any = tuple(pair)
    notes = [note(f"{name}: {figures.coverage}") for name, figures in pair.items()]
    same = first.summary.plan == second.summary.plan and not first.summary.edits and not second.summary.edits
    if same:
        notes.append(note("The order of samples is the same."))
    return section("Plans", *notes, differences(names, *known, caption="Facts of both plans"))


def _plan_lines(pair: Mapping[str, PlanFigures]) -> Section:
    """Padding and packing of both plans over steps."""
    parts: list[object] = []
    for caption, attribute in (
        ("Padding: share of the places in batches, in percent", "padding"),
        ("Packing: filled share of the room in samples, in percent", "packing_efficiency"),
    ):
        lines = {
            name: (figures.series.first, 100 * getattr(figures.series, attribute))
            for name, figures in pair.items()
            if np.isfinite(getattr(figures.series, attribute)).any()
        }
        if lines:
            chart = line_chart(lines, label=f"{caption}, of both plans by step", x_label="step", unit="%")
            parts.append(chart_figure(chart, caption))
    tokens = {}
    for name, figures in pair.items():
        series = figures.series
        if not figures.coverage.distant:
            tokens[name] = (np.append(0, series.stop), np.append(0, series.tokens.sum(axis=1).cumsum()) / 1e6)
    if tokens:
        chart = line_chart(tokens, label="Tokens delivered by step, in millions", x_label="step", unit="million")
        parts.append(chart_figure(chart, "Tokens delivered, in millions"))
    return section("Over steps", *parts)


def _plan_sources(pair: Mapping[str, PlanFigures]) -> Section:
    """Share of each source in the tokens, in total and over steps."""
    found = {name: {each.name: each for each in figures.summary.sources} for name, figures in pair.items()}
    first, second = found.values()
    known = list(dict.fromkeys([*first, *second]))
    bars = [
        (name, tuple(100 * side[name].share if name in side else 0.0 for side in (first, second))) for name in known
    ]
    bars.sort(key=lambda item: -max(item[1]))
    chart = bar_chart(bars, label="Share of tokens of each source", unit="%", series=tuple(pair))
    parts: list[object] = [chart_figure(chart, "Share of the tokens of each source, in percent")]
    epochs = [{name: round(source.passes, 3) for name, source in side.items()} for side in (first, second)]
    names: Any = tuple(pair)
    parts.append(differences(names, *epochs, caption="Passes over each source"))
    for source in _largest_of_both(pair.values()):
        lines = {}
        for name, figures in pair.items():
            if source in figures.plan.names:
                series, which = mixture_points(figures), figures.plan.names.index(source)
                lines[name] = (series.first, 100 * series.sample_shares[:, which])
        label = f"Share of samples of {short_name(source)} by step, in both plans"
        parts.append(
            chart_figure(
                line_chart(lines, label=label, x_label="step", unit="%"),
                (short_name(source), ": share of samples, in percent"),
            )
        )
    return section("Mixture", *parts)


def _largest_of_both(several: Iterable[PlanFigures]) -> list[str]:
    found: dict[str, None] = {}
    for figures in several:
        found |= dict.fromkeys(figures.plan.names[which] for which in largest_sources(figures.summary, MOST_SOURCES))
    return list(found)[:MOST_SOURCES]


def _store_facts(store: Store) -> dict[str, object]:
    manifest = store.manifest
    known: dict[str, object] = {
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "tokens a row": round(manifest.tokens / manifest.rows, 2) if manifest.tokens and manifest.rows else None,
        "supervised": manifest.supervised,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "version": manifest.version,
        "created": manifest.created,
        "tokenizer": manifest.tokenizer,
        "chat template": manifest.template,
        "transforms": ", ".join(manifest.lineage[-1].transforms) if manifest.lineage else None,
        "input files": sum(len(run.inputs) for run in manifest.lineage),
    }
    return known | {f"column {column.name}": str(column.type) for column in manifest.schema}


def _store_lengths(stores: Mapping[str, Store]) -> Section:
    """Histograms over common bins."""
    without = [name for name, store in stores.items() if store.manifest.tokens_column is None]
    if without:
        return section("Lengths", note(f"{' and '.join(without)}: no column of tokens, so that rows have no length."))
    lengths = {name: _lengths(store) for name, store in stores.items()}
    longest = max((int(found.max(initial=0)) for found, _ in lengths.values()), default=0)
    edges = bin_edges(1, max(longest, 1), 40, log=True)
    counts = {
        name: 100 * np.histogram(np.maximum(found, 1), edges)[0] / max(len(found), 1)
        for name, (found, _) in lengths.items()
    }
    sampled = [note(f"{name}: every {step:,}th row was looked at.") for name, (_, step) in lengths.items() if step > 1]
    chart = histogram_bars(
        edges,
        counts,
        label="Lengths of the rows of both stores, in percent of its rows",
        unit="%",
        log=True,
        x_label="tokens",
    )
    shares = (5, 50, 90, 99, 100)
    rows = [
        (name, *np.percentile(found, shares, method="lower").astype(int).tolist())
        for name, (found, _) in lengths.items()
        if len(found)
    ]
    return section(
        "Lengths",
        *sampled,
        chart_figure(chart, "Rows by length in tokens, in percent of the rows of each store"),
        table(rows, ["store", *(f"{share}%" if share < 100 else "longest" for share in shares)], caption="Percentiles"),
    )


def _lengths(store: Store) -> tuple[Ints, int]:
    """Tokens of rows, of at most about four million at even distances in each shard, and that distance."""
    step = -(-len(store) // _MOST_LENGTHS) or 1
    shards = range(len(store.manifest.shards))
    found = [np.asarray(store.map_lengths(number)[::step], np.int64) for number in shards]
    return np.concatenate([np.zeros(0, np.int64), *found]), step


def _strong(value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if number else element("strong", _shown(value))


def _shown(value: object) -> object:
    return "-" if value is None or value == "" else value


def _change(one: object, other: object) -> str:
    """Relative change of a number; the word for the rest."""
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other)):
        before, after = float(one), float(other)  # type: ignore[arg-type]
        return f"{after / before - 1:+.1%}" if before else _MARK
    if one is None:
        return "only second"
    return "only first" if other is None else _MARK
