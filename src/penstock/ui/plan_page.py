"""Pages of a plan: its sources, the rows of a step, and the steps of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock._amounts import counted
from penstock.errors import ConfigError
from penstock.html import Html, element, facts, note, table
from penstock.html.charts import bar_chart
from penstock.ui.frame import badge, document, field_box, form, link, live, panel, place_line
from penstock.ui.params import Params, read_number
from penstock.ui.plans import OpenedPlan, StepView
from penstock.ui.site import Site, same_place
from penstock.ui.targets import Target

_MOST_PARTS = 500
_MOST_EPOCHS = 100


def plan_page(site: Site, target: Target) -> str:
    """Sources of the plan, and the ways into it."""
    plan = site.plan(target.number).plan()
    if plan is None:
        return _opening(site, target)
    rows = [(name, plan.rows(number), plan.tokens(number)) for number, name in enumerate(plan.names)]
    arguments = [(key, str(value)) for key, value in plan.config.shown_tree.items()]
    return document(
        target.name,
        place_line(target.name, target.shown),
        live(f"{target.address}/live", plan_facts(plan)),
        _forms(target, plan),
        panel("sources", "Sources", table(rows, ["source", "rows", "tokens"], caption="Sources of the plan")),
        panel("options", "Options", table(arguments, ["option", "value"], caption="As the file has them")),
        crumbs=[(target.name, None)],
        status=link("First step", f"{target.address}/step/0", "n"),
    )


def plan_facts(plan: OpenedPlan) -> Html:
    """Figures of the plan; the number of steps comes when it is counted."""
    steps = plan.counted_steps
    shown = [
        ("steps", steps if steps is not None else "?" if plan.problem else "counting", "of the first epoch"),
        ("samples a step", plan.plan.global_batch, f"on {counted(plan.world_size, 'rank')}"),
        ("sources", len(plan.names)),
        ("fingerprint", plan.plan.fingerprint[:8], "of the plan"),
    ]
    problem = note(plan.problem, kind="error") if plan.problem else None
    return element("div", facts(shown), problem, id="plan-facts")


def step_page(site: Site, target: Target, number: str) -> str:
    """Rows of a step."""
    wanted = read_number("step", number)
    plan = site.plan(target.number).plan()
    if plan is None:
        return _opening(site, target)
    step = plan.step(wanted or 0, _MOST_PARTS)
    shares: dict[str, int] = dict.fromkeys(plan.names, 0)
    for part in step.parts:
        shares[part.source] += part.tokens
    packed = plan.config.arguments.get("packing") not in (None, "none", False)
    shown: list[tuple[object, ...]] = [
        ("epoch", step.epoch),
        ("samples", step.samples),
        ("tokens", step.tokens),
        ("parts", len(step.parts) + step.more_parts, "documents, or pieces of them"),
    ]
    if step.places and not packed:
        shown.append(("padding", f"{1 - step.tokens / step.places:.1%}", "if padded to the longest"))
    return document(
        f"step {step.number:,}",
        _turns(target, step),
        _forms(target, plan),
        note("This step is skipped by an edit of the plan: it is not delivered.", kind="warning")
        if step.skipped
        else None,
        facts(shown),
        panel("mixture", "Tokens by source", bar_chart(sorted(shares.items()), label="Tokens by source", unit="tokens"))
        if len(plan.names) > 1
        else None,
        panel("parts", "Rows", _parts(site, target, step)),
        crumbs=[(target.name, target.address), (f"step {step.number:,}", None)],
        status=badge("skipped", "bad") if step.skipped else None,
    )


def trace_page(site: Site, target: Target, given: Mapping[str, str]) -> str:
    """Steps that use a row."""
    params = Params(given)
    plan = site.plan(target.number).plan()
    if plan is None:
        return _opening(site, target)
    row, epochs = params.number("row"), params.number("epochs") or 1
    if row is None:
        raise ConfigError("which row? Give a source and a row number")
    if not 1 <= epochs <= _MOST_EPOCHS:
        raise ConfigError(f"epochs: expected 1 to {_MOST_EPOCHS}, got {epochs}")
    source = params.text("source") or plan.names[0]
    if (number := params.number("store")) is not None:
        source, row = _in_plan(plan, site.target(number, "store"), row)
    uses = plan.trace(source, row, epochs)
    store, within = plan.origin(plan.names.index(source), row)
    lines = [
        (
            link(f"step {use.step:,}", f"{target.address}/step/{use.step}"),
            use.epoch,
            use.sample,
            badge("not delivered", "bad") if use.skipped else "delivered",
        )
        for use in uses
    ]
    opened = site.store_at(store)
    at = f"row {within:,} of {store}"
    shown = element("a", at, href=f"{opened.address}/row/0-0-{within}") if opened is not None else at
    said = (
        f"{source} row {row:,} is used {counted(len(uses), 'time')} in {counted(epochs, 'epoch')} of the source. It is "
    )
    return document(
        f"{source} row {row:,}",
        _forms(target, plan, source, row, epochs),
        element("p", said, shown, ".", class_="sentence"),
        panel("uses", "Steps", table(lines, ["step", "epoch", "sample", ""], caption="Steps that use the row"))
        if lines
        else note("No step uses it: a packed plan drops what does not fit, and an epoch may end before the last rows."),
        crumbs=[(target.name, target.address), (f"{source} row {row:,}", None)],
    )


def opening_panel(seconds: float) -> Html:
    """State of a plan that is being opened."""
    said = (
        f"Opening the plan for {seconds:.0f} s. Sources that are not prepared yet are tokenized into penstock's cache."
    )
    return element("p", said, class_="sentence", role="status", id="opening")


def opened_panel(target: Target) -> Html:
    return element("p", "The plan is open. ", link("Show it", target.address, "n"), class_="sentence", id="opening")


def _opening(site: Site, target: Target) -> str:
    seconds = site.plan(target.number).opening_seconds
    return document(
        target.name,
        place_line(target.name, target.shown),
        live(f"{target.address}/live?opening=1", opening_panel(seconds)),
        crumbs=[(target.name, None)],
        status=badge("opening", "plain"),
    )


def _turns(target: Target, step: StepView) -> Html:
    address = f"{target.address}/step"
    before = link("Previous step", f"{address}/{step.number - 1}", "p") if step.number else None
    return element(
        "nav",
        before,
        link("Next step", f"{address}/{step.number + 1}", "n"),
        link("To the plan", target.address, "u"),
        class_="turns",
        aria_label="Steps",
    )


def _forms(target: Target, plan: OpenedPlan, source: str = "", row: int | None = None, epochs: int = 1) -> Html:
    digits: dict[str, Any] = {"inputmode": "numeric", "pattern": "[0-9,]*", "required": True}
    goto = form(
        f"{target.address}/step",
        field_box("What is in step", "step", "", key="g", **digits),
        element("button", "Show"),
        label="Go to a step",
    )
    options = [element("option", name, value=name, selected=name == source) for name in plan.names]
    picked = element("label", element("span", "Source"), element("select", *options, name="source"), class_="field")
    trace = form(
        f"{target.address}/trace",
        picked if len(plan.names) > 1 else None,
        field_box("Where does row", "row", row, key="/", **digits),
        field_box("go, in epochs", "epochs", epochs, **digits),
        element("button", "Trace"),
        label="Trace a row",
    )
    return element("div", goto, trace, class_="forms even")


def _parts(site: Site, target: Target, step: StepView) -> Html:
    items = []
    for part in step.parts:
        opened = site.store_at(part.store)
        said = [
            element("span", f"sample {part.sample}", class_="number"),
            element("span", f"{part.tokens:,} tokens", class_="length"),
            element(
                "span",
                element("span", f"{part.source} row {part.row:,}", class_="kind"),
                f" tokens {part.start:,} to {part.start + part.tokens:,}" if part.start else None,
                f" ({part.store} row {part.store_row:,})" if part.store_row != part.row else None,
                element("br"),
                part.text,
                class_="text",
            ),
        ]
        if opened is not None:
            items.append(link(said, f"{opened.address}/row/0-0-{part.store_row}", class_="entry"))
        else:
            items.append(link(said, f"{target.address}/trace", class_="entry", source=part.source, row=part.row))
    more = note(f"{step.more_parts:,} more parts are not shown.") if step.more_parts else None
    return Html(element("ol", *(element("li", item) for item in items), class_="rows") + (more or ""))


def _in_plan(plan: OpenedPlan, store: Target, row: int) -> tuple[str, int]:
    """Source and row of a row of a store."""
    for number, name in enumerate(plan.names):
        before = 0
        for each in plan.stores(number):
            if same_place(each.shown, store.place):
                return name, before + row
            before += len(each)
    raise ConfigError(f"{store.shown} is not a source of this plan; it has {list(plan.names)}")
