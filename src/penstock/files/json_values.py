"""JSON whose numbers keep their spelling: `1.50` stays `1.50`, and an integer of any length stays one.

JSON in a row reaches a template as the file has it: keys in their order, nulls, numbers as written.
Python's own numbers forget how they were written, so a number with an unusual spelling is a `FloatText` or an
`IntText`, which compares and computes like any other and is written as its text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Self

import numpy as np
import orjson

MAX_DEPTH = 200
"""Levels of lists and objects inside each other, the outermost included. Arrow's parser ends the process on some ten
thousand, Python's functions on types and values fail from about 300 on, and orjson writes 254."""

# orjson is several times faster, but rounds long integers and forgets spellings: text without such numbers is its.
_UNUSUAL = re.compile(r"\d[.eE]|\d{16}|-0|NaN|Infinity|\\u[dD][89a-fA-F]")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_OPEN, _CLOSE = "\udbf0", "\udbf1"
_QUOTED = re.compile(f'"{_OPEN}([^{_CLOSE}]*){_CLOSE}"')


_MARKS = b'"[]{}'
_FOLDED = bytes.maketrans(b"{}", b"[]")
_UNMARKED = bytes(byte for byte in range(256) if byte not in _MARKS)


class DepthError(ValueError):
    """JSON with more than `MAX_DEPTH` levels."""

    def __init__(self) -> None:
        super().__init__(f"nested deeper than {MAX_DEPTH} levels")


class _Spelled:
    """Number that is written as the text it was read from."""

    text: str

    def __new__(cls, value: float, text: str) -> Self:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __format__(self, form: str) -> str:
        return super().__format__(form) if form else self.text


class FloatText(_Spelled, float):
    """A float that is written as the text it was read from."""

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        return float(self), self.text


class IntText(_Spelled, int):
    """An integer that is written as the text it was read from."""

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        return int(self), self.text


def loads(text: str | bytes) -> Any:
    """Value of a JSON text, with every number as it is spelled. Raises ValueError for what is not JSON, and its
    subclass `DepthError` for too many levels."""
    if is_too_deep(text):
        raise DepthError
    if isinstance(text, bytes):
        text = text.decode()
    if _UNUSUAL.search(text) is None:
        return orjson.loads(text)
    try:
        value = json.loads(text, parse_float=_float, parse_int=_int)
        if _SURROGATE.search(text) is not None:
            json.dumps(spelled(value), ensure_ascii=False).replace(_OPEN, "").replace(_CLOSE, "").encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate, half of a character") from None
    return value


def is_too_deep(text: str | bytes) -> bool:
    """True if a JSON text has more than `MAX_DEPTH` levels, up to where it is valid. Takes next to no time where it has
    few brackets, and does not recurse."""
    if isinstance(text, str):
        if text.count("[") + text.count("{") <= MAX_DEPTH:
            return False
        text = text.encode("utf-8", "surrogatepass")
    elif text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(_FOLDED, _UNMARKED).replace(b'""', b"")  # a pair of quotes changes nothing for the others
    if b'"' in marks:
        marks = b"".join(marks.split(b'"')[::2])
    steps = np.where(np.frombuffer(marks, np.uint8) == ord("["), 1, -1)
    return int(np.cumsum(steps).max(initial=0)) > MAX_DEPTH


def dumps(
    value: Any,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The value as JSON text, laid out as Python's `json` does, with numbers spelled as they were read."""
    text = json.dumps(spelled(value), ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if _OPEN in text:
        text = _QUOTED.sub(lambda found: found[1], text)
    return "".join(map(_escaped, text)) if ensure_ascii and not text.isascii() else text


def spelled(value: Any) -> Any:
    """The value with its spelled numbers as marked texts, for an encoder that knows no such numbers."""
    kind = type(value)
    if kind is FloatText or kind is IntText:
        return f"{_OPEN}{value.text}{_CLOSE}"
    if kind is dict:
        return {key: spelled(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [spelled(item) for item in value]
    return value


def _escaped(letter: str) -> str:
    # A lone surrogate cannot come from a file: it marks a place, and has to be found again.
    return letter if letter.isascii() or "\ud800" <= letter <= "\udfff" else json.dumps(letter)[1:-1]


def _float(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else FloatText(value, text)


def _int(text: str) -> int:
    if len(text) > 4300:  # what Python refuses to convert: no template computes with it
        return IntText(0, text)
    value = int(text)
    return value if str(value) == text else IntText(value, text)
