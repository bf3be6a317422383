"""Custom source and sink: the three methods they need, and the contract tests of `penstock.testing`."""

from collections import Counter

import numpy as np
import pyarrow as pa

from penstock import Pipeline, PipelineConfig, Sink, Source
from penstock.testing import assert_resumes_exactly, assert_source_contract


class Dice(Source):
    """Throws of a die. Each throw is a function of its number, so the source can resume anywhere."""

    def __init__(self, throws: int, seed: int = 0) -> None:
        self._throws, self._seed, self._next = throws, seed, 0

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        numbers = range(self._next, min(self._throws, self._next + max_rows))
        if not numbers:
            return None
        self._next = numbers.stop
        eyes = [int(np.random.default_rng([self._seed, n]).integers(1, 7)) for n in numbers]
        return pa.record_batch({"throw": pa.array(numbers, pa.int64()), "eyes": pa.array(eyes, pa.int64())})

    # These two methods give exact resume and checkpoints; `reset` allows a second run.
    def state_dict(self) -> dict:
        return {"next": self._next}

    def load_state_dict(self, state: dict) -> None:
        self._next = state["next"]

    def reset(self) -> None:
        self._next = 0


class Tally(Sink):
    """Counts of the values of a column."""

    def __init__(self, column: str) -> None:
        self._column, self.counts = column, Counter[int]()

    def consume(self, batch: pa.RecordBatch) -> None:
        self.counts.update(batch[self._column].to_pylist())

    def flush(self) -> None:
        print("eyes:", dict(sorted(self.counts.items())))


report = Pipeline(Dice(6000), [], Tally("eyes")).run()
print(f"{report.rows_out} throws; {report.bottleneck}")

first_rows = Dice(20).next_batch(20).to_pylist()
assert_source_contract(lambda: Dice(20), first_rows)
assert_resumes_exactly(lambda: Pipeline(Dice(20), config=PipelineConfig(batch_rows=3)))
print("the source keeps the contract and resumes exactly")
