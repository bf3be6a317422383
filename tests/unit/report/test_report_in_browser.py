"""The page of a store in a real browser: from disk, clicked, by keyboard, light and dark, on a phone's width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import chromium, opened
from penstock.report import build_report
from report_stores import chat_store


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    file = folder / "report.html"
    file.write_text(build_report(str(chat_store(folder)), samples=60), encoding="utf-8")
    return file


def test_a_click_on_a_token_shows_its_id(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as watched:
        view = watched.page.locator(".tokenview").first
        ids = (view.locator(".tokens").get_attribute("data-ids") or "").split()
        view.locator(".tokens i").nth(2).click()
        said = view.locator(".detail").inner_text()
        assert said.startswith(f"Token 3 of {len(ids)}: id {ids[2]}, ")
        view.locator(".run.trained i").first.click()
        assert "supervised, content" in view.locator(".detail").inner_text()
        assert "not supervised" not in view.locator(".detail").inner_text()


def test_the_keyboard_walks_over_tokens(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as watched:
        view = watched.page.locator(".tokenview").first
        ids = (view.locator(".tokens").get_attribute("data-ids") or "").split()
        view.locator(".tokens").focus()
        for key, at in (
            ("ArrowRight", 0),
            ("ArrowRight", 1),
            ("End", len(ids) - 1),
            ("ArrowLeft", len(ids) - 2),
            ("Home", 0),
        ):
            watched.page.keyboard.press(key)
            assert f"id {ids[at]}," in view.locator(".detail").inner_text()


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 360)], ids=["light", "dark on a phone"])
def test_the_page_is_accessible_quiet_and_narrow(browser: Any, page_file: Path, dark: bool, width: int) -> None:
    with opened(browser, page_file, dark=dark, width=width) as watched:
        for each in watched.page.locator("details").all():
            each.locator("summary").click()
        assert watched.problems() == []
        assert not watched.scrolls_sideways()
        assert watched.console == []
        assert watched.requests == [page_file.as_uri()]
        assert watched.page.evaluate("window.hacked") is None


def test_the_theme_can_be_changed_and_stays_accessible(browser: Any, page_file: Path) -> None:
    with opened(browser, page_file) as watched:
        colour = "getComputedStyle(document.documentElement).backgroundColor"
        light = watched.page.evaluate(colour)
        watched.page.get_by_role("button", name="Theme").click()
        assert watched.page.evaluate(colour) != light
        assert watched.problems() == []
        watched.page.reload()
        assert watched.page.evaluate(colour) != light
        watched.page.get_by_role("link", name="Samples").click()
        assert watched.page.url.endswith("#samples")
