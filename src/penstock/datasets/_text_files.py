"""What has to be found out about a CSV file before it can be read: its encoding, its delimiter, its header."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import DataError, SchemaError

__all__ = ["Looked", "as_utf8", "look", "refuse_open_quote"]

_MARKS = (  # the longer ones first: that of UTF-32 begins as that of UTF-16 does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DELIMITERS = (",", ";", "\t", "|")
_SAMPLE_CHARACTERS, _SAMPLE_ROWS = 1 << 18, 1000
_ZERO_FIRST = re.compile(r"[+-]?0[0-9]+")


@dataclass(frozen=True, slots=True)
class Looked:
    """What the first rows of a file tell."""

    delimiter: str
    names: tuple[str, ...]
    zero_first: frozenset[str]
    """Columns in which some number is written with a zero in front, such as 007: they are texts."""


def as_utf8(data: bytes, encoding: str | None, file: str) -> bytes:
    """The bytes as UTF-8 without a byte order mark; a mark tells the encoding if nobody else does."""
    marked = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    name = encoding or marked or "utf-8"
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
    text = data[:_SAMPLE_CHARACTERS].decode("utf-8", "ignore")
    whole = len(data) <= _SAMPLE_CHARACTERS
    if not text.strip():
        raise DataError("the file is empty; expected a header line and rows", file=file)
    found = delimiter or _delimiter(text, whole)
    rows = _rows(text, found, whole)
    names = _names(rows[0], file)
    zero_first = {name for row in rows[1:] for name, cell in zip(names, row) if _ZERO_FIRST.fullmatch(cell.strip())}
    return Looked(found, names, frozenset(zero_first))


def refuse_open_quote(data: bytes, delimiter: str, file: str) -> None:
    """Raise if a quote is opened and never closed: all the rows behind it would be one cell, and nobody would know."""
    if data.count(b'"') % 2 == 0:
        return
    reader = csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter, strict=True)
    row, line = -2, 1
    try:
        for _ in reader:
            row, line = row + 1, reader.line_num + 1
    except csv.Error as error:
        if "end of data" in str(error):
            raise DataError(
                f"a quote is opened in the row that begins in line {line} and not closed up to the end of the file; "
                "close it, or write a quote inside a cell twice",
                file=file,
                row=max(row + 1, 0),
            ) from None


def _delimiter(text: str, whole: bool) -> str:
    """The one that gives most rows the same number of cells, more than one; of several, the one with most cells."""
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
