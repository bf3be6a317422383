"""Plots of docs/benchmarks.md, drawn from the figures in benchmarks/results.

python docs/site/plots.py            writes docs/pictures/benchmarks-*.svg
python docs/site/plots.py --check    fails if one of them is not current
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drawing import Drawing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"


def results(name: str) -> dict[str, Any]:
    """The figures of a machine."""
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def number(text: str) -> float:
    """A figure as it is printed, such as 1,420."""
    return float(text.replace(",", ""))


def ratio(case: dict[str, Any], peer: str) -> float:
    """How many times faster penstock is than a peer; below 1 it is slower."""
    ours, theirs = number(case["penstock"]), number(case["peers"][peer])
    return ours / theirs if case["better"] == "higher" else theirs / ours


def ratio_plot() -> Drawing:
    """Speed of penstock over that of each peer, on a logarithmic scale."""
    cases = results("two-cores")["cases"]
    lines = sum(1 + len(case["peers"]) for case in cases)
    picture = Drawing(
        920,
        60 + 20 * lines + 8 * len(cases),
        "Speed of penstock relative to its peers",
        "; ".join(f"{peer}: {ratio(case, peer):.2g} times" for case in cases for peer in case["peers"]),
    )
    left, right, low, high = 390.0, 880.0, 0.4, 1000.0

    def at(value: float) -> float:
        return left + (right - left) * math.log(value / low) / math.log(high / low)

    bottom = picture.height - 30
    for mark in (0.5, 1, 2, 5, 10, 50, 100, 500):
        picture.line((at(mark), 26), (at(mark), bottom), kind="mark" if mark == 1 else "grid")
        picture.text(at(mark), 18, f"{mark:g}x", "soft", "middle")
    y = 44.0
    for case in cases:
        picture.text(8, y, f"{case['case']}  ({case['penstock']} {case['unit']})", "bold")
        y += 20
        for peer in case["peers"]:
            times = ratio(case, peer)
            kind = "bar-a" if times >= 1 else "bar-b"
            start, end = sorted((at(1), at(times)))
            figure = f"{peer}: {case['peers'][peer]} {case['unit']}"
            picture.text(left - 10, y, figure, "soft", "end")
            picture.box(start, y - 11, max(end - start, 1.5), 13, kind, f"{figure}; penstock {case['penstock']}")
            picture.text(max(end, at(1)) + 6, y, f"{times:.3g}x")
            y += 20
        y += 8
    picture.text(left, picture.height - 8, "right of 1x penstock is faster; logarithmic", "soft")
    return picture


def memory_plot() -> Drawing:
    """Peak memory of penstock and a peer."""
    cases = results("two-cores")["memory_mb"]
    lines = sum(2 + len(case["peers"]) for case in cases)
    picture = Drawing(
        920,
        30 + 22 * lines,
        "Peak resident memory",
        "; ".join(f"{case['case']}: penstock {case['penstock']} MB, {case['peers']}" for case in cases),
    )
    y, scale = 24.0, 560 / 1400
    for case in cases:
        picture.text(8, y, case["case"], "bold")
        y += 22
        for name, size in {"penstock": case["penstock"], **case["peers"]}.items():
            picture.text(170, y, name, "soft", "end")
            picture.box(180, y - 12, number(size) * scale, 14, "bar-a" if name == "penstock" else "bar-soft", name)
            picture.text(186 + number(size) * scale, y, f"{size} MB")
            y += 22
        y += 14
    return picture


def cores_plot() -> Drawing:
    """Throughput of `prepare` by cores, beside the bare tokenizer."""
    case = results("h200")["cases"][0]
    series = {"penstock prepare": case["penstock"], **case["peers"]}
    picture = Drawing(
        920,
        330,
        "Tokens a second by cores",
        f"Cores {case['cores']}: " + "; ".join(f"{name} {values}" for name, values in series.items()),
    )
    left, right, top, base, most = 70, 700, 24, 280, 240.0
    step = (right - left) / (len(case["cores"]) - 1)
    for mark in range(0, 241, 60):
        y = base - (base - top) * mark / most
        picture.line((left, y), (right, y), kind="grid")
        picture.text(left - 8, y + 4, str(mark), "soft", "end")
    for place, cores in enumerate(case["cores"]):
        picture.text(left + place * step, base + 20, str(cores), "soft", "middle")
    picture.text((left + right) / 2, base + 42, f"cores; {case['unit']}", "soft", "middle")
    for which, (name, values) in enumerate(series.items()):
        figures = [number(value) for value in values.split(", ")]
        kind = "bar-a" if which == 0 else "bar-b"
        for place, value in enumerate(figures):
            x, y = left + place * step, base - (base - top) * value / most
            if place:
                before = base - (base - top) * figures[place - 1] / most
                picture.line((x - step, before), (x, y))
            picture.box(x - 4, y - 4, 8, 8, kind, f"{name}, {case['cores'][place]} cores: {value:g}")
        picture.text(right + 10, base - (base - top) * figures[-1] / most + 4, f"{name} {figures[-1]:g}")
    return picture


PLOTS: dict[str, Callable[[], Drawing]] = {
    "benchmarks-ratios": ratio_plot,
    "benchmarks-memory": memory_plot,
    "benchmarks-cores": cores_plot,
}


def main(arguments: list[str]) -> int:
    """Write the plots, or compare them with their files."""
    stale = []
    for name, draw in PLOTS.items():
        path, text = FOLDER / f"{name}.svg", draw().svg()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        sys.stderr.write(f"not current: {', '.join(stale)}; run python docs/site/plots.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
