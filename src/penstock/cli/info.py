"""`penstock info STORE`: content and origin of a store."""

from __future__ import annotations

from collections.abc import Iterator
from json import JSONDecoder
from textwrap import shorten
from typing import Annotated, Any

import typer

from penstock._amounts import counted
from penstock.chat.templates import built_in_name
from penstock.cli.console import emit, fact_table, found_problems, print_json, print_table, warn, working
from penstock.cli.options import JsonOption, StoreArgument, command
from penstock.cli.prepare import store_lines
from penstock.corpus.prepare import bad_rows_of
from penstock.errors import DataError
from penstock.files.filesystems import shown
from penstock.store import describe, open_store, versions
from penstock.store.manifest import is_store

_MOST_FILES = 10
_HASHES = ("template", "tokenizer", "version")
_LONG = 100


@command()
def info(
    store: StoreArgument,
    version: Annotated[int | None, typer.Option(help="An older version.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show rows, tokens, lengths, columns, versions and origin of a store; with --verify, check every byte of it.

    Exit codes: 0 success; 1 an error; 3 with --verify: a file is damaged or missing.
    """
    try:
        with working(f"checking {shown(store)}" if verify else f"reading {shown(store)}", unit="bytes") as progress:
            opened = open_store(
                store, version, verify="full" if verify else "touch", progress=progress if verify else None
            )
            with opened:
                facts = describe(opened) | {"bad_rows": bad_rows_of(opened)}
                lineage = opened.manifest.lineage
    except DataError as error:
        if not verify:
            raise
        if as_json:
            print_json({"path": shown(store), "verified": False, "problem": str(error)})
        else:
            warn(str(error))
        found_problems()
    facts["left_out"] = list(lineage[-1].notes.get("left_out", ())) if lineage else []
    facts["versions"] = [
        {"version": each.version, "rows": each.rows, "tokens": each.tokens, "created": each.created}
        for each in (versions(store) if is_store(opened.home) else ())
    ]
    if verify:
        facts["verified"] = True

    emit(facts, lambda: print_table(fact_table([*store_lines(facts), *_lines(facts)])), as_json=as_json)


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Figures and names; `--json` has fingerprints and the options of all steps."""
    yield "rows", f"{facts['rows']:,}", ""
    inputs = facts["inputs"][:_MOST_FILES]
    if more := len(facts["inputs"]) - len(inputs):
        inputs = [*inputs, f"and {counted(more, 'more file')}"]
    listed = {
        "columns": [f"{name}, {kind.replace('item: ', '')}" for name, kind in facts["columns"].items()],
        "tokenizer": [facts["tokenizer_name"] or facts["tokenizer"] or "not known"],
        "template": [_template_name(facts["template"])] if facts["template"] else [],
        "made of": inputs,
        "left out": facts["left_out"],
        "bad rows": [f"{counted(rows, 'row')} left out: {reason}" for reason, rows in facts["bad_rows"].items()],
        "steps": [step_text(step) for step in facts["transforms"]],
        "created": [facts["created"]] if facts["created"] else [],
        "versions": [
            f"{each['version']}: {counted(each['rows'], 'row')}, {each['created']}"
            + "  (this one)" * (each["version"] == facts["version"])
            for each in facts["versions"]
        ],
        "checksums": ["all right"] if facts.get("verified") else [],
    }
    for name, lines in listed.items():
        yield from ((name if number == 0 else "", "", line) for number, line in enumerate(lines))


def _template_name(fingerprint: str) -> str:
    return built_in_name(fingerprint) or f"not a built-in one ({fingerprint[:8]})"


def step_text(step: str) -> str:
    """`FormatChat, train_on assistant, truncation error`: class and plain options of a described transform."""
    try:
        facts, _ = JSONDecoder().raw_decode(step)
        name = facts.pop("transform")
    except (ValueError, KeyError, AttributeError):
        return shorten(step, _LONG, placeholder=" ...")
    plain = {key: value for key, value in facts.items() if isinstance(value, str | int) and key not in _HASHES}
    return ", ".join([name, *(f"{key} {str(value).lower()}" for key, value in plain.items())])
