"""Rollouts that come while the trainer reads: in memory, and in a directory that outlives everybody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, ResumeError, StalledError
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl.live import LiveBuffer
from penstock.rl.queue import RolloutQueue
from penstock.rl.rollout import Rollout


def group(name: Any, size: int = 2, version: int = 0, first: int = 0, same: bool = False) -> list[Rollout]:
    return [
        Rollout(
            prompt_ids=[7, 8],
            response_ids=list(range(1, 2 + number % 3)),
            reward=0.0 if same else float(number),
            group=name,
            id=f"{name}.{number}",
            policy_version=version,
        )
        for number in range(first, first + size)
    ]


def make(source: Any, **more: Any) -> RolloutDataLoader:
    given = {"rollout_batch_size": 4, "batch_size": 4, "backend": "numpy", "estimator": "dr_grpo", "shuffle": False}
    return RolloutDataLoader(source, **{**given, **more})


def rounds(loader: RolloutDataLoader, most: int = 99) -> list[list[str]]:
    """The rollouts of each rollout batch, until the source ends."""
    found: list[list[str]] = []
    while len(found) < most and (names := sorted({name for batch in loader for name in batch.ids})):
        found.append(names)
    return found


def names(*groups: Any, size: int = 2) -> list[str]:
    return sorted(f"{name}.{number}" for name in groups for number in range(size))


# -- In memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_a_loop_is_over_one_rollout_batch_and_the_last_is_what_is_left(prefetch: int | None) -> None:
    buffer = LiveBuffer()
    for name in "abcde":
        buffer.append(group(name))
    buffer.close()
    loader = make(buffer, ppo_epochs=2, batch_size=2, prefetch=prefetch)
    facts = [batch.metadata for batch in loader]
    assert [(t["rollout_batch"], t["ppo_epoch"], t["minibatch"]) for t in facts] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert not loader.ended
    assert rounds(loader) == [names("c", "d"), names("e")]
    assert loader.ended
    with pytest.raises(EOFError, match="LiveBuffer"):
        loader.get_batch()
    with pytest.raises(TypeError, match="LiveBuffer"):
        len(loader)


def test_engines_append_from_threads_while_the_trainer_reads() -> None:
    buffer = LiveBuffer(capacity=6, timeout_seconds=300)
    made = [[f"{engine}-{number}" for number in range(12)] for engine in range(3)]

    def engine(own: list[str]) -> None:
        for name in own:
            buffer.append(group(name))

    threads = [threading.Thread(target=engine, args=(own,)) for own in made]

    def close() -> None:
        for thread in threads:
            thread.join()
        buffer.close()

    closing = threading.Thread(target=close)
    for thread in (*threads, closing):
        thread.start()
    found = rounds(make(buffer, rollout_batch_size=8, batch_size=8))
    closing.join()
    seen = [name for names_ in found for name in names_]
    assert sorted(seen) == sorted(names(*(name for own in made for name in own)))
    assert [len(names_) for names_ in found] == [8] * 9


def test_a_full_buffer_makes_engines_wait_or_raises() -> None:
    buffer = LiveBuffer(capacity=2, on_full="raise")
    buffer.append(group("a"))
    with pytest.raises(StalledError, match="capacity"):
        buffer.append(group("b"))
    waiting = LiveBuffer(capacity=2, timeout_seconds=0.05)
    waiting.append(group("a"))
    with pytest.raises(StalledError, match="capacity"):
        waiting.append(group("b"))


def test_what_the_loader_waits_for_is_let_in_though_the_buffer_is_full() -> None:
    buffer = LiveBuffer(capacity=1, timeout_seconds=300)

    def engine() -> None:
        for name in "ab":
            buffer.append(group(name))

    thread = threading.Thread(target=engine)
    thread.start()
    assert rounds(make(buffer), 1) == [names("a", "b")]
    thread.join()


def test_waiting_for_rollouts_ends_with_a_word_about_what_is_missing() -> None:
    buffer = LiveBuffer(timeout_seconds=0.05)
    buffer.append([*group("a"), *group("b", 1)])
    loader = make(buffer, group_size=2)
    with pytest.raises(StalledError, match=r"\b2\b.*\b4\b"):
        loader.get_batch()
    buffer.append(group("b", 1, first=1))
    assert rounds(loader, 1) == [names("a", "b")], "what was waited with is not lost"


def test_a_group_is_whole_when_group_size_rollouts_of_it_came() -> None:
    buffer = LiveBuffer()
    for rollout in (*group("a", 1), *group("b", 2), *group("c", 1), *group("a", 1, first=1)):
        buffer.append(rollout)
    buffer.append([*group("c", 1, first=1), *group("d", 3), *group("e", 1)])
    buffer.close()
    loader = make(buffer, group_size=2)
    assert rounds(loader) == [names("a", "b"), names("c", "d")]
    assert loader.counts == {"incomplete group": 2}


def test_without_group_size_the_rollouts_of_an_append_belong_together() -> None:
    buffer = LiveBuffer()
    buffer.append([*group("a", 3), *group("b", 2)])
    buffer.append(group("a", 2, first=3))
    buffer.close()
    loader = make(buffer, rollout_batch_size=7, batch_size=7)
    (batch,) = loader
    per_append = [[-1.0, 0.0, 1.0], [-0.5, 0.5], [-0.5, 0.5]]
    assert sorted(batch.metadata["advantages"][:, 0].tolist()) == sorted(chain(*per_append))


def test_a_group_cannot_become_whole_without_a_name() -> None:
    buffer = LiveBuffer()
    buffer.append(group("~a", 2))
    buffer.append(Rollout(prompt_ids=[1], response_ids=[2], reward=1.0, id="x"))
    with pytest.raises(DataError, match=r"'x'.*group_size=2"):
        make(buffer, group_size=2).get_batch()
    assert rounds(make(buffer, rollout_batch_size=3, preset="trl"), 1) == [["x", "~a.0", "~a.1"]]


def test_incomplete_groups_at_the_end_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    buffer = LiveBuffer()
    buffer.append([*group("a", 2), *group("b", 1)])
    buffer.close()
    loader = make(buffer, group_size=2)
    assert rounds(loader) == [names("a")]
    assert loader.counts == {"incomplete group": 1}
    assert "group_size=2" in caplog.text


def test_dynamic_sampling_takes_more_until_the_rollout_batch_is_full() -> None:
    buffer = LiveBuffer()
    for number in range(7):
        buffer.append(group(number, same=number % 2 == 0))
    buffer.close()
    loader = make(buffer, drop_zero_variance=True)
    assert rounds(loader) == [names(1, 3), names(5)]
    assert loader.counts == {"zero variance": 8}


def test_staleness_is_counted_from_the_version_when_a_rollout_batch_is_begun() -> None:
    buffer = LiveBuffer()
    for version in (0, 0, 0, 1, 2, 2):
        buffer.append(group(f"{version}-{len(buffer)}", version=version))
    loader = make(buffer, max_staleness=0, policy_version=0, rollout_batch_size=2, batch_size=2, ppo_epochs=2)
    assert [batch.groups[0] for batch in loader] == ["0-0", "0-0"]
    for batch in loader:
        loader.policy_version = 2
        assert batch.groups[0] == "0-2"
    assert [batch.groups[0] for batch in loader] == ["2-8", "2-8"]
    assert loader.counts == {"stale": 4}
    assert [batch.metadata["policy_version"] for batch in loader] == [2, 2]


def test_all_that_was_dropped_is_counted_when_nothing_else_is_left() -> None:
    for given_, wanted in (
        ([*(group(name) for name in "ab"), group("c", 1)], {"incomplete group": 1}),
        ([group("old"), group("older")], {"stale": 4}),
    ):
        buffer = LiveBuffer()
        for rollouts in given_:
            buffer.append(rollouts)
        buffer.close()
        version = 5 if "stale" in wanted else 0
        loader = make(buffer, group_size=2, policy_version=version, max_staleness=1)
        while not loader.ended:
            list(loader)
        assert loader.counts == wanted
        again = make(LiveBuffer(), group_size=2, policy_version=version, max_staleness=1)
        again.load_state_dict(loader.state_dict())
        assert again.counts == wanted


def test_waiting_in_vain_says_what_was_dropped() -> None:
    buffer = LiveBuffer(timeout_seconds=0.05)
    buffer.append([*group("a", 3), *group("b", 3)])
    with pytest.raises(StalledError, match=r"\b0\b.*\b4\b"):
        make(buffer, policy_version=5, max_staleness=1).get_batch()


def test_one_rollout_may_be_a_dict_and_several_a_dict_of_columns() -> None:
    one: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4], "reward": 1.0, "group": "a", "id": "one"}
    buffer = LiveBuffer()
    for given_, count in (
        (one, 1),
        ({"prompt_ids": [1], "response_ids": [2], "metadata": {"x": [[1]]}}, 1),
        ({"prompt_ids": np.array([1]), "response_ids": np.array([2])}, 1),
        ({"turns": [{"role": "user", "ids": [1]}, {"role": "assistant", "ids": [2]}], "reward": 1.0}, 1),
        ({name: [value, value] for name, value in one.items()} | {"id": ["two", "three"]}, 2),
        ({"prompt_ids": np.ones((3, 1), int), "response_ids": np.ones((3, 2), int)}, 3),
    ):
        before = len(buffer)
        buffer.append(given_)
        assert len(buffer) == before + count, given_


def test_a_version_from_the_future_names_the_sample() -> None:
    buffer = LiveBuffer()
    buffer.append(group("a", version=9, size=4))
    with pytest.raises(DataError, match=r"'a\.0'.*version 9\b"):
        make(buffer, policy_version=3).get_batch()


def test_a_buffer_can_be_saved_when_everything_was_used_and_not_before() -> None:
    buffer = LiveBuffer()
    for name in "abc":
        buffer.append(group(name))
    loader = make(buffer, batch_size=2)
    loader.get_batch()
    with pytest.raises(ConfigError, match="RolloutQueue"):
        loader.state_dict()
    loader.get_batch()
    with pytest.raises(ConfigError, match="LiveBuffer"):
        loader.state_dict()
    buffer.append(group("d"))
    assert rounds(loader, 1) == [names("c", "d")]
    state = json.loads(json.dumps(loader.state_dict()))
    fresh = LiveBuffer()
    fresh.append([*group("e"), *group("f")])
    again = make(fresh, batch_size=2)
    again.load_state_dict(state)
    assert (again.step, again.epoch) == (4, 2)
    assert rounds(again, 1) == [names("e", "f")]


def test_what_cannot_work_with_a_buffer_is_refused() -> None:
    buffer = LiveBuffer()
    with pytest.raises(ConfigError, match="rollout_batch_size="):
        make(buffer, rollout_batch_size=None)
    with pytest.raises(ConfigError, match=r"rank 0\b.*RolloutQueue"):
        make(buffer, rank=0, world_size=2)
    make(LiveBuffer(replicated=True), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="capacity"):
        LiveBuffer(capacity=0)
    with pytest.raises(DataError):
        buffer.append([])
    buffer.append(group("a"))
    with pytest.raises(DataError, match="values"):
        buffer.append(Rollout(prompt_ids=[1], response_ids=[2], reward=0.0, values=[0.5]))
    assert len(buffer) == 2, "what was wrong is not in it"
    buffer.close()
    with pytest.raises(ConfigError):
        buffer.append(group("b"))
    loader = make(buffer)
    loader.get_batch()
    with pytest.raises(TypeError, match="LiveBuffer"):
        loader.seek(3)


# -- In a directory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def opened(home: Path, **more: Any) -> RolloutQueue:
    return RolloutQueue(home, **{"durable": False, "timeout_seconds": 300.0, **more})


def test_rollouts_go_through_the_directory_unchanged(home: Path) -> None:
    rng = np.random.default_rng(0)
    given_ = [
        Rollout(
            prompt_ids=[5, number % 2, 7],
            response_ids=rng.integers(0, 99, 4),
            reward=float(number),
            logprobs=-rng.random(4).astype(np.float32),
            loss_mask=[1, 0, 1, 1],
            group=("a", 7)[number % 2],
            id=str(number),
            policy_version=2,
            metadata={"task": number},
        )
        for number in range(4)
    ]
    with opened(home) as queue:
        queue.append(given_)
        queue.finish()
    with make(opened(home)) as loader:
        (batch,) = loader
    direct = RolloutDataLoader(given_, estimator="dr_grpo", backend="numpy", shuffle=False).get_batch()
    order = [batch.ids.index(name) for name in direct.ids]
    for name in ("rewards", "advantages", "old_log_probs", "response_mask", "policy_versions"):
        np.testing.assert_array_equal(batch.metadata[name][order], direct.metadata[name])
    np.testing.assert_array_equal(batch.input_ids[order], direct.input_ids)
    assert [batch.groups[row] for row in order] == direct.groups


def test_every_rank_reads_everything_and_takes_its_share(home: Path) -> None:
    with opened(home) as queue:
        for name in "abcdefgh":
            queue.append(group(name))
        queue.finish()
    wanted = [names("a", "b"), names("c", "d"), names("e", "f"), names("g", "h")]
    with make(opened(home)) as alone:
        assert rounds(alone, 1) == wanted[:1]
        state = alone.state_dict()
        assert rounds(alone) == wanted[1:]
    found: dict[int, list[list[str]]] = {}

    def read(rank: int) -> None:
        with make(opened(home), rank=rank, world_size=2, batch_size=2) as loader:
            loader.load_state_dict(state)
            found[rank] = rounds(loader)
            loader.commit()

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = [sorted(one + other) for one, other in zip(found[0], found[1], strict=True)]
    assert together == wanted[1:]


def killed(loader: RolloutDataLoader) -> None:
    """The loader does nothing more, as after a kill; only its thread has to end."""
    loader._engine.source.appends._reading[1].leave()  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_run_goes_on_with_what_was_generated_and_not_trained_on(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Killed again and again, and resumed from its last checkpoint: the minibatches of a run that nobody killed."""
    home = tmp_path_factory.mktemp("run") / "queue"
    rollouts = [rollout for name in range(7) for rollout in group(name, 3)]
    order = data.draw(st.permutations(range(len(rollouts))), label="order")
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, 20), min_size=3, max_size=9), label="appends"), len(order)})
    with opened(home) as queue:
        for low, high in pairwise(cuts):
            queue.append([rollouts[number] for number in order[low:high]])
        queue.finish()
    fixed = {"group_size": 3, "rollout_batch_size": 5, "batch_size": 3, "ppo_epochs": 2, "shuffle": True}

    def facts(batch: Any) -> Any:
        return batch.metadata["step"], batch.ids, batch.metadata["advantages"].tolist()

    loader = make(opened(home), **fixed)
    state, saved, wanted = json.dumps(loader.state_dict()), 0, []
    while epoch := [facts(batch) for batch in loader]:
        wanted += epoch
    killed(loader)
    assert len(wanted) == 14
    for count in [*data.draw(st.lists(st.integers(1, 6), max_size=5), label="steps until a kill"), len(wanted)]:
        loader = make(opened(home), **fixed)
        loader.load_state_dict(json.loads(state))
        for number in range(saved, min(saved + count, len(wanted))):
            assert facts(loader.get_batch()) == wanted[number]
            if data.draw(st.booleans(), label="checkpoint"):
                state, saved = json.dumps(loader.state_dict()), number + 1
                loader.commit(json.loads(state))
        killed(loader)


