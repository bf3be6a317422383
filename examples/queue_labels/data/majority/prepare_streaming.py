"""Rows of symbols, and which of them is the most frequent: a dataset whose batches are more than x and y."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.config import Setting
from penstock.fsqueue import DataProviderBase

__all__ = ["MajorityProvider"]

PADDING = 0


class MajorityProvider(DataProviderBase):
    """Rows of different lengths, filled up with padding; everything is drawn, nothing is read from a file.

    The label is the most frequent symbol, counted from 0. The weight is how far it leads, as a share of the row: of a
    clear row more is learned than of a close one, and of a tie nothing.
    """

    settings: ClassVar[Mapping[str, Setting]] = {
        "symbols": Setting(int, 6, check=lambda count: count >= 2, text="two or more different symbols"),
        "lead": Setting(float, 0.3, check=lambda share: 0 <= share < 1, text="the share of a row that is one symbol"),
    }

    def build_meta(self) -> dict[str, Any]:
        return {
            "training_type": "classification",
            "vocab_size": self.config["symbols"] + 1,  # symbols are 1, 2, ...; 0 is padding
            "num_classes": self.config["symbols"],
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "attention_mask", "dtype": "bool", "shape": [self.block_size], "role": "mask"},
                {"name": "label", "dtype": "int64", "shape": [], "role": "target"},
                {"name": "weight", "dtype": "float32", "shape": [], "role": "weight"},
            ],
        }

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
        symbols, shape = self.config["symbols"], (self.batch_size, self.block_size)
        lengths = rng.integers(self.block_size // 2 + 1, self.block_size + 1, size=(self.batch_size, 1))
        real = np.arange(self.block_size) < lengths
        leading = rng.integers(1, symbols + 1, size=(self.batch_size, 1))
        x = np.where(rng.random(shape) < self.config["lead"], leading, rng.integers(1, symbols + 1, size=shape))
        x = np.where(real, x, PADDING)
        counts = (x[:, :, None] == np.arange(1, symbols + 1)).sum(axis=1)
        second, first = np.partition(counts, symbols - 2, axis=1)[:, -2:].T
        weight = ((first - second) / lengths[:, 0]).astype(np.float32)
        return {"x": x, "attention_mask": real, "label": counts.argmax(axis=1), "weight": weight}
