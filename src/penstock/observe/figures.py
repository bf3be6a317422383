"""Size of the input of a run, and its speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.errors import PenstockError
from penstock.files.listing import split_suffix
from penstock.pipeline.stages import BlockSource, Source
from penstock.sources.columnar import ParquetSource

__all__ = ["Extent", "Rates", "lost_rows"]

_WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of the input, as far as it is known without reading it."""

    files: int | None = None
    file_bytes: int | None = None
    """Size of the files on disk, compressed or not."""
    rows: int | None = None
    readable_bytes: int | None = None
    """Bytes that the source will have read at its end; known if it reads files that are not compressed."""

    @classmethod
    def of(cls, source: Source) -> Self:
        """The extent of a source, from file sizes and footers. Raises for a missing file."""
        files = getattr(source, "files", None)
        if not isinstance(files, list):
            return cls(rows=_rows(source))
        size = sum(file.stat().st_size for file in files)
        uncompressed = (
            isinstance(source, BlockSource)
            and not isinstance(source, ParquetSource)
            and not any(split_suffix(file)[1] for file in files)
        )
        return cls(len(files), size, _rows(source), size if uncompressed else None)

    def share(self, snapshot: Mapping[str, Any]) -> float | None:
        """Share of the input that has been read, from 0 to 1; None if the size is not known."""
        for whole, read in ((self.rows, snapshot["rows_in"]), (self.readable_bytes, snapshot["bytes_in"])):
            if whole:
                return min(1.0, float(read) / whole)
        return None


@dataclass(frozen=True, slots=True)
class _Mark:
    seconds: float
    rows: int
    nbytes: int
    share: float | None


class Rates:
    """Speed over the last few seconds, from snapshots."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._marks: deque[_Mark] = deque()

    def add(self, snapshot: Mapping[str, Any]) -> None:
        now = _Mark(snapshot["seconds"], snapshot["rows_in"], snapshot["bytes_in"], self._extent.share(snapshot))
        if not now.nbytes:
            self._marks.clear()  # the time before the first row (a scan for the schema) is not part of the speed
        self._marks.append(now)
        while len(self._marks) > 2 and now.seconds - self._marks[1].seconds >= _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def rows_per_second(self) -> float:
        return self._per_second(lambda mark: mark.rows)

    @property
    def bytes_per_second(self) -> float:
        return self._per_second(lambda mark: mark.nbytes)

    @property
    def share(self) -> float | None:
        """Share of the input that has been read, from 0 to 1."""
        return self._marks[-1].share if self._marks else None

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the current speed; None while speed or size is not known."""
        share = self.share
        speed = self._per_second(lambda mark: mark.share or 0.0)
        return (1.0 - share) / speed if share is not None and speed > 0 else None

    def _per_second(self, figure: Callable[[_Mark], float]) -> float:
        if not self._marks:
            return 0.0
        first, last = self._marks[0], self._marks[-1]
        if first is last:
            return figure(last) / last.seconds if last.seconds > 0 else 0.0
        return (figure(last) - figure(first)) / max(1e-9, last.seconds - first.seconds)


def lost_rows(snapshot: Mapping[str, Any]) -> tuple[int, int]:
    """Number of rows that transforms dropped, and of rows that could not be decoded."""
    lost = {"transform": 0, "decode": 0}
    for stage in snapshot["stages"]:
        if stage["kind"] in lost:
            lost[stage["kind"]] += max(0, stage["rows_in"] - stage["rows_out"])
    return lost["transform"], lost["decode"]


def _rows(source: Source) -> int | None:
    hint = getattr(source, "size_hint", None)
    if not callable(hint):
        return None
    try:
        rows = hint()
    except (PenstockError, ValueError, OSError):
        return None  # a damaged file: reading it raises with its name and place
    return rows if isinstance(rows, int) else None
