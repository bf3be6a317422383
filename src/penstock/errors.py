"""Every error penstock raises on purpose, in one small tree.

    PenstockError
    ├── ConfigError      (ValueError)       an option, a key or a combination that cannot work
    ├── SchemaError      (ValueError)       data whose columns or types are not the promised ones
    ├── DataError        (ValueError)       a row or a file that cannot be read; knows where
    ├── ChangedFileError (ValueError)       a file that was changed while it was read
    ├── StageError       (RuntimeError)     a stage raised; knows the stage, the file and the row
    ├── FailureBudgetError (RuntimeError)   more bad rows than the run was allowed
    ├── StalledError     (TimeoutError)     a stage, or a wait for memory, outlived its deadline
    ├── StoppedError     (RuntimeError)     stop() was called before the input ended
    ├── PoolFullError    (MemoryError)      a tensor that does not fit into its pool any more
    ├── QueueNotFoundError (FileNotFoundError)  a queue directory, or its metadata, that is not there
    ├── StaleQueueError  (ValueError)       a queue, or a file in one, made with other metadata
    ├── ResumeError      (ValueError)       a state that belongs to another pipeline, or is damaged
    ├── UnfinishedJobError (RuntimeError)   a part of a job is done, and other processes have to do the rest
    └── PluginError      (ImportError)      an entry point that cannot be loaded or used

The built-in second parents let callers catch what they already know.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = [
    "ChangedFileError",
    "ConfigError",
    "DataError",
    "FailureBudgetError",
    "PenstockError",
    "PluginError",
    "PoolFullError",
    "QueueNotFoundError",
    "ResumeError",
    "SchemaError",
    "StageError",
    "StaleQueueError",
    "StalledError",
    "StoppedError",
    "UnfinishedJobError",
]


class PenstockError(Exception):
    """The root of the tree: catch this to catch all of it.

    Errors pickle whole, so that those of another process arrive with their fields: a constructor that takes other
    arguments than the message is not called again.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = super().__reduce__()
        return _rebuilt, (type(self), *reduced[1]), *reduced[2:]


class ConfigError(PenstockError, ValueError):
    """An option, a key or a combination of them that cannot work."""


class SchemaError(PenstockError, ValueError):
    """Data whose columns or types are not the promised ones."""


class DataError(PenstockError, ValueError):
    """A row or a file that cannot be read.

    `file`, `row` (0-based) and `offset` (bytes, after decompression) say where, as far as it is known; `data` is the
    row itself, if there is one.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str | None = None,
        row: int | None = None,
        offset: int | None = None,
        data: Any = None,
    ) -> None:
        self.reason, self.file, self.row, self.offset, self.data = reason, file, row, offset, data
        super().__init__(f"{place(file, row, offset)}: {reason}" if file is not None else reason)


class ChangedFileError(PenstockError, ValueError):
    """A file that was changed, cut or replaced while it was read, so that its rows are of no state it ever had.

    It is about all rows of the file, so it stops a run with any `on_error`.
    """

    def __init__(self, reason: str, *, file: str) -> None:
        self.reason, self.file = reason, file
        super().__init__(
            f"{file} changed while it was read: {reason}; read it when no process writes to it, or read a copy"
        )


class StageError(PenstockError, RuntimeError):
    """A stage raised while working on a batch; the original exception is the cause."""

    def __init__(
        self,
        reason: str,
        *,
        stage: str,
        file: str | None = None,
        row: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.reason, self.stage, self.file, self.row, self.offset = reason, stage, file, row, offset
        where = f" at {place(file, row, offset)}" if file is not None else ""
        super().__init__(f"{stage} failed{where}: {reason}")


class FailureBudgetError(PenstockError, RuntimeError):
    """More rows were bad than `max_failures` or `max_failure_ratio` allow."""


class StalledError(PenstockError, TimeoutError):
    """A stage made no progress, or a wait for memory was not answered, before its deadline."""


class StoppedError(PenstockError, RuntimeError):
    """The pipeline was stopped before its input ended, so there is no report."""


class PoolFullError(PenstockError, MemoryError):
    """A tensor does not fit next to those that are in use."""


class QueueNotFoundError(PenstockError, FileNotFoundError):
    """A queue directory, or the metadata in it, that is not there."""


class StaleQueueError(PenstockError, ValueError):
    """A queue, or a file in one, that was made with other metadata than the one at hand."""


class ResumeError(PenstockError, ValueError):
    """A saved state that belongs to another pipeline, another version, or is damaged."""


class UnfinishedJobError(PenstockError, RuntimeError):
    """A part of a job is done, and the rest is the work of other processes, or of `penstock join`."""


class PluginError(PenstockError, ImportError):
    """An entry point that cannot be loaded, or is not what its group asks for."""


def _rebuilt(kind: type[PenstockError], *arguments: Any) -> PenstockError:
    """An error as it was before the rest of its state is set."""
    own_constructor = isinstance(kind.__init__, FunctionType)
    return kind.__new__(kind, *arguments) if own_constructor else kind(*arguments)


def place(file: str | None, row: int | None, offset: int | None) -> str:
    """`corpus.jsonl, row 16, byte 1234`: the parts that are known."""
    parts = [file or "?"]
    if row is not None:
        parts.append(f"row {row}")
    if offset is not None:
        parts.append(f"byte {offset}")
    return ", ".join(parts)
