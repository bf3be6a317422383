"""Places that must be local: everything that is written, and everything that is mapped or locked."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import ConfigError
from penstock.files._filesystems import is_remote, local_path, shown
from penstock.files.listing import PathLike

__all__ = ["local_or_none", "require_local"]

_SQUEEZED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]")
"""`s3:/bucket`: what `Path` makes of a URL. At least two letters: one is a drive on Windows."""


def require_local(path: PathLike, what: str) -> Path:
    """The local path, `~` expanded; a URL is a ConfigError that says what it was given for.

    `file:///path` is the local path. A URL that went through `Path` is recognised too, so a directory whose name ends
    in a colon is to be written as `./name:/...`.
    """
    text = os.fspath(path)
    if is_remote(text):
        local = local_path(text)
        if local is not None:
            return local
        raise ConfigError(_refusal(shown(text), what))
    if (squeezed := _SQUEEZED.match(text)) is not None:
        if squeezed[1].lower() == "file":
            return require_local(f"file:///{text[squeezed.end() :].lstrip('/')}", what)
        raise ConfigError(_refusal(shown(f"{squeezed[1]}://{text[squeezed.end() :]}"), what))
    return _expanded(text)


def local_or_none(path: PathLike) -> Path | None:
    """The local path, also of `file:///path`; None for other URLs."""
    text = os.fspath(path)
    return local_path(text) if is_remote(text) else _expanded(text)


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~name` without such a user is a name like any other
        return Path(text)


def _refusal(url: str, what: str) -> str:
    return (
        f"{url!r} is a URL, and {what} must be a local path; pass a path on this machine, and copy what is written "
        "there with the tools of the storage"
    )
