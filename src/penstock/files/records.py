"""Record boundaries in raw bytes: lines, CSV records with quoted newlines, the objects of a JSON file.

A cutter looks at a buffer that begins at a record boundary and returns how much of it is whole records. So input is
cut into blocks by a cheap scan and parsed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.files.json_values import MAX_DEPTH, DepthError, is_too_deep

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_NEWLINE, _RETURN, _QUOTE, _BACKSLASH, _COMMA = b'\n\r"\\,'
_OPEN, _CLOSE, _ARRAY_END = b"{}]"
_PIECE = 1 << 20
_IS_SEPARATOR = np.zeros(256, bool)
_IS_SEPARATOR[list(b" \t\r\n,")] = True
_IS_SPACE, _IS_LINE_END = np.zeros(256, bool), np.zeros(256, bool)
_IS_SPACE[list(b" \t\r\n\v\f")] = True
_IS_LINE_END[list(b"\r\n")] = True
_DENSE, _STRIDE = 16, 61
"""Lines that are shorter than this on average are looked through for empty ones: positions take more than they do. The
average is that of every 61st byte: it decides on the way, not on the result."""


class Cutter(Protocol):
    """Finds the ends of records, and their other properties."""

    newline_ends: bool
    """True if every newline ends a record, so that reading can resume at the next line after one that is too long."""

    def cut(self, data: Bytes) -> tuple[int, int]:
        """(bytes up to the last record end, number of records there); (0, 0) when no record is whole."""
        ...

    def spans(self, data: Bytes) -> tuple[Positions, Positions]:
        """Start and stop of each record in a run of whole records."""
        ...

    def leftover(self, rest: Bytes) -> int:
        """Number of records after the last record end of a file; ValueError if the file cannot end like this."""
        ...

    def blank(self, data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
        """Flags of the records without a row, such as empty lines; each begins at its start and ends at the next."""
        ...

    def prepare(self, data: Bytes) -> tuple[Bytes, int]:
        """Whole records as a parser takes them, a copy where bytes have to change, and how many rows they hold.
        ValueError for what a parser would not notice, or not survive."""
        ...


class Lines:
    """One record a line; empty lines are records too."""

    newline_ends = True

    def cut(self, data: Bytes) -> tuple[int, int]:
        end = _last_newline(data)
        return end, _count(data[:end], _NEWLINE)

    def spans(self, data: Bytes) -> tuple[Positions, Positions]:
        return _between(self._ends(data), len(data))

    def leftover(self, rest: Bytes) -> int:
        return 1 if len(rest) else 0

    def blank(self, data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
        return np.zeros(len(starts), bool)

    def prepare(self, data: Bytes) -> tuple[Bytes, int]:
        return data, len(self.spans(data)[0])

    def _ends(self, data: Bytes) -> Positions:
        return positions_of(data, _NEWLINE) + 1


class WholeFile(Lines):
    """The whole file is the record."""

    newline_ends = False

    def cut(self, data: Bytes) -> tuple[int, int]:
        return 0, 0

    def _ends(self, data: Bytes) -> Positions:
        return np.empty(0, np.int64)


class JsonLines(Lines):
    """One JSON object a line."""

    def blank(self, data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
        return _made_of(_IS_SPACE, data, starts)

    def prepare(self, data: Bytes) -> tuple[Bytes, int]:
        # Arrow's parser takes no notice of lines, makes a row of nulls of `null`, and crashes if that is the first row.
        if _DENSE * np.count_nonzero(data[::_STRIDE] == _NEWLINE) > len(data) // _STRIDE:
            data = _without_empty_lines(data)
        starts, stops = self.spans(data)
        unusual = data[starts] != _OPEN
        empty = self.blank(data, starts)
        for i in np.flatnonzero(unusual & ~empty).tolist():
            if data[starts[i] : stops[i]].tobytes().lstrip()[0] != _OPEN:
                raise ValueError("a row is not a JSON object")
        rows = len(starts) - int(np.count_nonzero(empty))
        if (
            _count(data, _OPEN, fold=0x20) >= rows + MAX_DEPTH
        ):  # every row has one: otherwise none has more than `MAX_DEPTH`
            _check_depth(data, starts, stops)
        return data, rows


class CsvRecords(Lines):
    """Lines, except that a newline between quotes belongs to the value.

    As CSV parsers do it: a quote opens a value only where a value begins, elsewhere it is a character like any other,
    and a doubled quote does not close. Blank lines are no rows.
    """

    newline_ends = False

    def __init__(self, delimiter: str = ",") -> None:
        self._before_value = (ord(delimiter), _NEWLINE, _RETURN)

    def cut(self, data: Bytes) -> tuple[int, int]:
        ends = self._ends(data)
        return (int(ends[-1]), len(ends)) if len(ends) else (0, 0)

    def leftover(self, rest: Bytes) -> int:
        if len(self._quotes(rest)) % 2:
            raise ValueError("the file ends inside a quoted value: a closing quote is missing")
        return super().leftover(rest)

    def blank(self, data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
        return _made_of(_IS_LINE_END, data, starts)

    def prepare(self, data: Bytes) -> tuple[Bytes, int]:
        starts, _ = self.spans(data)
        return data, len(starts) - int(np.count_nonzero(self.blank(data, starts)))

    def _ends(self, data: Bytes) -> Positions:
        newlines = np.flatnonzero(data == _NEWLINE)
        quotes = self._quotes(data)
        if len(quotes):
            newlines = newlines[np.searchsorted(quotes, newlines) % 2 == 0]
        return newlines + 1

    def _quotes(self, data: Bytes) -> Positions:
        """The quotes such that what lies after an odd number of them is inside a value."""
        quotes = np.flatnonzero(data == _QUOTE)
        opening = quotes[::2]
        before = data[opening[opening > 0] - 1]
        # If every second quote stands where a value begins, or right after the one before it, simple parity is right.
        if np.isin(before, (*self._before_value, _QUOTE)).all():
            return quotes
        return self._quotes_one_by_one(data, quotes.tolist())

    def _quotes_one_by_one(self, data: Bytes, quotes: list[int]) -> Positions:
        kept: list[int] = []
        inside, doubled = False, -1
        for at, following in zip(quotes, [*quotes[1:], -1]):
            if at == doubled:
                continue
            if not inside:
                inside = at == 0 or int(data[at - 1]) in self._before_value
                if inside:
                    kept.append(at)
            elif following == at + 1:
                doubled = following
            else:
                inside = False
                kept.append(at)
        return np.array(kept, np.int64)


class JsonItems:
    """The objects of a JSON file, over any number of lines: those of one array, or just one after the other.

    The bracket that opens the array is not part of the data. A comma and space separate the objects; what else stands
    between two of them belongs to the second, which is then no valid JSON. So does the end of the first, if a comma is
    missing or doubled. Outside of an array any number of commas will do.
    """

    newline_ends = False

    def __init__(self, *, in_array: bool) -> None:
        self._in_array = in_array

    def cut(self, data: Bytes) -> tuple[int, int]:
        _, stops = _top_level(data)
        count = len(stops)
        if count > 1 and self._in_array and data[stops[-1] :][:256].tobytes().lstrip()[:1] in (b"{", b"["):
            count -= 1  # no comma: that is seen if both objects are in one piece
        return (int(stops[count - 1]), count) if count else (0, 0)

    def spans(self, data: Bytes) -> tuple[Positions, Positions]:
        starts, stops = _top_level(data)
        gap, owner = _gaps(starts, stops)
        strange = np.flatnonzero(~_IS_SEPARATOR[data[gap]])
        _, first = np.unique(owner[strange], return_index=True)
        starts[owner[strange[first]]] = gap[strange[first]]
        if self._in_array:
            miscounted = self._miscounted(data[gap], owner, len(starts))
            miscounted[owner[strange]] = False
            wrong = np.flatnonzero(miscounted)
            starts[wrong] = np.maximum(np.append(0, stops)[wrong] - 1, 0)
        return starts, stops

    @staticmethod
    def _miscounted(gap: Bytes, owner: Positions, count: int) -> npt.NDArray[np.bool_]:
        """True for the objects that do not have one comma before them; the first of a piece may be that of the file."""
        commas = np.bincount(owner[gap == _COMMA], minlength=count)
        wrong: npt.NDArray[np.bool_] = commas != 1
        wrong[:1] &= commas[:1] != 0
        return wrong

    def leftover(self, rest: Bytes) -> int:
        return self._leftover(rest.tobytes())

    def _leftover(self, rest: bytes) -> int:
        left = rest.strip(b" \t\r\n,")
        if left == (b"]" if self._in_array else b""):
            if self._in_array and b"," in rest:
                raise ValueError(f"there is a comma at the end of the array: {rest.strip()[:60]!r}")
            return 0
        if not left:
            raise ValueError("the file ends before its array is closed: it was cut short")
        if left.startswith(b"]"):
            raise ValueError(f"the file continues after the end of its array: {left[1:60].strip()!r}")
        if b"{" not in left and b"[" not in left:
            raise ValueError(f"expected JSON objects, got {left[:60]!r}")
        raise ValueError(f"the file ends inside an object: {left[:60]!r}")

    def blank(self, data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
        return np.zeros(len(starts), bool)  # a record has brackets

    def prepare(self, data: Bytes) -> tuple[Bytes, int]:
        """Parsers of separate objects take no commas between them, nor the array's end."""
        brackets, opening, depth = _brackets(data)
        if depth.max(initial=0) > MAX_DEPTH:
            raise DepthError
        starts, stops = _outermost(brackets, opening, depth)
        gap, owner = _gaps(starts, stops)
        after = np.arange(stops[-1] if len(stops) else 0, len(data))
        if not _IS_SEPARATOR[data[gap]].all() or not (_IS_SEPARATOR[data[after]] | (data[after] == _ARRAY_END)).all():
            raise ValueError("expected only JSON objects, got other text between them")
        if self._in_array and self._miscounted(data[gap], owner, len(starts)).any():
            raise ValueError("expected one comma between two JSON objects")
        between = np.concatenate([gap, after])
        ready = data.copy()
        ready[between[data[between] == _COMMA]] = _NEWLINE
        ready[after[data[after] == _ARRAY_END]] = _NEWLINE
        return ready, len(starts)


