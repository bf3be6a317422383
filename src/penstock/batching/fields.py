"""Deferred fields: the fields of a batch that are made when they are first read."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.batching.backends.base import Array, Backend, Device
from penstock.batching.collate import CompactBatch


class DeferredFields(Protocol):
    """Lazy fields of a batch. Each is computed when it is first read, and shares no memory with the others."""

    names: frozenset[str]
    backend: Backend

    @property
    def nbytes(self) -> int:
        """Bytes that the fields are made from."""
        ...

    def make(self, name: str) -> Array | int: ...

    def receive(self) -> None:
        """The current stream of this thread is the one that will use the fields."""
        ...

    def to(self, device: Device) -> DeferredFields | None:
        """The same fields, to be made on another device; None if they have to be made first."""
        ...


class HostFields:
    """Fields made in main memory from the compact form of a batch."""

    __slots__ = ("backend", "compact", "names")

    def __init__(self, compact: CompactBatch, backend: Backend) -> None:
        self.compact, self.backend, self.names = compact, backend, compact.layout.present

    @property
    def nbytes(self) -> int:
        return self.compact.nbytes

    def make(self, name: str) -> Array | int:
        made: Any = self.compact.make(name)
        return made if isinstance(made, int) else self.backend.from_numpy(made)

    def receive(self) -> None:
        """Nothing: there are no streams in main memory."""

    def to(self, device: Device) -> DeferredFields | None:
        return self.backend.compact_to(self.compact, device)
