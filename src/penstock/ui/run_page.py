"""Page of a run, from its metrics file: pipelines, loaders, queue members, rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from penstock._amounts import format_seconds
from penstock.html import Html, element, facts, figure, note, shown_number, table
from penstock.html.charts import bar_chart, line_chart
from penstock.memory.budget import format_bytes
from penstock.metrics.readings import key_of, labels_of
from penstock.report.live_runs import reward_figure
from penstock.ui.frame import badge, document, live, panel, place_line
from penstock.ui.runs import STATE_TEXTS, FollowedRun, MetricsReading, State
from penstock.ui.site import Site
from penstock.ui.targets import Target

_GOOD: dict[State, str] = {"running": "good", "finished": "good", "failed": "bad", "killed": "bad"}
Fact = tuple[object, ...]
Series = dict[str, tuple[list[float], list[float]]]


def run_page(site: Site, target: Target) -> str:
    record = site.run(target.number).look()
    name = str(record.header.get("name") or target.name)
    return document(
        name,
        place_line(target.name, target.shown),
        live(f"{target.address}/live", *run_panels(record)),
        crumbs=[(target.name, None)],
    )


def run_panels(record: FollowedRun) -> Iterator[Html]:
    """Parts of the page, each with an id."""
    yield _state(record)
    latest = record.latest
    if latest is None:
        return
    subject = _SUBJECTS.get(record.kind)
    if subject is not None:
        yield from subject(record, latest)
    yield _all_readings(latest)


def run_line(record: FollowedRun) -> str:
    """The state of a run in a line, for the overview."""
    latest = record.latest
    if latest is None:
        return STATE_TEXTS[record.state()]
    parts = [format_seconds(latest.seconds)]
    for name, unit in (
        ("penstock_pipeline_rows_in_total", "rows/s"),
        ("penstock_loader_tokens_total", "tokens/s"),
        ("penstock_rollouts_used_total", "rollouts/s"),
    ):
        if (rate := record.rate(name)) is not None:
            parts.append(f"{shown_number(round(rate))} {unit}")
    if (wait := latest.get("penstock_loader_data_wait_ratio")) is not None:
        parts.append(f"data wait {wait:.1%}")
    return ", ".join(parts)


def state_badge(record: FollowedRun) -> Html:
    state = record.state()
    return badge(state, _GOOD.get(state, "plain"))


def _state(record: FollowedRun) -> Html:
    header, latest = record.header, record.latest
    state = record.state()
    said = f"The run {STATE_TEXTS[state]}."
    shown: list[Fact] = []
    if latest is not None:
        shown.append(("time", format_seconds(latest.seconds)))
    if header:
        shown += [("process", str(header.get("pid", "?")), str(header.get("host", "")))]
        shown += [("began", _clock(header.get("started")))]
    if state in ("running", "silent", "killed") and record.readings:
        shown.append(("last reading", f"{record.silent_seconds():.0f} s ago" if state != "running" else "now"))
    if record.parts > 1:
        shown.append(("parts", record.parts, "it was resumed"))
    end = record.end or {}
    error = note(str(end["error"]), kind="error") if end.get("error") else None
    sentence = latest.note if latest is not None and latest.note else ""
    labels = f"{record.kind}: " + ", ".join(
        f"{name} {value}" for name, value in dict(header.get("labels") or {}).items()
    )
    return element(
        "div",
        element("p", badge(state, _GOOD.get(state, "plain")), f" {said}", class_="sentence", role="status"),
        error,
        element("p", sentence, class_="sentence") if sentence else None,
        facts(shown) if shown else None,
        element("p", labels.removesuffix(": "), class_="lead") if header else None,
        id="state",
    )


# -- pipelines ---------------------------------------------------------------------------------------------------------


def _pipeline(record: FollowedRun, latest: MetricsReading) -> Iterator[Html]:
    shown: list[Fact] = []
    for name, key in (("rows in", "rows_in"), ("rows out", "rows_out")):
        value, rate = latest.get(f"penstock_pipeline_{key}_total"), record.rate(f"penstock_pipeline_{key}_total")
        if value is not None:
            shown.append((name, int(value), f"{shown_number(round(rate))} a second" if rate is not None else ""))
    rate = record.rate("penstock_pipeline_bytes_in_total")
    if rate is not None:
        shown.append(("reads", f"{format_bytes(int(rate))}/s"))
    used, limit = (latest.get(f"penstock_pipeline_budget_{each}_bytes") for each in ("used", "limit"))
    peak = latest.get("penstock_pipeline_budget_peak_bytes")
    if used is not None and limit:
        said = f"of {format_bytes(int(limit))}, {used / limit:.0%}"
        shown.append(("budget", format_bytes(int(used)), said))
    if peak is not None:
        shown.append(("peak", format_bytes(int(peak))))
    if (workers := latest.get("penstock_pipeline_workers")) is not None:
        shown.append(("workers", int(workers)))
    yield _facts_panel("rates", "Now", shown)
    yield _charts(
        record,
        (
            "Rows a second",
            "rows/s",
            {"in": "penstock_pipeline_rows_in_total", "out": "penstock_pipeline_rows_out_total"},
            True,
        ),
        ("Memory budget", "bytes", {"used": "penstock_pipeline_budget_used_bytes"}, False),
    )
    yield _stages(latest)
    yield from _by_label(latest, "penstock_pipeline_buffer_bytes", "buffer", "buffers", "Buffers", "bytes")
    lost: list[tuple[object, float]] = []
    for kind in ("dropped", "changed", "quarantined", "skipped"):
        name = f"penstock_pipeline_rows_{kind}_total"
        lost += [(f"{kind}: {labels.get('reason', '')}", value) for labels, value in latest.labelled(name)]
    lost.sort(key=lambda item: -item[1])
    if lost:
        yield panel("left-out", "Rows left out or changed", bar_chart(lost, label="Rows by reason", unit="rows"))


def _stages(latest: MetricsReading) -> Html:
    columns = ["stage", "kind", "rows in", "rows out", "busy", "threads", "waits for input", "waits for room"]
    stages: dict[tuple[str, str], dict[str, float]] = {}
    for key, value in latest.metrics.items():
        if key.startswith("penstock_stage_"):
            labels = labels_of(key)
            if "quantile" not in labels:
                name = key.partition("{")[0].removeprefix("penstock_stage_")
                stages.setdefault((labels.get("stage", "?"), labels.get("kind", "")), {})[name] = value
    rows = [
        (
            name,
            kind,
            *(int(each[x]) if x in each else "" for x in ("rows_in_total", "rows_out_total")),
            f"{each['utilisation_ratio']:.0%}" if "utilisation_ratio" in each else "",
            int(each["threads"]) if "threads" in each else "",
            *(
                format_seconds(each[x]) if x in each else ""
                for x in ("wait_input_seconds_total", "wait_room_seconds_total")
            ),
        )
        for (name, kind), each in stages.items()
    ]
    busy = [
        (name, 100 * each["utilisation_ratio"]) for (name, _), each in stages.items() if "utilisation_ratio" in each
    ]
    chart = (
        figure(bar_chart(busy, label="Busy share of each stage", unit="%", high=100), "Busy share") if busy else None
    )
    return panel("stages", "Stages", chart, table(rows, columns, caption="Stages, from source to sink"))


# -- loaders -----------------------------------------------------------------------------------------------------------


def _loader(record: FollowedRun, latest: MetricsReading) -> Iterator[Html]:
    shown: list[Fact] = []
    if (step := latest.get("penstock_loader_step")) is not None:
        shown.append(("next step", int(step), f"epoch {latest.get('penstock_loader_epoch', 0):.0f}"))
    speed = latest.get("penstock_loader_tokens_per_second") or record.rate("penstock_loader_tokens_total")
    if speed is not None:
        shown.append(("tokens a second", round(speed)))
    if (wait := latest.get("penstock_loader_data_wait_ratio")) is not None:
        shown.append(("data wait", f"{wait:.1%}", "of the time the trainer waits"))
    if (padding := latest.get("penstock_loader_padding_ratio")) is not None:
        shown.append(("padding", f"{padding:.1%}"))
    for name, key in (
        ("tokens", "tokens_total"),
        ("truncated tokens", "truncated_tokens_total"),
        ("prefetched", "prefetched_batches"),
    ):
        if (value := latest.get(f"penstock_loader_{key}")) is not None:
            shown.append((name, int(value)))
    used, limit = (latest.get(f"penstock_loader_budget_{each}_bytes") for each in ("used", "limit"))
    if used is not None and limit:
        shown.append(("budget", format_bytes(int(used)), f"of {format_bytes(int(limit))}, {used / limit:.0%}"))
    yield _facts_panel("rates", "Now", shown)
    yield _charts(
        record,
        ("Tokens a second", "tokens/s", {"tokens": "penstock_loader_tokens_total"}, True),
        ("Share of the time that the trainer waits", "", {"data wait": "penstock_loader_data_wait_ratio"}, False),
    )
    yield from _by_label(
        latest,
        "penstock_loader_source_ratio",
        "source",
        "mixture",
        "Mixture realised: share of the samples",
        "%",
        scale=100,
    )


# -- queues ------------------------------------------------------------------------------------------------------------


def _queue(record: FollowedRun, latest: MetricsReading) -> Iterator[Html]:
    splits: dict[str, dict[str, float]] = {}
    for key, value in latest.metrics.items():
        if key.startswith("penstock_queue_") and (split := labels_of(key).get("split")) is not None:
            splits.setdefault(split, {})[key.partition("{")[0].removeprefix("penstock_queue_")] = value
    names = ("ready_files", "ready_batches", "leased_files", "leased_batches", "aside_files", "returned_files")
    rows = [(split, *(int(each[name]) if name in each else "" for name in names)) for split, each in splits.items()]
    yield panel(
        "splits",
        "Splits",
        table(rows, ["split", *(name.replace("_", " ") for name in names)], caption="Backlog by split"),
    )
    members = [
        (f"{labels.get('role', '')} {labels.get('state', '')}".strip(), int(value))
        for labels, value in latest.labelled("penstock_queue_members")
    ]
    yield _facts_panel("members", "Members", members)
    series = {split: record.series(key_of("penstock_queue_ready_batches", split=split)) for split in splits}
    yield _chart_panel("backlog", "Over time", [("Backlog", "batches", series)])


# -- rollouts ----------------------------------------------------------------------------------------------------------


def _rollouts(record: FollowedRun, latest: MetricsReading) -> Iterator[Html]:
    shown: list[Fact] = []
    for name, key in (
        ("waiting", "waiting"),
        ("capacity", "capacity"),
        ("policy version", "policy_version"),
        ("used", "used_total"),
        ("appended", "appended_total"),
        ("groups", "groups"),
    ):
        if (value := latest.get(f"penstock_rollouts_{key}")) is not None:
            shown.append((name, int(value)))
    if (mean := latest.get("penstock_rollouts_staleness_mean")) is not None:
        most = latest.get("penstock_rollouts_staleness_max")
        shown.append(("staleness", round(mean, 2), f"versions; at most {most:g}" if most is not None else "versions"))
    if (complete := latest.get("penstock_rollouts_group_completion_ratio")) is not None:
        shown.append(("complete groups", f"{complete:.1%}", "of those taken"))
    yield _facts_panel("rates", "Now", shown)
    yield _rewards(latest)
    yield _charts(
        record,
        (
            "Staleness in versions",
            "versions",
            {"mean": "penstock_rollouts_staleness_mean", "max": "penstock_rollouts_staleness_max"},
            False,
        ),
        ("Rollouts that wait", "rollouts", {"waiting": "penstock_rollouts_waiting"}, False),
    )
    yield from _by_label(latest, "penstock_rollouts_dropped_total", "reason", "dropped", "Not used", "rollouts")


def _rewards(latest: MetricsReading) -> Html:
    return panel("rewards", "Rewards", reward_figure(latest.metrics) or note("No rewards yet."))


# -- parts that several have -------------------------------------------------------------------------------------------


def _facts_panel(anchor: str, title: str, shown: Sequence[Fact]) -> Html:
    return panel(anchor, title, facts(shown) if shown else note("Nothing was measured yet."))


def _charts(record: FollowedRun, *wanted: tuple[str, str, dict[str, str], bool]) -> Html:
    """Charts over time: (title, unit, key of each line, True for the growth of a counter)."""
    made = []
    for title, unit, keys, grows in wanted:
        read: Callable[[str], tuple[list[float], list[float]]] = record.rates if grows else record.series
        made.append((title, unit, {name: read(key) for name, key in keys.items()}))
    return _chart_panel("over-time", "Over time", made)


def _chart_panel(anchor: str, title: str, wanted: Sequence[tuple[str, str, Series]]) -> Html:
    charts = []
    for name, unit, series in wanted:
        drawn = {line: points for line, points in series.items() if len(points[0]) > 1}
        if drawn:
            chart = line_chart(drawn, label=f"{name} over time", unit=unit, x_label="seconds")
            charts.append(figure(chart, name))
    if not charts:
        return panel(anchor, title, note("Charts need two readings."))
    return panel(anchor, title, element("div", *charts, class_="grid"))


def _by_label(
    latest: MetricsReading, name: str, label: str, anchor: str, title: str, unit: str, scale: float = 1.0
) -> Iterator[Html]:
    items = [(labels.get(label, "?"), value * scale) for labels, value in latest.labelled(name)]
    if items:
        yield panel(anchor, title, bar_chart(items, label=title, unit=unit))


def _all_readings(latest: MetricsReading) -> Html:
    rows = [(key, value) for key, value in sorted(latest.metrics.items())]
    body = table(rows, ["metric", "value"], caption="The last reading", most=2000)
    found = element("details", element("summary", f"All {len(rows):,} metrics"), body, id="all-metrics")
    return panel("metrics", "Metrics", found)


def _clock(started: object) -> str:
    if not isinstance(started, int | float) or not 0 < started < 1e11:
        return "?"
    return datetime.fromtimestamp(started, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


_SUBJECTS: dict[str, Callable[[FollowedRun, MetricsReading], Iterator[Html]]] = {
    "pipeline": _pipeline,
    "loader": _loader,
    "queue": _queue,
    "rollouts": _rollouts,
}
"""Parts of the page by the kind of a run; any other kind has its table of metrics."""
