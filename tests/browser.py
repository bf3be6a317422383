"""Real browser for tests of pages: Debian's Chromium, headless, driven by Playwright; and what a page did in it.

Without Chromium or Playwright the tests are skipped with the reason, or fail if the environment variable CI is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
SERIOUS = ("serious", "critical")


@dataclass
class WatchedPage:
    """Page of a browser, with everything it printed, asked for and threw."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Findings of axe-core that are serious or critical, each with the elements it is about."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in SERIOUS
        ]

    def scrolls_sideways(self) -> bool:
        """True if the body is wider than the window."""
        script = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        return bool(self.page.evaluate(script))


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; for a fixture of a module, since it takes a second to start."""
    reason = missing()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable(), headless=True, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, address: str | Path, *, dark: bool = False, width: int = 1200) -> Iterator[WatchedPage]:
    """An address, or a file from disk, in a window of its own."""
    scheme: Any = "dark" if dark else "light"
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=False)
    try:
        watched = WatchedPage(context.new_page())
        watched.page.on("console", lambda message: watched.console.append(f"{message.type}: {message.text}"))
        watched.page.on("pageerror", lambda error: watched.console.append(f"error: {error}"))
        watched.page.on("request", lambda request: watched.requests.append(request.url))
        watched.page.goto(address.absolute().as_uri() if isinstance(address, Path) else address)
        yield watched
    finally:
        context.close()


def executable() -> str | None:
    """Path of Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


def missing() -> str | None:
    """The reason why there is no browser; None if there is one."""
    try:
        import axe_playwright_python  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        return f"pages are tested in a browser, and {error.name} is not installed"
    return None if executable() is not None else "pages are tested in Chromium, which is not installed"
