"""Page of a plan: what a run will be fed, before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock._amounts import percent
from penstock.errors import ConfigError
from penstock.html import Html, Section, element, facts, note, section, subsection, table
from penstock.html.charts import SERIES, bar_chart, legend, line_chart, stacked_areas
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig, open_rank
from penstock.memory.budget import format_bytes
from penstock.report.page_parts import chart_figure, settings_table, short_name
from penstock.report.plan_figures import MOST_SOURCES, PlanFigures, largest_sources, plan_figures
from penstock.report.step_bins import Floats, PackedStep, SampleSpan, StepSeries
from penstock.store.preferences import PairTable

_DRAWN_STEPS = 3
_MOST_BARS = 64
_MIXTURE_POINTS = 50
_GRID = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:0 1.5rem"


def plan_sections(config: LoaderConfig) -> list[Section]:
    """Sections of the plan of a loader's file."""
    with open_planned(config) as loader:
        if any(isinstance(source.inputs.table, PairTable) for source in loader.sources):
            return [*_pairs(loader), settings_section(config)]
        return [*figure_sections(figures_of(config, loader)), settings_section(config)]


def open_planned(config: LoaderConfig) -> DataLoader:
    """Loader of rank 0 of a file; a ConfigError if it has no plan."""
    if config.arguments.get("streaming"):
        raise ConfigError(
            f"{config.name}: a stream has no plan, since its length is known only at its end; prepare the data first, "
            "or write streaming: false into the file"
        )
    return open_rank(config)


def figures_of(config: LoaderConfig, loader: DataLoader) -> PlanFigures:
    """Figures of a file's loader, for as many epochs as the file says."""
    backend = str(config.arguments.get("backend") or "torch")
    return plan_figures(loader, config.epochs, backend=backend)


def figure_sections(figures: PlanFigures) -> list[Section]:
    """Sections of figures that were computed before."""
    made = [_overview(figures)]
    if len(figures.plan.sources) > 1:
        made.append(_mixture(figures))
    made.append(_epochs(figures))
    made.append(_filling(figures))
    if figures.costs.steps:
        made.append(_ranks(figures))
    return made


def settings_section(config: LoaderConfig) -> Section:
    return section("Settings", settings_table(config.shown_tree, caption=f"Settings of {config.name}"))


def overview_facts(figures: PlanFigures) -> Iterator[tuple[str, object, str]]:
    """Name, value and remark of the facts of a plan: the figures of `penstock plan`."""
    found = figures.summary
    counted = "" if figures.coverage.whole else f"the first {figures.coverage.counted:,} counted"
    total, estimate = figures.coverage.total, figures.coverage.estimate
    steps: object = found.steps
    if not figures.coverage.whole and (total or estimate):
        steps = total or f"about {estimate:,}"
    yield "steps", steps, f"{found.skipped:,} skipped" if found.skipped else counted
    ranks = "1 rank" if found.world_size == 1 else f"{found.world_size:,} ranks"
    yield "global batch", found.global_batch, f"samples, {found.batch_size:,} for each of {ranks}"
    yield "samples", found.samples, f"of {found.documents:,} documents or parts of them"
    yield "tokens", found.tokens, f"{found.tokens / found.steps:,.0f} per step" if found.steps else ""
    yield "padding", percent(found.padding_share), f"{found.slots - found.tokens:,} of {found.slots:,} places"
    if found.packing_efficiency is not None:
        yield "packing", percent(found.packing_efficiency), "of the room in samples is filled"
    yield "supervised", percent(found.supervised_share), f"{found.supervised:,} tokens"
    yield "longest sample", found.longest_sample, f"tokens; {found.longest_row:,} with padding"
    yield "tokens lost", sum(found.lost_tokens.values()), "" if found.lost_tokens else "none"
    if found.imbalance is not None:
        yield (
            "imbalance",
            f"{found.imbalance.contiguous:.3f}",
            f"slowest rank over the mean; {found.imbalance.balanced:.3f} if {found.imbalance.sharding}",
        )
    yield "a batch", format_bytes(found.batch_bytes), f"at most; {format_bytes(found.prefetch_bytes)} prefetched"
    yield "plan", found.plan, f"with edits: {found.edits:,}" if found.edits else "fingerprint of the order"


def _overview(figures: PlanFigures) -> Section:
    found = figures.summary
    parts: list[object] = [note(str(figures.coverage), kind="plain" if figures.coverage.whole else "warning")]
    parts.append(facts(overview_facts(figures)))
    if found.lost_tokens:
        rows = sorted(found.lost_tokens.items(), key=lambda item: -item[1])
        parts.append(table(rows, ["reason", "tokens"], caption="Tokens that no step delivers"))
    if len(found.epochs) > 1:
        by_epoch = (
            (epoch.epoch, first, epoch.steps, epoch.skipped, epoch.samples, epoch.tokens)
            for epoch, first in zip(found.epochs, figures.epoch_starts())
        )
        names = ["epoch", "first step", "steps", "skipped", "samples", "tokens"]
        parts.append(table(by_epoch, names, caption="Epochs of the loader", most=50))
    return section("Plan", *parts)


