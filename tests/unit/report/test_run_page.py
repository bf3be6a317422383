"""Page of a run: of real metrics files, of torn, resumed and killed ones, and of the directory of a run."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from page_reader import Node, parsed
from penstock.errors import ConfigError, DataError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.report import build_report
from penstock.report.live_runs import reward_figure
from penstock.report.run_record import MOST_READINGS, rates, read_run
from penstock.rl.counters import REWARD_BOUNDS
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource
from penstock.transforms import Filter

HOSTILE = "<img src=x onerror=alert(1)>\u202e\x00"
STAGE = '{stage="Slow(\'<b>\')",kind="transform"}'


def header(**more: Any) -> dict[str, Any]:
    known = {"penstock_metrics": 1, "kind": "pipeline", "name": "prepare", "pid": os.getpid()}
    return {
        **known,
        "host": socket.gethostname(),
        "started": time.time(),
        "labels": {},
        "description": "a -> b",
        **more,
    }


def reading(seconds: float, note: str | None = "the source is slow", **metrics: float) -> dict[str, Any]:
    known = {
        "penstock_pipeline_rows_in_total": 100 * seconds,
        "penstock_pipeline_budget_used_bytes": 2.0**20,
        "penstock_pipeline_budget_limit_bytes": 2.0**24,
        f"penstock_stage_busy_seconds_total{STAGE}": seconds / 2,
    }
    line: dict[str, Any] = {"seconds": seconds, "time": 0.0, "metrics": {**known, **metrics}}
    return line if note is None else line | {"note": note}


def write_lines(path: Path, lines: Iterable[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + tail)
    return path


def facts_of(page: Node) -> dict[str, str]:
    found = {}
    for each in (child for facts in page.all("dl", class_="facts") for child in facts.children):
        assert isinstance(each, Node)
        found.setdefault(each.all("dt")[0].text, each.all("dd")[0].text)
    return found


def titles(page: Node) -> list[str]:
    return [heading.text for heading in page.all("h2")]


def run_pipeline(directory: Path, rows: int = 4000, **more: Any) -> None:
    (directory / "in.jsonl").write_text("".join(f'{{"text": "row {n}", "n": {n}}}\n' for n in range(rows)) + "{bad\n")
    Pipeline(
        source=JsonlSource(directory / "in.jsonl"),
        transforms=[Filter(_is_even)],
        sink=JsonlSink(directory / "out.jsonl"),
        config=PipelineConfig(on_error="quarantine", quarantine=directory / "bad.quarantine.jsonl"),
    ).run(**more)


def _is_even(row: dict[str, Any]) -> bool:
    return bool(row["n"] % 2 == 0)


def test_the_page_of_a_real_run_has_the_figures_of_its_report(tmp_path: Path) -> None:
    run_pipeline(tmp_path, metrics=str(tmp_path / "run.metrics.jsonl"))
    page = parsed(build_report(str(tmp_path / "run.metrics.jsonl")))
    shown = facts_of(page)
    assert shown["end"] == "finished"
    assert shown["rows in"].startswith("4,001")
    assert shown["rows out"].startswith("2,000")
    assert shown["quarantined"].startswith("1")
    assert shown["dropped"].startswith("2,000")
    assert "Rows left out or changed" in titles(page)
    assert "Stages" in titles(page)


def test_the_directory_of_a_run_shows_checkpoint_metrics_and_quarantine(tmp_path: Path) -> None:
    run_pipeline(tmp_path, checkpoint=tmp_path, metrics=str(tmp_path / "run.metrics.jsonl"))
    page = parsed(build_report(str(tmp_path)))
    assert titles(page)[0] == "Checkpoint"
    assert titles(page)[-1] == "Quarantine: bad.quarantine.jsonl"
    assert facts_of(page)["end"].startswith("finished")
    assert "{bad" in page.text
    assert "1 bad rows in bad.quarantine.jsonl" in page.text


def test_a_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [header(), reading(1), reading(2)], tail='{"seconds": 3, "metr')
    record = read_run(path)
    assert record.unreadable == 1
    assert [each.seconds for each in record.parts[0].readings] == [1, 2]
    assert "could not be read and were left out: 1" in parsed(build_report(str(path))).text


def test_a_second_header_begins_another_part(tmp_path: Path) -> None:
    parts = [header(pid=2**22 + 5), reading(1), reading(5)], [header(), reading(1), {"seconds": 2, "end": "finished"}]
    page = parsed(build_report(str(write_lines(tmp_path / "r.jsonl", [*parts[0], *parts[1]]))))
    assert [title for title in titles(page) if title.startswith("Part")] == ["Part 1 of 2", "Part 2 of 2"]
    ends = [dd.text for dl in page.all("dl") for dt, dd in zip(dl.all("dt"), dl.all("dd")) if dt.text == "end"]
    assert ends == ["killed: the file has no end", "finished"]
    anchors = [part.attributes["id"] for part in page.all("section")]
    assert len(set(anchors)) == len(anchors)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, "still running"),
        ({"pid": 2**22 + 5}, "killed: the file has no end"),
        ({"host": "elsewhere.example"}, "killed: the file has no end"),
        ({"started": 1_000_000_000}, "killed: the file has no end"),  # the number of the process was given away since
    ],
)
def test_a_file_without_an_end_is_of_a_run_that_goes_on_or_was_killed(
    tmp_path: Path, facts: dict[str, Any], state: str
) -> None:
    page = parsed(build_report(str(write_lines(tmp_path / "r.jsonl", [header(**facts), reading(1)]))))
    assert facts_of(page)["end"] == state
    assert bool(page.all("p", class_="warning")) == (state != "still running")


def test_the_error_and_the_names_of_a_failed_run_stay_text(tmp_path: Path) -> None:
    reason = 'penstock_pipeline_rows_dropped_total{reason="' + HOSTILE + '"}'
    lines = [header(name=HOSTILE, labels={"x": HOSTILE}), reading(1, HOSTILE, **{reason: 7.0})]
    markup = build_report(
        str(write_lines(tmp_path / "r.jsonl", [*lines, {"seconds": 2, "end": "failed", "error": HOSTILE}]))
    )
    page = parsed(markup)
    assert not page.all("img")
    assert "\u202e" not in markup
    assert page.all("p", class_="error")[0].text == "<img src=x onerror=alert(1)>\\u202e\\x00"
    assert facts_of(page)["end"] == "failed"
    assert facts_of(page)["dropped"].startswith("7")


def test_the_bottleneck_is_shown_with_the_time_it_held_for(tmp_path: Path) -> None:
    notes = ["the source is slow"] * 3 + ["Slow is slow"] * 2 + ["the source is slow"]
    lines = [header(), *(reading(second + 1, note) for second, note in enumerate(notes))]
    page = parsed(build_report(str(write_lines(tmp_path / "r.jsonl", lines))))
    rows = [[cell.text for cell in row.all("td")] for row in page.all("tr")]
    spans = [row for row in rows if row and row[-1].endswith("is slow")]
    assert spans == [
        ["1.0 s", "3.0 s", "the source is slow"],
        ["4.0 s", "5.0 s", "Slow is slow"],
        ["6.0 s", "6.0 s", "the source is slow"],
    ]


def test_a_long_run_is_thinned_and_keeps_its_last_reading(tmp_path: Path) -> None:
    count = 5 * MOST_READINGS + 7
    path = write_lines(tmp_path / "r.jsonl", [header(), *(reading(n, None) for n in range(1, count + 1))])
    part = read_run(path).parts[0]
    assert part.count == count
    assert len(part.readings) <= MOST_READINGS + 1
    assert part.readings[0].seconds == 1
    assert part.last("penstock_pipeline_rows_in_total") == {"": 100 * count}
    xs, ys = part.series("penstock_pipeline_rows_in_total")[""]
    assert np.allclose(rates(xs, ys)[1], 100)
    assert len(build_report(str(path))) < 300_000


def test_the_rate_of_a_counter_leaves_out_where_it_began_anew() -> None:
    xs, ys = rates(np.array([0.0, 1, 2, 2, 3]), np.array([0.0, 10, 3, 3, 9]))
    assert xs.tolist() == [1, 3]
    assert ys.tolist() == [10, 6]


def test_a_run_of_a_loader_has_tokens_data_wait_and_mixture(tmp_path: Path) -> None:
    lines = [header(kind="loader", name="train")]
    for second in range(1, 5):
        metrics = {
            "penstock_loader_tokens_total": 1e6 * second,
            "penstock_loader_steps_total": 3.0 * second,
            "penstock_loader_data_wait_seconds_total": second / 4,
            "penstock_loader_data_wait_ratio": 0.25,
            'penstock_loader_source_ratio{source="web"}': 0.75,
            'penstock_loader_source_ratio{source="code"}': 0.25,
        }
        lines.append({"seconds": second, "time": 0, "metrics": metrics})
    page = parsed(build_report(str(write_lines(tmp_path / "r.jsonl", lines))))
    shown = facts_of(page)
    assert shown["tokens"] == "4,000,0001,000,000 a second"
    assert shown["steps"].startswith("12")
    assert shown["data wait"].startswith("25.0%")
    captions = [caption.text for caption in page.all("figcaption")]
    assert "Realised mixture: share of samples by source, in percent" in captions


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="version 7, and this release reads version 1"):
        build_report(str(write_lines(tmp_path / "r.jsonl", [header(penstock_metrics=7)])))


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a store"):
        build_report(str(tmp_path))


def test_reasons_in_a_quarantine_file_are_counted_without_their_numbers(tmp_path: Path) -> None:
    rows = [{"file": "a", "row": n, "stage": "Parse", "reason": f"row {n} is short", "raw": HOSTILE} for n in range(5)]
    write_lines(tmp_path / "out.quarantine.jsonl", rows, tail="{torn")
    write_lines(tmp_path / "r.metrics.jsonl", [header(), reading(1)])
    page = parsed(build_report(str(tmp_path)))
    assert "5 bad rows in out.quarantine.jsonl" in page.text
    assert "Parse: row N is short" in page.text
    assert "1 lines could not be read" in page.text
    assert not page.all("img")


def test_runs_of_queues_and_rollouts_show_backlog_and_rewards(tmp_path: Path) -> None:
    backlog = {'penstock_queue_ready_batches{split="train"}': 504.0, 'penstock_queue_leased_files{split="train"}': 3.0}
    backlog |= {'penstock_queue_members{role="consumer",state="alive"}': 2.0}
    lines = [header(kind="queue"), *(reading(at, None, **backlog) for at in (1.0, 2.0))]
    page = parsed(build_report(str(write_lines(tmp_path / "queue.jsonl", lines))))
    assert "504" in [cell.text for cell in page.all("td")]
    assert facts_of(page)["members: consumer, alive"] == "2"
    assert any("Batches that wait" in each.text for each in page.all("figcaption"))

    used = {"penstock_rollouts_used_total": 60.0, "penstock_rollouts_staleness_mean": 1.5}
    used |= {"penstock_rollouts_group_completion_ratio": 0.96, "penstock_rollouts_reward_sum": 30.0}
    used |= {f'penstock_rollouts_reward_bucket{{le="{edge}"}}': n for edge, n in (("0.0", 20.0), ("+Inf", 60.0))}
    used |= {'penstock_rollouts_dropped_total{reason="stale"}': 7.0}
    lines = [header(kind="rollouts"), *(reading(at, None, **used) for at in (1.0, 2.0))]
    page = parsed(build_report(str(write_lines(tmp_path / "rollouts.jsonl", lines))))
    assert facts_of(page)["complete groups"].startswith("96.0%")
    tips = {tip.text for tip in page.all("title")}
    assert {"rewards, 0 or less: 20", "rewards, over 0: 40", "stale: 7 rollouts"} <= tips


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1000.0] * 5, {"rewards, over 10: 5"}),
        ([-70.0, -10.0, 7.0], {"rewards, -10 or less: 2", "rewards, 5 to 10: 1"}),
        ([0.3], {"rewards, 0.25 to 0.5: 1"}),
        ([-11.0, 11.0], {"rewards, -10 or less: 1", "rewards, over 10: 1"}),
    ],
)
def test_rewards_beyond_the_edges_are_drawn_as_such(rewards: list[float], expected: set[str]) -> None:
    edges = (*REWARD_BOUNDS, math.inf)
    counted = {
        f'penstock_rollouts_reward_bucket{{le="{edge}"}}': sum(reward <= edge for reward in rewards) for edge in edges
    }
    drawn = str(reward_figure(counted))
    tips = set(re.findall(r"<title>(.*?)</title>", drawn))
    assert tips == expected
    ticks = re.findall(r'class="tick">(.*?)<', drawn)
    assert not {"15", "-15"} & set(ticks)  # no edges that do not exist
    assert {tip.split(", ")[1].split(":")[0] for tip in tips if " to " not in tip} <= set(ticks)
