"""Reads a loader for some steps, writes down what every batch holds, and goes on from the last place that it saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import train_small

from penstock import PretrainDataLoader
from penstock.loaders.adapters import RepeatLoader

SAVE_EVERY = 3


def make_loader(home: Path, kind: str) -> Any:
    if kind == "mixed":
        return train_small.make_loader(home, backend="numpy")
    options: dict[str, Any] = {"packing": "best_fit", "batch_size": 4, "seed": 5, "backend": "numpy"}
    if kind == "streamed":
        options["streaming"] = True
    return PretrainDataLoader(home / "text", chunk_size=train_small.LENGTH, **options)


def content(batch: Any) -> list[Any]:
    return [batch.metadata["row"].tolist(), batch.input_ids.tolist()]


def read(home: Path, kind: str, steps: int) -> list[Any]:
    """All batches, by somebody whom nobody disturbs."""
    with make_loader(home, kind) as loader:
        return [content(batch) for batch, _ in zip(RepeatLoader(loader), range(steps))]


def main(home: str, kind: str, saved: str, steps: int) -> None:
    place = Path(saved)
    with make_loader(Path(home), kind) as loader:
        seen: list[Any] = []
        if place.exists():
            state = json.loads(place.read_text())
            loader.load_state_dict(state["loader"])
            seen = state["seen"]
        for batch in RepeatLoader(loader):
            seen.append(content(batch))
            if len(seen) % SAVE_EVERY == 0 or len(seen) >= steps:
                beside = place.with_suffix(".new")
                beside.write_text(json.dumps({"loader": loader.state_dict(), "seen": seen}))
                beside.replace(place)
            if len(seen) >= steps:
                return


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
