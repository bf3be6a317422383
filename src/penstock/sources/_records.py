"""What the text formats share: cutting files into blocks, parsing blocks anywhere, blaming single records.

The schema is made from *all* of the input before the first row leaves: a scan that parses every block and keeps only
its types. It costs one more pass (a given `schema` saves it) and is why the type of a column never depends on which
rows came first.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.errors import DataError, ResumeError, SchemaError
from penstock.files.listing import PathLike, list_files
from penstock.files.records import Cutter
from penstock.memory.budget import parse_bytes
from penstock.memory.pool import BufferPool
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, Source, State
from penstock.sources._blocks import BlockReader, Place, RawBlock

__all__ = ["RecordSource"]

_SCAN_BYTES = 4 << 20
_BATCH_BYTES = 1 << 20


class RecordSource(Source):
    """Base of the sources whose files are sequences of records in text."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format_name: ClassVar[str] = ""

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        cutter: Cutter,
        *,
        schema: pa.Schema | None,
        max_row_bytes: int | str,
        allow_empty: bool,
    ) -> None:
        self._paths = paths if isinstance(paths, (str, Path)) else list(paths) if not hasattr(paths, "__fspath__") else paths
        self._cutter = cutter
        self._given_schema = schema
        self._schema = schema
        self._max_row_bytes = parse_bytes(max_row_bytes)
        self._allow_empty = allow_empty
        self._pool = BufferPool("32 MiB")
        self._files: list[Path] | None = None
        self._reader: BlockReader | None = None
        self._start = Place()
        self._pending: tuple[pa.RecordBatch, Origin] | None = None
        self._pending_from = Place()
        self._used_rows = 0
        """Rows of the pending batch that `next_batch` has handed out, or that a resumed source has to pass over."""
        self._origin: Origin | None = None

    # -- what a format has to say ------------------------------------------------------------------------------

    def _parse(self, data: pa.Buffer, block: Block) -> pa.RecordBatch:
        """Whole records to a batch with the source's schema; raises ArrowInvalid if any of them is bad."""
        raise NotImplementedError(type(self).__name__)

    def _explain(self, record: bytes, error: Exception) -> tuple[str, str]:
        """(kind, reason) of a record that does not parse by itself."""
        raise NotImplementedError(type(self).__name__)

    def _scan(self, blocks: Iterator[tuple[Block, pa.Buffer]]) -> pa.Schema:
        """The schema that every record of the input fits."""
        raise NotImplementedError(type(self).__name__)

    def _meta(self, file: int) -> dict[str, Any]:
        """Facts about a file that its blocks need, such as the names in its header."""
        return {}

    def _begin(self, file: int) -> Place:
        """Where the first record of a file stands: after its header."""
        return Place(file)

    # -- a source ----------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[Path]:
        """The files this source reads, in order."""
        if self._files is None:
            self._files = list_files(self._paths, self.suffixes)
        return self._files

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch; scans the input the first time, unless it was given."""
        if self._schema is None:
            self._schema = self._scan(self._all_blocks())
        return self._schema

    def next_block(self, max_bytes: int) -> Block | None:
        self.schema  # noqa: B018 - known before the first block is handed out, since decode runs on other threads
        raw = self._blocks().next(max_bytes)
        return self._block(raw) if raw is not None else None

    def decode(self, block: Block) -> Decoded:
        if not block.meta["records"]:
            return Decoded(self._none())
        try:
            batch = self._parse(block.data, block)
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError, ValueError) as error:
            return self._rescue(block, error)
        if batch.num_rows == block.meta["records"]:
            return Decoded(batch)
        return Decoded(batch, rows=tuple(i for i, (a, b) in enumerate(self._spans(block.data)) if not _blank(block.data, a, b)))

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        """Rows without an engine around them; a bad record raises."""
        while self._pending is None:
            self._pending_from = self._reader.place if self._reader is not None else self._start
            block = self.next_block(_BATCH_BYTES)
            if block is None:
                return None
            decoded = self.decode(block)
            if decoded.rejected:
                bad = decoded.rejected[0]
                raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
            if decoded.batch.num_rows > self._used_rows:
                self._pending = (decoded.batch, block.origin)
            else:
                self._used_rows -= decoded.batch.num_rows
        batch, origin = self._pending
        part = batch.slice(self._used_rows, max_rows)
        self._origin = Origin(origin.file, origin.row + self._used_rows)
        self._used_rows += part.num_rows
        if self._used_rows == batch.num_rows:
            self._pending, self._used_rows = None, 0
        return part

    def origin(self) -> Origin | None:
        return self._origin

    def offset_of(self, block: Block, row: int) -> int | None:
        spans = self._spans(block.data)
        return (block.origin.offset or 0) + spans[row][0] if row < len(spans) else None

    def skip_file(self) -> None:
        """After an error: go on behind the record, or the file, that it was about."""
        self._blocks().skip_bad()

    def memory_usage(self) -> int:
        held = self._reader.held_bytes if self._reader is not None else 0
        return held + self._pool.stats().free_bytes + (self._pending[0].nbytes if self._pending else 0)

    def reset(self) -> None:
        """Back to the first record."""
        self.close()
        self._start = Place()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._pending, self._used_rows = None, 0

    def state_dict(self) -> State:
        place = self._reader.place if self._reader is not None else self._start
        if self._pending is not None:
            place = self._pending_from
        files = self.files
        return {
            "files": len(files),
            "file": place.file,
            "path": files[place.file].name if place.file < len(files) else None,
            "offset": place.offset,
            "row": place.row,
            "used_rows": self._used_rows,
            "schema": _schema_text(self._schema),
        }

    def load_state_dict(self, state: State) -> None:
        files = self.files
        if state["files"] != len(files):
            raise ResumeError(
                f"the state was saved with {state['files']} input files, now there are {len(files)}; "
                "restore the same files, or start without the state"
            )
        if state["file"] < len(files) and files[state["file"]].name != state["path"]:
            raise ResumeError(
                f"file {state['file']} of the input was {state['path']!r} when the state was saved and is "
                f"{files[state['file']].name!r} now; restore the same files, or start without the state"
            )
        self.close()
        if self._given_schema is None and state["schema"] is not None:
            self._schema = _text_schema(state["schema"])
        self._start = Place(state["file"], state["offset"], state["row"])
        self._check_size()
        self._used_rows = state["used_rows"]

    # -- inside ------------------------------------------------------------------------------------------------

    def _check_size(self) -> None:
        """An uncompressed file that has become shorter than the saved offset is not the same file."""
        start, files = self._start, self.files
        if start.file < len(files) and start.offset and files[start.file].suffix in self.suffixes:
            size = files[start.file].stat().st_size
            if size < start.offset:
                raise ResumeError(
                    f"{files[start.file]} has {size} bytes now, the state was saved {start.offset} bytes into it"
                )

    def _blocks(self) -> BlockReader:
        if self._reader is None:
            self._reader = self._new_reader(self._start)
        return self._reader

    def _new_reader(self, place: Place) -> BlockReader:
        return BlockReader(
            self.files,
            self._cutter,
            pool=self._pool,
            max_row_bytes=self._max_row_bytes,
            allow_empty=self._allow_empty,
            place=place,
            begin=self._begin,
        )

    def _all_blocks(self) -> Iterator[tuple[Block, pa.Buffer]]:
        reader = self._new_reader(Place())
        try:
            while True:
                try:
                    raw = reader.next(_SCAN_BYTES)
                except DataError:
                    reader.skip_bad()  # it is reported, in its place, when the rows are read
                    continue
                if raw is None:
                    return
                block = self._block(raw)
                yield block, block.data
        finally:
            reader.close()

    def _block(self, raw: RawBlock) -> Block:
        origin = Origin(str(self.files[raw.file]), raw.row, raw.offset)
        return Block(origin, raw.data, raw.data.size, {"records": raw.records, **self._meta(raw.file)})

    def _spans(self, data: pa.Buffer) -> list[tuple[int, int]]:
        """(start, end) of each record in a stretch of whole records."""
        ends = self._cutter.ends(np.frombuffer(data, np.uint8)).tolist()
        if not ends or ends[-1] < data.size:
            ends.append(data.size)
        return list(zip([0, *ends], ends))

    def _rescue(self, block: Block, error: Exception) -> Decoded:
        """Parse what can be parsed: halve the block until each bad record stands alone."""
        spans = self._spans(block.data)
        good: list[pa.RecordBatch] = []
        rows: list[int] = []
        rejected: list[Rejected] = []
        todo = [(0, len(spans))]
        while todo:
            first, last = todo.pop()
            start, stop = spans[first][0], spans[last - 1][1]
            if _blank(block.data, start, stop):
                continue
            try:
                batch = self._parse(block.data.slice(start, stop - start), block)
            except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError, ValueError) as failure:
                if last - first == 1:
                    rejected.append(self._reject(block, first, start, stop, failure))
                else:
                    middle = (first + last) // 2
                    todo += [(middle, last), (first, middle)]
                continue
            good.append(batch)
            rows += [i for i in range(first, last) if not _blank(block.data, *spans[i])][: batch.num_rows]
        if not rejected and not good:
            raise error
        return Decoded(pa.concat_batches(good) if good else self._none(), tuple(rejected), tuple(rows))

    def _reject(self, block: Block, index: int, start: int, stop: int, error: Exception) -> Rejected:
        record = block.data.slice(start, stop - start).to_pybytes().strip(b"\r\n")
        kind, reason = self._explain(record, error)
        origin = block.origin
        return Rejected(
            file=origin.file,
            row=origin.row + index,
            offset=(origin.offset or 0) + start,
            stage=f"reading {self.format_name}",
            kind=kind,
            reason=reason,
            data=record[: 1 << 20],
        )

    def _none(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(self._paths)})"


def check_utf8(data: pa.Buffer) -> None:
    """Raise ValueError if the bytes are not UTF-8 throughout. Costs a pass at several GB/s."""
    if not data.size or int(np.frombuffer(data, np.uint8).max()) < 0x80:
        return
    offsets = pa.py_buffer(np.array([0, data.size], np.int64))
    pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data]).cast(pa.large_string())


def unfit(schema: pa.Schema, row: dict[str, Any]) -> str | None:
    """Which column of a row does not fit a schema, in words."""
    for name, value in row.items():
        index = schema.get_field_index(name)
        if index < 0:
            return f"field {name!r} is not in the schema, which has {schema.names}"
        try:
            pa.array([value], schema.field(index).type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return f"column {name!r} holds {value!r:.80}, which is not {schema.field(index).type}"
    return None


def require_columns(schema: pa.Schema, names: Iterable[str], file: str) -> None:
    """Every column that was asked for must be there."""
    for name in names:
        if name not in schema.names:
            raise SchemaError(f"column {name!r} not in {file}; it has {schema.names}")


def _blank(data: pa.Buffer, start: int, stop: int) -> bool:
    return stop - start < 4096 and not data.slice(start, stop - start).to_pybytes().strip()


def _shown(paths: Any) -> str:
    if isinstance(paths, list) and len(paths) > 2:
        return f"{len(paths)} paths"
    return ", ".join(repr(str(path)) for path in (paths if isinstance(paths, list) else [paths]))


def _schema_text(schema: pa.Schema | None) -> str | None:
    return base64.b64encode(schema.serialize()).decode() if schema is not None else None


def _text_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
