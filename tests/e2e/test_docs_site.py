"""The documentation site: it builds without a warning, lists every public name, and asks nothing of other machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.files.locks import FileLock

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
# What a browser fetches by itself. Links that a reader may follow are none of it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\s(?:src|srcset)=[\"']?(?:https?:)?//[^\s>\"']+"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|icon|preconnect|preload|dns-prefetch))[^>]*href=[\"']?(?:https?:)?//[^>]+"
)
FETCHED_BY_STYLE = re.compile(r"url\([\"']?(?:https?:)?//[^)]+\)|@import\s+[\"'](?:https?:)?//[^\"']+")


def missing(reason: str) -> None:
    """Skip with a reason; an error where everything has to be there."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI is set")
    pytest.skip(reason)


def run_docs(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SITE / script, *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, which all processes of a run share."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        missing("mkdocs is not installed: pip install 'penstock[docs]'")
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder, said = shared / "docs-site", shared / "docs-site.log"
    lock = FileLock(shared / "docs-site.lock")
    assert lock.acquire(wait_seconds=500)
    with lock:
        if not said.exists():
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PENSTOCK_GALLERY": str(shared / "none")}
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
            said.write_text(json.dumps([done.returncode, done.stdout + done.stderr]))
    code, words = json.loads(said.read_text())
    assert code == 0, words
    return folder


def html_files(site: Path) -> list[Path]:
    return sorted(file for file in site.rglob("*.html") if file.is_file())  # `penstock.html` is a package, and a folder


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 80
    assert not [page for page in pages if page.name != "README" and not (site / page / "index.html").is_file()]


def test_links_of_built_pages_lead_to_files_and_anchors_of_the_site(site: Path) -> None:
    anchors = {
        page: set(re.findall(r"\bid=[\"']?([^\s\"'>]+)", page.read_text(encoding="utf-8"))) for page in html_files(site)
    }
    broken = []
    for page in html_files(site):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        for link in re.findall(r"<a\b[^>]*?href=[\"']?([^\s\"'>]+)", article):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            there = page if not path else (page.parent / path).resolve()
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file() or (anchor and anchor not in anchors.get(there, ())):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


def test_the_reference_has_every_public_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    import reference

    import penstock

    entries = reference.entries()
    assert {entry.name for entry in entries if entry.package == "penstock"} == set(penstock.__all__)
    assert len(entries) > 400
    owners = reference.owners()
    for package in reference.packages():
        text = (site / "reference" / package / "index.html").read_text(encoding="utf-8")
        for entry in (entry for entry in entries if entry.package == package):
            if owners[entry.home] == entry:
                assert re.search(rf"<h2[^>]*\bid=[\"']?{re.escape(entry.home)}[\"'\s>]", text), entry
            else:
                assert f"<code>{entry.name}</code>" in text, entry


def test_pages_and_styles_fetch_nothing_from_other_machines(site: Path) -> None:
    fetched = [
        f"{file.relative_to(site)}: {found[:120]}"
        for file in [*html_files(site), *site.rglob("*.css"), *site.rglob("*.svg")]
        for pattern in ((FETCHED,) if file.suffix == ".html" else (FETCHED_BY_STYLE,))
        for found in pattern.findall(file.read_text(encoding="utf-8"))
    ]
    assert not fetched


def test_what_a_page_fetches_would_be_found() -> None:
    assert FETCHED.search('<link href="https://fonts.example/css" rel="stylesheet">')
    assert FETCHED.search("<script async src=//cdn.example/a.js>")
    assert FETCHED_BY_STYLE.search("@font-face{src:url(https://cdn.example/a.woff)}")
    assert not FETCHED.search('<a href="https://arrow.apache.org/docs">Arrow</a>')


@pytest.mark.parametrize("script", ["pictures.py", "plots.py"])
def test_committed_pictures_are_those_that_the_scripts_draw(script: str) -> None:
    done = run_docs(script, "--check")
    assert done.returncode == 0, done.stderr


def test_the_figures_of_the_plots_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in readme.splitlines() if line.startswith("| ")}
    compared = 0
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        assert results["origin"]
        assert results["machine"]
        for case in [*results["cases"], *results.get("memory_mb", []), *results.get("steps", [])]:
            ours = case["penstock"] if isinstance(case["penstock"], dict) else {"penstock": case["penstock"]}
            script = case["command"].split()[1]
            assert (ROOT / script).is_file(), script
            for figure in [*ours.values(), *case["peers"].values()]:
                assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.]*\d)", rows[case["case"]]), (case, figure)
                compared += 1
    assert compared > 40


def test_every_decision_is_listed_with_a_sentence(site: Path) -> None:
    text = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr>\s*<td><a[^>]*>(\d+)</a></td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", text, re.DOTALL)
    assert len(rows) == len(list((ROOT / "docs" / "decisions").glob("[0-9]*.md")))
    assert all(len(title) > 8 and len(sentence) > 20 for _, title, sentence in rows)


@pytest.fixture
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None or find_spec("playwright") is None:
        missing("Chromium or Playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_pages_open_in_a_browser_without_errors_and_ask_only_this_site(browser: Any, address: str) -> None:
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}/pictures/", wait_until="networkidle")
    assert page.locator("svg.picture").count() == 3
    light = page.locator("svg.picture rect").first.evaluate("it => getComputedStyle(it).fill")
    page.locator("label[title=Dark]").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert page.locator("svg.picture rect").first.evaluate("it => getComputedStyle(it).fill") != light
    page.goto(f"{address}/reference/penstock.pipeline/", wait_until="networkidle")
    assert page.locator("h2", has_text="PipelineConfig").first.is_visible()
    assert asked
    assert not [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    assert not said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_have_no_serious_finding_of_axe(scheme: str, browser: Any, address: str) -> None:
    if find_spec("axe_playwright_python") is None:
        missing("axe-playwright-python is not installed")
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(color_scheme=scheme)
    serious = []
    for path in ("pictures/", "tutorial-loaders/"):
        page.goto(f"{address}/{path}", wait_until="networkidle")
        found = Axe().run(page).response["violations"]
        serious += [
            f"{path}: {one['id']}: {[node['html'][:100] for node in one['nodes'][:3]]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
    assert not serious


def test_the_gallery_shows_what_commands_print(browser: Any, tmp_path: Path) -> None:
    browser.close()  # it starts its own
    code = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import gallery as g; "
    code += "gone = g.Shot('gone', 'x', ('no-such-command',)); g.make(pathlib.Path(sys.argv[2]), (g.SHOTS[0], gone))"
    done = subprocess.run(
        [sys.executable, "-c", code, SITE, tmp_path / "g"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "gone left out: this version has no command 'no-such-command'" in done.stdout
    svg = (tmp_path / "g" / "show.svg").read_text(encoding="utf-8")
    assert "engineer" in svg
    assert "https://" not in svg
    assert "gallery/show.svg" in (tmp_path / "g" / "gallery.md").read_text(encoding="utf-8")
