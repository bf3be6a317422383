"""`device="cuda"` without a GPU: streams that refuse unordered use and memory that could be reused (`fake_cuda`)."""

from __future__ import annotations

import pickle
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from fake_cuda import DeviceTensor, FakeCuda, Stream
from penstock import PretrainDataLoader, RolloutDataLoader
from penstock.batching.backends import get_backend
from penstock.batching.backends.torch_device import PinnedMemory
from penstock.batching.collate import FIELDS
from penstock.batching.device import DeviceTransfer
from penstock.errors import ConfigError
from penstock.loaders import base
from penstock.loaders.base import DataLoader
from token_stores import make_rows, make_store


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    backend, module = get_backend("torch"), fake.module()
    monkeypatch.setattr(backend, "_torch", module)
    monkeypatch.setattr(backend, "_pinned", PinnedMemory(module))
    monkeypatch.setattr(backend, "_streams", {})
    return fake


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("device") / "store", make_rows(60, 12))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = make_rows(60, 12)
    masks = [[(token + place) % 3 > 0 for place, token in enumerate(row)] for row in rows]
    return make_store(tmp_path_factory.mktemp("device") / "masked", rows, masks)


def rollouts(**options: Any) -> RolloutDataLoader:
    rows = [
        {"prompt_ids": [1, 2], "response_ids": [3, 4 + number], "reward": number % 3, "group": number // 4}
        for number in range(24)
    ]
    return RolloutDataLoader(rows, batch_size=4, **options)


def make(kind: str, store: Path, **options: Any) -> DataLoader:
    if kind == "rollouts":
        return rollouts(**options)
    return PretrainDataLoader(store, chunk_size=8, batch_size=4, streaming=kind == "streaming", **options)


def tensors(batch: Any) -> dict[str, Any]:
    """Every field and array of the metadata that is on the device."""
    values = {name: getattr(batch, name) for name in FIELDS} | batch.metadata
    return {name: value for name, value in values.items() if isinstance(value, DeviceTensor) and value.is_cuda}


def use(batch: Any) -> None:
    """Read every array on the current stream, which fails if that is not ordered."""
    found = tensors(batch)
    assert "input_ids" in found
    for value in found.values():
        value.sum()


def on_host(value: Any) -> Any:
    return value.as_subclass(torch.Tensor).numpy() if isinstance(value, torch.Tensor) else value


OPTIONS = [
    {"prefetch": 0},
    {"prefetch": 2},
    {"prefetch": 2, "pin_memory": True},
    {"prefetch": None},
    {"prefetch": None, "pin_memory": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_a_batch_is_ordered_with_the_stream_that_is_current_where_it_is_taken(
    kind: str, options: dict[str, Any], store: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_SLOW_SECONDS", -1.0)  # with prefetch=None, a thread from the second batch on
    own, other = Stream(cuda, "own"), Stream(cuda, "other")
    with make(kind, store, device="cuda", **options) as loader:
        batches = iter(loader)
        for number in range(5):
            with cuda.stream(own if number < 3 else other):
                use(next(batches))
        use(next(batches))


@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_single_batches_are_ordered_with_the_current_stream_too(kind: str, store: Path, cuda: FakeCuda) -> None:
    with make(kind, store, device="cuda") as loader, cuda.stream(Stream(cuda, "own")):
        use(loader.get_batch())
        if kind != "streaming":
            use(loader[3])


def test_fields_that_are_read_later_are_ordered_on_any_stream(store: Path, cuda: FakeCuda) -> None:
    with make("indexed", store, device="cuda", packing="best_fit", truncation="split") as loader:
        with cuda.stream(Stream(cuda, "first")):
            batch = next(iter(loader))
            batch.input_ids.sum()
        with cuda.stream(Stream(cuda, "second")):
            for name in ("labels", "position_ids", "document_ids", "cu_seqlens", "loss_mask"):
                getattr(batch, name).sum()


def test_a_field_that_another_stream_reads_first_is_there_for_the_stream_that_received_the_batch(
    store: Path, cuda: FakeCuda
) -> None:
    main, side = Stream(cuda, "main"), Stream(cuda, "side")
    with make("indexed", store, device="cuda") as loader:
        with cuda.stream(main):
            taken = [next(iter(loader)), loader.get_batch(), loader[1]]
        for batch in taken:
            with cuda.stream(side):
                batch.labels.sum()
            with cuda.stream(main):
                batch.labels.sum()


def test_the_streams_of_this_file_notice_a_missing_wait(store: Path, cuda: FakeCuda) -> None:
    with make("indexed", store, device="cuda") as loader:
        ids = next(iter(loader)).input_ids
    with cuda.stream(Stream(cuda, "elsewhere")), pytest.raises(AssertionError, match="without waiting"):
        ids.sum()
    with pytest.raises(AssertionError, match="waits for the device"):
        ids.sum().item()


LAYOUTS: list[dict[str, Any]] = [
    {"packing": "concat"},
    {"packing": None},
    {"packing": None, "padding_side": "left"},
    {"packing": "best_fit"},
    {"packing": "best_fit", "padding_side": "left"},
    {"packing": "best_fit", "padding_free": True, "pad_to_multiple_of": 16},
    {"packing": None, "pad_id": 70_000},
    {"packing": "concat", "fields": ("input_ids", "labels")},
    {"packing": "best_fit", "fields": ("input_ids", "attention_mask", "num_items_in_batch")},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("which", ["store", "masked"])
def test_fields_that_are_made_on_the_device_are_those_of_the_host(
    which: str, layout: dict[str, Any], store: Path, masked: Path, cuda: FakeCuda
) -> None:
    path = {"store": store, "masked": masked}[which]
    # The last global batch leaves this rank without rows.
    shared = {**layout, "rank": 2, "world_size": 3, "chunk_size": 12, "batch_size": 5}
    with PretrainDataLoader(path, backend="numpy", **shared) as here:
        expected = [{name: getattr(batch, name) for name in FIELDS} for batch in here]
    with PretrainDataLoader(path, device="cuda", **shared) as there:
        found = [{name: on_host(getattr(batch, name)) for name in FIELDS} for batch in there]
    assert len(found) == len(expected) > 2
    for got, wanted in zip(found, expected):
        for name in FIELDS:
            np.testing.assert_array_equal(got[name], wanted[name], strict=isinstance(wanted[name], np.ndarray))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("which", ["store", "masked"])
def test_batches_of_one_shape_cross_as_one_and_have_the_fields_of_the_host(
    which: str, layout: dict[str, Any], store: Path, masked: Path, cuda: FakeCuda
) -> None:
    path = {"store": store, "masked": masked}[which]
    options = {**layout, "chunk_size": 12, "batch_size": 5}
    with PretrainDataLoader(path, backend="numpy", **options) as here:
        expected = [{name: getattr(batch, name) for name in FIELDS} for batch in here]
    with PretrainDataLoader(path, prefetch=0, **options) as there:
        count = len(there)
        alone = [there.get_batch() for _ in range(count)]  # each is collated by itself
        shapes = [batch.compact.ids.shape for batch in alone]
        sent = DeviceTransfer(replace(there.options, device="cuda")).send_several(alone)
    if len(set(shapes)) == 1 and not layout.get("padding_free"):
        assert len(cuda.copies) == 1
    for batch, wanted in zip(reversed(sent), reversed(expected)):
        for name in FIELDS:
            found = on_host(getattr(batch, name))
            np.testing.assert_array_equal(found, wanted[name], strict=isinstance(wanted[name], np.ndarray))


def test_a_batch_of_tokens_crosses_in_one_copy_as_narrow_as_the_store(store: Path, cuda: FakeCuda) -> None:
    import pyarrow as pa

    narrow = make_store(store.parent / "narrow", make_rows(40, 8, shortest=8), dtype=pa.uint16())
    with make("indexed", narrow, device="cuda") as loader:
        use(next(iter(loader)))
    assert cuda.copies == [(64, True, True)]  # 4 rows of 8 tokens, 2 bytes each


def test_a_field_is_a_tensor_of_its_own_for_each_batch_and_each_move(store: Path, cuda: FakeCuda) -> None:
    with make("indexed", store) as loader:
        hosts = [batch for batch, _ in zip(loader, range(3))]
        moved = [batch.to("cuda") for batch in [*hosts, *hosts]]
        for name in ("input_ids", "labels", "loss_mask"):
            made = [getattr(batch, name) for batch in moved]
            storages = {array.as_subclass(torch.Tensor).untyped_storage().data_ptr() for array in made}
            assert len(storages) == len(made)
            assert all(array.untyped_storage().nbytes() == array.nbytes for array in made)
            for array, host in zip(made, [*hosts, *hosts]):
                assert on_host(array).tolist() == on_host(getattr(host, name)).tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_that_cross_together_take_a_small_part_of_the_budget(
    prefetch: int, tmp_path: Path, cuda: FakeCuda
) -> None:
    even = make_store(tmp_path / "even", make_rows(60, 8, shortest=8))  # 15 batches of 64 bytes
    for budget, most in ((None, 512), ("2 KiB", 256), ("512", 64)):
        cuda.copies.clear()
        with make("indexed", even, device="cuda", prefetch=prefetch, budget=budget) as loader:
            for batch in loader:
                use(batch)
        assert max(nbytes for nbytes, _, _ in cuda.copies) == most


@pytest.mark.parametrize("made_in", ["send", "read"])
def test_a_batch_that_an_evaluation_reads_leaves_the_others_for_training(
    made_in: str, store: Path, cuda: FakeCuda
) -> None:
    with make("indexed", store) as loader:
        hosts = [batch for batch, _ in zip(loader, range(5))][-2:]
        moved = [batch.to("cuda") for batch in hosts] if made_in == "read" else []
        with torch.inference_mode():
            moved = moved or [batch.to("cuda") for batch in hosts]
            assert tensors(moved[0])
        assert not [name for name, value in tensors(moved[1]).items() if value.is_inference()]


def test_the_number_of_tokens_is_known_without_reading_the_device(store: Path, cuda: FakeCuda) -> None:
    for kind in ("indexed", "streaming", "rollouts"):
        with make(kind, store, device="cuda") as loader:
            batch = next(iter(loader))
            assert batch.num_tokens > 0
            assert isinstance(batch.max_seqlen, int | None)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_cuda_is_the_current_device_of_the_thread_that_begins_the_loop(
    kind: str, prefetch: int, store: Path, cuda: FakeCuda
) -> None:
    with make(kind, store, device="cuda", prefetch=prefetch) as loader:
        cuda.set_device(3)
        batches = iter(loader)
        taken = [next(batches), next(batches)]
        cuda.set_device(1)
        taken.append(next(batches))
        assert {str(value.device) for batch in taken for value in tensors(batch).values()} == {"cuda:3"}
        assert str(loader.get_batch().input_ids.device) == "cuda:1"


def test_a_device_with_a_number_stays_what_it_is(store: Path, cuda: FakeCuda) -> None:
    for given in ("cuda:2", torch.device("cuda", 2)):
        with make("indexed", store, device=given) as loader:
            assert str(loader.get_batch().input_ids.device) == "cuda:2"


def test_a_batch_that_is_moved_by_hand_keeps_what_was_changed(store: Path, cuda: FakeCuda) -> None:
    with make("indexed", store) as loader:
        batch = next(iter(loader))
    batch.labels[:, 3] = -100
    batch.position_ids = None
    batch["other"] = get_backend("torch").from_numpy(np.arange(3))
    moved = batch.to("cuda")
    assert on_host(moved.labels).tolist() == batch.labels.tolist()
    assert moved.position_ids is None
    assert on_host(moved["other"]).tolist() == [0, 1, 2]
    assert on_host(moved.loss_mask)[:, 3].all()  # fields are independent of each other
    assert (moved.num_tokens, moved.metadata.keys()) == (batch.num_tokens, batch.metadata.keys())


def test_a_batch_on_the_cpu_needs_no_streams(store: Path, cuda: FakeCuda) -> None:
    cuda.pinned_left = 0  # a warning if any is asked for
    with make("indexed", store, device="cpu", prefetch=2) as loader:
        assert sum(1 for _ in loader) == len(loader)
    assert not cuda.copies


def test_without_pinned_memory_batches_are_copied_from_plain_memory_and_it_is_said_once(
    store: Path, cuda: FakeCuda
) -> None:
    cuda.pinned_left = 0
    with make("indexed", store, device="cuda") as loader, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in loader:
            use(batch)
    assert ["page-locked" in str(each.message) for each in said] == [True]
    assert get_backend("torch")._pinned.refused > 1  # type: ignore[attr-defined]
    assert not any(pinned for _, pinned, _ in cuda.copies)


@pytest.mark.parametrize("device", ["cuda:7", "cuda"])
def test_a_device_that_is_not_there_is_named(device: str, store: Path, cuda: FakeCuda) -> None:
    if device == "cuda":
        cuda.current_device = broken  # type: ignore[method-assign]
    with make("indexed", store, device=device) as loader, pytest.raises(ConfigError, match=device):
        next(iter(loader))


def broken() -> int:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing ...")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_without_cuda_is_named(store: Path) -> None:
    with make("indexed", store, device="cuda") as loader, pytest.raises(ConfigError, match="device='cuda'"):
        next(iter(loader))


def test_a_thread_uses_the_device_of_the_loop(store: Path, cuda: FakeCuda) -> None:
    cuda.set_device(2)
    found: list[str] = []
    with make("indexed", store, device="cuda", prefetch=2) as loader:
        batches = iter(loader)
        thread = threading.Thread(target=lambda: found.append(str(next(batches).input_ids.device)))
        first = next(batches)
        thread.start()
        thread.join()
    assert [str(first.input_ids.device), *found] == ["cuda:2", "cuda:2"]


def test_a_batch_that_was_taken_holds_nothing_that_cannot_be_pickled(store: Path) -> None:
    with make("indexed", store, prefetch=0) as loader:
        batch = next(iter(loader))
        copy = pickle.loads(pickle.dumps(batch))  # noqa: S301 - our own
    assert copy.labels.tolist() == batch.labels.tolist()
    assert batch._pending_copy is None


@pytest.mark.usefixtures("cuda")
def test_one_number_of_any_stride_is_pinned() -> None:
    backend = get_backend("torch")
    for array in (torch.tensor([7]).as_strided((1, 1), (0, 0)), np.array([[7]]), torch.arange(4).reshape(2, 2).T):
        pinned = backend.pin_memory(array)
        assert torch.equal(pinned, torch.as_tensor(array))
