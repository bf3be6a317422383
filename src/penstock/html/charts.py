"""Charts as inline SVG: bars, histograms, lines, stacked areas.

Places are shares of the width, so a chart fills its frame while its text keeps its size. Colours are variables of the
page. Each shape has a tooltip, and the whole chart a label that says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.html.markup import Html, element, escape, shown_number

Numbers = Sequence[float] | np.ndarray[Any, Any]
_HEIGHT = 200
_BOTTOM = 34
_LEFT = 9.0
"""Share of the width, in percent, that the labels of the y axis have."""
_MOST_POINTS = 400
_MOST_TIPS = 60
SERIES = 8
"""Colours of series in the page's style; a chart with more series repeats them."""


def bar_chart(
    items: Sequence[tuple[object, float | Sequence[float]]],
    *,
    label: str,
    unit: str = "",
    series: Sequence[str] = (),
    log: bool = False,
    most: int = 40,
    high: float | None = None,
) -> Html:
    """Horizontal bars, one for each (name, value); with `series`, a value for each of them side by side.

    `high` is the value of a full bar, such as 100 for shares of different wholes; by default the largest is full. A
    chart without items says so. Names are cut to what fits; the tooltip has the whole.
    """
    shown = [(name, _several(values)) for name, values in items[:most]]
    if not shown:
        return element("p", "Nothing to show.", class_="note plain")
    everything = [value for _, values in shown for value in values if math.isfinite(value)]
    positive = [value for value in everything if value > 0]
    high = max(positive, default=1.0) if high is None else high
    scale = Scale(min(positive, default=1.0) / 2 if log else 0.0, high, log)
    thick = 14 if len(shown[0][1]) == 1 else 10
    step = 20 + thick * len(shown[0][1])
    drawn: list[Html] = []
    for number, (name, values) in enumerate(shown):
        top = number * step
        said = [f"{shown_number(value)}{_unit(unit)}" for value in values]
        words = element("text", escape(str(name), 90), x="0", y="13", class_="name")
        # A drawing of its own cuts what does not fit.
        drawn.append(element("svg", element("title", str(name)), words, x="0", y=top, width="72%", height="18"))
        drawn.append(element("text", " / ".join(said), x="100%", y=top + 13, class_="value", text_anchor="end"))
        for own, value in enumerate(values):
            width = 100 * scale(value) if value > 0 else 0
            tip = f"{name}: {said[own]}" + (f" ({series[own]})" if series else "")
            drawn.append(
                element(
                    "rect",
                    element("title", tip),
                    x="0",
                    y=top + 18 + own * thick,
                    width=f"{max(width, 0.3) if value > 0 else 0:.2f}%",
                    height=thick - 3,
                    rx="2",
                    class_=f"bar s{own % SERIES + 1}",
                )
            )
    more = f"; {len(items) - most:,} more are not shown" if len(items) > most else ""
    return Html(legend(series) + _svg(drawn, label + more, height=len(shown) * step))


def histogram(
    values: Numbers | Mapping[str, Numbers],
    *,
    label: str,
    unit: str = "",
    bins: int = 40,
    log: bool = False,
    log_counts: bool = False,
    x_label: str = "",
) -> Html:
    """Counts of values in bins; of several sets over the same bins if `values` is a mapping.

    With `log`, bins grow by a factor and values below 1 share the first. Infinite values and nan are left out.
    """
    sets = values if isinstance(values, Mapping) else {"": values}
    arrays = {name: _finite(each) for name, each in sets.items()}
    every = [array for array in arrays.values() if len(array)]
    if not every:
        return element("p", "Nothing to show.", class_="note plain")
    edges = bin_edges(min(map(np.min, every)), max(map(np.max, every)), bins, log=log)
    low = edges[0]
    counts = {name: np.histogram(np.maximum(array, low), edges)[0] for name, array in arrays.items()}
    return histogram_bars(edges, counts, label=label, unit=unit, log=log, log_counts=log_counts, x_label=x_label)


