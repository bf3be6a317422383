"""Pages of a plan, a comparison and a run, opened from disk in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from browser import chromium, opened
from penstock.report import build_report
from penstock.sinks import StoreSink

HOSTILE = "<script>document.title='broken'</script>\u202e" + "x" * 300


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a mixture with a hostile name, of the same with other weights beside it, and of a run."""
    directory = tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(1)
    sources = {}
    for name in ("web", HOSTILE):
        sink = StoreSink(directory / f"s{len(sources)}")
        ids = [rng.integers(1, 99, length).tolist() for length in rng.integers(1, 200, 150)]
        schema = pa.schema([("input_ids", pa.list_(pa.uint16()))])
        sink.consume(pa.RecordBatch.from_pydict({"input_ids": ids}, schema=schema))
        sink.flush()
        sources[name] = str(directory / f"s{len(sources)}")
    for name, weight in (("a", 0.5), ("b", 0.8)):
        tree = {"loader": "mixed", "sources": sources, "weights": {"web": weight, HOSTILE: 1 - weight}}
        more = {"chunk_size": 512, "packing": "best_fit", "batch_size": 2, "world_size": 4, "epochs": 2}
        (directory / f"{name}.json").write_text(json.dumps(tree | more))
    stage = '{stage="Slow(\'<b>\')",kind="transform"}'
    lines: list[dict[str, Any]] = [{"penstock_metrics": 1, "kind": "pipeline", "name": HOSTILE, "pid": 0, "host": "h"}]
    for second in range(1, 30):
        metrics = {
            "penstock_pipeline_rows_in_total": 1000 * second,
            "penstock_pipeline_budget_used_bytes": 1e6 * (second % 7),
            f"penstock_stage_busy_seconds_total{stage}": second / 3,
            'penstock_pipeline_rows_dropped_total{reason="too short"}': second,
        }
        lines.append({"seconds": second, "time": 0, "metrics": metrics, "note": HOSTILE})
    (directory / "run.metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = {
        "plan": build_report(str(directory / "a.json")),
        "comparison": build_report(str(directory / "a.json"), str(directory / "b.json")),
        "run": build_report(str(directory / "run.metrics.jsonl")),
    }
    for name, markup in found.items():
        (directory / f"{name}.html").write_text(markup, encoding="utf-8")
    return {name: directory / f"{name}.html" for name in found}


@pytest.mark.parametrize("name", ["plan", "comparison", "run"])
@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 360)])
def test_pages_open_without_errors_requests_and_serious_findings(
    browser: Any, pages: dict[str, Path], name: str, dark: bool, width: int
) -> None:
    with opened(browser, pages[name], dark=dark, width=width) as watched:
        assert watched.console == []
        assert watched.requests == [pages[name].absolute().as_uri()]
        assert watched.problems() == []
        assert not watched.scrolls_sideways()
        assert watched.page.title() != "broken"
        assert watched.page.locator("svg[role=img]").count() >= 3


def test_documents_of_a_bar_lie_side_by_side_and_within_it(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["plan"]) as watched:
        drawing = watched.page.locator('svg[aria-label^="Step "]').first
        bars = drawing.locator("g")
        assert bars.count() == 8
        boxes = bars.first.locator("rect").evaluate_all("all => all.map(each => each.getBoundingClientRect().toJSON())")
        room, documents = boxes[0], boxes[1:]
        assert documents
        for one, other in pairwise(documents):
            assert other["left"] == pytest.approx(one["right"], abs=0.5)
        assert documents[0]["left"] == pytest.approx(room["left"], abs=0.5)
        assert documents[-1]["right"] <= room["right"] + 0.5
