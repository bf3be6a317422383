"""Tables to text and tokenized rows to MLX arrays, compared with common code, in one process, interleaved.

    python benchmarks/tabular.py                          # every suite
    python benchmarks/tabular.py --suite batches --runs 9 --batch 128

`text`: a million Titanic-shaped rows to sentences. The peers work row by row on a part of the rows; their times are
scaled to all rows. The plain function renders each column in the fewest steps we know. It is called on `df.iloc[i]` in
a loop, and by `DataFrame.apply`. The texts are compared before the timing.
`batches`: one shuffled epoch of 100,000 tokenized rows (8 to 63 tokens), padded to the longest of each batch, with mask
and labels, as `mx.array`. penstock reads columns, and a list of samples like the peers. mlx-data runs in one thread and
with two prefetch threads, on samples with a mask from the tokenizer, and on samples without, with a mask computed from
the padded ids (no row may then contain the padding id). torch's DataLoader runs with 0 and with 2 persistent workers,
and the fastest collation we know. For all of them, every row has to come once, with its label. Creating the dataset is
not timed.
`memory`: rise of the peak memory of a process above its level after a few rows, dataset included, compared with the
budget; batches of columns and of samples as above, and Parquet to text through a pipeline.
Times are medians of wall time, and ratios refer to them; `best` compares the fastest runs, which is steadier on a busy
machine. `CPU` is the time of all threads of this process only.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from facts import own_peak_bytes, report_facts
from measure import CaseError, measure
from table import table

from penstock import MemoryBudget, Pipeline
from penstock.datasets.sample_data import titanic_table
from penstock.loaders.mlx_loader import MLXDataLoader
from penstock.sources import ParquetSource
from penstock.templates import TabularTextConverter

Batch = tuple[Any, Any, Any]
QUICK_RUNS = 3
"""Runs per turn of cases that are not slow."""


@dataclass(frozen=True, slots=True)
class Case:
    """One implementation. It gets `share` of all rows; `target` is its required time relative to penstock.

    A `slow` case runs once per turn.
    """

    name: str
    work: Callable[[], Any]
    share: float = 1.0
    target: float | None = None
    slow: bool = False


# -- text --------------------------------------------------------------------------------------------------------------


def plain_text(row: Any) -> str:
    """Hand-written sentences of a row: missing values are omitted, whole numbers have no decimal point."""
    parts = []
    for name, value in row.items():
        if value is None or value != value:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        parts.append(f"The {name} is {value}.")
    return " ".join(parts)


def text_suite(rows: int, part: int) -> dict[str, list[Case]]:
    arrow = titanic_table(rows)
    frame = arrow.to_pandas()
    head = frame.iloc[:part]
    convert = TabularTextConverter()
    whole = [
        Case("penstock, convert_batch(DataFrame)", lambda: convert.convert_batch(frame)),
        Case("penstock, convert_table(Arrow)", lambda: convert.convert_table(arrow)),
    ]
    share = part / rows
    by_row = [
        Case("df.iloc[i], plain function", lambda: [plain_text(head.iloc[i]) for i in range(part)], share, 20, True),
        Case(
            "df.iloc[i], convert_row", lambda: [convert.convert_row(head.iloc[i]) for i in range(part)], share, 20, True
        ),
        Case("DataFrame.apply, plain function", lambda: head.apply(plain_text, axis=1).tolist(), share, 3, True),
    ]
    expected = whole[0].work()
    assert whole[1].work().to_pylist() == expected
    for case in by_row:
        assert case.work() == expected[:part], case.name
    return {f"text, {rows:,} rows": [*whole, *by_row]}


# -- batches -----------------------------------------------------------------------------------------------------------


def samples_table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 64, rows)
    ids = rng.integers(1, 30_000, int(lengths.sum()), np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    listed = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    return pa.table({"input_ids": listed, "labels": pa.array(rng.integers(0, 2, rows, np.int32))})


def batch_suite(rows: int, size: int) -> dict[str, list[Case]]:
    import mlx.core as mx
    import mlx.data as dx
    import torch

    data = samples_table(rows)
    arrays = [np.array(one.values) for one in data["input_ids"]]  # mlx-data accepts only writable arrays
    labels = data["labels"].to_pylist()
    samples = [{"input_ids": ids, "labels": label} for ids, label in zip(arrays, labels, strict=True)]
    columns = MLXDataLoader(data, batch_size=size)
    listed = MLXDataLoader(samples, batch_size=size)
    plain = [one | {"labels": np.array(one["labels"], np.int32)} for one in samples]
    vectors = dx.buffer_from_vector(plain)
    masked = dx.buffer_from_vector([one | {"attention_mask": np.ones_like(one["input_ids"])} for one in plain])
    tensors = [(torch.from_numpy(ids), label) for ids, label in zip(arrays, labels, strict=True)]

    def ours(loader: MLXDataLoader) -> Iterator[Batch]:
        for batch in loader:
            yield batch["input_ids"], batch["attention_mask"], batch["labels"]

    def converted(stream: Any) -> Iterator[Batch]:
        for batch in stream:
            ids = batch["input_ids"]
            yield mx.array(ids), mx.array((ids != 0).astype(np.int32)), mx.array(batch["labels"])

    def padded(stream: Any) -> Iterator[Batch]:
        for batch in stream:
            yield mx.array(batch["input_ids"]), mx.array(batch["attention_mask"]), mx.array(batch["labels"])

    def collate(chosen: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([one for one, _ in chosen], batch_first=True)
        return ids, (ids != 0).int(), torch.tensor([label for _, label in chosen], dtype=torch.int32)

    def torch_case(workers: int) -> Callable[[], Iterator[Batch]]:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        loader = torch.utils.data.DataLoader(tensors, size, shuffle=True, collate_fn=collate, **options)  # type: ignore[arg-type]
        return lambda: ((mx.array(i.numpy()), mx.array(m.numpy()), mx.array(y.numpy())) for i, m, y in loader)

    makers: list[tuple[str, Callable[[], Iterator[Batch]], float | None]] = [
        ("penstock, columns", lambda: ours(columns), None),
        ("penstock, list of samples", lambda: ours(listed), None),
        ("mlx-data", lambda: padded(masked.shuffle().batch(size)), 2),
        ("mlx-data, 2 threads ahead", lambda: padded(masked.shuffle().batch(size).ordered_prefetch(4, 2)), 2),
        ("mlx-data, mask by hand", lambda: converted(vectors.shuffle().batch(size)), 2),
        (
            "mlx-data, mask by hand, 2 threads ahead",
            lambda: converted(vectors.shuffle().batch(size).ordered_prefetch(4, 2)),
            2,
        ),
        ("torch DataLoader, 0 workers", torch_case(0), 2),
        ("torch DataLoader, 2 workers", torch_case(2), 2),
    ]
    expected = sorted((ids.tobytes(), label) for ids, label in zip(arrays, labels, strict=True))
    for name, make, _ in makers:
        assert sorted(rows_of(make())) == expected, f"{name} gave other rows"
    title = f"batches of {size}, {rows:,} rows"
    return {
        title: [
            Case(name, lambda make=make: drain(make()), 1.0, target, "torch" in name) for name, make, target in makers
        ]
    }  # type: ignore[misc]


def rows_of(batches: Iterator[Batch]) -> Iterator[tuple[bytes, int]]:
    """Every row without padding, and its label."""
    for batch in batches:
        ids, mask, labels = (np.array(part) for part in batch)
        for row, shown, label in zip(ids, mask, labels, strict=True):
            yield row[shown == 1].astype(np.int32).tobytes(), int(label)


def drain(batches: Iterator[Batch]) -> int:
    return sum(len(labels) for _, _, labels in batches)


# -- memory ------------------------------------------------------------------------------------------------------------


class Samples:
    """Dataset read row by row, like one of a user."""

    def __init__(self, data: pa.Table) -> None:
        self.ids, self.labels = data["input_ids"].combine_chunks(), data["labels"].to_pylist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": np.asarray(self.ids[row].values), "labels": self.labels[row]}


MEMORY = {"columns": "64 MiB", "samples": "64 MiB", "text": "128 MiB"}


def memory_case(kind: str, rows: int, path: str) -> None:
    """Memory in a separate process: the level after a few rows, with everything loaded, and the peak with all rows."""
    budget = MemoryBudget.of(MEMORY[kind])
    if kind == "text":
        with tempfile.TemporaryDirectory() as folder:
            files = [parquet_file(Path(folder), count) for count in (20_000, rows)]
            text_through(files[0], budget)
            base = resident_now()
            assert text_through(files[1], budget) == rows
    else:
        few, data = samples_table(2_000), samples_table(rows)
        feed_all(few if kind == "columns" else Samples(few), budget)
        dataset = data if kind == "columns" else Samples(data)
        base = resident_now()
        assert feed_all(dataset, budget) == rows
    report_facts(path, base=base)


def resident_now() -> int:
    """Current memory of the process; where the system supports it, the peak is reset."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return own_peak_bytes()
    return int(psutil.Process().memory_info().rss)