def _made_of(kind: npt.NDArray[np.bool_], data: Bytes, starts: Positions) -> npt.NDArray[np.bool_]:
    """Flags of the records that consist of such characters alone."""
    found: npt.NDArray[np.bool_] = kind[data[starts]]
    if len(starts) == 1:
        found &= all(bool(kind[piece].all()) for piece in _pieces(data)) if found[0] else False
    elif found.any():
        found = np.logical_and.reduceat(kind[data], starts)
    return found


def _without_empty_lines(data: Bytes) -> Bytes:
    """Lines, as a copy without those that are nothing but their newline."""
    kept = data != _NEWLINE
    kept[1:] |= kept[:-1].copy()
    lines: Bytes = data[kept]
    return lines


def _between(ends: Positions, size: int) -> tuple[Positions, Positions]:
    """Records that follow one another without a gap; the last may lack its end."""
    stops = ends if len(ends) and ends[-1] == size else np.append(ends, size)
    if not size:
        stops = stops[:0]
    return np.append(np.zeros(1, np.int64), stops[:-1])[: len(stops)], stops


def first_newline(data: Bytes) -> int:
    """Position just past the first newline, 0 if there is none."""
    for start in range(0, len(data), 1 << 20):
        found = data[start : start + (1 << 20)].tobytes().find(b"\n")
        if found >= 0:
            return start + found + 1
    return 0


