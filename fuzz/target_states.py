"""Saved states of a pipeline and of a loader, with a checksum that is right."""

from __future__ import annotations

import json
from functools import cache

import pyarrow as pa

from fuzz.target_jsonl import FOLDER
from penstock import Pipeline, PretrainDataLoader
from penstock.files.states import with_checksum
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


def signed(value: object) -> object:
    """States inside of states too."""
    if not isinstance(value, dict):
        return value
    inside = {key: signed(item) for key, item in value.items()}
    return with_checksum(inside) if "checksum" in inside else inside


def run(data: bytes) -> None:
    try:
        state = signed(json.loads(data))
    except (ValueError, RecursionError):
        return
    if not isinstance(state, dict):
        return
    rows, store = files()
    for one in (Pipeline(JsonlSource(rows), []), PretrainDataLoader(store, batch_size=2, chunk_size=8, prefetch=0)):
        with one:
            one.load_state_dict(state)
            for _, _ in zip(range(3), one):
                pass
