"""penstock, through its public names only."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from feed_peers import BATCH, SEQUENCE
from feed_peers.timing import Batches, Epochs

# -- feed ------------------------------------------------------------------------------------------------------------


def write(data: Path, out: Path) -> None:
    """Store with one row per sequence."""
    import numpy as np
    import pyarrow as pa

    from feed_peers.inputs import open_tokens
    from penstock.store import StoreWriter

    tokens = open_tokens(data)
    with StoreWriter(out) as writer:
        for start in range(0, len(tokens), 4096):
            rows = tokens[start : start + 4096]
            offsets = np.arange(0, rows.size + 1, SEQUENCE, dtype=np.int32)
            lists = pa.ListArray.from_arrays(offsets, np.ascontiguousarray(rows).reshape(-1))
            writer.write(pa.record_batch({"input_ids": lists}))
        writer.publish()


def feed(data: Path) -> Epochs:
    return _epochs(data, packing="concat", fields=("input_ids", "labels"))


def feed_rows(data: Path) -> Epochs:
    return _epochs(data, packing=None, fields=("input_ids", "labels"))


def feed_all_fields(data: Path) -> Epochs:
    return _epochs(data, packing="concat")


def _epochs(data: Path, **options: Any) -> Epochs:
    from penstock.loaders.pretrain import PretrainDataLoader

    loader = PretrainDataLoader(
        path=data / "store", chunk_size=SEQUENCE, batch_size=BATCH, shuffle=True, seed=0, backend="torch", **options
    )

    def epoch(number: int) -> Batches:
        loader.set_epoch(number)
        for batch in loader:
            yield batch.input_ids, batch.labels

    return epoch


# -- the first batch of a process ------------------------------------------------------------------------------------


def first_batch(store: str, packing: Any, state: str | None) -> dict[str, Any]:
    """Seconds from the import of torch to the first batch, from the start or from `state`."""
    import torch

    start, cpu = time.perf_counter(), time.process_time()
    from penstock.loaders.pretrain import PretrainDataLoader

    imported = time.perf_counter()
    loader = PretrainDataLoader(path=store, chunk_size=SEQUENCE, packing=packing, batch_size=BATCH, backend="torch")
    if state is not None:
        loader.load_state_dict(json.loads(Path(state).read_text()))
    made = time.perf_counter()
    batch = next(iter(loader))
    end, cpu = time.perf_counter(), time.process_time() - cpu
    facts = {"step": loader.step, "tokens": batch.input_ids.numel(), "int64": batch.input_ids.dtype == torch.int64}
    parts = {"import_seconds": imported - start, "construct_seconds": made - imported, "batch_seconds": end - made}
    return {**facts, **parts, "cpu_seconds": cpu, "seconds": end - start}


def save_state(store: str, packing: Any, share: float, out: str) -> dict[str, Any]:
    """State of a loader after this share of an epoch."""
    from penstock.loaders.pretrain import PretrainDataLoader

    loader = PretrainDataLoader(path=store, chunk_size=SEQUENCE, packing=packing, batch_size=BATCH, backend="numpy")
    order = loader.plan.sources[0].order
    if packing == "concat":
        loader.seek(int(loader.get_num_batches() * share))
        state = loader.state_dict()
    else:
        # Counting the exact steps would mean planning every window, as a real run does on its way. The state written
        # here has about the right number of steps.
        step = int(order.table.tokens // (SEQUENCE * BATCH) * share)
        state = loader.state_dict() | {"places": [[0, int(order.windows * share), 0]]}
        state |= {"step": step, "samples": step * BATCH}
    written = Path(out).write_text(json.dumps(state))
    return {"seconds": 0.0, "step": state["step"], "rows": order.table.rows, "state_bytes": written}


# -- packing ---------------------------------------------------------------------------------------------------------

_WINDOW = 65_536


def pack_global(capacity: int) -> dict[str, Any]:
    return _pack(capacity, 1 << 40)


def pack_windows(capacity: int) -> dict[str, Any]:
    return _pack(capacity, _WINDOW)


def _pack(capacity: int, window: int) -> dict[str, Any]:
    import numpy as np

    from feed_peers.inputs import make_lengths
    from penstock.order.packing import pack

    lengths = make_lengths()
    pack(lengths[:1000], capacity)  # triggers lazy loading
    start = time.perf_counter()
    parts = [pack(lengths[at : at + window], capacity) for at in range(0, len(lengths), window)]
    seconds = time.perf_counter() - start
    placed, bins = [], 0
    for number, part in enumerate(parts):
        documents = np.asarray(part.documents) + number * window
        if np.add.reduceat(lengths[documents], part.offsets[:-1]).max() > capacity:
            raise ValueError("a bin holds more than its capacity")
        placed.append(documents)
        bins += len(part.offsets) - 1
    counts = np.bincount(np.concatenate(placed), minlength=len(lengths))
    return {"seconds": seconds, "bins": bins, "placed": int((counts == 1).sum()), "tokens": int(lengths.sum())}


# -- chat ------------------------------------------------------------------------------------------------------------


def chat(source: str, tokenizer: str, cache: str, max_length: int, batch_size: int) -> dict[str, Any]:
    import awkward  # noqa: F401  gigatoken imports it with the first row; imports are not timed
    import gigatoken  # noqa: F401
    import pandas  # noqa: F401
    import torch  # noqa: F401

    from penstock.loaders.conversation import ConversationDataLoader

    start = time.perf_counter()
    loader = ConversationDataLoader(
        source,
        tokenizer=tokenizer,
        max_length=max_length,
        packing="best_fit",
        truncation="right",
        batch_size=batch_size,
        cache_dir=cache,
    )
    tokens = supervised = batches = bins = 0
    rows: set[int] = set()
    first = 0.0
    for batch in loader:
        first = first or time.perf_counter() - start
        labels: Any = batch.labels
        tokens += batch.num_tokens
        supervised += int((labels != -100).sum())
        rows.update(batch.metadata["row"].tolist())
        bins += batch.input_ids.shape[0]
        batches += 1
    return {
        "seconds": time.perf_counter() - start,
        "first_seconds": first,
        "conversations": len(rows),
        "tokens": tokens,
        "supervised": supervised,
        "batches": batches,
        "efficiency": tokens / (bins * max_length),
    }


# -- import ----------------------------------------------------------------------------------------------------------

_FRAMEWORKS = ("torch", "mlx", "jax", "tensorflow", "numba", "transformers")


def imports() -> dict[str, Any]:
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401

    start, cpu = time.perf_counter(), time.process_time()
    import penstock  # noqa: F401

    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    there = [name for name in _FRAMEWORKS if name in sys.modules]
    return {"seconds": seconds, "cpu_seconds": cpu, "frameworks": there}
