"""Options of a run: one frozen value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock._suggest import named_options
from penstock.errors import ConfigError
from penstock.files.filesystems import output_place
from penstock.pipeline.cores import available_cores

OnError = Literal["raise", "skip", "quarantine"]


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Options of a run. None of them changes which rows come out, or in which order."""

    workers: int | Literal["auto", "process"] = "auto"
    """Number of workers for the transforms; "auto" follows the bottleneck. "process" is short for
    `worker_type="process"`."""
    max_workers: int | None = None
    """Upper bound for "auto", and its number of processes; by default the cores this process may use."""
    worker_type: Literal["thread", "process"] = "thread"
    """Threads, or spawned processes for transforms in pure Python."""
    batch_rows: int | Literal["auto"] = "auto"
    """Rows in every batch an iteration yields (the last may be shorter); "auto" lets sizes follow the bottleneck."""
    max_wait_seconds: float | None = None
    """Longest wait of a row for the others of its batch. A live source (`IteratorSource`) then hands over the rows it
    has, and a batch of `batch_rows` leaves with fewer rows. None: the source decides (a second), and batches of
    `batch_rows` are full."""
    rows_ahead: int | None = None
    """Most rows between the source and the consumer, besides the batch that the consumer has; None: the budget alone
    limits them. Of files that are read in larger parts, one part may be more."""
    on_error: OnError = "raise"
    """A bad row stops the run, is dropped and counted, or is dropped, counted and written to the quarantine file."""
    quarantine: str | Path | None = None
    """JSONL file for quarantined rows, also in an object store; by default next to the sink's output."""
    max_failures: int | None = None
    """More bad rows than this stop the run after all."""
    max_failure_ratio: float | None = None
    """A larger share of bad rows than this (looked at from row 1000 on, and at the end) stops the run after all."""
    stall_seconds: float | None = 300.0
    """A stage that works on one batch for longer is taken to hang; None waits for ever."""
    checkpoint_seconds: float = 10.0
    """Interval at which `run(checkpoint=...)` makes its progress durable."""

    def __post_init__(self) -> None:
        if self.workers == "process":
            object.__setattr__(self, "workers", "auto")
            object.__setattr__(self, "worker_type", "process")
        if isinstance(self.workers, bool) or not (self.workers == "auto" or _positive(self.workers)):
            raise ConfigError(f"workers must be a positive number, 'auto' or 'process', got {self.workers!r}")
        if self.worker_type not in ("thread", "process"):
            raise ConfigError(f"worker_type must be 'thread' or 'process', got {self.worker_type!r}")
        if self.max_workers is not None and not _positive(self.max_workers):
            raise ConfigError(f"max_workers must be a positive number, got {self.max_workers!r}")
        if self.batch_rows != "auto" and not _positive(self.batch_rows):
            raise ConfigError(f"batch_rows must be a positive number or 'auto', got {self.batch_rows!r}")
        check_max_wait(self.max_wait_seconds)
        if self.rows_ahead is not None:
            if not _positive(self.rows_ahead):
                raise ConfigError(f"rows_ahead must be a positive number or None, got {self.rows_ahead!r}")
            if isinstance(self.batch_rows, int) and self.rows_ahead < self.batch_rows:
                raise ConfigError(
                    f"rows_ahead={self.rows_ahead} is less than the batch_rows={self.batch_rows} of one batch; raise it"
                )
        if self.on_error not in ("raise", "skip", "quarantine"):
            raise ConfigError(f"on_error must be 'raise', 'skip' or 'quarantine', got {self.on_error!r}")
        if self.max_failures is not None and self.max_failures < 0:
            raise ConfigError(f"max_failures cannot be negative, got {self.max_failures}")
        if self.max_failure_ratio is not None and not 0 <= self.max_failure_ratio <= 1:
            raise ConfigError(f"max_failure_ratio must lie between 0 and 1, got {self.max_failure_ratio}")
        if self.stall_seconds is not None and self.stall_seconds <= 0:
            raise ConfigError(f"stall_seconds must be positive or None, got {self.stall_seconds}")
        if self.quarantine is not None:
            output_place(self.quarantine, "quarantine")
        if self.checkpoint_seconds < 0:
            raise ConfigError(f"checkpoint_seconds cannot be negative, got {self.checkpoint_seconds}")

    @property
    def adaptive(self) -> bool:
        """True if the number of workers follows the bottleneck."""
        return self.workers == "auto" and self.worker_type == "thread"

    @property
    def worker_limit(self) -> int:
        """Largest number of workers at once."""
        if isinstance(self.workers, int):
            return self.workers
        return self.max_workers or available_cores()


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_max_wait(seconds: float | None) -> float | None:
    """A time to wait for rows, or None."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise ConfigError(f"max_wait_seconds must be a positive number of seconds or None, got {seconds!r}")
    return seconds
