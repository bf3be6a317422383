"""Golden interrupted runs and their resume: pipelines, streams of samples, queues.

Each of `CONTINUED` resumes in a copy of the material, which is also the working directory: a checkpoint stores its
target as it was given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from golden_digests import digests
from golden_loaders import rollout_rows, samples, titanic
from golden_provider import GoldenProvider
from penstock import (
    DatasetConsumer,
    Pipeline,
    PipelineConfig,
    RolloutDataLoader,
    RolloutQueue,
    StreamingPipeline,
    open_store,
)
from penstock.sinks import JsonlSink, StoreSink
from penstock.sources import open_source
from penstock.transforms import ExactDedup, Filter, Lower

CONFIG = {
    "dataset": "golden",
    "batch_size": 3,
    "block_size": 5,
    "seed": 11,
    "batches_per_file": 2,
    "split_proportions": {"train": 0.5, "val": 0.5},
}
END = 12
"""Batches of each split of the queue, when it is whole."""
READ = 3
"""Of its batches, when the consumer was stopped."""

# -- pipelines ---------------------------------------------------------------------------------------------------------


class Broken:
    """Where a run is to fail while the material is written: at which row, and what it waits for there."""

    at: str | None = None
    wait: Callable[[], None] = staticmethod(lambda: None)


def careful(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == Broken.at:
        Broken.wait()
        raise ValueError("the run ends here")
    return {"id": row["id"], "text": row["text"], "words": len(row["text"].split())}


def checkpointed(kind: str) -> Pipeline:
    """A run into text lines, or into a store; paths are relative, as the checkpoint names them."""
    steps = [Lower("text"), ExactDedup("text", directory=f"runs/{kind}.seen"), Filter("len(text) > 80"), careful]
    sink = JsonlSink("runs/text.jsonl") if kind == "text" else StoreSink("runs/rows.store", tokens=None)
    config = PipelineConfig(workers=1, batch_rows=4, checkpoint_seconds=1e-6)
    return Pipeline(open_source("raw/parts/*.jsonl"), steps, sink, config=config)


def continue_text_run(_: Path) -> dict[str, Any]:
    report = checkpointed("text").run(checkpoint="runs/text.run")
    output = Path("runs/text.jsonl").read_bytes()
    return {
        "bytes": hashlib.blake2b(output, digest_size=8).hexdigest(),
        "rows": [report.rows_in, report.rows_out],
        "dropped": dict(report.dropped),
        "resumed": report.resumed,
    }


def continue_store_run(_: Path) -> dict[str, Any]:
    report = checkpointed("store").run(checkpoint="runs/store.run")
    with open_store("runs/rows.store", verify="full") as store:
        rows = [row for batch in store.batches() for row in batch.to_pylist()]
        shards = sorted(path.name for path in Path("runs/rows.store/shards").iterdir())
    return {**digests(rows), "shards": shards, "rows": [report.rows_in, report.rows_out], "resumed": report.resumed}


FILES = ("documents.jsonl", "documents.jsonl.gz", "table.csv", "table.parquet", "table.arrow", "lines.txt")


def looped(root: Path, name: str) -> Pipeline:
    """A loop over a file."""
    return Pipeline(open_source(root / "raw" / name), config=PipelineConfig(workers=1, batch_rows=7))


def rows_of(batches: Iterator[Any]) -> list[dict[str, Any]]:
    return [batch.to_pydict() for batch in batches]


# -- streams of samples ------------------------------------------------------------------------------------------------

STREAMS: Mapping[str, Callable[[Path], Any]] = {
    "list": lambda root: [{"ids": np.array(row["input_ids"]), "text": row["text"]} for row in samples()],
    "titanic": titanic,
    "file": lambda root: root / "raw/documents.jsonl",
}


def stream(root: Path, name: str) -> StreamingPipeline:
    return StreamingPipeline(STREAMS[name](root), chunk_size=4, buffer_size=64, num_workers=2)


# -- queues ------------------------------------------------------------------------------------------------------------


def provider(root: Path) -> GoldenProvider:
    return GoldenProvider(CONFIG, queue_dir=root / "queue")


def consumer(root: Path) -> DatasetConsumer:
    return DatasetConsumer(
        root / "queue", order="strict", acknowledge="committed", backend="numpy", timeout_seconds=30.0
    )


def continue_queue(root: Path) -> dict[str, Any]:
    """A fresh provider makes the rest, and a fresh consumer reads on from its saved state."""
    made = provider(root).run(max_batches=END)
    with consumer(root) as reader:
        reader.load_state_dict(json.loads((root / "states/queue.json").read_text("utf-8")))
        found = [{"split": split, **batch} for split in ("train", "val") for batch in reader.batches(split)]
        reader.commit()
        fingerprint = reader.fingerprint
    return {**digests(found), "made": dict(made.batches), "fingerprint": fingerprint}


def rollout_loader(root: Path) -> Any:
    return RolloutDataLoader(
        RolloutQueue(root / "rollouts", timeout_seconds=30.0),
        rollout_batch_size=8,
        group_size=4,
        batch_size=4,
        ppo_epochs=2,
        policy_version=0,
        seed=7,
        backend="numpy",
    )


def appends(root: Path) -> list[list[dict[str, Any]]]:
    """What engines append: half of a group each, two groups by turns."""
    rows = rollout_rows(root)
    return [rows[place : place + 2] for low in range(0, len(rows), 8) for place in (low, low + 4, low + 2, low + 6)]


def continue_rollouts(root: Path) -> dict[str, Any]:
    """The appends that are left are made, and a fresh loader goes on from the saved state."""
    with RolloutQueue(root / "rollouts") as queue:
        for each in appends(root)[len(appends(root)) * 2 // 3 :]:
            queue.append(each)
        queue.finish()
    found = []
    with closing(rollout_loader(root)) as loader:
        loader.load_state_dict(json.loads((root / "states/rollouts.json").read_text("utf-8")))
        while not loader.ended:
            found.extend(loader)
            loader.commit()
    return digests(found)


CONTINUED: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "a run into text lines": continue_text_run,
    "a run into a store": continue_store_run,
    "a queue": continue_queue,
    "a queue of rollouts": continue_rollouts,
}
