"""Groups that come in pieces: what is kept for those that are not whole, and what a run that is resumed knows of it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.loaders.rollout import RolloutDataLoader
from penstock.rl.live import LiveBuffer
from penstock.rl.queue import RolloutQueue
from penstock.rl.rollout import Rollout
from penstock.rl.sources import from_text, to_text


def one(name: Any, number: int = 0, version: int = 0) -> Rollout:
    return Rollout(
        prompt_ids=[1],
        response_ids=[2],
        reward=float(number),
        group=name,
        id=f"{name}.{number}",
        policy_version=version,
    )


def opened(home: Path, **more: Any) -> RolloutQueue:
    return RolloutQueue(home, **{"durable": False, "timeout_seconds": 300.0, **more})


def make(source: Any, **more: Any) -> RolloutDataLoader:
    fixed = {"rollout_batch_size": 2, "batch_size": 2, "group_size": 2, "backend": "numpy", "shuffle": False}
    return RolloutDataLoader(source, **{"estimator": "dr_grpo", **fixed, **more})


def held(loader: RolloutDataLoader) -> int:
    """Appends that the loader has in memory."""
    appends: Any = loader._engine.source.appends  # type: ignore[attr-defined]
    return len(appends._tables if hasattr(appends, "_tables") else appends._buffer._tables)


def files(home: Path) -> int:
    return len(list((home / "rollouts").glob("*.arrow")))


def names(loader: RolloutDataLoader) -> list[str]:
    return sorted(name for batch in loader for name in batch.ids)


@given(st.dictionaries(st.integers(0, 300), st.sets(st.integers(0, 20), min_size=1).map(sorted), max_size=40))
def test_what_is_pending_comes_back_from_its_text(rows: dict[int, list[int]]) -> None:
    assert from_text(to_text(rows)) == rows
    assert list(from_text(to_text(rows))) == sorted(rows)


def test_the_text_is_short_where_much_is_alike() -> None:
    assert to_text({}) == ""
    assert to_text({**{number: [0] for number in range(8, 256)}, 264: [0, 1, 2, 3, 7], 266: [0, 1, 2, 3, 7]}) == (
        "8x248 8:0-3,7 1"
    )
    with pytest.raises(ValueError, match="'x3'"):
        from_text("1 x3")


def test_a_state_stays_small_with_many_groups_in_flight(tmp_path: Path) -> None:
    with opened(tmp_path / "queue") as queue:
        for number in range(3):
            queue.append([one(name, number) for name in range(200)])
        for name in range(200):
            queue.append(one(f"late {name}"))
        queue.append([one(name, 3) for name in range(0, 200, 2)])
    with make(opened(tmp_path / "queue"), group_size=4, rollout_batch_size=400, batch_size=400) as loader:
        list(loader)
        state = json.dumps(loader.state_dict())
        assert '"pending": "' in state
        assert len(state) < 4096
        with pytest.raises(ResumeError):
            loader.load_state_dict(json.loads(state.replace('"pending": "', '"pending": "?')))


@pytest.mark.parametrize("kind", ["buffer", "queue"])
def test_a_half_group_holds_neither_memory_nor_in_the_end_the_disk(tmp_path: Path, kind: str) -> None:
    source: Any = LiveBuffer() if kind == "buffer" else opened(tmp_path / "queue")
    given_: Any = source if kind == "buffer" else opened(tmp_path / "queue")
    loader = make(given_, max_pending_appends=20)
    source.append(one("orphan"))
    for name in range(12):
        for number in range(2):
            source.append(one(name, number))
        assert names(loader) == [f"{name}.0", f"{name}.1"]
        assert held(loader) <= 3
        if kind == "queue":
            loader.commit()
            assert files(tmp_path / "queue") == (2 * name + 3 if name < 9 else 0)
    assert loader.counts == {"incomplete group": 1}
    source.append(one("orphan", 1))
    source.append(one("last", 0))
    source.append(one("last", 1))
    assert names(loader) == ["last.0", "last.1"], "what comes late is not put together with what was dropped"
    loader.close()
    source.close()


def test_a_run_that_goes_on_behind_a_half_group_has_the_same_batches(tmp_path: Path) -> None:
    with opened(tmp_path / "queue") as queue:
        queue.append([one("orphan"), one("late")])
        for name in range(6):
            queue.append(one(name))
            queue.append(one(name, 1))
        queue.append(one("late", 1))
        queue.finish()
    states, found = [], []
    with make(opened(tmp_path / "queue")) as loader:
        while not loader.ended:
            states.append(json.loads(json.dumps(loader.state_dict())))
            found.append(names(loader))
        assert found[-2:] == [["late.0", "late.1"], []]
        counted = loader.counts
        assert counted == {"incomplete group": 1}
    for number in (1, 4, 6):
        with make(opened(tmp_path / "queue")) as again:
            again.load_state_dict(states[number])
            assert [names(again) for _ in found[number:]] == found[number:]
            assert again.counts == counted


def test_groups_that_would_be_stale_are_not_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path / "queue") as queue, make(opened(tmp_path / "queue"), max_staleness=1) as loader:
        queue.append(one("orphan", version=0))
        for version in range(3):
            loader.policy_version = version
            queue.append([one(version, number, version) for number in range(2)])
            assert names(loader) == [f"{version}.0", f"{version}.1"]
            loader.commit()
            assert files(tmp_path / "queue") == (version + 2 if version < 2 else 0)
        assert loader.counts == {"stale": 1}


def test_a_group_that_is_waited_for_very_long_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    buffer = LiveBuffer()
    buffer.append(one("orphan"))
    for number in range(1100):
        buffer.append(one("a", number))
    loader = make(buffer, rollout_batch_size=1100, batch_size=1100)
    list(loader)
    assert "1101 appends" in caplog.text
    assert "max_pending_appends=" in caplog.text
    with pytest.raises(ConfigError, match="group_size="):
        make(buffer, group_size=None, max_pending_appends=3)


# -- A run that is resumed ---------------------------------------------------------------------------------------------


def test_a_rollout_that_cannot_be_used_is_got_past_as_the_error_says(tmp_path: Path) -> None:
    with opened(tmp_path / "queue") as queue:
        queue.append([one("a"), one("a", 1)])
        queue.append([one("b"), Rollout(prompt_ids=[1], response_ids=[2], group="b", id="b.1")])
        queue.append([one("c"), one("c", 1)])
    with make(opened(tmp_path / "queue"), group_size=None) as loader:
        list(loader)
        state = loader.state_dict()
        for _ in range(2):
            with pytest.raises(DataError, match=r"'b\.1'.*missing_rewards='zero'"):
                list(loader)
    with make(opened(tmp_path / "queue"), group_size=None, missing_rewards="zero") as again:
        again.load_state_dict(state)
        assert names(again) == ["b.0", "b.1"]
        assert names(again) == ["c.0", "c.1"]


@pytest.mark.parametrize("killed_at", range(5))
def test_the_loop_of_the_docs_is_exact_wherever_it_is_killed(tmp_path: Path, killed_at: int) -> None:
    """The policy's version is set in front of each loop; engines answer with it; states are taken within."""
    home, saved, seen = tmp_path / "queue", "", []
    turns = count()

    def train(source: RolloutQueue, state: str, stop: int | None) -> None:
        nonlocal saved
        with make(source, max_staleness=0, ppo_epochs=2) as loader:
            if state:
                loader.load_state_dict(json.loads(state))
            for _ in range(3):
                loader.policy_version = loader.epoch
                name = f"{loader.epoch}, {next(turns)}"
                with opened(home) as engine:
                    engine.append([one(name, number, loader.epoch) for number in range(2)])
                for batch in loader:
                    seen.append((batch.metadata["step"], batch.metadata["policy_version"], len(batch.ids)))
                    saved = json.dumps(loader.state_dict())
                    if len(seen) == stop:
                        return

    train(opened(home), "", killed_at + 1)
    train(opened(home), saved, 6)
    assert seen == [(step, step // 2, 2) for step in range(6)]


def test_a_version_that_was_not_set_behind_a_state_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def filled(version: int) -> LiveBuffer:
        buffer = LiveBuffer()
        buffer.append([one(version, number, version) for number in range(2)])
        return buffer

    loader = make(filled(0), policy_version=0)
    for _ in loader:
        early = loader.state_dict()
    loader.policy_version = 1
    late = loader.state_dict()
    for state, said in ((late, False), (early, True)):
        again = make(filled(1), policy_version=0)
        again.load_state_dict(state)
        if said:
            with pytest.raises(DataError, match=r"version 1\b.*version 0\b"):
                list(again)
            again.policy_version = 1
        assert names(again) == ["1.0", "1.1"]
        assert ("set loader.policy_version" in caplog.text) == said
