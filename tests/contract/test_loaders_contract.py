"""The one contract of all loaders: a batch is a function of the plan, the seed and the step.

Stopped anywhere, any number of times, also at the ends of epochs, resumed on other numbers of ranks, with or without
batches made ahead: the global batches are those of one process that never stopped, byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.batching.batch import TrainingBatch
from penstock.distributed.sharding import Strided
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.rollout import RolloutDataLoader
from penstock.order.schedules import Schedule
from penstock.testing import assert_loader_contract
from token_stores import make_masks, make_preferences, make_rows, make_store

WORLDS = {1: [1], 2: [1, 2], 4: [1, 2, 4], 6: [1, 2, 3, 6], 8: [1, 2, 4, 8], 7: [1, 7], 5: [1, 5]}
LENGTH = 24
Make = Callable[..., DataLoader]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("contract")
    for number, (count, longest) in enumerate([(90, 24), (23, 9), (40, 24)]):
        rows = make_rows(count, longest, seed=number)
        make_store(home / f"text{number}", rows, shard_bytes=800)
        make_store(home / f"chat{number}", rows, make_masks(rows, number), shard_bytes=800)
    return home


@st.composite
def loaders(draw: st.DrawFn, home: Path) -> Make:
    """How to make a loader of a random plan, given what must not matter."""
    fixed: dict[str, Any] = {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "drop_last": draw(st.booleans()),
        "padding_free": draw(st.booleans()),
        "backend": "numpy",
    }
    packing = draw(st.sampled_from([None, "concat", "best_fit", "first_fit"]))
    kind = draw(st.sampled_from(["text", "chat", "mixed"]))
    if kind == "text":
        return lambda **more: PretrainDataLoader(home / "text0", chunk_size=LENGTH, packing=packing, **fixed, **more)
    if kind == "chat":
        return lambda **more: ConversationDataLoader(
            home / "chat0", max_length=LENGTH, packing=packing, **fixed, **more
        )
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    sources = {name: home / f"text{number}" for number, name in enumerate(names)}
    weighing = st.fixed_dictionaries({name: st.integers(1, 9) for name in names})
    points = [(0, draw(weighing)), *((step, draw(weighing)) for step in draw(st.sampled_from([[], [3], [2, 7]])))]
    schedule = Schedule.of(points, draw(st.sampled_from(["constant", "linear"])))
    stopping = draw(st.sampled_from(["first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never"]))
    limits = draw(st.sampled_from([None, 2, {names[0]: 1}]))
    return lambda **more: MixedDataLoader(
        sources,
        schedule,
        chunk_size=LENGTH,
        packing=packing,
        stopping_strategy=stopping,
        max_epochs=limits,
        **fixed,
        **more,
    )


def batches_of(loader: DataLoader, steps: int) -> list[Any]:
    """Up to so many batches, over the ends of epochs, each with the epoch it is from and the state behind it."""
    found: list[Any] = []
    while len(found) < steps:
        before = len(found)
        try:
            for batch in loader:
                found.append((batch, json.loads(json.dumps(loader.state_dict()))))
                if len(found) == steps:
                    break
        except ConfigError:
            assume(found)  # an epoch without a single batch is refused; what came before it counts
        if len(found) == before:
            break
    return found


def content(batch: Any) -> dict[str, Any]:
    """The rows of a batch, so that those of several ranks can be put together."""
    arrays = batch.to_numpy()
    kept = {name: arrays[name] for name in ("input_ids", "labels", "position_ids") if name in arrays}
    return kept | {"row": batch.metadata["row"], "source": batch.metadata["source"]}


def together(ranks: list[dict[str, Any]], padding_free: bool) -> dict[str, bytes]:
    axis = 1 if padding_free else 0
    return {
        name: np.concatenate([rank[name] for rank in ranks], axis=axis if ranks[0][name].ndim == 2 else 0).tobytes()
        for name in ranks[0]
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_the_global_batches_are_those_of_one_process_that_never_stopped(home: Path, data: st.DataObject) -> None:
    make = data.draw(loaders(home), label="loader")
    world_sizes = data.draw(st.sampled_from(sorted(WORLDS)), label="global batch")
    steps = data.draw(st.integers(1, 24), label="steps")
    alone = batches_of(make(batch_size=world_sizes, prefetch=0, rank=0, world_size=1), steps)
    padding_free = make(batch_size=1, rank=0, world_size=1).options.padding_free
    wanted = [together([content(batch)], padding_free) for batch, _ in alone]
    done, state = 0, None
    while done < len(wanted):
        world = data.draw(st.sampled_from(WORLDS[world_sizes]), label="ranks")
        count = data.draw(st.integers(1, len(wanted) - done), label="steps until the next stop")
        prefetch = data.draw(st.sampled_from([0, 0, 1, 3, None]), label="prefetch")
        ranks, states = [], []
        for rank in range(world):
            with make(batch_size=world_sizes // world, rank=rank, world_size=world, prefetch=prefetch) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                    assert json.loads(json.dumps(loader.state_dict())) == state
                found = batches_of(loader, count)
                ranks.append([content(batch) for batch, _ in found])
                states.append(found[-1][1])
        assert all(len(rank) == count for rank in ranks), "every rank has the same number of batches"
        for offset, parts in enumerate(zip(*ranks)):
            full = [part for part in parts if len(part["row"])]
            if len(full) == len(parts):
                assert together(list(parts), padding_free) == wanted[done + offset]
            else:  # fewer samples than ranks: those without any have a blank row
                assert np.concatenate([part["row"] for part in full]).tobytes() == wanted[done + offset]["row"]
        assert all(each == states[0] for each in states), "the state is the same on every rank"
        assert len(json.dumps(states[0])) < 4096
        assert states[0] == alone[done + count - 1][1]
        state = states[0]
        done += count


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    data=st.data(),
    packing=st.sampled_from([None, "best_fit", "first_fit"]),
    size=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_every_row_is_used_exactly_once_in_an_epoch(
    home: Path, data: st.DataObject, packing: Any, size: int, seed: int
) -> None:
    loader = PretrainDataLoader(
        home / "text0", chunk_size=LENGTH, packing=packing, batch_size=size, seed=seed, backend="numpy"
    )
    for epoch in range(2):
        assert loader.epoch == epoch
        batches = list(loader)
        assert len(batches) == loader.plan.steps_in(epoch)
        rows = Counter(row for batch in batches for row in batch.metadata["row"].tolist())
        assert rows == dict.fromkeys(range(90), 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_steps_can_be_asked_for_in_any_order(home: Path, data: st.DataObject) -> None:
    make = data.draw(loaders(home), label="loader")
    size = data.draw(st.integers(1, 6))
    loader = make(batch_size=size, prefetch=0)
    seen = [(batch.metadata["step"], batch.metadata["row"].tolist()) for batch, _ in batches_of(loader, 15)]
    fresh = make(batch_size=size)
    for number, rows in data.draw(st.permutations(seen)):
        assert fresh.plan.step(number).samples.rows.tolist() == rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_tracing_a_row_finds_the_steps_that_use_it(home: Path, data: st.DataObject) -> None:
    make = data.draw(loaders(home), label="loader")
    loader = make(batch_size=data.draw(st.integers(1, 6)), prefetch=0)
    uses: dict[tuple[str, int], list[int]] = {}
    names = loader.plan.names
    found = batches_of(loader, 12)
    for batch, _ in found:
        parts = zip(batch.metadata["source"], batch.metadata["row"], batch.metadata["sample"])
        for source, row, _ in dict.fromkeys((int(s), int(r), int(n)) for s, r, n in parts):
            uses.setdefault((names[source], row), []).append(batch.metadata["step"])
    name = data.draw(st.sampled_from(names))
    row = data.draw(st.integers(0, loader.plan.sources[names.index(name)].order.table.rows - 1))
    traced = [use.step for use in loader.plan.trace(name, row, epochs=40) if use.step < len(found)]
    assert traced == uses.get((name, row), [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(weights=st.lists(st.integers(1, 50), min_size=3, max_size=3), size=st.integers(1, 8))
def test_a_mixture_is_within_one_of_its_weights_at_every_step(home: Path, weights: list[int], size: int) -> None:
    sources = {name: home / f"text{number}" for number, name in enumerate("abc")}
    loader = MixedDataLoader(
        sources, weights, chunk_size=LENGTH, batch_size=size, stopping_strategy="never", backend="numpy"
    )
    counts, total = np.zeros(3), 0
    for batch, _ in batches_of(loader, 40):
        first = np.unique(batch.metadata["sample"], return_index=True)[1]
        counts += np.bincount(batch.metadata["source"][first], minlength=3)
        total += len(first)
        target = np.array(weights) / sum(weights) * total
        assert (abs(counts - target) < 1).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout_batch_size": 9, "ppo_epochs": 2},
        {"keep_groups": False, "padding": "free"},
        {"drop_zero_variance": True, "rollout_batch_size": 5, "ppo_epochs": 2, "drop_last": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["list", "file"])
def test_rollouts_keep_the_contract(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    rollouts: Any = [
        {
            "prompt_ids": [1 + group] * (1 + group % 5),
            "response_ids": rng.integers(1, 50, rng.integers(1, 9)).tolist(),
            "reward": float(rng.integers(0, 3)),
            "group": f"g{group}",
        }
        for group, size in enumerate([4, 2, 3, 4, 2, 4, 2, 3])
        for _ in range(size)
    ]
    if kind == "file":
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts))
        rollouts = path
    fixed: dict[str, Any] = {"backend": "numpy", **options}
    assert_loader_contract(lambda **more: RolloutDataLoader(rollouts, **fixed, **more), steps=16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_free": True, "drop_last": True},
        {"packing": "best_fit", "padding_side": "left"},
        {"max_tokens": 120, "worlds": [1]},
        {"truncation": "drop", "max_length": 22, "sharding": Strided()},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["pairs", "labels"])
def test_preferences_keep_the_contract(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    store = make_preferences(tmp_path / "store", 23, LENGTH, pairs=kind == "pairs", shard_bytes=800)
    fixed: dict[str, Any] = {"backend": "numpy", "max_length": LENGTH, **options}
    worlds = fixed.pop("worlds", [1, 2, 4])
    if kind == "labels" and not options:
        fixed["kl"] = True
    assert_loader_contract(lambda **more: PreferenceDataLoader(store, **fixed, **more), steps=6, worlds=worlds)


class Squares(DataLoader):
    """A loader of the four methods of the interface, and nothing else."""

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0

    def get_batch(self, batch_size: int | None = None) -> TrainingBatch:
        self.at += 1
        return TrainingBatch(input_ids=np.full((batch_size or 2, 3), (self.at - 1) ** 2))

    def get_iterator(self) -> Iterator[TrainingBatch]:
        while self.at < self.count:
            yield self.get_batch(2)

    def get_num_batches(self) -> int:
        return self.count

    def reset(self) -> None:
        self.at = 0


def numbers(loader: Iterable[TrainingBatch]) -> list[int]:
    return [int(batch.input_ids[0, 0]) for batch in loader]


def test_a_loader_of_four_methods_has_loops_a_length_and_a_lifetime() -> None:
    with Squares(4) as loader:
        assert len(loader) == 4
        assert loader.num_batches_of_epoch(7) == 4
        assert numbers(loader) == [0, 1, 4, 9]
        loader.reset()
        assert numbers(loader.get_iterator()) == [0, 1, 4, 9]
        assert loader
        assert repr(loader) == "Squares()"
    for unsupported in (loader.state_dict, lambda: loader.seek(2), lambda: loader.plan, lambda: loader[0]):
        with pytest.raises(NotImplementedError, match="Squares"):
            unsupported()
    with pytest.raises(NotImplementedError, match="get_batch"):
        DataLoader.get_batch(loader)


def test_a_loader_of_four_methods_can_be_mixed(home: Path) -> None:
    def make(**more: Any) -> MixedDataLoader:
        own = PretrainDataLoader(home / "text0", chunk_size=LENGTH, batch_size=2, backend="numpy", shuffle=False)
        sources = {"squares": Squares(6), "text": own}
        return MixedDataLoader(sources, {"squares": 2, "text": 1}, **more)

    with make() as mixed:
        assert len(mixed) == 9  # until the squares were used once, with half as much text
        batches = list(mixed)
        assert [batch.metadata["step"] for batch in batches] == list(range(9))
        names = [batch.metadata["loader"] for batch in batches]
        assert Counter(names) == {"squares": 6, "text": 3}
        assert numbers(batch for batch in batches if batch.metadata["loader"] == "squares") == [0, 1, 4, 9, 16, 25]
        following = [batch.input_ids.tolist() for batch in mixed]
        assert mixed.epoch == 2
    with make(prefetch=0) as stopped:
        for _, batch in zip(range(5), stopped):
            assert batch.input_ids.tolist() == batches[batch.metadata["step"]].input_ids.tolist()
        state = json.loads(json.dumps(stopped.state_dict()))
    with make(prefetch=2) as resumed:
        resumed.load_state_dict(state)
        assert [batch.input_ids.tolist() for batch in resumed] == [batch.input_ids.tolist() for batch in batches[5:]]
        assert [batch.input_ids.tolist() for batch in resumed] == following
        resumed.seek(3)
        assert resumed.get_batch().input_ids.tolist() == batches[3].input_ids.tolist()


@pytest.mark.parametrize(
    ("stopping", "limit", "expected"),
    [("all_exhausted", None, 9), ("all_exhausted_without_replacement", None, 8), ("first_exhausted", 1, 5)],
)
def test_mixed_loaders_end_as_the_stopping_strategy_says(stopping: str, limit: int | None, expected: int) -> None:
    sources = [Squares(6), Squares(2)]
    with MixedDataLoader(sources, [2, 1], stopping_strategy=stopping, max_epochs=limit) as mixed:
        assert len(mixed) == expected
        assert len(list(mixed)) == expected


def test_paths_are_not_mixed_with_loaders_without_a_plan(home: Path) -> None:
    with pytest.raises(ConfigError, match="'text'"):
        MixedDataLoader({"squares": Squares(3), "text": home / "text0"})
