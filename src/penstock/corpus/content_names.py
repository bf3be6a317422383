"""Content name of a transform: a text that changes when the results of the transform may change.

A transform with a method `describe` names itself. Any other is named by its class, its attributes and its functions;
a function by its code, its defaults, and everything of other modules of the user that it refers to. Packages that are
installed, penstock among them, count by name and version.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import sysconfig
import threading
import types
from collections.abc import Mapping
from datetime import date, timedelta
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path, PurePath
from re import Pattern
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.pipeline.chain import stage_name
from penstock.pipeline.functions import RowSchema
from penstock.transforms.counts import Counts

_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, Decimal, date, timedelta, range)
_ARROW = (pa.DataType, pa.Schema, pa.Field, pa.Scalar, pc.Expression, pa.Array, pa.ChunkedArray, np.generic, np.dtype)
_PASSING = (Counts, logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.local)
"""Attributes that do not change results."""
_MOST_VALUES = 100_000
_PENSTOCK = Path(__file__).parents[1]


class UnnamedError(ValueError):
    """A transform has something in it that no text stands for."""


def content_name(stage: Any) -> str:
    """Name of a transform by its content; raises `UnnamedError` with the reason if there is none."""
    describe = getattr(stage, "describe", None)
    if callable(describe):
        facts = describe()
        return facts if isinstance(facts, str) else orjson.dumps(facts, option=orjson.OPT_SORT_KEYS).decode()
    digest = xxhash.xxh3_128_hexdigest(repr(_Names().of(stage)).encode("utf-8", "surrogatepass"))
    return f"{stage_name(stage)} #{digest}"


class _Names:
    """Values as nested tuples of text and numbers."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """What was seen: an id stays taken only as long as its object lives."""

    def of(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return ("enum", _qualified(type(value)), value.name)
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        if len(self._seen) >= _MOST_VALUES:
            raise UnnamedError(f"it refers to more than {_MOST_VALUES:,} values")
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._compound(value)

    def _compound(self, value: Any) -> Any:
        if isinstance(value, _ARROW):
            return (type(value).__name__, str(value) if len(str(value)) < 1000 else self._bytes(value))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ("array", str(value.dtype), value.shape, xxhash.xxh3_128_hexdigest(value.tobytes()))
        if isinstance(value, Pattern):
            return ("pattern", value.pattern, value.flags)
        if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections", "types"):
            return ("dict", tuple((self.of(key), self.of(item)) for key, item in value.items()))
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return (type(value).__name__, tuple(self.of(item) for item in value))
        if isinstance(value, (set, frozenset)):
            return ("set", tuple(sorted(repr(self.of(item)) for item in value)))
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__, _version(value.__name__))
        if isinstance(value, functools.partial):
            return ("partial", self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, types.MethodType):
            return ("method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, (staticmethod, classmethod)):
            return (type(value).__name__, self.of(value.__func__))
        if isinstance(value, property):
            return ("property", *(self.of(each) for each in (value.fget, value.fset)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            return ("built in", getattr(value, "__module__", None), value.__qualname__)
        if isinstance(value, type):
            return self._class(value)
        return self._object(value)

    def _bytes(self, value: Any) -> str:
        if isinstance(value, (pa.Array, pa.ChunkedArray)):
            return xxhash.xxh3_128_hexdigest(repr(value.to_pylist()).encode("utf-8", "surrogatepass"))
        return str(value)

    def _function(self, function: types.FunctionType) -> Any:
        if (installed := _installed(function.__module__)) is not None:
            return ("function", _qualified(function), installed)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        wrapped = getattr(function, "__wrapped__", None)
        return (
            "function",
            self._code(function.__code__, function.__globals__),
            *(self.of(each) for each in (function.__defaults__, function.__kwdefaults__, cells, wrapped)),
        )

    def _code(self, code: types.CodeType, names: Mapping[str, Any]) -> Any:
        constants = tuple(
            self._code(each, names) if isinstance(each, types.CodeType) else self.of(each) for each in code.co_consts
        )
        used = tuple((name, self.of(names[name])) for name in code.co_names if name in names)
        return (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants, used)

    def _class(self, kind: type) -> Any:
        if (installed := _installed(kind.__module__)) is not None:
            return ("class", _qualified(kind), installed)
        own = {
            name: value
            for name, value in vars(kind).items()
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
            and not name.startswith(("__firstlineno", "__static_attributes"))
        }
        bases = tuple(self.of(base) for base in kind.__bases__ if base is not object)
        return ("class", _qualified(kind), bases, tuple((name, self.of(value)) for name, value in own.items()))

    def _object(self, value: Any) -> Any:
        if isinstance(value, RowSchema):
            return ("schema", str(value._given))
        state = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    state[name] = getattr(value, name)
        if not state and _is_opaque(type(value)):
            raise UnnamedError(f"it refers to {value!r:.80}, which no text stands for")
        kept = {name: each for name, each in state.items() if not isinstance(each, _PASSING)}
        kind = self.of(type(value))
        return ("object", kind, tuple((name, self.of(each)) for name, each in sorted(kept.items())))


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_opaque(kind: type) -> bool:
    """True for objects of compiled classes, whose state cannot be seen."""
    return not any("__init__" in vars(each) and isinstance(vars(each)["__init__"], types.FunctionType)
                   for each in kind.__mro__) and not _is_python(kind)  # fmt: skip


def _is_python(kind: type) -> bool:
    return bool(kind.__flags__ & (1 << 9)) and kind.__module__ != "builtins"  # a heap type


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.cache
def _installed(module: str | None) -> str | None:
    """Package and version of a module that is installed; None for one of the user."""
    if module is None:
        return None
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return f"python {sys.version_info[0]}.{sys.version_info[1]}" if top != "__main__" else None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    places = [_PENSTOCK, *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))]
    if not any(place in Path(file).resolve().parents for place in [place.resolve() for place in places]):
        return None
    return f"{top} {_version(module)}"


@functools.cache
def _version(module: str) -> str:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = getattr(sys.modules.get(top), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return version(next(iter(packages_distributions().get(top, [top]))))
    except PackageNotFoundError:
        return "?"