def feed_all(dataset: Any, budget: MemoryBudget) -> int:
    seen = 0
    for number, batch in enumerate(MLXDataLoader(dataset, batch_size=32, budget=budget)):
        seen += batch.batch_size
        if number % 100 == 0:
            time.sleep(0.01)  # gives prefetched batches time to accumulate
    return seen


def parquet_file(folder: Path, rows: int) -> Path:
    """Write the data in another process, whose memory does not count."""
    file = folder / f"{rows}.parquet"
    code = "import pyarrow.parquet as pq\nfrom penstock.datasets.sample_data import titanic_table\n"
    code += f"pq.write_table(titanic_table({rows}), {str(file)!r}, row_group_size=65536)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return file


def text_through(file: Path, budget: MemoryBudget) -> int:
    """Parquet to text through a pipeline."""
    convert = TabularTextConverter()

    def say(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"text": convert.convert_table(pa.Table.from_batches([batch]))})

    return sum(batch.num_rows for batch in Pipeline(ParquetSource(file), [say], budget=budget))


def run_memory(rows: dict[str, int]) -> None:
    lines = []
    for kind, budget in MEMORY.items():
        command = [sys.executable, __file__, "--memory-case", kind, "--rows", str(rows[kind]), "--facts"]
        try:
            found = measure(command)
        except CaseError as error:
            lines.append([kind, budget, "-", "-", str(error)[:80]])
            continue
        rise = found.facts["own_peak_bytes"] - found.facts["base"]
        share = rise / MemoryBudget.of(budget).limit
        figures = [f"{found.facts['base'] / 2**20:.0f}", f"{rise / 2**20:.1f}", "yes" if share <= 1 else "NO"]
        lines.append([f"{kind}, {rows[kind]:,} rows", budget, *figures])
    print(table(["memory", "budget", "base MiB", "rise MiB", "inside"], lines), end="\n\n")