def test_what_was_committed_is_deleted_and_nothing_else(home: Path) -> None:
    with opened(home) as queue:
        for name in "abcdef":
            queue.append(group(name))

        def there() -> int:
            return len(list((home / "rollouts").glob("*.arrow")))

        with make(opened(home)) as loader:
            assert rounds(loader, 1) == [names("a", "b")]
            state = loader.state_dict()
            assert rounds(loader, 1) == [names("c", "d")]
            assert there() == 6
            loader.commit(state)
            assert there() == 4
            loader.load_state_dict(state)
            assert rounds(loader, 1) == [names("c", "d")]
            loader.commit()
            assert there() == 2
        with make(opened(home)) as old, pytest.raises(ResumeError, match="'rollouts'"):
            old.load_state_dict(state)
        with make(opened(home)) as fresh:
            assert rounds(fresh, 1) == [names("e", "f")]


def test_a_trainer_waits_for_a_queue_that_is_made_later(home: Path) -> None:
    def produce() -> None:
        with opened(home) as queue:
            for name in "ab":
                queue.append(group(name))

    thread = threading.Thread(target=produce)
    with make(opened(home)) as loader:
        thread.start()
        assert rounds(loader, 1) == [names("a", "b")]
        thread.join()


def test_waiting_for_a_queue_ends_with_a_word_about_what_is_missing(home: Path) -> None:
    with opened(home) as queue:
        queue.append(group("a"))
        with (
            make(opened(home, timeout_seconds=0.1)) as loader,
            pytest.raises(StalledError, match=r"\b0\.1\b.*\b2\b"),
        ):
            loader.get_batch()
        with make(opened(home, timeout_seconds=0.1)) as patient:
            with pytest.raises(StalledError):
                patient.get_batch()
            queue.append(group("b"))
            assert rounds(patient, 1) == [names("a", "b")], "what was waited with is not lost"


