"""Chain: a list of transforms over one batch, and the search for the rows that make one of them fail."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.stages import Finishing, FirstOfKey, Origin, Stateful, Transform

Counts = tuple[dict[str, int], dict[str, int]]
"""Rows left out, and rows changed but kept, each by reason."""


@runtime_checkable
class Inferring(Protocol):
    """A transform that learns its output schema from its first rows. The schema is part of the pipeline's state."""

    @property
    def learning(self) -> bool:
        """True until it has seen its first rows."""
        ...

    @property
    def output_schema(self) -> pa.Schema | None: ...

    def set_output_schema(self, schema: pa.Schema | None, /) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """A transform that counts, by reason, the rows it leaves out and those it changes but keeps.

    Counts ride with the batch they are about, so that a checkpoint has those of the delivered batches and no others:
    `begin_attempt` starts one in this thread, `end_attempt` returns what was counted since, and `undo_attempt` takes it
    back when the batch failed and is tried again in parts. `add_counts` takes what a copy in another process counted.
    """

    def begin_attempt(self) -> None: ...

    def end_attempt(self) -> Counts: ...

    def undo_attempt(self) -> None: ...

    def add_counts(self, dropped: dict[str, int], changed: dict[str, int], /) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """A row (counted within the batch), the stage that refused it, and why."""

    row: int
    stage: str
    error: Exception


@dataclass(slots=True)
class Ran:
    """Result of a chain for one batch."""

    batch: pa.RecordBatch | None
    nbytes: int = 0
    widest: int = 0
    """The most bytes a step had in hand: its input and its output."""
    counts: dict[int, Counts] = field(default_factory=dict)
    """By the index of the transform."""
    failures: tuple[Failure, ...] = ()

    def count(self, more: Mapping[int, Counts]) -> None:
        """Add the counts of another part of the same batch."""
        for index, (dropped, changed) in more.items():
            mine = self.counts.setdefault(index, ({}, {}))
            for total, part in zip(mine, (dropped, changed)):
                for reason, rows in part.items():
                    total[reason] = total.get(reason, 0) + rows


class BrokenStageError(SchemaError):
    """A stage broke its own promise: no batch, or other columns than before. Never the fault of one row, so never
    skipped."""


