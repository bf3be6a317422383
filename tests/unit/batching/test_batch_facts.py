"""What a batch says of itself does not depend on which fields were asked for."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import PretrainDataLoader, RolloutDataLoader
from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError
from token_stores import make_rows, make_store

FIELDS: list[list[str] | None] = [
    None,
    ["input_ids"],
    ["input_ids", "labels"],
    ["input_ids", "position_ids", "cu_seqlens"],
    ["input_ids", "attention_mask"],
]
SHAPES: dict[str, dict[str, Any]] = {
    "rows": {"packing": None},
    "packed": {"packing": "best_fit"},
    "concat": {"packing": "concat"},
    "free": {"packing": None, "padding_free": True, "pad_to_multiple_of": 8},
    "tokens": {"packing": None, "max_tokens": 48},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("facts") / "store", make_rows(41, 12))


class Unreadable:
    """In the place of an array on a device: a value of it would have to be waited for."""

    shape = (1, 1)

    def __ne__(self, other: object) -> bool:
        raise AssertionError("the values of an array were asked for")


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("streaming", [False, True])
def test_num_tokens_leaves_out_padding_whatever_the_fields_are(
    streaming: bool, shape: str, fields: list[str] | None, store: Path
) -> None:
    options: dict[str, Any] = {"chunk_size": 12, "batch_size": 4, "streaming": streaming, "backend": "numpy"}
    with PretrainDataLoader(store, fields=fields, **options, **SHAPES[shape]) as loader:
        for batch in loader:
            # Tokens of these rows are counted from 1 on, so that 0 is padding.
            assert batch.num_tokens == np.count_nonzero(batch.input_ids)


@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_num_tokens_of_a_loader_needs_no_values(kind: str, store: Path) -> None:
    loader: Any = (
        RolloutDataLoader([{"prompt_ids": [1, 2], "response_ids": [3] * n, "reward": n} for n in (1, 2)], preset="trl")
        if kind == "rollouts"
        else PretrainDataLoader(store, chunk_size=12, packing=None, streaming=kind == "streaming")
    )
    with loader:
        batch = loader.get_batch()
    expected = int((batch.attention_mask != 0).sum())
    batch.input_ids = batch.attention_mask = batch.document_ids = Unreadable()
    assert batch.num_tokens == expected


def padded() -> TrainingBatch:
    ids = np.array([[1, 2, 3, 0], [4, 0, 0, 0]])
    return TrainingBatch.from_numpy({"input_ids": ids, "labels": ids, "attention_mask": ids != 0}, backend="numpy")


def test_num_tokens_of_a_rebuilt_batch_is_counted_or_refused() -> None:
    batch = padded()
    assert TrainingBatch(dict(batch)).num_tokens == 4
    bare = {key: value for key, value in batch.items() if key != "attention_mask"}
    with pytest.raises(ConfigError, match="num_tokens"):
        _ = TrainingBatch(bare).num_tokens
    with pytest.raises(ConfigError, match="num_tokens"):
        _ = TrainingBatch(iter(bare.items())).num_tokens


def test_num_tokens_is_refused_when_the_mask_was_removed() -> None:
    batch, emptied = padded(), padded()
    del batch["attention_mask"]
    emptied["attention_mask"] = None
    for each in (batch, batch.to("cpu"), copy.copy(batch), emptied):
        with pytest.raises(ConfigError, match="num_tokens"):
            _ = each.num_tokens


def test_num_tokens_of_packed_rows_without_a_mask_is_refused() -> None:
    arrays = {"input_ids": np.array([[1, 2, 3, 0]]), "cu_seqlens": np.array([0, 2, 3, 4], np.int32)}
    with pytest.raises(ConfigError, match="num_tokens"):
        _ = TrainingBatch.from_numpy(arrays, backend="numpy").num_tokens


def test_a_known_count_outlives_what_does_not_change_it(store: Path) -> None:
    with PretrainDataLoader(store, chunk_size=12, packing=None, fields=["input_ids", "labels"]) as loader:
        batch = loader.get_batch()
    expected = batch.num_tokens
    assert expected < batch.input_ids.numel()
    batch.update(dict(batch))  # as torch's pinning does
    assert batch.num_tokens == expected
    assert TrainingBatch(batch).num_tokens == expected
    batch["input_ids"] = batch.input_ids[:, :3]
    with pytest.raises(ConfigError, match="num_tokens"):
        _ = batch.num_tokens


def test_a_count_without_padding_follows_another_shape(store: Path) -> None:
    with PretrainDataLoader(store, chunk_size=12, packing="concat", fields=["input_ids"], batch_size=4) as loader:
        full = loader.get_batch()
    batch = TrainingBatch.from_numpy({"input_ids": full.input_ids.numpy()}, num_tokens=full.num_tokens)
    batch["input_ids"] = batch.input_ids[:, :3]
    assert batch.num_tokens == 12


def test_block_mask_of_packed_rows_is_never_one_document_a_row(store: Path) -> None:
    for streaming in (False, True):
        options: dict[str, Any] = {"chunk_size": 12, "packing": "best_fit", "streaming": streaming}
        with PretrainDataLoader(store, fields=["input_ids", "attention_mask"], **options) as loader:
            for batch in (loader.get_batch(), loader.get_batch().to("cpu")):
                with pytest.raises(ConfigError, match="document_ids"):
                    batch.block_mask()
        with PretrainDataLoader(store, chunk_size=12, packing=None, fields=["input_ids", "attention_mask"]) as loader:
            assert loader.get_batch().block_mask().shape[-1] > 1


def test_a_model_gets_no_mask_that_hides_the_positions_of_packed_rows(store: Path) -> None:
    fields = ["input_ids", "attention_mask", "position_ids"]
    for streaming in (False, True):
        options: dict[str, Any] = {"chunk_size": 12, "packing": "best_fit", "streaming": streaming}
        with PretrainDataLoader(store, fields=fields, **options) as loader:
            keywords = loader.get_batch().as_dict()
        assert keywords.keys() == {"input_ids", "position_ids", "use_cache"}
        assert keywords["use_cache"] is False
    with PretrainDataLoader(store, chunk_size=12, packing=None, fields=fields) as loader:
        assert loader.get_batch().as_dict().keys() == {"input_ids", "position_ids", "attention_mask"}


@pytest.mark.parametrize("streaming", [False, True])
def test_the_longest_document_is_known_without_looking_at_the_arrays(streaming: bool, store: Path) -> None:
    options: dict[str, Any] = {"chunk_size": 12, "packing": "best_fit", "streaming": streaming, "backend": "numpy"}
    with PretrainDataLoader(store, fields=["input_ids", "cu_seqlens"], **options) as loader:
        batch = loader.get_batch()
    assert batch.max_seqlen == np.diff(batch.cu_seqlens).max()


def test_a_deleted_field_stays_away_and_errors_of_properties_are_their_own(store: Path) -> None:
    with PretrainDataLoader(store, chunk_size=12, packing="best_fit", backend="numpy") as loader:
        unread, read = loader.get_batch(), loader.get_batch()
    assert read.labels is not None
    for batch in (unread, read):
        del batch.labels
        assert batch.labels is None
        assert "labels" not in batch
    with pytest.raises(AttributeError, match="shape"):
        TrainingBatch().batch_size  # noqa: B018 - a property
    with pytest.raises(AttributeError, match="label_ids"):
        read.label_ids  # type: ignore[attr-defined]  # noqa: B018


def test_threads_that_read_fields_at_once_get_the_same_arrays(store: Path) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with PretrainDataLoader(store, chunk_size=12, packing="best_fit", backend="numpy") as loader:
            for _ in range(300):
                batch = loader.get_batch()
                with ThreadPoolExecutor(3) as pool:
                    reads = [pool.submit(attrgetter("labels", "position_ids"), batch) for _ in range(2)]
                    pool.submit(batch.make_fields)
                for read in reads:
                    assert read.result()[0] is batch.labels
                    assert read.result()[1] is batch.position_ids
    finally:
        sys.setswitchinterval(before)
