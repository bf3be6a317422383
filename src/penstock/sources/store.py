"""A store as the beginning of a pipeline."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError
from penstock.files.filesystems import is_object_url, shown_place
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_source import check_columns, project
from penstock.store.bucket_shards import BucketShard
from penstock.store.manifest import Manifest, read_manifest, store_path
from penstock.store.reader import Store, open_store
from penstock.store.shards import ShardReader, Verify, check_content, check_touched, check_verify

_STATE = StateFormat(
    "rows of a store", "a StoreSource", fields={"store_version": (int,), "store": (str,), "row": (int,)}
)


class StoreSource(Source):
    """The rows of a store in order, only the requested `columns`, as views of its memory-mapped shards.

    One shard is mapped at a time. A position belongs to one version of the store: if a newer one has become current
    since, pass `version=`. The checksum of a shard is compared when it is opened, once in a process (`verify="touch"`),
    of all shards before the first row (`"full"`), or not at all (`"fast"`).

    A store in a bucket (`s3://`, `gs://`, `az://`) is read by pieces through the cache of `open_store`, which verifies
    each of them.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        verify: Verify = "touch",
    ) -> None:
        self._url = os.fspath(path) if is_object_url(path) else None
        self._home = store_path(path) if self._url is None else None
        self._shown = str(Path(path).expanduser()) if self._url is None else shown_place(self._url)
        self._bucket_store: Store | None = None
        self._verify = check_verify(verify)
        self._columns = check_columns(columns)
        self._version = version
        self._read: Manifest | None = None
        self._starts: list[int] = []
        self._row = 0
        self._verified = False
        self._opened: tuple[int, ShardReader | BucketShard] | None = None
        self._pending: pa.RecordBatch | None = None
        self._origin: Origin | None = None

    @property
    def path(self) -> Path:
        """Directory of the store; one in a bucket has none."""
        if self._home is None:
            raise ConfigError(f"{self._shown} is a store in a bucket, and has no directory on this machine")
        return self._home

    @property
    def manifest(self) -> Manifest:
        """Of the version that is read; chosen when first needed, and then kept."""
        if self._read is None:
            if self._url is None:
                self._read = read_manifest(self.path, self._version)
            else:
                self._bucket_store = open_store(self._url, self._version, verify=self._verify)
                self._read = self._bucket_store.manifest
            self._starts = list(accumulate((shard.rows for shard in self._read.shards), initial=0))
        return self._read

    @property
    def schema(self) -> pa.Schema:
        return project(self.manifest.schema, self._columns, self._shown)

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self.manifest.rows:
            self.close()
            return None
        if self._verify == "full" and not self._verified and self._url is None:
            for entry in dict.fromkeys(self.manifest.shards):
                check_content(self.path, entry)
            self._verified = True
        if self._pending is None:
            self._pending = self._piece()
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        shard = bisect_right(self._starts, self._row) - 1
        self._origin = Origin(self.shard_place(shard), self._row - self._starts[shard])
        self._row += batch.num_rows
        return batch

    def shard_place(self, number: int) -> str:
        """Path or URL of the file of a shard, for messages."""
        file = self.manifest.shards[number].file
        if self._bucket_store is not None:
            return self._bucket_store.home.place(file)
        return str(self.path / file)

    def open_shard(self, number: int, *, verify: Verify = "touch") -> ShardReader | BucketShard:
        """A shard, opened apart from the position of the source."""
        manifest = self.manifest
        if self._bucket_store is not None:
            return self._bucket_store.open_shard(number)
        if verify == "touch":
            check_touched(self.path, manifest.shards[number])
        return ShardReader(self.path, manifest.shards[number], manifest, mapped=False)

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
                f"the state was saved in version {state['store_version']} of a store, and {self._shown} is at version "
                f"{self.manifest.version}, with other content; pass version={state['store_version']}, or start "
                "without it"
            )
        self.close()
        self._row = state["row"]

    def _piece(self) -> pa.RecordBatch:
        """From the next row to the end of its piece."""
        shard = bisect_right(self._starts, self._row) - 1
        if self._opened is None or self._opened[0] != shard:
            self._opened = None  # one at a time
            self._opened = (shard, self.open_shard(shard, verify=self._verify))
        reader, within = self._opened[1], self._row - self._starts[shard]
        number = reader.find(within)
        batch = reader.batch(number).slice(within - reader.starts[number])
        return batch if self._columns is None else batch.select(self._columns)

    def __repr__(self) -> str:
        # Without `verify`, which does not change a row: a run may be resumed with another one.
        options = {"columns": self._columns, "version": self._version}
        given = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"StoreSource({self._shown!r}{given})"
