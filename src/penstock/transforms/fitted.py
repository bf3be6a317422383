"""Learning before transforming: the base of scalers and encoders.

They learn from a stream first (`fit`), in one pass and without keeping rows; what they learn does not depend on how the
stream was cut into batches. Then they transform, and stay as they are: `reset` forgets no fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.pipeline.stages import Source
from penstock.transforms.columns import as_names, column
from penstock.transforms.counts import CountingTransform

__all__ = ["Fitted", "Summary"]

VERSION = 1


class Summary(Protocol):
    """What was learned about one column, in a form that merges."""

    def merge(self, other: Self, /) -> Self: ...

    def to_dict(self) -> dict[str, Any]: ...


S = TypeVar("S", bound=Summary)


class Fitted(CountingTransform, Generic[S]):
    """A transform that learns a summary of each of its columns before it can transform.

    Fitting is for one thread; a fitted transform may be used by many.
    """

    def __init__(self, columns: str | Iterable[str]) -> None:
        super().__init__()
        self.columns = as_names(columns)
        self._learned: dict[str, S] = {}

    def fit(self, data: Source | pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch]) -> Self:
        """Forget what was learned, then learn from every batch of a source or an iterable. Returns self."""
        self._learned = {}
        for batch in _batches(data):
            self.partial_fit(batch)
        return self

    def partial_fit(self, batch: pa.RecordBatch) -> Self:
        """Learn from one more batch. Returns self."""
        return self._merge({name: self._summary(column(batch, name), name) for name in self.columns})

    def merge(self, other: Self) -> Self:
        """Learn what another one has learned, from other rows. Returns self."""
        if type(other) is not type(self) or other.columns != self.columns:
            raise ValueError(f"{self!r} can merge only one of its own kind and columns, got {other!r}")
        return self._merge(other._learned)

    def to_dict(self) -> dict[str, Any]:
        """Everything needed to build it again; plain values, fit for JSON."""
        learned = {name: summary.to_dict() for name, summary in self._learned.items()}
        return {
            "kind": type(self).__name__,
            "version": VERSION,
            "columns": list(self.columns),
            "options": self._options(),
            "learned": learned,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """The one that `to_dict` described."""
        if saved.get("kind") != cls.__name__ or saved.get("version") != VERSION:
            raise ResumeError(
                f"expected a {cls.__name__}, version {VERSION}, "
                f"got kind {saved.get('kind')!r}, version {saved.get('version')!r}"
            )
        try:
            made = cls(saved["columns"], **saved["options"])
            return made._merge({name: cls._summary_from(learned) for name, learned in saved["learned"].items()})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ResumeError(f"the saved {cls.__name__} is damaged: {error!r}") from error

    def learned(self, name: str) -> S:
        """What was learned about a column, or an error if it was not fitted."""
        if name not in self._learned:
            raise ConfigError(f"{self!r} has not been fitted; call fit(source) first, or load one with from_dict")
        return self._learned[name]

    def _merge(self, more: Mapping[str, S]) -> Self:
        # All or nothing: an error in one column must not leave the others a batch ahead.
        merged = {}
        for name, new in more.items():
            try:
                merged[name] = self._learned[name].merge(new) if name in self._learned else new
            except SchemaError as error:
                raise SchemaError(f"column {name!r}: {error}") from None
            self._check(name, merged[name])
        self._learned |= merged
        return self

    def _summary(self, array: pa.Array, name: str) -> S:
        raise NotImplementedError

    @classmethod
    def _summary_from(cls, saved: Mapping[str, Any]) -> S:
        raise NotImplementedError

    def _check(self, name: str, summary: S) -> None:
        return

    def _options(self) -> dict[str, Any]:
        return {}


def _batches(
    data: Source | pa.RecordBatch | pa.Table | Iterable[pa.RecordBatch], max_rows: int = 65_536
) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.to_batches()
    elif hasattr(data, "next_batch"):
        while (batch := data.next_batch(max_rows)) is not None:
            yield batch
    else:
        yield from data