def test_a_full_queue_makes_producers_wait(home: Path) -> None:
    with opened(home, max_waiting=2, timeout_seconds=0.1) as queue:
        queue.append(group("a"))
        queue.append(group("b"))
        with pytest.raises(StalledError, match="max_waiting"):
            queue.append(group("c"))
        with make(opened(home)) as loader:
            loader.get_batch()
            queue.append(group("d"))


def test_many_producers_at_once_lose_and_repeat_nothing(home: Path) -> None:
    def engine(number: int) -> None:
        with opened(home) as queue:
            for name in range(8):
                queue.append(group(f"{number}-{name}"))

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with make(opened(home), rollout_batch_size=8, batch_size=8) as loader:
        found = rounds(loader, 8)
    for thread in threads:
        thread.join()
    assert sorted(chain(*found)) == names(*(f"{number}-{name}" for number in range(4) for name in range(8)))


def test_a_finished_queue_takes_no_more(home: Path) -> None:
    with opened(home) as queue:
        queue.append(group("a"))
        queue.finish()
        queue.finish()
        with pytest.raises(ConfigError, match=r"queue.*\b1\b"):
            queue.append(group("b"))
    with make(opened(home)) as loader:
        assert rounds(loader) == [names("a")]


def test_what_does_not_go_together_is_refused_where_it_is_appended(home: Path) -> None:
    odd = Rollout(prompt_ids=[1], response_ids=[2], reward=0.0, values=[0.5])
    with opened(home) as queue, opened(home) as other:
        queue.append(group("a"))
        with pytest.raises(DataError, match="values"):
            other.append(odd)
        with make(opened(home), rollout_batch_size=2) as loader:
            assert rounds(loader, 1) == [names("a")]
            loader.commit()
        with opened(home) as late, pytest.raises(DataError, match="values"):
            late.append(odd)
        other.append(group("b"))
        with make(opened(home), rollout_batch_size=2) as loader:
            assert rounds(loader, 1) == [names("b")], "what was refused has left no gap"


