"""Tables and figures of `feed.py`."""

from __future__ import annotations

from typing import Any

from feed_peers.running import Runs


def summary(runs: Runs) -> dict[str, Any]:
    """Figures of a case that every suite reports."""
    figure: dict[str, Any] = {"package": f"{runs.case.package} {runs.version}".strip(), "kind": runs.case.kind}
    figure |= {"note": runs.case.note, "problem": runs.problem}
    if runs.runs:
        figure |= {"peak_mb": runs.peak_mb, "others": runs.others, "runs": [run.as_dict() for run in runs.runs]}
    return figure


def compare(figures: dict[str, Any], own: str, rate: str, reference: str = "") -> None:
    ours, theirs = figures.get(own, {}).get(rate), figures.get(reference, {}).get(rate)
    for figure in figures.values():
        there = figure.get(rate)
        figure["penstock_speed"] = ours / there if ours and there else None
        figure["of_reference"] = there / theirs if there and theirs else None


def times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else "-"


def show(figures: dict[str, Any], columns: dict[str, Any]) -> None:
    from table import table

    lines = []
    for name, figure in figures.items():
        if "runs" in figure:
            lines.append([name, figure["package"], *(cell(figure) for cell in columns.values())])
        else:
            lines.append([name, figure["package"], *["-"] * len(columns)])
    print(table(["case", "package", *columns], lines))
    for name, figure in figures.items():
        if figure["problem"]:
            print(f"\n{name}: {figure['problem']}")


def notes(cases: list[Runs]) -> None:
    print()
    for runs in cases:
        if runs.case.note:
            print(f"{runs.case.name} ({runs.case.kind}): {runs.case.note}")


def judge(
    what: str, value: float, *, at_least: float | None = None, at_most: float | None = None, unit: str = ""
) -> dict[str, Any]:
    limit = at_least if at_least is not None else at_most
    met = value >= at_least if at_least is not None else value <= (at_most or 0)
    wanted = f"at {'least' if at_least is not None else 'most'} {limit:g}{unit}"
    print(f"{'met   ' if met else 'MISSED'} {what}: {value:.5g}{unit}, wanted {wanted}")
    return {"what": what, "value": value, "limit": limit, "met": met}
