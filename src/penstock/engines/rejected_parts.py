"""Rejected rows of the tasks of a job, in the order of the splits, as a local run rejects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from penstock.engines.records import PartRecord, PhaseRecords
from penstock.engines.splits import described
from penstock.pipeline.quarantine import BadRows

if TYPE_CHECKING:
    from penstock.engines.work import JobWork

LOST = "job: workers died with a split"
"""What a split that was left out is counted as."""


class RejectedParts:
    """Rejected rows of some phases, whose tasks are done. `told_crashes` writes down the splits that were left out."""

    def __init__(
        self, source: Any, work: JobWork, phases: Sequence[PhaseRecords], *, told_crashes: bool = False
    ) -> None:
        self._source, self._work, self._phases, self._told_crashes = source, work, phases, told_crashes

    def give(self, bad: BadRows) -> None:
        """Hand them over, those of the first phase with their numbers in the file; too many raise."""
        rows_read = 0
        before: Counter[int] = Counter()
        for number in range(self._phases[0].tasks):
            for phase, records in enumerate(self._phases):
                counts = dict(records.bad[number])
                part = records.parts[number]
                assert part is not None
                if part.crash is not None and not phase:
                    counts[LOST] = counts.get(LOST, 0) + 1
                lines = self._lines(records, number, before if not phase else None)
                rows_read += part.rows_in if not phase else 0
                bad.take(lines, counts, rows_read)

    def _lines(self, records: PhaseRecords, number: int, before: Counter[int] | None) -> Iterator[bytes]:
        part = records.parts[number]
        assert part is not None
        if part.crash is not None and before is not None and self._told_crashes:
            yield self._lost_line(number, part.crash)
        counts = part.bad_lines
        if any(counts):
            with self._work.directory.opened(f"{records.name(number)}.bad") as path, open(path, "rb") as lines:
                for run, count in enumerate(counts):
                    shift = before[part.files[run]] if before is not None and part.records[run] is not None else 0
                    yield from (shifted(line, shift) for line in islice(lines, count))
                    _count_records(part, run, before)
        else:
            for run in range(len(counts)):
                _count_records(part, run, before)

    def _lost_line(self, number: int, crash: str) -> bytes:
        bundle, names = self._work.bundles[number], [entry[0] for entry in self._work.inputs]
        split = bundle.splits[0]
        line = {
            "file": names[split.file] if names else None,
            "row": None,
            "offset": split.start,
            "stage": "job",
            "reason": f"{described(self._source, bundle, names)} was left out: {crash}",
            "data": None,
        }
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def row_unknown(line: bytes) -> bytes:
    """A rejected row whose number is not known any more."""
    return shifted(line, None)


def shifted(line: bytes, by: int | None) -> bytes:
    """A rejected row with another row number: `by` more, or none."""
    start = line.index(b',"row":') + 7
    stop = line.index(b",", start)
    number = line[start:stop]
    if number == b"null" or by == 0:
        return line
    return line[:start] + (b"null" if by is None else b"%d" % (int(number) + by)) + line[stop:]


def count_lines(path: Path) -> int:
    """Number of lines of a file, which may not be there."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _count_records(part: PartRecord, run: int, before: Counter[int] | None) -> None:
    if before is not None and run < len(part.records) and (count := part.records[run]) is not None:
        before[part.files[run]] += count
