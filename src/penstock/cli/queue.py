"""`penstock queue status | purge | doctor`: state of a filesystem queue, its removal, and its repair."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock._amounts import counted, format_seconds
from penstock.cli.console import (
    emit,
    fact_table,
    found_problems,
    output,
    print_json,
    print_table,
    say,
    table,
    warn,
    working,
)
from penstock.cli.options import CommandGroup, JsonOption, command
from penstock.errors import ConfigError, PenstockError, QueueNotFoundError
from penstock.fsqueue import queue as queues
from penstock.fsqueue.doctor import Diagnosis, Finding, examine
from penstock.fsqueue.layout import list_members
from penstock.fsqueue.leases import heartbeat_seconds
from penstock.fsqueue.queue import Queue, schema_of
from penstock.fsqueue.status import MemberStatus, SplitStatus, Status, find_queue, look
from penstock.memory.budget import format_bytes

queue = typer.Typer(
    name="queue",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, purge or examine a filesystem queue.",
)

PlaceArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="A queue, the directory of a dataset (data/NAME), or a config file.")
]
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


# -- status ----------------------------------------------------------------------------------------------------------


@queue.command()
@command()
def status(
    place: PlaceArgument,
    seconds: Annotated[float, typer.Option(min=0.0, help="Interval over which rates are measured; 0: no rates.")] = 1.0,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show backlog, rates and members of each split, and which side waits.

    With --json and --watch, one object per line.
    """
    opened = Queue.open(find_queue(place))
    try:
        if as_json:
            for found in _looks(opened, seconds, forever=watch):
                print_json(found.to_dict(), indent=not watch)
        elif watch and sys.stdout.isatty():
            with Live(console=output(), auto_refresh=False) as live:
                for found in _looks(opened, seconds, forever=True):
                    live.update(_drawn(found), refresh=True)
        else:
            for found in _looks(opened, seconds, forever=watch):
                print_table(_drawn(found))
    except KeyboardInterrupt:
        if not watch:
            raise


def _looks(opened: Queue, seconds: float, *, forever: bool) -> Iterator[Status]:
    before = look(opened)
    if seconds == 0 and not forever:
        yield before
        return
    while True:
        if forever:
            time.sleep(seconds or 1.0)
        else:
            _wait("measuring rates", seconds)
        now = look(opened)
        yield now.since(before)
        if not forever:
            return
        before = now


def _wait(title: str, seconds: float) -> None:
    """Sleep, and show how long."""
    with working(title, unit="seconds", total=seconds) as progress:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            progress(seconds - left)
            time.sleep(min(0.25, left))


def _drawn(found: Status) -> RenderableType:
    facts = [("queue", str(found.path)), ("fingerprint", found.fingerprint)]
    facts += [(name, str(found.meta[name])) for name in ("training_type", "vocab_size") if name in found.meta]
    for number, column in enumerate(schema_of(found.meta)):
        role = f", {column.role}" if column.role else ""
        facts.append(("batches" if number == 0 else "", f"{column.name}: {column.spelling}{role}"))
    cursors = [
        (split.name, f"{cursor.rank} of {cursor.world}", f"{cursor.read:,}", f"{cursor.done:,}")
        for split in found.splits
        for cursor in split.cursors
    ]
    parts: list[RenderableType] = [fact_table(facts), Text(), _split_table(found.splits)]
    if cursors:
        parts += [Text(), table(["split", ">rank", ">read", ">done"], cursors)]
    parts += [Text(), _member_table(found.members)] if found.members else []
    return Group(*parts, Text(), Text(found.advice, style="bold"))


def _split_table(splits: Any) -> Table:
    rows = (
        (
            split.name,
            f"{split.ready_files:,}",
            f"{split.ready_batches:,}",
            format_bytes(split.ready_bytes),
            "-" if split.oldest_seconds is None else format_seconds(split.oldest_seconds),
            f"{split.taken_files:,}",
            f"{split.made_batches:,}",
            _rate(split.published_per_second),
            _rate(split.delivered_per_second),
            "; ".join(_remarks(split)),
        )
        for split in splits
    )
    names = (">ready", ">batches", ">size", ">oldest", ">taken", ">made", ">in/s", ">out/s")
    return table(["split", *names, ""], rows)


def _remarks(split: SplitStatus) -> list[str]:
    remarks = []
    if split.end is not None:
        remarks.append(f"ends after {split.end:,} batches")
    if split.being_written:
        remarks.append(f"{split.being_written} being written")
    if split.aside_files:
        remarks.append(f"{split.aside_files} quarantined, see `penstock queue doctor`")
    if split.returned_files:
        remarks.append(f"{split.returned_files} redelivered: their consumer died")
    return remarks


def _member_table(members: Any) -> Table:
    rows = []
    for member in members:
        facts = member.facts
        rank = f" {facts['rank']} of {facts['world']}" if facts.get("order") == "strict" else ""
        own = [str(facts.get(name, "?")) for name in ("host", "pid", "since")]
        lease = f"{member.lease_seconds:g} s"
        rows.append([member.id, f"{member.role}{rank}", *own, f"{member.batches:,}", lease, _life(member)])
    return table(["member", "role", "host", ">pid", "since", ">batches", ">lease", ""], rows)


