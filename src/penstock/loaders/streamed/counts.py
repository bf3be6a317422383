"""What was read, left out and rejected, counted once for each window that was begun."""

from __future__ import annotations

from collections import Counter

from penstock.distributed.ranks import Rank
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.loaders.streamed.windows import RowWindow
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import tokens_in
from penstock.pipeline.quarantine import BadRows

__all__ = ["StreamCounts"]


class StreamCounts:
    """Counts of one rank, of this process. Each rank has a quarantine file of its own."""

    def __init__(self, on_error: str, quarantine: PathLike | None, rank: Rank) -> None:
        path = None if quarantine is None else require_local(quarantine, "quarantine")
        if path is not None and rank.world_size > 1:
            path = path.with_name(f"{path.stem}-{rank.rank}{path.suffix}")
        self._bad = BadRows(PipelineConfig(on_error=on_error), path)  # type: ignore[arg-type]
        self.rows = 0
        """Rows read."""
        self.dropped: Counter[str] = Counter()
        """Rows left out on purpose, by reason."""
        self.changed: Counter[str] = Counter()
        """Rows kept with something changed, by reason; tokens left out are among them."""

    @property
    def rejected(self) -> dict[str, int]:
        """Bad rows, by reason."""
        return dict(self._bad.counts)

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that are in no sample, by reason."""
        return tokens_in(self.changed)

    def add(self, window: RowWindow) -> None:
        self.rows += window.read
        self.dropped.update(window.dropped)
        self.changed.update(window.changed)
        self._bad.add(window.rejected, self.rows)

    def ignore(self, window: RowWindow) -> None:
        """Another rank reads it too, and counts it."""

    def go_on(self) -> None:
        """What was written before stays: the run it is from is resumed."""
        path = self._bad.path
        if path is not None and path.exists():
            self._bad.restore({"bytes": path.stat().st_size, "counts": dict(self._bad.counts)})

    def close(self) -> None:
        self._bad.close()
