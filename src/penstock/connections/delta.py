"""Delta tables, opened for reading and for writing: addresses, credentials and errors."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qsl

from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import is_remote, local_or_none, shown
from penstock.files.listing import PathLike

LOG = "_delta_log"
_OPTIONS = {
    "region": "AWS_REGION",
    "endpoint_override": "AWS_ENDPOINT_URL",
    "access_key": "AWS_ACCESS_KEY_ID",
    "secret_key": "AWS_SECRET_ACCESS_KEY",
}
"""Options in the query of a URL, and their names for deltalake."""


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
    """The address of a table for deltalake, and the options in the query of its URL.

    Credentials are found where deltalake looks for them: the environment, and roles of the machine.
    """
    local = local_or_none(path)
    if local is not None:
        return str(local.resolve()), {}
    url, _, query = os.fspath(path).partition("?")
    options = {}
    for name, value in parse_qsl(query):
        if name not in {*_OPTIONS, "scheme", "allow_bucket_creation"}:
            known = ", ".join((*_OPTIONS, "scheme"))
            raise ConfigError(f"{shown(path)!r}: unknown option {name!r}; known: {known}")
        if name in _OPTIONS:
            options[_OPTIONS[name]] = f"http://{value}" if name == "endpoint_override" and "://" not in value else value
        elif name == "scheme" and value == "http":
            options["AWS_ALLOW_HTTP"] = "true"
    return url.rstrip("/"), options


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


def _refusal(deltalake: Any, path: PathLike, version: int | None, error: Exception) -> Exception:
    reason = brief(error)
    if isinstance(error, OSError) or (is_remote(path) and "Generic S3 error" in reason):
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
    return DataError(f"the log of the Delta table is damaged: {reason}", file=shown(path))


def brief(error: BaseException) -> str:
    """The message of an error of deltalake, without the stack of its machine code."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.lstrip()[:2].rstrip(":").isdigit()]
    return " ".join(line.strip() for line in lines if not line.lstrip().startswith("at "))[:500] or type(error).__name__


def delta_log_at(path: PathLike) -> bool:
    """True if a path or URL is that of a Delta table."""
    local = local_or_none(path)
    if local is not None:
        return (local / LOG).is_dir()
    from penstock.files.remote import RemotePath

    place = RemotePath(os.fspath(path)) / LOG
    return place.can_be_listed and place.is_dir()
