"""The web page in a real browser: clicked through, by keyboard, on a phone's width, live, and accessible."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.browser import WatchedPage, chromium
from tests.servers import missing
from tests.ui_server import LONG, UiServer

from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u202eevil\x00"


def write_reading(file: Any, number: int) -> None:
    metrics = {"penstock_loader_step": number, "penstock_loader_tokens_total": 1000 * number}
    metrics |= {"penstock_loader_data_wait_ratio": 0.02, 'penstock_loader_source_ratio{source="web"}': 1.0}
    file.write(json.dumps({"seconds": number, "time": time.time(), "metrics": metrics}) + "\n")
    file.flush()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of every kind."""
    root = tmp_path_factory.mktemp("ui")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Question {n}"},
                {"role": "assistant", "content": f"Answer {n}. " * 9},
            ]
        }
        for n in range(120)
    ]
    rows.append({"messages": [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "y" * 1_000_000}]})
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    prepare(rows, root / "chats.store", Recipe(tokenizer="byte", template="alpaca"))
    facts = {"loader": "conversation", "path": str(root / "chats.store"), "max_length": 512, "batch_size": 4}
    (root / "train.yaml").write_text(yaml.safe_dump(facts | {"truncation": "right", "seed": 1}))
    header = {"penstock_metrics": 1, "kind": "loader", "name": "training", "pid": os.getpid(), "labels": {}}
    header |= {"host": socket.gethostname(), "started": time.time(), "description": ""}
    with (root / "run.metrics.jsonl").open("w") as file:
        file.write(json.dumps(header) + "\n")
        for number in (1, 2, 3):
            write_reading(file, number)
    return root


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    if reason := missing("starlette", "uvicorn"):
        pytest.skip(reason)
    with chromium() as browser:
        made = browser.new_context()
        made.set_default_timeout(LONG * 1000)
        yield made
        made.close()


@pytest.fixture(scope="module")
def server(context: Any, folder: Path) -> Iterator[UiServer]:
    names = ("chats.store", "chats.jsonl", "train.yaml", "run.metrics.jsonl")
    with UiServer(*(folder / name for name in names)) as server:
        yield server


@pytest.fixture
def page(context: Any, server: UiServer) -> Iterator[Any]:
    """A page that has been let in; an error on its console is a failure."""
    made, said = context.new_page(), []
    made.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    made.on("pageerror", lambda error: said.append(str(error)))
    made.goto(server.address)
    made.wait_for_url(f"{server.origin}/")
    yield made
    made.close()
    assert not said


PATHS = ["/", "/t/0?q=answer+7", "/t/0/row/0-0-3", "/t/1/row/0-0-0", "/t/2", "/t/2/step/5", "/t/2/trace?row=17", "/t/3"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits_a_phone(page: Any, server: UiServer, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    for path in PATHS if scheme == "light" else PATHS[1:3]:
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(server.origin + path)
        assert not WatchedPage(page).problems(), path
        page.set_viewport_size({"width": 360, "height": 740})
        assert not WatchedPage(page).scrolls_sideways(), path
        assert page.title() != "taken"


def test_a_person_finds_a_row_and_its_steps_by_clicking(page: Any, server: UiServer) -> None:
    page.get_by_text("chats.store", exact=True).click()
    page.get_by_label("Search text").fill("answer 77.")
    page.get_by_role("button", name="Search").click()
    assert page.get_by_role("status").inner_text() == "1 row found. Searched rows 0 to 121 of 121, to the end."
    assert page.locator("mark").first.inner_text() == "Answer 77."
    page.locator("a.entry").click()
    assert page.get_by_role("heading", level=1).inner_text() == "row 77"
    token = page.locator(".run.trained i").first
    token.click()
    assert re.search(r"id \d+, .*supervised", page.locator(".detail").inner_text())
    page.get_by_text("Where row 77 goes in train.yaml").click()
    page.get_by_role("link", name=re.compile("^step ")).first.click()
    found = page.locator("a.entry", has_text="chats row 77").or_(page.locator("a.entry", has_text=" row 77"))
    found.first.wait_for()  # the page of the step may still be loading
    assert found.count() == 1


def test_everything_goes_by_keyboard(page: Any, server: UiServer) -> None:
    def heading() -> str:
        return str(page.get_by_role("heading", level=1).inner_text())

    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/0")
    page.keyboard.press("n")
    page.wait_for_url("**/t/0?at=0-0-50")
    page.keyboard.press("p")
    page.wait_for_url("**/t/0?row=0")
    page.keyboard.press("g")
    page.keyboard.type("42")
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/0?row=42")
    page.keyboard.press("j")
    page.keyboard.press("j")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/t/0/row/0-0-42")
    page.keyboard.press("n")
    page.wait_for_url("**/t/0/row/0-0-43")
    assert heading() == "row 43"
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    page.keyboard.press("u")
    page.wait_for_url("**/t/0?at=0-0-43")
    page.keyboard.press("/")
    page.keyboard.type("question 9 n")  # keys in a field are text
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    page.wait_for_url(f"{server.origin}/")
    page.goto(f"{server.origin}/t/2/step/3")
    page.keyboard.press("n")
    page.wait_for_url("**/step/4")
    page.keyboard.press("p")
    page.wait_for_url("**/step/3")


def test_a_run_is_seen_to_grow_and_to_end(page: Any, server: UiServer, folder: Path) -> None:
    page.goto(f"{server.origin}/t/3")
    assert "running" in page.locator("#state").inner_text()
    page.locator("#all-metrics summary").click()
    with (folder / "run.metrics.jsonl").open("a") as file:
        write_reading(file, 4711)
        page.locator("#rates", has_text="4,711").wait_for()
        assert page.locator("#all-metrics").get_attribute("open") is not None
        assert page.locator("#live > *").evaluate_all("parts => parts.map(part => part.id)") == [
            *("state", "rates", "over-time", "mixture", "metrics")
        ]
        file.write(json.dumps({"seconds": 9.0, "end": "finished"}) + "\n")
    page.locator("#state", has_text="has finished").wait_for()


def test_hostile_rows_are_text(page: Any, server: UiServer) -> None:
    for path in ("/t/0?row=120", "/t/0/row/0-0-120", "/t/1?row=120"):
        page.goto(server.origin + path)
        assert "taken" not in page.title()
        assert page.locator("img").count() == 0
        assert "<script>" in page.locator("main").inner_text()


def test_a_page_whose_server_ends_says_so(context: Any, folder: Path) -> None:
    with UiServer(folder / "run.metrics.jsonl") as other:
        page = context.new_page()
        page.goto(other.address)
        page.wait_for_url(f"{other.origin}/")
        page.goto(f"{other.origin}/t/0")
        assert not page.locator("#no-answer").is_visible()
        other.process.kill()
        page.locator("#no-answer").wait_for()
        assert page.locator("#state").is_visible()
        page.close()
