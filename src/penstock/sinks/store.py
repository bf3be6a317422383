"""A store as the end of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.files.listing import PathLike
from penstock.pipeline.stages import Sink, State
from penstock.store import Lineage, Manifest, StoreWriter
from penstock.store.manifest import ShardEntry


class StoreSink(Sink):
    """A version of a token store: memory-mapped shards under a manifest, which appear in one step at the end.

    `tokens` names the column that holds the ids (None if there is none), `mask` that of the supervised ones (default:
    `loss_mask` if there is such a column). `mode` is "create", "append" or "overwrite"; see `StoreWriter`. Shard
    boundaries depend on the rows alone, so that neither batch sizes nor workers nor restarts change a byte of them.
    Holds less than two pieces of a megabyte, for any `shard_bytes`.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        mode: str = "create",
        tokens: str | None = "input_ids",
        mask: str | None = None,
        shard_bytes: int | str = "64 MiB",
        lineage: Lineage | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        self._writer = StoreWriter(
            path,
            mode=mode,
            tokens=tokens,
            mask=mask,
            shard_bytes=shard_bytes,
            lineage=lineage,
            wait_seconds=wait_seconds,
        )
        self.path = self._writer.path

    @property
    def manifest(self) -> Manifest | None:
        """Manifest of the published version; None before that."""
        return self._writer.manifest

    # -- shards that tasks of a job write ----------------------------------------------------------------------------

    @property
    def writes_shards(self) -> bool:
        """True if shards may be written by other processes: into a directory, not into a bucket."""
        return isinstance(self.path, Path)

    @property
    def piece_bytes(self) -> int:
        return self._writer.piece_bytes

    @property
    def shard_bytes(self) -> int:
        return self._writer.shard_bytes

    def part_facts(self) -> list[Any]:
        """Options that decide the bytes of its shards, besides the rows."""
        return self._writer.part_facts()

    def begin(self) -> None:
        """Take the store for this run, and refuse a place that it may not use."""
        self._writer.begin()

    def shard_options(self, schema: pa.Schema) -> dict[str, str | None]:
        """Columns of the tokens and of the mask, for rows of this schema."""
        with self._refusing():
            return self._writer.shard_options(schema)

    def take_shards(self, shards: Iterable[tuple[Path, Path, Mapping[str, Any]]]) -> None:
        """The next shards: data, index and entry of each."""
        for data, index, entry in shards:
            self._writer.take_shard(data, index, ShardEntry(**entry))

    # -- a sink ------------------------------------------------------------------------------------------------------

    def consume(self, batch: pa.RecordBatch) -> None:
        with self._refusing():
            self._writer.write(batch)

    def flush(self) -> None:
        """Publish. Doing it again, or after a crash in the middle of it, is safe."""
        with self._refusing():
            self._writer.publish()

    def memory_usage(self) -> int:
        return self._writer.memory_usage()

    def fit_budget(self, nbytes: int) -> None:
        self._writer.fit_budget(nbytes)

    def checkpoint(self) -> State:
        with self._refusing():
            return self._writer.checkpoint()

    def claim(self) -> None:
        """Lock the store for this run; an error names another run that writes it."""
        self._writer.claim()

    def restore(self, token: State) -> None:
        self._writer.restore(token)

    def abort(self) -> None:
        self._writer.abort()

    close = abort

    def discard(self) -> None:
        """Remove what `abort` keeps for a checkpoint, if that is gone for good."""
        self._writer.discard()

    def reset(self) -> None:
        """Ready for another run, which replaces the store this one made, or adds to it once more."""
        self._writer.reset()

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn Arrow's errors into SchemaError."""
        try:
            yield
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{self!r} cannot write these columns: {error}") from error

    def __repr__(self) -> str:
        return f"StoreSink({self._writer.shown!r})"
