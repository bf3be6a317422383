"""Files and directories under hidden names that anybody can foresee: used and removed only where they were made here.

A lock or a directory of parts beside an output has a name that others can guess, and where others may write, it can be
a link that leads elsewhere. Nothing here is opened, emptied or deleted through a link.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

from penstock.errors import ConfigError

__all__ = ["check_own_directory", "open_own", "refuse_link", "remove_own_directory", "strangers"]

_LINK_ERRNOS = (errno.ELOOP, errno.EMLINK, getattr(errno, "EFTYPE", errno.ELOOP))
"""What systems say of a link that was not to be followed."""

MARKERS = ("complete", "run")
"""Files that say that a build is whole, and whose it is: they are deleted last."""


def refuse_link(path: Path) -> None:
    """Raise if there is a symbolic link at a path under which penstock keeps something of its own."""
    if path.is_symlink():
        raise _is_link(path)


def open_own(path: Path, flags: int) -> int:
    """A handle of the regular file at `path`, never of one that a link leads to, nor of one that has other names."""
    refuse_link(path)  # Windows has nothing that refuses it while opening
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in _LINK_ERRNOS:
            raise _is_link(path) from error
        raise
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return handle
    os.close(handle)
    what = "has another name too (a hard link)" if stat.S_ISREG(found.st_mode) else "is no regular file"
    raise ConfigError(f"{path} {what}, and penstock writes only to files that it made; remove it, then try again")


def strangers(directory: Path, own: re.Pattern[str]) -> list[str]:
    """Names in a directory that penstock gives to none of its files there; none if it does not exist.

    A link, or something else than a directory, is refused.
    """
    refuse_link(directory)
    try:
        return sorted(found.name for found in directory.iterdir() if not own.fullmatch(found.name))
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise ConfigError(
            f"{directory} is no directory, and penstock keeps unfinished output there; remove it, then try again"
        ) from None


def check_own_directory(directory: Path, own: re.Pattern[str]) -> None:
    """Make sure that it is not there, or is a directory with nothing in it but what penstock put there."""
    names = strangers(directory, own)
    if names:
        raise ConfigError(
            f"{directory} is where penstock keeps unfinished output, and it holds {names[0]!r}, which penstock did not "
            "write; move it elsewhere, then try again"
        )


def remove_own_directory(directory: Path, own: re.Pattern[str]) -> None:
    """Delete a directory of penstock and all in it; one that holds anything else is refused as a whole."""
    check_own_directory(directory, own)
    # Shards, journals and the like before what says whose they are: killed in between, they are still known as ours.
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in MARKERS and not path.is_dir():
            path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _is_link(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a symbolic link, and penstock writes and deletes nothing through a link under a name of its own; "
        "remove the link, then try again"
    )
