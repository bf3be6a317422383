"""The losses and accuracies of a run so far: as lines of JSON, and as a page that needs nothing but a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import orjson

from penstock.files.atomic import write_atomic

__all__ = ["Curve", "draw_page"]

_MOST_POINTS = 800
_WIDTH, _HEIGHT = 860, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 40
_COLOURS = {"train": "#2563a8", "val": "#c2541b"}

Record = dict[str, Any]


class Curve:
    """Records in the order they were made: {"kind": "train" | "val", "step": ..., "loss": ..., "accuracy": ..., ...}.

    `log.jsonl` holds them too, each as soon as it is known. After a kill it may know more than the checkpoint a run
    goes on from; `write_log` makes it say what the checkpoint says.
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.records: list[Record] = [dict(each) for each in records]

    def add(self, record: Record, log: Path | None = None) -> None:
        self.records.append(record)
        if log is not None:
            with log.open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")

    def write_log(self, log: Path) -> None:
        write_atomic(log, b"".join(orjson.dumps(each) + b"\n" for each in self.records))

    def points(self, kind: str, value: str) -> list[tuple[float, float]]:
        """(step, value) of one kind, where it is a number."""
        found = [(each["step"], each.get(value)) for each in self.records if each["kind"] == kind]
        return [(float(step), float(y)) for step, y in found if y is not None and math.isfinite(y)]

    def last(self, kind: str) -> Record | None:
        return next((each for each in reversed(self.records) if each["kind"] == kind), None)


def draw_page(curve: Curve, *, title: str, facts: Mapping[str, Any], levels: Mapping[str, float] | None = None) -> str:
    """A whole HTML page: loss and accuracy over the steps, and a table of what there is to know.

    `levels` are dashed lines across the accuracy: what guessing would reach.
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    charts = [
        _chart("loss", {kind: curve.points(kind, "loss") for kind in _COLOURS}, {}, whole=False),
        _chart("accuracy", {kind: curve.points(kind, "accuracy") for kind in _COLOURS}, levels or {}, whole=True),
    ]
    keys = "".join(f'<span style="color:{colour}">&#9632; {kind}</span> ' for kind, colour in _COLOURS.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f"<title>{escape(title)}</title>\n<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:900px;"
        "margin:2em auto;padding:0 1em;color:#222;background:#fff}table{border-collapse:collapse}"
        "th{text-align:left;padding-right:1.5em;font-weight:normal;color:#666}svg{width:100%;height:auto}"
        "h2{font-size:1em;margin:1.5em 0 .2em}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><p>{keys}</p>\n{''.join(charts)}<table>{rows}</table></body></html>\n"
    )


def _chart(
    name: str, series: Mapping[str, list[tuple[float, float]]], levels: Mapping[str, float], *, whole: bool
) -> str:
    """One drawing. `whole`: from 0 to 1, and not from the least to the most."""
    series = {kind: _thinned(points) for kind, points in series.items() if points}
    if not series:
        return f"<h2>{name}</h2><p>nothing yet</p>"
    steps = [step for points in series.values() for step, _ in points]
    values = [value for points in series.values() for _, value in points]
    across = _Axis(0.0, max(1.0, *steps), _LEFT, _WIDTH - _RIGHT)
    low, high = (0.0, 1.0) if whole else _padded(min(values), max(values))
    up = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(across, up, whole), *(_level(text, value, up) for text, value in levels.items())]
    for kind, points in series.items():
        path = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in points)
        colour = _COLOURS[kind]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        # Points of training are many: seen is the line alone, but the pointer finds them.
        drawn = kind == "val" or len(points) == 1
        told = (f"{kind}, step {step:,.0f}: {_shown(value, whole)}" for step, value in points)
        dots = (_dot(across(step), up(value), text) for (step, value), text in zip(points, told))
        parts.append(f'<g fill="{colour}" fill-opacity="{int(drawn)}">{"".join(dots)}</g>')
    return (
        f'<h2>{name}</h2><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{name} over the steps">{"".join(parts)}</svg>\n'
    )


class _Axis:
    """Numbers to places on the drawing."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self._start, self._end = low, high, start, end

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        gap = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        first = math.ceil(self.low / gap - 1e-9)
        return [count * gap for count in range(first, math.floor(self.high / gap + 1e-9) + 1)]


def _grid(across: _Axis, up: _Axis, whole: bool) -> list[str]:
    text = 'font-size="12" fill="#666" font-family="system-ui,sans-serif"'
    parts = []
    for value in up.ticks():
        y, shown = up(value), f"{value:.0%}" if whole else _shown(value, whole)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" {text}>{shown}</text>')
    for step in across.ticks():
        x = across(step)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" {text}>{step:,.0f}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 4}" text-anchor="middle" {text}>steps</text>')
    return parts


def _level(text: str, value: float, up: _Axis) -> str:
    y = up(value)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" stroke-dasharray="5 4"/>'
        f'<text x="{_WIDTH - _RIGHT}" y="{y - 4:.1f}" text-anchor="end" font-size="11" fill="#666" '
        f'font-family="system-ui,sans-serif">{escape(text)} {value:.1%}</text>'
    )


def _dot(x: float, y: float, text: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>'


def _shown(value: float, whole: bool) -> str:
    return f"{value:.1%}" if whole else f"{value:.4g}"


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.05 or max(abs(high) * 0.05, 1e-6)
    return low - room, high + room


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points as there is room for, each the mean of those it stands for."""
    size = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(_average([x for x, _ in group]), _average([y for _, y in group])) for group in groups]


def _average(values: list[float]) -> float:
    return sum(values) / len(values)
