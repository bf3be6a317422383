"""Iceberg tables, opened by a catalog or by their metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import is_remote, local_or_none, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket

METADATA = "metadata"
_SUFFIX = ".metadata.json"
_NUMBERED = re.compile(r"v?(\d+)(-.*)?(\.gz)?\.metadata\.json")
_HINT = "version-hint.text"


def require_pyiceberg() -> None:
    """Raise an error that names the extra if the package pyiceberg is missing."""
    try:
        import pyiceberg.io.pyarrow  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Iceberg tables need pyiceberg, which is not installed ({error.name}); install it with: "
            "pip install 'penstock[lakes]'"
        ) from error


def open_table(path: PathLike, catalog: str | None = None) -> Any:
    """The table of a catalog (`path` is its name), or the one whose directory or metadata file is at a path or URL."""
    require_pyiceberg()
    return _in_catalog(os.fspath(path), catalog) if catalog is not None else _by_metadata(path)


def _in_catalog(name: str, catalog: str) -> Any:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    url, _, called = catalog.partition("#")
    options: dict[str, str] = {}
    if is_remote(url):
        options = {"type": "rest" if url.startswith("http") else "sql", "uri": url}
    kept = _sqlite_file(url)
    if kept is not None and not kept.exists():
        raise FileNotFoundError(f"no such catalog: {shown(catalog)!r}: the file {str(kept)!r} does not exist")
    try:
        opened: Any = load_catalog(called or "default" if options else catalog, **options)
        if options.get("type") == "sql" and not called:
            opened = load_catalog(_only_name(opened, catalog), **options)
        try:
            return opened.load_table(name)
        finally:
            if options.get("type") == "sql":
                opened.engine.dispose()
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise FileNotFoundError(f"no table {name!r} in the catalog {shown(catalog)!r}") from error
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - each kind of catalog has its own errors: of databases, of HTTP, of configuration
        reason = str(error).replace(catalog, shown(catalog))[:500]
        raise ConnectionError(f"the catalog {shown(catalog)!r} cannot be read: {reason}") from None


def _sqlite_file(url: str) -> Path | None:
    """The file of a database of SQLite, which would be made if it did not exist; None for other catalogs."""
    scheme, _, rest = url.partition("://")
    name = rest.partition("?")[0].removeprefix("/")
    is_file = scheme.partition("+")[0] == "sqlite" and name and name != ":memory:" and not name.startswith("file:")
    return Path(name) if is_file else None


def _only_name(opened: Any, catalog: str) -> str:
    """Name of the one catalog in a database: its tables are found under that alone."""
    from pyiceberg.catalog.sql import IcebergTables
    from sqlalchemy import select
    from sqlalchemy.orm import Session

    with Session(opened.engine) as session:
        names = sorted(session.scalars(select(IcebergTables.catalog_name).distinct()))
    opened.engine.dispose()
    if len(names) > 1:
        raise ConfigError(
            f"{shown(catalog)!r} holds several catalogs ({', '.join(names)}); append the name of one: "
            f"{shown(catalog)}#{names[0]}"
        )
    return names[0] if names else "default"


def _by_metadata(path: PathLike) -> Any:
    from pyiceberg.exceptions import ValidationError
    from pyiceberg.table import StaticTable

    text = os.fspath(path)
    file = text if text.partition("?")[0].endswith(_SUFFIX) else newest_metadata(path)
    if file is None:
        raise FileNotFoundError(f"no Iceberg table at {shown(path)!r}: it has no {METADATA}/*{_SUFFIX}")
    local = local_or_none(file)
    if local is not None and not local.exists():
        raise FileNotFoundError(f"no such metadata file: {str(local)!r}")
    try:
        if local is not None:
            place = local.resolve()
            # pyiceberg takes file:// literally: a space is a space, and %20 three characters.
            return StaticTable.from_metadata(place.as_uri() if os.name == "nt" else f"file://{place}")
        bucket, key = open_bucket(file)
        return StaticTable.from_metadata(bucket.url_of(key), _properties(bucket.options))
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"the metadata of the Iceberg table is damaged: {reason}", file=shown(file)) from error


def _properties(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a bucket as pyiceberg calls them."""
    names = {"endpoint": "endpoint", "region": "region", "access_key_id": "access-key-id"}
    names |= {"secret_access_key": "secret-access-key", "session_token": "session-token"}
    return {f"s3.{names[name]}": value for name, value in options.items() if name in names}


def newest_metadata(path: PathLike) -> str | None:
    """The last metadata file of a table, by its hint or by number; None if a directory has none.

    Two of the same number are an error: one of them was never committed, and only a catalog knows which.
    """
    names = _metadata_names(path)
    if not names:
        return None
    home, _, query = os.fspath(path).partition("?")
    home, query = home.rstrip("/"), f"?{query}" if query else ""
    hint = _hint(path) if _HINT in names else None
    if hint is not None:
        for name in (hint, f"{hint}{_SUFFIX}", f"v{hint}{_SUFFIX}"):
            if name in names:
                return f"{home}/{METADATA}/{name}{query}"
    numbered = [(int(found[1]), name) for name in names if (found := _NUMBERED.fullmatch(name)) is not None]
    if not numbered:
        return None
    last = max(number for number, _ in numbered)
    newest = sorted(name for number, name in numbered if number == last)
    if len(newest) > 1:
        raise ConfigError(
            f"the Iceberg table {shown(path)!r} has several metadata files of number {last} ({', '.join(newest)}); "
            "pass the path of the one that is meant, or the name of the table and its catalog"
        )
    return f"{home}/{METADATA}/{newest[0]}{query}"


def _metadata_names(path: PathLike) -> Sequence[str]:
    local = local_or_none(path)
    if local is not None:
        there = local / METADATA
        return [file.name for file in there.iterdir()] if there.is_dir() else []
    bucket, key = open_bucket(path)
    return [found.key.rpartition("/")[2] for found in bucket.list_folder(f"{key}/{METADATA}".lstrip("/"))[1]]


def _hint(path: PathLike) -> str:
    local = local_or_none(path)
    if local is not None:
        return (local / METADATA / _HINT).read_text().strip()
    bucket, key = open_bucket(path)
    return bytes(bucket.read(f"{key}/{METADATA}/{_HINT}".lstrip("/"))).decode().strip()


def iceberg_metadata_at(path: PathLike) -> bool:
    """True if a path or URL is that of an Iceberg table, or of its metadata file."""
    if os.fspath(path).partition("?")[0].endswith(_SUFFIX):
        return True
    return any(_NUMBERED.fullmatch(name) for name in _metadata_names(path))
