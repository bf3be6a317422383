"""`penstock cache URL`: the content of a shared cache, and its removal."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from penstock.cli.console import emit, fact_table, print_table, working
from penstock.cli.options import JsonOption, command
from penstock.connections.shared_cache import open_cache
from penstock.memory.budget import format_bytes

_KINDS = {"store": "stores", "file": "tables", "part": "parts"}


@command()
def cache(
    url: Annotated[str, typer.Argument(metavar="URL", help="redis://, s3://, gs://, az://, or a directory.")],
    clear: Annotated[bool, typer.Option("--clear", help="Delete the entries.")] = False,
    older_than_days: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="Only entries that were not used for so long.")
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Show how much a shared cache holds, or delete it.

    \b
    penstock cache s3://bucket/cache
    penstock cache redis://host:6379/0 --clear --older-than-days 30
    """
    backend = open_cache(url)
    limit = time.time() - older_than_days * 24 * 3600
    entries = []
    with working(f"listing {backend!r}", unit="entries") as progress:
        for number, entry in enumerate(backend.entries(), 1):
            progress(number)
            if entry.used <= limit or not older_than_days:
                entries.append(entry)
    counts = {name: sum(entry.key.startswith(f"{kind}-") for entry in entries) for kind, name in _KINDS.items()}
    size = sum(entry.size for entry in entries)
    facts: dict[str, Any] = {"cache": repr(backend), **counts, "bytes": size}
    if clear:
        # Lists first: a store that lacks parts would be fetched in vain.
        entries.sort(key=lambda entry: entry.key.startswith("part-"))
        facts["deleted"] = 0
        with working(f"clearing {backend!r}", unit="entries") as progress:
            for number, entry in enumerate(entries):
                progress(number, len(entries))
                facts["deleted"] += backend.delete(entry.key)
    lines = [(name, str(number), "") for name, number in counts.items()]
    lines.append(("size", format_bytes(size), f"{facts['cache']}{', deleted' if clear else ''}"))
    emit(facts, lambda: print_table(fact_table(lines)), as_json=as_json)
