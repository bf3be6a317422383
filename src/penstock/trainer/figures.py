"""Sums over batches and ranks, the means they come to, and how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from penstock.trainer.objectives import Measured

__all__ = ["EMPTY", "KEPT", "Pace", "mean", "means", "numbers"]

KEPT = ("loss", "weight", "correct", "counted")
"""Sums over targets."""
EMPTY = dict.fromkeys((*KEPT, "tokens", "waited", "stop", "ended"), 0.0)
"""What a rank says of its part of a step: the sums, the seconds it waited, and whether it cannot go on."""


class Pace:
    """Tokens and waiting since the last line."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._tokens = self._waited = 0.0

    def add(self, tokens: float, waited: float) -> None:
        self._tokens += tokens
        self._waited += waited

    def figures(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        return {"tokens_per_second": self._tokens / seconds, "waiting": min(1.0, self._waited / seconds)}


def numbers(measured: Measured) -> dict[str, float]:
    """The four sums in one transfer from the device."""
    values = torch.stack([getattr(measured, name).detach().float() for name in KEPT])
    return dict(zip(KEPT, values.tolist()))


def means(sums: Mapping[str, float]) -> dict[str, float]:
    return {"loss": mean(sums["loss"], sums["weight"]), "accuracy": mean(sums["correct"], sums["counted"])}


def mean(total: float, count: float) -> float:
    return total / count if count else 0.0
