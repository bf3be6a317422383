"""Forked processes: locks that are free there, and an error for what cannot continue there."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

from penstock.errors import ConfigError

Lock = TypeVar("Lock")

_renewed: weakref.WeakSet[Any] = weakref.WeakSet()
_process = os.getpid()
"""This process: to ask the system costs as much as ten calls of a function."""
_clients_of = 0
"""Process that made the first request to an object store."""


def renewed(lock: Lock) -> Lock:
    """The same lock or condition, which is free in a forked process: the thread that held it is not there."""
    _renewed.add(lock)
    return lock


def check_process(process: int, what: str) -> None:
    """Refuse what began in `process` in one that was forked from it: the threads that make it go on are not there."""
    if _process != process:
        raise ConfigError(
            f"{what} began in process {process}, before process {_process} was forked from it, and the threads that "
            "it needs are in that process only; begin one in each process"
        )


def check_clients() -> None:
    """Refuse a request to an object store in a forked process, where it would never be answered."""
    global _clients_of
    if not _clients_of:
        _clients_of = os.getpid()
    if _clients_of != os.getpid():
        raise ConnectionError(
            f"process {os.getpid()} was forked after object stores had been used, and the threads that make the "
            "requests are in its parent only; start worker processes with 'spawn' or 'forkserver', such as "
            "DataLoader(..., multiprocessing_context='spawn')"
        )


def _renew() -> None:
    global _process
    _process = os.getpid()
    for lock in list(_renewed):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
