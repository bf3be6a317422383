"""Python source as a tree, in any thread."""

from __future__ import annotations

import ast
import threading
from typing import Any

from penstock._forks import renewed

_one_at_a_time = renewed(threading.Lock())
_TRIES = 50


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
