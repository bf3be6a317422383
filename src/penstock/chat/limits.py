"""Limits of one rendering of a template: how much text and how many values it may make.

A template is untrusted code, and a few characters of it can ask for gigabytes. So sizes are computed before values are
made. What a rendering may make grows with what it is given: samples are small, and conversations may be long.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_CHARS = 1 << 26
"""Length of a rendered text, and of every string on the way."""
MAX_ITEMS = 1 << 20
"""Length of every list."""
MAX_BITS = 1 << 12
"""Size of every whole number."""

_BYTES, _BYTES_BY_GIVEN = 1 << 23, 2000
_WEIGHT, _WEIGHT_BY_GIVEN = 1 << 20, 8
_SMALL = 1 << 12
_DEPTH = 250
_GROWTH = 32
"""Bytes that a filter or a method makes of a character at most: an object for each word, or an escape."""
_VIEWS = (KeysView, ItemsView, ValuesView)

SIZED = (str, list, tuple)


class Allowance:
    """Bytes that the strings and lists of one rendering may take, all together."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given: int | Mapping[str, Any] = given
        self._left = _BYTES
        self._extended = False
        self._weights: dict[int, tuple[int, Any]] = {}
        """Sizes of containers, by identity. Templates cannot change them, and they are kept, so they stay right."""

    def check(self, nbytes: int) -> None:
        """Raise unless so much more may be made."""
        if nbytes > self._left and not self._extended:
            self._extended = True
            self._left += _BYTES_BY_GIVEN * self.given
        if nbytes > self._left:
            raise SecurityError(f"the template makes more than {_BYTES >> 20} MiB, and much more than its row")

    def charge(self, nbytes: int) -> None:
        self.check(nbytes)
        self._left -= nbytes

    @property
    def given(self) -> int:
        """Size of the variables, computed if it is needed."""
        if not isinstance(self._given, int):
            self._given = sum(self.weigh(value) for value in self._given.values())
        return self._given

    def check_weight(self, value: Any, times: int = 1) -> None:
        """Raise if a list or dict, or as many of it, must not be kept."""
        weight = self.weigh(value) * times
        if weight > _WEIGHT and weight > _WEIGHT + _WEIGHT_BY_GIVEN * self.given:
            raise SecurityError(f"the template makes a {type(value).__name__} of {weight} characters")

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Characters of a value that is written; what it contains several times counts each time."""
        if isinstance(value, str):
            return len(value) + 2
        if isinstance(value, Namespace):
            value = vars(value)
        if not isinstance(value, (list, tuple, dict, set, frozenset, *_VIEWS)):
            return 32 + len(getattr(value, "text", "")) if isinstance(value, int | float) else 32
        known = self._weights.get(id(value))
        if known is not None:
            return known[0]
        if depth > _DEPTH:
            raise SecurityError(f"the template nests values more than {_DEPTH} levels deep")
        inside: Iterable[Any] = value
        total = 2
        if isinstance(value, dict):
            total += sum(self.weigh(key, depth + 1) for key in value)
            inside = value.values()
        total += sum(self.weigh(item, depth + 1) + 2 for item in inside)
        self._weights[id(value)] = total, value
        return total


_local = threading.local()


def begin(given: Mapping[str, Any]) -> None:
    """Begin a rendering in this thread."""
    _local.allowance = Allowance(given)


def allowance() -> Allowance:
    """Allowance of the rendering in this thread."""
    if not hasattr(_local, "allowance"):
        begin({})
    found: Allowance = _local.allowance
    return found


def bound(length: int, kind: Any = "") -> None:
    """Raise if a string or list of this length must not be made."""
    most = MAX_CHARS if isinstance(kind, str) else MAX_ITEMS
    if length > most:
        raise SecurityError(f"the template would make a {type(kind).__name__} of length {length}, more than {most}")
    if length > _SMALL:
        allowance().check(length if isinstance(kind, str) else 8 * length)


def bounded(value: Any) -> Any:
    """The value, if it may be kept; its size is charged."""
    if isinstance(value, str):
        if len(value) > _SMALL:
            bound(len(value))
            allowance().charge(sys.getsizeof(value))
    elif isinstance(value, list | tuple | dict):
        if len(value) > _SMALL:
            bound(len(value), value)
            allowance().charge(8 * len(value))
        allowance().check_weight(value)
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"the template makes a number of more than {MAX_BITS} bits")
    return value


def writable(value: Any) -> Any:
    """The value, if its text may be made."""
    if not isinstance(value, str) and (size := allowance().weigh(value)) > _SMALL:
        allowance().check(4 * size)
    return value


def check_arguments(values: Iterable[Any]) -> None:
    """Raise if a filter or method could make too much of these."""
    for value in values:
        if isinstance(value, str) and len(value) > _SMALL:
            allowance().check(_GROWTH * len(value))
        elif isinstance(value, list | tuple | dict):
            writable(value)


def check_product(left: Any, right: Any) -> None:
    """Raise if `left * right` must not be made."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, SIZED) and isinstance(other, int):
            bound(len(one) * other, one)
            if not isinstance(one, str):
                allowance().check_weight(one, other)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError(f"templates may compute with numbers of up to {MAX_BITS} bits")


def check_power(left: Any, right: Any) -> None:
    """Raise if `left ** right` must not be made."""
    if not (isinstance(right, int) and -64 <= right <= 64):
        raise SecurityError("templates may raise to powers up to 64 only")
    if isinstance(left, int) and left.bit_length() * right > MAX_BITS:
        raise SecurityError(f"templates may compute with numbers of up to {MAX_BITS} bits")


def check_filled(form: str, fields: int, values: Iterable[Any]) -> None:
    """Raise if the form, filled with values in so many fields, must not be made."""
    widest = max((allowance().weigh(value) for value in values), default=0)
    if any(map(str.isdigit, form)):
        widest += 9999  # the largest width that a form may ask for
    bound(len(form) + fields * widest)
