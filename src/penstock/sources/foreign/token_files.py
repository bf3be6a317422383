"""Token files of other programs as the beginning of a pipeline."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_source import check_columns, project
from penstock.store import Store, open_store
from penstock.store.foreign.base import ForeignOptions, ForeignStore

_STATE = StateFormat("rows of token files", "a TokenFileSource", fields={"content": (str,), "row": (int,)})


class TokenFileSource(Source):
    """The rows of a file of tokens that another program wrote (Megatron, nanoGPT, llm.c), read a megabyte at a time.

    Options are those of `open_store` for such files. A position belongs to the content of the file, not to its name.
    """

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        **layout: Unpack[ForeignOptions],
    ) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if len(given) != 1:
            raise ConfigError(f"a TokenFileSource reads one file, got {len(given)}")
        self._path, self._columns, self._layout = given[0], check_columns(columns), layout
        self._store: ForeignStore | None = None
        self._starts: list[int] = []
        self._row = 0
        self._pending: pa.RecordBatch | None = None
        self._origin: Origin | None = None

    @property
    def store(self) -> Store:
        """The file as a store; opened when first needed."""
        if self._store is None:
            found = open_store(self._path, **self._layout)
            if not isinstance(found, ForeignStore):
                raise ConfigError(f"{self._path} is a store; open it with StoreSource")
            self._store = found
            self._starts = list(accumulate((shard.rows for shard in found.manifest.shards), initial=0))
        return self._store

    @property
    def files(self) -> list[Path]:
        """The files with the tokens."""
        return [Path(self.store.shard_path(number)) for number in range(len(self.store.manifest.shards))]

    @property
    def schema(self) -> pa.Schema:
        return project(self.store.schema, self._columns, str(self._path))

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        store = self.store
        if self._row >= len(store):
            self.close()
            return None
        shard = bisect_right(self._starts, self._row) - 1
        if self._pending is None:
            reader: Any = store.open_shard(shard)
            within = self._row - self._starts[shard]
            piece = reader.find(within)
            found = reader.batch(piece, mapped=False).slice(within - reader.starts[piece])
            self._pending = found if self._columns is None else found.select(self._columns)
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        self._origin = Origin(str(store.shard_path(shard)), self._row - self._starts[shard])
        self._row += batch.num_rows
        return batch

    def size_hint(self) -> int | None:
        return len(self.store)

    def origin(self) -> Origin | None:
        return self._origin

    def skip_file(self) -> str:
        """After an error: continue with the next piece of about a megabyte; returns a description of the loss."""
        shard = bisect_right(self._starts, self._row) - 1
        reader = self.store.open_shard(shard)
        piece = reader.find(self._row - self._starts[shard])
        self._row = self._starts[shard] + reader.starts[piece + 1]
        return "the rest of a piece of the file is unreadable"

    def fingerprints(self) -> str:
        """Hash of the content of the file, and of the way it is cut into rows."""
        return self.store.manifest.checksum

    def reset(self) -> None:
        """Back to the first row."""
        self.close()
        self._row = 0

    def close(self) -> None:
        """Drop the mapping. The next read opens the file again, at the same position."""
        self._pending = self._store = None

    def state_dict(self) -> State:
        return _STATE.write({"content": self.store.manifest.checksum, "row": self._row})

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        self.close()
        if state["content"] != self.store.manifest.checksum:
            raise ResumeError(
                f"{self._path} is not the file the state was saved in, or is cut into rows in another way; restore "
                "it, or start without the state"
            )
        self._row = state["row"]

    def __repr__(self) -> str:
        options = {"columns": self._columns, **self._layout}
        shown = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        return f"TokenFileSource({os.fspath(self._path)!r}{shown})"
