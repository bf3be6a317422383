"""Batches on a GPU, read on a stream of one's own behind other work: the values are those of the host."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock import MLXDataLoader, PretrainDataLoader, RolloutDataLoader
from token_stores import make_rows, make_store

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BATCHES = 60
CYCLES = 20_000_000
"""About 10 ms of a GPU."""
ROWS, TOKENS = 16, 1024


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow as pa

    rows = make_rows(3 * ROWS * BATCHES, TOKENS, shortest=TOKENS // 2)
    return make_store(tmp_path_factory.mktemp("cuda") / "store", rows, dtype=pa.uint32())


def make(kind: str, store: Path, **options: Any) -> Any:
    if kind == "samples":
        rows = [{"input_ids": list(range(number, number + 256))} for number in range(ROWS * BATCHES)]
        chosen = {name: value for name, value in options.items() if name in ("pin_memory", "backend")}
        return MLXDataLoader(rows, batch_size=ROWS, **chosen)
    if kind == "rollouts":
        rollouts = [
            {"prompt_ids": [1] * 64, "response_ids": [number] * 512, "reward": number % 3, "group": number // 4}
            for number in range(ROWS * BATCHES)
        ]
        return RolloutDataLoader(rollouts, batch_size=ROWS, **options)
    return PretrainDataLoader(
        store, chunk_size=TOKENS, batch_size=ROWS, streaming=kind == "streaming", packing="best_fit", **options
    )


def read(batch: Any) -> Any:
    """One number that depends on every value of the fields, computed where the batch is."""
    found = batch.input_ids.sum()
    if batch.labels is not None:
        found = found + 5 * batch.labels.sum()
    if batch.document_ids is not None:
        found = found + 7 * batch.document_ids.long().sum()
    if "response_mask" in batch.metadata:
        found = found + 11 * batch.metadata["response_mask"].long().sum()
    return found


def on_host(kind: str, store: Path) -> list[int]:
    with make(kind, store, backend="torch", prefetch=0) as loader:
        return [int(read(batch)) for batch in islice(loader, BATCHES)]


COMBINATIONS = [
    *(
        (kind, options, False)
        for kind in ("indexed", "streaming", "rollouts")
        for options in (
            {},
            {"pin_memory": True},
            {"prefetch": 2},
            {"prefetch": 2, "pin_memory": True},
            {"prefetch": 0, "pin_memory": True},
        )
    ),
    *((kind, {"pin_memory": True, "prefetch": 2}, True) for kind in ("indexed", "streaming", "rollouts")),
    ("samples", {"pin_memory": True}, True),
]


@pytest.mark.parametrize(("kind", "options", "by_hand"), COMBINATIONS, ids=str)
def test_a_stream_of_its_own_reads_what_the_host_has(
    kind: str, options: dict[str, Any], by_hand: bool, store: Path
) -> None:
    expected = on_host(kind, store)
    assert len(expected) == BATCHES
    stream, found = torch.cuda.Stream(), []
    device = {} if by_hand else {"device": "cuda"}
    with make(kind, store, backend="torch", **options, **device) as loader, torch.cuda.stream(stream):
        for batch in islice(loader, BATCHES):
            moved = batch.to("cuda", non_blocking=True) if by_hand else batch
            assert moved.input_ids.is_cuda
            torch.cuda._sleep(CYCLES)
            found.append(read(moved))
            del batch, moved
    torch.cuda.synchronize()
    wrong = [number for number, (got, wanted) in enumerate(zip(found, expected)) if int(got) != wanted]
    assert not wrong


def test_a_loop_that_changes_its_stream_reads_what_the_host_has(store: Path) -> None:
    expected = on_host("indexed", store)
    streams, found = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()], []
    with make("indexed", store, device="cuda", pin_memory=True, prefetch=2) as loader:
        batches = iter(loader)
        for number in range(BATCHES):
            with torch.cuda.stream(streams[number % 3]):
                batch = next(batches)
                torch.cuda._sleep(CYCLES // 3)
                found.append(read(batch))
                del batch
    torch.cuda.synchronize()
    assert [int(got) for got in found] == expected


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"pin_memory": True}], ids=str)
@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_a_whole_epoch_needs_no_synchronization(kind: str, options: dict[str, Any], store: Path) -> None:
    with make(kind, store, device="cuda", **options) as loader:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            total = torch.zeros((), dtype=torch.int64, device="cuda")
            for batch in loader:
                total += read(batch)
                assert batch.num_tokens > 0
                for name in ("attention_mask", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
                    getattr(batch, name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert int(total)


def test_a_graph_is_captured_and_replayed_while_batches_are_made(store: Path) -> None:
    expected = on_host("indexed", store)
    with make("indexed", store, device="cuda", prefetch=2) as loader:
        batches = iter(loader)
        static = next(batches)
        ids, labels, documents = static.input_ids.clone(), static.labels.clone(), static.document_ids.clone()
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(3):
                found = ids.sum() + 5 * labels.sum() + 7 * documents.long().sum()
        torch.cuda.current_stream().wait_stream(warm)
        graph, results = torch.cuda.CUDAGraph(), [int(found)]
        with torch.cuda.graph(graph):
            found = ids.sum() + 5 * labels.sum() + 7 * documents.long().sum()
        for batch in islice(batches, BATCHES - 1):
            ids.copy_(batch.input_ids)
            labels.copy_(batch.labels)
            documents.copy_(batch.document_ids)
            graph.replay()
            results.append(int(found))
    assert results == expected


def test_fields_on_the_device_are_those_of_the_host(store: Path) -> None:
    from penstock.batching.collate import FIELDS

    for layout in ({"packing": "concat"}, {"packing": None}, {"packing": "best_fit", "padding_free": True}):
        shared: dict[str, Any] = {"chunk_size": TOKENS, "batch_size": ROWS, **layout}
        with PretrainDataLoader(store, **shared) as here, PretrainDataLoader(store, device="cuda", **shared) as there:
            for mine, other in zip(islice(here, 10), islice(there, 10)):
                for name in FIELDS:
                    wanted, got = getattr(mine, name), getattr(other, name)
                    assert torch.equal(got.cpu(), wanted) if isinstance(wanted, torch.Tensor) else got == wanted, name
