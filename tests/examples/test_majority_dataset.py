"""The second dataset, in examples/queue_labels: what its arrays mean, and that they come out of a queue as a dict."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.config import load_shared_config
from penstock.errors import ConfigError
from penstock.fsqueue import DatasetConsumer
from penstock.fsqueue.prepare_command import find_provider

HERE = Path(__file__).parents[2] / "examples" / "queue_labels"
MajorityProvider: Any = find_provider("majority", HERE / "data")


def provider(**options: Any) -> Any:
    config = {"dataset": "majority", "batch_size": 12, "block_size": 16, **options.pop("config", {})}
    return MajorityProvider(config, **options)


@given(
    k=st.integers(0, 10**6),
    symbols=st.integers(2, 9),
    lead=st.floats(0, 0.9),
    block_size=st.integers(1, 40),
    split=st.sampled_from(["train", "val"]),
)
@hypothesis_settings(max_examples=80, deadline=None)
def test_labels_and_weights_are_what_counting_row_by_row_gives(
    k: int, symbols: int, lead: float, block_size: int, split: str
) -> None:
    batch = provider(config={"symbols": symbols, "lead": lead, "block_size": block_size}).make_batch(split, k)
    for x, real, label, weight in zip(*(batch[name] for name in ("x", "attention_mask", "label", "weight"))):
        length = int(real.sum())
        assert length > block_size // 2
        assert real[:length].all()
        assert (x[length:] == 0).all()
        assert set(x[:length]) <= set(range(1, symbols + 1))
        counts = Counter(x[:length].tolist())
        (_, first), second = counts.most_common(1)[0], sorted([0, *counts.values()])[-2]
        assert counts[int(label) + 1] == first
        assert weight == pytest.approx((first - second) / length)


def test_its_batches_come_out_of_a_queue_as_a_dict_as_they_were_made(tmp_path: Path) -> None:
    made = provider(queue_dir=tmp_path / "queue")
    made.run(max_batches=10)
    with DatasetConsumer(tmp_path / "queue", order="strict", backend="numpy") as consumer:
        delivered = list(consumer.batches("val"))
    assert len(delivered) == 10
    for k, batch in enumerate(delivered):
        expected = made.make_batch("val", k)
        assert list(batch) == ["x", "attention_mask", "label", "weight"]
        for name, array in batch.items():
            assert array.dtype == expected[name].dtype
            assert np.array_equal(array, expected[name])


def test_its_config_serves_it_and_impossible_settings_are_refused() -> None:
    config = load_shared_config(HERE / "config" / "train_majority.py")
    assert MajorityProvider(config).make_batch("train", 0)["label"].max() < config.symbols
    with pytest.raises(ConfigError, match=r"(?s)symbols = 1.*lead = 1.0"):
        MajorityProvider(config.replace(symbols=1, lead=1.0))
