"""The list of decisions: number, title and the first sentence of what was decided."""

from __future__ import annotations

import re
from pathlib import Path

HEAD = """# Decisions

Each decision is half a page: the problem, the decision, its cost, and the number that decided it. Superseded decisions
stay, since the reasons against a design outlive it.

| number | title | in a sentence |
|---|---|---|
"""


def files(root: Path) -> list[Path]:
    """The files of the decisions, in their order."""
    return sorted((root / "docs" / "decisions").glob("[0-9]*.md"))


def page(root: Path) -> str:
    """The page that lists them."""
    lines = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        number, title = re.match(r"# (\d+): (.*)", text).groups()  # type: ignore[union-attr]
        lines.append(f"| [{number}]({path.name}) | {cell(title)} | {cell(sentence(text))} |\n")
    return HEAD + "".join(lines)


def sentence(text: str) -> str:
    """The first sentence of the paragraph that begins with **Decision**, else with **Finding**, else of the first."""
    begins = (rf"^\*\*{word}[^*]*\*\*(?: \([^)]*\))?\.?\s+(.*)$" for word in ("Decision", "Finding"))
    found = next(filter(None, (re.search(pattern, text, re.MULTILINE) for pattern in begins)), None)
    paragraph = found[1] if found else text.split("\n\n")[1]
    paragraph = re.sub(r"^(?:\d+\.|-) (?:\*[^*]+\* )?", "", paragraph)  # the first item of a list
    return re.split(r"(?<=[.:]) (?=[A-Z*`\[])", paragraph)[0].rstrip(":").rstrip()


def cell(text: str) -> str:
    """Text for a cell of a table, with links as plain words."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("|", "\\|")
