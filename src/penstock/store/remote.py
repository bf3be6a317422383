"""Stores behind a URL: not read from there, and not to be taken for raw files either."""

from __future__ import annotations

import re

from penstock.errors import ConfigError
from penstock.files.filesystems import is_remote, shown
from penstock.files.listing import PathLike
from penstock.store.manifest import MANIFEST_NAME, VERSIONS

__all__ = ["refuse_remote_store"]


def refuse_remote_store(path: PathLike) -> None:
    """Raise a ConfigError if a URL leads to a store: it would be taken for raw files."""
    if not is_remote(path):
        return
    from penstock.files.remote import RemotePath, path_of  # for those who have URLs

    place = path_of(path)
    if not isinstance(place, RemotePath):
        return
    named = place.name.endswith(".store")
    # Asked for only where it may be a directory: it costs two requests.
    if named or (
        place.can_be_listed
        and not place.suffix
        and not re.search(r"[*\[]", place.url)
        and (place / MANIFEST_NAME).is_file()
        and (place / VERSIONS).is_dir()
    ):
        raise ConfigError(
            f"{shown(place.url)!r} is a token store behind a URL, and stores are read from local disk; copy the "
            "directory to this machine with the tools of the storage, and pass the copy"
        )
