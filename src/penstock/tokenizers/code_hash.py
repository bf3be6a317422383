"""Identity of functions and objects in Python: a hash of their code and of everything it refers to.

Pickled code would not do: its bytes change from process to process.
"""

from __future__ import annotations

import pickle
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import xxhash

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


def code_hash(value: Any) -> str:
    """Hash of a function or an object, 128 bits as hex; the same in every process with the same release of Python.

    Of functions it has the code, the defaults, and the variables of other scopes that are used; of objects the methods
    of the class and the attributes. Imported packages count by name. A value that can be neither looked into nor
    pickled raises what pickle raises.
    """
    digest = xxhash.xxh3_128()
    _Walk(digest.update).add(value)
    return str(digest.hexdigest())


class _Walk:
    """Everything that a value refers to, each object once."""

    def __init__(self, update: Any) -> None:
        self._update = update
        self._seen: dict[int, tuple[int, Any]] = {}
        """Number of each object, and the object, so that no other gets its id."""

    def add(self, value: Any) -> None:
        self._note(type(value).__qualname__)
        if isinstance(value, _PLAIN):
            self._note(repr(value))
        elif id(value) in self._seen:
            self._note(self._seen[id(value)][0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._add_new(value)

    def _add_new(self, value: Any) -> None:
        if isinstance(value, (list, tuple)):
            self._each(value)
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                self._each((key, value[key]))
        elif isinstance(value, (set, frozenset)):
            self._each(sorted(value, key=repr))
        elif isinstance(value, np.ndarray) and value.dtype != np.object_:
            self._note((value.dtype.str, value.shape))
            self._update(np.ascontiguousarray(value))
        elif isinstance(value, ModuleType):
            self._note((value.__name__, getattr(value, "__version__", None)))
        elif isinstance(value, BuiltinFunctionType):
            self._note(value.__qualname__)
            if not isinstance(value.__self__, (ModuleType, type(None))):
                self.add(value.__self__)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._each((value.__func__, value.__self__))
        elif isinstance(value, type):
            self._class(value)
        elif hasattr(value, "__dict__") and "__reduce__" not in vars(type(value)):
            self._each((type(value), vars(value)))
        else:
            self._update(pickle.dumps(value))

    def _each(self, values: Any) -> None:
        for value in values:
            self.add(value)

    def _code(self, code: CodeType) -> None:
        self._update(code.co_code)
        self._note((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
        self._each(code.co_consts)

    def _function(self, function: FunctionType) -> None:
        self._code(function.__code__)
        self._each((function.__defaults__, function.__kwdefaults__))
        self._each(cell.cell_contents for cell in function.__closure__ or ())
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self._note(name)
                self.add(function.__globals__[name])

    def _class(self, kind: type) -> None:
        self._note((kind.__module__, kind.__qualname__))
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in ("builtins", "typing", "abc"):
                continue
            for name, value in sorted(vars(base).items()):
                wrapped = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if isinstance(wrapped, (FunctionType, *_PLAIN, dict, list, tuple)) and name != "__doc__":
                    self._note(name)
                    self.add(wrapped)

    def _note(self, value: Any) -> None:
        self._update(repr(value).encode() + b"\n")


def _names(code: CodeType) -> set[str]:
    """Names of globals that a function and those inside it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))
