"""Drawing of the samples of a step: bars whose blocks are documents."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.html import Html, element
from penstock.html.charts import SERIES, legend
from penstock.report.page_parts import chart_figure, short_name
from penstock.report.step_bins import PackedStep, SampleSpan

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
