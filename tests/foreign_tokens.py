"""Token files of other programs for tests: those in `foreign_files`, and small ones written by their layout."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FILES = Path(__file__).parent / "foreign_files"
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def written_row(row: int) -> list[int]:
    """Tokens of a row of the files that `foreign_files/write.py` wrote."""
    return [number % 1000 for number in range(row * 7, row * 7 + 1 + row % 5)]


def write_megatron(
    prefix: Path, rows: Sequence[Sequence[int]], dtype: str = "uint16", documents: Sequence[int] | None = None
) -> Path:
    """A pair of files by the layout that Megatron documents; `documents` are its marks."""
    lengths = np.array([len(row) for row in rows], np.int32)
    flat = np.array([token for row in rows for token in row], dtype)
    flat.tofile(f"{prefix}.bin")
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * flat.itemsize
    marks = np.array(range(len(rows) + 1) if documents is None else documents, np.int64)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _CODES[dtype], len(rows), len(marks))
    index = head + lengths.tobytes() + pointers.astype(np.int64).tobytes() + marks.tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def llmc_file(
    path: Path, tokens: Sequence[int], magic: int = 20240520, version: int = 1, dtype: Any = "uint16"
) -> Path:
    """A flat file with the header of llm.c."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path