def _mixture(figures: PlanFigures) -> Section:
    found, series = figures.summary, mixture_points(figures)
    shown = largest_sources(found, MOST_SOURCES)
    rows = (
        (
            source.name,
            source.rows,
            source.stored_tokens,
            source.samples,
            source.tokens,
            percent(source.share),
            f"{source.passes:.3f}",
        )
        for source in found.sources
    )
    names = ["source", "rows", "stored tokens", "samples", "tokens", "share of tokens", "epochs"]
    parts: list[object] = [table(rows, names, caption="Sources of the mixture", most=200)]
    kept = np.flatnonzero(series.tokens.sum(axis=1))  # where every step is skipped there is no share
    shares = series.token_shares[kept]
    areas = {short_name(figures.plan.names[which]): shares[:, which] for which in shown}
    if len(shown) < len(found.sources):
        rest = [which for which in range(len(found.sources)) if which not in shown]
        areas[f"{len(rest):,} others"] = shares[:, rest].sum(axis=1)
    label = f"Share of the tokens of each of {len(found.sources):,} sources, by step"
    parts.append(
        chart_figure(
            stacked_areas(series.first[kept], areas, label=label, x_label="step", share=True),
            "Realised share of tokens, in percent",
        )
    )
    targets = figures.targets(series)
    if targets is not None:
        parts.append(note(_deviation(figures)))
        charts = [_against_target(short_name(figures.plan.names[which]), series, targets, which) for which in shown]
        parts.append(element("div", *charts, style=_GRID))
    return section("Mixture", *parts)


def mixture_points(figures: PlanFigures) -> StepSeries:
    """Points of a mixture, with enough samples each that shares are not coarse; distant steps stay single."""
    return figures.series if figures.coverage.distant else figures.series.grouped(_MIXTURE_POINTS)


def _against_target(name: str, series: StepSeries, targets: Floats, which: int) -> Html:
    lines = {
        "realised": (series.first, 100 * series.sample_shares[:, which]),
        "target": (series.first, 100 * targets[:, which]),
    }
    label = f"Share of samples of {name} by step, target and realised"
    return chart_figure(
        line_chart(lines, label=label, x_label="step", unit="%", dashed=["target"]),
        (name, ": share of samples, in percent"),
    )


def _deviation(figures: PlanFigures) -> str:
    """Sentence with the furthest that a source is from the sum of its weights."""
    worst, where, who = figures.largest_deviation()
    return (
        f"At the ends of the {len(figures.series):,} points shown, no source is further from the sum of its weights "
        f"than {worst:,.2f} samples ({short_name(who)}, step {where:,})."
    )


def _epochs(figures: PlanFigures) -> Section:
    ends = np.minimum(figures.series.stop, figures.coverage.total or figures.coverage.counted)
    start = [] if figures.coverage.distant else [0]
    lines = {
        short_name(figures.plan.names[which]): (np.append(start, ends), np.append(start, passes))
        for which, passes in figures.epochs.items()
    }
    hidden = len(figures.plan.sources) - len(lines)
    more = note(f"{hidden:,} smaller sources are not shown.") if hidden else None
    chart = line_chart(lines, label="Passes over each source by step", x_label="step", unit="epochs")
    return section("Epochs", chart_figure(chart, "Passes over each source"), more)


def _filling(figures: PlanFigures) -> Section:
    series, parts = figures.series, list[object]()
    if np.isfinite(series.packing_efficiency).any():
        lines = {"": (series.first, 100 * series.packing_efficiency)}
        chart = line_chart(lines, label="Filled share of packed samples by step", x_label="step", unit="%", high=100.0)
        parts.append(chart_figure(chart, "Packing: filled share of the room in samples, in percent"))
    padding = {"mean": (series.first, 100 * series.padding)}
    if (series.stop - series.first > 1).any():
        padding |= {
            "most of a step": (series.first, 100 * series.most_padding),
            "least of a step": (series.first, 100 * series.least_padding),
        }
    dashed = [name for name in padding if name != "mean"]
    chart = line_chart(padding, label="Share of padding by step", x_label="step", unit="%", dashed=dashed)
    parts.append(chart_figure(chart, "Padding: share of the places in a step's batches, in percent"))
    if figures.examples:
        chosen = np.unique(np.linspace(0, len(figures.examples) - 1, _DRAWN_STEPS).astype(int)).tolist()
        drawn = [draw_bins(figures.examples[number], figures.plan.names) for number in chosen]
        parts.append(
            subsection(
                "Samples with their documents",
                note("A bar is a sample, a block a document or a part of one; what is left of the bar is padding."),
                *drawn,
            )
        )
    return section("Packing and padding", *parts)


