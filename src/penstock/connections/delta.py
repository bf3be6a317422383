"""Delta tables, opened for reading and for writing: addresses, credentials and errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import orjson

from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import is_remote, local_or_none, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket

LOG = "_delta_log"
_COLOUR = re.compile(r"\x1b\[\d*m")
_FRAME = re.compile(r"\s*(\d+:|at /)")
_CODE = re.compile(r"<Code>(\w+)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)


_VALUE = re.compile(r"Failed to parse value '(.*)' as '([^']*)'", re.DOTALL)
_UNREACHED = ("Error performing", "Generic S3 error", "error sending request", "lacked the necessary")
"""Signs that a request failed, and the log was not read."""


def require_deltalake() -> Any:
    """The package deltalake."""
    try:
        import deltalake
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Delta tables need deltalake, which is not installed; install it with: pip install 'penstock[lakes]'"
        ) from error
    return deltalake


def address(path: PathLike) -> tuple[str, dict[str, str]]:
    """The address of a table for deltalake, and the options by which it reaches the storage.

    Credentials are found where those of all URLs are, and never are part of the address.
    """
    local = local_or_none(path)
    if local is not None:
        return str(local.resolve()), {}
    bucket, key = open_bucket(path)
    return bucket.url_of(key).rstrip("/"), bucket.options


def open_table(path: PathLike, version: int | None = None) -> Any:
    """The `DeltaTable` at a path or URL; errors name the table, and what of it is missing."""
    deltalake = require_deltalake()
    url, options = address(path)
    try:
        return deltalake.DeltaTable(url, version=version, storage_options=options or None)
    except deltalake.exceptions.TableNotFoundError as error:
        raise FileNotFoundError(f"no Delta table at {shown(path)!r}: it has no {LOG}, or that is empty") from error
    except (deltalake.exceptions.DeltaError, OSError, ValueError) as error:
        raise _refusal(deltalake, path, version, error) from error


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Give errors of an open table its name: deltalake reads parts of the log when they are asked for."""
    deltalake = require_deltalake()
    try:
        yield
    except (deltalake.exceptions.DeltaError, OSError) as error:
        raise _refusal(deltalake, path, None, error) from error


def transaction_version(table: Any, path: PathLike, run: str) -> int:
    """Number of the last transaction of a run in a table; 0 if there is none."""
    with naming(path):
        return int(table.transaction_version(run) or 0)


def _refusal(deltalake: Any, path: PathLike, version: int | None, error: Exception) -> Exception:
    reason = brief(error)
    if isinstance(error, OSError) or (is_remote(path) and any(sign in str(error) for sign in _UNREACHED)):
        return ConnectionError(f"the Delta table {shown(path)!r} cannot be reached: {reason}")
    if version is not None:
        url, options = address(path)
        try:
            last = deltalake.DeltaTable(url, storage_options=options or None).version()
        except (deltalake.exceptions.DeltaError, OSError, ValueError):
            last = None  # the log is damaged
        if last is not None:
            there = f"the last is {last}" if version > last else "its log entries were removed"
            return ConfigError(
                f"the Delta table {shown(path)!r} has no version {version}: {there}; request another version"
            )
    if (value := _VALUE.search(str(error))) is not None and (place := _place_of(path, value[1])) is not None:
        column, file = place
        return DataError(
            f"the log of the Delta table gives the partition column {column!r} of {file} the value {value[1]!r}, which "
            f"deltalake cannot read as {value[2]}; write that file anew",
            file=shown(path),
        )
    return DataError(f"the log of the Delta table is damaged: {reason}", file=shown(path))


def _place_of(path: PathLike, value: str) -> tuple[str, str] | None:
    """The partition column and the data file that have a value in the log; None if no entry in JSON has it."""
    for entry in _entries(path):
        with contextlib.suppress(orjson.JSONDecodeError, AttributeError):
            for line in entry.splitlines():
                added = orjson.loads(line).get("add") or {}
                for column, given in (added.get("partitionValues") or {}).items():
                    if given == value:
                        return column, str(added.get("path"))
    return None


def _entries(path: PathLike) -> Iterator[bytes]:
    """The entries of a log that are JSON."""
    local = local_or_none(path)
    if local is not None:
        for file in sorted((local / LOG).glob("*.json")):
            yield file.read_bytes()
        return
    bucket, key = open_bucket(path)
    for info in bucket.objects(f"{key}/{LOG}/".lstrip("/")):
        if info.key.endswith(".json"):
            yield bytes(bucket.read(info.key))


def brief(error: BaseException) -> str:
    """The message of an error of deltalake: without colours and without its native stack trace."""
    text = _COLOUR.sub("", str(error)).replace("↳", "-")
    if (found := _CODE.search(text)) is not None:
        return f"{found[1]}: {found[2]}" if found[2] else found[1]
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _FRAME.match(line)]
    return " ".join(lines)[:400] or type(error).__name__


def delta_log_at(path: PathLike) -> bool:
    """True if a path or URL is that of a Delta table."""
    local = local_or_none(path)
    if local is not None:
        return (local / LOG).is_dir()
    bucket, key = open_bucket(path)
    return next(bucket.objects(f"{key}/{LOG}/".lstrip("/")), None) is not None
