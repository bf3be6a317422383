"""Tables of competitions: CSV with any delimiter and encoding, compressed (also `train.csv.zip`) or not, and Parquet.

table = read_table("train.csv")
table = read_table("s3://bucket/titanic/train.csv.gz", kinds={"Age": "numeric", "Ticket": "text"})

Every cell of a CSV file is read as text; `penstock.datasets.column_types` then decides the types of the columns.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import xxhash

from penstock._suggest import did_you_mean
from penstock.datasets.column_types import as_kinds, check_followed, typed_columns
from penstock.datasets.rows import plain_column
from penstock.datasets.spec import ColumnKind, DatasetSpec, check_delimiter
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.checksums import PARQUET_TAIL, check_file
from penstock.files.compression import DamagedStreamError, open_input
from penstock.files.listing import split_suffix
from penstock.files.remote import RemotePath, fetch, is_remote

MISSING = (
    *("", "NA", "N/A", "n/a", "NaN", "nan", "-nan", "-NaN", "null", "NULL", "<NA>"),
    *("#N/A", "#N/A N/A", "#NA", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
"""Cells that are missing values, also in text. `None` is text: it is a category of House Prices."""

_TEXT_SUFFIXES, _PARQUET_SUFFIXES = (".csv", ".tsv", ".txt", ".tab", ".data"), (".parquet", ".pq")
_SUFFIXES = (*_TEXT_SUFFIXES, *_PARQUET_SUFFIXES, "")
_ZIP = ".zip"
_BLOCK_BYTES, _LARGEST_BLOCK = 1 << 20, 1 << 30
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
    "sample_submission": ("sample_submission", "samplesubmission", "gender_submission", "submission_sample"),
}
_BYTE_ORDER_MARKS = (  # the longer ones first: UTF-32 begins as UTF-16 does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_DELIMITERS = (";", ",", "\t", "|")
"""Candidates; on a tie the first: commas in a file of semicolons are decimal ones."""
_SAMPLE_CHARACTERS, _SAMPLE_ROWS = 1 << 18, 1000
_BLANK = re.compile(rb"(?: *(?:\r\n|\n|\r))+")
_DECLARED = re.compile(rb'"?sep=([^\r\n"])"? *(?:\r\n|\n|\r)', re.IGNORECASE)


def read_table(
    path: str | os.PathLike[str],
    *,
    delimiter: str | None = None,
    encoding: str | None = None,
    columns: Sequence[str] | None = None,
    kinds: Mapping[str, ColumnKind | None] | None = None,
    followed: Mapping[str, pa.DataType] | None = None,
    date_formats: Mapping[str, str] | None = None,
    missing: Sequence[str] = MISSING,
) -> pa.Table:
    """Rows of a local or remote CSV or Parquet file.

    The delimiter of a CSV file (comma, semicolon, tab, bar, or that of a first line `sep=;`) and a byte order mark are
    detected. All cells decide the type of a column: it is text if one cell is a word, or a number that would not be
    written back the same: a leading zero (007, 007.10), 0x1F, an integer beyond 64 bits, or from 2**53 on next to
    fractions. In a file of semicolons 1,5 is a number and 1.500 is ambiguous: a column of such cells stays text, with
    a warning.

    `kinds` declares the kinds of columns; a value of another kind is an error that names it. "numeric" reads 007 as 7;
    "text" keeps every cell, and so does "id" unless all are integers; "categorical" is as without a kind; "date" reads
    ISO dates, those of `date_formats`, or a format that all values share. Cells in `missing` (empty, NA, null, nan ...)
    are missing values in every kind; pass others to keep such words.

    `followed` are the columns that are "numeric" in `kinds` only because another file has numbers there, with their
    types: 007 is an error in them.
    """
    file = local_file(path)
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r} (looked from {Path.cwd()})")
    suffix = _suffixes(file.name)[0]
    kinds, followed = kinds or {}, followed or {}
    if suffix in _PARQUET_SUFFIXES:
        table = _read_parquet(file, columns)
    elif suffix in _TEXT_SUFFIXES or _suffixes(file.name)[1] == _ZIP:
        check_delimiter(delimiter)
        data = _as_utf8(_bytes(file), encoding, file.name)
        header = _header(data, delimiter, file)
        data = data[header.start :] if header.start else data
        _refuse_open_quote(data, header, file.name)
        _check_columns(columns, header.names, file.name)
        texts = _parse(data, header, file.name, columns, missing)
        # A scan of the bytes costs less than a look at every column.
        separator = re.escape(header.delimiter.encode())
        codes = re.search(rb'(?:^|[\r\n\t "+-]|%s)0[0-9xX]' % separator, data) is not None
        commas = header.delimiter == ";"
        table = typed_columns(texts, kinds, followed, file.name, has_codes=codes, decimal_commas=commas)
    else:
        raise ConfigError(f"{file.name} is not a table; expected one of {list(_SUFFIXES[:-1])}, compressed or not")
    check_followed(table, followed, file.name)
    return as_kinds(table, kinds, file.name, date_formats or {})


def read_names(path: str | os.PathLike[str], *, delimiter: str | None = None, encoding: str | None = None) -> list[str]:
    """Column names of a file, from its first bytes."""
    file = local_file(path)
    if split_suffix(file)[0] in _PARQUET_SUFFIXES:
        names: list[str] = pq.read_schema(file).names
        return names
    data = _bytes(file, _BLOCK_BYTES)
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff")) or (encoding or "").lower().startswith(("utf-16", "utf-32"))
    if len(data) == _BLOCK_BYTES and not wide:
        data = data[: data.rfind(b"\n") + 1] or data  # no character is split
    return list(_header(_as_utf8(data, encoding, file.name), delimiter, file).names)


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileContent:
    """Name, size and checksum of a file."""

    name: str
    size: int
    checksum: str
    """32 hex digits of all bytes."""

    def __str__(self) -> str:
        return f"{self.size:,} bytes, checksum {self.checksum[:8]}"


def file_contents(spec: DatasetSpec, splits: Iterable[str]) -> dict[str, FileContent]:
    """Content of the files of these splits that exist. Reads them whole, remote ones as local copies."""
    found = {}
    for split in splits:
        try:
            file = local_file(split_file(spec, split))
        except (FileNotFoundError, NotADirectoryError):
            continue
        digest, size = xxhash.xxh3_128(), 0
        with open(file, "rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        found[split] = FileContent(file.name, size, digest.hexdigest())
    return found


def local_file(path: str | os.PathLike[str]) -> Path:
    """The file itself, or a local copy of a remote one."""
    text = os.fspath(path)
    return fetch(text) if is_remote(text) else Path(text).expanduser()


def find_file(directory: Any, split: str) -> Any | None:
    """File of a split, or "sample_submission", in a directory: `train.csv`, `Train.csv.gz`, `training.parquet`."""
    if not directory.is_dir():
        return None
    wanted = _NAMES.get(split, (split,))
    found = []
    for path in directory.iterdir():
        suffix, packed = _suffixes(path.name)
        stem = path.name[: len(path.name) - len(suffix) - len(packed)].lower()
        if stem in wanted and suffix in _SUFFIXES and (suffix or packed == _ZIP):
            found.append(((wanted.index(stem), _SUFFIXES.index(suffix), packed, path.name), path))
    return min(found, key=lambda ranked: ranked[0])[1] if found else None


def split_file(spec: DatasetSpec, split: str) -> Any:
    """File of a split: that of the spec, or one that is found in its directory."""
    directory = spec.dataset_path
    named = directory / spec.files[split] if split in spec.files else None
    path = find_file(directory, split) if named is None else named if named.is_file() else None
    if path is None:
        what = f"no {split} file" if named is None else f"no file {spec.files[split]!r}"
        raise FileNotFoundError(f"{what} in {str(directory)!r}; it has {listed(directory)}")
    return path


def explain_missing(spec: DatasetSpec, split: str, error: OSError) -> str:
    """Message for a spec whose files cannot be found."""
    directory = spec.dataset_path
    data = f"the data of {spec.competition_name!r}"
    if not directory.exists():
        here = "" if isinstance(directory, RemotePath) else f" (looked from {Path.cwd()})"
        return f"{data} is expected in {str(directory)!r}, which does not exist{here}; correct dataset_path"
    if not directory.is_dir():
        return f"{data} is expected in a directory, and {str(directory)!r} is a file; use its directory as dataset_path"
    return (
        f"{data}: {str(directory)!r} has no readable {split} file ({error}); it has {listed(directory)}. "
        f"Expected {split}.csv or similar, or its name as files={{{split!r}: ...}} in the spec"
    )


def listed(directory: Any) -> str:
    """First names in a directory, for messages."""
    if not directory.is_dir():
        return "nothing, as it is not a directory"
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing in it"


def _suffixes(name: str) -> tuple[str, str]:
    """Suffix of a table and of its compression: (".csv", ".zip") of `train.csv.zip`, and of `train.zip` too."""
    if not name.lower().endswith(_ZIP):
        return split_suffix(name)
    inner = Path(name[: -len(_ZIP)]).suffix.lower()
    return (inner, _ZIP) if inner in _TEXT_SUFFIXES else ("", _ZIP)


def _bytes(file: Path, most: int | None = None) -> bytes:
    """Decompressed bytes of a file; at most the first `most`, in whole blocks."""
    if _suffixes(file.name)[1] == _ZIP:
        return _zipped(file, most)
    if not split_suffix(file)[1]:
        with open(file, "rb") as opened:
            return opened.read(-1 if most is None else most)
    pieces: list[bytes] = []
    with contextlib.closing(open_input(file)) as reader:
        try:
            while most is None or len(pieces) * _BLOCK_BYTES < most:
                piece = bytearray(_BLOCK_BYTES)
                count = reader.readinto(piece)
                if not count:
                    break
                pieces.append(bytes(memoryview(piece)[:count]))
        except DamagedStreamError as error:
            raise DataError(f"the file is damaged: {error}", file=file.name) from error
    return b"".join(pieces)


def _zipped(file: Path, most: int | None) -> bytes:
    """Bytes of the only table in a zip archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and "__MACOSX/" not in name]
            tables = [name for name in names if Path(name).suffix.lower() in _TEXT_SUFFIXES]
            if len(tables) != 1:
                raise ConfigError(
                    f"{file.name} holds {len(tables)} tables, expected one of {list(_TEXT_SUFFIXES)}: {names[:10]}; "
                    "unzip it into the directory"
                )
            with archive.open(tables[0]) as opened:
                return opened.read(-1 if most is None else most)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: a password is needed
        raise DataError(f"the file cannot be read as a zip archive: {error}", file=file.name) from error


