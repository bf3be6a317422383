"""The contract of loaders that is shipped for plugin authors passes ours, and notices what it is there to notice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.streamed.reader import StreamOptions
from penstock.order.schedules import Schedule
from penstock.testing import assert_loader_contract
from token_stores import make_masks, make_rows, make_store

LENGTH = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("kit")
    rows = make_rows(50, LENGTH)
    make_store(home / "text", rows)
    make_store(home / "more", make_rows(20, LENGTH, seed=1))
    make_store(home / "chat", rows, make_masks(rows))
    return home


@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_loaders_of_documents_pass(home: Path, packing: Any) -> None:
    def make(**options: Any) -> DataLoader:
        return PretrainDataLoader(home / "text", None, LENGTH, packing=packing, backend="numpy", **options)

    assert_loader_contract(make, worlds=(1, 2, 4))


@pytest.mark.parametrize("padding_free", [False, True])
def test_loaders_of_conversations_pass(home: Path, padding_free: bool) -> None:
    fixed: dict[str, Any] = {"packing": "best_fit", "padding_free": padding_free, "backend": "numpy"}
    assert_loader_contract(lambda **more: ConversationDataLoader(home / "chat", None, LENGTH, **fixed, **more))


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted_without_replacement", "never"])
def test_mixtures_pass(home: Path, stopping: str) -> None:
    schedule = Schedule.of([(0, {"a": 3, "b": 1}), (5, {"a": 1, "b": 1})], "linear")
    sources = {"a": home / "text", "b": home / "more"}
    fixed: dict[str, Any] = {"chunk_size": LENGTH, "stopping_strategy": stopping, "backend": "numpy"}
    assert_loader_contract(lambda **more: MixedDataLoader(sources, schedule, **fixed, **more), seed=4)


def test_batches_by_tokens_and_data_that_end_pass(home: Path) -> None:
    fixed: dict[str, Any] = {"packing": None, "backend": "numpy"}
    assert_loader_contract(
        lambda **more: PretrainDataLoader(home / "text", None, LENGTH, max_tokens=64, **fixed, **more)
    )
    once: dict[str, Any] = {"chunk_size": LENGTH, "max_epochs": 1, "stopping_strategy": "all_exhausted"}
    sources = {"a": home / "text", "b": home / "more"}
    assert_loader_contract(lambda **more: MixedDataLoader(sources, {"a": 1, "b": 1}, backend="numpy", **once, **more))


@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_streams_pass(home: Path, packing: Any) -> None:
    fixed: dict[str, Any] = {"packing": packing, "streaming": StreamOptions(streams=8, shuffle_window=8)}

    def make(**options: Any) -> DataLoader:
        return PretrainDataLoader(home / "text", None, LENGTH, backend="numpy", **fixed, **options)

    assert_loader_contract(make)


class ForgetsTheEpoch(PretrainDataLoader):
    """Goes on in the first epoch."""

    def load_state_dict(self, state: Mapping[str, Any], **more: Any) -> None:
        super().load_state_dict(state, **more)
        self.seek(self.step - self.plan.seek_epoch(self.epoch).step)


class ForgetsItInSilence(ForgetsTheEpoch):
    """And says that it had not."""

    loaded: Mapping[str, Any] | None = None

    def load_state_dict(self, state: Mapping[str, Any], **more: Any) -> None:
        super().load_state_dict(state, **more)
        self.loaded = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loaded) if self.loaded is not None else super().state_dict()


class ShufflesByTime(PretrainDataLoader):
    """Another order whenever it is made, under one name."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, seed=time.time_ns(), **options)
        self.plan.__dict__["fingerprint"] = "0" * 16


class NoticesRanks(PretrainDataLoader):
    """Labels of its own for the second of two ranks."""

    def __iter__(self) -> Iterator[TrainingBatch]:
        for batch in super().__iter__():
            if self.rank.rank == 1 and batch.labels is not None:
                batch.labels = np.where(batch.labels == -100, 0, batch.labels)
            yield batch


class NoticesPrefetch(PretrainDataLoader):
    """Positions from 1 when batches are made ahead."""

    def __iter__(self) -> Iterator[TrainingBatch]:
        for batch in super().__iter__():
            if self.options.prefetch and batch.position_ids is not None:
                batch.position_ids = batch.position_ids + 1
            yield batch


class LosesOne(PretrainDataLoader):
    """A batch is missing on the second rank."""

    def __iter__(self) -> Iterator[TrainingBatch]:
        return (batch for batch in super().__iter__() if self.rank.rank == 0 or batch.metadata["step"] != 7)


class Talkative(PretrainDataLoader):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": list(range(self.step, 2000))}


class NotPlain(PretrainDataLoader):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rows": {1, 2, 3}}


class Boastful(PretrainDataLoader):
    def __len__(self) -> int:
        return super().__len__() + 1


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (ForgetsTheEpoch, "prefetch=2"),
        (
            ForgetsItInSilence,
            "prefetch=2",
        ),
        (ShufflesByTime, r"get_batch\(\)"),
        (NoticesRanks, "prefetch=0"),
        (NoticesPrefetch, r"prefetch=2.*position_ids"),
        (LosesOne, r"rank 1\b"),
        (Talkative, r"\b4096\b"),
        (NotPlain, r"\bJSON\b"),
        (Boastful, r"len\(\)"),
    ],
)
def test_a_loader_that_breaks_a_promise_is_caught(home: Path, kind: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        assert_loader_contract(lambda **more: kind(home / "text", None, LENGTH, backend="numpy", **more))


class Empty(PretrainDataLoader):
    def __iter__(self) -> Iterator[TrainingBatch]:
        return iter(())


def test_a_loader_without_batches_is_no_proof(home: Path) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        assert_loader_contract(lambda **more: Empty(home / "text", None, LENGTH, backend="numpy", **more))


@pytest.mark.parametrize("worlds", [(), (1, 0)])
def test_a_world_without_ranks_is_refused(home: Path, worlds: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="worlds"):
        assert_loader_contract(lambda **more: PretrainDataLoader(home / "text", None, LENGTH, **more), worlds=worlds)
