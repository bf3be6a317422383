"""Frame of a page and its parts: sections, figures with names, tables, charts with captions."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from penstock.html.markup import Html, element, escape, visible

_NUMBERS: Final = (int, float)


@dataclass(frozen=True, slots=True)
class Section:
    """Titled part of a page, which lists it under its anchor."""

    title: str
    body: Html
    anchor: str

    def __html__(self) -> str:
        heading = element("h2", self.title, id=f"{self.anchor}-title")
        return element("section", heading, self.body, id=self.anchor, aria_labelledby=f"{self.anchor}-title")


def section(title: str, *children: object, anchor: str | None = None) -> Section:
    """A section of a page. The anchor is made of the title, unless given; it must be unique in a page."""
    words = re.sub(r"[^a-z0-9]+", "-", (anchor or title[:60]).lower()).strip("-")
    return Section(title, Html("".join(escape(child) for child in children)), words or "section")


def subsection(title: str, *children: object) -> Html:
    """A part of a section under a heading of the next level."""
    return element("div", element("h3", title), *children, class_="sub")


def page(
    title: str,
    sections: Iterable[Section],
    *,
    lead: object = None,
    script: str | None = None,
    connect: bool = False,
) -> str:
    """One document with everything inline. Its policy allows these scripts alone, and no request to anywhere.

    `lead` stands below the title. With `connect`, the script may fetch from the server the page came from.
    """
    parts = _with_unique_anchors(sections)
    scripts = [asset("page.js"), *([script] if script else [])]
    if any("</script" in each.lower() for each in scripts):
        raise ValueError("a script must not contain '</script': it would end there")
    hashes = " ".join(f"'sha256-{_sha256(each)}'" for each in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; " + (
        "connect-src 'self'; form-action 'self'" if connect else "form-action 'none'"
    )
    shown = visible(title, 200)
    links = [element("li", element("a", part.title, href=f"#{part.anchor}")) for part in parts]
    header = element(
        "header",
        element(
            "div",
            element("h1", shown),
            element("button", "Theme", type="button", id="theme", title="Light or dark"),
            class_="top",
        ),
        element("p", lead, class_="lead") if lead is not None else None,
        element("nav", element("ul", *links), aria_label="Sections") if len(parts) > 1 else None,
    )
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{shown} - penstock"),
        Html('<link rel="icon" href="data:,"/>'),
        element("style", Html(asset("page.css"))),
    ]
    body = [
        element("a", "Skip to content", href="#content", class_="skip"),
        header,
        element("main", *(Html(part.__html__()) for part in parts), id="content"),
        element("footer", "Made by penstock. Nothing on this page is loaded from elsewhere."),
        *(element("script", Html(each)) for each in scripts),
    ]
    document = element("html", element("head", *head), element("body", *body), lang="en", class_="penstock page")
    return f"<!doctype html>\n{document}\n"


def fragment(*children: object) -> str:
    """Markup with its style for the cell of a notebook, in which nothing else changes its look."""
    return element("div", element("style", Html(asset("page.css"))), *children, class_="penstock cell")


def facts(pairs: Iterable[Sequence[object]]) -> Html:
    """Figures with names: (name, value) or (name, value, remark)."""
    shown = []
    for name, value, *remark in pairs:
        more = element("span", remark[0], class_="remark") if remark and remark[0] not in (None, "") else None
        shown.append(element("div", element("dt", name), element("dd", escape(value), more)))
    return element("dl", *shown, class_="facts")


def figure(chart: object, caption: object, *, legend: object = None) -> Html:
    """A chart with its caption."""
    return element("figure", element("figcaption", caption), legend, chart)


def note(*children: object, kind: str = "plain") -> Html:
    """A remark; `kind` is plain, warning or error."""
    return element("p", *children, class_=f"note {kind}")


def table(
    rows: Iterable[Sequence[object]], columns: Sequence[str] | None = None, *, caption: str, most: int = 1000
) -> Html:
    """A table that scrolls in its own frame. Numbers stand right; the caption is shown, and names the frame."""
    rows = list(rows)
    names = [element("th", name, scope="col", class_=_of_numbers(rows, at)) for at, name in enumerate(columns or ())]
    head = element("thead", element("tr", *names)) if names else None
    lines = [element("tr", *(_cell(cell) for cell in row)) for row in rows[:most]]
    more = note(f"{len(rows) - most:,} more rows are not shown.") if len(rows) > most else None
    made = element("table", element("caption", caption), head, element("tbody", *lines))
    return Html(element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption) + escape(more))


@cache
def asset(name: str) -> str:
    """Text of a file of this package: `page.css` or `page.js`."""
    return files("penstock.html").joinpath(name).read_text(encoding="utf-8").strip()


def _cell(value: object) -> Html:
    return element("td", escape(value), class_="number" if _is_number(value) else None)


def _of_numbers(rows: Sequence[Sequence[object]], at: int) -> str | None:
    """The class of a heading: that of the cells below it."""
    return "number" if rows and all(_is_number(row[at]) for row in rows[:20] if at < len(row)) else None


def _is_number(value: object) -> bool:
    """True for a number, and for a share such as `12.5%`."""
    if isinstance(value, str):
        return value.endswith("%") and value[:-1].replace(".", "", 1).isdigit()
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _with_unique_anchors(sections: Iterable[Section]) -> list[Section]:
    """Sections of which the second with an anchor gets a number behind it."""
    seen: dict[str, int] = {}
    made = []
    for part in sections:
        seen[part.anchor] = number = seen.get(part.anchor, 0) + 1
        made.append(part if number == 1 else Section(part.title, part.body, f"{part.anchor}-{number}"))
    return made


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