def _read_parquet(file: Path, columns: Sequence[str] | None) -> pa.Table:
    check_file(file, PARQUET_TAIL)
    try:
        _check_columns(columns, pq.read_schema(file).names, file.name)
        table = pq.read_table(file, columns=None if columns is None else list(columns))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the file cannot be read as Parquet: {error}", file=file.name) from error
    return pa.table([plain_column(column) for column in table.columns], names=table.column_names)


def _check_columns(columns: Sequence[str] | None, names: Sequence[str], file: str) -> None:
    for name in columns or ():
        if name not in names:
            raise SchemaError(f"column {name!r} is not in {file}; it has {list(names)}{did_you_mean(name, names)}")


# -- CSV -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """Layout of a CSV file, from its first rows."""

    delimiter: str
    names: tuple[str, ...]
    start: int
    """Byte at which the header begins, after blank lines and the `sep=;` that Excel writes."""
    lines: int
    """Number of lines before it."""


def _parse(
    data: bytes, header: CsvHeader, file: str, columns: Sequence[str] | None, missing: Sequence[str]
) -> pa.Table:
    """Cells of a file as text, null where missing."""
    convert = pcsv.ConvertOptions(
        column_types=dict.fromkeys(header.names, pa.string()),
        include_columns=None if columns is None else list(columns),
        null_values=list(missing),
        strings_can_be_null=True,
        check_utf8=False,
    )
    bad: list[Any] = []

    def keep(row: Any) -> str:
        bad.append(row)
        return "error"

    for handler in (None, keep):  # rows have numbers, and the handler works, without threads only
        read = pcsv.ReadOptions(
            use_threads=handler is None,
            block_size=min(max(len(data) + 1, 1 << 10), _LARGEST_BLOCK),
            column_names=list(header.names),
            skip_rows_after_names=1,
        )
        options = pcsv.ParseOptions(delimiter=header.delimiter, newlines_in_values=True, invalid_row_handler=handler)
        try:
            return pcsv.read_csv(pa.BufferReader(data), read, options, convert)
        except pa.ArrowInvalid as error:
            problem = error
    if not bad:
        raise DataError(f"the file cannot be read as CSV: {problem}", file=file) from problem
    row = bad[0]
    raise DataError(
        f"{row.actual_columns} cells where the header has {row.expected_columns}: {str(row.text)[:80]!r}; quote cells "
        f"that contain {header.delimiter!r}, or pass the right delimiter=",
        file=file,
        row=None if row.number is None else int(row.number) - 2,
    ) from problem


