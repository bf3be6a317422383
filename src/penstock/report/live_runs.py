"""Sections of runs that are no pipeline and no loader: members of a queue, and rollouts on their way to a trainer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from penstock._amounts import percent
from penstock.html import Html, Section, facts, figure, section, shown_number, table
from penstock.html.charts import bar_chart, histogram_bars, line_chart
from penstock.metrics.readings import labels_of
from penstock.report.page_parts import chart_figure
from penstock.report.run_record import RunPart

_SPLIT_COLUMNS = ("ready_files", "ready_batches", "leased_files", "leased_batches", "aside_files", "returned_files")


def queue_section(part: RunPart) -> Section | None:
    """Backlog and leases of each split, at the end and over time, and the members of the queue."""
    columns = [part.last(f"penstock_queue_{name}") for name in _SPLIT_COLUMNS]
    splits = list(dict.fromkeys(split for column in columns for split in column))
    if not splits:
        return None
    names = [name.replace("_", " ") for name in _SPLIT_COLUMNS]
    rows = [(split, *(_whole(column.get(split)) for column in columns)) for split in splits]
    parts: list[object] = [table(rows, ["split", *names], caption="Backlog and leases at the end, by split")]
    members = part.last("penstock_queue_members")
    if members:
        parts.append(facts([(f"members: {name}", round(number)) for name, number in members.items()]))
    for name, caption in (("ready_batches", "Batches that wait in the queue"), ("leased_batches", "Batches on lease")):
        parts += _over_time(part, {"": f"penstock_queue_{name}"}, caption, "batches")
    return section("Queue", *parts)


def rollouts_section(part: RunPart) -> Section | None:
    """Staleness, groups and rewards of the rollouts used, and those that were not."""
    shown: list[tuple[str, object, str]] = []
    for label, name, remark in (
        ("used", "used_total", ""),
        ("appended", "appended_total", ""),
        ("waiting", "waiting", "at the end"),
        ("capacity", "capacity", ""),
        ("policy version", "policy_version", "at the end"),
    ):
        if (value := part.last(f"penstock_rollouts_{name}").get("")) is not None:
            shown.append((label, round(value), remark))
    if (value := part.last("penstock_rollouts_group_completion_ratio").get("")) is not None:
        shown.append(("complete groups", percent(value), "of those taken"))
    if not shown:
        return None
    parts: list[object] = [facts(shown)]
    rewards = part.readings[-1].metrics
    if (drawn := reward_figure(rewards)) is not None:
        parts.append(drawn)
    staleness = {name: f"penstock_rollouts_staleness_{name}" for name in ("mean", "max")}
    parts += _over_time(part, staleness, "Staleness of the rollouts used, in versions of the policy", "versions")
    parts += _over_time(part, {"": "penstock_rollouts_waiting"}, "Rollouts that wait", "rollouts")
    dropped = [(why, n) for why, n in part.last("penstock_rollouts_dropped_total").items() if n]
    if dropped:
        parts.append(
            chart_figure(bar_chart(dropped, label="Rollouts not used", unit="rollouts"), "Not used, by reason")
        )
    return section("Rollouts", *parts)


def reward_figure(metrics: Mapping[str, float]) -> Html | None:
    """Histogram of rewards, from cumulative buckets as Prometheus has them; None without a reward."""
    name = "penstock_rollouts_reward"
    buckets = sorted(
        (edge, value)
        for key, value in metrics.items()
        if key.startswith(f"{name}_bucket{{") and (edge := _edge(labels_of(key).get("le"))) is not None
    )
    if not buckets or not buckets[-1][1]:
        return None
    finite = [(edge, value) for edge, value in buckets if math.isfinite(edge)]
    steps = [high - low for (low, _), (high, _) in pairwise(finite)] or [1.0]
    edges = [finite[0][0] - steps[0], *(edge for edge, _ in finite)] if finite else [0.0]
    counts = [value - before for (_, value), before in zip(finite, [0.0, *(value for _, value in finite)])]
    if len(buckets) > len(finite) and buckets[-1][1] > (finite[-1][1] if finite else 0.0):
        edges.append(edges[-1] + steps[-1])
        counts.append(buckets[-1][1] - (finite[-1][1] if finite else 0.0))
    used = [at for at, count in enumerate(counts) if count]
    # The edges reach further than most rewards, and not as far as some.
    edges, counts = edges[used[0] : used[-1] + 2], counts[used[0] : used[-1] + 1]
    open_ends = used[0] == 0, used[-1] >= len(finite)
    total = metrics.get(f"{name}_sum")
    mean = f", mean {total / buckets[-1][1]:.3g}" if total is not None else ""
    drawn = histogram_bars(
        edges, {"rewards": counts}, label="Rewards of the rollouts used", x_label="reward", open_ends=open_ends
    )
    return figure(drawn, f"Rewards: {shown_number(buckets[-1][1])} rollouts used{mean}")


def _over_time(part: RunPart, names: Mapping[str, str], caption: str, unit: str) -> Iterable[Html]:
    """A chart of series with two readings or more; nothing if there are none."""
    lines = {
        label or shown: points
        for shown, name in names.items()
        for label, points in part.series(name).items()
        if len(points[0]) > 1
    }
    if lines:
        chart = line_chart(lines, label=f"{caption}, over time", x_label="seconds", unit=unit)
        yield chart_figure(chart, caption)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _edge(text: str | None) -> float | None:
    try:
        edge = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(edge) else edge
