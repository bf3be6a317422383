"""Feed service beside the local feed, on loopback: tokens per second of a loader, of one client and of four.

    python benchmarks/service.py                     # medians of 5 rounds
    python benchmarks/service.py --rounds 9 --seconds 3 --json

`local`      a loader in the process that reads its batches
`1 client`   RemoteLoader beside `penstock serve` on the same machine
`4 jobs`     four clients that read the same stream, tokens of all together: batches are made once
`4 ranks`    four ranks of a run, each with a quarter of every global batch

Tokens in a store -> int64 torch tensors of 32 x 2048, `input_ids` and `labels`, shuffled, as the suite `feed` of
feed.py. Every case runs in fresh processes, interleaved, with the store in the page cache. The processor seconds of all
processes are beside the rates, since on few cores server and clients share them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SEQUENCE, BATCH = 2048, 32
AT_LEAST = {"1 client": 0.5, "4 jobs": 1.5}
"""Required speed relative to the local loader."""


def make_store(path: Path, tokens: int) -> Path:
    import numpy as np
    import pyarrow as pa

    from penstock.store import StoreWriter

    if path.exists():
        return path
    rng = np.random.default_rng(0)
    with StoreWriter(path) as writer:
        for _ in range(max(tokens // (512 * SEQUENCE), 1)):
            values = rng.integers(0, 50_000, 512 * SEQUENCE, np.uint16)
            offsets = np.arange(0, len(values) + 1, SEQUENCE, np.int32)
            writer.write(pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(offsets, values)], ["input_ids"]))
        writer.publish()
    return path


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read batches for some seconds, in this process; begins when standard input says so."""
    if arguments.address:
        from penstock.feed import RemoteLoader

        world = arguments.world_size
        place = {"rank": arguments.rank, "world_size": world, "batch_size": BATCH // world}
        loader: Any = RemoteLoader(arguments.address, backend="torch", **place)
    else:
        from penstock.loaders import PretrainDataLoader

        loader = PretrainDataLoader(arguments.store, chunk_size=SEQUENCE, batch_size=BATCH, backend="torch")
    with loader:
        for _, batch in zip(range(32), loader):
            assert batch.input_ids is not None
        print("ready", flush=True)
        sys.stdin.readline()
        tokens, began, cpu = 0, time.perf_counter(), time.process_time()
        while (passed := time.perf_counter() - began) < arguments.seconds:
            for batch in loader:
                assert batch.input_ids is not None
                assert batch.labels is not None
                tokens += batch.num_tokens
                if time.perf_counter() - began >= arguments.seconds:
                    break
        return {"tokens": tokens, "seconds": passed, "cpu_seconds": time.process_time() - cpu}


def run_clients(options: argparse.Namespace, address: str, places: list[tuple[int, int]]) -> dict[str, float]:
    """Rate and processor time of some processes that read at the same time."""
    command = [sys.executable, __file__, "--measure", "--store", str(options.store), "--seconds", str(options.seconds)]
    processes = []
    for rank, world in places:
        more = ["--address", address, "--rank", str(rank), "--world-size", str(world)]
        processes.append(
            subprocess.Popen(
                command + (more if address else []), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "a client failed"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    facts = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {
        "tokens_per_second": sum(each["tokens"] / each["seconds"] for each in facts),
        "cpu_seconds": sum(each["cpu_seconds"] for each in facts),
        "tokens": sum(each["tokens"] for each in facts),
    }


def serve(options: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    config = options.store.parent / "service.json"
    tree = {"loader": "pretrain", "path": str(options.store), "chunk_size": SEQUENCE, "batch_size": BATCH}
    config.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "penstock", "serve", str(config), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, json.loads(server.stdout.readline())["address"]


def cpu_seconds(process: int) -> float:
    import psutil

    used = psutil.Process(process).cpu_times()
    return float(used.user + used.system)


def run(options: argparse.Namespace) -> dict[str, Any]:
    make_store(options.store, options.tokens)
    cases: dict[str, list[tuple[int, int]]] = {
        "local": [(0, 1)],
        "1 client": [(0, 1)],
        "4 jobs": [(0, 1)] * 4,
        "4 ranks": [(rank, 4) for rank in range(4)],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(options.rounds):
        for name, places in cases.items():
            if name == "local":
                facts = run_clients(options, "", places)
            else:
                server, address = serve(options)
                try:
                    before = cpu_seconds(server.pid)
                    facts = run_clients(options, address, places)
                    facts["cpu_seconds"] += cpu_seconds(server.pid) - before
                finally:
                    server.terminate()
                    server.wait()
            found[name].append(facts)
            print(
                f"  {number + 1}/{options.rounds} {name}: {facts['tokens_per_second'] / 1e6:,.1f} M tokens/s",
                flush=True,
            )
    figures = {
        name: {
            "tokens_per_second": median(each["tokens_per_second"] for each in runs),
            "tokens_per_cpu_second": median(each["tokens"] / each["cpu_seconds"] for each in runs),
            "of_local": median(
                each["tokens_per_second"] / local["tokens_per_second"] for each, local in zip(runs, found["local"])
            ),
        }
        for name, runs in found.items()
    }
    return {"cores": os.cpu_count(), "load": os.getloadavg()[0], "cases": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tokens", type=lambda text: int(float(text)), default=50_000_000)
    parser.add_argument("--store", type=Path, default=Path(__file__).parent / ".data" / "service.store")
    parser.add_argument("--json", action="store_true")
    for name in ("--measure", "--address", "--rank", "--world-size"):  # of a measured process
        kind: dict[str, Any] = {"action": "store_true"} if name == "--measure" else {"default": ""}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    options = parser.parse_args()
    if options.measure:
        options.rank, options.world_size = int(options.rank or 0), int(options.world_size or 1)
        print(json.dumps(measure(options)), flush=True)
        return
    options.store.parent.mkdir(parents=True, exist_ok=True)
    report = run(options)
    if options.json:
        print(json.dumps(report, indent=2))
    print(f"\n{report['cores']} cores, load {report['load']:.1f}; medians of {options.rounds} rounds\n")
    print(f"{'':10} {'M tokens/s':>12} {'M tokens/CPU s':>15} {'of local':>9}")
    for name, figure in report["cases"].items():
        limit = AT_LEAST.get(name)
        verdict = "" if limit is None else f"  at least {limit:g}: {'yes' if figure['of_local'] >= limit else 'NO'}"
        rates = f"{figure['tokens_per_second'] / 1e6:12,.1f} {figure['tokens_per_cpu_second'] / 1e6:15,.1f}"
        print(f"{name:10} {rates} {figure['of_local']:8.2f}x{verdict}")


if __name__ == "__main__":
    main()
