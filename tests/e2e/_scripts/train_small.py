"""Trains a small model on a mixture, from its last checkpoint on if there is one, and writes down what it was fed.

Everything that decides the result is in the checkpoint: the model, the optimizer, and where the loader is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from penstock import MixedDataLoader, Schedule
from penstock.loaders.adapters import RepeatLoader

VOCABULARY = 64
LENGTH = 24
SAVE_EVERY = 4


def make_loader(home: Path, **options: Any) -> MixedDataLoader:
    schedule = Schedule.of([(0, {"text": 3, "chat": 1}), (250, {"text": 1, "chat": 2})], "linear")
    sources = {"text": home / "text", "chat": home / "chat"}
    return MixedDataLoader(
        sources, schedule, chunk_size=LENGTH, packing="best_fit", batch_size=4, seed=5, prefetch=2, **options
    )


def fed(batch: Any) -> list[list[int]]:
    """Source and row of every document of a batch."""
    return [batch.metadata["source"].tolist(), batch.metadata["row"].tolist()]


class Adam:
    """As everybody knows it. That of torch takes as long to import as torch itself, which matters to a dozen runs."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = list(parameters)
        self.state: dict[str, Any] = {"steps": 0, "means": [0.0 * each.detach() for each in self._parameters]}
        self.state["squares"] = [mean.clone() for mean in self.state["means"]]

    def step(self) -> None:
        self.state["steps"] += 1
        fading = [1 - decay ** self.state["steps"] for decay in (0.9, 0.99)]
        for each, mean, square in zip(self._parameters, self.state["means"], self.state["squares"]):
            mean.lerp_(each.grad, 0.1)
            square.lerp_(each.grad**2, 0.01)
            each.data -= 3e-3 * (mean / fading[0]) / ((square / fading[1]).sqrt() + 1e-8)
            each.grad = None


def main(home: str, out: str, number: int, steps: int, most: int | None) -> None:
    """Trains up to `steps`; of those, `most` at most, and then waits for whoever is to kill it."""
    import torch

    torch.set_num_threads(1)  # of which the order of additions, and so the last bit, would depend
    torch.manual_seed(9)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, VOCABULARY)
    )
    optimizer = Adam(model.parameters())
    loader, checkpoint = make_loader(Path(home)), Path(out, "checkpoint.pt")
    sys.stdin.readline()  # everything slow is done; begin when told to
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.state = saved["optimizer"]
        loader.load_state_dict(json.loads(saved["loader"]))
    with Path(out, f"{number}.jsonl").open("w") as history:
        for done, batch in enumerate(islice(RepeatLoader(loader), steps - loader.step), 1):
            assert batch.labels is not None
            logits = model(batch.input_ids)[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch.labels[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            line = {"step": batch.metadata["step"], "fed": fed(batch), "loss": float(loss.item()).hex()}
            history.write(json.dumps(line) + "\n")
            history.flush()
            if done % SAVE_EVERY == 0 or loader.step == steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state}
                torch.save(state | {"loader": json.dumps(loader.state_dict())}, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
            if done == most:
                sys.stdin.read()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
