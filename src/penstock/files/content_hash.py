"""Content hash of functions and objects: it changes when their results may change.

A function counts by its code, its defaults, and everything of the user's own modules that it refers to; an object by
its class and by what pickling would keep of it. Packages that are installed, penstock among them, count by name and
version. Pickled bytes would not do: they change from process to process.
"""

from __future__ import annotations

import copyreg
import dis
import enum
import functools
import logging
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PASSING = (logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.local)
"""Attributes that do not change results."""
_NOT_CODE = ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")
_MOST_VALUES = 1_000_000
_PENSTOCK = Path(__file__).parents[1]
_PACKAGES = ("site-packages", "dist-packages")


class UnnamedError(ValueError):
    """Something in a function or an object has no content that could be hashed."""


def content_hash(value: Any) -> str:
    """Hash of a function or an object, 128 bits as hex; the same in every process with the same release of Python.

    Raises `UnnamedError` with the reason if there is none.
    """
    walk = _Walk()
    try:
        walk.add(value)
    except RecursionError:
        raise UnnamedError("it refers to values inside values, too many to follow") from None
    return walk.digest.hexdigest()


class _Walk:
    """Everything that a value refers to, each object once."""

    def __init__(self) -> None:
        self.digest = xxhash.xxh3_128()
        self._seen: dict[int, tuple[int, Any]] = {}
        """Number of each object, and the object, so that no other gets its id."""

    def add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            self._note(type(value).__name__, value)
        elif id(value) in self._seen:
            self._note("again", self._seen[id(value)][0])
        elif len(self._seen) >= _MOST_VALUES:
            raise UnnamedError(f"it refers to more than {_MOST_VALUES:,} values")
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        kind = type(value)
        if kind in (list, tuple):
            self._each(kind.__name__, value)
        elif kind in (dict, types.MappingProxyType):  # their order may count
            self._each("dict", [part for item in value.items() for part in item])
        elif kind in (set, frozenset):
            self._note("set", sorted(content_hash(item) for item in value))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._note("array", value.dtype.str, value.shape)
            self.digest.update(value.tobytes())
        elif isinstance(value, enum.Enum):
            self._note("enum", _qualified(kind), value.name)
        elif isinstance(value, types.ModuleType):
            self._note("module", value.__name__, _version(value.__name__))
        elif isinstance(value, types.MethodType):
            self._each("method", (value.__func__, value.__self__))
        elif isinstance(value, (staticmethod, classmethod)):
            self._each(kind.__name__, [value.__func__])
        elif isinstance(value, property):
            self._each("property", (value.fget, value.fset))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._each("cached", [value.__wrapped__])
        else:
            self._object(value)

    def _each(self, name: str, values: Iterable[Any]) -> None:
        listed = list(values)
        self._note(name, len(listed))
        for value in listed:
            self.add(value)

    def _function(self, function: types.FunctionType) -> None:
        if (installed := _installed(function.__module__)) is not None:
            self._note("function", _qualified(function), installed)
            return
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        code = function.__code__
        self._code(code, function.__globals__)
        self._each("function", (function.__defaults__, function.__kwdefaults__, cells, _kept(vars(function))))
        for module in cells:
            if isinstance(module, types.ModuleType) and _installed(module.__name__) is None:
                self._used(code.co_names, vars(module), (module,))

    def _code(self, code: types.CodeType, names: Mapping[str, Any]) -> None:
        self._note(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        for each in code.co_consts:
            if isinstance(each, types.CodeType):
                self._code(each, names)
            else:
                self.add(each)
        self._used(code.co_names, names, ())
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME" and _installed(instruction.argval) is None:
                module = sys.modules.get(instruction.argval)
                self._used(code.co_names, {} if module is None else vars(module), (module,))

    def _used(self, used: Iterable[str], names: Mapping[str, Any], inside: tuple[Any, ...]) -> None:
        """The values of some names; of a module of the user, those of its own values that are named too."""
        for name in used:
            if name in names:
                value = names[name]
                self._note("name", name)
                self.add(value)
                if isinstance(value, types.ModuleType) and _installed(value.__name__) is None and value not in inside:
                    self._used(used, vars(value), (*inside, value))

    def _class(self, kind: type) -> None:
        if (installed := _installed(kind.__module__)) is not None:
            self._note("class", _qualified(kind), installed)
            return
        own = [
            part
            for name, value in vars(kind).items()
            if name not in _NOT_CODE and not name.startswith(("__firstlineno", "__static_attributes"))
            if not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
            for part in (name, value)
        ]
        self._note("class", _qualified(kind))
        self._each("bases", [base for base in kind.__bases__ if base is not object])
        self._each("members", own)

    def _object(self, value: Any) -> None:
        """State that pickling would keep; the description that an object of penstock gives of itself, if it has one."""
        describe = getattr(value, "describe", None) if type(value).__module__.startswith("penstock.") else None
        if callable(describe):
            self._each("described", (type(value), describe()))
            return
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if reducer is None else reducer(value)
        except Exception as error:
            raise UnnamedError(f"it refers to {value!r:.80}, which no text stands for") from error
        if isinstance(reduced, str):
            self._note("global", getattr(value, "__module__", None), reduced)
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self._each("object", (make, arguments, _kept(state), list(items or ()), list(pairs or ())))

    def _note(self, *values: Any) -> None:
        self.digest.update(repr(values).encode("utf-8", "surrogatepass"))


def _kept(state: Any) -> Any:
    """Attributes of an object, without those that do not change results."""
    if isinstance(state, tuple):  # attributes and slots
        return tuple(_kept(each) for each in state)
    if not isinstance(state, dict):
        return state
    return {name: state[name] for name in sorted(state, key=str) if not isinstance(state[name], _PASSING)}


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.cache
def _installed(module: str | None) -> str | None:
    """Package and version of a module that is installed; None for one of the user."""
    if module is None or module == "__main__":
        return None
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return f"python {_version(top)}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    places = [_PENSTOCK, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))]
    above = Path(file).resolve().parents
    # Those of the system and of the user, that a virtual environment may see too, are named so.
    if not any(place.resolve() in above for place in places) and not any(each.name in _PACKAGES for each in above):
        return None
    return f"{top} {_version(module)}"


@functools.cache
def _version(module: str) -> str:
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return version(next(iter(packages_distributions().get(top, [top]))))
    except PackageNotFoundError:
        return "?"
