"""The gallery: what penstock's commands and pages look like, made by running them.

    python docs/site/gallery.py build/gallery

Commands run on the sample, in a directory of their own; their coloured output becomes SVG. Pages (`penstock report`)
become screenshots of Chromium. Commands that this version does not have are left out, and so is everything without
Chromium and Playwright; both are said. The site takes the folder as the page "Gallery". Nothing of it is committed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SAMPLE = "examples/sample"
CHATS = f"{SAMPLE}/chats.yaml"
COLUMNS = 104


@dataclass(frozen=True)
class Shot:
    """An entry of the gallery: a command, and the page that it writes, if it does."""

    name: str
    text: str
    arguments: tuple[str, ...]
    page: str | None = None
    """File that it writes, or "address" if it is a server that prints its address as JSON."""
    lines: int = 34
    """Lines of output that are shown."""


SHOTS = (
    Shot(
        "show",
        "A row as the model sees it: supervised tokens in green, special ones in yellow",
        ("show", f"{SAMPLE}/chats.jsonl", "--row", "2", "--tokenizer", f"{SAMPLE}/tokenizer", "--template", "chatml"),
    ),
    Shot("plan", "What a run will do, before it runs", ("plan", CHATS, "--epochs", "2")),
    Shot("trace", "The rows of a step", ("trace", CHATS, "--step", "1")),
    Shot("show-step", "The batch of a step", ("show", CHATS, "--step", "2", "--rank", "0")),
    Shot("info", "A token store", ("info", "chats.store")),
    Shot("verify-resume", "Stops and resumes, compared byte for byte", ("verify-resume", CHATS, "--steps", "12")),
    Shot("report-store", "A report about a store", ("report", "chats.store", "-o", "store.html"), page="store.html"),
    Shot("report-plan", "A report about a plan", ("report", CHATS, "-o", "plan.html"), page="plan.html"),
    Shot("ui", "The live page", ("ui", "chats.store", CHATS, "--port", "0", "--json"), page="address"),
)
PREPARE = (
    *("prepare", f"{SAMPLE}/chats.jsonl", "--tokenizer", f"{SAMPLE}/tokenizer", "--template", "chatml"),
    *("--out", "chats.store", "--quiet"),
)


def say(words: str) -> None:
    """A line for who runs `make docs`."""
    sys.stdout.write(f"gallery: {words}\n")


def penstock(arguments: tuple[str, ...], directory: Path) -> subprocess.CompletedProcess[str]:
    """A command with colours, as on a terminal."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300
    )


@contextmanager
def served(arguments: tuple[str, ...], directory: Path) -> Iterator[str]:
    """Address of a command that serves a page until it is stopped."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True, encoding="utf-8") as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["address"]
        finally:
            server.terminate()


def commands() -> set[str]:
    """Names of the commands of this version."""
    import typer

    from penstock.cli.main import app

    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def terminal_svg(output: str, lines: int) -> str:
    """Output with its colours as an SVG that fetches nothing."""
    from rich.console import Console
    from rich.text import Text

    shown = output.rstrip("\n").split("\n")
    if len(shown) > lines:
        shown = [*shown[:lines], f"... {len(shown) - lines} more lines"]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi("\n".join(shown)))
    svg = console.export_svg(title="penstock")
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)  # rich would fetch a font
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "ui-monospace").replace("font-variant: east-asian-width full-width;", "")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window, or None if there is none."""
    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


def photograph(chromium: Any, address: str, path: Path) -> None:
    """A screenshot of a page."""
    page = chromium.new_page(viewport={"width": 1100, "height": 1200})
    page.goto(address)
    page.screenshot(path=path)
    page.close()


def make(folder: Path, shots: tuple[Shot, ...] = SHOTS) -> list[str]:
    """Write the gallery into a folder; returns the names of what it shows."""
    known = commands()
    entries: list[str] = []
    made: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, browser() as chromium:
        if chromium is None:
            say("left out: no Chromium, or no Playwright to drive it")
            return []
        folder.mkdir(parents=True, exist_ok=True)
        where = Path(temporary)
        shutil.copytree(ROOT / SAMPLE, where / SAMPLE)
        prepared = penstock(PREPARE, where)
        if prepared.returncode:
            raise SystemExit(f"penstock prepare failed: {prepared.stderr}")
        for shot in shots:
            command = "penstock " + " ".join(shot.arguments)
            if shot.arguments[0] not in known:
                say(f"{shot.name} left out: this version has no command {shot.arguments[0]!r}")
                continue
            name = f"{shot.name}.svg" if shot.page is None else f"{shot.name}.png"
            if shot.page == "address":
                with served(shot.arguments, where) as address:
                    photograph(chromium, address, folder / name)
            else:
                done = penstock(shot.arguments, where)
                if done.returncode:
                    raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr}")
                if shot.page is None:
                    (folder / name).write_text(terminal_svg(done.stdout, shot.lines), encoding="utf-8")
                else:
                    photograph(chromium, (where / shot.page).as_uri(), folder / name)
            made.append(shot.name)
            entries.append(f"## {shot.text}\n\n```text\n{command}\n```\n\n![{shot.text}](gallery/{name})\n")
    head = "# Gallery\n\nMade by [gallery.py](site/gallery.py), which runs these commands on the sample.\n\n"
    (folder / "gallery.md").write_text(head + "\n".join(entries), encoding="utf-8")
    say(f"{len(made)} pictures in {folder}")
    return made


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.exists():
        shutil.rmtree(target)
    make(target)
