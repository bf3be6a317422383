"""Whether the columns that the steps of a pipeline name are there, found without reading rows.

A batch without rows goes through the steps. It stops at a function of somebody else, at a step that has to learn from
the data, and at one that gathers rows: which columns come out of these is not known before they run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.cli.arguments import Problems
from penstock.cli.spec import Plan
from penstock.errors import PenstockError, QueueNotFoundError
from penstock.pipeline.functions import FunctionStage
from penstock.transforms.deduplication import Dedup

__all__ = ["ColumnCheck", "check_columns"]


@dataclass(slots=True)
class ColumnCheck:
    """What was found out."""

    checked_steps: int = 0
    """So many steps, from the first on, name columns that are there."""
    unknown: str | None = None
    """Why the columns behind them are not known; None if all steps were checked."""
    columns: list[str] = field(default_factory=list)
    """The columns that come out of the steps that were checked."""


def check_columns(plan: Plan, problems: Problems) -> ColumnCheck:
    """Adds to `problems` what names a column that is not there."""
    found = ColumnCheck()
    try:
        schema = getattr(plan.pipeline.source, "schema", None)
    except QueueNotFoundError:
        schema = None
    except (PenstockError, OSError, ValueError) as error:
        problems.add("source", str(error))
        return found
    if not isinstance(schema, pa.Schema) or not len(schema):
        found.unknown = "the source does not say which columns it has before it is read"
        return found
    batch = pa.RecordBatch.from_pylist([], schema=schema)
    to_fit = {id(plan.pipeline.transforms[position]) for position in plan.to_fit}
    for number, step in enumerate(plan.steps):
        where = f"transforms[{number}]"
        if missing := _missing(step, batch.schema):
            problems.add(where, f"column {missing!r} is not there; the columns are {batch.schema.names}")
        reason = _unknown_behind(step, fits=id(step) in to_fit)
        if reason is not None:
            found.unknown = f"{where}: {reason}"
            break
        if missing:
            continue
        if not isinstance(step, Dedup) and not _judges_by_function(step):
            try:
                batch = step.transform(batch)
            except (PenstockError, KeyError, pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
                problems.add(where, str(error))
                continue
        found.checked_steps += 1
    found.columns = batch.schema.names
    return found


def _missing(step: Any, schema: pa.Schema) -> str | None:
    """A column that a step names and that is not there. Other steps tell it themselves."""
    if not isinstance(step, Dedup) and not callable(getattr(step, "fit", None)):
        return None
    named = getattr(step, "columns", None) or getattr(step, "column", None) or ()
    named = [named] if isinstance(named, str) else named
    return next((name for name in named if isinstance(name, str) and name not in schema.names), None)


def _unknown_behind(step: Any, *, fits: bool) -> str | None:
    """Why the columns behind a step are not known before it runs; None if they are."""
    if fits:
        return f"{step!r} has to learn from the data first"
    if not type(step).__module__.startswith("penstock."):
        return f"{type(step).__name__} is not a step of penstock"
    if isinstance(step, FunctionStage) and step.calls_function:
        return f"{step!r} calls a function of yours"
    if hasattr(step, "state_dict") and not isinstance(step, Dedup):
        return f"{step!r} gathers rows"
    return None


def _judges_by_function(step: Any) -> bool:
    """Whether a filter asks a function of somebody else, which is not made for no rows; it changes no column."""
    return bool(getattr(step, "calls_function", False))
