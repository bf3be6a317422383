"""Overview of all targets, each with its state in a line."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import PenstockError
from penstock.html import Html, element
from penstock.ui.frame import badge, document, link, live
from penstock.ui.queue_page import queue_line
from penstock.ui.run_page import run_line, state_badge
from penstock.ui.site import Site
from penstock.ui.targets import KIND_NAMES, Target


def overview(site: Site) -> str:
    return document(
        f"{len(site.targets):,} targets" if len(site.targets) != 1 else "1 target",
        live("/live", *overview_panels(site)),
    )


def overview_panels(site: Site) -> Iterator[Html]:
    """The list of targets."""
    items = [element("li", _entry(site, target)) for target in site.targets]
    yield element("div", element("ol", *items, class_="rows pair", aria_label="Targets"), id="targets")


def _entry(site: Site, target: Target) -> Html:
    try:
        state, said = _state(site, target)
    except (PenstockError, OSError) as error:
        state, said = badge("unreadable", "bad"), str(error)
    where = element("span", f" {target.shown}", class_="soft") if target.shown != target.name else None
    text = element(
        "span", element("span", target.name, class_="kind"), " ", state, where, element("br"), said, class_="text"
    )
    return link([element("span", KIND_NAMES[target.kind], class_="number"), text], target.address, class_="entry")


def _state(site: Site, target: Target) -> tuple[Html | None, str]:
    if target.kind == "store":
        store = site.store(target.number).store
        return None, f"{len(store):,} rows, {store.tokens:,} tokens"
    if target.kind == "files":
        files = site.rows(target.number).files()
        rows = f", {files[0][1]:,} rows" if len(files) == 1 and files[0][1] is not None else ""
        return None, f"{len(files):,} files{rows}" if len(files) != 1 else f"1 file{rows}"
    if target.kind == "run":
        record = site.run(target.number).look()
        return state_badge(record), run_line(record)
    if target.kind == "queue":
        return None, queue_line(site.queue(target.number).look())
    return None, "rows of a step, steps of a row"
