"""Tables to text, and tokenised rows to MLX arrays: penstock beside what people write, in one process and in turns.

    python benchmarks/tabular.py                          # every suite
    python benchmarks/tabular.py --suite batches --runs 9 --batch 128

`text`: a million Titanic-shaped rows to sentences. The others work row by row and are given a part of the rows only;
their times are scaled to all of them. The plain function says each column in the fewest steps we know; it is called on
`df.iloc[i]` in a loop, and by `DataFrame.apply`. The text is compared before anything is timed.
`batches`: one shuffled epoch of 100,000 tokenised rows (8 to 63 tokens), padded to the longest of each batch, with mask
and labels, as `mx.array`. penstock reads columns, and a list of samples as the others have it; mlx-data works in one
thread, and with two more that work ahead, on samples with a mask as tokenizers give it, and on samples without, with a
mask made by hand of the padded ids (which no row may then have within); torch's DataLoader with 0 and with 2 workers,
kept between epochs, and the fastest collation we know. That every row comes once, with its label, is checked for all of
them. Making the data set itself is not in it.
`memory`: how far the peak of a process rises above what it had after a few rows, the data set included, beside the
budget; batches of columns and of samples as above, and Parquet to text through the engine.
Times are medians of wall time, and ratios are of these; `best` compares the fastest runs, which on a busy machine is
the steadier of the two. `CPU` is that of all threads of this process, and of no other.
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
"""Of cases that are not slow, in a turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to do the work; `share` of all rows is what it is given, `target` how much longer it should take.

    What is `slow` runs once in a turn.
    """

    name: str
    work: Callable[[], Any]
    share: float = 1.0
    target: float | None = None
    slow: bool = False


# -- text --------------------------------------------------------------------------------------------------------------


def plain_text(row: Any) -> str:
    """A row as sentences, written by hand: what is missing is left out, whole numbers have no point."""
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
    arrays = [np.array(one.values) for one in data["input_ids"]]  # mlx-data takes only what it may write to
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
    """Every row without its padding, and its label."""
    for batch in batches:
        ids, mask, labels = (np.array(part) for part in batch)
        for row, shown, label in zip(ids, mask, labels, strict=True):
            yield row[shown == 1].astype(np.int32).tobytes(), int(label)


def drain(batches: Iterator[Batch]) -> int:
    return sum(len(labels) for _, _, labels in batches)


# -- memory ------------------------------------------------------------------------------------------------------------


class Samples:
    """Rows read one by one, as from a data set of the user's own."""

    def __init__(self, data: pa.Table) -> None:
        self.ids, self.labels = data["input_ids"].combine_chunks(), data["labels"].to_pylist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": np.asarray(self.ids[row].values), "labels": self.labels[row]}


MEMORY = {"columns": "64 MiB", "samples": "64 MiB", "text": "128 MiB"}


def memory_case(kind: str, rows: int, path: str) -> None:
    """In a process of its own: few rows, so that everything is loaded; what it then has; and the peak with all rows."""
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
    """What the process has now; where the system can, its peak is counted from here."""
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
            time.sleep(0.01)  # what is made ahead has time to pile up
    return seen


def parquet_file(folder: Path, rows: int) -> Path:
    """Made by another process, whose memory is no matter here."""
    file = folder / f"{rows}.parquet"
    code = "import pyarrow.parquet as pq\nfrom penstock.datasets.sample_data import titanic_table\n"
    code += f"pq.write_table(titanic_table({rows}), {str(file)!r}, row_group_size=65536)"
    subprocess.run([sys.executable, "-c", code], check=True)
    return file


def text_through(file: Path, budget: MemoryBudget) -> int:
    """Parquet to text through the engine."""
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
        for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:  # nobody is always behind the same one
            case.work()  # the case before it has had the caches, and may have left processes behind it
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
    parser.add_argument("--rows", type=int, help="1,000,000 of text, 100,000 of samples if left out")
    parser.add_argument("--part", type=int, default=10_000, help="rows for what works row by row")
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
