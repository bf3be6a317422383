"""What has to be found out about a CSV file before it can be read: its encoding, its delimiter, its header."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import DataError, SchemaError

__all__ = ["Looked", "as_utf8", "look", "may_have_codes", "refuse_open_quote"]

_MARKS = (  # the longer ones first: that of UTF-32 begins as that of UTF-16 does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DELIMITERS = (";", ",", "\t", "|")
"""Of several that fit equally well, the first: commas beside semicolons are decimal ones."""
_SAMPLE_CHARACTERS, _SAMPLE_ROWS = 1 << 18, 1000
_SCANNED_BYTES, _WIDE_BYTES = 1 << 20, 1 << 12
_BLANK = re.compile(rb"(?: *(?:\r\n|\n|\r))+")
_DECLARED = re.compile(rb'"?sep=([^\r\n"])"? *(?:\r\n|\n|\r)', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Looked:
    """What the first rows of a file tell."""

    delimiter: str
    names: tuple[str, ...]
    start: int = 0
    """The byte at which the header begins, behind blank lines and the `sep=;` that Excel writes."""
    lines: int = 0
    """How many lines stand before it."""


def as_utf8(data: bytes, encoding: str | None, file: str) -> bytes:
    """The bytes as UTF-8 without a byte order mark; a mark tells the encoding if nobody else does."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    name = encoding or marked or "utf-8"
    if encoding is None and marked is None and (wide := _wide(data)) is not None:
        raise DataError(
            f"it looks like {wide} without a byte order mark: every other byte is zero; pass encoding={wide!r}",
            file=file,
        )
    try:
        known = codecs.lookup(name).name
    except LookupError:
        raise DataError(f"{encoding!r} is not an encoding that Python knows", file=file) from None
    if known == "utf-8" and marked == "utf-8-sig":
        known = "utf-8-sig"
    try:
        if known in ("utf-8", "ascii"):
            data.decode(known)
            return data
        if known == "utf-8-sig":
            data.decode(known)
            return data.removeprefix(codecs.BOM_UTF8)
        return data.decode(known).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"the bytes are not {known}: {data[error.start : error.start + 4]!r} in line {line}; pass the encoding "
            "that it was written in, often encoding='latin-1' or 'cp1252'",
            file=file,
            offset=error.start,
        ) from None


def look(data: bytes, delimiter: str | None, file: str) -> Looked:
    """The delimiter, unless it is given, and the names in the header, from the first rows of UTF-8 text."""
    start, declared = _beginning(data)
    text = data[start : start + _SAMPLE_CHARACTERS].decode("utf-8", "ignore")
    whole = len(data) - start <= _SAMPLE_CHARACTERS
    if not text.strip():
        raise DataError("the file is empty; expected a header line and rows", file=file)
    found = delimiter or declared or _delimiter(text, whole)
    names = _names(_rows(text, found, whole)[0], file)
    return Looked(found, names, start, len(re.findall(rb"\r\n|\n|\r", data[:start])))


def may_have_codes(data: bytes, delimiter: str) -> bool:
    """Whether some cell may begin as 007 and 0x1F do, which numbers would not give back; certain if it says no."""
    before, behind = np.zeros(256, np.bool_), np.zeros(256, np.bool_)
    before[list(b'\r\n\t "+-' + delimiter.encode())] = True
    behind[list(b"0123456789xX")] = True
    signs = np.frombuffer(data, np.uint8)
    for start in range(0, len(signs), _SCANNED_BYTES):
        part = signs[max(start - 1, 0) : start + _SCANNED_BYTES + 1]
        zeros = np.flatnonzero(part[1:-1] == ord("0")) + 1
        if (before[part[zeros - 1]] & behind[part[zeros + 1]]).any():
            return True
    return False


def refuse_open_quote(data: bytes, looked: Looked, file: str) -> None:
    """Raise if a quote is opened and never closed: all the rows behind it would be one cell, and nobody would know.

    `data` begins with the header.
    """
    if data.count(b'"') % 2 == 0:
        return
    reader = csv.reader(io.StringIO(data.decode(), newline=""), delimiter=looked.delimiter, strict=True)
    row, line = -2, 1
    try:
        for _ in reader:
            row, line = row + 1, reader.line_num + 1
    except csv.Error as error:
        if "end of data" in str(error):
            raise DataError(
                f"a quote is opened in the row that begins in line {looked.lines + line} and not closed up to the end "
                "of the file; "
                "close it, or write a quote inside a cell twice",
                file=file,
                row=max(row + 1, 0),
            ) from None


def _wide(data: bytes) -> str | None:
    """The encoding of two bytes for a sign, if the beginning is so: the signs of a header have a zero each."""
    first = np.frombuffer(data[:_WIDE_BYTES], np.uint8) == 0
    even, odd = int(first[::2].sum()), int(first[1::2].sum())
    if not even + odd or 10 * (even + odd) < len(first) or 10 * min(even, odd) > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _beginning(data: bytes) -> tuple[int, str | None]:
    """Where the header begins, and the delimiter if the line before it says one."""
    blank = _BLANK.match(data)
    start = blank.end() if blank else 0
    declared = _DECLARED.match(data, start)
    if declared is None:
        return start, None
    blank = _BLANK.match(data, declared.end())
    return blank.end() if blank else declared.end(), declared[1].decode("ascii", "replace")


def _delimiter(text: str, whole: bool) -> str:
    """The one that gives most rows the same number of cells, more than one; of several, the one with most cells.

    Of several with as many, the first.
    """
    best = (0.0, 0, ",")
    for candidate in _DELIMITERS:
        try:
            widths = [len(row) for row in _rows(text, candidate, whole)[:100]]
        except csv.Error:
            continue
        width, rows = Counter(widths).most_common(1)[0] if widths else (0, 0)
        if width > 1 and widths[0] == width:
            best = max(best, (round(rows / len(widths), 1), width, candidate), key=lambda one: one[:2])
    return best[2]


def _rows(text: str, delimiter: str, whole: bool) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    rows = []
    try:
        for row in reader:
            if row:
                rows.append(row)
            if len(rows) > _SAMPLE_ROWS:
                break
    except csv.Error:
        pass  # the rows are read by another parser; here only their beginnings count
    return rows if whole or len(rows) < 2 or len(rows) > _SAMPLE_ROWS else rows[:-1]  # the last may be cut


def _names(header: Sequence[str], file: str) -> tuple[str, ...]:
    """The names, without blanks around them; a column without one (an index somebody saved) is called by its place."""
    names = tuple(name.strip() or f"Unnamed: {place}" for place, name in enumerate(header))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SchemaError(f"{file}: the header has {twice[0]!r} twice; every column needs a name of its own")
    return names
