"""Raw text: a row for each line, or for each file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.files.records import Lines, WholeFile
from penstock.pipeline.stages import Block
from penstock.sources.blocks import FileLayout
from penstock.sources.record_source import RecordSource, Scan, check_utf8


class TextSource(RecordSource):
    """UTF-8 text as one string column. `per="line"` gives a row a line (empty lines too, without their line ends),
    `per="file"` one row for each file that is not empty."""

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
            schema=pa.schema([(column, pa.string())]),
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
            per=per if per != "line" else None,
        )
        self._layout_of_all = FileLayout(0, Lines() if per == "line" else WholeFile())
        self._per = per

    @property
    def schema(self) -> pa.Schema:
        """The text, and the columns that directories stand for."""
        return self._list.partitions.completed(super().schema, None)

    def _lay_out(self, number: int) -> FileLayout:
        return self._layout_of_all

    def _parse(self, data: pa.Buffer, layout: FileLayout) -> pa.RecordBatch:
        check_utf8(data)
        if self._per == "file":
            return pa.RecordBatch.from_arrays([pa.array([data.to_pybytes().decode()])], schema=self._schema)
        text = data.to_pybytes()
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        text = text.removesuffix(b"\n")
        lines = pc.split_pattern(pa.array([text], pa.binary()).cast(pa.string()), "\n").flatten()
        return pa.RecordBatch.from_arrays([lines], schema=self._schema)

    def _explain(self, record: bytes, layout: FileLayout, error: Exception) -> tuple[str, str]:
        return "unreadable", str(error)

    def _scan(self, blocks: Iterator[Block]) -> Scan:
        raise AssertionError("the schema of text is given")
