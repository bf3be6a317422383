"""Report of a run: its figures, where they come from, and the lines that show them.

A new figure is a field of `Report`, its value in `Report.of` and, if people should see it, a line in `Report.lines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from penstock._amounts import format_seconds
from penstock.html import fragment, table
from penstock.memory.budget import format_bytes
from penstock.pipeline.metrics import TOKENS, tokens_in

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.pipeline.runner import Runner


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a run."""

    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    """Rows left out on purpose, by reason."""
    changed: dict[str, int]
    """Rows kept with something in them changed for cause (set to null, unknown category), by reason. A reason that
    begins with `tokens left out: ` counts tokens."""
    quarantined: dict[str, int]
    """Bad rows written to the quarantine file, by reason."""
    skipped: dict[str, int]
    """Bad rows dropped with `on_error="skip"`, by reason."""
    seconds: float
    peak_bytes: int
    """The most that was charged to the memory budget at once."""
    bottleneck: str
    stages: list[dict[str, Any]] = field(default_factory=list)
    resumed: bool = False
    """True if the run was resumed from a checkpoint; the row counts include what was done before it."""

    @classmethod
    def of(cls, pipeline: Pipeline, runner: Runner, *, resumed: bool) -> Self:
        """The report of a run at its end."""
        delivery, snapshot = runner.delivery, runner.snapshot()
        bad = dict(delivery.bad_rows.counts)
        return cls(
            rows_in=delivery.rows_read,
            rows_out=delivery.rows_out,
            dropped=dict(delivery.dropped),
            changed=dict(delivery.changed),
            quarantined=bad if pipeline.config.on_error == "quarantine" else {},
            skipped=bad if pipeline.config.on_error == "skip" else {},
            seconds=snapshot["seconds"],
            peak_bytes=pipeline.budget.peak,
            bottleneck=snapshot["bottleneck"],
            stages=snapshot["stages"],
            resumed=resumed,
        )

    def __str__(self) -> str:
        """The lines that people see, in columns; `to_dict` has every figure."""
        rows = list(self.lines())
        label, figure = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{a:<{label}}  {b:>{figure}}  {c}".rstrip() for a, b, c in rows)

    def lines(self, *, budget_bytes: int | None = None) -> Iterator[tuple[str, str, str]]:
        """Label, figure and remark of each line that people see."""
        yield "rows in", f"{self.rows_in:,}", _ORIGIN if self.resumed else ""
        yield "rows out", f"{self.rows_out:,}", ""
        yield from _by_reason("dropped", self.dropped)
        yield from _by_reason("changed", {why: n for why, n in self.changed.items() if not why.startswith(TOKENS)})
        yield from _by_reason("tokens lost", self.dropped_tokens)
        yield from _by_reason("quarantined", self.quarantined)
        yield from _by_reason("skipped", self.skipped)
        yield "time", format_seconds(self.seconds), self._speed()
        budget = f"of a budget of {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
        yield "peak memory", format_bytes(self.peak_bytes), budget
        yield "bottleneck", "", self.bottleneck

    def _speed(self) -> str:
        """From the figures of the stages: after a resume, the rows of the report are those of several runs."""
        if self.seconds <= 0 or not self.stages:
            return ""
        rows = sum(stage["rows_in"] for stage in self.stages if stage["kind"] in ("source", "decode"))
        megabytes = self.stages[0]["bytes_in"] / 1e6
        return f"{rows / self.seconds:,.0f} rows/s, {megabytes / self.seconds:,.1f} MB/s"

    def _repr_html_(self) -> str:
        """Figures and stages for a notebook."""
        shown = [table(list(self.lines()), ["", "figure", "remark"], caption="Report of a run")]
        if self.stages:
            names = [name for name in self.stages[0] if all(name in stage for stage in self.stages)]
            shown.append(table([[stage[name] for name in names] for stage in self.stages], names, caption="Stages"))
        return fragment(*shown)

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that are in no row that came out, by reason."""
        return tokens_in(self.changed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_ORIGIN = "including those before the checkpoint that was resumed"


def _by_reason(label: str, reasons: Mapping[str, int]) -> Iterator[tuple[str, str, str]]:
    """A line for each reason, the most frequent first."""
    for number, (reason, rows) in enumerate(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))):
        yield label if number == 0 else "", f"{rows:,}", reason
