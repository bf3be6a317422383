"""Throughput and latency of the filesystem queue from one provider process to one consumer process, compared with
torch.save under the same protocol and with copying the bytes.

python benchmarks/queue.py [--repeat 5] [--batches 3000] [--disk DIR] [--tmpfs /dev/shm] [--suite speed,latency]

A batch is x, y int64 [32, 512], 262,144 bytes. All cases have a backlog of 64 batches, write under a temporary name,
rename, and delete consumed files. `torch` is torch.save and torch.load(weights_only=True) of a dict, one batch a file,
as in queues written by hand; `torch-8` puts eight into a file, as penstock does by default. `arrow` is an Arrow file
with one batch, which the consumer maps and makes tensors of without a copy. `bytes` writes and reads the bare bytes
under the same protocol; `copy` is shutil.copyfile of as many files of that size in one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from table import table

ROWS, TOKENS, BACKLOG = 32, 512, 64
SIZE = 2 * ROWS * TOKENS * 8
CASES = ("penstock", "penstock-strict", "penstock-1", "torch", "torch-8", "arrow", "bytes", "copy")
PAUSE = 0.0005
SCHEMA = [
    {"name": "x", "dtype": "int64", "shape": [TOKENS], "role": "input"},
    {"name": "y", "dtype": "int64", "shape": [TOKENS], "role": "target"},
]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 50_000, (ROWS, TOKENS))
    return x, np.roll(x, 1)


# Provider and consumer of each case. A consumer reports the seconds from its first batch to its last.


def provide_penstock(where: Path, case: str, batches: int) -> None:
    from penstock.fsqueue import DataProviderBase

    x, y = arrays()

    class Provider(DataProviderBase):
        def build_meta(self) -> dict[str, Any]:
            return {"batch_schema": SCHEMA}

        def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
            return {"x": x, "y": y}

    per_file = 1 if case == "penstock-1" else 8
    config = {
        "dataset": "bench",
        "batch_size": ROWS,
        "block_size": TOKENS,
        "batches_per_file": per_file,
        "backlog_files": BACKLOG // per_file,
        "split_proportions": {"train": 1.0},
    }
    Provider(config, data_dir=where).run(max_batches=batches)


def consume_penstock(where: Path, case: str, batches: int) -> float:
    import torch  # noqa: F401 - its import is not timed

    from penstock.fsqueue import DatasetConsumer

    while not (where / "queue").exists():
        time.sleep(PAUSE)
    with DatasetConsumer(where / "queue", order="strict" if case == "penstock-strict" else "any") as consumer:
        consumer.get_batch()
        began = time.perf_counter()
        count = 1 + sum(1 for _ in consumer)
        seconds = time.perf_counter() - began
    assert count == batches, count
    return seconds


def provide_files(where: Path, case: str, batches: int) -> None:
    import torch

    x, y = arrays()
    data, batch = x.tobytes() + y.tobytes(), {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    table = pa.table({"x": x.reshape(-1), "y": y.reshape(-1)})
    per_file = 8 if case == "torch-8" else 1
    for number in range(batches // per_file):
        while len(os.listdir(where)) >= BACKLOG // per_file:  # noqa: PTH208 - the fastest way
            time.sleep(PAUSE)
        part = where / "part"
        if case == "bytes":
            with part.open("wb", buffering=0) as file:
                file.write(data)
        elif case == "arrow":
            with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        else:
            torch.save(batch if per_file == 1 else [batch_copy(batch) for _ in range(per_file)], part)
        part.rename(where / f"{number:08d}")


def batch_copy(batch: dict[str, Any]) -> dict[str, Any]:
    """Copy the arrays: torch.save writes shared memory once, and batches of a real provider share none."""
    return {name: tensor.clone() for name, tensor in batch.items()}


def consume_files(where: Path, case: str, batches: int) -> float:
    import torch  # noqa: F401 - its import is not timed

    per_file = 8 if case == "torch-8" else 1
    began = 0.0
    for number in range(batches // per_file):
        path = where / f"{number:08d}"
        while not path.exists():
            time.sleep(PAUSE)
        READERS[case](path)
        path.unlink()
        if number == 0:
            began = time.perf_counter()
    return time.perf_counter() - began


def read_torch(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=True)


def read_arrow(path: Path) -> tuple[Any, Any]:
    import torch

    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a mapped file is read-only, and torch says so
        x, y = (torch.from_numpy(table[name].chunk(0).to_numpy()).view(ROWS, TOKENS) for name in ("x", "y"))
    return x, y


READERS = {"torch": read_torch, "torch-8": read_torch, "arrow": read_arrow, "bytes": Path.read_bytes}


def copy_files(where: Path, batches: int) -> float:
    x, y = arrays()
    sources = [where / f"source-{number}" for number in range(8)]
    for source in sources:
        source.write_bytes(x.tobytes() + y.tobytes())
    began = time.perf_counter()
    for number in range(batches):
        shutil.copyfile(sources[number % 8], where / f"{number:08d}")
        if number >= BACKLOG:
            (where / f"{number - BACKLOG:08d}").unlink()
    return time.perf_counter() - began


def run_case(case: str, folder: Path, batches: int) -> float:
    """Batches per second."""
    where = Path(tempfile.mkdtemp(prefix="queue-", dir=folder))
    try:
        if case == "copy":
            return batches / copy_files(where, batches)
        sides = [_side(side, case, where, batches) for side in ("provide", "consume")]
        output = sides[1].communicate(timeout=600)[0]
        if any(side.wait(timeout=60) for side in sides):
            raise SystemExit(f"{case} failed")
        return batches / float(output)
    finally:
        shutil.rmtree(where)


def _side(side: str, case: str, where: Path, batches: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--case",
        case,
        "--where",
        str(where),
        "--batches",
        str(batches),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def play(side: str, case: str, where: Path, batches: int) -> None:
    own = case.startswith("penstock")
    if side == "provide":
        (provide_penstock if own else provide_files)(where, case, batches)
    else:
        print((consume_penstock if own else consume_files)(where, case, batches))


# Latency


def provide_slowly(where: Path, batches: int) -> None:
    from penstock.fsqueue import DataProviderBase

    class Provider(DataProviderBase):
        def build_meta(self) -> dict[str, Any]:
            return {"batch_schema": SCHEMA}

        def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
            time.sleep(float(rng.uniform(0.01, 0.1)))
            x, y = arrays()
            x[0, 0] = time.monotonic_ns()
            return {"x": x, "y": y}

    config = {"dataset": "bench", "batch_size": ROWS, "block_size": TOKENS, "batches_per_file": 1}
    Provider({**config, "split_proportions": {"train": 1.0}}, data_dir=where).run(max_batches=batches)


def latency(folder: Path, batches: int) -> list[float]:
    """Milliseconds from sampling a batch, before it is encoded and written, to its delivery."""
    import torch  # noqa: F401 - else the first batches would wait for it

    from penstock.fsqueue import DatasetConsumer

    where = Path(tempfile.mkdtemp(prefix="queue-", dir=folder))
    provider = _side("latency", "penstock", where, batches)
    try:
        while not (where / "queue").exists():
            time.sleep(PAUSE)
        with DatasetConsumer(where / "queue") as consumer:
            return [(time.monotonic_ns() - int(x[0, 0])) / 1e6 for x, _ in consumer]
    finally:
        provider.wait(timeout=60)
        shutil.rmtree(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--disk", type=Path, default=Path(__file__).parent / ".data")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--suite", default="speed,latency")
    parser.add_argument("--only", default=",".join(CASES))
    for hidden in ("--side", "--case", "--where"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side == "latency":
        provide_slowly(Path(given.where), given.batches)
    elif given.side:
        play(given.side, given.case, Path(given.where), given.batches)
    else:
        report(given)


def report(given: argparse.Namespace) -> None:
    folders = {"disk": given.disk, "tmpfs": given.tmpfs}
    given.disk.mkdir(exist_ok=True)
    batches = given.batches // 8 * 8
    for place, folder in folders.items():
        if "speed" in given.suite:
            rates: dict[str, list[float]] = {case: [] for case in given.only.split(",")}
            for _ in range(given.repeat):
                for case, found in rates.items():
                    found.append(run_case(case, folder, batches))
            best = median(rates.get("penstock", [float("nan")]))
            rows = [
                [case, f"{median(found):,.0f}", f"{median(found) * SIZE / 1e6:,.0f}", f"{best / median(found):.2f}x"]
                for case, found in rates.items()
            ]
            print(f"\n{place}, {batches} batches of {SIZE:,} bytes, medians of {given.repeat}")
            print(table(["case", "batches/s", "MB/s", "penstock speed"], rows))
        if "latency" in given.suite:
            found = sorted(latency(folder, 200))
            print(
                f"{place}: sampled to delivered, median {median(found):.2f} ms, 95% {found[int(len(found) * 0.95)]:.2f}"
            )


if __name__ == "__main__":
    main()
