"""`penstock queue status | purge | doctor`: what is in a filesystem queue, throw it away, find out what is wrong."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.errors import ConfigError, PenstockError, QueueNotFoundError
from penstock.fsqueue import queue as queues
from penstock.fsqueue.doctor import Diagnosis, Finding, examine
from penstock.fsqueue.layout import list_members
from penstock.fsqueue.queue import Queue, schema_of
from penstock.fsqueue.status import MemberStatus, SplitStatus, Status, find_queue, look
from penstock.memory.budget import format_bytes
from penstock.observe.live import format_seconds

__all__ = ["queue"]

queue = typer.Typer(
    name="queue",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at a filesystem queue, purge it, or have it examined.",
)

PlaceArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A queue, the directory of a dataset (data/NAME), or a config file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_BEATS_PER_LEASE = 5


# -- status ----------------------------------------------------------------------------------------------------------


@queue.command()
def status(
    place: PlaceArgument,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Between the two looks that rates are of; 0: no rates.")
    ] = 1.0,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what waits in each split, how fast it comes and goes, who is at work, and who waits for whom.

    With --json and --watch, one object per line.
    """
    with clear_exits(debug=debug):
        opened = Queue.open(find_queue(place))
        try:
            if as_json:
                for found in _looks(opened, seconds, forever=watch):
                    typer.echo(orjson.dumps(found.to_dict(), default=str, option=0 if watch else orjson.OPT_INDENT_2))
            elif watch and sys.stdout.isatty():
                with Live(console=output(), auto_refresh=False) as live:
                    for found in _looks(opened, seconds, forever=True):
                        live.update(_drawn(found), refresh=True)
            else:
                for found in _looks(opened, seconds, forever=watch):
                    print_table(output(), _drawn(found))
        except KeyboardInterrupt:
            if not watch:
                raise


def _looks(opened: Queue, seconds: float, *, forever: bool) -> Iterator[Status]:
    before = look(opened)
    if seconds == 0 and not forever:
        yield before
        return
    while True:
        time.sleep(seconds or 1.0)
        now = look(opened)
        yield now.since(before)
        if not forever:
            return
        before = now


def _drawn(found: Status) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("queue", Text(str(found.path)))
    facts.add_row("fingerprint", Text(found.fingerprint))
    for name in ("training_type", "vocab_size"):
        if name in found.meta:
            facts.add_row(name, Text(str(found.meta[name])))
    for number, column in enumerate(schema_of(found.meta)):
        role = f", {column.role}" if column.role else ""
        facts.add_row("batches" if number == 0 else "", Text(f"{column.name}: {column.spelling}{role}"))
    parts: list[RenderableType] = [facts, Text(), _split_table(found.splits)]
    if any(split.cursors for split in found.splits):
        parts += [Text(), _cursor_table(found.splits)]
    parts += [Text(), _member_table(found.members) if found.members else Text("nobody is at work")]
    return Group(*parts, Text(), Text(found.advice, style="bold"))


