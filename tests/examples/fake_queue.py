"""Fake consumer without a queue: batch k of a split is a pure function of (split, k), as in a real queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from char_diffusion.ranks import RankGroup, StopSignals
from char_diffusion.trainer import Trainer

from penstock.config import SharedConfig, validate
from penstock.fsqueue.split_reader import ReadCounts

LENGTH, ROWS, CHARACTERS, MASK, IGNORED = 12, 4, 9, 9, -1


def masked_meta(**changes: Any) -> dict[str, Any]:
    schema = [
        {"name": "x", "dtype": "int64", "shape": [LENGTH], "role": "input"},
        {"name": "y", "dtype": "int64", "shape": [LENGTH], "role": "target"},
    ]
    meta = {"training_type": "MLM", "vocab_size": CHARACTERS + 1, "mask_token_id": MASK, "ignore_index": IGNORED}
    return meta | {"itos": list("abcdefgh\n_"), "batch_schema": schema} | changes


def masked_batch(split: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one character each, so that what is hidden can be known from what is not."""
    draw = np.random.default_rng([split == "val", k])
    whole = np.repeat(draw.integers(CHARACTERS, size=(ROWS, 1)), LENGTH, axis=1)
    hidden = draw.random(whole.shape) < 0.3
    hidden[:, 0] = True
    return torch.tensor(np.where(hidden, MASK, whole)), torch.tensor(np.where(hidden, whole, IGNORED))


class FakeConsumer:
    """Keeps a note of what was asked; `fault` is called before every batch and may raise."""

    def __init__(
        self,
        meta: Mapping[str, Any] | None = None,
        make: Callable[[str, int], Any] = masked_batch,
        *,
        rank: int = 0,
        world: int = 1,
        fault: Callable[[str, int], None] | None = None,
    ) -> None:
        self.meta = masked_meta() if meta is None else meta
        self.make, self.rank, self.world, self.fault = make, rank, world, fault
        self.position = {"train": 0, "val": 0}
        self.commits: list[dict[str, int]] = []
        self.settings: dict[str, Any] = {}
        self.queue_dir = Path("queue")
        self.seen = ReadCounts()

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        return self.meta.get("batch_schema")

    def get_batch(self, split: str = "train") -> Any:
        k = self.position[split] + self.rank
        if self.fault is not None:
            self.fault(split, k)
        self.position[split] += self.world
        return self.make(split, k)

    def state_dict(self) -> dict[str, Any]:
        return {"splits": {split: {"position": k} for split, k in self.position.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = positions(state)

    def counts(self, split: str = "train") -> ReadCounts:
        return self.seen

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        assert state is not None
        self.commits.append(positions(state))


def positions(state: Mapping[str, Any]) -> dict[str, int]:
    return {split: inner["position"] for split, inner in state["splits"].items()}


def small(out_dir: Path, **changes: Any) -> SharedConfig:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "dropout": 0.1, "device": "cpu"}
    pace = {"max_iters": 12, "eval_interval": 4, "eval_iters": 2, "log_interval": 3, "checkpoint_interval": 2}
    facts = {"dataset": "counting", "batch_size": ROWS, "block_size": LENGTH, "warmup_iters": 2, "out_dir": out_dir}
    return validate(sizes | pace | facts | changes)


def trainer(config: SharedConfig, consumer: FakeConsumer, *, signals: StopSignals | None = None) -> Trainer:
    return Trainer(config, consumer, RankGroup("cpu", config["dtype"]), signals or StopSignals())  # type: ignore[arg-type]