def _last_newline(data: Bytes) -> int:
    """Position just past the last newline, looking from the end in growing steps."""
    stop, step = len(data), 1 << 12
    while stop > 0:
        start = max(0, stop - step)
        found = data[start:stop].tobytes().rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop, step = start, min(4 * step, 1 << 20)
    return 0


def _pieces(data: Bytes) -> Iterator[Bytes]:
    return (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))


def _equal(data: Bytes, byte: int, fold: int = 0) -> Iterator[npt.NDArray[np.bool_]]:
    """Flags of a byte, piece by piece, in the same memory: fresh memory costs more than comparing, and so does waiting
    for the interpreter lock after each of many small pieces. `fold` has bits that are set before bytes are compared."""
    flags = np.empty(min(len(data), _PIECE), np.bool_)
    for piece in _pieces(data):
        into = flags[: len(piece)]
        folded = np.bitwise_or(piece, np.uint8(fold), out=into.view(np.uint8)) if fold else piece
        yield np.equal(folded, byte, out=into)


def _count(data: Bytes, byte: int, fold: int = 0) -> int:
    return sum(int(np.count_nonzero(piece)) for piece in _equal(data, byte, fold))


def positions_of(data: Bytes, byte: int, fold: int = 0) -> Positions:
    """Positions of a byte. Searched in pieces, since the search holds the interpreter lock."""
    found = [np.flatnonzero(piece) for piece in _equal(data, byte, fold)]
    for number, part in enumerate(found):
        part += number * _PIECE
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _check_depth(data: Bytes, starts: Positions, stops: Positions) -> None:
    """Raise DepthError if a record has too many levels; only those with many brackets are looked at."""
    brackets = positions_of(data, _OPEN, fold=0x20)
    counts = np.searchsorted(brackets, stops) - np.searchsorted(brackets, starts)
    for number in np.flatnonzero(counts > MAX_DEPTH).tolist():
        if is_too_deep(data[starts[number] : stops[number]].tobytes()):
            raise DepthError