# -- running -----------------------------------------------------------------------------------------------------------


def run(title: str, cases: list[Case], runs: int) -> None:
    wall: dict[str, list[float]] = {case.name: [] for case in cases}
    cpu: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(runs):
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:  # another order each turn
            case.work()  # warm-up: the previous case owned the caches and may have left processes
            for _ in range(1 if case.slow else QUICK_RUNS):
                start, start_cpu = time.perf_counter(), time.process_time()
                case.work()
                wall[case.name].append((time.perf_counter() - start) / case.share)
                cpu[case.name].append((time.process_time() - start_cpu) / case.share)
    ours, our_best = median(wall[cases[0].name]), min(wall[cases[0].name])
    lines = []
    for case in cases:
        taken, best = median(wall[case.name]), min(wall[case.name])
        goal = "" if case.target is None else f"{case.target:g}x: {'met' if taken / ours >= case.target else 'MISSED'}"
        part = "" if case.share == 1 else f" (of {case.share:.1%} of the rows)"
        figures = [taken, median(cpu[case.name]), taken / ours, best / our_best]
        lines.append([case.name + part, *(f"{figure:.3f}" for figure in figures[:2])])
        lines[-1] += [*(f"{figure:.2f}" for figure in figures[2:]), goal]
    print(table([title, "s", "CPU s", "times the first", "best", "target"], lines), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["text", "batches", "memory"], help="only this one")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, help="rows (1,000,000 for text, 100,000 for samples)")
    parser.add_argument("--part", type=int, default=10_000, help="rows for cases that work row by row")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--memory-case", choices=sorted(MEMORY), help=argparse.SUPPRESS)
    parser.add_argument("--facts", help=argparse.SUPPRESS)
    given = parser.parse_args()
    text_rows, sample_rows = given.rows or 1_000_000, given.rows or 100_000
    if given.memory_case:
        memory_case(given.memory_case, given.rows, given.facts)
        return
    if given.suite in (None, "text"):
        for title, cases in text_suite(text_rows, min(given.part, text_rows)).items():
            run(title, cases, given.runs)
    if given.suite in (None, "batches"):
        for title, cases in batch_suite(sample_rows, given.batch).items():
            run(title, cases, given.runs)
    if given.suite in (None, "memory"):
        run_memory({"columns": sample_rows, "samples": sample_rows, "text": text_rows})


if __name__ == "__main__":
    main()
