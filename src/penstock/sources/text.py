"""Raw text: a row for each line, or for each file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.files.records import Lines
from penstock.pipeline.stages import Block
from penstock.sources._records import RecordSource, check_utf8

__all__ = ["TextSource"]


class TextSource(RecordSource):
    """UTF-8 text as one string column. `per="line"` gives a row a line (empty lines too, without their line ends),
    `per="file"` one row for each file."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".text", ".md")
    format_name: ClassVar[str] = "text"

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        column: str = "text",
        per: Literal["line", "file"] = "line",
        max_row_bytes: int | str = "256 MiB",
        allow_empty: bool = False,
    ) -> None:
        if per not in ("line", "file"):
            raise ConfigError(f"per must be 'line' or 'file', got {per!r}")
        super().__init__(
            paths,
            Lines() if per == "line" else _Whole(),
            schema=pa.schema([(column, pa.string())]),
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
        )
        self._per = per

    def _parse(self, data: pa.Buffer, block: Block) -> pa.RecordBatch:
        check_utf8(data)
        text = data.to_pybytes()
        if block.origin.offset == 0:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if self._per == "file":
            return pa.RecordBatch.from_arrays([pa.array([text.decode()])], schema=self.schema)
        whole = pa.array([text.removesuffix(b"\n")], pa.binary()).cast(pa.string())
        lines = pc.split_pattern(whole, "\n").flatten()
        if b"\r" in text:
            lines = pc.utf8_rtrim(lines, "\r")
        return pa.RecordBatch.from_arrays([lines], schema=self.schema)

    def _explain(self, record: bytes, error: Exception) -> tuple[str, str]:
        try:
            record.decode()
        except UnicodeDecodeError as bad:
            return "invalid UTF-8", f"not valid UTF-8: byte {record[bad.start]:#04x} at position {bad.start}"
        return "unreadable", str(error)

    def _scan(self, blocks: Iterator[tuple[Block, pa.Buffer]]) -> pa.Schema:
        assert self._given_schema is not None
        return self._given_schema


class _Whole(Lines):
    """The whole file is the record."""

    def ends(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        return np.empty(0, np.int64)

    def cut(self, data: npt.NDArray[np.uint8]) -> tuple[int, int]:
        return 0, 0

    def leftover(self, rest: bytes) -> int:
        return 1
