"""Files of a run: a flipped bit is noticed before anything is learned from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - these import torch
from penstock.errors import ResumeError
from penstock.trainer.checkpoints import LAST, Checkpoint, Checkpoints


def make() -> Checkpoint:
    return Checkpoint(
        step=3,
        world_size=1,
        sizes={"width": 8},
        settings={"seed": 1},
        meta={},
        queue={"splits": {"train": {"position": 9}}},
        model={"weight": torch.randn(500)},
        optimizer={"mean": torch.randn(500)},
        random=[torch.get_rng_state()],
        curve=[],
        window={},
        best_loss=None,
        sample=None,
        fingerprint="x",
    )


def values(checkpoint: Checkpoint | None) -> Any:
    assert checkpoint is not None
    tensors = (checkpoint.model["weight"], checkpoint.optimizer["mean"], checkpoint.random[0])
    return checkpoint.step, checkpoint.queue, checkpoint.settings, [tensor.tolist() for tensor in tensors]


def test_a_flipped_bit_in_a_checkpoint_is_refused_or_harmless(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make(), best=False)
    data, wanted, refused = (tmp_path / LAST).read_bytes(), values(checkpoints.load()), 0
    for bit in random.Random(19).sample(range(len(data) * 8), 100):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / LAST).write_bytes(flipped)
        try:
            assert values(checkpoints.load()) == wanted
        except ResumeError:
            refused += 1
    assert refused > 50
