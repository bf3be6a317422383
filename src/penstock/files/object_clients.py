"""Clients of object stores: settings that they do not find or check themselves, and their errors in plain words."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import ConfigError

_CODE = re.compile(r"<Code>(\w+)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)
_STATUS = re.compile(r"status code: (\d{3}[\w ]*)")
_CAUSES = {
    "ConnectionRefused": "connection refused",
    "dns error": "the name of the server does not resolve",
    "ConnectionReset": "the connection was reset",
    "TimedOut": "the server does not answer",
    "NetworkUnreachable": "the network is unreachable",
    "HostUnreachable": "the server is unreachable",
}
_CREDENTIALS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "s3": (
        ("access_key_id", "aws_access_key_id", "skip_signature"),
        ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "gs": (
        ("service_account", "service_account_key", "application_credentials", "skip_signature"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": (
        ("account_key", "access_key", "client_id", "sas_key", "skip_signature"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID"),
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    ),
}
"""For each kind of store: options and variables that are credentials, and those to set."""
_KINDS = {"s3a": "s3", "gcs": "gs", "azure": "az", "adl": "az", "abfs": "az", "abfss": "az"}


def aws_profile() -> dict[str, str]:
    """Settings of the profile in `~/.aws` as the variables that mean the same."""
    profile = os.environ.get("AWS_PROFILE", "default")
    found: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "config", profile if profile == "default" else f"profile {profile}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile),
    ):
        parser = configparser.RawConfigParser()
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / default)
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(path, encoding="utf-8")
        if parser.has_section(section):
            found |= {f"AWS_{key.upper().removeprefix('AWS_')}": value for key, value in parser.items(section)}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # the environment comes first, and never half of it
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            found.pop(name, None)
    return found


def check_endpoint(name: str, endpoint: str) -> None:
    """Raise a ConfigError if the address of a server is none: the client would panic at its first request."""
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port
        whole = False
    if not whole or re.search(r"\s", endpoint):
        given = re.sub(r"//[^/@]*@", "//***@", endpoint)
        raise ConfigError(f"{name} is {given!r}, expected an address such as http://127.0.0.1:9000 or https://host")


def said(error: BaseException) -> str:
    """Cause of a client's error, without its debug output, which is long and may hold more than it should."""
    text = str(error)
    if found := _CODE.search(text):
        return f"{found[1]}{f' ({found[2]})' if found[2] else ''}"
    first, _, debug = text.partition("Debug source")
    first = re.sub(r"^Generic \w+ error: ", "", first.strip().replace("\n", " ")) or type(error).__name__
    if status := _STATUS.search(first):
        return f"{first[: status.start()]}status {status[1].strip()}".replace("Server returned non-2xx ", "")
    cause = next((words for mark, words in _CAUSES.items() if mark in debug), None)
    return first if cause is None else f"{cause} ({first})"


def raise_for_panic(error: BaseException, where: str) -> None:
    """Raise a ConfigError for a panic of a client, which is no `Exception` and would pass all handlers of errors."""
    if type(error).__name__ == "PanicException":
        raise ConfigError(
            f"{where!r} cannot be used: the client failed ({error}); check the options in the URL and the environment"
        ) from None


def missing_credentials(scheme: str, options: Mapping[str, str]) -> str:
    """Advice for a client without credentials; empty if it has some."""
    names, variables, wanted = _CREDENTIALS[_KINDS.get(scheme, scheme)]
    if any(name in options for name in names) or any(os.environ.get(name) for name in variables):
        return ""
    return f"; there are no credentials: set {wanted}"
