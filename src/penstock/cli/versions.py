"""`penstock versions STORE`: versions of a store, differences between two, and the current one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock._amounts import counted
from penstock.cli.console import emit, print_table, table, warn, working
from penstock.cli.options import JsonOption, StoreArgument, command
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import shown
from penstock.memory.budget import format_bytes
from penstock.store import Difference, Manifest, checkout, diff
from penstock.store import versions as all_versions
from penstock.store.home import store_home
from penstock.store.manifest import read_manifest

_LONG = 40


@command()
def versions(
    store: StoreArgument,
    new: Annotated[int | None, typer.Argument(metavar="[NEW]", help="With --diff: the version to compare.")] = None,
    old: Annotated[
        int | None,
        typer.Option("--diff", metavar="OLD [NEW]", help="Show what NEW adds to OLD. Default of NEW: the current one."),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--checkout", metavar="N", help="Make version N the current one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the versions of a store with date, origin and size; * marks the current one.

    Versions share shards, so --checkout is instant and loses nothing. A reader that has the store open keeps its
    version.
    """
    if old is not None and number is not None:
        raise ConfigError("--diff and --checkout were both given; expected one of them")
    if new is not None and old is None:
        raise ConfigError(f"expected --diff OLD NEW, got the version {new} without --diff")
    if old is not None:
        with working(f"comparing versions of {shown(store)}"):
            found = diff(store, old, new)
        emit(dataclasses.asdict(found), lambda: print_table(_difference(found)), as_json=as_json)
        return
    if number is not None:
        checkout(store, number)
    with working(f"reading versions of {shown(store)}"):
        facts = _facts(store)
    emit(facts, lambda: print_table(_version_table(facts)), as_json=as_json)
    if facts["problem"] and not as_json:
        warn(facts["problem"])


def _facts(store: str) -> dict[str, Any]:
    found = all_versions(store)
    current, problem = None, None
    try:
        current = read_manifest(store_home(store)).version
    except (DataError, FileNotFoundError) as error:  # the versions still exist: one can be checked out
        problem = str(error)
    return {
        "path": shown(store),
        "current": current,
        "problem": problem,
        "versions": [_version(manifest) for manifest in found],
    }


def _version(manifest: Manifest) -> dict[str, Any]:
    run = manifest.lineage[-1] if manifest.lineage else None
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
        "key": manifest.key,
        "inputs": [file.name for file in run.inputs] if run is not None else [],
        "transforms": list(run.transforms) if run is not None else [],
        "tokenizer": manifest.tokenizer,
        "runs": len(manifest.lineage),
    }


def _version_table(facts: dict[str, Any]) -> Any:
    rows = (
        (
            f"{'*' * (each['version'] == facts['current'])}{each['version']}",
            each["created"],
            f"{each['rows']:,}",
            "-" if each["tokens"] is None else f"{each['tokens']:,}",
            f"{each['shards']:,}",
            format_bytes(each["bytes"]),
            _made_of(each),
        )
        for each in facts["versions"]
    )
    return table([">version", "created", ">rows", ">tokens", ">shards", ">size", "made of"], rows)


def _made_of(each: dict[str, Any]) -> str:
    """`version 1 + part-1.jsonl and 3 more files: ExactDedup, Tokenize`; --json has all of it."""
    inputs = each["inputs"]
    files = f"{inputs[0]} and {counted(len(inputs) - 1, 'more file')}" if len(inputs) > 1 else "".join(inputs)
    steps = ", ".join(map(_name_of, each["transforms"]))
    if not files and not steps:
        files = f"tokenizer {each['tokenizer']}" if each["tokenizer"] else "not known"
    before = f"version {each['parent']} + " if each["runs"] > 1 and each["parent"] is not None else ""
    return before + ": ".join(part for part in (files, steps) if part)


def _name_of(step: str) -> str:
    """The class of a described transform; other descriptions shortened."""
    match = re.match(r'\{.*?"transform":"(\w+)"', step)
    return match[1] if match else step if len(step) <= _LONG else f"{step[:_LONG]}..."


def _difference(found: Difference) -> Any:
    def rows() -> Iterator[tuple[str, str, str]]:
        yield "rows", f"+{found.rows_added:,}", f"-{found.rows_removed:,}"
        yield "tokens", f"+{found.tokens_added:,}", f"-{found.tokens_removed:,}"
        yield "shards", f"+{len(found.shards_added):,}", f"-{len(found.shards_removed):,}"
        for name, (before, after) in found.changed.items():
            yield f"{name} changed", str(before), f"-> {after}"

    return table([f"version {found.old} to {found.new}", ">added", ">removed"], rows())
