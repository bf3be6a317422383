"""The page of a store: its figures are those of the store, whatever its rows hold and however many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bucket_stores import upload_store
from page_reader import Node, parsed
from penstock.corpus.prepare import EXAMPLES_NAME, drop_examples_of
from penstock.errors import ConfigError
from penstock.report import build_report
from penstock.report.page import MOST_BYTES, target_kind
from penstock.report.store import open_tokenizer, store_figures
from penstock.report.turns import TurnLayout
from penstock.store import open_store
from report_stores import HOSTILE, chat_store, text_store
from token_stores import make_masks, make_preferences, make_rows, make_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def chats(folder: Path) -> Path:
    return chat_store(folder)


@pytest.fixture(scope="module")
def chat_page(chats: Path) -> Node:
    return parsed(build_report(str(chats)))


def facts_of(tree: Node) -> dict[str, str]:
    pairs = tree.all("dl", class_="facts")[0].all("div")
    return {pair.all("dt")[0].text: pair.all("dd")[0].text for pair in pairs}


def section_of(tree: Node, anchor: str) -> Node:
    return next(part for part in tree.all("section") if part.attributes["id"] == anchor)


def rows_of(table: Node) -> list[list[str]]:
    return [[cell.text for cell in line.all("td")] for line in table.all("tr") if line.all("td")]


def test_figures_of_the_page_are_those_of_the_store(chats: Path, chat_page: Node) -> None:
    known = facts_of(chat_page)
    with open_store(chats) as store:
        assert known["rows"] == "60"
        assert known["tokens"] == f"{store.tokens:,}"
        assert known["median length"].startswith(str(int(np.percentile(store.lengths, 50, method="lower"))))
    assert (known["template"], known["tokenizer"][:4]) == ("qwen", "tiny")


def test_supervised_tokens_are_counted_by_role(chats: Path, chat_page: Node) -> None:
    rows = {row[0]: row[1:] for row in rows_of(section_of(chat_page, "supervision").all("table")[0])}
    assert rows["user"][1:] == ["0", "0.0%"]
    assert rows["assistant"][2] == "100.0%"
    with open_store(chats) as store:
        supervised = sum(int(row["loss_mask"].sum()) for row in store)
        assert sum(int(row[1].replace(",", "")) for row in rows.values()) == supervised
        assert sum(int(row[0].replace(",", "")) for row in rows.values()) == store.tokens


def test_tokens_of_rows_without_certain_messages_are_unknown(chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(chats) as store:
        lengths = [len(row["input_ids"]) for row in store]
        found = TurnLayout.parts

        def only_long(layout: TurnLayout, ids: Any) -> Any:
            parts, turns = found(layout, ids)
            return parts, turns if len(ids) == max(lengths) else []

        monkeypatch.setattr(TurnLayout, "parts", only_long)
        figures = store_figures(store, open_tokenizer(store, None))
        assert figures.roles["unknown"][0] == sum(length for length in lengths if length < max(lengths))
        assert sum(tokens for tokens, _ in figures.roles.values()) == sum(lengths)
        assert sum(trained for _, trained in figures.roles.values()) == figures.sides[""][1]
    tree = parsed(build_report(str(chats)))
    assert "not found for certain" in section_of(tree, "supervision").text


def test_samples_have_the_ids_of_the_store_and_parts_of_the_template(chats: Path, chat_page: Node) -> None:
    samples = section_of(chat_page, "samples")
    boxes = samples.all("div", class_="tokens")
    assert len(boxes) == 12
    titles = [heading.text for heading in samples.all("h3")]
    with open_store(chats) as store:
        for title, box in zip(titles, boxes):
            row = store[int(title.split()[1].rstrip(":"))]
            assert box.attributes["data-ids"] == " ".join(map(str, row["input_ids"].tolist()))
            trained = box.all("span", class_="trained")
            assert sum(len(run.all("i")) for run in trained) == int(row["loss_mask"].sum())
    parts = {run.attributes["data-part"] for run in samples.all("span", class_="run")}
    assert parts == {"template", "content", "thought", "tool call", "tool result"}
    thought = next(run for run in samples.all("span", class_="thought"))
    assert thought.text.startswith("<think>")


def test_refused_rows_have_their_reason_at_the_message(chat_page: Node) -> None:
    refused = section_of(chat_page, "refused-rows")
    assert [heading.text.rpartition(", ")[2] for heading in refused.all("h3")] == ["row 60", "row 61", "row 62"]
    empty = refused.all("div", class_="sub")[1]
    kinds = [child.attributes.get("class") for child in empty.children if isinstance(child, Node)]
    assert kinds[2:] == ["bubble", "bubble wrong", "note error"]
    assert "message 1 (assistant) is supervised, but empty" in empty.text


def test_left_out_rows_are_shown_with_examples(folder: Path) -> None:
    store = text_store(folder)
    tree = parsed(build_report(str(store)))
    left_out = section_of(tree, "left-out-while-preparing")
    tips = {tip.text for bar in left_out.all("rect") for tip in bar.all("title")}
    assert "duplicate: 74 rows" in tips
    assert any(tip.startswith("cut off on the right:") for tip in tips)
    assert [summary.text for summary in left_out.all("summary")] == ["Examples: duplicate"]
    with open_store(store) as opened:
        assert any("window.hacked" in row for row in drop_examples_of(opened)["duplicate"])
    assert "Rows by language" in section_of(tree, "sources-and-languages").text
    (store / EXAMPLES_NAME).write_text(json.dumps({"key": "another", "examples": {"x": ["y"]}}))
    with open_store(store) as opened:
        assert drop_examples_of(opened) == {}


def test_hostile_rows_are_text_on_the_page(chats: Path) -> None:
    made = build_report(str(chats), samples=60)
    tree = parsed(made)
    assert len(tree.all("script")) == 1
    assert not tree.all("img")
    assert "<script>window.hacked" not in made
    assert not set(HOSTILE) & {"\u202e"} & set(made)


def test_preference_pairs_have_two_sides(tmp_path: Path) -> None:
    store = make_preferences(tmp_path / "pairs.store", 5, 30)
    tree = parsed(build_report(str(store), samples=2))
    names = [each.text.split(":")[0] for each in section_of(tree, "samples").all("p", class_="sampletitle")]
    assert [name.rpartition(", ")[2] for name in names] == ["chosen", "rejected"] * 2
    assert "the tokenizer of the store was not found" in tree.text.lower()


def test_a_page_stays_small_and_says_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.report.draw.MOST_ROWS", 500)
    rows = [[7, 8, 9] * 20_000, *([1 + number % 60_000] * 30 for number in range(3000))]
    store = make_store(tmp_path / "big.store", rows)
    made = build_report(str(store), samples=200)
    assert len(made.encode()) < MOST_BYTES
    assert "a sample of 500 rows" in made
    assert "200 of 3,001 rows, drawn with seed 0" in made
    assert build_report(str(store), samples=200) == made
    assert build_report(str(store), samples=200, seed=1) != made


def test_an_empty_store_has_a_page(tmp_path: Path) -> None:
    store = make_store(tmp_path / "none.store", [])
    assert facts_of(parsed(build_report(str(store))))["rows"] == "0"


def test_what_is_no_target_is_refused_with_a_remedy(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("x")
    with pytest.raises(ConfigError, match="neither a store"):
        target_kind(str(other))
    with pytest.raises(ConfigError, match="does not exist"):
        build_report(str(tmp_path / "missing"))
    run = tmp_path / "run.metrics.jsonl"
    run.write_text('{"penstock_metrics": 1, "kind": "pipeline"}\n')
    assert target_kind(str(run)) == "run"
    store = make_store(tmp_path / "a.store", make_rows(3, 4))
    with pytest.raises(ConfigError, match="two of a kind"):
        build_report(str(store), str(run))


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store", make_rows(3, 4))
    page = tmp_path / "pages" / "a.html"
    arguments = [sys.executable, "-m", "penstock", "report", str(store), "-o", str(page), "--json"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"page": str(page), "bytes": page.stat().st_size}
    assert facts_of(parsed(page.read_text("utf-8")))["rows"] == "3"


def test_a_store_in_a_bucket_has_the_same_page_as_on_disk(tmp_path: Path, s3_url: str) -> None:
    rows = make_rows(30, 20)
    local = make_store(tmp_path / "a.store", rows, make_masks(rows))
    url = upload_store(local, f"{s3_url}/a.store")
    here, there = (parsed(build_report(target)) for target in (str(local), url))
    assert facts_of(there) == facts_of(here)
    boxes = [[box.attributes["data-ids"] for box in tree.all("div", class_="tokens")] for tree in (here, there)]
    assert boxes[0] == boxes[1]
    assert len(boxes[0]) == 12
