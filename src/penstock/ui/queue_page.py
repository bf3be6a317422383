"""Page of a queue directory: backlog, leases, who is alive, cursors of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from penstock._amounts import format_seconds
from penstock.fsqueue.status import MemberStatus, SplitStatus, Status
from penstock.html import Html, element, facts, note, table
from penstock.memory.budget import format_bytes
from penstock.ui.frame import badge, document, live, panel, place_line
from penstock.ui.site import Site
from penstock.ui.targets import Target


def queue_page(site: Site, target: Target) -> str:
    return document(
        target.name if target.name != "queue" else target.shown,
        place_line(target.name, target.shown),
        live(f"{target.address}/live", *queue_panels(site.queue(target.number).look())),
        crumbs=[(target.name, None)],
    )


def queue_panels(status: Status) -> Iterator[Html]:
    """Parts of the page, each with an id."""
    alive = [member for member in status.members if member.seems_alive]
    shown = [
        ("ready", sum(split.ready_batches for split in status.splits), "batches for a consumer"),
        ("leased", sum(split.taken_batches for split in status.splits), "batches that consumers hold"),
        ("alive", len(alive), f"of {len(status.members):,} members"),
        ("size", format_bytes(sum(split.ready_bytes for split in status.splits)), "of ready files"),
    ]
    yield element("div", element("p", status.advice, class_="sentence", role="status"), facts(shown), id="state")
    names = ["split", "ready files", "batches", "size", "oldest", "leased files", "made", "in/s", "out/s", "remarks"]
    yield panel("splits", "Splits", table(map(_split, status.splits), names, caption="Backlog and leases by split"))
    yield panel("members", "Members", _members(status))
    cursors = [
        (split.name, f"{cursor.rank} of {cursor.world}", cursor.read, cursor.done)
        for split in status.splits
        for cursor in split.cursors
    ]
    if cursors:
        yield panel(
            "cursors", "Ranks in strict order", table(cursors, ["split", "rank", "read", "done"], caption="Cursors")
        )
    settings = [(name, str(value)) for name, value in status.settings.items()]
    body = table(settings, ["setting", "value"], caption=f"Fingerprint {status.fingerprint}")
    found = element("details", element("summary", f"{len(settings)} settings"), body, id="all-settings")
    yield panel("settings", "Settings", found)


def queue_line(status: Status) -> str:
    """The state of a queue in a line, for the overview."""
    ready = sum(split.ready_batches for split in status.splits)
    return f"{ready:,} batches ready; {status.advice}"


def _split(split: SplitStatus) -> tuple[object, ...]:
    return (
        split.name,
        split.ready_files,
        split.ready_batches,
        format_bytes(split.ready_bytes),
        "" if split.oldest_seconds is None else format_seconds(split.oldest_seconds),
        split.taken_files,
        split.made_batches,
        "" if split.published_per_second is None else round(split.published_per_second, 1),
        "" if split.delivered_per_second is None else round(split.delivered_per_second, 1),
        "; ".join(_remarks(split)),
    )


def _remarks(split: SplitStatus) -> Iterator[str]:
    if split.end is not None:
        yield f"ends after {split.end:,} batches"
    if split.being_written:
        yield f"{split.being_written} being written"
    if split.aside_files:
        yield f"{split.aside_files} quarantined, see `penstock queue doctor`"
    if split.returned_files:
        yield f"{split.returned_files} redelivered: their consumer died"


def _members(status: Status) -> Html:
    if not status.members:
        return note("No provider and no consumer has joined.")
    rows = [
        (
            member.id,
            member.role,
            badge("alive", "good") if member.seems_alive else badge("silent", "bad"),
            _heard(member),
            *(str(member.facts.get(name, "")) for name in ("host", "pid", "since")),
            member.batches,
            f"{member.lease_seconds:g} s",
        )
        for member in status.members
    ]
    names = ["member", "role", "state", "last heartbeat", "host", "pid", "since", "batches", "lease"]
    return table(rows, names, caption="Providers and consumers")


def _heard(member: MemberStatus) -> str:
    return "" if member.silent_seconds is None else f"{format_seconds(member.silent_seconds)} ago"
