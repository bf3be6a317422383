"""Page of a plan: its figures are those of `penstock plan --json`, and hostile names stay text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from page_reader import Node, parsed
from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.loaders.loader_file import load_config
from penstock.report import build_report
from penstock.report import plan as plan_page
from penstock.report.plan import figures_of, open_planned
from penstock.sinks import StoreSink

HOSTILE = "<script>alert(1)</script>\u202e'\"&\x00"


def write_store(path: Path, rows: int, longest: int = 300) -> Path:
    rng = np.random.default_rng(rows)
    ids = [rng.integers(1, 99, length).tolist() for length in rng.integers(1, longest, rows)]
    sink = StoreSink(path)
    sink.consume(
        pa.RecordBatch.from_pydict({"input_ids": ids}, schema=pa.schema([("input_ids", pa.list_(pa.uint16()))]))
    )
    sink.flush()
    return path


def mixture(directory: Path, names: tuple[str, str] = ("web", "code"), **more: Any) -> Path:
    sources = {name: str(write_store(directory / f"s{n}", 150 + 60 * n)) for n, name in enumerate(names)}
    points = [
        {"step": 0, "weights": dict(zip(names, (0.9, 0.1)))},
        {"step": 9, "weights": dict(zip(names, (0.4, 0.6)))},
    ]
    tree = {
        "loader": "mixed",
        "sources": sources,
        "weights": {"interpolation": "linear", "points": points},
        "chunk_size": 512,
        "packing": "best_fit",
        "batch_size": 2,
        "world_size": 3,
        "epochs": 2,
        "edits": [{"skip": [2, 4]}],
        **more,
    }
    path = directory / "train.json"
    path.write_text(json.dumps(tree))
    return path


def shown_facts(page: Node) -> dict[str, tuple[str, str]]:
    """Values and remarks of the facts of a page."""
    found: dict[str, tuple[str, str]] = {}
    for each in (child for facts in page.all("dl", class_="facts") for child in facts.children):
        assert isinstance(each, Node)
        value, remarks = each.all("dd")[0], each.all("span", class_="remark")
        remark = remarks[0].text if remarks else ""
        found[each.all("dt")[0].text] = (value.text.removesuffix(remark), remark)
    return found


def titles(page: Node) -> list[str]:
    return [heading.text for heading in page.all("h2")]


def test_the_facts_of_the_page_are_those_that_the_command_prints(tmp_path: Path) -> None:
    config = mixture(tmp_path)
    answer = CliRunner().invoke(app, ["plan", str(config), "--json"])
    assert answer.exit_code == 0, answer.output
    known = json.loads(answer.stdout)
    page = parsed(build_report(str(config)))
    shown = shown_facts(page)
    assert shown["steps"] == (f"{known['steps']:,}", "2 skipped")
    for name, key in (("samples", "samples"), ("tokens", "tokens"), ("global batch", "global_batch")):
        assert shown[name][0] == f"{known[key]:,}"
    assert shown["padding"][1] == f"{known['slots'] - known['tokens']:,} of {known['slots']:,} places"
    assert shown["plan"][0] == known["plan"]
    assert shown["imbalance"][0] == f"{known['imbalance']['contiguous']:.3f}"
    assert shown["tokens lost"][0] == f"{sum(known['lost_tokens'].values()):,}"
    rows = {row.all("td")[0].text: [cell.text for cell in row.all("td")] for row in page.all("tr") if row.all("td")}
    for source in known["sources"]:
        assert rows[source["name"]][4] == f"{source['tokens']:,}"
        assert rows[source["name"]][6] == f"{source['passes']:.3f}"
    assert titles(page) == ["Plan", "Mixture", "Epochs", "Packing and padding", "Ranks", "Settings"]


def test_the_series_of_the_page_add_up_to_what_the_command_prints(tmp_path: Path) -> None:
    path = mixture(tmp_path)
    known = json.loads(CliRunner().invoke(app, ["plan", str(path), "--json"]).stdout)
    config = load_config(path)
    with open_planned(config) as loader:
        figures = figures_of(config, loader)
    assert figures.series.tokens.sum(axis=0).tolist() == [source["tokens"] for source in known["sources"]]
    assert figures.series.slots.sum() == known["slots"]
    assert figures.series.steps.sum() == known["steps"]
    assert figures.summary.to_dict()["batch_bytes"] == known["batch_bytes"]
    grouped = figures.series.grouped(5)
    assert len(grouped) <= 5
    assert grouped.tokens.sum() == known["tokens"]
    assert (grouped.reached[-1] == figures.series.reached[-1]).all()
    assert np.nanmax(grouped.most_padding) == np.nanmax(figures.series.most_padding)


def test_names_of_sources_stay_text_whatever_they_hold(tmp_path: Path) -> None:
    markup = build_report(str(mixture(tmp_path, (HOSTILE, "code"))))
    page = parsed(markup)
    assert len(page.all("script")) == 1
    assert "<script>alert" not in markup
    assert "\x00" not in markup
    assert "\u202e" not in markup
    assert any("<script>alert(1)</script>\\u202e" in cell.text for cell in page.all("td"))


def test_every_document_of_a_drawn_step_is_a_block(tmp_path: Path) -> None:
    config = load_config(mixture(tmp_path))
    with open_planned(config) as loader:
        figures = figures_of(config, loader)
    page = parsed(build_report(config.name))
    drawings = [svg for svg in page.all("svg", role="img") if (svg.attributes["aria-label"] or "").startswith("Step ")]
    assert len(drawings) == 3
    first = figures.examples[0]
    documents = sum(len(span.documents) for span in first.samples)
    # A bar has a block for its room, and one for each document.
    assert len(drawings[0].all("rect")) == documents + len(first.samples)
    total = sum(
        float((rect.attributes["width"] or "").removesuffix("%")) for rect in drawings[0].all("rect", class_="s1")
    )
    tokens = sum(length for span in first.samples for source, length in span.documents if source == 0)
    assert total == pytest.approx(100 * tokens / first.width, abs=0.1)


def test_a_single_source_has_no_mixture_and_one_rank_no_balance(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", 80)
    config = tmp_path / "one.yaml"
    config.write_text(f"loader: pretrain\npath: {store}\nchunk_size: 64\nbatch_size: 4\n")
    assert titles(parsed(build_report(str(config)))) == ["Plan", "Epochs", "Packing and padding", "Settings"]


def test_the_page_says_what_it_has_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "s", 400)
    config = tmp_path / "one.yaml"
    config.write_text(f"loader: pretrain\npath: {store}\nchunk_size: 64\nbatch_size: 4\nepochs: 3\n")
    steps = int(shown_facts(parsed(build_report(str(config))))["steps"][0].replace(",", ""))
    real = plan_page.plan_figures
    monkeypatch.setattr(plan_page, "plan_figures", lambda *given, **more: real(*given, **more, most_documents=1))
    page = parsed(build_report(str(config)))
    counted = steps // 3 - 1  # the last step of an epoch is not full, and is a chunk of its own
    assert shown_facts(page)["steps"] == (f"{steps:,}", f"the first {counted:,} counted")
    warning = page.all("p", class_="warning")[0].text
    assert f"The plan has {steps:,} steps. Totals are of the first {counted:,} steps" in warning


def test_an_endless_mixture_is_shown_up_to_a_step_that_the_page_names(tmp_path: Path) -> None:
    config = mixture(tmp_path, stopping_strategy="never", packing="concat", edits=[])
    page = parsed(build_report(str(config)))
    assert shown_facts(page)["steps"][0] == "1,000"
    assert "the mixture is endless" in page.text


def test_a_stream_has_no_plan_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "stream.yaml"
    config.write_text("loader: pretrain\npath: a.jsonl\nstreaming: true\n")
    with pytest.raises(ConfigError, match=r"a stream has no plan.*prepare the data first"):
        build_report(str(config))
