"""Feed of a tokenised corpus from a bucket, compared with MosaicML Streaming and LitData in documented use.

    python benchmarks/remote_feed.py                                             # peers of this interpreter
    python benchmarks/remote_feed.py --python /venvs/peers/bin/python --repeat 3 --tokens 64e6

Sequences of 2048 tokens (uint16) lie in a local S3 server (SeaweedFS, as in the tests) behind a proxy that counts what
the server sends and adds latency. Batches are int64 torch tensors of 32 x 2048, shuffled, one epoch:

`cold`     nothing is on this machine
`warm`     a second process, with all data in the cache of the first
`quarter`  two epochs with a cache of a quarter of the data: bytes fetched for each byte used
`local`    penstock from a store on disk, which `warm` is compared with

Every case runs in a fresh process; rates are of the whole epoch, from the first import to the last batch without the
imports, and of the part after the first batch. Peers whose caches cannot be so small say so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

SEQUENCE, BATCH, VOCABULARY = 2048, 32, 50_000
LATENCIES = (0.0, 0.02)
WAYS = ("cold", "warm", "quarter")
CASES = ("penstock", "penstock exact", "mosaicml", "litdata")
PART = 1024
SHARDS = 32
"""Least number of shards of the peers, whose caches hold whole shards."""


def sequences(count: int) -> Iterator[Any]:
    """The corpus, in parts of some sequences."""
    import numpy as np

    for start in range(0, count, PART):
        drawn = np.random.default_rng(start).integers(0, VOCABULARY, (min(PART, count - start), SEQUENCE))
        yield drawn.astype(np.uint16)


# -- writing ---------------------------------------------------------------------------------------------------------


def write_penstock(out: Path, count: int) -> None:
    import numpy as np
    import pyarrow as pa

    from penstock.store import StoreWriter, open_store
    from penstock.store.home import LocalHome
    from penstock.store.piece_sums import write_sums

    with StoreWriter(out) as writer:
        for rows in sequences(count):
            offsets = np.arange(0, rows.size + 1, SEQUENCE, dtype=np.int32)
            writer.write(pa.record_batch({"input_ids": pa.ListArray.from_arrays(offsets, rows.reshape(-1))}))
        writer.publish()
    for entry in open_store(out).manifest.shards:
        write_sums(LocalHome(out), entry, out / entry.file, out / entry.index_file)


def write_mosaicml(out: Path, count: int) -> None:
    _without_torchvision()
    from streaming import MDSWriter

    limit = min(1 << 26, count * SEQUENCE * 2 // SHARDS)  # its cache holds four shards at least
    with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{SEQUENCE}"}, size_limit=limit) as writer:
        for rows in sequences(count):
            for row in rows:
                writer.write({"tokens": row})


def write_litdata(out: Path, count: int) -> None:
    from functools import partial

    from litdata import TokensLoader, optimize

    optimize(
        fn=partial(_part, count),
        inputs=list(range(0, count, PART)),
        output_dir=str(out),
        num_workers=1,
        chunk_size=SEQUENCE * min(8012, count // SHARDS),  # 33 MB of uint16, the size that its documentation uses
        item_loader=TokensLoader(),
    )


def _part(count: int, start: int) -> Iterator[Any]:
    import numpy as np
    import torch

    drawn = np.random.default_rng(start).integers(0, VOCABULARY, (min(PART, count - start), SEQUENCE))
    for row in drawn.astype(np.uint16):
        yield torch.from_numpy(row.copy())


# -- reading ---------------------------------------------------------------------------------------------------------


def read_penstock(url: str, cache: Path, cache_bytes: int, shuffle: Any = "blocks") -> Callable[[int], Iterator[Any]]:
    from penstock import PretrainDataLoader

    loader = PretrainDataLoader(
        url,
        chunk_size=SEQUENCE,
        batch_size=BATCH,
        shuffle=shuffle,
        fields=("input_ids", "labels"),
        cache_dir=cache,
        cache_bytes=cache_bytes,
    )

    def epoch(number: int) -> Iterator[Any]:
        loader.set_epoch(number)
        return (batch.input_ids for batch in loader)

    return epoch


def read_mosaicml(url: str, cache: Path, cache_bytes: int) -> Callable[[int], Iterator[Any]]:
    _without_torchvision()
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Tokens(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            import torch

            return torch.from_numpy(super().__getitem__(at)["tokens"].astype("int64"))

    clean_stale_shared_memory()
    dataset = Tokens(remote=url, local=str(cache), shuffle=True, batch_size=BATCH, cache_limit=cache_bytes)
    loader: Any = DataLoader(dataset, batch_size=BATCH)
    return lambda number: ((ids, ids.clone())[0] for ids in loader)


def read_litdata(url: str, cache: Path, cache_bytes: int) -> Callable[[int], Iterator[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    # The server has no TLS, which its own client refuses.
    getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = True
    options = {
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
    }
    dataset = StreamingDataset(
        input_dir=url,
        cache_dir=str(cache),
        item_loader=TokensLoader(block_size=SEQUENCE),
        shuffle=True,
        drop_last=False,
        storage_options=options,
        max_cache_size=cache_bytes,
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH)

    def epoch(number: int) -> Iterator[Any]:
        for made in loader:
            ids = made.long()
            yield (ids, ids.clone())[0]

    return epoch


def _without_torchvision() -> None:
    """MosaicML Streaming imports torchvision for datasets that are not used here."""
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    try:
        import torchvision  # noqa: F401
    except ImportError:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            stub: Any = ModuleType(f"torchvision{name}")
            stub.__spec__ = ModuleSpec(f"torchvision{name}", None)
            stub.VisionDataset = stub.CIFAR10 = stub.to_tensor = object
            sys.modules[f"torchvision{name}"] = stub


def measure(case: str, url: str, cache: str, cache_bytes: int, epochs: int, count: int) -> dict[str, Any]:
    """Run epochs of a case and check that every sequence came once."""
    import numpy as np
    import torch  # noqa: F401  imports are not timed

    if case.startswith("penstock"):
        from penstock import PretrainDataLoader  # noqa: F401  the package itself imports nothing before it is used

        read: Callable[..., Callable[[int], Iterator[Any]]] = read_penstock
        more = {"shuffle": True} if case != "penstock" else {}
    elif case == "mosaicml":
        _without_torchvision()
        import streaming  # noqa: F401

        read, more = read_mosaicml, {}
    else:
        import litdata  # noqa: F401

        read, more = read_litdata, {}
    started = time.perf_counter()
    epoch = read(url, Path(cache), cache_bytes, **more)
    first, seen = 0.0, []
    for number in range(epochs):
        for ids in epoch(number):
            first = first or time.perf_counter() - started
            seen.append(np.asarray(ids)[:, :4].copy())
    seconds = time.perf_counter() - started
    rows = np.concatenate(seen)
    wanted = np.concatenate([part[:, :4] for part in sequences(count)]).astype(np.int64)
    there, times = np.unique(rows, axis=0, return_counts=True)
    complete = np.array_equal(there, np.unique(wanted, axis=0)) and bool((times == epochs).all())
    tokens = len(rows) * SEQUENCE
    return {
        "seconds": seconds,
        "first_seconds": first,
        "tokens_per_second": tokens / seconds,
        "steady_tokens_per_second": (tokens - BATCH * SEQUENCE) / (seconds - first),
        "complete": complete,
        "rows": len(rows),
    }


# -- the run ---------------------------------------------------------------------------------------------------------


def run(python: str, environment: dict[str, str], *call: str) -> dict[str, Any]:
    """A call of this file in a fresh process; its last line is JSON."""
    path = f"{HERE.parents[1] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [python, str(HERE), *call],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "Error" in line] or ["failed"]
        return {"error": lines[-1][:300]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def upload(folder: Path, client: Any, prefix: str) -> int:
    import obstore

    total = 0
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            obstore.put(client, f"{prefix}/{file.relative_to(folder)}", file)
            total += file.stat().st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--tokens", type=float, default=64e6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--latencies", default=",".join(map(str, LATENCIES)))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        name, out, count = given.write
        globals()[f"write_{name}"](Path(out), int(count))
        print("{}")
        return
    if given.measure:
        print(json.dumps(measure(**json.loads(given.measure))))
        return
    from tests.servers import Proxy, S3Server, environment_of

    count = int(given.tokens) // SEQUENCE
    nbytes = count * SEQUENCE * 2
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="remote-feed-") as folder, S3Server() as server:
        work = Path(folder)
        cases = given.only.split(",")
        for name in dict.fromkeys(case.split()[0] for case in cases):
            python = sys.executable if name == "penstock" else given.python
            said = run(python, {}, "--write", name, str(work / name), str(count))
            if "error" in said:
                print(f"{name}: not measured: {said['error']}")
                cases = [case for case in cases if not case.startswith(name)]
                continue
            stored = name if name != "penstock" else "penstock.store"
            print(f"{name}: {upload(work / name, server.client(), stored) / 1e6:.0f} MB uploaded", flush=True)

        def measured(case: str, url: str, cache: Path, limit: int, epochs: int, endpoint: str) -> dict[str, Any]:
            python = sys.executable if case.startswith("penstock") else given.python
            facts = {"case": case, "url": url, "cache": str(cache), "cache_bytes": limit, "epochs": epochs}
            peers = {"S3_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
            environment = environment_of(endpoint) | peers
            return run(python, environment, "--measure", json.dumps({**facts, "count": count}))

        for repeat in range(given.repeat):
            found = measured("penstock", str(work / "penstock"), work / "none", 1 << 40, 1, server.endpoint)
            results.append({"case": "penstock", "way": "local", "latency": 0.0, "repeat": repeat, **found})
            found = measured("penstock exact", str(work / "penstock"), work / "none", 1 << 40, 1, server.endpoint)
            results.append({"case": "penstock exact", "way": "local", "latency": 0.0, "repeat": repeat, **found})
            for latency in map(float, given.latencies.split(",")):
                for case in cases:
                    name = case.split()[0]
                    url = f"s3://pen/{name}" + (".store" if name == "penstock" else "")
                    cache = Path(tempfile.mkdtemp(dir=work))
                    for way in given.ways.split(","):
                        with Proxy(server.port, latency_seconds=latency) as proxy:
                            small = way == "quarter"
                            place = Path(tempfile.mkdtemp(dir=work)) if small else cache
                            limit = nbytes // 4 if small else 1 << 40
                            said = measured(case, url, place, limit, 2 if small else 1, proxy.endpoint)
                            said["fetched_bytes"] = proxy.bytes_down
                            used = nbytes * (2 if small else 1)
                            said["fetched_for_used"] = proxy.bytes_down / used
                        if small:
                            shutil.rmtree(place, ignore_errors=True)
                        results.append({"case": case, "way": way, "latency": latency, "repeat": repeat, **said})
                        print(json.dumps(results[-1]), flush=True)
                    shutil.rmtree(cache, ignore_errors=True)
    show(results)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


def show(results: list[dict[str, Any]]) -> None:
    print(f"\n{'case':16}{'way':9}{'latency':>8}{'Mtokens/s':>11}{'steady':>9}{'first s':>9}{'fetched/used':>14}")
    for key in dict.fromkeys((each["case"], each["way"], each["latency"]) for each in results):
        runs = [each for each in results if (each["case"], each["way"], each["latency"]) == key]
        good = [each for each in runs if "error" not in each]
        start = f"{key[0]:16}{key[1]:9}{key[2] * 1e3:6.0f}ms"
        if not good:
            print(f"{start}  {runs[0]['error']}")
            continue

        def middle(name: str, good: list[dict[str, Any]] = good) -> float:
            return float(median(each.get(name, float("nan")) for each in good))

        complete = "" if all(each["complete"] for each in good) else "  not every sequence once"
        print(
            f"{start}{middle('tokens_per_second') / 1e6:11.1f}{middle('steady_tokens_per_second') / 1e6:9.1f}"
            f"{middle('first_seconds'):9.2f}{middle('fetched_for_used'):14.3f}{complete}"
        )


if __name__ == "__main__":
    main()
