"""`penstock report STORE|CONFIG|RUN -o report.html`: one page about data, that opens from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import emit, say, working
from penstock.cli.options import JsonOption, command
from penstock.errors import ConfigError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import output_place, shown_place
from penstock.files.objects import open_bucket
from penstock.report import build_report


@command()
def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="STORE|CONFIG|RUN",
            help="A store (also a URL), a YAML or JSON file that describes a loader, or the metrics file of a run.",
        ),
    ],
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="A second one, side by side.")] = None,
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = "report.html",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="T", help="For a store whose own tokenizer is not found.")
    ] = None,
    quarantine: Annotated[
        str | None, typer.Option(metavar="FILE", help="Bad rows of a store, if not in STORE.quarantine.jsonl.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=200, help="Rows of a store that are shown.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of the draw of rows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write a self-contained page about a store, the plan of a loader, or a run; it opens without a network.

    Lengths are those of all rows; tokens are counted in a sample of rows, as the page says.
    """
    place = output_place(out, "--out")
    path = shown_place(place)
    if isinstance(place, Path) and place.is_dir():
        raise ConfigError(f"--out {out} is a directory; name a file, such as {place / 'report.html'}")
    given: dict[str, Any] = {"tokenizer": tokenizer, "quarantine": quarantine, "samples": samples, "seed": seed}
    if not isinstance(place, Path):
        bucket, key = open_bucket(place)
        if not key:
            raise ConfigError(f"--out {path} is a bucket; name an object in it, such as {path}/report.html")
    with working(f"writing {path}"):
        made = build_report(target, other, **given).encode()
    if isinstance(place, Path):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, made)
    else:
        bucket.write(key, made)
    facts = {"page": path, "bytes": len(made)}
    emit(facts, lambda: say(f"{path}: {len(made) / 1e3:,.0f} kB"), as_json=as_json)
