"""Functions that numba compiles when they are first called, so that importing them needs no numba."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from penstock._optional import require

__all__ = ["kernel"]

P = ParamSpec("P")
R = TypeVar("R")

_lock = threading.RLock()


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code that releases the interpreter lock, cached on disk for the next process.

    Kernels may call kernels, of other modules too. Without numba the first call raises ModuleNotFoundError with the
    command that installs it.
    """
    return cast(Callable[P, R], _Kernel(function))


class _Kernel(Generic[P, R]):
    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._compiled: Any = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, self.dispatcher()(*args, **kwargs))

    def dispatcher(self) -> Any:
        """The function as numba has it. The names of other kernels in its module become theirs: numba reads them.

        One thread at a time, and the function itself becomes visible last: another thread must not call it, and so
        compile it, while it still sees kernels that numba does not know.
        """
        numba = require("numba", "fast")
        with _lock:
            if self._compiled is None:
                try:
                    self._compiled = numba.njit(nogil=True, cache=True)(self._function)
                except RuntimeError:  # no directory to cache it in
                    self._compiled = numba.njit(nogil=True)(self._function)
                names = self._function.__globals__
                for name, value in list(names.items()):
                    if isinstance(value, _Kernel) and value is not self:
                        names[name] = value.dispatcher()
                names[self._function.__name__] = self._compiled
        return self._compiled
