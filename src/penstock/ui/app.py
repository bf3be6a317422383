"""Application: routes to pages, errors as pages. Starlette is imported here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from penstock._optional import require
from penstock.errors import PenstockError
from penstock.html import Html, element, note
from penstock.ui.frame import ASSETS, badge, document, failure, link, live
from penstock.ui.guard import Access, Application, Guard
from penstock.ui.params import read_number
from penstock.ui.plan_page import opened_panel, opening_panel, plan_facts, plan_page, step_page, trace_page
from penstock.ui.queue_page import queue_line, queue_page, queue_panels
from penstock.ui.row_list import row_list
from penstock.ui.row_page import row_page
from penstock.ui.run_page import run_line, run_page, run_panels, state_badge
from penstock.ui.site import Site
from penstock.ui.targets import KIND_NAMES, Target

log = logging.getLogger(__name__)
_TYPES = {".css": "text/css", ".js": "text/javascript"}
Page = Callable[[Any], str]


def make_app(site: Site, access: Access) -> Application:
    """The application, behind its guard."""
    routing = require("starlette.routing", "ui")
    applications = require("starlette.applications", "ui")
    responses = require("starlette.responses", "ui")

    def answering(page: Page, *, part: bool = False) -> Callable[[Any], Any]:
        """Endpoint of a page. It is no coroutine, so Starlette runs it on a thread."""

        def endpoint(request: Any) -> Any:
            status, text = _told(page, request, site, part=part)
            return responses.HTMLResponse(text, status_code=status)

        return endpoint

    def asset(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in ASSETS:
            return responses.PlainTextResponse("There is no such file.", status_code=404)
        content = files(ASSETS[name]).joinpath("assets" if ASSETS[name] == "penstock.ui" else "").joinpath(name)
        return responses.Response(content.read_bytes(), media_type=_TYPES[f".{name.rpartition('.')[2]}"])

    def to_step(request: Any) -> Any:
        number = read_number("step", request.query_params.get("step", "")) or 0
        return responses.RedirectResponse(f"/t/{int(request.path_params['target'])}/step/{number}", status_code=303)

    pages = _pages(site)
    routes = [
        routing.Route("/assets/{name}", asset, methods=["GET"]),
        routing.Route("/t/{target:int}/step", _named(to_step, responses), methods=["GET"]),
        *(routing.Route(path, answering(page), methods=["GET"]) for path, page in pages.items()),
        *(routing.Route(path, answering(page, part=True), methods=["GET"]) for path, page in _parts(site).items()),
        routing.Route("/{rest:path}", answering(_missing), methods=["GET"]),
    ]
    return Guard(applications.Starlette(routes=routes), access)


def _pages(site: Site) -> dict[str, Page]:
    return {
        "/": lambda request: overview(site),
        "/t/{target:int}": lambda request: _first_page(site, request),
        "/t/{target:int}/row/{place}": lambda request: row_page(
            site, _target(site, request), request.path_params["place"], request.query_params
        ),
        "/t/{target:int}/step/{step}": lambda request: step_page(
            site, _target(site, request), request.path_params["step"]
        ),
        "/t/{target:int}/trace": lambda request: trace_page(site, _target(site, request), request.query_params),
    }


def _parts(site: Site) -> dict[str, Page]:
    """Parts of pages that the script fetches again."""
    return {
        "/live": lambda request: "".join(overview_panels(site)),
        "/t/{target:int}/live": lambda request: _live(site, request),
    }


def _first_page(site: Site, request: Any) -> str:
    target = _target(site, request)
    if target.kind == "loader":
        return plan_page(site, target)
    if target.kind == "run":
        return run_page(site, target)
    if target.kind == "queue":
        return queue_page(site, target)
    return row_list(site, target, request.query_params)


def _live(site: Site, request: Any) -> str:
    target = site.target(_target(site, request).number, "run", "queue", "loader")
    if target.kind == "run":
        return "".join(run_panels(site.run(target.number).look()))
    if target.kind == "queue":
        return "".join(queue_panels(site.queue(target.number).look()))
    view = site.plan(target.number)
    plan = view.plan(0.0)
    if plan is None:
        return opening_panel(view.opening_seconds)
    return opened_panel(target) if request.query_params.get("opening") else plan_facts(plan)


def _target(site: Site, request: Any) -> Any:
    return site.target(int(request.path_params["target"]))


def _missing(request: Any) -> str:
    raise LookupError("There is no such page.")


def _told(page: Page, request: Any, site: Site, *, part: bool) -> tuple[int, str]:
    """Status and text of a page. An error in data is a page that names it, and the server goes on."""
    try:
        return 200, page(request)
    except LookupError as error:
        status, title, message = 404, "Not found", str(error)
        if not isinstance(error, PenstockError) and type(error) is not LookupError:
            log.exception("a page failed")
            status, title, message = 500, "This page failed", f"{type(error).__name__}: {error}"
    except (PenstockError, OSError) as error:
        status, title, message = 404, "Cannot be shown", str(error)
    except Exception as error:
        log.exception("a page failed")
        status, title, message = 500, "This page failed", f"{type(error).__name__}: {error}"
    if part:
        return status, note(message, kind="error").replace("<p ", '<p id="state" ', 1)
    return status, failure(title, message, crumbs=[(title, None)])


def _named(endpoint: Callable[[Any], Any], responses: Any) -> Callable[[Any], Any]:
    """Endpoint whose errors about parameters are pages."""

    def guarded(request: Any) -> Any:
        try:
            return endpoint(request)
        except PenstockError as error:
            return responses.HTMLResponse(failure("Cannot be shown", str(error)), status_code=404)

    return guarded


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
