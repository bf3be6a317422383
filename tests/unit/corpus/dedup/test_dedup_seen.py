"""What was seen: within a number of bytes, on disk beyond it, and back to any state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays.hashes import Words
from penstock.corpus.dedup.seen_keys import SeenKeys
from penstock.errors import ResumeError

TOP = (1 << 64) - 1


def keys(*numbers: int) -> Words:
    """Spread over the words as hashes are."""
    array = np.array(numbers, np.uint64).reshape(-1, 1, 1)
    return array * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


def saved(seen: SeenKeys) -> dict[str, object]:
    state: dict[str, object] = json.loads(json.dumps(seen.state_dict()))
    return state


@pytest.mark.parametrize("width", [1, 2])
def test_a_small_memory_spills_and_finds_the_same(width: int) -> None:
    rng = np.random.default_rng(width)
    nbytes = width * (64 << 10)
    small, large = SeenKeys(width, nbytes=nbytes), SeenKeys(width, nbytes=64 << 20)
    pool = rng.integers(1, TOP, (20_000, width), np.uint64)
    for _ in range(40):
        batch = pool[rng.integers(0, len(pool), (300, 3))]
        assert small.add(batch).tolist() == large.add(batch).tolist()
        assert small.nbytes <= nbytes
    assert small.spilled
    assert not large.spilled
    assert small.state_dict() == large.state_dict()


def test_one_batch_beyond_the_memory_is_taken_all_the_same() -> None:
    seen = SeenKeys(1, nbytes=1)
    batch = keys(*range(5000))
    assert not seen.add(batch).any()
    assert seen.add(batch).all()


def test_a_smaller_budget_moves_what_was_seen_to_disk() -> None:
    seen = SeenKeys(1, nbytes=64 << 20)
    seen.add(keys(*range(100_000)))
    assert seen.nbytes > 1 << 20
    seen.fit(256 << 10)
    assert seen.nbytes <= 256 << 10
    assert seen.add(keys(99_999, 100_000)).tolist() == [True, False]
    seen.fit(64 << 20)
    assert seen.add(keys(5, 100_001)).tolist() == [True, False]


def test_the_last_call_can_be_undone_without_a_log() -> None:
    seen = SeenKeys(1)
    seen.add(keys(1, 2))
    before = saved(seen)
    seen.add(keys(2, 3, 4))
    seen.load_state_dict(before)
    assert saved(seen) == before
    assert seen.add(keys(1, 3, 4)).tolist() == [True, False, False]
    seen.load_state_dict(before)
    seen.load_state_dict(before)
    assert seen.add(keys(3, 3)).tolist() == [False, True]


def test_without_a_log_nothing_older_can_be_loaded() -> None:
    seen = SeenKeys(1)
    seen.add(keys(1))
    state = saved(seen)
    seen.add(keys(2))
    seen.add(keys(3))
    with pytest.raises(ResumeError, match="directory="):
        seen.load_state_dict(state)


calls = st.lists(st.lists(st.integers(0, 60), max_size=8), min_size=1, max_size=10)


@given(calls, st.data(), st.sampled_from([1, 1 << 20]))
@settings(deadline=None, max_examples=80)
def test_any_state_can_be_gone_back_to_any_number_of_times(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], data: st.DataObject, nbytes: int
) -> None:
    log = tmp_path_factory.mktemp("seen") / "keys"
    seen = SeenKeys(1, log, nbytes)
    states, answers = [saved(seen)], []
    for batch in batches:
        answers.append(seen.add(keys(*batch)).tolist())
        states.append(saved(seen))
    for _ in range(3):
        at = data.draw(st.integers(0, len(batches)))
        if data.draw(st.booleans()):
            seen = SeenKeys(1, log, nbytes)
        elif data.draw(st.booleans()):
            seen.forget()
        seen.load_state_dict(states[at])
        assert saved(seen) == states[at]
        for batch, answer, state in zip(batches[at:], answers[at:], states[at + 1 :]):
            assert seen.add(keys(*batch)).tolist() == answer
            assert saved(seen) == state
    seen.sync()


def test_what_a_killed_run_wrote_after_its_state_is_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "keys"
    killed = SeenKeys(1, log)
    killed.add(keys(1, 2))
    state = saved(killed)
    killed.add(keys(3, 4, 5))
    with open(log, "ab") as file:
        file.write(b"half")  # of a key
    seen = SeenKeys(1, log)
    seen.load_state_dict(state)
    assert seen.add(keys(3, 2)).tolist() == [False, True]
    assert log.stat().st_size == 3 * 8
    later = SeenKeys(1, log)
    later.load_state_dict(saved(seen))
    assert later.add(keys(1, 2, 3, 4)).tolist() == [True, True, True, False]


def test_a_run_that_begins_anew_forgets_the_log_of_the_last_one(tmp_path: Path) -> None:
    SeenKeys(1, tmp_path / "keys").add(keys(1, 2, 3))
    seen = SeenKeys(1, tmp_path / "keys")
    assert not seen.add(keys(3)).any()
    assert (tmp_path / "keys").stat().st_size == 8


@pytest.mark.parametrize("damage", ["short", "changed", "gone"])
def test_a_log_that_does_not_fit_the_state_is_refused(tmp_path: Path, damage: str) -> None:
    log = tmp_path / "keys"
    seen = SeenKeys(2, log)
    seen.add(np.arange(2, 22, dtype=np.uint64).reshape(10, 1, 2))
    state, data = saved(seen), bytearray(log.read_bytes())
    if damage == "gone":
        log.unlink()
    elif damage == "short":
        log.write_bytes(data[:-1])
    else:
        data[77] ^= 4
        log.write_bytes(data)
    fresh = SeenKeys(2, log)
    with pytest.raises(ResumeError, match="damaged" if damage == "changed" else r"\bkeys\b"):
        fresh.load_state_dict(state)
    assert fresh.state_dict()["keys"] == 0


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"version": 1, "keys": -1, "digest": ""}, {"version": 1}])
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(ResumeError, match="deduplication"):
        SeenKeys(1).load_state_dict(state)


def test_a_log_that_cannot_be_written_leaves_nothing_half_done(tmp_path: Path) -> None:
    seen = SeenKeys(1, tmp_path / "keys")
    seen.add(keys(1))
    before = saved(seen)
    (tmp_path / "keys").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        seen.add(keys(2))
    (tmp_path / "elsewhere").rename(tmp_path / "keys")
    assert saved(seen) == before
    assert not seen.add(keys(2)).any()
