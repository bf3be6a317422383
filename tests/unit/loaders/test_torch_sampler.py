"""torch's DataLoader and StatefulDataLoader around a loader: each loop is the next epoch, and resume is exact."""

from __future__ import annotations

import copy
import json
import os
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from penstock import MixedDataLoader, MLXDataLoader, PretrainDataLoader, RolloutDataLoader
from penstock.errors import ConfigError, ResumeError
from token_stores import make_rows, make_store

torch = pytest.importorskip("torch")
Batches = list[tuple[int, int, list[list[int]]]]
KINDS = ("rows", "packed", "mixed", "samples", "rollouts")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),  # Python 3.12 says so of any fork
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),  # JAX, started by another test
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers here are forked"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sampler")
    make_store(home / "text", make_rows(37, 12))
    make_store(home / "other", [[token + 1000 for token in row] for row in make_rows(19, 12, seed=5)])
    return home


def make(kind: str, home: Path, **more: Any) -> Any:
    options: dict[str, Any] = {"batch_size": 4, "backend": "torch", **more}
    if kind == "samples":
        rows = [{"input_ids": list(range(number, number + 1 + number % 5))} for number in range(23)]
        return MLXDataLoader(rows, gradient_accumulation_steps=2, **options)
    if kind == "rollouts":
        rollouts = [
            {"prompt_ids": [1, 2], "response_ids": [3, number], "reward": number % 3, "group": number // 2}
            for number in range(22)
        ]
        return RolloutDataLoader(rollouts, **options)
    if kind == "mixed":
        return MixedDataLoader({"text": home / "text", "other": home / "other"}, [2, 1], chunk_size=12, **options)
    packing = {"rows": None, "packed": "best_fit"}[kind]
    return PretrainDataLoader(home / "text", chunk_size=12, packing=packing, **options)


def seen(batches: Any) -> Batches:
    return [(batch.metadata["epoch"], batch.metadata["step"], batch.input_ids.tolist()) for batch in batches]


def epochs(kind: str, home: Path, count: int = 3) -> list[Batches]:
    with make(kind, home) as loader:
        return [seen(loader) for _ in range(count)]


def wrapped(loader: Any, workers: int = 0, *, kind: Any = None, **more: Any) -> Any:
    options: dict[str, Any] = {"batch_size": None, "sampler": loader.sampler(), "num_workers": workers, **more}
    if workers:
        options["multiprocessing_context"] = "fork"
    return (kind or torch.utils.data.DataLoader)(loader, **options)


def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.parametrize("kind", KINDS)
def test_every_loop_over_a_torch_dataloader_is_the_next_epoch(kind: str, home: Path) -> None:
    expected = epochs(kind, home)
    assert expected[0] != expected[1] != expected[2]
    with make(kind, home) as loader:
        around = wrapped(loader)
        assert [(len(around), seen(around)) for _ in range(3)] == [(len(epoch), epoch) for epoch in expected]
        assert loader.epoch == 3


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_after_an_epoch_are_those_of_a_plain_loop(kind: str, home: Path) -> None:
    with make(kind, home) as plain, make(kind, home) as loader:
        assert seen(plain) == seen(wrapped(loader))
        expected, found, later = plain.metrics(), loader.metrics(), loader.metrics()
    for name in ("step", "epoch", "steps_total", "tokens_total"):
        assert found[f"penstock_loader_{name}"] == expected[f"penstock_loader_{name}"], name
    trained = "penstock_loader_train_seconds_total"
    assert found[trained] == later[trained]  # nothing is trained after the loop


@pytest.mark.parametrize("persistent", [False, True])
def test_every_loop_over_worker_processes_is_the_next_epoch(persistent: bool, home: Path) -> None:
    expected = epochs("packed", home)
    with make("packed", home) as loader:
        around = wrapped(loader, 2, persistent_workers=persistent)
        assert [seen(around) for _ in range(3)] == expected


def test_set_epoch_before_every_loop_changes_nothing_and_is_obeyed(home: Path) -> None:
    expected = epochs("rows", home)
    with make("rows", home) as loader:
        around = wrapped(loader)
        for epoch in (0, 1, 2, 0, 0, 2):
            around.sampler.set_epoch(epoch)
            assert seen(around) == expected[epoch]


def test_a_loop_that_is_left_early_is_over(home: Path) -> None:
    expected = epochs("rows", home)
    with make("rows", home) as loader:
        around = wrapped(loader)
        assert seen(islice(around, 2)) == expected[0][:2]
        assert seen(around) == expected[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_dataloader_goes_on_from_a_state_of_the_loader(kind: str, home: Path) -> None:
    expected = epochs(kind, home)
    with make(kind, home) as loader:
        first, second = iter(loader), len(expected[0])
        for _ in range(second):
            next(first)
        state = json.loads(json.dumps(loader.state_dict()))
        seen(islice(loader, 3))
        middle = json.loads(json.dumps(loader.state_dict()))
    for saved, rest in ((state, expected[1]), (middle, expected[1][3:])):
        with make(kind, home) as loader:
            loader.load_state_dict(saved)
            around = wrapped(loader)
            assert [seen(around), seen(around)] == [rest, expected[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_the_loader_is_that_behind_the_last_batch_in_one_process(kind: str, home: Path) -> None:
    with make(kind, home) as plain, make(kind, home) as loader:
        around = wrapped(loader)
        for _ in range(2):
            for _, _ in zip(plain, around, strict=True):
                assert loader.state_dict() == plain.state_dict()
        batches = iter(around)
        one, two = seen([next(batches), next(batches)]), seen(islice(plain, 2))
        assert one == two
        assert seen(loader) == seen(plain)  # and on without torch


def test_the_state_of_the_loader_is_refused_where_workers_make_the_batches(home: Path) -> None:
    expected = epochs("rows", home)
    with make("rows", home) as loader:
        batches = iter(wrapped(loader, 2))
        last = [next(batches) for _ in range(3)][-1]
        with pytest.raises(ResumeError, match="StatefulDataLoader"):
            loader.state_dict()
        del batches
        loader.seek(last.metadata["step"] + 1)
        state = loader.state_dict()
    with make("rows", home) as loader:
        loader.load_state_dict(state)
        assert seen(wrapped(loader)) == expected[0][3:]


@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [*((kind, 0, False) for kind in KINDS), ("packed", 2, False), ("packed", 2, True)],
)
def test_a_stateful_dataloader_resumes_in_its_second_epoch(
    kind: str, workers: int, persistent: bool, home: Path
) -> None:
    make_one, expected = stateful(), epochs(kind, home)
    options = {"persistent_workers": persistent} if workers else {}
    with make(kind, home) as loader:
        around = wrapped(loader, workers, kind=make_one, **options)
        seen(around)
        between = copy.deepcopy(around.state_dict())
        batches = iter(around)
        assert seen([next(batches), next(batches)]) == expected[1][:2]
        middle = copy.deepcopy(around.state_dict())
        del batches
    for saved, rest in ((between, expected[1]), (middle, expected[1][2:])):
        with make(kind, home) as loader:
            around = wrapped(loader, workers, kind=make_one, **options)
            around.load_state_dict(saved)
            assert seen(around) == rest
            assert seen(around) == expected[2]


def test_a_stateful_dataloader_refuses_a_state_of_other_data(home: Path) -> None:
    with make("rows", home) as loader, make("rows", home, seed=1) as other:
        around = wrapped(loader, kind=stateful())
        seen(islice(around, 2))
        there = wrapped(other, kind=stateful())
        there.load_state_dict(around.state_dict())
        with pytest.raises(ResumeError):
            next(iter(there))


@pytest.mark.parametrize("given", [{}, {"shuffle": True}, {"sampler": range(2, 5)}, {"batch_size": 1}], ids=str)
def test_numbers_without_an_epoch_are_refused(given: dict[str, Any], home: Path) -> None:
    with make("rows", home) as loader:
        with pytest.raises(ConfigError, match=r"sampler\(\)"):
            next(iter(torch.utils.data.DataLoader(loader, **{"batch_size": None, **given})))
        assert loader[2].metadata["step"] == 2  # which anybody else may ask for
        with pytest.raises(ConfigError, match=r"sampler\(\)"):
            next(iter(stateful()(loader, **{"batch_size": None, **given})))


def test_batches_of_batches_are_refused(home: Path) -> None:
    with make("rows", home) as loader, pytest.raises(ConfigError, match="batch_size=None"):
        next(iter(torch.utils.data.DataLoader(loader, sampler=loader.sampler())))


def test_a_mixture_that_ends_ends_for_torch_too(home: Path) -> None:
    sources = {"text": home / "text", "other": home / "other"}
    options: dict[str, Any] = {"chunk_size": 12, "batch_size": 4, "max_epochs": 1}
    with MixedDataLoader(sources, [2, 1], **options) as plain, MixedDataLoader(sources, [2, 1], **options) as loader:
        around = wrapped(loader)
        for _ in range(4):
            assert seen(around) == seen(plain)
            assert loader.state_dict() == plain.state_dict()


def test_steps_that_the_plan_skips_are_not_named(home: Path) -> None:
    with make("rows", home) as plain, make("rows", home) as loader:
        count = len(loader)
        for each in (plain, loader):
            each.edit(each.plan.skip(2, 5).skip(count, count + 2))
        around = wrapped(loader)
        for _ in range(2):
            for _, _ in zip(plain, around, strict=True):
                assert loader.state_dict() == plain.state_dict()


def test_workers_that_persist_notice_an_edited_plan(home: Path) -> None:
    with make("rows", home) as loader:
        worker = pickle.loads(pickle.dumps(loader))  # noqa: S301 - as a worker process has it
        keys = iter(loader.sampler())
        assert seen([worker[next(keys)]]) == seen([loader[0]])
        loader.edit(loader.plan.skip(5, 7))
        with pytest.raises(ConfigError, match="persistent_workers"):
            worker[next(keys)]


def test_a_stream_has_no_batches_by_name(home: Path) -> None:
    loader = PretrainDataLoader(home / "text", chunk_size=12, batch_size=4, streaming=True)
    with loader, pytest.raises(TypeError, match="streaming=False"):
        next(iter(wrapped(loader)))
