"""Kernels: functions that run as plain Python on little data and are compiled by numba for more.

Compiling the rules of a filter takes from one to six seconds, once on a machine: the machine code is kept in the
user's cache directory, by the content of the sources, so that another environment or a reinstalled package finds it.
Plain Python does the first rows meanwhile: a few hundred documents never wait for the compiler.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np

from penstock._forks import renewed
from penstock._optional import require
from penstock.files.machine_code import kernel_home, source_digest

P = ParamSpec("P")
R = TypeVar("R")

PLAIN = 1 << 17
"""Elements that plain Python takes a second at most for. A kernel takes half as many as are worth compiling it."""
CACHED = 16
"""Machine code that is in the cache pays off this many times earlier."""

log = logging.getLogger(__name__)
_lock = renewed(threading.RLock())
_kernels: dict[Callable[..., Any], _Kernel[Any, Any]] = {}
_said: list[str] = []


def kernel(*, plain: int = 0, by: int = 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the function as machine code that releases the interpreter lock, cached for other processes.

    It runs as plain Python as long as all calls together have had at most `plain` elements in argument number `by`.
    Kernels may call kernels, of other modules too; those without `plain` are called by no one else. A kernel makes and
    returns no arrays: it writes on those of the caller. Without numba the first call raises ModuleNotFoundError with
    the command that installs it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return cast(Callable[P, R], _Kernel(function, plain, by))

    return decorate


class _Kernel(Generic[P, R]):
    def __init__(self, function: Callable[P, R], plain: int, by: int) -> None:
        self._function, self._left, self._by, self._is_entry = function, plain, by, plain > 0
        self._compiled: Any = None
        self._plain: Any = None
        self._is_looked_up = False
        functools.update_wrapper(self, function)
        _kernels[function] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._compiled is None and self._left > 0 and not kwargs:
            self._look_up()
            given = cast(tuple[Any, ...], args)
            self._left -= given[self._by].size
            if self._left >= 0:
                return cast(R, run_plain(self.plain(), given))
        if self._compiled is None and not _said and not self._cached():
            _said.append(self._function.__name__)
            log.warning(  # people wait for it, also those who asked for no progress
                "numba compiles the rules for text, for about ten seconds on a free core; later runs load them from %s",
                cache_directory(),
            )
        return cast(R, self.dispatcher()(*args, **kwargs))

    def _look_up(self) -> None:
        """Plain Python takes fewer rows if there is machine code in the cache; without numba, none."""
        if self._is_looked_up:
            return
        self._is_looked_up = True
        if not _has_numba():
            require("numba", "fast")
        if self._cached():
            self._left //= CACHED

    def _cached(self) -> bool:
        return any(cache_directory().glob(f"*.{self._function.__name__}-*.nbi"))

    def plain(self) -> Callable[..., Any]:
        """The function as plain Python: the kernels it calls are plain, too."""
        with _lock:
            if self._plain is None:
                function = cast(FunctionType, self._function)
                names = dict(function.__globals__)
                self._plain = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
                for name, value in list(names.items()):
                    called = value if isinstance(value, _Kernel) else _kernels.get(getattr(value, "py_func", None))  # type: ignore[arg-type]
                    if called is not None:
                        names[name] = called.plain()
        return cast(Callable[..., Any], self._plain)

    def dispatcher(self) -> Any:
        """The function as numba has it. The names of the kernels that it calls become theirs: numba reads them.

        One thread at a time, and the function itself becomes visible last: another thread must not call it, and so
        compile it, while it still sees kernels that numba does not know.
        """
        numba = require("numba", "fast")
        with _lock:
            if self._compiled is None:
                # Kernels own no arrays: counting references to them took most of the time of short calls.
                options = {"nogil": True, "_nrt": False, "no_cfunc_wrapper": True}
                made = numba.njit(**options, no_cpython_wrapper=not self._is_entry)(self._function)
                try:
                    made._cache = _cache_class()(self._function)
                except OSError as error:  # no directory to cache it in
                    log.info("machine code cannot be cached: %s", error)
                self._compiled = made
                function = cast(FunctionType, self._function)
                names = function.__globals__
                for name in function.__code__.co_names:
                    value = names.get(name)
                    if isinstance(value, _Kernel) and value is not self:
                        names[name] = value.dispatcher()
                names[function.__name__] = self._compiled
        return self._compiled


def plain_function(compiled: Any) -> Callable[..., Any]:
    """A kernel, compiled or not, as plain Python."""
    found = compiled if isinstance(compiled, _Kernel) else _kernels[compiled.py_func]
    return lambda *args: run_plain(found.plain(), args)


def run_plain(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a plain function. Bytes become integers of Python, which do not overflow; words of 64 bits wrap around."""
    given = [arg.data if isinstance(arg, np.ndarray) and _is_bytes(arg) else arg for arg in args]
    with np.errstate(over="ignore"):
        return function(*given)


def _is_bytes(array: np.ndarray[Any, Any]) -> bool:
    return array.ndim == 1 and array.dtype == np.uint8 and array.flags.c_contiguous


def _has_numba() -> bool:
    try:
        return importlib.util.find_spec("numba") is not None
    except ValueError:  # it is switched off
        return False


@functools.cache
def cache_directory() -> Path:
    """Directory of the machine code of these sources, this numba and this Python; `NUMBA_CACHE_DIR` moves it."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    facts = (sys.version, platform.machine(), importlib.metadata.version("numba"))
    return kernel_home() / source_digest(sources, *facts)


@functools.cache
def _cache_class() -> Any:
    """Cache of numba in our directory. It is named by the content of all sources, so that no time stamp counts."""
    from numba.core import caching

    class Locator(caching._CacheLocator):
        def get_cache_path(self) -> str:
            return str(cache_directory())

        def get_source_stamp(self) -> str:
            return cache_directory().name

        def get_disambiguator(self) -> None:
            return None

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            made: Any = cls()
            made.ensure_cache_path()
            return made

    class Implementation(caching.CompileResultCacheImpl):
        _locator_classes: Any = [Locator]  # noqa: RUF012 - as numba declares it

    class Cache(caching.FunctionCache):
        _impl_class = Implementation

    return Cache
