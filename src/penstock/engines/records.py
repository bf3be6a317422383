"""Records of finished tasks: as they lie in the job's directory, and the little of them that the driver keeps.

The driver holds some hundred bytes a split, whatever its rows: counts are summed up as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._amounts import counted
from penstock.engines.splits import Bundle

_SUMS = (
    *("batches", "rows_in", "rows_out", "bytes_in", "bytes_out"),
    *("busy_seconds", "cpu_seconds", "wait_input_seconds", "wait_room_seconds"),
)


def empty_record(files: Sequence[int] = ()) -> dict[str, Any]:
    """Record of a map task before it has read anything."""
    return {
        **dict.fromkeys(("rows_in", "rows", "bytes", "peak_bytes"), 0),
        **{"dropped": {}, "changed": {}, "bad": {}},
        # A run is the rows of one split: its file, its rows, its records (of text), its quarantined rows.
        **{"files": list(files), "run_rows": [0] * len(files), "records": [], "bad_lines": [0] * len(files)},
        **{"schema": None, "stages": [], "keys": None, "crash": None},
    }


@dataclass(slots=True)
class PartRecord:
    """Rows that a task has left in its part."""

    rows: int
    files: tuple[int, ...]
    """File of each run, as its number in the input."""
    run_rows: tuple[int, ...]
    records: tuple[int | None, ...]
    bad_lines: tuple[int, ...]
    rows_in: int
    crash: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> PartRecord:
        files, rows, lines = (tuple(record[name]) for name in ("files", "run_rows", "bad_lines"))
        return cls(record["rows"], files, rows, tuple(record["records"]), lines, record["rows_in"], record["crash"])


class PhaseRecords:
    """Records of all tasks of a phase, in order, and their sums.

    `kind` is that of the tasks; those of a fit have the position of the transform as their phase.
    """

    def __init__(self, tasks: int, phase: int, kind: str = "map") -> None:
        self.tasks, self.phase, self.kind = tasks, phase, kind
        self.parts: list[PartRecord | None] = [None] * tasks
        self.sums, self.dropped, self.changed = Counter[str](), Counter[str](), Counter[str]()
        self.bad: list[dict[str, int]] = [_NONE] * tasks
        """Bad rows of each task, by reason."""
        self.stages: dict[tuple[str, str], dict[str, Any]] = {}
        self.schema: str | None = None
        """Columns of the rows: those of a part with rows, if there is one."""
        self.peak_bytes = 0
        self.bad_reasons = Counter[str]()
        """Bad rows of all tasks, by reason."""
        self.key_starts: dict[int, npt.NDArray[np.int64]] = {}
        self._schema_rank = (False, 0)

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        """Take over the record of a task; a second one of the same task changes nothing."""
        if self.parts[number] is not None:
            return
        self.parts[number] = PartRecord.of(record)
        self.sums.update({name: record[name] for name in ("rows_in", "rows", "bytes")})
        self.dropped.update(record["dropped"])
        self.changed.update(record["changed"])
        self.bad[number] = dict(record["bad"]) or _NONE
        self.bad_reasons.update(record["bad"])
        self.peak_bytes = max(self.peak_bytes, record["peak_bytes"])
        add_stages(self.stages, record["stages"])
        rank = (record["rows"] > 0, -number)
        if record["schema"] is not None and (self.schema is None or rank > self._schema_rank):
            self.schema, self._schema_rank = record["schema"], rank
        if record["keys"] is not None:
            self.key_starts[number] = np.array(record["keys"], np.int64)

    @property
    def complete(self) -> list[PartRecord]:
        return [part for part in self.parts if part is not None]

    def name(self, number: int) -> str:
        return task_name(self.phase, number, self.kind)


_NONE: dict[str, int] = {}


def task_name(phase: int, number: int, kind: str = "map") -> str:
    """Name of a task of a phase."""
    return f"{kind}-{phase}-{number:06d}"


def add_stages(into: dict[tuple[str, str], dict[str, Any]], stages: Iterable[Mapping[str, Any]]) -> None:
    """Add up the figures of stages with the same name."""
    for stage in stages:
        key = (stage["kind"], stage["name"])
        mine = into.setdefault(key, {"name": stage["name"], "kind": stage["kind"], **dict.fromkeys(_SUMS, 0)})
        for name in _SUMS:
            mine[name] += stage[name]


def finished_stages(stages: Iterable[Mapping[str, Any]], seconds: float, slots: int) -> list[dict[str, Any]]:
    """Stages with the figures that a report has."""
    made = []
    for stage in stages:
        rows, nbytes = stage["rows_in"], stage["bytes_in"]
        rates = {"rows_per_second": rows / seconds, "bytes_per_second": nbytes / seconds} if seconds > 0 else {}
        made.append(
            {
                **stage,
                **{name: round(stage[name], 6) for name in _SUMS if name.endswith("_seconds")},
                "utilisation": round(min(1.0, stage["busy_seconds"] / max(1e-9, seconds * slots)), 4),
                "threads": slots,
                "memory_bytes": 0,
                "rows_per_second": round(rates.get("rows_per_second", 0.0), 1),
                "bytes_per_second": round(rates.get("bytes_per_second", 0.0), 1),
                "latency_ms": {"p50": 0.0, "p95": 0.0, "p99": 0.0},
            }
        )
    return made


def bottleneck(stages: Sequence[Mapping[str, Any]], tasks: int, nodes: int) -> str:
    """One sentence: the stage with the largest share of the time of all tasks."""
    total = sum(stage["busy_seconds"] for stage in stages)
    where = f"{counted(tasks, 'task')} on {counted(nodes, 'node')}"
    if not total:
        return f"nothing has been done yet: {where}"
    most = max(stages, key=lambda stage: float(stage["busy_seconds"]))
    return f"{most['name']} is the bottleneck: {most['busy_seconds'] / total:.0%} of the work of {where}"


def lost_record(bundle: Bundle, crash: str, records: Sequence[int | None]) -> dict[str, Any]:
    """Record of a task whose rows are left out."""
    return empty_record([split.file for split in bundle.splits]) | {"records": list(records), "crash": crash}