def _life(member: MemberStatus) -> Text:
    silent = "" if member.silent_seconds is None else f"silent for {format_seconds(member.silent_seconds)}"
    if member.seems_alive:
        return Text("alive" if member.alive or not silent else f"alive, {silent}", style="green")
    return Text("dead" if member.alive is False else silent, style="bold red")


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.1f}"


# -- purge -----------------------------------------------------------------------------------------------------------


@queue.command()
@command(stopped="stopped; nothing was removed")
def purge(
    place: PlaceArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while providers or consumers are running.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a queue with all batches that were not consumed. The next prepare.py creates it again.

    Only a queue is removed, and without --force only one that nobody uses.
    """
    path = find_queue(place)
    if not path.is_dir():
        raise QueueNotFoundError(f"Queue directory not found: {path}; there is nothing to purge")
    if not (path / "queue.json").exists():
        raise ConfigError(f"{path} is not a queue: it has no queue.json; nothing was removed")
    facts = _removal(path)
    if not yes and not _can_ask():
        raise ConfigError(f"{_in_words(facts)} would be removed; without a terminal to confirm, pass --yes")
    if not force:
        _refuse_while_alive(path)
    if not yes:
        typer.confirm(f"{_in_words(facts)} will be removed. Continue?", abort=True, err=True)
    with working(f"removing {path}"):
        facts["freed_bytes"] = queues.purge(path)
    emit(facts, lambda: say(f"removed {_in_words(facts)}"), as_json=as_json)


def _removal(path: Path) -> dict[str, Any]:
    """Files, bytes and unconsumed batches; batches are None if the queue is damaged."""
    found = [file for file in path.rglob("*") if file.is_file()]
    facts: dict[str, Any] = {
        "path": str(path),
        "files": sum(file.suffix == ".arrow" or ".arrow." in file.name for file in found),
        "bytes": sum(_size(file) for file in found),
        "batches": None,
    }
    try:
        splits = look(Queue.open(path)).splits
    except (PenstockError, OSError):  # damaged: a reason to purge it
        return facts
    facts["batches"] = sum(split.ready_batches + split.taken_batches for split in splits)
    return facts


def _in_words(facts: dict[str, Any]) -> str:
    batches = "an unknown number of" if facts["batches"] is None else f"{facts['batches']:,}"
    size = format_bytes(facts["bytes"])
    return f"{facts['path']}: {counted(facts['files'], 'batch file')}, {size}, {batches} batches not consumed"


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _refuse_while_alive(path: Path) -> None:
    """Watch the heartbeats of the members; raises if one is alive."""
    directory = path / "members"
    first = list_members(directory) if directory.is_dir() else {}
    if not first:
        return
    # Half a heartbeat more, for a busy machine.
    seconds = 1.5 * heartbeat_seconds(max(member.lease_seconds for member in first.values()))
    warn(f"watching {counted(len(first), 'member')} for {seconds:.1f} s")
    until = time.monotonic() + seconds
    with working(f"watching {path}", unit="seconds", total=seconds) as progress:
        while (left := until - time.monotonic()) > 0:
            progress(seconds - left)
            time.sleep(min(0.05, seconds / 10))
            now = list_members(directory)
            alive = [owner for owner, member in now.items() if owner not in first or member.beat != first[owner].beat]
            if alive:
                raise ConfigError(
                    f"{counted(len(alive), 'member')} of the queue running ({', '.join(sorted(alive))}); stop them "
                    f"first, see `penstock queue status {path}`, or pass --force, which makes them fail"
                )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


# -- doctor ----------------------------------------------------------------------------------------------------------


@queue.command()
@command()
def doctor(
    place: PlaceArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Make the safe repairs, and report them.")] = False,
    wait_seconds: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Longest time to watch members. Default: a lease.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Examine a queue: metadata, sequence numbers, every byte of every file, leftovers of dead members, file system.

    --repair quarantines unreadable files (as .bad), removes partial files of dead members, and releases their claims.
    Exit codes: 0 no problem, or all repaired; 1 an error; 3 a problem is left.
    """
    path = find_queue(place)
    with working(f"examining {path}", unit="files") as progress:
        diagnosis = examine(
            path,
            repair=repair,
            wait_seconds=wait_seconds,
            on_wait=lambda seconds, members: warn(f"watching {counted(members, 'member')} for up to {seconds:g} s"),
            progress=progress,
        )
    emit(diagnosis.to_dict(), lambda: _print_diagnosis(diagnosis), as_json=as_json)
    if not diagnosis.sound:
        found_problems()


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        output().print(_finding(finding), soft_wrap=True)
    read = f"{diagnosis.files:,} files with {diagnosis.batches:,} batches, {format_bytes(diagnosis.bytes)}, were read"
    where = f" on {diagnosis.file_system}" if diagnosis.file_system else ""
    say(f"{diagnosis.path}{where}: {read}")
    wrong = [finding for finding in diagnosis.findings if finding.severity != "note"]
    repaired = sum(finding.repaired is not None for finding in wrong)
    verdict = f"{counted(len(wrong), 'finding')}, {repaired} repaired" if wrong else "no problem found"
    say(verdict, style="bold green" if diagnosis.sound else "bold red")


def _finding(finding: Finding) -> Text:
    text = Text(f"{finding.severity}: ", style=_STYLES[finding.severity])
    text.append(f"{finding.what}\n  {finding.where}\n", style="default")
    done = finding.repaired is not None
    text.append(
        f"  repaired: {finding.repaired}" if done else f"  {finding.remedy}", style="green" if done else "default"
    )
    return text
