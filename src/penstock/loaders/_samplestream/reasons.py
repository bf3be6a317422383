"""Why samples do not come faster, in a sentence: what the engine measured, and what only this stream knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.loaders._samplestream.window import Window
from penstock.memory import format_bytes
from penstock.pipeline.metrics import StageMetrics, bottleneck

__all__ = ["buffer_hint", "why_waiting"]

_LONG_SECONDS = 0.5
"""A sample that takes longer is named."""
_MUCH = 0.3
"""The share of the time from which something is worth naming."""


def why_waiting(snapshot: Mapping[str, Any], window: Window | None, hint: str | None) -> str:
    """What a loop waits for that is not the one that sets the pace. `hint`: what `buffer_hint` says."""
    fetch = window.longest_fetch() if window is not None else None
    if fetch is not None and fetch[0] >= _LONG_SECONDS:
        seconds, name, row = fetch
        return f"row {row} of {name} has been in the making for {seconds:.1f} s"
    stages = [_measured(stage) for stage in snapshot.get("stages", ())]
    if not stages:
        return "nothing has been read yet"
    source, *working, sink = stages
    seconds = snapshot["seconds"]
    if window is not None:
        if hint is not None and window.waited >= _MUCH * seconds:
            return hint
        # For the engine the source is at work while it waits for room in our window.
        source.busy = max(0.0, source.busy - window.waited)
        # And it counts a chunk when that is done.
        (working or [source])[0].busy += window.unfinished()
    loads = [source.utilisation(seconds), *(stage.utilisation(seconds) for stage in working)]
    if source.batches and max(loads) < _MUCH:
        if source.wait_room >= _MUCH * seconds:
            memory = snapshot["memory"]
            return f"the budget is full: {format_bytes(memory['used'])} of {format_bytes(memory['limit'])} are in use"
        name = max(zip(loads, stages[:-1], strict=True), key=lambda load: load[0])[1].name
        return f"the loop waits for samples, though no stage is busy: {name} is most, {max(loads):.0%} of the time"
    return bottleneck(source, working, sink, seconds)


def buffer_hint(buffer_size: int, chunk_size: int, num_workers: int) -> str | None:
    """What to change if the buffer has no room for a chunk of every worker; None if it has."""
    chunks = buffer_size // chunk_size
    if chunks >= num_workers:
        return None
    smaller = f", or chunk_size at most {buffer_size // num_workers}" if buffer_size >= num_workers else ""
    return (
        f"buffer_size={buffer_size} has room for {chunks} chunk{'s' * (chunks != 1)} of chunk_size={chunk_size}, so "
        f"only {chunks} of {num_workers} workers can be busy; make buffer_size at least {chunk_size * num_workers}"
        f"{smaller}"
    )


def _measured(stage: Mapping[str, Any]) -> StageMetrics:
    found = StageMetrics(stage["name"], stage["kind"])
    found.busy, found.threads, found.batches = stage["busy_seconds"], stage["threads"], stage["batches"]
    found.wait_room = stage["wait_room_seconds"]
    return found
