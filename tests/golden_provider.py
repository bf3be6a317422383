"""The provider of the golden queue. Its code is part of the queue's fingerprint: do not edit the class."""

from __future__ import annotations

from penstock import DataProviderBase


class GoldenProvider(DataProviderBase):
    def build_meta(self):
        return {
            "training_type": "CLM",
            "vocab_size": 50,
            "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
                {"name": "weight", "dtype": "float32", "shape": [], "role": "weight"},
            ],
        }

    def sample_batch(self, split, rng):
        tokens = rng.integers(50, size=(self.batch_size, self.block_size + 1))
        weight = rng.integers(1, 9, size=self.batch_size).astype("float32") / 8
        return {"x": tokens[:, :-1], "y": tokens[:, 1:], "weight": weight}
