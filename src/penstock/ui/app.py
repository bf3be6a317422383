"""Application: routes to pages, errors as pages. Starlette is imported here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from penstock._optional import require
from penstock.errors import PenstockError
from penstock.html import note
from penstock.ui.frame import ASSETS, failure
from penstock.ui.guard import Access, Application, Guard
from penstock.ui.overview import overview, overview_panels
from penstock.ui.params import read_number
from penstock.ui.plan_page import opened_panel, opening_panel, plan_facts, plan_page, step_page, trace_page
from penstock.ui.queue_page import queue_page, queue_panels
from penstock.ui.row_list import row_list
from penstock.ui.row_page import row_page
from penstock.ui.run_page import run_page, run_panels
from penstock.ui.site import Site

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
