"""A tiny model of random weights: which ways to call it keep packed documents apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lazy_modules import LazyModule

from penstock.batching.backends.attention import AS_IT_IS, Isolation, load_causal_model, packed_rows, probe_isolation
from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError

torch = LazyModule("torch")
transformers = LazyModule("transformers")

LENGTHS = [[5, 7, 4], [9, 6]]
TOKENS = 18


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def packed(lengths: list[list[int]] = LENGTHS, **without: None) -> TrainingBatch:
    rng = np.random.default_rng(0)
    shape = (len(lengths), TOKENS)
    arrays: dict[str, Any] = {
        "input_ids": rng.integers(1, 50, shape),
        "document_ids": np.zeros(shape, np.int32),
        "position_ids": np.zeros(shape, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
    }
    begins = []
    for row, sizes in enumerate(lengths):
        at = 0
        for number, size in enumerate(sizes, 1):
            arrays["document_ids"][row, at : at + size] = number
            arrays["position_ids"][row, at : at + size] = np.arange(size)
            begins.append(row * TOKENS + at)
            at += size
        arrays["attention_mask"][row, :at] = 1
        arrays["position_ids"][row, at:] = np.arange(TOKENS - at)
        if at < TOKENS:
            begins.append(row * TOKENS + at)
    arrays["labels"] = np.where(arrays["document_ids"] > 0, arrays["input_ids"], -100)
    arrays["labels"].reshape(-1)[begins] = -100
    arrays["cu_seqlens"] = np.array([*begins, len(lengths) * TOKENS], np.int32)
    return TrainingBatch.from_numpy({**arrays, **without}, {}, "torch")


def ways(found: list[Isolation]) -> dict[tuple[str, str], Isolation]:
    return {(way.way, way.attention): way for way in found}


def test_a_block_mask_isolates_and_packed_loss_is_unpacked_loss(model_directory: Path) -> None:
    found = ways(probe_isolation(load_causal_model(model_directory), packed()))
    for attention in ("eager", "sdpa"):
        way = found["block mask", attention]
        assert way.isolates
        assert way.leak == 0
        assert way.packed_loss == pytest.approx(way.unpacked_loss, rel=1e-5)


def test_without_positions_or_mask_documents_see_each_other(model_directory: Path) -> None:
    model = load_causal_model(model_directory)
    found = ways(probe_isolation(model, packed(position_ids=None, cu_seqlens=None)))
    leaking = found[AS_IT_IS, "sdpa"]
    assert not leaking.isolates
    assert leaking.leak > 1e-3
    assert found["block mask", "eager"].isolates
    assert not any(way == "position_ids only" for way, _ in found)
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_the_loss_tells_of_a_leak_too(model_directory: Path) -> None:
    found = ways(probe_isolation(load_causal_model(model_directory), packed(position_ids=None, cu_seqlens=None)))
    assert found[AS_IT_IS, "sdpa"].loss_difference > 1e-4
    assert found["block mask", "sdpa"].loss_difference < 1e-5


def test_nan_does_not_isolate() -> None:
    nan = float("nan")
    assert not Isolation("way", "eager", nan, 1.0, 1.0).isolates
    assert not Isolation("way", "eager", 0.0, nan, 1.0).isolates
    assert not Isolation("way", "eager", 0.0, 1.0, 1.0, problem="it failed").isolates
    assert Isolation("way", "eager", 0.0, 1.0, 1.0).isolates


def test_a_batch_that_cannot_be_probed_says_why(model_directory: Path, tmp_path: Path) -> None:
    model = load_causal_model(model_directory)
    with pytest.raises(ConfigError):
        probe_isolation(model, packed([[5], [9]]))
    batch = packed()
    batch.input_ids[0, 0] = 50
    with pytest.raises(ConfigError, match=r"token 50\b"):
        probe_isolation(model, batch)
    batch = packed()
    batch.labels[:] = -100  # type: ignore[index]
    with pytest.raises(ConfigError):
        probe_isolation(model, batch)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_causal_model(tmp_path)


def test_rows_with_several_documents_are_counted() -> None:
    assert packed_rows(np.array([[1, 1, 2], [1, 0, 0], [0, 0, 0], [1, 2, 3]])) == 2
