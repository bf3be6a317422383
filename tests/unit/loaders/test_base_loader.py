"""What every loader does: batches, iteration, positions, states, ranks, what is made ahead, and the form of batches."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import MemoryBudget, PretrainDataLoader
from penstock.batching.collate import FIELDS, IGNORE
from penstock.distributed import Balanced, Strided
from penstock.errors import ConfigError, ResumeError
from penstock.loaders import base
from penstock.loaders import plan_engine as indexed
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from token_stores import make_masks, make_rows, make_store

ROWS = make_rows(37, 12)
MASKS = make_masks(ROWS)
OTHERS = [[token + 1000 for token in row] for row in make_rows(19, 12, seed=5)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("base")
    make_store(home / "text", ROWS, shard_bytes=300)
    make_store(home / "other", OTHERS)
    make_store(home / "chat", ROWS, MASKS, shard_bytes=300)
    return home


def make(home: Path, kind: str = "rows", **more: Any) -> DataLoader:
    options: dict[str, Any] = {"batch_size": 4, "backend": "numpy", "prefetch": 0, **more}
    if kind == "chat":
        return ConversationDataLoader(home / "chat", max_length=12, **options)
    if kind == "mixed":
        sources = {"text": home / "text", "other": home / "other"}
        return MixedDataLoader(sources, [2, 1], chunk_size=12, packing=None, **options)
    packing = {"rows": None, "concat": "concat", "packed": "best_fit"}[kind]
    return PretrainDataLoader(home / "text", chunk_size=12, packing=options.pop("packing", packing), **options)


KINDS = ("rows", "concat", "packed", "chat", "mixed")


def content(batch: Any) -> dict[str, Any]:
    """Everything a batch holds, as plain values."""
    arrays = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.to_numpy().items()}
    facts = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in batch.metadata.items()}
    return arrays | facts


def steps(loader: DataLoader) -> list[int]:
    return [batch.metadata["step"] for batch in loader]


# What the seed names


@pytest.mark.parametrize("kind", KINDS)
def test_get_batch_gives_the_batches_of_the_iterator_one_by_one(home: Path, kind: str) -> None:
    loader, other = make(home, kind), make(home, kind)
    wanted = [content(batch) for batch in loader.get_iterator()]
    assert len(wanted) == other.get_num_batches()
    assert [content(other.get_batch()) for _ in wanted] == wanted


def test_get_batch_takes_as_many_samples_as_it_is_asked_for(home: Path) -> None:
    loader = make(home, batch_size=8)
    assert [loader.get_batch(batch_size=n).batch_size for n in (3, 1, 6)] == [3, 1, 6]
    whole = [row for batch in make(home, batch_size=10) for row in batch.metadata["row"].tolist()]
    loader.reset()
    found = [row for n in (3, 1, 6) for row in loader.get_batch(n).metadata["row"].tolist()]
    assert found == whole[:10]


def test_get_batch_goes_on_in_the_next_epoch(home: Path) -> None:
    loader = make(home, batch_size=20)
    assert [loader.get_batch().metadata["epoch"] for _ in range(4)] == [0, 0, 1, 1]


def test_batches_of_any_sizes_use_every_row_once_an_epoch(home: Path) -> None:
    loader = make(home)
    rows: Counter[int] = Counter()
    while loader.epoch == 0:
        rows.update(loader.get_batch(3).metadata["row"].tolist())
    assert rows == dict.fromkeys(range(37), 1)


def test_small_batches_are_not_dropped_for_not_filling_a_large_one(home: Path) -> None:
    loader = make(home, batch_size=16, drop_last=True)
    rows: Counter[int] = Counter()
    while loader.epoch == 0:
        rows.update(loader.get_batch(4).metadata["row"].tolist())
    assert rows.total() == 36


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", True])
def test_a_batch_of_no_size_is_refused(home: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"at least 1\b"):
        make(home).get_batch(size)


def test_reset_goes_back_to_the_very_beginning(home: Path) -> None:
    loader = make(home, "packed")
    first = [content(batch) for batch in loader]
    next(iter(loader))
    loader.reset()
    assert (loader.epoch, loader.step) == (0, 0)
    assert [content(batch) for batch in loader] == first


def test_the_length_is_the_number_of_batches_of_an_epoch_wherever_the_loader_is(home: Path) -> None:
    for kind in KINDS:
        loader = make(home, kind)
        count = len(loader)
        loader.get_batch()
        assert (len(loader), loader.get_num_batches()) == (count, count)
        assert len(list(loader)) == count - 1


# Iteration and epochs


@pytest.mark.parametrize("kind", KINDS)
def test_iterating_again_is_the_next_epoch(home: Path, kind: str) -> None:
    loader = make(home, kind)
    first, second = list(loader), list(loader)
    assert {batch.metadata["epoch"] for batch in first} == {0}
    assert {batch.metadata["epoch"] for batch in second} == {1}
    assert [batch.metadata["step"] for batch in first + second] == list(range(len(first) + len(second)))
    assert [content(batch)["row"] for batch in first] != [content(batch)["row"] for batch in second]


def test_iterating_after_a_break_goes_on_behind_it(home: Path) -> None:
    loader = make(home)
    for batch in loader:
        if batch.metadata["step"] == 3:
            break
    assert steps(loader) == list(range(4, 10))


def test_a_batch_taken_while_iterating_is_not_given_again(home: Path) -> None:
    loader = make(home)
    running = iter(loader)
    seen = [next(running).metadata["step"], loader.get_batch().metadata["step"]]
    seen += [batch.metadata["step"] for batch in running]
    seen += steps(loader) if loader.epoch == 0 else []
    assert seen == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_by_its_number_is_that_of_the_iterator(home: Path, kind: str) -> None:
    loader = make(home, kind)
    list(loader)
    other = make(home, kind)
    list(other)
    wanted = [content(batch) for batch in other]
    assert [content(loader[number]) for number in range(len(loader))] == wanted
    assert content(loader[-1]) == wanted[-1]
    assert loader.step == wanted[0]["step"], "looking at a batch does not move the loader"
    for number in (len(loader), -len(loader) - 1):
        with pytest.raises(IndexError, match=rf"{number}.*{len(loader)}"):
            loader[number]


def test_set_epoch_goes_to_an_epoch_and_stays_there_in_the_middle_of_it(home: Path) -> None:
    loader = make(home)
    loader.set_epoch(2)
    loader.set_epoch(2)
    assert (loader.epoch, loader.step) == (2, 20)
    loader.get_batch()
    loader.set_epoch(2)
    assert loader.step == 21
    loader.set_epoch(0)
    assert loader.step == 0
    plain = make(home)
    for _ in range(2):
        list(plain)
    loader.set_epoch(2)
    assert [content(batch) for batch in loader] == [content(batch) for batch in plain]


def test_set_epoch_before_every_loop_changes_nothing(home: Path) -> None:
    for kind in KINDS:
        plain, habit = make(home, kind), make(home, kind)
        for epoch in range(3):
            habit.set_epoch(epoch)
            assert [content(batch) for batch in habit] == [content(batch) for batch in plain]


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", True, None])
def test_an_epoch_is_a_whole_number(home: Path, epoch: Any) -> None:
    with pytest.raises(ConfigError, match=r"\b0\b"):
        make(home).set_epoch(epoch)


def test_seeking_goes_to_the_front_of_a_step(home: Path) -> None:
    for kind in KINDS:
        plain, loader = make(home, kind), make(home, kind)
        wanted = [content(plain.get_batch()) for _ in range(25)]
        for step in (24, 3, 10):
            loader.seek(step)
            assert content(loader.get_batch()) == wanted[step]


# State


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_state_is_exact_at_every_step_and_at_the_ends_of_epochs(home: Path, kind: str, drop_last: bool) -> None:
    loader = make(home, kind, drop_last=drop_last)
    states, batches = [loader.state_dict()], []
    for _ in range(2):
        for batch in loader:
            batches.append(content(batch))
            states.append(json.loads(json.dumps(loader.state_dict())))
    for number, state in enumerate(states):
        fresh = make(home, kind, drop_last=drop_last)
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
        assert (fresh.epoch, fresh.step) == (state["epoch"], state["step"])
        if number < len(batches):
            assert content(fresh.get_batch()) == batches[number]


def test_the_state_at_the_end_of_an_epoch_is_in_front_of_the_next(home: Path) -> None:
    loader = make(home)
    list(loader)
    fresh = make(home)
    fresh.load_state_dict(loader.state_dict())
    assert (fresh.epoch, fresh.step) == (1, 10)
    assert steps(fresh) == list(range(10, 20))


def test_what_is_made_ahead_is_not_in_the_state(home: Path) -> None:
    quick, ahead = make(home), make(home, prefetch=5)
    for _, _ in zip(quick, range(3)):
        pass
    for _, _ in zip(ahead, range(3)):
        pass
    ahead.close()
    assert quick.state_dict()["step"] - ahead.state_dict()["step"] in (0, 1)  # zip takes one batch more of its first


def test_a_loop_that_runs_goes_on_where_a_loaded_state_says(home: Path) -> None:
    loader = make(home)
    state = loader.state_dict()
    running = iter(loader)
    next(running)
    loader.load_state_dict(state)
    assert [batch.metadata["step"] for batch in running] == list(range(10))


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"shuffle": False},
        {"drop_last": True},
        {"kind": "packed"},
        {"kind": "chat"},
        {"kind": "mixed"},
    ],
)
def test_the_state_of_another_plan_is_refused_naming_both(home: Path, other: dict[str, Any]) -> None:
    loader, there = make(home), make(home, **other)
    pattern = f"{there.plan.fingerprint}.*{loader.plan.fingerprint}"
    with pytest.raises(ResumeError, match=pattern):
        loader.load_state_dict(there.state_dict())
    assert loader.step == 0, "a state that is refused changes nothing"


def test_a_store_of_the_same_lengths_and_other_tokens_is_another_plan(tmp_path: Path) -> None:
    one = PretrainDataLoader(make_store(tmp_path / "a", [[1, 2, 3], [4, 5]]), backend="numpy")
    two = PretrainDataLoader(make_store(tmp_path / "b", [[1, 2, 3], [4, 6]]), backend="numpy")
    same = PretrainDataLoader(make_store(tmp_path / "c", [[1, 2, 3], [4, 5]]), backend="numpy")
    assert one.plan.fingerprint == same.plan.fingerprint != two.plan.fingerprint


def test_a_state_goes_on_with_batches_of_another_size_when_asked_to(home: Path) -> None:
    loader, wide = make(home), make(home, batch_size=6)
    for _ in range(3):
        loader.get_batch()
    with pytest.raises(ResumeError, match=r"\b4\b.*\b6\b"):
        wide.load_state_dict(loader.state_dict())
    wide.load_state_dict(loader.state_dict(), new_batch_size=True)
    rest = [row for batch in loader for row in batch.metadata["row"].tolist()]
    assert [row for batch in wide for row in batch.metadata["row"].tolist()] == rest


def test_a_state_from_two_ranks_loads_on_one(home: Path) -> None:
    two = make(home, batch_size=2, rank=1, world_size=2)
    for _ in range(4):
        two.get_batch()
    one = make(home, batch_size=4)
    one.load_state_dict(two.state_dict())
    plain = make(home)
    plain.seek(4)
    assert [content(batch) for batch in one] == [content(batch) for batch in plain]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS), drop_last=st.booleans())
def test_a_run_of_batches_of_any_sizes_goes_on_exactly(
    home: Path, data: st.DataObject, kind: str, drop_last: bool
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 7) | st.none(), min_size=1, max_size=14))
    plain = make(home, kind, drop_last=drop_last)
    wanted = [content(plain.get_batch(size)) for size in sizes]
    loader, found = make(home, kind, drop_last=drop_last), []
    for size in sizes:
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(loader.state_dict()))
            loader = make(home, kind, drop_last=drop_last)
            loader.load_state_dict(state)
        found.append(content(loader.get_batch(size)))
    assert found == wanted


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_state_of_batches_by_tokens_is_exact(home: Path, padding_free: bool) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "padding_free": padding_free}
    loader = make(home, **options)
    states, batches = [loader.state_dict()], []
    for _ in range(20):
        batches.append(content(loader.get_batch()))
        states.append(loader.state_dict())
    for state, batch in zip(states, batches):
        fresh = make(home, **options)
        fresh.load_state_dict(state)
        assert content(fresh.get_batch()) == batch


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_sent_to_another_process_goes_on_where_it_was(home: Path, kind: str) -> None:
    loader = make(home, kind, prefetch=2)
    running = iter(loader)
    next(running)
    sent = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
    assert [content(batch) for batch in sent] == [content(batch) for batch in running]


# Edits


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_run_edited_on_the_way_is_the_run_of_the_edited_plan(home: Path, data: st.DataObject, kind: str) -> None:
    loader, found = make(home, kind), []
    for _ in range(data.draw(st.integers(1, 4))):
        found += [content(loader.get_batch()) for _ in range(data.draw(st.integers(0, 5)))]
        since = loader.step + data.draw(st.integers(0, 6))
        if data.draw(st.booleans()):
            loader.edit(loader.plan.skip(since, since + data.draw(st.integers(1, 12))))
        else:
            source = data.draw(st.sampled_from(loader.plan.names))
            rows = data.draw(st.sets(st.integers(0, 18), max_size=6))
            loader.edit(loader.plan.ban({source: rows}, step=since))
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(loader.state_dict()))
            loader = make(home, kind, prefetch=data.draw(st.sampled_from([0, 2])))
            loader.load_state_dict(state)
    while len(found) < 30:
        found += [content(batch) for batch in loader]
    whole = make(home, kind)
    whole.edit(loader.plan)
    wanted: list[Any] = []
    while len(wanted) < len(found):
        wanted += [content(batch) for batch in whole]
    assert found == wanted[: len(found)]


def test_an_edit_takes_effect_and_survives_the_state(home: Path) -> None:
    loader = make(home)
    loader.get_batch()
    loader.edit(loader.plan.skip(2, 5).ban([7], step=6))
    state = loader.state_dict()
    fresh = make(home)
    fresh.load_state_dict(state)
    assert fresh.plan.edits == loader.plan.edits
    assert fresh.get_num_batches() == 7
    batches = list(fresh)
    assert [batch.metadata["step"] for batch in batches] == [1, 5, 6, 7, 8, 9]
    assert [content(batch) for batch in loader] == [content(batch) for batch in batches]
    assert steps(fresh) == list(range(10, 20))


def test_a_loop_goes_on_by_the_edited_plan(home: Path) -> None:
    for prefetch in (0, 2):
        loader, seen = make(home, prefetch=prefetch), []
        for batch in loader:
            seen.append(batch.metadata["step"])
            if len(seen) == 2:
                loader.edit(loader.plan.skip(5, 7))
        assert seen == [0, 1, 2, 3, 4, 7, 8, 9]


def test_what_was_delivered_cannot_be_edited(home: Path) -> None:
    loader = make(home)
    for _ in range(4):
        loader.get_batch()
    for plan in (loader.plan.skip(3, 9), loader.plan.ban([1])):
        with pytest.raises(ConfigError, match=r"\b4\b"):
            loader.edit(plan)
    loader.edit(loader.plan.skip(4, 5))
    assert loader.get_batch().metadata["step"] == 5


def test_a_plan_of_something_else_is_no_edit(home: Path) -> None:
    loader = make(home)
    with pytest.raises(ConfigError, match=r"loader\.plan"):
        loader.edit(make(home, seed=9).plan.skip(1, 2))
    unedited = loader.plan
    loader.edit(loader.plan.skip(1, 2))
    with pytest.raises(ConfigError):
        loader.edit(unedited.skip(5, 6))


@pytest.mark.parametrize("count", [10, 20, 23])
def test_a_skip_of_whole_epochs_is_passed_over(home: Path, count: int) -> None:
    loader = make(home)
    loader.edit(loader.plan.skip(10, 10 + count))
    assert steps(loader) == list(range(10))
    state = loader.state_dict()
    assert loader.get_batch().metadata["step"] == 10 + count
    loader.load_state_dict(state)
    assert next(iter(loader)).metadata["step"] == 10 + count


def test_the_length_agrees_with_the_loop_when_an_epoch_is_skipped(home: Path) -> None:
    loader = make(home)
    loader.edit(loader.plan.skip(10, 20))
    list(loader)
    assert len(loader) == len(list(loader))


def test_banned_rows_leave_blanks_that_nothing_is_learned_from(home: Path) -> None:
    loader, plain = make(home), make(home)
    banned = plain.get_batch().metadata["row"].tolist()[:2]
    loader.edit(loader.plan.ban(banned))
    batch = loader.get_batch()
    assert batch.batch_size == 4
    assert not set(batch.metadata["row"].tolist()) & set(banned)
    assert batch.metadata["sample"].tolist() == [2, 3]
    assert (batch.labels[:2] == IGNORE).all()
    assert batch.attention_mask[:2].sum(axis=1).tolist() == [1, 1], "a row that attends to nothing makes NaN"
    assert batch.num_items_in_batch == (batch.labels != IGNORE).sum()
    for _ in range(9):
        assert not set(loader.get_batch().metadata["row"].tolist()) & set(banned)


# Lifetime


def test_a_closed_loader_says_so(home: Path) -> None:
    with make(home, prefetch=2) as loader:
        next(iter(loader))
    loader.close()
    for use in (loader.get_batch, loader.get_iterator, lambda: iter(loader), lambda: loader[0]):
        with pytest.raises(ValueError, match=r"(?i)loader"):
            use()


def test_closing_ends_what_is_made_ahead(home: Path) -> None:
    before = threading.active_count()
    loader = make(home, prefetch=3)
    running = iter(loader)
    next(running)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match=r"(?i)loader"):
        next(running)


def test_a_loader_is_shown_by_what_it_reads_and_where_it_is(home: Path) -> None:
    loader = make(home, rank=1, world_size=2)
    loader.get_batch()
    assert repr(loader) == "PretrainDataLoader(data; 4 a batch, rank 1 of 2, step 1)"


# Made ahead


@pytest.mark.parametrize("prefetch", [None, 0, 1, 4])
def test_batches_made_ahead_are_the_same(home: Path, prefetch: int | None) -> None:
    for kind in ("packed", "mixed"):
        wanted = [content(batch) for batch in make(home, kind)]
        assert [content(batch) for batch in make(home, kind, prefetch=prefetch)] == wanted


@pytest.mark.parametrize("prefetch", [None, 0, 1, 3])
def test_an_error_comes_in_its_place_and_the_loader_stays_in_front_of_it(
    home: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(home, prefetch=prefetch)
    finish = indexed.PlanEngine._finish

    def broken(self: Any, share: Any, arrays: Any, tokens: int) -> Any:
        if share.step.number == 4:
            raise OSError("the disk is gone")
        return finish(self, share, arrays, tokens)

    monkeypatch.setattr(indexed.PlanEngine, "_finish", broken)
    found: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"):
        found.extend(batch.metadata["step"] for batch in loader)
    assert found == [0, 1, 2, 3]
    assert loader.step == 4
    monkeypatch.undo()
    assert steps(loader) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("moved_at", [0, 3, 7])
def test_the_thread_of_a_loop_ends_once_other_processes_make_the_batches(
    home: Path, monkeypatch: pytest.MonkeyPatch, moved_at: int
) -> None:
    monkeypatch.setattr(base, "_SLOW_SECONDS", -1.0)  # a thread from the second batch on
    wanted = [content(batch) for batch in make(home)]
    loader = make(home, prefetch=None)
    found = []
    for batch in loader:
        found.append(content(batch))
        if len(found) == max(moved_at, 1):
            assert loader._prefetcher._ahead is not None
        if len(found) > moved_at:
            loader._engine.elsewhere = True  # type: ignore[misc]
    assert found == wanted
    assert loader._prefetcher._ahead is None
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-ahead"]


def filled(home: Path, budget: MemoryBudget, limit: float) -> DataLoader:
    """A loader that has made ahead as much as the budget allows."""
    loader = make(home, "concat", prefetch=50, budget=budget)
    loader.loop = iter(loader)  # type: ignore[attr-defined] - or it would end with this function
    next(loader.loop)  # type: ignore[attr-defined]
    for _ in range(200):
        if budget.used > limit:
            return loader
        threading.Event().wait(0.01)
    raise AssertionError("nothing is made ahead")


def test_what_waits_is_charged_to_the_budget(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(home, "concat").get_batch().make_fields().nbytes
    budget, made, finish = MemoryBudget(3 * one), [], indexed.PlanEngine._finish

    def counted(*given: Any) -> Any:
        made.append(budget.used)
        return finish(*given)

    monkeypatch.setattr(indexed.PlanEngine, "_finish", counted)
    loader = filled(home, budget, 2.5 * one)
    assert max(made) <= 3 * one
    assert len(made) <= 6, "one taken, about three waiting, one that waits for room"
    loader.close()


def test_what_was_charged_to_the_budget_is_given_back(home: Path) -> None:
    one = make(home, "concat").get_batch().make_fields().nbytes
    budget = MemoryBudget(3 * one)
    filled(home, budget, 2.5 * one).close()
    assert budget.used == 0


def test_a_loop_to_the_end_leaves_nothing_charged(home: Path) -> None:
    budget = MemoryBudget("1 MiB")
    list(make(home, prefetch=3, budget=budget))
    assert budget.used == 0


def test_a_batch_larger_than_the_budget_comes_all_the_same(home: Path) -> None:
    loader = make(home, prefetch=2, budget=MemoryBudget(1))
    assert steps(loader) == list(range(10))


# Ranks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(
    "sharding",
    [None, Strided(), Balanced(), Balanced(equal_size=False)],
    ids=lambda sharding: repr(sharding).split(" at 0x")[0],
)
def test_ranks_get_as_many_batches_and_share_every_global_batch(
    home: Path, kind: str, drop_last: bool, world: int, sharding: Any
) -> None:
    alone = list(make(home, kind, drop_last=drop_last, batch_size=2 * world))
    ranks = [
        list(make(home, kind, drop_last=drop_last, batch_size=2, rank=rank, world_size=world, sharding=sharding))
        for rank in range(world)
    ]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for whole, *shares in zip(alone, *ranks):
        rows = [row for share in shares for row in zip(share.metadata["source"], share.metadata["row"])]
        assert Counter(rows) == Counter(zip(whole.metadata["source"], whole.metadata["row"]))
        assert {share.metadata["step"] for share in shares} == {whole.metadata["step"]}
        assert {share.input_ids.shape[1] for share in shares} == {whole.input_ids.shape[1]}
        learned = sum(int((share.labels != IGNORE).sum()) for share in shares)
        assert {share.num_items_in_batch for share in (whole, *shares)} == {learned}
        for share in shares:
            assert share.attention_mask.any(axis=1).all(), "every row attends to something"
            if not len(share.metadata["row"]):
                assert share.batch_size == 1
                assert (share.labels == IGNORE).all()


def test_a_sharding_of_ones_own_decides_who_gets_what(home: Path) -> None:
    class Reversed:
        def shares(self, sizes: Any, world: int) -> list[Any]:
            return [part[::-1] for part in reversed(np.array_split(np.arange(len(sizes)), world))]

    alone = next(iter(make(home)))
    ranks = [make(home, batch_size=2, rank=rank, world_size=2, sharding=Reversed()).get_batch() for rank in (0, 1)]
    rows = alone.metadata["row"].tolist()
    assert [batch.metadata["row"].tolist() for batch in ranks] == [rows[3:1:-1], rows[1::-1]]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (lambda sizes, world: [np.arange(len(sizes))] * world, r"\b0\b.*\b2\b"),
        (lambda sizes, world: [np.arange(len(sizes) - 1), np.array([], int)], r"\b3\b.*\b0\b"),
        (lambda sizes, world: [np.arange(len(sizes))], r"\b1\b.*\b2\b"),
        (lambda sizes, world: [np.array([0, 1, 2]), np.array([9])], r"\b9\b.*\b4\b"),
        (lambda sizes, world: [np.array([0.0, 1.0]), np.array([2, 3])], r"rank 0\b.*\bfloat64\b"),
    ],
)
def test_a_broken_sharding_is_found_out(home: Path, shares: Any, message: str) -> None:
    class Broken:
        pass

    Broken.shares = staticmethod(shares)  # type: ignore[attr-defined]
    loader = make(home, batch_size=2, rank=0, world_size=2, sharding=Broken())
    with pytest.raises(ConfigError, match=message):
        loader.get_batch()


def test_ranks_come_from_the_launcher_if_nothing_else_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (make(home).rank.rank, make(home).rank.world_size) == (1, 2)
    assert (make(home, rank=0, world_size=1).rank.rank, make(home, rank=0, world_size=1).rank.world_size) == (0, 1)
    parallel = make(home, rank=5, world_size=8, model_parallel_size=4)
    assert (parallel.rank.rank, parallel.rank.world_size) == (1, 2)


# The form of batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding_free", [False, True])
def test_metadata_names_the_rows_that_hold_the_tokens(home: Path, kind: str, padding_free: bool) -> None:
    stores = {"data": ROWS, "text": ROWS, "other": OTHERS}
    for rank in (0, 1):
        for batch in make(home, kind, padding_free=padding_free, batch_size=3, rank=rank, world_size=2):
            facts = batch.metadata
            names = [facts["sources"][source] for source in facts["source"]]
            assert len(names) == len(facts["row"]) == len(facts["sample"])
            seen: dict[int, list[int]] = {}
            for name, row, sample in zip(names, facts["row"].tolist(), facts["sample"].tolist()):
                seen.setdefault(0 if padding_free else sample, []).extend(stores[name][row])
            for place, tokens in seen.items():
                ids = batch.input_ids[place].tolist()
                real = [token for token in ids if token] if kind == "concat" else ids[: len(tokens)]
                assert set(real) <= set(tokens) if kind == "concat" else real == tokens
            assert batch.num_tokens == int((batch.input_ids != 0).sum())


@pytest.mark.parametrize("kind", ["concat", "packed", "chat"])
def test_documents_are_told_apart_in_every_way_that_kernels_ask_for(home: Path, kind: str) -> None:
    options = {"packing": "best_fit"} if kind == "chat" else {}
    home_of = home / ("chat" if kind == "chat" else "text")
    packing: Any = options.get("packing") or {"concat": "concat", "packed": "best_fit"}[kind]
    loader = PretrainDataLoader(
        home_of, chunk_size=12, packing=packing, batch_size=4, backend="numpy", padding_free=True
    )
    for batch in loader:
        ends = batch.cu_seqlens
        assert ends.dtype == np.int32
        assert batch.attention_mask is None
        assert batch.input_ids.shape == (1, ends[-1])
        assert batch.max_seqlen == np.diff(ends).max()
        assert len(ends) - 1 == len(batch.metadata["row"])
        for number, (low, high) in enumerate(pairwise(ends)):
            assert batch.position_ids[0, low:high].tolist() == list(range(high - low))
            assert (batch.document_ids[0, low:high] == number + 1).all()
            row = ROWS[batch.metadata["row"][number]]
            ids = batch.input_ids[0, low:high].tolist()
            begin = row.index(ids[0])
            assert row[begin : begin + len(ids)] == ids
            mask = MASKS[batch.metadata["row"][number]] if kind == "chat" else [True] * len(row)
            learned = [token if learn else IGNORE for token, learn in zip(row, mask)][begin : begin + len(ids)]
            assert batch.labels[0, low:high].tolist() == [IGNORE, *learned[1:]], "labels are not shifted"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 1, 8, 5])
def test_rows_are_padded_as_asked(home: Path, side: Any, multiple: int | None) -> None:
    for batch in make(home, padding_side=side, pad_to_multiple_of=multiple, pad_id=777):
        rows = [ROWS[row] for row in batch.metadata["row"].tolist()]
        width = max(map(len, rows))
        width = -(-width // (multiple or 1)) * (multiple or 1)
        for number, row in enumerate(rows):
            padding = [777] * (width - len(row))
            assert batch.input_ids[number].tolist() == (row + padding if side == "right" else padding + row)
            mask = [1] * len(row) + [0] * len(padding)
            assert batch.attention_mask[number].tolist() == (mask if side == "right" else mask[::-1])
            labels = [IGNORE, *row[1:]]
            nothing = [IGNORE] * len(padding)
            assert batch.labels[number].tolist() == (labels + nothing if side == "right" else nothing + labels)
        assert batch.loss_mask.tolist() == (batch.labels != IGNORE).tolist()


def test_padding_free_batches_can_be_padded_to_a_multiple_behind_the_last_document(home: Path) -> None:
    for batch in make(home, "packed", padding_free=True, pad_to_multiple_of=16):
        tokens = batch.num_tokens
        assert batch.input_ids.shape[1] == -(-tokens // 16) * 16
        assert batch.cu_seqlens[-1] == batch.input_ids.shape[1]
        assert (batch.labels[0, tokens:] == IGNORE).all()
        assert (batch.document_ids[0, tokens:] == 0).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(fields=st.sets(st.sampled_from(FIELDS)), kind=st.sampled_from(KINDS), padding_free=st.booleans())
def test_only_the_fields_asked_for_are_made_and_they_are_the_same(
    home: Path, fields: set[str], kind: str, padding_free: bool
) -> None:
    options: dict[str, Any] = {"padding_free": padding_free, "batch_size": 2, "rank": 1, "world_size": 2}
    whole = make(home, kind, **options).get_batch().to_numpy()
    some = make(home, kind, fields=sorted(fields | {"input_ids"}), **options).get_batch().to_numpy()
    wanted = (fields | {"input_ids"}) & set(whole)
    assert set(some) - {"max_seqlen"} == wanted - {"max_seqlen"}
    for name in set(some) & set(whole):
        assert np.array_equal(some[name], whole[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding_free", [False, True])
def test_batches_are_the_same_to_the_bit_in_every_framework(home: Path, kind: str, padding_free: bool) -> None:
    found = {}
    for backend in ("numpy", "torch", "mlx", "jax"):
        loader = make(home, kind, padding_free=padding_free, backend=backend)
        batches = [loader.get_batch() for _ in range(2)]
        assert [batch.backend.name for batch in batches] == [backend] * 2
        found[backend] = [
            {
                name: (value.dtype.str, value.shape, value.tobytes()) if hasattr(value, "dtype") else value
                for name, value in batch.to_numpy().items()
            }
            for batch in batches
        ]
    assert found["torch"] == found["mlx"] == found["jax"] == found["numpy"]


def test_batches_are_torch_tensors_unless_something_else_is_asked_for(home: Path) -> None:
    import torch

    batch = PretrainDataLoader(home / "text", chunk_size=12).get_batch()
    assert isinstance(batch.input_ids, torch.Tensor)
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_can_be_given_to_a_model(home: Path, kind: str) -> None:
    for loader in (make(home, kind), make(home, kind, padding_free=True)):
        for batch in (loader.get_batch(), next(iter(loader))):
            given = dict(**batch)
            assert {"input_ids", "labels", "position_ids"} <= set(given)
            assert "metadata" not in given
            assert ("attention_mask" in given) == (batch.cu_seqlens is None)
            assert batch.to("cpu").input_ids.tolist() == batch["input_ids"].tolist()


def test_pinning_and_a_device_are_harmless_without_an_accelerator(home: Path) -> None:
    wanted = [content(batch) for batch in make(home)]
    for more in ({"pin_memory": True}, {"device": "cpu"}, {"pin_memory": True, "device": "cpu"}):
        for backend in ("numpy", "torch"):
            assert [content(batch) for batch in make(home, backend=backend, **more)] == wanted


# Batches by tokens


def test_a_token_budget_holds_with_padding_and_uses_every_row_once(home: Path) -> None:
    for multiple in (None, 4):
        loader = make(home, max_tokens=40, pad_to_multiple_of=multiple)
        batches = list(loader)
        assert len(batches) == len(make(home, max_tokens=40, pad_to_multiple_of=multiple))
        assert max(batch.input_ids.size for batch in batches) <= 40
        rows = Counter(row for batch in batches for row in batch.metadata["row"].tolist())
        assert rows == dict.fromkeys(range(37), 1)
        for batch in batches:
            for place, row in enumerate(batch.metadata["row"].tolist()):
                assert batch.input_ids[place, : len(ROWS[row])].tolist() == ROWS[row]


def test_a_token_budget_without_padding_is_packed_to_the_brim(home: Path) -> None:
    batches = list(make(home, max_tokens=40, padding_free=True))
    sizes = [batch.input_ids.size for batch in batches]
    assert max(sizes) <= 40
    assert len(sizes) == -(-sum(map(len, ROWS)) // 40)
    rows = Counter(row for batch in batches for row in batch.metadata["row"].tolist())
    assert rows == dict.fromkeys(range(37), 1)


def test_every_rank_has_a_token_budget_of_its_own(home: Path) -> None:
    for padding_free in (False, True):
        options: dict[str, Any] = {"max_tokens": 40, "padding_free": padding_free, "world_size": 3}
        ranks = [list(make(home, rank=rank, **options)) for rank in range(3)]
        assert len({len(batches) for batches in ranks}) == 1
        sizes = [batch.input_ids.size for batches in ranks for batch in batches if len(batch.metadata["row"])]
        assert max(sizes) <= 40
        rows = Counter(row for batches in ranks for batch in batches for row in batch.metadata["row"].tolist())
        assert rows == dict.fromkeys(range(37), 1)


def test_a_batch_by_tokens_cannot_also_be_asked_for_by_rows(home: Path) -> None:
    loader = make(home, max_tokens=40)
    try:
        batch = loader.get_batch(batch_size=3)
    except ConfigError:
        return
    assert batch.input_ids.size <= 40


def test_a_token_budget_and_samples_of_one_length_are_refused_together(home: Path) -> None:
    for more in ({"packing": "concat"}, {"packing": "best_fit"}, {"packing": "concat", "padding_free": True}):
        with pytest.raises(ConfigError, match=r"max_tokens=40.*packing="):
            make(home, max_tokens=40, **more)


def test_a_row_longer_than_its_own_limit_is_refused_in_token_budgets_too(home: Path) -> None:
    for padding_free in (False, True):
        with pytest.raises(ValueError, match="truncation='right'"):
            list(
                PretrainDataLoader(
                    home / "text", chunk_size=6, packing=None, max_tokens=40, padding_free=padding_free, backend="numpy"
                )
            )


# What a fresh pair of eyes found


def test_a_source_that_is_closed_under_a_mixture_does_not_take_the_memory_along(home: Path) -> None:
    source = make(home, "concat")
    mixed = MixedDataLoader({"a": source}, {"a": 1.0}, chunk_size=24, batch_size=2, backend="numpy")
    expected = [batch.input_ids.tolist() for batch in mixed]
    mixed.reset()
    found = []
    with contextlib.suppress(ValueError):  # that the store is closed is said where more of it is needed
        for number, batch in enumerate(mixed):
            found.append(batch.input_ids.tolist())
            if number == 1:
                source.close()
    assert found == expected[: len(found)]
    assert len(found) > 1


def test_an_epoch_ends_though_its_last_windows_have_no_samples(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[1, 2]] * 4096 + [[1] * 9] * 5)
    loader = PretrainDataLoader(
        store, packing=None, chunk_size=4, truncation="drop", shuffle=False, batch_size=512, backend="numpy"
    )
    assert [(loader.epoch, len(list(loader))) for _ in range(3)] == [(0, 8), (1, 8), (2, 8)]


@pytest.mark.parametrize("fields", [("num_items_in_batch",), ("loss_mask", "num_items_in_batch")])
def test_supervised_tokens_are_counted_without_labels_too(tmp_path: Path, fields: tuple[str, ...]) -> None:
    store = make_store(tmp_path / "s", [[1, 2, 3, 4]] * 40)
    loader = PretrainDataLoader(
        store, packing=None, chunk_size=4, batch_size=2, backend="numpy", fields=("input_ids", *fields)
    )
    assert {batch.num_items_in_batch for batch in loader} == {6}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_lost_its_turn_says_so(home: Path, prefetch: int) -> None:
    for disturb in (lambda loader: iter(loader), lambda loader: loader.close()):
        loader = make(home, prefetch=prefetch)
        loop = iter(loader)
        next(loop)
        disturb(loader)
        with pytest.raises(RuntimeError, match=r"(?i)loader"):
            next(loop)


def test_a_loader_with_a_budget_travels_to_another_process(home: Path) -> None:
    loader = make(home, budget=MemoryBudget("64 MiB"))
    again = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
    assert next(iter(again)).input_ids.tolist() == next(iter(loader)).input_ids.tolist()


def test_a_mixture_that_ends_before_its_first_batch_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [[1, 2]] * 2)
    loader = MixedDataLoader(
        {"a": store},
        {"a": 1},
        packing="best_fit",
        chunk_size=4,
        batch_size=12,
        drop_last=True,
        max_epochs=1,
        backend="numpy",
    )
    with pytest.raises(ConfigError, match="drop_last=True"):
        list(loader)


def test_a_batch_of_another_size_is_refused_where_steps_are_counted(home: Path) -> None:
    loader = make(home)
    loader.edit(loader.plan.skip(3, 4))
    with pytest.raises(ConfigError, match=r"get_batch\(\)"):
        loader.get_batch(loader.batch_size + 1)


def test_a_batch_that_is_larger_than_an_epoch_is_refused_and_the_last_one_is_shorter(home: Path) -> None:
    samples = sum(batch.batch_size for batch in make(home))
    loader = make(home)
    with pytest.raises(ConfigError, match=f"a batch of {samples + 1} .* only {samples} samples"):
        loader.get_batch(samples + 1)
    assert loader.step == 0
    assert [loader.get_batch(size).batch_size for size in (samples, samples - 1, 5)] == [samples, samples - 1, 1]
    assert make(home, batch_size=samples + 1).get_batch().batch_size == samples, "its own size may be larger"
    half = samples // 2 + 1
    with pytest.raises(ConfigError, match=f"a batch of {half} x 2 ranks .* only {samples} samples"):
        make(home, rank=0, world_size=2).get_batch(half)