class Chain:
    """Transforms applied one after the other. Calling it is thread-safe when none of them is stateful."""

    blames_row_for: type[Exception] = Exception
    """Exceptions that blame a row when a transform raises them; any other ends the run."""

    def __init__(self, transforms: Sequence[Transform], metrics: Sequence[StageMetrics]) -> None:
        self.transforms = list(transforms)
        self.metrics = list(metrics)
        self._schemas: list[pa.Schema | None] = [None] * len(self.transforms)
        self._emptied: tuple[int, pa.Schema] | None = None
        # Checked once: a runtime check of a protocol costs microseconds.
        self._stateful = [t for t in self.transforms if isinstance(t, Stateful)]
        self._counting = [(i, t) for i, t in enumerate(self.transforms) if isinstance(t, Counting)]

    def run(self, batch: pa.RecordBatch, nbytes: int, origin: Origin | None = None) -> Ran:
        """The batch after every transform. Raises `StepError` around the exception of a transform."""
        ran = Ran(batch, nbytes, nbytes)
        for _, counting in self._counting:
            counting.begin_attempt()
        for i, (transform, metrics) in enumerate(zip(self.transforms, self.metrics)):
            rows = batch.num_rows
            if not rows:
                break
            since = metrics.begin(origin)
            try:
                made = self._checked(i, transform.transform(batch))
            except self.blames_row_for as error:
                metrics.leave(since)
                for _, counting in self._counting:
                    counting.undo_attempt()
                raise StepError(i, error) from error
            out = made.nbytes if made is not batch else nbytes
            metrics.done(since, rows=(rows, made.num_rows), nbytes=(nbytes, out), origin=origin)
            ran.widest = max(ran.widest, nbytes + out)
            batch, nbytes = made, out
            if not made.num_rows:
                self._emptied = (i, made.schema)
        ran.batch, ran.nbytes = batch, nbytes
        for i, counting in self._counting:
            counts = counting.end_attempt()
            if counts[0] or counts[1]:
                ran.counts[i] = counts
        return ran

    def isolate(self, batch: pa.RecordBatch, *, first_only: bool) -> Ran:
        """Run row by row where needed: halve the batch until each failing row stands alone.

        Stateful transforms are put back to where they were before each attempt, so a row is never seen twice.
        With `first_only` the search ends at the first failing row.
        """
        total = Ran(None, widest=batch.nbytes)
        kept: list[pa.RecordBatch] = []
        failures: list[Failure] = []
        todo = [(0, batch.num_rows)]
        while todo and not (failures and first_only):
            start, stop = todo.pop()
            before = self.states()
            part = batch.slice(start, stop - start)
            try:
                ran = self.run(part, part.nbytes)
            except StepError as step:
                self.restore(before)
                if stop - start == 1:
                    failures.append(Failure(start, stage_name(self.transforms[step.index]), self._blame(step)))
                    self._remember_keys(part, step.index)
                else:
                    middle = (start + stop) // 2
                    todo += [(middle, stop), (start, middle)]
                continue
            total.count(ran.counts)
            if ran.batch is not None and ran.batch.num_rows:
                kept.append(ran.batch)
        total.failures = tuple(failures)
        if kept:
            total.batch = pa.concat_batches(kept)
            total.nbytes = total.batch.nbytes
            total.widest += total.nbytes
        return total

    def _blame(self, step: StepError) -> Exception:
        """The error of a single row; one that ends the run if it may be about a row that came before."""
        holding = next((t for t in self.transforms[: step.index] if isinstance(t, Finishing)), None)
        if holding is None or isinstance(step.error, BrokenStageError):
            return step.error
        failing, holder = stage_name(self.transforms[step.index]), stage_name(holding)
        error = BrokenStageError(
            f"{failing} refused a row that may have waited in {holder}, so it is not known which: "
            f"{type(step.error).__name__}: {step.error}; put {failing} before {holder}"
        )
        error.__cause__ = step.error
        return error

    def _remember_keys(self, row: pa.RecordBatch, index: int) -> None:
        """Have the stages before the one that refused a row know its keys: which rows are copies of an earlier one does
        not depend on what comes after."""
        before = self.transforms[:index]
        if not any(isinstance(transform, FirstOfKey) for transform in before):
            return
        for _, counting in self._counting:
            counting.begin_attempt()
        for transform in before:
            if isinstance(transform, Stateful) and not isinstance(transform, FirstOfKey):
                break  # it has not had this row
            row = transform.transform(row)
        for _, counting in self._counting:
            counting.undo_attempt()

    @property
    def output_schema(self) -> pa.Schema | None:
        """Schema of the last step, as far as it has been seen."""
        return self._schemas[-1] if self._schemas else None

    def schema_without_rows(self, given: pa.Schema | None) -> pa.Schema | None:
        """Schema of the last step, found by sending an empty batch on from the step that dropped the last rows."""
        if self.output_schema is not None:
            return self.output_schema
        start, schema = (self._emptied[0] + 1, self._emptied[1]) if self._emptied is not None else (0, given)
        if schema is None:
            return None
        batch = pa.RecordBatch.from_pylist([], schema=schema)
        for transform in self.transforms[start:]:
            try:
                batch = transform.transform(batch)
            except Exception:  # noqa: BLE001 - it was not made for no rows: then the columns are not known
                return None
        return batch.schema if isinstance(batch, pa.RecordBatch) else None

    def _checked(self, index: int, batch: Any) -> pa.RecordBatch:
        if not isinstance(batch, pa.RecordBatch):
            raise BrokenStageError(
                f"{stage_name(self.transforms[index])} returned {type(batch).__name__}, expected a pyarrow.RecordBatch"
            )
        expected = self._schemas[index]
        if expected is None:
            if batch.num_rows:
                self._schemas[index] = batch.schema
        elif batch.num_rows and not batch.schema.equals(expected):
            raise BrokenStageError(
                f"{stage_name(self.transforms[index])} returned another schema than before: "
                f"{describe_difference(expected, batch.schema)}"
            )
        return batch

    def states(self) -> list[Any]:
        """The state of each transform that has one, to go back to with `restore`."""
        return [transform.state_dict() for transform in self._stateful]

    def restore(self, states: list[Any]) -> None:
        for transform, state in zip(self._stateful, states):
            transform.load_state_dict(state)


class StepError(Exception):
    """Error of one step of the chain, with its number."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index, self.error = index, error


def stage_name(stage: object) -> str:
    """Name of a stage, in checkpoints too: its own repr if it has one, else its class or function name."""
    kind = type(stage)
    if kind.__repr__ is not object.__repr__ and not inspect.isroutine(stage) and not isinstance(stage, type):
        return repr(stage)
    return getattr(stage, "__name__", kind.__name__)


def describe_difference(expected: pa.Schema, got: pa.Schema) -> str:
    """The columns that differ, as `'n' was int64, is string; 'm' is missing; 'k' is new`."""
    notes = []
    for column in expected:
        index = got.get_field_index(column.name)
        if index < 0:
            notes.append(f"{column.name!r} is missing")
        elif got.field(index).type != column.type:
            notes.append(f"{column.name!r} was {column.type}, is {got.field(index).type}")
    notes += [f"{name!r} is new" for name in got.names if name not in expected.names]
    return "; ".join(notes) or "the columns stand in another order, or differ in nullability or metadata"