def histogram_bars(
    edges: Numbers,
    counts: Mapping[str, Numbers],
    *,
    label: str,
    unit: str = "",
    log: bool = False,
    log_counts: bool = False,
    x_label: str = "",
    open_ends: tuple[bool, bool] = (False, False),
) -> Html:
    """A histogram that was counted elsewhere: `edges` has one more than each of the counts.

    `open_ends` says if the first bin has all values up to its upper edge, and the last one all above its lower edge.
    """
    edges = np.asarray(edges, np.float64)
    across = Scale(float(edges[0]), float(edges[-1]), log)
    high = max(float(np.max(each)) for each in counts.values()) or 1.0
    up = Scale(0.5 if log_counts else 0.0, high, log_counts)
    last = len(edges) - 2
    ends: dict[int, str] = {}
    if open_ends[0]:
        ends[0] = f"{shown_number(edges[1])} or less"
    if open_ends[1]:
        ends[last] = "any" if 0 in ends and not last else f"over {shown_number(edges[last])}"
    known = float(edges[1 if open_ends[0] else 0]), float(edges[last if open_ends[1] else last + 1])
    shapes: list[Html] = [
        element(
            "text",
            text,
            x=f"{(_place(across(edges[number])) + _place(across(edges[number + 1]))) / 2:.2f}%",
            y=_HEIGHT + 23,
            text_anchor="middle",
            class_="tick",
        )
        for number, text in ends.items()
    ]
    for own, (name, each) in enumerate(counts.items()):
        for number, count in enumerate(np.asarray(each).tolist()):
            if not count:
                continue
            left, right = _place(across(edges[number])), _place(across(edges[number + 1]))
            wide = (right - left) / len(counts)
            height = max(1.0, up(count) * _HEIGHT)
            said = f"{ends.get(number) or _between(edges[number], edges[number + 1])}{_unit(unit)}"
            tip = f"{name + ', ' if name else ''}{said}: {shown_number(count)}"
            shapes.append(
                element(
                    "rect",
                    element("title", tip),
                    x=f"{left + own * wide:.3f}%",
                    y=f"{8 + _HEIGHT - height:.1f}",
                    width=f"{max(0.1, wide - 0.12):.3f}%",
                    height=f"{height:.1f}",
                    class_=f"bar s{own % SERIES + 1}",
                )
            )
    return Html(legend(_names(counts)) + _svg([*_axes(across, up, x_label or unit, known), *shapes], label))


def _between(low: float, high: float) -> str:
    return f"{shown_number(low)} to {shown_number(high)}"


def bin_edges(low: float, high: float, bins: int, *, log: bool = False) -> np.ndarray[Any, Any]:
    """Edges of at most `bins` bins, at whole numbers if both ends are; with `log`, from 1 on by a factor."""
    low, high = float(low), float(high)
    whole = low == int(low) and high == int(high)
    if log:
        first = max(1.0, low)
        edges = np.geomspace(first, max(high, first) + 1, bins + 1)
    else:
        edges = np.linspace(low, high + (1 if whole else 0) if high > low or whole else low + 1, bins + 1)
    if whole and high - low < 1e15:
        edges = np.unique(np.rint(edges))
        if len(edges) < 2:
            edges = np.array([edges[0], edges[0] + 1])
    return edges


