from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pyarrow as pa
import pytest
from tests.corpus_files import tokenizer_dir

from penstock import MemoryBudget, Pipeline
from penstock.pipeline import pipeline
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


class OldTables(Tables):
    """A transform that is part of a cycle, and tells which of those before it are still there when it loads."""

    made: list[weakref.ref[OldTables]] = []  # noqa: RUF012 - of one test

    def __init__(self, budget: MemoryBudget, nbytes: int = 16 << 20) -> None:
        super().__init__(budget, nbytes)
        self.itself = self
        self.older: list[bool] = []

    def fit_budget(self, nbytes: int) -> None:
        self.older = [reference() is not None for reference in self.made]
        self.made.append(weakref.ref(self))
        super().fit_budget(nbytes)


@pytest.mark.parametrize(("budget", "there"), [("64 MiB", False), ("1 GiB", True)])
def test_tables_of_a_pipeline_that_is_over_are_freed_before_a_small_budget_has_others_loaded(
    budget: str, there: bool
) -> None:
    OldTables.made.clear()
    gc.disable()
    try:
        for _ in range(2):
            tables = OldTables(MemoryBudget(budget))
            Pipeline([{"id": 1}], [tables], MemorySink(), budget=budget).run()
            older = tables.older
            del tables
    finally:
        gc.enable()
    assert older == [there]


def test_no_garbage_is_collected_for_a_small_budget_if_little_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[bool] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    monkeypatch.setattr(pipeline, "_loaded", [])
    for nbytes, expected in [(1 << 10, 0), (1 << 10, 0), (16 << 20, 0), (1 << 10, 1)]:
        OldTables.made.clear()
        budget = MemoryBudget("64 MiB")
        Pipeline([{"id": 1}], [OldTables(budget, nbytes)], MemorySink(), budget=budget).run()
        assert len(collected) == expected


PREPARE = """
import sys
from pathlib import Path
from penstock.loaders import Recipe, prepare

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

few, many, out, tokenizer, budget = sys.argv[1:]
prepare(few, f"{out}/few.store", Recipe(tokenizer=tokenizer), budget=budget)
before = peak()
prepare(many, f"{out}/many.store", Recipe(tokenizer=tokenizer), budget=budget)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("budget", ["64 MiB", "128 MiB"])
def test_a_second_tokenizer_and_a_corpus_take_no_more_than_the_budget(tmp_path: Path, budget: str) -> None:
    words = [f"{word}{ending}" for word in ("water", "turbine", "gate", "pipe") for ending in range(5000)]
    texts = [" ".join(words[start : start + 400]) for start in range(0, len(words), 7)]
    rows = [f'{{"text": "{text} {number}"}}\n' for number, text in enumerate(texts * 4)]
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    few.write_text("".join(rows[:100]))
    many.write_text("".join(rows))
    assert many.stat().st_size > 30e6
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PREPARE, few, many, tmp_path, tokenizer_dir("gpt2"), budget]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) <= MemoryBudget(budget).capacity
