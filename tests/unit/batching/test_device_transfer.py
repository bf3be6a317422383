"""`device="cuda"` without a GPU: a recorder in the place of `torch.cuda` tells what was done on which stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import PretrainDataLoader, RolloutDataLoader
from penstock.batching.backends import get_backend
from penstock.loaders import base
from penstock.loaders.base import DataLoader
from token_stores import make_rows, make_store

torch = pytest.importorskip("torch")


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_event(self) -> Event:
        event = Event(self)
        self.cuda.note("record", self, event)
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.note("wait", self, event)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream


class Cuda:
    """What `torch.cuda` keeps for each thread: a current device, and a current stream of each device."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Stream, Any, int]] = []
        """What was done, on which stream, with what, by which thread; in order."""
        self._thread = threading.local()
        self._defaults: dict[int, Stream] = {}

    def note(self, what: str, stream: Stream, thing: Any) -> None:
        self.log.append((what, stream, thing, threading.get_ident()))

    def set_device(self, index: int) -> None:
        self._thread.device = index

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def current_stream(self, device: Any) -> Stream:
        own = getattr(self._thread, "stream", None)
        return own or self._defaults.setdefault(device.index, Stream(self, f"default of {device}"))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = getattr(self._thread, "stream", None), stream
        try:
            yield
        finally:
            self._thread.stream = before


def tensor_type(cuda: Cuda) -> Any:
    class Tensor(torch.Tensor):  # type: ignore[misc,name-defined]
        place = torch.device("cpu")

        @property
        def device(self) -> Any:
            return self.place

        def to(self, device: Any, non_blocking: bool = False) -> Any:
            moved = self.as_subclass(torch.Tensor).clone().as_subclass(Tensor)
            moved.place = torch.device(device)
            if moved.place.type == "cuda":
                assert moved.place.index is not None, "a thread of its own would take this for another device"
                cuda.note("copy", cuda.current_stream(moved.place), moved)
            moved.waited = not non_blocking
            return moved

        def pin_memory(self) -> Any:
            return self.as_subclass(torch.Tensor).clone().as_subclass(Tensor)

        def record_stream(self, stream: Stream) -> None:
            cuda.note("use", stream, self)

    return Tensor


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    kind = tensor_type(cuda)
    accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"))
    fake = SimpleNamespace(
        from_numpy=lambda array: torch.from_numpy(array).as_subclass(kind),
        device=torch.device,
        cuda=cuda,
        accelerator=accelerator,
    )
    monkeypatch.setattr(get_backend("torch"), "_torch", fake)
    return cuda


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("device") / "store", make_rows(60, 12))


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


def on_device(batch: Any) -> list[Any]:
    """Every tensor of a batch, found without asking the batch which there are."""
    values = [*vars(batch).values(), *batch.metadata.values(), *vars(batch)["_others"].values()]
    return [value for value in values if isinstance(value, torch.Tensor) and value.device.type == "cuda"]


def check_ordered(cuda: Cuda, batch: Any, stream: Stream) -> None:
    """That `stream` may use the batch: what was done until now, in this thread, lets it."""
    done = list(cuda.log)
    here, tensors = threading.get_ident(), on_device(batch)
    assert tensors
    for tensor in tensors:
        at, copied_on = next((i, one) for i, (what, one, it, _) in enumerate(done) if what == "copy" and it is tensor)
        if copied_on is stream:
            continue
        behind = [it for what, one, it, _ in done[at:] if what == "record" and one is copied_on]
        waited = [it for what, one, it, by in done if what == "wait" and one is stream and by == here]
        assert set(behind) & set(waited), "the stream does not wait for the copy"
        assert ("use", stream, here) in [(what, one, by) for what, one, it, by in done if it is tensor]


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
    kind: str, options: dict[str, Any], store: Path, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_SLOW_SECONDS", -1.0)  # with prefetch=None, a thread from the second batch on
    own, other = Stream(cuda, "own"), Stream(cuda, "other")
    with make(kind, store, device="cuda", **options) as loader:
        batches = iter(loader)
        for number in range(5):
            stream = own if number < 3 else other
            with cuda.stream(stream):
                batch = next(batches)
                check_ordered(cuda, batch, stream)
        check_ordered(cuda, next(batches), cuda.current_stream(torch.device("cuda", 0)))
    threads = {by for what, _, _, by in cuda.log if what == "copy"} - {threading.get_ident()}
    assert bool(threads) == (options["prefetch"] != 0)


@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_single_batches_are_ordered_with_the_current_stream_too(kind: str, store: Path, cuda: Cuda) -> None:
    own = Stream(cuda, "own")
    with make(kind, store, device="cuda") as loader, cuda.stream(own):
        check_ordered(cuda, loader.get_batch(), own)
        if kind != "streaming":
            check_ordered(cuda, loader[3], own)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ["indexed", "streaming", "rollouts"])
def test_cuda_is_the_current_device_of_the_thread_that_begins_the_loop(
    kind: str, prefetch: int, store: Path, cuda: Cuda
) -> None:
    with make(kind, store, device="cuda", prefetch=prefetch) as loader:
        cuda.set_device(3)
        batches = iter(loader)
        taken = [next(batches), next(batches)]
        cuda.set_device(1)
        taken.append(next(batches))
        assert {str(tensor.device) for batch in taken for tensor in on_device(batch)} == {"cuda:3"}
        assert str(loader.get_batch().input_ids.device) == "cuda:1"


def test_a_device_with_a_number_stays_what_it_is(store: Path, cuda: Cuda) -> None:
    for given in ("cuda:2", torch.device("cuda", 2)):
        with make("indexed", store, device=given) as loader:
            assert str(loader.get_batch().input_ids.device) == "cuda:2"


def test_a_copy_to_main_memory_is_waited_for(store: Path, cuda: Cuda) -> None:
    with make("indexed", store, device="cuda", pin_memory=True) as loader:
        batch = loader.get_batch()
    assert not batch.input_ids.waited
    assert batch.to("cpu", non_blocking=True).input_ids.waited


def test_a_batch_on_the_cpu_needs_no_streams(store: Path, cuda: Cuda) -> None:
    with make("indexed", store, device="cpu", prefetch=2) as loader:
        assert sum(1 for _ in loader) == len(loader)
    assert not cuda.log


def test_a_batch_that_was_taken_holds_nothing_that_cannot_be_pickled(store: Path, cuda: Cuda) -> None:
    with make("indexed", store, device="cuda", prefetch=2) as loader:
        assert not any(isinstance(value, Event) for value in vars(next(iter(loader))).values())
        assert next(iter(loader))._pending_copy is None