def line_chart(
    series: Mapping[str, tuple[Numbers, Numbers]],
    *,
    label: str,
    x_label: str = "",
    unit: str = "",
    dashed: Sequence[str] = (),
    high: float | None = None,
) -> Html:
    """Lines of (xs, ys) by name. A long series is thinned, keeping the lowest and highest value of each stretch.

    `dashed` names series drawn as dashes, such as a target; `high` is the top of the y axis if it is known.
    """
    cleaned = {name: _pairs(xs, ys) for name, (xs, ys) in series.items()}
    drawn = {name: pair for name, pair in cleaned.items() if len(pair[0])}
    if not drawn:
        return element("p", "Nothing to show.", class_="note plain")
    across = Scale(min(float(xs.min()) for xs, _ in drawn.values()), max(float(xs.max()) for xs, _ in drawn.values()))
    up = _y_scale([ys for _, ys in drawn.values()], high)
    lines: list[Html] = []
    points: list[Html] = []
    for own, (name, pair) in enumerate(drawn.items()):
        xs, ys = thinned(*pair)
        places = " ".join(f"{1000 * across(x):.1f},{1000 - 1000 * up(y):.1f}" for x, y in zip(xs, ys))
        kind = f"line s{own % SERIES + 1}" + (" dashed" if name in dashed else "")
        lines.append(element("polyline", points=places, class_=kind))
        for at in np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MOST_TIPS)).astype(int)).tolist():
            tip = f"{name + ', ' if name else ''}{x_label} {shown_number(xs[at])}: {shown_number(ys[at])}{_unit(unit)}"
            points.append(_point(_place(across(xs[at])), up(ys[at]), tip, own))
    return Html(legend(_names(drawn)) + _svg([*_axes(across, up, x_label), _plane(lines), *points], label))


def stacked_areas(
    xs: Numbers,
    series: Mapping[str, Numbers],
    *,
    label: str,
    x_label: str = "",
    share: bool = False,
) -> Html:
    """Areas on top of each other; with `share`, of the sum at each x, up to 100%."""
    steps = np.asarray(xs, np.float64)
    if not len(steps) or not series:
        return element("p", "Nothing to show.", class_="note plain")
    stacked = np.array([np.nan_to_num(np.asarray(ys, np.float64)) for ys in series.values()])
    if len(steps) > _MOST_POINTS:
        kept = np.unique(np.linspace(0, len(steps) - 1, _MOST_POINTS).astype(int))
        steps, stacked = steps[kept], stacked[:, kept]
    if share:
        stacked = 100 * stacked / np.where(stacked.sum(0) > 0, stacked.sum(0), 1)
    tops = np.cumsum(stacked, 0)
    across = Scale(float(steps.min()), float(steps.max()))
    up = Scale(0.0, 100.0 if share else float(tops[-1].max()) or 1.0)
    areas: list[Html] = []
    points: list[Html] = []
    for own, name in enumerate(series):
        under = tops[own - 1] if own else np.zeros(len(steps))
        there = [f"{1000 * across(x):.1f},{1000 - 1000 * up(y):.1f}" for x, y in zip(steps, tops[own])]
        back = [f"{1000 * across(x):.1f},{1000 - 1000 * up(y):.1f}" for x, y in zip(steps[::-1], under[::-1])]
        areas.append(element("polygon", points=" ".join(there + back), class_=f"area s{own % SERIES + 1}"))
        for at in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_TIPS // 2)).astype(int)).tolist():
            value = f"{shown_number(float(stacked[own, at]))}{'%' if share else ''}"
            tip = f"{name}, {x_label} {shown_number(steps[at])}: {value}"
            points.append(_point(_place(across(steps[at])), up(float(tops[own, at])), tip, own))
    return Html(legend(_names(series)) + _svg([*_axes(across, up, x_label), _plane(areas), *points], label))


def legend(names: Sequence[str]) -> Html:
    """Colours of series with their names; nothing for a single series without a name."""
    if not any(names):
        return Html("")
    entries = [
        element("li", element("i", class_=f"key s{own % SERIES + 1}"), escape(name, 80))
        for own, name in enumerate(names)
    ]
    return element("ul", *entries, class_="legend")


