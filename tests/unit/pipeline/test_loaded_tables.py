from __future__ import annotations

import mmap
from pathlib import Path

import pyarrow as pa
import pytest

from penstock import MemoryBudget, Pipeline
from penstock.sinks import MemorySink

OWNER = "loaded by stages"


class Tables:
    """A transform that loads tables before the first row, as tokenizers do."""

    def __init__(self, budget: MemoryBudget, nbytes: int) -> None:
        self._budget, self._nbytes = budget, nbytes
        self.charged: list[int] = []

    def fit_budget(self, nbytes: int) -> None:
        self._tables = mmap.mmap(-1, self._nbytes)  # new pages, whatever the process has free
        self._tables.write(b"x" * self._nbytes)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.charged.append(self._budget.by_owner().get(OWNER, 0))
        return batch


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux's /proc")
@pytest.mark.parametrize(("loaded", "expected"), [(1 << 10, 0), (48 << 20, 48 << 20), (160 << 20, 64 << 20)])
def test_what_a_stage_loads_is_charged_to_the_budget_up_to_half_of_it_during_the_run(
    loaded: int, expected: int
) -> None:
    budget = MemoryBudget("128 MiB")
    tables = Tables(budget, loaded)
    Pipeline([{"id": number} for number in range(10)], [tables], MemorySink(), budget=budget).run()
    assert tables.charged
    assert all(abs(charged - expected) <= 4 << 20 for charged in tables.charged), tables.charged
    assert OWNER not in budget.by_owner()
