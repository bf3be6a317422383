"""Content name of a transform or a tokenizer: a text that changes when its results may change.

An object with a method `describe` names itself. Any other is named by its class, its attributes and its functions; a
function by its code, its defaults, and everything of modules of the user that it refers to. Packages that are
installed, penstock among them, count by name and version. What cannot be looked into is named by what it would be
pickled as, piece by piece; the bytes of a pickle would not do, since they change from process to process.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib
import logging
import sys
import sysconfig
import threading
import types
from collections import OrderedDict
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path, PurePath
from re import Pattern
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock.pipeline.chain import stage_name
from penstock.pipeline.functions import RowSchema

_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, Decimal, date, timedelta, range)
_ARROW = (pa.DataType, pa.Schema, pa.Field, pa.Scalar, np.generic, np.dtype)
_COLUMNS = (pa.Array, pa.ChunkedArray)
_PASSING = (logging.Logger, type(threading.Lock()), type(threading.RLock()), threading.local)
"""Attributes that do not change results."""
_NO_CONTENT = frozenset(
    ["__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl", "__annotations__"]
)
"""Names in a class that do not change results."""
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
    return f"{stage_name(stage)} #{content_digest(stage)}"


def content_digest(value: Any) -> str:
    """Hash of a function or an object, 128 bits as hex; the same in every process with the same release of Python."""
    return xxhash.xxh3_128_hexdigest(repr(_Names().of(value)).encode("utf-8", "surrogatepass"))


class _Names:
    """Values as nested tuples of text and numbers."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """What was seen: an id stays taken only as long as its object lives."""
        self._inside: list[str] = []
        """Modules whose names are looked up: packages refer to their modules, and those to their packages."""

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
            return (type(value).__name__, str(value))
        if isinstance(value, _COLUMNS):  # their text leaves out what is in the middle
            return ("column", str(value.type), _hashed(repr(value.to_pylist())))
        if isinstance(value, (pa.Table, pa.RecordBatch)):
            return ("table", tuple((name, self.of(each)) for name, each in zip(value.schema.names, value.columns)))
        if isinstance(value, pa.Buffer):
            return ("buffer", xxhash.xxh3_128_hexdigest(value))
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ("array", str(value.dtype), value.shape, xxhash.xxh3_128_hexdigest(value.tobytes()))
        if isinstance(value, Pattern):
            return ("pattern", value.pattern, value.flags)
        if type(value) in (dict, OrderedDict, types.MappingProxyType):
            return ("dict", tuple((self.of(key), self.of(item)) for key, item in value.items()))
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return (type(value).__name__, tuple(self.of(item) for item in value))
        if isinstance(value, (set, frozenset)):
            return ("set", tuple(sorted(repr(self.of(item)) for item in value)))
        if isinstance(value, types.ModuleType):
            return self._module(value, None)
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
            owner = getattr(value, "__self__", None)  # `{"a": 1}.get` depends on its dict
            bound = None if isinstance(owner, types.ModuleType) else self.of(owner)
            return ("built in", getattr(value, "__module__", None), value.__qualname__, bound)
        if isinstance(value, type):
            return self._class(value)
        return self._object(value)

    def _function(self, function: types.FunctionType) -> Any:
        if (installed := _installed(function.__module__)) is not None:
            return ("function", _qualified(function), installed)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        values = [each for each in cells if not isinstance(each, types.ModuleType)]
        own = (function.__defaults__, function.__kwdefaults__, values, vars(function))
        code = self._code(function.__code__, function.__globals__, cells)
        return ("function", code, *(self.of(each) for each in own))

    def _code(self, code: types.CodeType, names: Mapping[str, Any], cells: Collection[Any]) -> Any:
        constants = tuple(
            self._code(each, names, cells) if isinstance(each, types.CodeType) else self.of(each)
            for each in code.co_consts
        )
        used = [(name, names[name]) for name in code.co_names if name in names]
        modules = [each for _, each in used if isinstance(each, types.ModuleType)]
        modules += [each for each in cells if isinstance(each, types.ModuleType)]
        modules += _imported(code, names)
        return (
            (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants),
            tuple((name, self.of(each)) for name, each in used if not isinstance(each, types.ModuleType)),
            tuple(self._module(each, code.co_names) for each in modules),
        )

    def _module(self, module: types.ModuleType, used: Collection[str] | None) -> Any:
        """A package by its version; a module of the user by what is used of it, or else by its file."""
        if (installed := _installed(module.__name__)) is not None:
            return ("module", module.__name__, installed)
        if used is None:
            file = getattr(module, "__file__", None)
            if file is None or not Path(file).is_file():
                raise UnnamedError(f"it refers to {module!r:.80}, which has no file")
            return ("module", module.__name__, xxhash.xxh3_128_hexdigest(Path(file).read_bytes()))
        if module.__name__ in self._inside:
            return ("module", module.__name__)
        self._inside.append(module.__name__)
        found = [(name, vars(module)[name]) for name in used if name in vars(module)]
        parts = [
            (name, self._module(each, used) if isinstance(each, types.ModuleType) else self.of(each))
            for name, each in found
        ]
        self._inside.pop()
        return ("module", module.__name__, tuple(parts))

    def _class(self, kind: type) -> Any:
        if (installed := _installed(kind.__module__)) is not None:
            return ("class", _qualified(kind), installed)
        own = {
            name: value
            for name, value in vars(kind).items()
            if name
            not in (
                "__dict__",
                "__weakref__",
                "__doc__",
                "__module__",
                "__abstractmethods__",
                "_abc_impl",
                "__annotations__",
            )
            and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
            and not name.startswith(("__firstlineno", "__static_attributes"))
        }
        bases = tuple(self.of(base) for base in kind.__bases__ if base is not object)
        return ("class", _qualified(kind), bases, tuple((name, self.of(value)) for name, value in own.items()))

    def _object(self, value: Any) -> Any:
        if isinstance(value, RowSchema):
            return ("schema", str(value._given))
        kind = type(value)
        try:
            reduced = value.__reduce_ex__(2)
        except Exception as error:
            raise UnnamedError(f"it refers to {value!r:.80}, which no text stands for ({error})") from error
        if isinstance(reduced, str):
            return ("object", self.of(kind), reduced, self.of(getattr(value, "__dict__", None)))  # as lru_cache has
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        parts = [self.of(each) for each in (kind, make, args)]
        parts += [tuple(self.of(each) for each in values or ()) for values in (items, pairs)]
        for each in state if isinstance(state, tuple) else (state,):
            kept = each
            if isinstance(each, dict):
                kept = {name: one for name, one in sorted(each.items(), key=repr) if not isinstance(one, _PASSING)}
            parts.append(self.of(kept))
        return ("object", *parts)


def _imported(code: types.CodeType, names: Mapping[str, Any]) -> list[types.ModuleType]:
    """Modules that a function imports when it runs, which have to be there then; one that is not is left out."""
    found = []
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            for name in (str(step.argval), f"{names.get('__package__')}.{step.argval}"):
                try:
                    found.append(importlib.import_module(name))
                    break
                except Exception:  # noqa: BLE001 - running it would raise too
                    continue
    return found


def _hashed(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


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
    if module is None or module == "__main__":  # whatever runs: of a worker process it is a file of penstock
        return None
    top = module.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return f"python {sys.version_info[0]}.{sys.version_info[1]}"
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