def thinned(xs: np.ndarray[Any, Any], ys: np.ndarray[Any, Any]) -> tuple[list[float], list[float]]:
    """At most about 400 points: of each stretch its lowest and its highest, in their order."""
    if len(xs) <= _MOST_POINTS:
        return xs.tolist(), ys.tolist()
    kept: list[int] = [0]
    for part in np.array_split(np.arange(len(xs)), _MOST_POINTS // 2):
        kept += sorted({int(part[np.argmin(ys[part])]), int(part[np.argmax(ys[part])])})
    kept = sorted({*kept, len(xs) - 1})
    return xs[kept].tolist(), ys[kept].tolist()


def _svg(shapes: Sequence[Html], label: str, height: int = _HEIGHT + _BOTTOM + 8) -> Html:
    return element("svg", *shapes, role="img", aria_label=label, width="100%", height=height, class_="chart")


def _axes(across: Scale, up: Scale, x_label: str, known: tuple[float, float] = (-math.inf, math.inf)) -> list[Html]:
    """Axes; the x axis has ticks where its values are known."""
    made: list[Html] = []
    for value in up.ticks(4):
        y = f"{8 + _HEIGHT - up(value) * _HEIGHT:.1f}"
        made.append(element("line", x1=f"{_LEFT}%", x2="100%", y1=y, y2=y, class_="grid"))
        made.append(
            element("text", short_number(value), x=f"{_LEFT - 1.2}%", y=y, dy="4", text_anchor="end", class_="tick")
        )
    for value in (value for value in across.ticks(5) if known[0] <= value <= known[1]):
        x = _place(across(value))
        anchor = "end" if x > 96 else "start" if x < _LEFT + 4 else "middle"
        made.append(
            element("text", short_number(value), x=f"{x:.2f}%", y=_HEIGHT + 23, text_anchor=anchor, class_="tick")
        )
    made.append(element("line", x1=f"{_LEFT}%", x2="100%", y1=8 + _HEIGHT, y2=8 + _HEIGHT, class_="axis"))
    if x_label:
        made.append(element("text", x_label, x="100%", y=_HEIGHT + 38, text_anchor="end", class_="tick"))
    return made


def _plane(shapes: Sequence[Html]) -> Html:
    """Shapes in the frame of the axes, stretched to its width."""
    return element(
        "svg",
        *shapes,
        x=f"{_LEFT}%",
        y="8",
        width=f"{100 - _LEFT}%",
        height=_HEIGHT,
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
    )


def _point(x: float, y: float, tip: str, own: int) -> Html:
    return element(
        "circle",
        element("title", tip),
        cx=f"{x:.2f}%",
        cy=f"{8 + _HEIGHT - y * _HEIGHT:.1f}",
        r="5",
        class_=f"point s{own % SERIES + 1}",
    )


def _place(share: float) -> float:
    """Percent of the width at which a share of the x axis lies."""
    return _LEFT + share * (100 - _LEFT)


def _y_scale(series: Sequence[np.ndarray[Any, Any]], high: float | None) -> Scale:
    top = max(float(ys.max()) for ys in series) if high is None else high
    low = min(0.0, *(float(ys.min()) for ys in series))
    return Scale(low, top if top > low else low + 1)


def _pairs(xs: Numbers, ys: Numbers) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    if len(x) != len(y):
        raise ValueError(f"expected as many xs as ys, got {len(x)} and {len(y)}")
    kept = np.isfinite(x) & np.isfinite(y)
    return x[kept], y[kept]


def _finite(values: Numbers) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    return array[np.isfinite(array)] if array.dtype.kind == "f" else array


def _several(values: float | Sequence[float]) -> list[float]:
    return [float(values)] if isinstance(values, int | float | np.number) else [float(each) for each in values]


def _names(series: Mapping[str, Any]) -> list[str]:
    return list(series) if len(series) > 1 or any(series) else []


def _unit(unit: str) -> str:
    return f" {unit}" if unit and unit != "%" else unit


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on a line from 0 to 1; logarithmic if asked, then `low` is above 0."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value, from 0 to 1; one beyond the ends is at the end."""
        if not math.isfinite(value):
            return 0.0
        low, high = self._bent(self.low), self._bent(self.high)
        return min(1.0, max(0.0, (self._bent(max(value, self.low)) - low) / ((high - low) or 1.0)))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for an axis, at most about `most` of them."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            powers = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]
            return powers if len(powers) > 1 else [self.low, self.high]
        width = (self.high - self.low) or 1.0
        step = 10.0 ** math.floor(math.log10(width / most))
        step *= next(factor for factor in (1, 2, 5, 10) if width / (step * factor) <= most)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _bent(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def short_number(value: float) -> str:
    """`12k`, `3.4M`, `0.25`: the label of an axis."""
    for size, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return shown_number(round(value, 6))