def test_what_got_past_that_is_refused_again_and_not_passed_over(home: Path) -> None:
    with opened(home) as queue:
        queue.append(group("a"))
    (home / "columns.json").unlink()
    with opened(home) as queue:
        queue.append(Rollout(prompt_ids=[1], response_ids=[2], reward=0.0, values=[0.5]))
    with make(opened(home)) as loader:
        for _ in range(2):
            with pytest.raises(DataError, match="values"):
                loader.get_batch()


def test_rollouts_without_an_id_are_called_by_their_append(home: Path) -> None:
    with opened(home) as queue:
        for number in range(2):
            queue.append({"prompt_ids": [1], "response_ids": [2], "reward": float(n), "group": number} for n in (0, 1))
        queue.append([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "group": 3, "id": n} for n in ("0", "x")])
        queue.append([Rollout(prompt_ids=[1], response_ids=[2], reward=1.0, group=3, id=n) for n in ("1", None)])
    with make(opened(home), rollout_batch_size=8, batch_size=8) as loader:
        assert next(iter(loader)).ids == ["0:0", "0:1", "1:0", "1:1", "0", "x", "1", "3:1"]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("repaired", [False, True])
def test_an_append_that_was_damaged_is_put_aside_and_counted_if_asked(home: Path, last: bool, repaired: bool) -> None:
    with opened(home) as queue:
        for name in "abc":
            queue.append(group(name))
        queue.finish()
    damaged = sorted((home / "rollouts").glob("*.arrow"))[2 if last else 1]
    damaged.write_bytes(damaged.read_bytes()[:100])
    with make(opened(home)) as loader, pytest.raises(DataError, match='on_error="skip"'):
        rounds(loader)
    if repaired:
        damaged.rename(f"{damaged}.bad")
    with make(opened(home, on_error="skip")) as loader:
        start = loader.state_dict()
        for _ in range(2):
            assert rounds(loader) == [names("a", "b" if last else "c")]
            assert loader.counts == {"unreadable append": 1}
            loader.load_state_dict(start)
    with pytest.raises(ConfigError, match=r"on_error.*'raise'"):
        RolloutQueue(home, on_error="drop")  # type: ignore[arg-type]


