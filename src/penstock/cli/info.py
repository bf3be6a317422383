"""`penstock info STORE`: content and origin of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.console import count, emit, fact_table, print_table
from penstock.cli.options import JsonOption, StoreArgument, command
from penstock.cli.prepare import store_table
from penstock.corpus.prepare import bad_rows_of
from penstock.store import describe, open_store, versions

_MOST_FILES = 10


@command()
def info(
    store: StoreArgument,
    version: Annotated[int | None, typer.Option(help="An older version.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show rows, tokens, lengths, columns, versions and origin of a store; with --verify, check every byte of it."""
    with open_store(store, version, verify="full" if verify else "touch") as opened:
        facts = describe(opened) | {"bad_rows": bad_rows_of(opened)}
        lineage = opened.manifest.lineage
    facts["left_out"] = list(lineage[-1].notes.get("left_out", ())) if lineage else []
    facts["versions"] = [
        {"version": each.version, "rows": each.rows, "tokens": each.tokens, "created": each.created}
        for each in versions(store)
    ]
    if verify:
        facts["verified"] = True

    def show() -> None:
        print_table(store_table(facts))
        print_table(fact_table(_rows(facts)))

    emit(facts, show, as_json=as_json)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "rows", f"{facts['rows']:,}"
    yield "columns", ", ".join(f"{name} {kind}" for name, kind in facts["columns"].items())
    yield "created", f"{facts['created']}"
    yield "tokenizer", facts["tokenizer"] or "not known"
    if facts["template"]:
        yield "template", facts["template"]
    inputs = facts["inputs"][:_MOST_FILES]
    if more := len(facts["inputs"]) - len(inputs):
        inputs = [*inputs, f"and {count(more, 'more file')}"]
    listed = {
        "made of": inputs,
        "left out": facts["left_out"],
        "bad rows": [f"{count(rows, 'row')} left out: {reason}" for reason, rows in facts["bad_rows"].items()],
        "steps": facts["transforms"],
        "versions": [
            f"{each['version']}: {count(each['rows'], 'row')}, {each['created']}"
            + "  (this one)" * (each["version"] == facts["version"])
            for each in facts["versions"]
        ],
        "checksums": ["all right"] if facts.get("verified") else [],
    }
    for name, lines in listed.items():
        yield from ((name if number == 0 else "", line) for number, line in enumerate(lines))
