"""What `verify_resume` passes, and above all what it does not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.batching.batch import TrainingBatch
from penstock.distributed.sharding import Strided
from penstock.errors import ConfigError, ResumeError
from penstock.files.states import with_checksum
from penstock.loaders.base import DataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.verification import verify_resume
from penstock.sinks import StoreSink

OPTIONS: dict[str, Any] = {"chunk_size": 16, "batch_size": 4, "backend": "numpy", "packing": "best_fit"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v") / "s"
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, 99, length).tolist() for length in rng.integers(1, 17, 120)]
    sink = StoreSink(path)
    sink.consume(pa.RecordBatch.from_pydict({"input_ids": pa.array(rows, pa.list_(pa.uint16()))}))
    sink.flush()
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": None, "pad_to_multiple_of": 8},
        {"packing": "concat", "drop_last": True},
        {"padding_free": True, "pad_to_multiple_of": 8},
        {"sharding": Strided()},
        {"packing": None, "max_tokens": 64},
        {"batch_size": 8, "seed": 3, "shuffle": False},
    ],
)
def test_a_loader_that_resumes_exactly_passes(store: Path, options: dict[str, Any]) -> None:
    report = verify_resume(
        lambda **more: PretrainDataLoader(store, **{**OPTIONS, **options, **more}), steps=40, stops=3
    )
    assert report.difference is None
    assert report.steps == 40
    assert report.epoch_ends
    assert report.stops >= 3 * len(report.runs)
    assert 0 < report.state_bytes < 4096
    if "max_tokens" not in options:
        assert {world for run in report.runs for world in run.worlds} == {1, 2, 4}
    report.check()


def test_the_end_of_a_long_epoch_is_among_what_is_compared(store: Path) -> None:
    def make(**more: Any) -> DataLoader:
        return PretrainDataLoader(store, **{**OPTIONS, "batch_size": 2, **more})

    with make() as loader:
        steps = len(loader)
    report = verify_resume(make, steps=8, worlds=[1, 2])
    assert steps > 8
    assert report.epoch_ends == (steps,)
    assert any(steps in run.stops for run in report.runs)


def test_a_mixture_with_edits_passes(store: Path) -> None:
    def make(**more: Any) -> DataLoader:
        loader = MixedDataLoader({"a": store, "b": store}, {"a": 0.7, "b": 0.3}, **{**OPTIONS, **more})
        loader.edit(loader.plan.skip(4, 7).ban({"a": [1, 2, 3]}).reweight(9, {"a": 0.1, "b": 0.9}))
        return loader

    assert verify_resume(make, steps=30, stops=5).difference is None


def test_ranks_that_cannot_share_a_batch_are_left_out_and_told(store: Path) -> None:
    report = verify_resume(lambda **more: PretrainDataLoader(store, **{**OPTIONS, **more}), steps=10, worlds=[1, 3])
    assert len(report.left_out) == 1
    assert re.search(r"3 ranks.*\b4 samples", report.left_out[0])
    budgeted = {**OPTIONS, "packing": None, "max_tokens": 64}
    report = verify_resume(lambda **more: PretrainDataLoader(store, **{**budgeted, **more}), steps=10, worlds=[1, 2])
    assert re.search(r"2 ranks.*max_tokens", report.left_out[0])


class _Forgetful(PretrainDataLoader):
    """One batch behind after a resume."""

    def load_state_dict(self, state: Mapping[str, Any], **more: Any) -> None:
        super().load_state_dict(state, **more)
        self.get_batch()


class _Lying(_Forgetful):
    """The same, and hides it."""

    def load_state_dict(self, state: Mapping[str, Any], **more: Any) -> None:
        self.loaded: dict[str, Any] | None = dict(state)
        super().load_state_dict(state, **more)

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        return super().get_batch(batch_size)

    def __iter__(self) -> Any:
        self.loaded = None
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return getattr(self, "loaded", None) or super().state_dict()


class _Different(PretrainDataLoader):
    """Labels that depend on the number of ranks."""

    def _iterate(self, *arguments: Any) -> Any:
        for batch in super()._iterate(*arguments):
            if self.rank.world_size == 2 and batch.labels is not None:
                batch.labels[0, -1] = 7
            yield batch


class _Huge(PretrainDataLoader):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": list(range(2000))}


class _RankState(PretrainDataLoader):
    def state_dict(self) -> dict[str, Any]:
        return with_checksum(super().state_dict() | {"rank": self.rank.rank})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Forgetful, r"state_dict\(\).*load_state_dict\(\)"),
        (_Lying, "prefetch=0"),
        (_Different, "prefetch=0"),
        (_Huge, "prefetch=0"),
        (_RankState, "prefetch=0"),
    ],
)
def test_a_loader_that_does_not_is_caught(store: Path, kind: Any, message: str) -> None:
    report = verify_resume(lambda **more: kind(store, **{**OPTIONS, **more}), steps=20)
    with pytest.raises(ResumeError, match=message):
        report.check()


def test_nothing_can_be_stopped_in_one_step(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"\bsteps\b"):
        verify_resume(lambda **more: PretrainDataLoader(store, **{**OPTIONS, **more}), steps=1)
    with pytest.raises(ConfigError, match=r"world size.*\b0\b"):
        verify_resume(lambda **more: PretrainDataLoader(store, **{**OPTIONS, **more}), steps=4, worlds=[0])
