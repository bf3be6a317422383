"""A store as the beginning of a pipeline."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from penstock.errors import ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_source import check_columns, project
from penstock.store.manifest import Manifest, read_manifest, store_path
from penstock.store.shards import ShardReader, Verify, check_content, check_touched, check_verify

_STATE = StateFormat(
    "rows of a store", "a StoreSource", fields={"store_version": (int,), "store": (str,), "row": (int,)}
)


class StoreSource(Source):
    """The rows of a store in order, only the requested `columns`, as views of its memory-mapped shards.

    One shard is mapped at a time. A position belongs to one version of the store: if a newer one has become current
    since, pass `version=`. The checksum of a shard is compared when it is opened, once in a process (`verify="touch"`),
    of all shards before the first row (`"full"`), or not at all (`"fast"`).
    """

    def __init__(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        verify: Verify = "touch",
    ) -> None:
        self.path, self._shown = store_path(path), str(Path(path).expanduser())
        self._verify = check_verify(verify)
        self._columns = check_columns(columns)
        self._version = version
        self._read: Manifest | None = None
        self._starts: list[int] = []
        self._row = 0
        self._verified = False
        self._opened: tuple[int, ShardReader] | None = None
        self._pending: pa.RecordBatch | None = None
        self._origin: Origin | None = None

    @property
    def manifest(self) -> Manifest:
        """Of the version that is read; chosen when first needed, and then kept."""
        if self._read is None:
            self._read = read_manifest(self.path, self._version)
            self._starts = list(accumulate((shard.rows for shard in self._read.shards), initial=0))
        return self._read

    @property
    def schema(self) -> pa.Schema:
        return project(self.manifest.schema, self._columns, str(self.path))

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self.manifest.rows:
            self.close()
            return None
        if self._verify == "full" and not self._verified:
            for entry in dict.fromkeys(self.manifest.shards):
                check_content(self.path, entry)
            self._verified = True
        if self._pending is None:
            self._pending = self._piece()
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        shard = bisect_right(self._starts, self._row) - 1
        self._origin = Origin(str(self.path / self.manifest.shards[shard].file), self._row - self._starts[shard])
        self._row += batch.num_rows
        return batch

    def size_hint(self) -> int | None:
        return self.manifest.rows

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After an error: continue with the next shard; returns a description of the loss."""
        self.close()
        self._row = self._starts[bisect_right(self._starts, self._row)]
        return "the rest of the shard is unreadable"

    def reset(self) -> None:
        """Back to the first row."""
        self.close()
        self._row = 0

    def close(self) -> None:
        """Close the open shard. The next read continues at the same position."""
        self._opened = self._pending = None

    def state_dict(self) -> State:
        manifest = self.manifest
        return _STATE.write({"store_version": manifest.version, "store": manifest.checksum, "row": self._row})

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        if state["store"] != self.manifest.checksum:
            raise ResumeError(
                f"the state was saved in version {state['store_version']} of a store, and {self.path} is at version "
                f"{self.manifest.version}, with other content; pass version={state['store_version']}, or start "
                "without it"
            )
        self.close()
        self._row = state["row"]

    def _piece(self) -> pa.RecordBatch:
        """From the next row to the end of its piece."""
        manifest = self.manifest
        shard = bisect_right(self._starts, self._row) - 1
        if self._opened is None or self._opened[0] != shard:
            self._opened = None  # one at a time
            if self._verify == "touch":
                check_touched(self.path, manifest.shards[shard])
            self._opened = (shard, ShardReader(self.path, manifest.shards[shard], manifest, mapped=False))
        reader, within = self._opened[1], self._row - self._starts[shard]
        number = reader.find(within)
        batch = reader.batch(number).slice(within - reader.starts[number])
        return batch if self._columns is None else batch.select(self._columns)

    def __repr__(self) -> str:
        # Without `verify`, which does not change a row: a run may be resumed with another one.
        options = {"columns": self._columns, "version": self._version}
        shown = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"StoreSource({self._shown!r}{shown})"
