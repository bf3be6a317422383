"""Measured process of the suite `feed`: epochs of one library, and a check of its batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from feed_peers import BATCH, SEQUENCE, VOCABULARY, Case

Batches = Iterator[tuple[Any, Any]]
Epochs = Callable[[int], Batches]
Pace = tuple[float, float]
"""Tokens a second, by wall time and by the CPU time of all threads."""

_IGNORE = -100
"""Label that is allowed at the start of a document, where nothing precedes the token."""
_TIMED_SECONDS = 2.0
"""Minimum total seconds of the timed epochs."""


def time_feed(case: Case, data: str, sequences: int, seconds: float) -> dict[str, Any]:
    """Time to the first batch, then one checked epoch, then timed epochs.

    A library that does not finish the first epoch within `seconds` is timed over the batches it returned.
    """
    import torch

    start = time.perf_counter()
    epochs: Epochs = case.load()(Path(data))
    batches = epochs(0)
    first = next(batches)
    first_seconds = time.perf_counter() - start
    _check_shape(first, torch)
    facts, pace = _checked_epoch(first, batches, sequences, seconds)
    del first
    paces = [pace]
    if facts["complete"] and facts["checked_seconds"] < seconds / 2:
        paces = _timed_epochs(epochs)
    facts |= {"tokens_per_second": [wall for wall, _ in paces], "tokens_per_cpu_second": [cpu for _, cpu in paces]}
    return {**facts, "first_seconds": first_seconds}


def _check_shape(batch: tuple[Any, Any], torch: Any) -> None:
    for name, tensor in zip(("input_ids", "labels"), batch):
        if tuple(tensor.shape) != (BATCH, SEQUENCE) or tensor.dtype != torch.int64:
            raise ValueError(f"{name} are {tensor.dtype} of {tuple(tensor.shape)}, not int64 of {(BATCH, SEQUENCE)}")
    ids, labels = batch
    different = labels != ids
    different[:, 0] &= labels[:, 0] != _IGNORE
    if different.any():
        raise ValueError("labels differ from input_ids")
    if ids.data_ptr() == labels.data_ptr():
        raise ValueError("labels share the memory of input_ids")


def _checked_epoch(
    first: tuple[Any, Any], rest: Batches, sequences: int, seconds: float
) -> tuple[dict[str, Any], Pace]:
    heads = [first[0][:, :2].numpy().copy()]
    tokens, complete = 0, True
    start, cpu = time.perf_counter(), time.process_time()
    for ids, _ in rest:
        heads.append(ids[:, :2].numpy().copy())
        tokens += ids.numel()
        if time.perf_counter() - start > seconds:
            complete = False
            break
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    head = np.concatenate(heads)
    seen = head[:, 0] + VOCABULARY * head[:, 1]
    counts = np.bincount(seen, minlength=sequences)
    facts = {
        "batches": len(heads),
        "complete": complete,
        "missing": int((counts[:sequences] == 0).sum()) if complete else None,
        "repeated": int(len(seen) - (counts > 0).sum()),
        "shuffle": float(np.abs(np.diff(seen)).mean() / (sequences / 3)),
        "checked_seconds": took,
    }
    return facts, (tokens / took, tokens / cpu)


def _timed_epochs(epochs: Epochs) -> list[Pace]:
    paces: list[Pace] = []
    spent = 0.0
    while spent < _TIMED_SECONDS:
        tokens = 0
        start, cpu = time.perf_counter(), time.process_time()
        for ids, _ in epochs(len(paces) + 1):
            tokens += ids.numel()
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        paces.append((tokens / took, tokens / cpu))
        spent += took
    return paces
