"""Saved states of a pipeline and of loaders, with a checksum that is right.

`"own"` in a state stands for what the subject has there: its fingerprint depends on paths and versions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa

from fuzz.target_jsonl import FOLDER
from penstock import MixedDataLoader, Pipeline, PipelineConfig, PretrainDataLoader, Rollout, RolloutDataLoader
from penstock.errors import PenstockError
from penstock.files.states import with_checksum
from penstock.loaders import StreamOptions
from penstock.sources import JsonlSource
from penstock.store import StoreWriter


@cache
def files() -> tuple[str, str]:
    rows, store = FOLDER / "state.jsonl", FOLDER / "state.store"
    rows.write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    with StoreWriter(store) as writer:
        writer.write(pa.record_batch({"input_ids": pa.array([[n] * 8 for n in range(20)], pa.list_(pa.uint16()))}))
        writer.publish()
    return str(rows), str(store)


def pipeline() -> Pipeline:
    return Pipeline(JsonlSource(files()[0]), [], config=PipelineConfig(batch_rows=5, workers=1))


def loader(**options: Any) -> PretrainDataLoader:
    return PretrainDataLoader(files()[1], batch_size=2, chunk_size=12, backend="numpy", prefetch=0, **options)


def packed() -> PretrainDataLoader:
    return loader(packing="best_fit")


def mixed() -> MixedDataLoader:
    return MixedDataLoader({"a": loader(), "b": loader(seed=1)}, {"a": 3, "b": 1}, batch_size=2, backend="numpy")


def stream() -> PretrainDataLoader:
    return loader(streaming=StreamOptions(workers=1, worker_type="thread"))


def rollouts() -> RolloutDataLoader:
    rows = [
        Rollout(prompt_ids=[1], response_ids=[2] * n, logprobs=[-0.5] * n, reward=float(n), group=str(n // 2))
        for n in range(2, 10)
    ]
    return RolloutDataLoader(rows, batch_size=2, backend="numpy")


SUBJECTS: tuple[Callable[[], Any], ...] = (pipeline, loader, packed, mixed, stream, rollouts)


@cache
def own_state(subject: Callable[[], Any]) -> dict[str, Any]:
    """The state after a batch."""
    with subject() as one:
        next(iter(one))
        state: dict[str, Any] = one.state_dict()
        return state


def filled(value: Any, own: Any) -> Any:
    """The value with what the subject itself has for each "own"."""
    if value == "own":
        return own
    if isinstance(value, dict):
        mine = own if isinstance(own, dict) else {}
        return {key: filled(item, mine.get(key)) for key, item in value.items()}
    return value


def signed(value: object) -> object:
    """States inside of states too."""
    if not isinstance(value, dict):
        return value
    inside = {key: signed(item) for key, item in value.items()}
    return with_checksum(inside) if "checksum" in inside else inside


def tried(data: bytes) -> Iterator[tuple[Callable[[], Any], dict[str, Any]]]:
    """Every subject with states of that kind, and its state; each is refused or accepted on its own."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(given, dict):
        return
    for subject in SUBJECTS:
        own = own_state(subject)
        if given.get("kind") in (own["kind"], "own"):
            state = signed(filled(given, own))
            assert isinstance(state, dict)
            yield subject, state


def run(data: bytes) -> None:
    for subject, state in tried(data):
        with contextlib.suppress(PenstockError), subject() as one:
            one.load_state_dict(state)
            for _, _ in zip(range(3), one):
                pass
