"""Slices of sequences for context-parallel ranks: together they are the whole batch, whatever it is cut into."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.context_model import projections, summed_loss, weights, whole_loss

from penstock import (
    ConversationDataLoader,
    MixedDataLoader,
    PreferenceDataLoader,
    PretrainDataLoader,
    RolloutDataLoader,
)
from penstock.batching.collate import IGNORE
from penstock.batching.context import SLICINGS, ContextBatch, ContextSlice, slice_context
from penstock.distributed import Rank
from penstock.errors import ConfigError, SchemaError
from penstock.loaders import Shard, TrainingBatch
from token_stores import make_masks, make_rows, make_store

ROW_SLICINGS = ("contiguous", "zigzag")
Rows = list[list[int]]
"""Lengths of the documents of each row."""


def build(rows: Rows, width: int, *, packed: bool = True, backend: str = "numpy", unlearned: int = 3) -> TrainingBatch:
    """Batch written down token by token; no two tokens are alike, and every `unlearned`-th has no label."""
    shape = (len(rows), width)
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int64) for name in ("input_ids", "position_ids")}
    arrays |= {"labels": np.full(shape, IGNORE), "document_ids": np.zeros(shape, np.int32)}
    ends, token = [0], 0
    for row, lengths in enumerate(rows):
        place = 0
        for number, length in enumerate([*lengths, width - sum(lengths)], 1):
            padding = number > len(lengths)
            for inside in range(length):
                arrays["position_ids"][row, place] = inside
                if not padding:
                    token += 1
                    arrays["input_ids"][row, place] = token
                    arrays["document_ids"][row, place] = number
                    if inside and token % unlearned:
                        arrays["labels"][row, place] = token
                place += 1
            if length:
                ends.append(row * width + place)
    arrays["loss_mask"] = arrays["labels"] != IGNORE
    arrays["attention_mask"] = (arrays["document_ids"] > 0).astype(np.int64)
    if packed:
        arrays["cu_seqlens"] = np.array(ends, np.int32)
    else:
        del arrays["document_ids"]
    arrays["num_items_in_batch"] = int(arrays["loss_mask"].sum())
    return TrainingBatch.from_numpy(arrays, backend=backend)


def slices_of(batch: TrainingBatch, world: int, slicing: Any, **more: Any) -> list[ContextBatch]:
    return [slice_context(batch, ContextSlice(Rank(rank, world), slicing), **more) for rank in range(world)]


def gathered(parts: list[Any], world: int, slicing: str) -> Any:
    """Sequences of all ranks put together again, part by part: the first dimension of each array is the sequence."""
    if slicing == "contiguous":
        return np.concatenate(parts)
    heads = [part[: len(part) // 2] for part in parts]
    tails = [part[len(part) // 2 :] for part in parts]
    return np.concatenate([*heads, *tails[::-1]])


def shifted(labels: Any) -> Any:
    return np.concatenate([labels[:, 1:], np.full((len(labels), 1), IGNORE)], axis=1)


def fitting(lengths: list[int], width: int) -> list[int]:
    return [length for length, reach in zip(lengths, itertools.accumulate(lengths)) if reach <= width]


def rows_of(width: int) -> Any:
    row = st.lists(st.integers(1, width), max_size=5).map(lambda lengths: fitting(lengths, width))
    return st.tuples(st.lists(row, min_size=1, max_size=3), st.just(width))


BATCHES = st.integers(1, 24).flatmap(rows_of)


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES, world=st.integers(1, 4), slicing=st.sampled_from(ROW_SLICINGS), packed=st.booleans())
def test_gathered_slices_of_rows_are_the_rows(batch: Any, world: int, slicing: str, packed: bool) -> None:
    rows, width = batch
    if not packed:
        rows = [lengths[:1] for lengths in rows]
    whole = build(rows, width, packed=packed)
    slices = slices_of(whole, world, slicing, pad_id=7)
    parts = world * (1 if slicing == "contiguous" else 2)
    assert {part.input_ids.shape for part in slices} == {(len(rows), -(-width // parts) * parts // world)}
    names = ["input_ids", "position_ids", "attention_mask", *(["document_ids"] if packed else [])]
    wanted = {name: getattr(whole, name) for name in names}
    wanted |= {"shift_labels": shifted(whole.labels), "loss_mask": shifted(whole.labels) != IGNORE}
    fill = {"input_ids": 7, "shift_labels": IGNORE}
    for name, array in wanted.items():
        for row in range(len(rows)):
            found = gathered([getattr(part, name)[row] for part in slices], world, slicing)
            np.testing.assert_array_equal(found[:width], array[row], name)
            assert (found[width:] == fill.get(name, 0)).all()
            assert found.dtype == array.dtype
    assert sum(part.num_tokens for part in slices) == sum(map(sum, rows))
    assert {part.num_items_in_batch for part in slices} == {whole.num_items_in_batch}
    assert all(part.labels is None for part in slices)


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES, world=st.integers(1, 4))
def test_gathered_slices_of_documents_are_the_documents(batch: Any, world: int) -> None:
    whole = build(*batch)
    targets, ends = shifted(whole.labels).reshape(-1), whole.cu_seqlens.tolist()
    slices = slices_of(whole, world, "zigzag_documents", pad_id=7)
    assert len({part.input_ids.shape for part in slices}) == 1
    for part in slices:
        assert part.cu_seqlens.tolist() == slices[0].cu_seqlens.tolist()
        assert part.cu_seqlens[-1] == part.input_ids.size
        assert (part.global_cu_seqlens == part.cu_seqlens * world).all()
        assert part.cu_seqlens.dtype == part.global_cu_seqlens.dtype == np.int32
        assert part.global_max_seqlen == world * part.max_seqlen == np.diff(part.global_cu_seqlens).max()
    local = slices[0].cu_seqlens.tolist()
    for (low, high), (start, stop) in zip(itertools.pairwise(ends), itertools.pairwise(local), strict=True):
        length = high - low
        assert (stop - start) * world == -(-length // (2 * world)) * 2 * world
        for name in ("input_ids", "position_ids", "document_ids", "attention_mask", "shift_labels"):
            array = targets if name == "shift_labels" else getattr(whole, name).reshape(-1)
            pieces = [getattr(part, name)[0, start:stop] for part in slices]
            found = gathered(pieces, world, "zigzag")
            np.testing.assert_array_equal(found[:length], array[low:high], name)
            if name == "position_ids":
                assert found.tolist() == list(range(len(found)))
            else:
                assert (found[length:] == {"input_ids": 7, "shift_labels": IGNORE}.get(name, 0)).all()
    assert sum(part.num_tokens for part in slices) == whole.num_tokens


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES, world=st.integers(1, 4), slicing=st.sampled_from(SLICINGS))
def test_every_target_is_in_exactly_one_slice(batch: Any, world: int, slicing: str) -> None:
    whole = build(*batch)
    wanted = sorted(int(label) for label in whole.labels.reshape(-1) if label != IGNORE)
    found = []
    for part in slices_of(whole, world, slicing):
        learned = part.shift_labels != IGNORE
        assert (part.loss_mask == learned).all()
        assert (part.shift_labels[learned] == part.input_ids[learned] + 1).all(), "tokens count up"
        found += part.shift_labels[learned].tolist()
    assert sorted(found) == wanted


def test_the_last_token_of_a_row_has_no_target() -> None:
    ids = np.arange(1, 17).reshape(2, 8)
    whole = TrainingBatch.from_numpy({"input_ids": ids, "labels": ids, "position_ids": ids % 8}, backend="numpy")
    found = [part.shift_labels.tolist() for part in slices_of(whole, 2, "contiguous")]
    assert found == [[[2, 3, 4, 5], [10, 11, 12, 13]], [[6, 7, 8, IGNORE], [14, 15, 16, IGNORE]]]


@settings(max_examples=40, deadline=None)
@given(batch=BATCHES, world=st.integers(1, 3), slicing=st.sampled_from(ROW_SLICINGS))
def test_boundaries_of_slices_of_rows_are_where_documents_change(batch: Any, world: int, slicing: str) -> None:
    rows, width = batch
    whole = build(rows, width)
    for part in slices_of(whole, world, slicing):
        assert part.cu_seqlens[0] == 0
        assert part.cu_seqlens[-1] == part.input_ids.size
        assert part.max_seqlen == np.diff(part.cu_seqlens).max()
        ids = part.document_ids.reshape(-1)
        for low, high in itertools.pairwise(part.cu_seqlens.tolist()):
            assert len(set(ids[low:high].tolist())) == 1
        lengths = np.diff(part.global_cu_seqlens)
        padded = part.input_ids.shape[1] * world
        assert lengths.sum() == len(rows) * padded
        if padded == width:
            assert part.global_cu_seqlens.tolist() == whole.cu_seqlens.tolist()
        # Each row begins a document, in the slice as in the whole.
        assert set(range(0, part.input_ids.size + 1, part.input_ids.shape[1])) <= set(part.cu_seqlens.tolist())


def test_slices_are_those_of_torch() -> None:
    balancers = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    for world in (1, 2, 4):
        whole = build([[64]], 64)
        order = balancers._HeadTailLoadBalancer(64, world, "cpu")._generate_indices().flatten().tolist()
        found = [token for part in slices_of(whole, world, "zigzag") for token in part.input_ids[0].tolist()]
        assert found == [place + 1 for place in order]
        lengths = [8, 24, 16, 16]
        whole = build([lengths], 64)
        balancer = balancers._PerDocumentHeadTailLoadBalancer([lengths], world, "cpu")
        order = balancer._generate_indices().flatten().tolist()
        slices = slices_of(whole, world, "zigzag_documents")  # torch has the parts of all ranks document by document
        ends = itertools.pairwise(slices[0].cu_seqlens.tolist())
        found = [token for low, high in ends for part in slices for token in part.input_ids[0, low:high].tolist()]
        assert found == [place + 1 for place in order]


@pytest.mark.parametrize("slicing", SLICINGS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_loss_of_slices_is_the_loss_of_the_batch(slicing: str, world: int, packed: bool) -> None:
    pytest.importorskip("torch")
    if slicing == "zigzag_documents" and not packed:
        return
    rows = [[5, 11, 3, 1], [17], [2, 2, 9]] if packed else [[20], [3], [13]]
    whole = build(rows, 21, packed=packed, backend="torch")
    model, slices = weights(), slices_of(whole, world, slicing)
    everyone = [projections(model, part) for part in slices]
    losses = [summed_loss(model, own, everyone, part.shift_labels) for own, part in zip(everyone, slices)]
    wanted = float(whole_loss(model, whole))
    assert float(sum(losses)) / whole.num_items_in_batch == pytest.approx(wanted, rel=1e-12)


def test_a_contiguous_slice_of_one_row_is_a_view_and_of_several_can_be_flattened() -> None:
    torch = pytest.importorskip("torch")
    whole = build([[8, 8]], 16)
    part = slices_of(whole, 2, "contiguous")[1]
    assert np.shares_memory(part.input_ids, whole.input_ids)
    assert np.shares_memory(part.position_ids, whole.position_ids)
    assert torch.from_numpy(slices_of(build([[16], [16]], 16), 2, "contiguous")[1].input_ids).view(-1).shape == (16,)


def test_keywords_of_a_slice_are_those_of_a_model_that_does_not_shift_labels() -> None:
    part = slices_of(build([[5, 7]], 12), 2, "zigzag")[0]
    assert set(part) == {"input_ids", "position_ids", "labels", "shift_labels", "use_cache"}
    assert part["labels"] is part["shift_labels"] is part.shift_labels
    assert part["cu_seqlens"] is part.cu_seqlens
    assert part["global_cu_seqlens"] is part.global_cu_seqlens
    assert part.metadata["context"] == {"rank": 0, "world_size": 2, "slicing": "zigzag"}
    assert set(part.to_numpy()) >= {"shift_labels", "global_cu_seqlens", "global_max_seqlen", "input_ids"}
    assert repr(part).startswith("ContextBatch(")
    unpacked = slices_of(build([[5]], 12, packed=False), 2, "zigzag")[0]
    assert set(unpacked) == {"input_ids", "position_ids", "labels", "shift_labels", "attention_mask"}
    again = pickle.loads(pickle.dumps(part))  # noqa: S301
    assert (again.shift_labels == part.shift_labels).all()
    with pytest.raises(ConfigError, match="block mask"):
        part.block_mask()
    with pytest.raises(ConfigError, match="block mask"):
        part.as_dict(block_mask="bool")


def test_a_hugging_face_model_takes_the_targets_as_they_are() -> None:
    pytest.importorskip("transformers")
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    part = slices_of(build([[5, 7], [3, 9]], 12, backend="torch"), 2, "zigzag")[1]
    logits = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    found = ForCausalLMLoss(logits, part["labels"], 32, shift_labels=part["shift_labels"])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part.shift_labels.flatten(), ignore_index=-100)
    assert float(found) == pytest.approx(float(wanted))


@pytest.mark.parametrize(
    ("missing", "slicing", "message"),
    [
        ("position_ids", "contiguous", "position_ids.*fields"),
        ("cu_seqlens", "zigzag_documents", "cu_seqlens.*'zigzag'.*fields"),
    ],
)
def test_a_batch_without_what_a_slice_needs_is_refused(missing: str, slicing: str, message: str) -> None:
    batch = build([[4]], 4)
    setattr(batch, missing, None)
    with pytest.raises(SchemaError, match=message):
        slices_of(batch, 2, slicing)


def test_a_slice_is_not_sliced_again_and_words_are_checked() -> None:
    with pytest.raises(ConfigError, match="already"):
        slices_of(slices_of(build([[4]], 4), 2, "zigzag")[0], 2, "zigzag")
    with pytest.raises(ConfigError, match="contiguous, zigzag, zigzag_documents"):
        ContextSlice(Rank(0, 2), "striped")  # type: ignore[arg-type]


# Loaders


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("context")
    rows = make_rows(60, 30)
    make_store(home / "text", rows)
    make_store(home / "chats", rows, make_masks(rows))
    return home


KINDS: dict[str, Any] = {
    "packed": (PretrainDataLoader, "text", {"chunk_size": 30, "packing": "best_fit"}),
    "concat": (PretrainDataLoader, "text", {"chunk_size": 32}),
    "padded": (ConversationDataLoader, "chats", {}),
    "padding free": (ConversationDataLoader, "chats", {"padding_free": True}),
    "by tokens": (ConversationDataLoader, "chats", {"max_tokens": 80}),
    "streamed": (ConversationDataLoader, "chats", {"streaming": True}),
}


def make(stores: Path, kind: str, **more: Any) -> Any:
    loader, name, options = KINDS[kind]
    return loader(stores / name, batch_size=3, **{**options, "pad_id": 9, "backend": "numpy", **more})


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_delivers_the_slices_of_its_batches(stores: Path, kind: str, prefetch: int) -> None:
    slicing: Any = "zigzag" if kind in ("padded", "by tokens", "streamed") else "zigzag_documents"
    shards = [Shard(dp=1, cp=2, rank=rank, context=slicing) for rank in range(2)]
    with (
        make(stores, kind) as whole,
        make(stores, kind, shard=shards[0]) as first,
        make(stores, kind, shard=shards[1], prefetch=prefetch) as second,
    ):
        count = 0
        for batch, *parts in zip(whole, first, second, strict=True):
            for part, wanted in zip(parts, slices_of(batch, 2, slicing, pad_id=9), strict=True):
                assert type(part) is ContextBatch
                for name, array in wanted.to_numpy().items():
                    np.testing.assert_array_equal(part.to_numpy()[name], array, name)
                assert part.num_tokens == wanted.num_tokens
            count += 1
        assert count > 3
        assert whole.state_dict() == first.state_dict() == second.state_dict()


def test_slices_come_by_every_way_a_loader_has(stores: Path) -> None:
    place: Any = {"dp": 1, "cp": 2, "rank": 1, "context": "contiguous"}
    with make(stores, "concat", **place) as loader:
        wanted = loader.get_batch().input_ids.tolist()
        loader.reset()
        assert next(iter(loader)).input_ids.tolist() == wanted
        assert loader[0].input_ids.tolist() == wanted
        again = pickle.loads(pickle.dumps(loader))  # noqa: S301
        assert again[0].input_ids.tolist() == wanted
        assert len(wanted[0]) == 16
    sources = {"a": stores / "text", "b": stores / "chats"}
    with MixedDataLoader(sources, chunk_size=32, batch_size=2, backend="numpy", **place) as mixed:
        assert mixed.get_batch().shift_labels.shape == (2, 16)


@pytest.mark.parametrize("backend", ["torch", "jax", "mlx"])
@pytest.mark.parametrize("slicing", SLICINGS)
def test_slices_are_equal_in_every_framework(stores: Path, backend: str, slicing: Any) -> None:
    pytest.importorskip("mlx.core" if backend == "mlx" else backend)
    place: Any = {"dp": 1, "cp": 2, "rank": 1, "context": slicing}
    found = []
    for name in ("numpy", backend):
        with make(stores, "packed", backend=name, **place) as loader:
            found.append(loader.get_batch())
    moved = found[1].to("cpu")
    assert type(moved) is ContextBatch
    for batch in (found[1], moved):
        for name, array in found[0].to_numpy().items():
            np.testing.assert_array_equal(batch.to_numpy()[name], array, name)
            assert np.asarray(batch.to_numpy()[name]).dtype == np.asarray(array).dtype
        assert batch.num_tokens == found[0].num_tokens


def test_num_tokens_of_a_slice_is_known_without_masks(stores: Path) -> None:
    fields = ["input_ids", "labels", "position_ids"]
    place: Any = {"dp": 1, "cp": 2, "rank": 0, "context": "zigzag"}
    with make(stores, "padded", **place) as whole, make(stores, "padded", fields=fields, **place) as loader:
        for batch, wanted in zip(loader, whole, strict=True):
            assert batch.attention_mask is None
            assert batch.num_tokens == wanted.num_tokens


def test_loaders_of_other_batches_refuse_slices(stores: Path) -> None:
    with pytest.raises(ConfigError, match=r"context='zigzag'.*preferences"):
        PreferenceDataLoader(stores / "text", context="zigzag")
    with pytest.raises(ConfigError, match="context is not an option"):
        RolloutDataLoader([], context="zigzag")
    with pytest.raises(ConfigError, match=r"zigzag_documents.*did you mean 'zigzag'"):
        make(stores, "concat", context="zigzg")
    with pytest.raises(SchemaError, match=r"position_ids.*fields"):
        make(stores, "concat", context="zigzag", fields=["input_ids", "labels"]).get_batch()
