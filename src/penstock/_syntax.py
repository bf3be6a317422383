"""Python source as a tree, in any thread."""

from __future__ import annotations

import ast
import os
import threading
from typing import Any

_TRIES = 50
_one_at_a_time = threading.RLock()


def parse(source: str | bytes, file: str = "<unknown>", mode: str = "exec") -> Any:
    """`ast.parse`. CPython 3.11 counts the depth of a tree for all threads together, and refuses one now and then if
    two threads parse at once: "SystemError: AST constructor recursion depth mismatch"."""
    with _one_at_a_time:
        for _ in range(_TRIES - 1):  # another library may parse in a thread of its own
            try:
                return ast.parse(source, file, mode)
            except SystemError:
                continue
        return ast.parse(source, file, mode)


def literal(source: str) -> Any:
    """`ast.literal_eval`, in any thread."""
    return ast.literal_eval(parse(source.lstrip(" \t"), mode="eval"))


def _renew() -> None:
    """The lock is free in a forked process: the thread that held it is not there."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