def _as_utf8(data: bytes, encoding: str | None, file: str) -> bytes:
    """Bytes as UTF-8 without a byte order mark; a mark decides the encoding unless one is given."""
    marked = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), None)
    if encoding is None and marked is None and (wide := _wide(data)) is not None:
        raise DataError(f"the file looks like {wide} without a byte order mark; pass encoding={wide!r}", file=file)
    try:
        known = codecs.lookup(encoding or marked or "utf-8").name
    except LookupError:
        raise DataError(f"{encoding!r} is not an encoding that Python knows", file=file) from None
    if known == "utf-8" and marked == "utf-8-sig":
        known = "utf-8-sig"
    try:
        text = data.decode(known)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"the bytes are not {known}: {data[error.start : error.start + 4]!r} in line {line}; pass the encoding of "
            "the file, often encoding='latin-1' or 'cp1252'",
            file=file,
            offset=error.start,
        ) from None
    return data if known in ("utf-8", "ascii") else text.removeprefix("\ufeff").encode()


def _wide(data: bytes) -> str | None:
    """UTF-16 encoding of the first bytes, if they look like it: every second byte of a header is zero."""
    first = np.frombuffer(data[: 1 << 12], np.uint8) == 0
    even, odd = int(first[::2].sum()), int(first[1::2].sum())
    if not even + odd or 10 * (even + odd) < len(first) or 10 * min(even, odd) > max(even, odd):
        return None
    return "utf-16-le" if odd > even else "utf-16-be"