PRODUCER = """
    import os, sys
    import penstock.fsqueue.batch_file as filing
    import penstock.fsqueue.publisher as publisher
    from penstock.rl.queue import RolloutQueue

    def half_way(path, data, **more):
        with open(path, "wb") as out:
            out.write(bytes(data)[: data.size // 2])
            out.flush()
            os.fsync(out.fileno())
        print("half way", flush=True)
        sys.stdin.read()

    queue = RolloutQueue(sys.argv[1], durable=False, lease_seconds=1.0)
    rows = [{"prompt_ids": [1], "response_ids": [2], "reward": n, "group": "dead", "id": f"dead.{n}"} for n in (0, 1)]
    queue.append([{**row, "group": "whole", "id": f"whole.{n}"} for n, row in enumerate(rows)])
    publisher.write = half_way
    queue.append(rows)
"""


def test_a_producer_that_dies_in_the_middle_of_a_write_leaves_nothing_to_read(home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRODUCER), str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "half way\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    with opened(home, lease_seconds=1.0) as queue:
        queue.append(
            [Rollout(prompt_ids=[1], response_ids=[2], reward=float(n), group="b", id=f"b.{n}") for n in (0, 1)]
        )
        queue.finish()
    with make(opened(home)) as loader:
        assert rounds(loader) == [names("whole", "b")]
    assert not [path.name for path in (home / "rollouts").iterdir() if "tmp" in path.name]
