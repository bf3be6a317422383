"""A remote loader keeps the contract of loaders: its batches and states are those of the local one, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batching.options import Shard
from penstock.errors import ConfigError
from penstock.feed import FeedServer, RemoteLoader
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.order.schedules import Schedule
from penstock.testing import assert_loader_contract
from token_stores import make_masks, make_preferences, make_rows, make_store

LENGTH = 16
Make = Callable[..., DataLoader]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("feed")
    rows = make_rows(50, LENGTH)
    make_store(home / "text", rows, shard_bytes=600)
    make_store(home / "more", make_rows(20, LENGTH, seed=1))
    make_store(home / "chat", rows, make_masks(rows))
    make_preferences(home / "pairs", 23, LENGTH)
    make_preferences(home / "labels", 23, LENGTH, pairs=False)
    return home


KINDS = ["concat", "best_fit", "rows", "padding_free", "chat", "left", "by_tokens", "mixed", "pairs", "labels"]


def maker(home: Path, kind: str, **fixed: Any) -> Make:
    """How to make the local loader of a kind."""
    fixed.setdefault("backend", "numpy")
    schedule = Schedule.of([(0, {"a": 3, "b": 1}), (5, {"a": 1, "b": 1})], "linear")
    sources = {"a": home / "text", "b": home / "more"}
    return {
        "concat": lambda **more: PretrainDataLoader(home / "text", None, LENGTH, **fixed, **more),
        "best_fit": lambda **more: PretrainDataLoader(home / "text", None, LENGTH, packing="best_fit", **fixed, **more),
        "rows": lambda **more: PretrainDataLoader(home / "text", None, LENGTH, packing=None, **fixed, **more),
        "padding_free": lambda **more: ConversationDataLoader(
            home / "chat", None, LENGTH, packing="best_fit", padding_free=True, **fixed, **more
        ),
        "chat": lambda **more: ConversationDataLoader(home / "chat", None, LENGTH, packing=True, **fixed, **more),
        "left": lambda **more: ConversationDataLoader(
            home / "chat", None, LENGTH, packing=None, padding_side="left", drop_last=True, **fixed, **more
        ),
        "by_tokens": lambda **more: PretrainDataLoader(
            home / "text", None, LENGTH, packing=None, max_tokens=64, **fixed, **more
        ),
        "mixed": lambda **more: MixedDataLoader(
            sources, schedule, chunk_size=LENGTH, stopping_strategy="never", **fixed, **more
        ),
        "pairs": lambda **more: PreferenceDataLoader(home / "pairs", max_length=LENGTH, **fixed, **more),
        "labels": lambda **more: PreferenceDataLoader(home / "labels", max_length=LENGTH, kl=True, **fixed, **more),
    }[kind]


@pytest.mark.parametrize("kind", ["concat", "mixed", "padding_free", "pairs"])
def test_remote_loaders_keep_the_contract(home: Path, kind: str) -> None:
    with maker(home, kind)(batch_size=4) as local, FeedServer(local) as server:
        assert_loader_contract(
            lambda **more: RemoteLoader(server.address, backend="numpy", **more),
            steps=6 if kind in ("mixed", "pairs") else 12,
        )


def facts_of(batch: Any) -> dict[str, Any]:
    """Everything of a batch, with the types."""
    found = {**batch.metadata, **batch.to_numpy(), "tokens": batch.num_tokens, "class": type(batch)}
    for name, value in found.items():
        if hasattr(value, "tobytes"):
            found[name] = (str(value.dtype), value.shape, value.tobytes())
    return found


def states_of(loader: DataLoader, steps: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """Batches across epochs, each with the state after it; fewer if the loader ends."""
    left = steps
    while left:
        before = left
        for batch in loader:
            yield facts_of(batch), json.loads(json.dumps(loader.state_dict()))
            left -= 1
            if not left:
                return
        if left == before:
            return


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax", "mlx"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_every_backend_are_those_of_the_local_loader(home: Path, kind: str, backend: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(backend, backend))
    make = maker(home, kind, backend=backend)
    with ExitStack() as stack:
        server = stack.enter_context(FeedServer(stack.enter_context(maker(home, kind)())))
        place = {"rank": 1, "world_size": 2, "batch_size": 3}
        local = stack.enter_context(make(**place))
        remote = stack.enter_context(RemoteLoader(server.address, backend=backend, **place))
        for ours, theirs in islice(zip(local, remote, strict=True), 12):  # a mixture may be endless
            assert facts_of(theirs) == facts_of(ours)
            assert theirs.keys() == ours.keys()
            for name, value in ours.items():
                other = theirs[name]
                assert type(other) is type(value)
                assert getattr(other, "dtype", None) == getattr(value, "dtype", None)
        assert remote.state_dict() == local.state_dict()


def test_slices_for_context_parallel_ranks_are_those_of_the_local_loader(home: Path) -> None:
    make = maker(home, "chat")
    with make(batch_size=4) as base, FeedServer(base) as server:
        for rank in range(4):
            shard = Shard(rank=rank, world_size=4, cp=2, context="zigzag")
            with (
                make(batch_size=2, shard=shard) as local,
                RemoteLoader(server.address, backend="numpy", batch_size=2, shard=shard) as remote,
            ):
                found, wanted = (list(islice(states_of(loader, 5), 5)) for loader in (remote, local))
                assert found == wanted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(data=st.data())
def test_a_run_that_moves_between_servers_and_the_local_loader_loses_and_repeats_nothing(
    home: Path, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    fixed: dict[str, Any] = {"seed": data.draw(st.integers(0, 3)), "shuffle": data.draw(st.booleans())}
    make = maker(home, kind, **fixed)
    # With max_tokens each rank has batches of its own, on one number of ranks.
    worlds = [1] if kind == "by_tokens" else [1, 2, 4]
    steps = data.draw(st.integers(1, 20), label="steps")
    wanted: dict[int, list[list[Any]]] = {}
    for world in worlds:
        wanted[world] = []
        for rank in range(world):
            with make(rank=rank, world_size=world, batch_size=4 // world) as loader:
                wanted[world].append(list(states_of(loader, steps)))
    total, done, state = len(wanted[1][0]), 0, None
    with ExitStack() as stack:
        servers = [FeedServer(stack.enter_context(make())) for _ in range(2)]
        try:
            while done < total:
                world = data.draw(st.sampled_from(worlds), label="ranks")
                rank = data.draw(st.integers(0, world - 1), label="rank")
                count = data.draw(st.integers(1, total - done), label="steps until the next stop")
                remote = data.draw(st.booleans(), label="remote")
                kill = data.draw(st.none() | st.integers(0, count - 1), label="kill the server before batch")
                place = {"rank": rank, "world_size": world, "batch_size": 4 // world}
                if remote:
                    addresses = [server.address for server in servers]
                    loader = RemoteLoader(addresses, backend="numpy", retry_seconds=30, **place)
                else:
                    loader = make(**place)
                with loader:
                    if state is not None:
                        loader.load_state_dict(state)
                        assert loader.state_dict() == state
                    for number, (facts, after) in enumerate(states_of(loader, count)):
                        assert (facts, after) == wanted[world][rank][done + number]
                        state = after
                        if number == kill:
                            victim = servers.pop(0)
                            victim.close()
                            servers.append(FeedServer(stack.enter_context(make()), port=victim.port))
                done += count
        finally:
            for server in servers:
                server.close()


def test_states_of_many_sources_are_those_of_the_local_loader(home: Path) -> None:
    sources = {f"source {number}": home / "more" for number in range(300)}
    options: dict[str, Any] = {"chunk_size": LENGTH, "stopping_strategy": "never", "backend": "numpy", "batch_size": 40}
    with (
        MixedDataLoader(sources, dict.fromkeys(sources, 1), **options) as local,
        FeedServer(local) as server,
        RemoteLoader(server.address, backend="numpy") as remote,
    ):
        found, wanted = list(states_of(remote, 3)), list(states_of(local, 3))
        assert found == wanted
        remote.load_state_dict(wanted[0][1])
        assert list(states_of(remote, 2)) == wanted[1:]


def test_edits_of_the_plan_are_those_of_the_local_loader(home: Path) -> None:
    make = maker(home, "mixed")

    def run(loader: DataLoader) -> list[Any]:
        found = []
        with loader:
            for facts, state in states_of(loader, 4):
                found.append((facts, state))
            loader.edit(loader.plan.skip(loader.step + 1, loader.step + 3).ban({"a": [3, 5]}, step=loader.step))
            for number, (facts, state) in enumerate(states_of(loader, 6)):
                found.append((facts, state))
                if number == 2:  # within a loop
                    loader.edit(loader.plan.reweight(loader.step + 1, {"a": 1, "b": 5}))
            plan = loader.plan
            found.append([plan.step(2).rows, plan.step(5).rows, plan.trace("a", 7), plan.skipped(5), plan.fingerprint])
            with pytest.raises(ConfigError, match="delivered"):
                loader.edit(loader.plan.skip(1, 3))
            with pytest.raises(ConfigError, match="do not exist"):
                loader.plan.ban({"a": [999]})
            with pytest.raises(ConfigError, match="unknown source"):
                loader.plan.ban({"c": [1]})
        return found

    with make(batch_size=4) as local, FeedServer(local) as server:
        wanted = run(make(batch_size=4))
        found = run(RemoteLoader(server.address, backend="numpy"))
        assert found == wanted
        state = found[-2][1]
        with make(batch_size=4) as other, RemoteLoader(server.address, backend="numpy") as remote:
            other.load_state_dict(state)
            remote.load_state_dict(state)
            assert remote.plan.edits == other.plan.edits
            assert list(states_of(remote, 4)) == list(states_of(other, 4))


@pytest.mark.parametrize("kind", ["mixed", "best_fit", "pairs"])
def test_single_batches_follow_edits_as_those_of_the_local_loader(home: Path, kind: str) -> None:
    make = maker(home, kind)

    def run(loader: DataLoader) -> list[Any]:
        with loader:
            found: list[Any] = [facts_of(loader.get_batch()) for _ in range(3)]
            loader.edit(loader.plan.skip(loader.step + 1, loader.step + 3))
            found += [facts_of(loader.get_batch()) for _ in range(2)]
            name = loader.plan.names[0]
            loader.edit(loader.plan.ban({name: range(0, 20, 3)}, step=loader.step))
            return [*found, *(facts_of(loader.get_batch()) for _ in range(2)), loader.state_dict()]

    with make(batch_size=2) as local, FeedServer(local) as server:
        wanted = run(make(batch_size=2))
        found = run(RemoteLoader(server.address, backend="numpy"))
        assert found == wanted
        with make(batch_size=2) as other:
            other.get_batch()
            other.edit(other.plan.skip(2, 4))
            state = other.state_dict()
            wanted = [facts_of(other.get_batch()) for _ in range(4)]
        with RemoteLoader(server.address, backend="numpy") as remote:
            remote.get_batch()
            remote.load_state_dict(state)  # the position is the same, the plan is not
            assert [facts_of(remote.get_batch()) for _ in range(4)] == wanted


def test_items_epochs_and_single_batches_are_those_of_the_local_loader(home: Path) -> None:
    make = maker(home, "best_fit")
    with ExitStack() as stack:
        local = stack.enter_context(make(batch_size=3))
        server = stack.enter_context(FeedServer(local))
        remote = stack.enter_context(RemoteLoader(server.address, backend="numpy"))
        assert len(remote) == len(local)
        assert facts_of(remote[2]) == facts_of(local[2])
        assert facts_of(remote[-1]) == facts_of(local[-1])
        for size in (None, None, 5, None, 2):
            assert facts_of(remote.get_batch(size)) == facts_of(local.get_batch(size))
            assert remote.state_dict() == local.state_dict()
        for loader in (remote, local):
            loader.set_epoch(3)
            loader.seek(loader.step + 2)
        assert facts_of(remote.get_batch()) == facts_of(local.get_batch())
        assert (remote.epoch, remote.step) == (local.epoch, local.step)
        with pytest.raises(IndexError):
            remote[len(remote)]
        remote.reset()
        with pytest.raises(ConfigError, match="an epoch has only"):
            remote.get_batch(1000)


def test_a_plan_that_ends_ends_at_the_client_too(home: Path) -> None:
    sources = {"a": home / "text", "b": home / "more"}
    options: dict[str, Any] = {"chunk_size": LENGTH, "max_epochs": 1, "stopping_strategy": "all_exhausted"}
    with (
        MixedDataLoader(sources, {"a": 1, "b": 1}, backend="numpy", **options) as local,
        FeedServer(local) as server,
        RemoteLoader(server.address, backend="numpy") as remote,
    ):
        assert [facts for facts, _ in states_of(remote, 99)] == [facts for facts, _ in states_of(local, 99)]
        assert list(remote) == []
        with pytest.raises(EOFError):
            remote.get_batch()