def _split_table(splits: Any) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("split")
    for name in ("ready", "batches", "size", "oldest", "taken", "made", "in/s", "out/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for split in splits:
        table.add_row(
            split.name,
            f"{split.ready_files:,}",
            f"{split.ready_batches:,}",
            format_bytes(split.ready_bytes),
            "-" if split.oldest_seconds is None else format_seconds(split.oldest_seconds),
            f"{split.taken_files:,}",
            f"{split.made_batches:,}",
            _rate(split.published_per_second),
            _rate(split.delivered_per_second),
            Text("; ".join(_remarks(split))),
        )
    return table


def _remarks(split: SplitStatus) -> list[str]:
    remarks = []
    if split.end is not None:
        remarks.append(f"ends after {split.end:,} batches")
    if split.being_written:
        remarks.append(f"{split.being_written} being written")
    if split.aside_files:
        remarks.append(f"{split.aside_files} put aside, see `penstock queue doctor`")
    if split.returned_files:
        remarks.append(f"{split.returned_files} come a second time: their consumer died")
    return remarks


def _cursor_table(splits: Any) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("split", "rank", "read", "done"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split in splits:
        for cursor in split.cursors:
            table.add_row(split.name, f"{cursor.rank} of {cursor.world}", f"{cursor.read:,}", f"{cursor.done:,}")
    return table


def _member_table(members: Any) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("member", "role", "host", "pid", "since", "batches", "lease", ""):
        table.add_column(name, justify="right" if name in ("pid", "batches", "lease") else "left")
    for member in members:
        facts = member.facts
        rank = f" {facts['rank']} of {facts['world']}" if facts.get("order") == "strict" else ""
        table.add_row(
            Text(member.id),
            Text(f"{member.role}{rank}"),
            Text(str(facts.get("host", "?"))),
            Text(str(facts.get("pid", "?"))),
            Text(str(facts.get("since", "?"))),
            f"{member.batches:,}",
            f"{member.lease_seconds:g} s",
            _life(member),
        )
    return table


def _life(member: MemberStatus) -> Text:
    silent = "" if member.silent_seconds is None else f"silent for {format_seconds(member.silent_seconds)}"
    if member.seems_alive:
        return Text("alive" if member.alive or not silent else f"alive, {silent}", style="green")
    return Text("dead" if member.alive is False else silent, style="bold red")


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.1f}"


# -- purge -----------------------------------------------------------------------------------------------------------


@queue.command()
def purge(
    place: PlaceArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while providers or consumers are at work.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Throw a queue away, with all batches that were not consumed. The next prepare.py makes it anew.

    Nothing but a queue is ever removed, and none that somebody works on, unless --force is given.
    """
    with clear_exits(debug=debug, stopped="stopped; nothing was removed"):
        path = find_queue(place)
        if not path.is_dir():
            raise QueueNotFoundError(f"Queue directory not found: {path}; there is nothing to purge")
        if not (path / "queue.json").exists():
            raise ConfigError(f"{path} is no queue: it has no queue.json; nothing was removed")
        facts = _what_goes(path)
        if not yes and not _can_ask():
            raise ConfigError(f"{_told(facts)} would go; to do it where nobody can be asked, pass --yes")
        if not force:
            _refuse_while_alive(path)
        if not yes:
            typer.confirm(f"{_told(facts)} will be removed. Go on?", abort=True, err=True)
        facts["freed_bytes"] = queues.purge(path)
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    else:
        output().print(f"removed {_told(facts)}", markup=False, highlight=False, soft_wrap=True)


def _what_goes(path: Path) -> dict[str, Any]:
    """Files, bytes, and batches that nobody had; as far as the queue can be read."""
    found = [file for file in path.rglob("*") if file.is_file()]
    facts: dict[str, Any] = {"path": str(path), "files": 0, "bytes": 0, "batches": None}
    facts["bytes"] = sum(_size(file) for file in found)
    facts["files"] = sum(file.suffix == ".arrow" or ".arrow." in file.name for file in found)
    try:
        splits = look(Queue.open(path)).splits
    except (PenstockError, OSError):  # damaged: a reason to purge it
        return facts
    facts["batches"] = sum(split.ready_batches + split.taken_batches for split in splits)
    return facts


def _told(facts: dict[str, Any]) -> str:
    batches = "an unknown number of" if facts["batches"] is None else f"{facts['batches']:,}"
    files = f"{facts['files']:,} file{'s' * (facts['files'] != 1)} of batches"
    return f"{facts['path']}: {files}, {format_bytes(facts['bytes'])}, {batches} batches not consumed"


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _refuse_while_alive(path: Path) -> None:
    """Watch the members for a beat; raises if one of them lives."""
    directory = path / "members"
    first = list_members(directory) if directory.is_dir() else {}
    if not first:
        return
    # A living member beats five times in a lease; half a beat more, for a machine that is busy.
    seconds = 1.5 * max(member.lease_seconds for member in first.values()) / _BEATS_PER_LEASE
    _say(f"watching {_members(len(first))} for {seconds:.1f} s")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(0.05, seconds / 10))
        now = list_members(directory)
        alive = [owner for owner, member in now.items() if owner not in first or member.beat != first[owner].beat]
        if alive:
            raise ConfigError(
                f"{_members(len(alive))} of the queue at work ({', '.join(sorted(alive))}); stop them first, see "
                f"`penstock queue status {path}`, or pass --force: they fail then"
            )


def _members(count: int) -> str:
    return f"{count} member{'s' * (count != 1)}"


def _say(text: str) -> None:
    typer.echo(f"penstock: {text}", err=True)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


# -- doctor ----------------------------------------------------------------------------------------------------------


@queue.command()
def doctor(
    place: PlaceArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Do what is safe about it, and say what was done.")] = False,
    wait: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Watch members for so long at most, not a lease.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Examine a queue: metadata, numbers, every byte of every file, what the dead left behind, the file system.

    --repair puts files that cannot be read aside (as .bad), removes what the dead half wrote, and gives back what they
    had taken. Exit codes: 0 all is well, or was repaired; 1 something is wrong.
    """
    with clear_exits(debug=debug):
        diagnosis = examine(
            find_queue(place),
            repair=repair,
            wait_seconds=wait,
            on_wait=lambda seconds, members: _say(f"watching {_members(members)} for up to {seconds:g} s"),
        )
    if as_json:
        typer.echo(orjson.dumps(diagnosis.to_dict(), option=orjson.OPT_INDENT_2))
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.sound:
        raise typer.Exit(1)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    console = output()
    for finding in diagnosis.findings:
        console.print(_finding(finding), soft_wrap=True)
    read = f"{diagnosis.files:,} files with {diagnosis.batches:,} batches, {format_bytes(diagnosis.bytes)}, were read"
    where = f" on {diagnosis.file_system}" if diagnosis.file_system else ""
    console.print(f"{diagnosis.path}{where}: {read}", markup=False, highlight=False, soft_wrap=True)
    wrong = [finding for finding in diagnosis.findings if finding.severity != "note"]
    mended = sum(finding.repaired is not None for finding in wrong)
    verdict = f"{len(wrong)} finding{'s' * (len(wrong) != 1)}, {mended} repaired" if wrong else "nothing is wrong"
    console.print(Text(verdict, style="bold green" if diagnosis.sound else "bold red"))


def _finding(finding: Finding) -> Text:
    text = Text(f"{finding.severity}: ", style=_STYLES[finding.severity])
    text.append(f"{finding.what}\n  {finding.where}\n", style="default")
    done = finding.repaired is not None
    text.append(
        f"  repaired: {finding.repaired}" if done else f"  {finding.remedy}", style="green" if done else "default"
    )
    return text
