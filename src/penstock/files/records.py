"""Where records end in raw bytes: lines, CSV records with quoted newlines, the objects of a JSON array.

A cutter looks at a buffer that begins at a record boundary and says how much of it is whole records, so that input can
be cut into blocks by a cheap scan and parsed elsewhere.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["CsvRecords", "Cutter", "JsonItems", "Lines"]

Bytes = npt.NDArray[np.uint8]
_NEWLINE, _QUOTE, _BACKSLASH, _COMMA = b'\n"\\,'
_OBJECT, _ARRAY, _ARRAY_END, _OPEN, _CLOSE = b"{[]{}"


class Cutter(Protocol):
    """Finds the ends of records."""

    def ends(self, data: Bytes) -> npt.NDArray[np.int64]:
        """Positions just past each whole record in `data`, which begins at a record boundary."""
        ...

    def cut(self, data: Bytes) -> tuple[int, int]:
        """(bytes up to the last record end, number of records there); (0, 0) when no record is whole."""
        ...

    def leftover(self, rest: bytes) -> int:
        """How many records the end of a file holds after the last record end; ValueError if it is half of one."""
        ...

    def prepare(self, data: Bytes) -> None:
        """Make a stretch of whole records ready for a parser, in place."""
        ...


class Lines:
    """One record a line."""

    def ends(self, data: Bytes) -> npt.NDArray[np.int64]:
        return np.flatnonzero(data == _NEWLINE) + 1

    def cut(self, data: Bytes) -> tuple[int, int]:
        end = _last_newline(data)
        return end, int(np.count_nonzero(data[:end] == _NEWLINE)) if end else 0


    def leftover(self, rest: bytes) -> int:
        return 1 if rest.strip() else 0

    def prepare(self, data: Bytes) -> None:
        return


class CsvRecords(Lines):
    """Lines, except that a newline between quotes belongs to the value. Doubled quotes keep the parity right."""

    def ends(self, data: Bytes) -> npt.NDArray[np.int64]:
        newlines = np.flatnonzero(data == _NEWLINE)
        quotes = np.flatnonzero(data == _QUOTE)
        if len(quotes):
            newlines = newlines[np.searchsorted(quotes, newlines) % 2 == 0]
        return newlines + 1

    def cut(self, data: Bytes) -> tuple[int, int]:
        ends = self.ends(data)
        return (int(ends[-1]), len(ends)) if len(ends) else (0, 0)

    def leftover(self, rest: bytes) -> int:
        if rest.count(b'"') % 2:
            raise ValueError("the file ends inside a quoted value: a closing quote is missing")
        return super().leftover(rest)


class JsonItems:
    """The objects of a JSON file: inside one top-level array, or just one after the other."""

    def ends(self, data: Bytes) -> npt.NDArray[np.int64]:
        quotes = _unescaped_quotes(data)
        folded = data | 0x20  # makes [ and { the same byte, and ] and }
        brackets = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
        # The brackets that count are those outside strings: after an even number of quotes.
        brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
        if len(brackets) and data[brackets[0]] == _ARRAY and self._at_start(data, int(brackets[0])):
            brackets = brackets[1:]
        opening = folded[brackets] == _OPEN
        depth = np.cumsum(np.where(opening, 1, -1))
        below = np.flatnonzero(depth < 0)  # the closing bracket of the array around the items
        if len(below):
            depth, opening = depth[: below[0]], opening[: below[0]]
        return brackets[: len(depth)][(depth == 0) & ~opening] + 1

    def cut(self, data: Bytes) -> tuple[int, int]:
        ends = self.ends(data)
        return (int(ends[-1]), len(ends)) if len(ends) else (0, 0)

    def leftover(self, rest: bytes) -> int:
        if rest.strip().lstrip(b"[,").strip() in (b"", b"]"):
            return 0
        raise ValueError(f"the file ends inside an object: {rest.strip()[:60]!r}")

    def prepare(self, data: Bytes) -> None:
        """Blank out the commas and brackets between the items, so that a parser of separate objects accepts them."""
        start = 0
        for end in self.ends(data).tolist():
            stop = start + int(np.argmax(data[start:end] == _OBJECT))
            gap = data[start:stop]
            gap[(gap == _COMMA) | (gap == _ARRAY)] = _NEWLINE
            start = end
        rest = data[start:]
        rest[(rest == _COMMA) | (rest == _ARRAY) | (rest == _ARRAY_END)] = _NEWLINE

    def _at_start(self, data: Bytes, position: int) -> bool:
        return not data[:position].tobytes().removeprefix(b"\xef\xbb\xbf").strip()


def _last_newline(data: Bytes) -> int:
    """Position just past the last newline, looking from the end in growing steps."""
    stop, step = len(data), 1 << 12
    while stop > 0:
        start = max(0, stop - step)
        found = data[start:stop].tobytes().rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop, step = start, step * 4
    return 0


def _unescaped_quotes(data: Bytes) -> npt.NDArray[np.int64]:
    quotes = np.flatnonzero(data == _QUOTE)
    slashes = np.flatnonzero(data == _BACKSLASH)
    if not len(slashes) or not len(quotes):
        return quotes
    # A quote is escaped when the run of backslashes right before it has an odd length.
    first = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
    run_starts = slashes[first]
    run_lengths = np.diff(np.append(first, len(slashes)))
    run_ends = run_starts + run_lengths
    at = np.searchsorted(run_ends, quotes)
    inside = np.minimum(at, len(run_ends) - 1)
    escaped = (at < len(run_ends)) & (run_ends[inside] == quotes) & (run_lengths[inside] % 2 == 1)
    return quotes[~escaped]
