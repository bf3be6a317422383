"""Costs of the ranks of a step, with contiguous parts and with balanced ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.distributed.sharding import Balanced, Contiguous, Sharding, shares_of
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]
_COSTED_STEPS, _COSTED_SAMPLES = 256, 1 << 15
"""Most steps and samples that are sharded to measure the imbalance of ranks: below a second."""


@dataclass(slots=True)
class Imbalance:
    """Cost of the slowest rank over the mean of all ranks: 1.25 means that ranks wait a fifth of the time.

    Maxima and means are added up over the first steps of the plan. The cost is that of a `Balanced` sharding: documents
    of packed rows count each by itself.
    """

    sharding: str
    """Sharding of the loader; `balanced` if that is contiguous."""
    contiguous: float
    """With contiguous parts, which is the default."""
    balanced: float
    """With `sharding`."""
    steps: int
    """Number of steps that were measured."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step by rank: with contiguous parts, and with another sharding."""

    step: int
    contiguous: list[float]
    balanced: list[float]


class RankCosts:
    """Costs of the slowest and the mean rank, step by step: with contiguous parts, and with another sharding."""

    def __init__(self, sharding: Sharding, world: int) -> None:
        self._sharding: Sharding = Balanced() if isinstance(sharding, Contiguous) else sharding
        self._cost = sharding if isinstance(sharding, Balanced) else Balanced()
        self._world, self._samples = world, 0
        self.steps: list[int] = []
        """Numbers of the steps that were measured."""
        self.slowest: list[tuple[float, float]] = []
        self.means: list[float] = []
        self.worst: StepCosts | None = None
        """The measured step whose slowest rank is furthest above the mean, with contiguous parts."""

    def add(self, samples: Samples, bounds: Ints, numbers: Ints) -> None:
        for number, (low, high) in zip(numbers.tolist(), pairwise(bounds.tolist())):
            if self._world == 1 or len(self.steps) >= _COSTED_STEPS or self._samples >= _COSTED_SAMPLES:
                return
            step = samples.slice(low, high)
            costs = self._cost.costs(step.lengths, step.offsets)
            documents = None if step.single else (step.lengths, step.offsets)
            by_rank: list[list[float]] = []
            for sharding in (Contiguous(), self._sharding):
                shares = shares_of(sharding, step.sizes(), self._world, documents)
                by_rank.append([float(costs[share].sum()) for share in shares])
            self._samples += len(step)
            self.steps.append(number)
            self.slowest.append((max(by_rank[0]), max(by_rank[1])))
            self.means.append(float(costs.sum()) / self._world)
            if self.worst is None or _excess(by_rank[0]) > _excess(self.worst.contiguous):
                self.worst = StepCosts(number, *by_rank)

    def result(self) -> Imbalance | None:
        mean = sum(self.means)
        if not mean:
            return None
        contiguous, balanced = (sum(values) / mean for values in zip(*self.slowest))
        return Imbalance(type(self._sharding).__name__.lower(), contiguous, balanced, len(self.steps))


def _excess(costs: list[float]) -> float:
    """The highest cost over the mean."""
    return max(costs) * len(costs) / (sum(costs) or 1.0)
