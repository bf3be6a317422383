"""Files of Megatron: `.bin` with flat tokens and `.idx` with the length and place of every sequence.

9 bytes  MMIDIDX and two zeros      8 bytes  version, 1       1 byte   code of the dtype
8 bytes  number of sequences        8 bytes  number of document marks
int32    length of each sequence    int64    byte of the `.bin` at which each begins
int64    document marks: the first sequence of each document, and the number of sequences
int8     mode of each sequence, in multimodal files alone
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.store.foreign.base import FlatReader, ForeignOptions, Ints, map_file

MAGIC, HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Codes of dtypes in an index."""
_ROWS = ("documents", "sequences")
_CHUNK = 1 << 17


def pair_at(path: Path) -> tuple[Path, Path] | None:
    """The `.bin` and the `.idx` that a path names, with either suffix or none; None if it names neither."""
    stem = str(path)[:-4] if path.suffix in (".bin", ".idx") else str(path)
    tokens, index = Path(f"{stem}.bin"), Path(f"{stem}.idx")
    if index.is_file() and tokens.is_file():
        return tokens, index
    if path.suffix == ".idx" and index.is_file():
        raise DataError(f"an index without its tokens: there is no {tokens.name} beside it", file=str(index))
    return None


def read_megatron(tokens: Path, index: Path, options: ForeignOptions) -> FlatReader:
    """Rows of a pair of files, mapped. Reads the whole index once, to check that every row lies in the tokens."""
    wanted = options.get("rows") or "documents"
    if wanted not in _ROWS:
        raise ConfigError(f"rows must be one of {', '.join(_ROWS)}, got {wanted!r}")
    raw = map_file(index)
    dtype, sequences, marks = _header(raw, index)
    at = HEADER.size
    lengths = np.frombuffer(raw, "<i4", sequences, at)
    pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", marks, at + 12 * sequences)
    data = map_file(tokens)
    if len(data) % dtype.itemsize:
        raise DataError(
            f"it has {len(data)} bytes, which is no whole number of {dtype.name} tokens, the type that {index.name} "
            "names: it is truncated, or the index belongs to another file; copy both again",
            file=str(tokens),
        )
    values, shift = data.view(dtype), dtype.itemsize.bit_length() - 1
    _check_marks(documents, sequences, index)
    for low in range(0, sequences if shift else 0, _CHUNK):
        if (pointers[low : low + _CHUNK] & (dtype.itemsize - 1)).any():
            raise DataError(
                f"a sequence begins in the middle of a {dtype.name} token; the index is damaged, copy it again",
                file=str(index),
            )
    ends = (
        int((pointers[low : low + _CHUNK] + (lengths[low : low + _CHUNK].astype(np.int64) << shift)).max())
        for low in range(0, sequences, _CHUNK)
    )
    if (end := max(ends, default=0)) < len(data):
        raise DataError(
            f"it has {len(data)} bytes, and the sequences of {index.name} end at byte {end}: the index belongs to "
            "another file, or something was appended without it; copy both again",
            file=str(tokens),
        )
    # As many marks as sequences, ascending from the first to the last: one sequence a document.
    if wanted == "sequences" or (marks == sequences + 1 and not _repeats(documents)):
        return FlatReader(tokens, values, _Pointers(pointers, shift), lengths, files=(tokens, index))
    if sequences and (pointers[1:] != pointers[:-1] + (lengths[:-1].astype(np.int64) << shift)).any():
        raise DataError(
            "the sequences of a document do not follow one another in the file; pass rows='sequences'", file=str(index)
        )
    sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    whole = np.diff(sums[documents])
    if len(whole) and whole.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"document {int(whole.argmax())} has {whole.max()} tokens; pass rows='sequences'", file=str(index)
        )
    first = int(pointers[0]) >> shift if sequences else 0
    begins = sums[documents[:-1]] + first
    return FlatReader(tokens, values, begins.__getitem__, whole.astype(np.int32), files=(tokens, index))


class _Pointers:
    """Places of rows, in tokens, from the mapped pointers, which count bytes."""

    def __init__(self, pointers: npt.NDArray[np.int64], shift: int) -> None:
        self._pointers, self._shift = pointers, shift

    def __call__(self, rows: Any) -> Ints:
        return np.asarray(self._pointers[rows] >> self._shift)


def _header(raw: npt.NDArray[np.uint8], path: Path) -> tuple[np.dtype[Any], int, int]:
    """The dtype, the number of sequences and of document marks, which must be those that the file has room for."""
    if len(raw) < HEADER.size:
        raise DataError(
            f"it has {len(raw)} bytes, and an index begins with {HEADER.size}; copy it again", file=str(path)
        )
    magic, version, code, sequences, marks = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataError(
            f"it begins with {magic!r}, expected {MAGIC!r}: it is damaged, or no index of Megatron", file=str(path)
        )
    if version != 1:
        raise DataError(f"the index has version {version}, and version 1 is known", file=str(path))
    if code not in DTYPES:
        raise DataError(f"the dtype has code {code}, expected one of {DTYPES}; the header is damaged", file=str(path))
    if DTYPES[code].startswith("float"):
        raise DataError(f"the file holds {DTYPES[code]}, and tokens are whole numbers", file=str(path))
    body = len(raw) - HEADER.size
    needed = 12 * sequences + 8 * marks  # numbers of Python: they cannot overflow
    if body == needed + sequences and sequences:
        raise DataError(
            "the file is multimodal: it has a mode for every sequence, and only text is read here; write the text "
            "sequences to a file of their own",
            file=str(path),
        )
    if body != needed:
        raise DataError(
            f"it names {sequences} sequences and {marks} document marks, which take {HEADER.size + needed} bytes, and "
            f"has {len(raw)}: it is truncated or damaged; copy it again",
            file=str(path),
        )
    return np.dtype(DTYPES[code]), sequences, marks


def _steps(documents: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
    """Differences of neighbouring marks, in parts."""
    for low in range(0, len(documents) - 1, _CHUNK):
        yield np.diff(documents[low : low + _CHUNK + 1])


def _repeats(documents: npt.NDArray[np.int64]) -> bool:
    """True if a document has no sequence, so that another has several."""
    return any((part != 1).any() for part in _steps(documents))


def _check_marks(documents: npt.NDArray[np.int64], sequences: int, path: Path) -> None:
    fits = len(documents) > 0 and documents[0] == 0 and documents[-1] == sequences
    if not fits or any((part < 0).any() for part in _steps(documents)):
        raise DataError(
            f"its document marks do not lead from 0 to its {sequences} sequences; the index is damaged", file=str(path)
        )
