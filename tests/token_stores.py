"""Small token stores for tests, made from lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.store import StoreWriter


def make_store(
    path: Path,
    rows: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]] | None = None,
    *,
    dtype: pa.DataType | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """A store of these rows; small shards make many of them."""
    columns = {"input_ids": pa.array([list(row) for row in rows], pa.list_(dtype or pa.uint16()))}
    if masks is not None:
        columns["loss_mask"] = pa.array([list(mask) for mask in masks], pa.list_(pa.bool_()))
    sizes = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    with StoreWriter(path, mask=None if masks is None else "loss_mask", **sizes) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
        writer.publish()
    return path


def make_rows(count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[list[int]]:
    """Rows whose tokens say where they are from: no two rows share a token."""
    lengths = np.random.default_rng(seed).integers(shortest, longest + 1, count)
    reach = np.concatenate([[1], 1 + np.cumsum(lengths)])
    return [list(range(int(low), int(high))) for low, high in pairwise(reach)]


def make_masks(rows: Sequence[Sequence[int]], seed: int = 0) -> list[list[bool]]:
    rng = np.random.default_rng(seed)
    return [(rng.random(len(row)) < 0.5).tolist() for row in rows]


def make_preferences(
    path: Path, count: int, longest: int, *, pairs: bool = True, seed: int = 0, shard_bytes: int | None = None
) -> Path:
    """A store of pairs, or of labelled answers, as `FormatPreference` makes them."""
    rng = np.random.default_rng(seed)
    prompts = [list(range(1, int(n) + 1)) for n in rng.integers(1, longest // 2, count)]
    columns: dict[str, pa.Array] = {"prompt_length": pa.array([len(prompt) for prompt in prompts], pa.int32())}
    for side in ("chosen_", "rejected_") if pairs else ("",):
        answers = [rng.integers(100, 900, rng.integers(1, longest - len(prompt) + 1)).tolist() for prompt in prompts]
        both = list(zip(prompts, answers))
        columns[f"{side}input_ids"] = pa.array([[*prompt, *answer] for prompt, answer in both], pa.list_(pa.uint16()))
        masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in both]
        columns[f"{side}loss_mask"] = pa.array(masks, pa.list_(pa.bool_()))
    if not pairs:
        columns["label"] = pa.array((rng.random(count) < 0.5).tolist(), pa.bool_())
    side = "chosen_" if pairs else ""
    sizes = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    with StoreWriter(path, tokens=f"{side}input_ids", mask=f"{side}loss_mask", **sizes) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
        writer.publish()
    return path
