"""Tables as competitions have them: CSV in any delimiter and encoding, compressed or not, and Parquet.

table = read_table("train.csv")
table = read_table("s3://bucket/titanic/train.csv.gz", kinds={"Age": "numeric", "Ticket": "text"})
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from penstock._suggest import did_you_mean
from penstock.datasets.column_types import (
    as_kinds,
    check_followed,
    doubtful_columns,
    with_codes,
    with_decimal_commas,
    with_unclear_points,
)
from penstock.datasets.csv_dialect import Looked, as_utf8, look, may_have_codes, refuse_open_quote
from penstock.datasets.frames import plain_column
from penstock.datasets.spec import ColumnKind, DatasetSpec
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.checksums import PARQUET_TAIL, check_file
from penstock.files.compression import DamagedStreamError, open_input
from penstock.files.listing import split_suffix
from penstock.files.remote import RemotePath, fetch, is_remote

__all__ = ["MISSING", "explain_missing", "find_file", "local_file", "read_names", "read_table", "split_file"]

MISSING = (
    *("", "NA", "N/A", "n/a", "NaN", "nan", "-nan", "-NaN", "null", "NULL", "<NA>"),
    *("#N/A", "#N/A N/A", "#NA", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
"""Cells that are missing values, in texts too. `None` is a text: it is a category of House Prices."""

_TEXT_SUFFIXES, _PARQUET_SUFFIXES = (".csv", ".tsv", ".txt", ".tab", ".data"), (".parquet", ".pq")
_LARGEST_BLOCK, _HEADER_BYTES = 1 << 30, 1 << 20
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
    "sample_submission": ("sample_submission", "samplesubmission", "gender_submission", "submission_sample"),
}
_CONVERSION = re.compile(r"In CSV column #(\d+): (?:CSV )?conversion error")


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
    """The rows of a CSV or Parquet file, local or behind a URL.

    Of a CSV file the delimiter (comma, semicolon, tab, bar, or what a first line `sep=;` says) and a byte order mark
    are found by looking. Every cell has a say in the type of its column: it is text with one word among the numbers,
    and also with one number that would not come back as it is written: a zero in front (007, 007.10), 0x1F, a whole
    number that 64 bits do not hold, or from 2**53 on beside fractions. In a file of semicolons 1,5 is a number, and
    1.500 then no clear one: a column of such stays text, with a warning.

    `kinds` says what columns must be; a value that is not is an error that names it. "numeric" reads 007 as 7, "text"
    keeps every cell as it is, and so does "id" unless all are whole numbers; "categorical" is as without a kind;
    "date" reads dates as ISO has them, as `date_formats` says, or as the values of the column tell.
    Cells as in `missing` (nothing, NA, null, nan ...) are missing values whatever the kind, in texts too; pass others
    to keep such words.

    `followed` names columns that are "numeric" in `kinds` only because another file has numbers there, with its types:
    007 is an error in them.
    """
    file = local_file(path)
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {str(path)!r} (looked from {Path.cwd()})")
    suffix = split_suffix(file)[0]
    if suffix in _PARQUET_SUFFIXES:
        table = _read_parquet(file, columns)
    elif suffix in _TEXT_SUFFIXES:
        table = _read_text(file, delimiter, encoding, columns, kinds or {}, followed or {}, missing)
    else:
        known = [*_TEXT_SUFFIXES, *_PARQUET_SUFFIXES]
        raise ConfigError(f"{file.name} is not a table that can be read; expected one of {known}, compressed or not")
    check_followed(table, followed or {}, file.name)
    return as_kinds(table, kinds or {}, file.name, date_formats or {})


def read_names(path: str | os.PathLike[str], *, delimiter: str | None = None, encoding: str | None = None) -> list[str]:
    """The column names of a file, from its beginning."""
    file = local_file(path)
    if split_suffix(file)[0] in _PARQUET_SUFFIXES:
        names: list[str] = pq.read_schema(file).names
        return names
    if delimiter is None and split_suffix(file)[0] == ".tsv":
        delimiter = "\t"
    data = _bytes(file, _HEADER_BYTES)
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff")) or (encoding or "").lower().startswith(("utf-16", "utf-32"))
    if len(data) == _HEADER_BYTES and not wide:
        data = data[: data.rfind(b"\n") + 1] or data  # no character is cut in two
    return list(look(as_utf8(data, encoding, file.name), delimiter, file.name).names)


def local_file(path: str | os.PathLike[str]) -> Path:
    """The file itself, or a local copy of one behind a URL."""
    text = os.fspath(path)
    return fetch(text) if is_remote(text) else Path(text).expanduser()


def find_file(directory: Any, split: str) -> Any | None:
    """The file of a split, or "sample_submission", in a directory: `train.csv`, `Train.csv.gz`, `training.parquet`."""
    if not directory.is_dir():
        return None
    wanted = _NAMES.get(split, (split,))
    found = []
    for path in directory.iterdir():
        suffix, packed = split_suffix(path.name)
        stem = path.name[: len(path.name) - len(suffix) - len(packed)].lower()
        if stem in wanted and suffix in (*_TEXT_SUFFIXES, *_PARQUET_SUFFIXES):
            ranks = wanted.index(stem), (*_TEXT_SUFFIXES, *_PARQUET_SUFFIXES).index(suffix), packed, path.name
            found.append((ranks, path))
    return min(found, key=lambda one: one[0])[1] if found else None


def split_file(spec: DatasetSpec, split: str) -> Any:
    """The file of a split: what the spec says, or what is found in its directory."""
    directory = spec.dataset_path
    if split in spec.files:
        named = directory / spec.files[split]
        if named.is_file():
            return named
        raise FileNotFoundError(f"{spec.files[split]!r} is not in {str(directory)!r}; it has {_listed(directory)}")
    path = find_file(directory, split)
    if path is None:
        raise FileNotFoundError(f"no {split} file in {str(directory)!r}; it has {_listed(directory)}")
    return path


def explain_missing(spec: DatasetSpec, split: str, error: OSError) -> str:
    """Why there is nothing to read, for whoever gave the spec."""
    directory = spec.dataset_path
    of = f"the data of {spec.competition_name!r}"
    if not directory.exists():
        here = "" if isinstance(directory, RemotePath) else f" (looked from {Path.cwd()})"
        return f"{of} should be in {str(directory)!r}, which does not exist{here}; give the right dataset_path"
    if not directory.is_dir():
        return f"{of} should be in a directory with a {split} file; {str(directory)!r} is a file: give its directory"
    return (
        f"{of}: {str(directory)!r} has no {split} file that can be read ({error}); it has {_listed(directory)}. "
        f"Expected {split}.csv or the like, or its name as files={{{split!r}: ...}} in the spec"
    )


def _listed(directory: Any) -> str:
    if not directory.is_dir():
        return "nothing, as it is no directory"
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing in it"


def _read_parquet(file: Path, columns: Sequence[str] | None) -> pa.Table:
    check_file(file, PARQUET_TAIL)
    try:
        names = pq.read_schema(file).names
        _check_columns(columns, names, file.name)
        table = pq.read_table(file, columns=None if columns is None else list(columns))
        for place, column in enumerate(table.columns):
            table = table.set_column(place, table.field(place).name, plain_column(column))
        return table
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"the file cannot be read as Parquet: {error}", file=file.name) from error


def _read_text(
    file: Path,
    delimiter: str | None,
    encoding: str | None,
    columns: Sequence[str] | None,
    kinds: Mapping[str, ColumnKind | None],
    followed: Mapping[str, pa.DataType],
    missing: Sequence[str],
) -> pa.Table:
    if delimiter is not None and not isinstance(delimiter, str):
        raise ConfigError(f"delimiter must be one ASCII character, got {delimiter!r}")
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
        raise ConfigError(f"delimiter must be one ASCII character, no quote and no line end, got {delimiter!r}")
    if delimiter is None and split_suffix(file)[0] == ".tsv":
        delimiter = "\t"
    data = as_utf8(_bytes(file), encoding, file.name)
    looked = look(data, delimiter, file.name)
    data = data[looked.start :] if looked.start else data
    refuse_open_quote(data, looked, file.name)
    _check_columns(columns, looked.names, file.name)
    types = {name: pa.string() for name, kind in kinds.items() if kind == "text"}
    told = {name: None if name in followed else kind for name, kind in kinds.items()}

    def read(types: Mapping[str, pa.DataType], columns: Sequence[str] | None) -> pa.Table:
        convert = pcsv.ConvertOptions(
            column_types=types,
            include_columns=list(columns) if columns is not None else None,
            null_values=list(missing),
            # 0 and 1 are numbers, or a column of them would become something else with the first `true`.
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
            strings_can_be_null=True,
            check_utf8=False,
        )
        return _parse(data, looked, convert)

    while True:
        try:
            table = read(types, columns)
            doubtful = doubtful_columns(table, told, has_codes=may_have_codes(data, looked.delimiter))
            if doubtful:
                table = with_codes(table, read(dict.fromkeys(doubtful, pa.string()), doubtful), told)
            if looked.delimiter != ";":
                return table
            plain = with_decimal_commas(table, kinds, file.name)
            pointed = [field.name for field in table.schema if pa.types.is_floating(field.type)]
            if plain is table or not pointed:
                return plain
            return with_unclear_points(
                plain, read(dict.fromkeys(pointed, pa.string()), pointed), kinds, followed, file.name
            )
        except pa.ArrowInvalid as error:
            failed = _CONVERSION.match(str(error))
            number = int(failed[1]) if failed else len(looked.names)
            if number >= len(looked.names) or looked.names[number] in types:
                raise _bad_row(data, looked, file.name, error) from error
            types[looked.names[number]] = pa.string()  # the first block had numbers only, and a later one a word


def _parse(
    data: bytes, looked: Looked, convert: pcsv.ConvertOptions, parse: Any = None, threads: bool = True
) -> pa.Table:
    options = parse or pcsv.ParseOptions(delimiter=looked.delimiter, newlines_in_values=True)
    read = pcsv.ReadOptions(
        use_threads=threads,
        block_size=min(max(len(data) + 1, 1 << 10), _LARGEST_BLOCK),
        column_names=list(looked.names),
        skip_rows_after_names=1,
    )
    return pcsv.read_csv(pa.BufferReader(data), read, options, convert)


def _bad_row(data: bytes, looked: Looked, file: str, error: pa.ArrowInvalid) -> DataError:
    """Where the first row stands that has too few or too many cells."""
    bad: list[Any] = []

    def notice(row: Any) -> str:
        bad.append(row)
        return "error"

    options = pcsv.ParseOptions(delimiter=looked.delimiter, newlines_in_values=True, invalid_row_handler=notice)
    with contextlib.suppress(pa.ArrowInvalid):
        _parse(data, looked, pcsv.ConvertOptions(), options, threads=False)
    if not bad:
        return DataError(f"the file cannot be read as CSV: {error}", file=file)
    row = bad[0]
    number = None if row.number is None else int(row.number) - 2
    return DataError(
        f"{row.actual_columns} cells where the header has {row.expected_columns}: {str(row.text)[:80]!r}; quote cells "
        f"that contain {looked.delimiter!r}, or pass the right delimiter=",
        file=file,
        row=number,
    )


def _check_columns(columns: Sequence[str] | None, names: Sequence[str], file: str) -> None:
    for name in columns or ():
        if name not in names:
            raise SchemaError(f"column {name!r} is not in {file}; it has {list(names)}{did_you_mean(name, names)}")


def _bytes(file: Path, most: int | None = None) -> bytes:
    """The bytes of a file, decompressed; only the first `most` of them."""
    if not split_suffix(file)[1]:
        with open(file, "rb") as opened:
            return opened.read(-1 if most is None else most)
    reader = open_input(file)
    pieces: list[bytes] = []
    try:
        while most is None or len(pieces) << 20 < most:
            piece = bytearray(1 << 20)
            count = reader.readinto(piece)
            if not count:
                break
            pieces.append(bytes(memoryview(piece)[:count]))
        return b"".join(pieces)
    except DamagedStreamError as error:
        raise DataError(f"the file is damaged: {error}", file=file.name) from error
    finally:
        reader.close()