def _top_level(data: Bytes) -> tuple[Positions, Positions]:
    """Starts and stops of the outermost bracketed values, up to a closing bracket that none of them opened."""
    return _outermost(*_brackets(data))


def _outermost(
    brackets: Positions, opening: npt.NDArray[np.bool_], depth: npt.NDArray[np.int32]
) -> tuple[Positions, Positions]:
    stops = brackets[(depth == 0) & ~opening] + 1
    return brackets[(depth == 1) & opening][: len(stops)], stops


def _brackets(data: Bytes) -> tuple[Positions, npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """The brackets outside strings, which of them open, and the depth after each."""
    folded = data | 0x20  # makes [ and { the same byte, and ] and }
    marks = (folded == _OPEN) | (folded == _CLOSE) | (data == _QUOTE)
    marks[_escaped_quotes(data)] = False
    at = np.flatnonzero(marks)
    quotes = data[at] == _QUOTE
    outside = np.cumsum(quotes, dtype=np.uint8) & 1 == 0  # only the parity counts, so wrapping around is fine
    brackets = at[outside & ~quotes]
    opening = folded[brackets] == _OPEN
    depth = np.cumsum(2 * opening.view(np.int8) - 1, dtype=np.int32)
    below = np.flatnonzero(depth < 0)
    if len(below):
        brackets, opening, depth = brackets[: below[0]], opening[: below[0]], depth[: below[0]]
    return brackets, opening, depth


def _escaped_quotes(data: Bytes) -> Positions:
    """Quotes after a run of backslashes of odd length."""
    slashes = np.flatnonzero(data == _BACKSLASH)
    if not len(slashes):
        return slashes
    last = np.append(np.diff(slashes) != 1, True)
    first = np.append(True, last[:-1])
    after = slashes[last] + 1
    odd = (after - slashes[first]) % 2 == 1
    after = after[odd & (after < len(data))]
    quotes: Positions = after[data[after] == _QUOTE]
    return quotes


def _gaps(starts: Positions, stops: Positions) -> tuple[Positions, Positions]:
    """The positions in front of each value that belong to no other, and the number of the value they stand before."""
    before = np.append(np.zeros(1, np.int64), stops[:-1])[: len(stops)]
    lengths = starts - before
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(lengths.sum()) + np.repeat(before - np.cumsum(lengths) + lengths, lengths), owner
