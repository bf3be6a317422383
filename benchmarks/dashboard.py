"""What does being watched cost? Tokens per second of a loader alone, with a metrics file, and with `penstock ui` too.

    python benchmarks/dashboard.py                   # medians of 7 rounds
    python benchmarks/dashboard.py --rounds 15 --seconds 5 --json

`plain`      a loader in a process of its own
`metrics`    the same with metrics="run.metrics.jsonl"
`followed`   the same, while `penstock ui` shows the file to a reader that asks every second, as an open page does

Each is measured with nothing between batches (`bare`), where a batch of 32 x 2048 takes some tens of microseconds, and
with a step of 10 ms of one core between them. Cases are interleaved, in fresh processes, with the store in the page
cache; the cost is the median over rounds of each round's ratio to `plain`, which cancels what drifts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from service import BATCH, SEQUENCE, make_store

CASES = ("plain", "metrics", "followed")
MOST_COST = 0.01
"""Share of the throughput that being followed may cost, with a step."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read batches for some seconds, in this process."""
    from penstock.loaders import PretrainDataLoader

    loader = PretrainDataLoader(
        arguments.store, chunk_size=SEQUENCE, batch_size=BATCH, backend="numpy", metrics=arguments.metrics
    )
    spent = arguments.step_ms / 1000
    tokens, began, used = 0, 0.0, 0.0
    with loader:
        while True:
            for number, batch in enumerate(loader):
                if not began and number == 20:
                    began, used, tokens = time.perf_counter(), time.process_time(), 0
                batch.input_ids.sum()
                tokens += batch.num_tokens
                if spent:
                    until = time.thread_time() + spent
                    while time.thread_time() < until:
                        pass
                if began and time.perf_counter() - began > arguments.seconds:
                    wall = time.perf_counter() - began
                    return {"rate": tokens / wall, "processor": (time.process_time() - used) / tokens}


@contextmanager
def followed(path: Path) -> Iterator[None]:
    """`penstock ui` and a reader of its page."""
    command = [sys.executable, "-m", "penstock", "ui", str(path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(address).read()
        over, page = Event(), address.partition("/?")[0] + "/t/0/live"

        def look() -> None:
            while not over.wait(1.0):
                opener.open(page).read()

        reader = Thread(target=look)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()
            server.terminate()


def run_case(case: str, arguments: argparse.Namespace, step_ms: float, folder: Path) -> dict[str, Any]:
    record = folder / "run.metrics.jsonl"
    record.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--measure", "--store", str(arguments.store), "--step-ms", str(step_ms)]
    command += ["--seconds", str(arguments.seconds), *([] if case == "plain" else ["--metrics", str(record)])]

    def measured() -> dict[str, Any]:
        made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return dict(json.loads(made))

    if case != "followed":
        return measured()
    with followed(record):
        return measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("/tmp/penstock-dashboard.store"))
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--metrics")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments)))
        return
    make_store(arguments.store, arguments.tokens)
    facts: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        for step_ms in (0.0, arguments.step_ms):
            rounds = []
            for number in range(arguments.rounds):
                order = CASES[number % 3 :] + CASES[: number % 3]
                rounds.append({case: run_case(case, arguments, step_ms, Path(folder)) for case in order})
            name = f"step of {step_ms:g} ms" if step_ms else "bare"
            facts[name] = {case: {"rate": median(each[case]["rate"] for each in rounds)} for case in CASES}
            for case in CASES[1:]:
                for of in ("rate", "processor"):
                    ratio = median(each[case][of] / each["plain"][of] for each in rounds)
                    facts[name][case][f"{of}_ratio"] = ratio
    if arguments.json:
        print(json.dumps(facts))
        return
    for name, cases in facts.items():
        for case, found in cases.items():
            ratios = "".join(f"  {key.replace('_', ' ')} {found[key]:.4f}" for key in found if key != "rate")
            print(f"{name:16} {case:10} {found['rate'] / 1e6:8.2f} M tokens/s{ratios}")
    cost = 1 - facts[name]["followed"]["rate_ratio"]
    print(f"followed, with a step: {cost:+.2%} of the throughput (target: below {MOST_COST:.0%})")


if __name__ == "__main__":
    main()
