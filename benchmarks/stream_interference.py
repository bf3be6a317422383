"""How much does streaming slow a trainer down that needs the interpreter, as one does that launches many kernels?

python benchmarks/stream_interference.py [--mb 64] [--steps 300] [--step-ms 10] [--workers 1,2,4] [--repeat 3]

A step of the trainer is a fixed amount of Python work; before each, it takes a batch of 8 x 2048 tokens that are read
and tokenized on the way. Each case is a fresh process. `step` is the time of the work alone, `wait` that of `next()`,
`own CPU` what `next()` costs the thread that calls it. `feed` has no trainer. The best of the repeated runs is shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from table import table

TOKENIZER = Path(__file__).parents[1] / "examples" / "sample" / "tokenizer"
LENGTH, ROWS = 2048, 8


def write_corpus(path: Path, megabytes: int) -> None:
    """Documents of words that a Zipf distribution picks."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("etaoinshrdlucmfw"), draw.integers(2, 10))) for _ in range(20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes << 20:
            for _ in range(200):
                picked = np.minimum(draw.zipf(1.3, draw.integers(50, 800)), len(words)) - 1
                file.write(json.dumps({"text": " ".join(words[number] for number in picked.tolist())}) + "\n")


def python_work(rounds: int) -> int:
    """Work that holds the interpreter."""
    total = 0
    for number in range(rounds):
        total += number & 7
    return total


def rounds_of(milliseconds: float) -> int:
    """Rounds of `python_work` that take so long when nothing else runs."""
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        python_work(100_000)
        seconds.append(time.perf_counter() - began)
    return int(100_000 * milliseconds / 1000 / min(seconds))


def run_case(kind: str, workers: int, corpus: Path, steps: int, rounds: int) -> dict[str, Any]:
    """One case, in this process."""
    if kind == "alone":
        work = [_timed_work(rounds) for _ in range(steps)]
        return {"steps": work, "waits": [0.0], "own": [0.0], "first": 0.0, "rate": 0.0}
    from penstock.loaders import PretrainDataLoader, StreamOptions

    options = StreamOptions(workers=workers, worker_type=kind)  # type: ignore[arg-type]
    with PretrainDataLoader(
        corpus, TOKENIZER, LENGTH, streaming=options, batch_size=ROWS, backend="numpy", prefetch=0
    ) as loader:
        began = time.perf_counter()
        batches = _endless(loader)
        next(batches)
        found: dict[str, Any] = {"first": time.perf_counter() - began, "steps": [], "waits": [], "own": []}
        for _ in range(40):  # until everything has started
            next(batches)
        began, tokens = time.perf_counter(), 0
        for _ in range(steps):
            at, used = time.perf_counter(), time.thread_time()
            batch = next(batches)
            found["own"].append(time.thread_time() - used)
            found["waits"].append(time.perf_counter() - at)
            tokens += batch.num_tokens
            del batch
            if rounds:
                found["steps"].append(_timed_work(rounds))
        return found | {"rate": tokens / (time.perf_counter() - began)}


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def _timed_work(rounds: int) -> float:
    began = time.perf_counter()
    python_work(rounds)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        kind, workers, corpus, steps, rounds = given.case
        print(json.dumps(run_case(kind, int(workers), Path(corpus), int(steps), int(rounds))))
        return
    counts = [int(count) for count in given.workers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(corpus, given.mb)
        rounds = rounds_of(given.step_ms)
        cases = [("alone", 1), *((kind, count) for kind in ("thread", "process") for count in counts)]
        runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
        for _ in range(given.repeat):  # interleaved, since other work on the machine comes and goes
            for case, found in runs.items():
                found.append(_in_process(*case, corpus, given.steps, rounds))
                if case[0] != "alone":
                    found[-1]["rate"] = _in_process(*case, corpus, 2 * given.steps, 0)["rate"]
    rows = []
    alone = min(median(run["steps"]) for run in runs["alone", 1])
    for (kind, count), found in runs.items():
        best = {name: 1000 * min(median(run[name]) for run in found) for name in ("steps", "waits", "own")}
        rows.append(
            [
                kind if kind == "alone" else f"{count} x {kind}",
                f"{best['steps']:.2f}",
                f"{best['steps'] / 1000 / alone:.2f}x",
                f"{best['waits']:.2f}",
                f"{best['own']:.3f}",
                f"{min(run['first'] for run in found):.2f}",
                f"{max(run['rate'] for run in found) / 1e6:.1f}",
            ]
        )
    heads = ["", "step ms", "of alone", "wait ms", "own CPU ms", "first batch s", "feed M tok/s"]
    print(table(heads, rows))


def _in_process(kind: str, workers: int, corpus: Path, steps: int, rounds: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", kind, str(workers), str(corpus), str(steps), str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
