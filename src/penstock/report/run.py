"""Page of a run: its speed, memory and stages over time, what held it up, what it left out, and how it ended."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from penstock._amounts import format_seconds, percent
from penstock.errors import ConfigError
from penstock.html import Section, facts, note, section, subsection, table
from penstock.html.charts import bar_chart, line_chart
from penstock.memory.budget import format_bytes
from penstock.report.live_runs import queue_section, rollouts_section
from penstock.report.page_parts import chart_figure, short_name
from penstock.report.run_directory import run_files
from penstock.report.run_record import RecordedRun, RunPart, parsed_line, rates, read_run

_MOST_NOTES, _MOST_REASONS, _MOST_PARTS = 30, 40, 8
_LOST = (
    ("dropped", "rows left out on purpose"),
    ("quarantined", "bad rows set aside"),
    ("skipped", "bad rows left out"),
    ("changed", "rows kept with a changed value"),
)
_MIB = float(1 << 20)
_STAGE_COLUMNS = (
    "rows_in_total",
    "rows_out_total",
    "busy_seconds_total",
    "wait_input_seconds_total",
    "wait_room_seconds_total",
    "threads",
)


def run_sections(target: Path) -> list[Section]:
    """Sections of a metrics file, or of the directory of a run: its checkpoint, metrics and quarantine files."""
    found = run_files(target)
    made: list[Section] = []
    if found.checkpoint is not None:
        made.append(_checkpoint(found.checkpoint))
    for path in found.metrics:
        made += record_sections(read_run(path), named=len(found.metrics) > 1)
    made += [quarantine_section(path) for path in found.quarantine]
    if not made:
        raise ConfigError(
            f"{target} has no metrics file, no checkpoint and no quarantine file; run with metrics='run.metrics.jsonl'"
        )
    return made


def record_sections(record: RecordedRun, *, named: bool = False) -> list[Section]:
    """Sections of the record of a run; of a resumed run each part has its own."""
    made: list[Section] = []
    shown = record.parts[-_MOST_PARTS:]
    for number, part in enumerate(shown, len(record.parts) - len(shown) + 1):
        title = f"Part {number} of {len(record.parts)}" if len(record.parts) > 1 else "Run"
        made.append(_run(f"{title}: {record.path.name}" if named else title, record, part))
        made += [each for each in (section_of(part) for section_of in _SECTIONS) if each]
    return made


def state_of(part: RunPart) -> str:
    """End of a part, in a word or two."""
    if part.end is not None:
        return part.end
    return "still running" if part.is_alive else "killed: the file has no end"


def _run(title: str, record: RecordedRun, part: RunPart) -> Section:
    header, state = part.header, state_of(part)
    parts: list[object] = []
    if part.error is not None:
        parts.append(note(part.error, kind="error"))
    elif part.end is None and not part.is_alive:
        message = (
            "The process did not end in order: the file stops without an end, and the process is not running here."
        )
        parts.append(note(message, kind="warning"))
    if record.unreadable:
        left_out = f"Lines that could not be read and were left out: {record.unreadable:,}. A killed writer leaves one."
        parts.append(note(left_out, kind="warning"))
    if len(record.parts) > _MOST_PARTS:
        parts.append(note(f"The last {_MOST_PARTS} of {len(record.parts):,} parts are shown.", kind="warning"))
    parts.append(facts([("end", state), *_facts(part)]))
    where = [("started", _moment(header.get("started"))), ("process", f"{header.get('pid')} on {header.get('host')}")]
    described = [("name", header.get("name")), ("description", header.get("description"))]
    labels = header.get("labels")
    rows = [*described, *where, *(labels.items() if isinstance(labels, Mapping) else ())]
    shown = [(name, str(value)) for name, value in rows if value not in (None, "", {})]
    parts.append(table(shown, caption=f"This {part.kind}"))
    return section(title, *parts)


def _facts(part: RunPart) -> Iterator[tuple[str, object, str]]:
    yield "time", format_seconds(part.seconds), f"{part.count:,} readings"
    subject = f"penstock_{part.kind}"
    for name, label in (("rows_in_total", "rows in"), ("rows_out_total", "rows out"), ("steps_total", "steps")):
        if value := part.last(f"{subject}_{name}"):
            yield label, round(value.get("", 0.0)), _per_second(value.get("", 0.0), part.seconds)
    if value := part.last(f"{subject}_tokens_total"):
        yield "tokens", round(value.get("", 0.0)), _per_second(value.get("", 0.0), part.seconds)
    if value := part.last("penstock_loader_data_wait_seconds_total"):
        waited = value.get("", 0.0)
        share = percent(waited / part.seconds) if part.seconds else "-"
        yield "data wait", share, f"{format_seconds(waited)} that the trainer waited"
    if value := part.last("penstock_loader_padding_ratio"):
        yield "padding", percent(value.get("", 0.0)), "of the delivered places"
    peak, limit = part.last(f"{subject}_budget_peak_bytes"), part.last(f"{subject}_budget_limit_bytes")
    if peak:
        remark = f"of a budget of {format_bytes(round(limit['']))}" if limit.get("") else ""
        yield "peak memory", format_bytes(round(peak.get("", 0.0))), remark
    for kind, meaning in _LOST:
        if value := part.last(f"{subject}_rows_{kind}_total"):
            yield kind, round(sum(value.values())), meaning


def _speed(part: RunPart) -> Section | None:
    """Throughput over time, from the growth of counters."""
    charts: list[object] = []
    for names, unit, scale in (
        ({"rows in": "rows_in_total", "rows out": "rows_out_total", "steps": "steps_total"}, "a second", 1.0),
        ({"tokens": "tokens_total", "tokens with padding": "places_total"}, "tokens a second", 1.0),
        ({"bytes in": "bytes_in_total"}, "MiB a second", _MIB),
    ):
        lines: dict[str, Any] = {}
        for shown, name in names.items():
            for xs, ys in part.series(f"penstock_{part.kind}_{name}").values():
                at, growth = rates(np.append(0.0, xs), np.append(0.0, ys))
                if len(at):
                    lines[shown] = (at, growth / scale)
        if lines:
            label = f"{' and '.join(lines)}, {unit}, over time"
            charts.append(
                chart_figure(line_chart(lines, label=label, x_label="seconds", unit=unit), f"Throughput: {label}")
            )
    for name, caption in (
        ("penstock_loader_data_wait_ratio", "Share of the time that the trainer waited for data, in percent"),
        ("penstock_loader_source_ratio", "Realised mixture: share of samples by source, in percent"),
    ):
        lines = {short_name(label): (xs, 100 * ys) for label, (xs, ys) in part.series(name).items()}
        if lines:
            charts.append(chart_figure(line_chart(lines, label=caption, x_label="seconds", unit="%"), caption))
    return section("Throughput", *charts) if charts else None


def _memory(part: RunPart) -> Section | None:
    subject, charts = f"penstock_{part.kind}", list[object]()
    lines = {}
    for shown, name in (("used", "budget_used_bytes"), ("limit", "budget_limit_bytes")):
        for xs, ys in part.series(f"{subject}_{name}").values():
            lines[shown] = (xs, ys / _MIB)
    if lines:
        chart = line_chart(lines, label="Memory budget over time", x_label="seconds", unit="MiB", dashed=["limit"])
        charts.append(chart_figure(chart, "Memory charged to the budget, in MiB"))
    buffers = part.series(f"{subject}_buffer_batches") or part.series(f"{subject}_prefetched_batches")
    if buffers:
        chart = line_chart(buffers, label="Batches in buffers over time", x_label="seconds", unit="batches")
        charts.append(chart_figure(chart, "Batches in buffers"))
    return section("Memory and buffers", *charts) if charts else None


def _stages(part: RunPart) -> Section | None:
    busy = part.series("penstock_stage_busy_seconds_total")
    if not busy:
        return None
    threads, lines = part.last("penstock_stage_threads"), dict[str, Any]()
    for stage, (xs, ys) in busy.items():
        at, growth = rates(np.append(0.0, xs), np.append(0.0, ys))
        if len(at):
            lines[short_name(stage)] = (at, 100 * growth / max(threads.get(stage, 1.0), 1.0))
    parts: list[object] = []
    if lines:
        label = "Share of the time that the threads of each stage are busy"
        parts.append(
            chart_figure(
                line_chart(lines, label=label, x_label="seconds", unit="%", high=100.0), f"{label}, in percent"
            )
        )
    names = ["stage", "rows in", "rows out", "busy", "waited for input", "waited for room", "threads"]
    columns = [part.last(f"penstock_stage_{name}") for name in _STAGE_COLUMNS]
    rows = []
    for stage in busy:
        values = [column.get(stage) for column in columns]
        counts = [None if value is None else round(value) for value in (values[0], values[1], values[5])]
        spent = ["" if value is None else format_seconds(value) for value in values[2:5]]
        rows.append((stage, counts[0], counts[1], *spent, counts[2]))
    parts.append(table(rows, names, caption="Stages at the end"))
    return section("Stages", *parts)


def _held_up(part: RunPart) -> Section | None:
    """Bottleneck sentences, each with the time it held for."""
    spans: list[tuple[float, float, str]] = []
    for reading in part.readings:
        if reading.note:
            if spans and spans[-1][2] == reading.note:
                spans[-1] = (spans[-1][0], reading.seconds, reading.note)
            else:
                spans.append((reading.seconds, reading.seconds, reading.note))
    last = part.report.get("bottleneck") if part.report else None
    if not spans and not last:
        return None
    rows = [(format_seconds(start), format_seconds(stop), sentence) for start, stop, sentence in spans[:_MOST_NOTES]]
    shown: list[object] = [note(str(last))] if last else []
    if rows:
        shown.append(table(rows, ["from", "to", "bottleneck"], caption="What held the run up, over time"))
    if len(spans) > _MOST_NOTES:
        shown.append(note(f"{len(spans) - _MOST_NOTES:,} later sentences are not shown."))
    return section("Bottleneck", *shown)


def _lost(part: RunPart) -> Section | None:
    charts: list[object] = []
    for kind, meaning in _LOST:
        reasons = dict(part.last(f"penstock_{part.kind}_rows_{kind}_total"))
        if not any(reasons.values()) and part.report and isinstance(part.report.get(kind), Mapping):
            reasons = {str(why): float(n) for why, n in part.report[kind].items() if isinstance(n, (int, float))}
        ranked = sorted(((why or kind, n) for why, n in reasons.items() if n), key=lambda item: (-item[1], item[0]))
        if ranked:
            chart = bar_chart(ranked[:_MOST_REASONS], label=f"Rows {kind} by reason", unit="rows", most=_MOST_REASONS)
            total = sum(n for _, n in ranked)
            charts.append(
                subsection(f"{kind.capitalize()}: {total:,.0f} rows", chart_figure(chart, f"{meaning}, by reason"))
            )
    return section("Rows left out or changed", *charts) if charts else None


def _checkpoint(state: Mapping[str, Any]) -> Section:
    """Facts of the last durable state of `run(checkpoint=...)`."""
    shown: list[tuple[str, object, str]] = [
        ("rows in", state.get("rows_in"), "read up to the checkpoint"),
        ("rows out", state.get("rows_out"), "durable in the sink"),
    ]
    report = state.get("report")
    shown.append(
        ("end", "finished" if report else "not finished", "the next run goes on from here" if not report else "")
    )
    charts: list[object] = [facts(shown)]
    bad = state.get("bad_rows")
    by_kind = (
        ("dropped", "rows left out on purpose", state.get("dropped")),
        ("bad", "bad rows, skipped or quarantined", bad.get("counts") if isinstance(bad, Mapping) else None),
        ("changed", "rows kept with a changed value", state.get("changed")),
    )
    for kind, meaning, counts in by_kind:
        if isinstance(counts, Mapping) and counts:
            ranked = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_REASONS]
            charts.append(
                chart_figure(bar_chart(ranked, label=f"Rows {kind} by reason", unit="rows"), f"{meaning}, by reason")
            )
    return section("Checkpoint", *charts)


_SECTIONS = (_speed, _memory, _stages, queue_section, rollouts_section, _held_up, _lost)


def _per_second(value: float, seconds: float) -> str:
    return f"{value / seconds:,.0f} a second" if seconds > 0 else ""


def _moment(value: object) -> str | None:
    if not isinstance(value, (int, float)):
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    except (OverflowError, ValueError, OSError):
        return str(value)


_MOST_BYTES = 64 << 20
_MOST_REASONS, _SHOWN_REASONS, _EXAMPLE_CHARACTERS = 1000, 25, 300
_DIGITS = re.compile(r"\d+")


def quarantine_section(path: Path) -> Section:
    """Reasons of the first 64 MiB of a quarantine file; numbers in a reason do not tell reasons apart."""
    counts: dict[str, int] = {}
    examples: dict[str, tuple[str, str, str, str]] = {}
    total = unreadable = others = read = 0
    with path.open("rb") as file:
        for line in file:
            read += len(line)
            if read > _MOST_BYTES:
                break
            facts = parsed_line(line)
            if facts is None:
                unreadable += 1
                continue
            total += 1
            reason = f"{facts.get('stage')}: {_DIGITS.sub('N', str(facts.get('reason')))}"[:200]
            if reason not in counts and len(counts) >= _MOST_REASONS:
                others += 1
                continue
            counts[reason] = counts.get(reason, 0) + 1
            examples.setdefault(reason, _example(facts))
    ranked: list[tuple[str, float]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ranked[:_SHOWN_REASONS]
    parts: list[object] = [note(f"{total:,} bad rows in {path.name}, by reason.")]
    if read > _MOST_BYTES:
        parts.append(
            note(f"The file is larger than {_MOST_BYTES >> 20} MiB; only its beginning was read.", kind="warning")
        )
    if unreadable:
        parts.append(note(f"{unreadable:,} lines could not be read.", kind="warning"))
    if shown:
        chart = bar_chart(shown, label="Bad rows by reason", unit="rows", most=_SHOWN_REASONS)
        parts.append(chart_figure(chart, "Bad rows by reason"))
        rows = [examples[reason] for reason, _ in shown]
        parts.append(table(rows, ["file", "row", "reason", "content"], caption="First row of each reason"))
    hidden = len(ranked) - len(shown)
    if hidden or others:
        parts.append(
            note(f"{hidden:,} rarer reasons are not shown" + (f", and {others:,} rows of others." if others else "."))
        )
    return section(f"Quarantine: {path.name}", *parts)


def _example(facts: dict[str, Any]) -> tuple[str, str, str, str]:
    content = next((facts[name] for name in ("raw", "data", "raw_base64") if facts.get(name) is not None), "")
    text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
    cut = text[:_EXAMPLE_CHARACTERS] + (f" ... ({len(text):,} characters)" if len(text) > _EXAMPLE_CHARACTERS else "")
    return str(facts.get("file") or ""), str(facts.get("row")), str(facts.get("reason"))[:500], cut
