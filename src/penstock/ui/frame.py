"""Frame of every page: bar, crumbs, help on the keys, styles and scripts by address, as the policy wants them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from penstock.html import Html, element, escape, note, visible

ASSETS = {"page.css": "penstock.html", "page.js": "penstock.html", "ui.css": "penstock.ui", "ui.js": "penstock.ui"}
"""Files that the page loads, and the packages they are in."""
Crumb = tuple[str, str | None]
"""Text, and address if it leads somewhere."""
KEYS = (
    ("?", "show this help"),
    ("o", "overview of all targets"),
    ("/", "search"),
    ("g", "go to a row or a step"),
    ("j, k", "next and previous entry of a list; Enter opens it"),
    ("n, p", "next and previous page, row or step"),
    ("u", "up: from a row to its list"),
    ("Arrow keys", "within the tokens of a row, from token to token"),
    ("t", "light or dark"),
    ("Esc", "close the help, leave a field"),
)


def document(title: str, *body: object, crumbs: Sequence[Crumb] = (), status: object = None) -> str:
    """A whole page."""
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{visible(title, 120)} - penstock ui"),
        Html('<link rel="icon" href="data:,"/>'),
        *(element("link", rel="stylesheet", href=f"/assets/{name}") for name in ASSETS if name.endswith(".css")),
        *(element("script", src=f"/assets/{name}", defer=True) for name in ASSETS if name.endswith(".js")),
    ]
    trail = [element("li", element("a", "penstock ui", href="/", data_key="o", class_="brand"))]
    for text, address in crumbs:
        shown = visible(text, 60)
        here = element("a", shown, href=address) if address else element("span", shown, aria_current="page")
        trail.append(element("li", here))
    bar = element(
        "header",
        element("nav", element("ol", *trail), aria_label="Place"),
        element(
            "div",
            element("button", "Keys", element("kbd", "?"), type="button", id="help-button", data_key="?"),
            element("button", "Theme", type="button", id="theme", data_key="t", title="Light or dark"),
            class_="buttons",
        ),
        class_="bar",
    )
    whole = element(
        "body",
        element("a", "Skip to content", href="#content", class_="skip"),
        bar,
        element(
            "main", element("div", element("h1", visible(title, 200)), status, class_="title"), *body, id="content"
        ),
        _help(),
    )
    return f"<!doctype html>\n{element('html', element('head', *head), whole, lang='en', class_='penstock page ui')}\n"


def live(address: str, *children: object) -> Html:
    """Parts that the script fetches again every second; each child has an id."""
    lost = note("No answer from penstock ui: it has ended, or is busy. What is shown is not new.", kind="warning")
    lost = element("div", lost, id="no-answer", role="status", hidden=True)
    return element("div", lost, element("div", *children, id="live", data_live=address))


def panel(anchor: str, title: str, *children: object) -> Html:
    """A part of a page with a heading and an id of its own."""
    heading = element("h2", title, id=f"{anchor}-title")
    return element("section", heading, *children, id=anchor, aria_labelledby=f"{anchor}-title")


def link(text: object, path: str, key: str | None = None, class_: str | None = None, **query: object) -> Html:
    """A link; `key` is the key that follows it. Parameters that are None or empty are left out."""
    more = {name: value for name, value in query.items() if value not in (None, "")}
    hint = element("kbd", key) if key else None
    return element("a", text, hint, href=path + (f"?{urlencode(more)}" if more else ""), data_key=key, class_=class_)


def place_line(name: str, place: str) -> Html | None:
    """Path or URL below the title, unless it is the title."""
    return element("p", place, class_="lead") if place != name else None


def badge(text: str, kind: str) -> Html:
    """A word that tells a state; `kind` is good, bad or plain."""
    return element("span", text, class_=f"badge {kind}")


def field_box(label: str, name: str, value: object = "", *, key: str | None = None, **more: object) -> Html:
    """A labelled input."""
    hint = element("kbd", key) if key else None
    shown = "" if value is None else str(value)
    box = element("input", id=f"field-{name}", name=name, value=shown, data_key=key, autocomplete="off", **more)
    return element("label", element("span", label, hint), box, class_="field")


def form(action: str, *children: object, label: str) -> Html:
    return element("form", *children, action=action, method="get", role="search", aria_label=label, class_="form")


def failure(title: str, message: str, *, crumbs: Sequence[Crumb] = (), advice: object = None) -> str:
    """A page that says what is wrong."""
    return document(title, note(escape(message), kind="error"), advice, crumbs=crumbs)


def _help() -> Html:
    rows = [element("tr", element("th", element("kbd", key), scope="row"), element("td", what)) for key, what in KEYS]
    close = element("form", element("button", "Close", autofocus=True), method="dialog")
    table = element("table", element("tbody", *rows))
    return element(
        "dialog", element("h2", "Keys", id="help-title"), table, close, id="help", aria_labelledby="help-title"
    )