def _ranks(figures: PlanFigures) -> Section:
    costs, worst, found = figures.costs, figures.costs.worst, figures.summary.imbalance
    assert worst is not None
    name = found.sharding if found is not None else "balanced"
    means = np.maximum(np.array(costs.means), 1e-12)
    slowest = np.array(costs.slowest)
    lines = {"contiguous": (costs.steps, slowest[:, 0] / means), name: (costs.steps, slowest[:, 1] / means)}
    chart = line_chart(lines, label="Cost of the slowest rank over the mean by step", x_label="step")
    ranks = len(worst.contiguous)
    mean = sum(worst.contiguous) / ranks
    bars = [
        (f"rank {rank}", (before / mean, after / mean))
        for rank, (before, after) in enumerate(zip(worst.contiguous[:_MOST_BARS], worst.balanced[:_MOST_BARS]))
    ]
    drawn = bar_chart(
        bars,
        label=f"Cost of each rank in step {worst.step:,} over the mean, contiguous and {name}",
        series=["contiguous", name],
        most=_MOST_BARS,
    )
    hidden = ranks - len(bars)
    return section(
        "Ranks",
        note(
            f"Attention makes long documents cost more than their tokens. Measured on {len(costs.steps):,} steps from "
            f"the first; 1 means that no rank waits."
        ),
        chart_figure(chart, "Cost of the slowest rank over the mean"),
        chart_figure(drawn, f"The least balanced of these steps, {worst.step:,}: cost of each rank over the mean"),
        note(f"{hidden:,} more ranks are not shown.") if hidden else None,
    )


def _pairs(loader: DataLoader) -> list[Section]:
    """A loader of preferences has two sequences a row, which the figures do not know."""
    plan = loader.plan
    shown = [
        ("steps", plan.steps_in(0), "in an epoch"),
        ("global batch", plan.global_batch, "pairs"),
        ("plan", plan.fingerprint, "fingerprint of the order"),
    ]
    rows = ((source.name, source.inputs.table.rows) for source in loader.sources)
    return [
        section(
            "Plan",
            note("Each row has two sequences, chosen and rejected; tokens and padding of such a plan are not counted."),
            facts(shown),
            table(rows, ["source", "pairs"], caption="Sources"),
        )
    ]


_ROW, _BAR = 18, 13


def draw_bins(step: PackedStep, names: Sequence[str]) -> Html:
    """Figure of the first samples of a step. Colours are those of sources, if there are several."""
    widest = max((_tokens(span) for span in step.samples), default=1)
    width = max(step.width, widest, 1)
    rows = [_row(number, span, width, names) for number, span in enumerate(step.samples)]
    used = sorted({source for span in step.samples for source, _ in span.documents})
    more = f", the first {len(step.samples):,} of {step.size:,} samples" if step.size > len(step.samples) else ""
    label = f"Step {step.number}: {len(step.samples)} samples of up to {width} tokens, with the documents in each"
    drawing = element("svg", *rows, role="img", aria_label=label, width="100%", height=len(rows) * _ROW, class_="chart")
    several = len(names) > 1 and max(used, default=0) < SERIES
    keys = legend([short_name(name) for name in names[: max(used) + 1]]) if several else None
    return chart_figure(drawing, f"Step {step.number:,}: bars of {width:,} tokens{more}", legend=keys)


def _row(number: int, span: SampleSpan, width: int, names: Sequence[str]) -> Html:
    y, used = number * _ROW + 2, _tokens(span)
    blank = _block(
        0, width, width, y, "none", f"sample {number}: {used:,} of {width:,} tokens, {width - used:,} padding"
    )
    shapes, at = [blank], 0
    for index, (source, tokens) in enumerate(span.documents):
        tip = f"sample {number}, document {index}: {tokens:,} tokens of {short_name(names[source])}"
        shapes.append(_block(at, tokens, width, y, f"s{source % SERIES + 1}" if len(names) > 1 else "s1", tip))
        at += tokens
    if span.hidden_documents:
        tip = f"sample {number}: {span.hidden_documents:,} more documents of {span.hidden_tokens:,} tokens"
        shapes.append(_block(at, span.hidden_tokens, width, y, "s8", tip))
    return element("g", *shapes)


def _block(start: int, tokens: int, width: int, y: int, kind: str, tip: str) -> Html:
    room = kind == "none"
    return element(
        "rect",
        element("title", tip),
        x=f"{100 * start / width:.3f}%",
        y=y,
        width=f"{100 * tokens / width:.3f}%",
        height=_BAR,
        class_=None if room else kind,
        style=f"fill:{'var(--alt)' if room else 'currentColor'};stroke:var(--bg);stroke-width:1",
    )


def _tokens(span: SampleSpan) -> int:
    return sum(tokens for _, tokens in span.documents) + span.hidden_tokens
