"""Page with rows of a store or of files: browse, search by text and by length, go to a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock._amounts import counted
from penstock.html import Html, element, escape, facts, note, shown_number, visible
from penstock.memory.budget import format_bytes
from penstock.ui.frame import document, field_box, form, link, place_line
from penstock.ui.matches import MOST_QUERY, Query
from penstock.ui.params import Params
from penstock.ui.rows import PAGE_ROWS, Deadline, RowPage, RowPlace, RowSummary, RowTable
from penstock.ui.site import Site
from penstock.ui.targets import Target

_MOST_FILES = 200


def row_list(site: Site, target: Target, given: Mapping[str, str]) -> str:
    """Rows from a place on, or those that match a query."""
    params, table = Params(given), site.rows(target.number)
    query = Query(params.text("q", MOST_QUERY).strip("\r\n"), params.number("min"), params.number("max"))
    wanted, file = params.number("row"), params.number("file") or 0
    unfinished: Html | None = None
    at = RowPlace.parse(given["at"]) if given.get("at") else RowPlace(file)
    if wanted is not None:
        at, found = table.find(file, wanted, Deadline())
        if not found:
            unfinished = _go_on_to(target, at, wanted)
    page = (
        table.search(query, at, PAGE_ROWS, Deadline())
        if query
        else RowPage([], at, None)
        if unfinished
        else table.page(at, PAGE_ROWS)
    )
    files = table.files()
    return document(
        target.name,
        place_line(target.name, target.shown),
        _facts(site, target),
        _forms(target, table, query, at, files),
        _lengths(site, target, query) if target.kind == "store" else _file_links(target, files, at.file, query),
        unfinished,
        _found_line(target, page, query, files) if query else None,
        _list(target, page, query, table.unit),
        _turns(target, table, page, query, at),
        crumbs=[(target.name, None)],
    )


def _facts(site: Site, target: Target) -> Html | None:
    if target.kind != "store":
        return None
    rows = site.store(target.number)
    store = rows.store
    manifest = store.manifest
    shown: list[Sequence[object]] = [("rows", len(store))]
    if manifest.tokens is not None:
        shown.append(("tokens", manifest.tokens))
    if manifest.supervised is not None and manifest.tokens:
        shown.append(("supervised", f"{manifest.supervised / manifest.tokens:.1%}", "of the tokens have a loss"))
    shown.append(("size", format_bytes(manifest.bytes), counted(len(manifest.shards), "shard")))
    shown.append(("version", manifest.version, (manifest.created or "").replace("T", " ").removesuffix("Z")))
    if rows.vocabulary is not None:
        shown.append(("tokenizer", rows.vocabulary.name, f"{len(rows.vocabulary):,} tokens"))
    reason = rows.without_text
    return Html(facts(shown) + escape(note(reason, kind="warning") if reason else None))


def _forms(
    target: Target, table: RowTable, query: Query, at: RowPlace, files: Sequence[tuple[str, int | None]]
) -> Html:
    unit = table.unit
    search = form(
        target.address,
        element(
            "label",
            element("span", "Search text", element("kbd", "/")),
            element("input", id="field-q", name="q", value=query.text, type="search", data_key="/", autocomplete="off"),
            class_="field wide",
        ),
        field_box(f"At least ({unit})", "min", query.shortest, inputmode="numeric", pattern="[0-9]*"),
        field_box(f"At most ({unit})", "max", query.longest, inputmode="numeric", pattern="[0-9]*"),
        element("button", "Search"),
        link("Clear", target.address) if query else None,
        label="Search rows",
    )
    rows = files[at.file][1] if at.file < len(files) else None
    hint = f"Go to row (0 to {rows - 1:,})" if rows else "Go to row"
    goto = form(
        target.address,
        element("input", type="hidden", name="file", value=at.file) if at.file else None,
        field_box(hint, "row", "", key="g", inputmode="numeric", pattern="[0-9]*", required=True),
        element("button", "Go"),
        label="Go to a row",
    )
    return element("div", search, goto, class_="forms")


def _list(target: Target, page: RowPage, query: Query, unit: str) -> Html:
    if not page.rows:
        return element("p", "No rows here.", class_="note plain") if not query else Html("")
    longest = max((row.length or 0 for row in page.rows), default=0)
    items = [element("li", _entry(target, row, query, unit, longest)) for row in page.rows]
    return element("ol", *items, class_="rows", aria_label="Rows")


def _entry(target: Target, row: RowSummary, query: Query, unit: str, longest: int) -> Html:
    number = element("span", f"row {row.place.row:,}", class_="number")
    if row.problem:
        length = element("span", "not a row", class_="length")
        text = element("span", note(row.problem, kind="error"), marked(row.text, query), class_="text")
    else:
        said = "" if row.length is None else f"{row.length:,} {unit}"
        said += f", {row.supervised:,} supervised" if row.supervised is not None else ""
        length = element("span", said, _bar(row, longest), class_="length")
        text = element("span", marked(row.text, query), class_="text")
    where = element(
        "span", number, element("span", f" file {row.place.file}", class_="soft") if row.place.file else None
    )
    kept: dict[str, Any] = {"q": query.text, "min": query.shortest, "max": query.longest}
    return link([where, length, text], f"{target.address}/row/{row.place}", class_="entry", **kept)


def _bar(row: RowSummary, longest: int) -> Html | None:
    """Length of a row against the longest of the page, its supervised part in colour."""
    if not row.length or not longest:
        return None
    whole = 100 * row.length / longest
    trained = whole * (row.supervised or 0) / row.length
    return element(
        "svg",
        element("rect", x="0", y="0", width=f"{whole:.1f}", height="5", class_="all"),
        element("rect", x="0", y="0", width=f"{trained:.1f}", height="5", class_="trained"),
        viewBox="0 0 100 5",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def marked(text: str, query: Query) -> Html:
    """Text with what was searched for marked."""
    if not query.text:
        return escape(text)
    parts, at, low = [], 0, text.lower() if query.folds else text
    if len(low) != len(text):
        low = text  # a letter whose lower case is longer: rather no mark than a wrong one
    while (found := low.find(query.text, at)) >= 0:
        parts += [escape(text[at:found]), element("mark", text[found : found + len(query.text)])]
        at = found + len(query.text)
    return Html("".join([*parts, escape(text[at:])]))


def _found_line(target: Target, page: RowPage, query: Query, files: Sequence[tuple[str, int | None]]) -> Html:
    """Result of a search: how many, and how far it looked."""
    said = f"{counted(len(page.rows), 'row')} found. Searched {_span(page, files)}"
    if page.last is None:
        return element("p", f"{said}, to the end.", class_="sentence", role="status")
    more = link("Go on", target.address, "n", at=page.last, q=query.text, min=query.shortest, max=query.longest)
    return element("p", f"{said}. ", more, class_="sentence", role="status")


def _span(page: RowPage, files: Sequence[tuple[str, int | None]]) -> str:
    last = page.last
    if len(files) > 1:
        end = f"row {last.row:,} of file {last.file}" if last is not None else f"file {len(files) - 1}"
        return f"from row {page.first.row:,} of file {page.first.file} to {end}"
    rows = files[0][1]
    end = f"{last.row:,}" if last is not None else f"{rows:,}" if rows is not None else "the last"
    whole = f" of {rows:,}" if rows is not None else ""
    return f"rows {page.first.row:,} to {end}{whole}"


def _turns(target: Target, table: RowTable, page: RowPage, query: Query, at: RowPlace) -> Html:
    """Links to the pages before and after."""
    kept: dict[str, Any] = {"q": query.text, "min": query.shortest, "max": query.longest}
    before = after = None
    if query:
        if page.last is not None and page.rows:
            after = link("More", target.address, at=page.last, **kept)
    else:
        if page.last is not None:
            after = link("Next page", target.address, "n", at=page.last)
        if page.rows and page.rows[0].place.row > 0:
            first = max(0, page.rows[0].place.row - PAGE_ROWS)
            before = link("Previous page", target.address, "p", row=first, file=at.file or None)
    return element("nav", before, after, class_="turns", aria_label="Pages")


def _go_on_to(target: Target, at: RowPlace, row: int) -> Html:
    more = link("Go on", target.address, "n", row=row, file=at.file or None)
    return element(
        "p",
        f"Row {row:,} is further on: the file has no index, and was read to row {at.row:,} so far. ",
        more,
        class_="sentence",
        role="status",
    )


def _file_links(target: Target, files: Sequence[tuple[str, int | None]], here: int, query: Query) -> Html | None:
    if len(files) < 2:
        return None
    low = max(0, min(here - _MOST_FILES // 2, len(files) - _MOST_FILES))
    links = [
        element(
            "li",
            element(
                "a",
                visible(name.rpartition("/")[2], 60),
                href=f"{target.address}?at={RowPlace(number)}",
                aria_current="true" if number == here else None,
            ),
        )
        for number, (name, _) in list(enumerate(files))[low : low + _MOST_FILES]
    ]
    return element("nav", element("ul", *links, class_="chips"), aria_label=f"{shown_number(len(files))} files")


# -- lengths of a store ------------------------------------------------------------------------------------------------


def _lengths(site: Site, target: Target, query: Query) -> Html | None:
    """Links that search by length, each with its number of rows."""
    ranges = site.store(target.number).length_counts()
    if ranges is None:
        return None
    links = []
    for low, high, rows, about in ranges:
        here = (query.shortest, query.longest) == (low, high) and not query.text
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        size = element("span", f"{'about ' * about}{rows:,}", class_="count")
        address = f"{target.address}?min={low}&max={high}"
        links.append(element("li", element("a", span, size, href=address, aria_current="true" if here else None)))
    return element("nav", element("ul", *links, class_="chips"), aria_label="Rows by number of tokens")