def _header(data: bytes, delimiter: str | None, file: Path) -> CsvHeader:
    """Delimiter, unless it is given, and column names, from the first rows of UTF-8 text."""
    start, declared = 0, None
    if blank := _BLANK.match(data):
        start = blank.end()
    if found := _DECLARED.match(data, start):
        start, declared = found.end(), found[1].decode("ascii", "replace")
        if blank := _BLANK.match(data, start):
            start = blank.end()
    text = data[start : start + _SAMPLE_CHARACTERS].decode("utf-8", "ignore")
    whole = len(data) - start <= _SAMPLE_CHARACTERS
    if not text.strip():
        raise DataError("the file is empty; expected a header line and rows", file=file.name)
    if delimiter is None and split_suffix(file)[0] == ".tsv":
        delimiter = "\t"
    delimiter = delimiter or declared or _detected(text, whole)
    header = _first_rows(text, delimiter, whole)[0]
    # A column without a name (a saved index) is called by its place.
    names = tuple(name.strip() or f"Unnamed: {place}" for place, name in enumerate(header))
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"{file.name}: the header has {name!r} twice; every column needs its own name")
    return CsvHeader(delimiter, names, start, len(re.findall(rb"\r\n|\n|\r", data[:start])))


def _detected(text: str, whole: bool) -> str:
    """Delimiter with which most rows have the same number of cells, more than one; then the one with most cells."""
    best = (0.0, 0, ",")
    for candidate in _DELIMITERS:
        widths = [len(row) for row in _first_rows(text, candidate, whole)[:100]]
        width, rows = Counter(widths).most_common(1)[0] if widths else (0, 0)
        if width > 1 and widths[0] == width:
            best = max(best, (round(rows / len(widths), 1), width, candidate), key=lambda ranked: ranked[:2])
    return best[2]


def _first_rows(text: str, delimiter: str, whole: bool) -> list[list[str]]:
    rows = []
    with contextlib.suppress(csv.Error):  # Arrow reads the rows; only their beginnings count here
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            if row:
                rows.append(row)
            if len(rows) > _SAMPLE_ROWS:
                break
    return rows if whole or len(rows) < 2 or len(rows) > _SAMPLE_ROWS else rows[:-1]  # the last may be cut


def _refuse_open_quote(data: bytes, header: CsvHeader, file: str) -> None:
    """Raise if a quote is never closed: all the rows after it would be one cell. `data` begins with the header."""
    if data.count(b'"') % 2 == 0:
        return
    reader = csv.reader(io.StringIO(data.decode(), newline=""), delimiter=header.delimiter, strict=True)
    row, line = -2, 1
    try:
        for _ in reader:
            row, line = row + 1, reader.line_num + 1
    except csv.Error as error:
        if "end of data" in str(error):
            raise DataError(
                f"the row that begins in line {header.lines + line} opens a quote that is never closed; close it, or "
                "double a quote inside a cell",
                file=file,
                row=max(row + 1, 0),
            ) from None
