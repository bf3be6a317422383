"""Whether a directory is a place for a queue: what the protocol needs of a file system, tried out."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
from pathlib import Path

import psutil

from penstock.fsqueue.findings import Finding
from penstock.memory.budget import format_bytes

__all__ = ["NEEDS", "problems_of_the_place"]

NEEDS = (
    "a rename within a directory is atomic for all machines, a name that was renamed or deleted is found missing by "
    "the next one who renames it, and listings follow within a second or so; locks, file times and synchronous clocks "
    "are not needed"
)
"""What a queue asks of a file system, shared or not."""

_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "gluster",
    "lustre",
    "gpfs",
    "beegfs",
    "fuse",
    "virtiofs",
    "wekafs",
)
_LEAST_FREE = 256 << 20


def problems_of_the_place(directory: Path) -> tuple[list[Finding], str]:
    """What is wrong with a directory as a place for a queue, and the name of its file system."""
    kind = _file_system(directory)
    problems: list[Finding] = _tried(directory)
    free = shutil.disk_usage(directory).free
    if free < _LEAST_FREE:
        problems.append(
            Finding(
                "warning",
                f"only {format_bytes(free)} are free: providers stop when the disk is full",
                str(directory),
                "make room, or lower backlog_files and backlog_bytes",
            )
        )
    if kind.startswith(_NETWORK):
        problems.append(
            Finding(
                "note",
                f"this is a network file system ({kind}); between machines a queue needs this of it: {NEEDS}",
                str(directory),
                "on NFS, mount with lookupcache=positive and a short actimeo, or batches arrive seconds late",
            )
        )
    return problems, kind


def _tried(directory: Path) -> list[Finding]:
    """What did not work of all that members do to their files."""
    old, new = (directory / f".{name}~doctor{secrets.token_hex(4)}.tmp" for name in ("old", "new"))
    problems: list[Finding] = []

    def expect(held: bool, what: str) -> None:
        if not held:
            problems.append(Finding("error", what, str(directory), f"use another file system for the queue: {NEEDS}"))

    try:
        old.write_bytes(b"penstock")
        expect(old.name in os.listdir(directory), "a file that was just made is not listed")
        os.rename(old, new)
        names = os.listdir(directory)
        expect(new.name in names and old.name not in names, "a file that was just renamed is listed under its old name")
        expect(not _renames(old, new), "a file can be renamed a second time, under a name that it no longer has")
        with new.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            expect(view[:] == b"penstock", "a file that is mapped into memory has other contents")
        new.unlink()
        expect(new.name not in os.listdir(directory), "a file that was just deleted is still listed")
    except OSError as error:
        what = f"files cannot be made, renamed, mapped and deleted here: {error.strerror or error}"
        problems.append(
            Finding("error", what, str(directory), "make the directory writable for whoever runs the commands")
        )
    finally:
        for left in (old, new):
            with contextlib.suppress(OSError):  # then the problem is on the list already
                left.unlink(missing_ok=True)
    return problems


def _renames(old: Path, new: Path) -> bool:
    try:
        os.rename(old, new)
    except FileNotFoundError:
        return False
    return True


def _file_system(directory: Path) -> str:
    """`ext4`, `nfs4`, `tmpfs`: the type of the mount that a directory is on; empty if it cannot be told."""
    path = directory.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), "")
