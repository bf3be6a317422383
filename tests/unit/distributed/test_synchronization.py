from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.distributed
import penstock.distributed.synchronization as module
from penstock.distributed import (
    DirectoryRendezvous,
    EndOfEpoch,
    Rank,
    Rendezvous,
    barrier,
    find_rendezvous,
    gather_states,
    merge_states,
)
from penstock.errors import ConfigError, ResumeError, StalledError
from penstock.files.states import StateFormat

PATIENCE = 30.0


class Notes(dict[str, bytes]):
    """A rendezvous in memory, for ranks that are threads."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def together(world: int, act: Callable[[Rank], Any]) -> list[Any]:
    """What each rank returned or raised, all of them running at once."""
    results: list[Any] = [None] * world

    def run(rank: Rank) -> None:
        try:
            results[rank.rank] = act(rank)
        except Exception as error:
            results[rank.rank] = error

    threads = [threading.Thread(target=run, args=(Rank(number, world),), daemon=True) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture(params=["memory", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Rendezvous:
    return Notes() if request.param == "memory" else DirectoryRendezvous(tmp_path / "meet")


def test_nobody_passes_a_barrier_before_everybody_came(place: Rendezvous) -> None:
    came: list[int] = []

    def act(rank: Rank) -> list[int]:
        seen = []
        for _ in range(3):
            came.append(rank.rank)
            barrier(place, rank, "start", PATIENCE)
            seen.append(len(came))
            barrier(place, rank, "rest", PATIENCE)
        return seen

    assert together(3, act) == [[3, 6, 9]] * 3


def test_a_barrier_names_the_ranks_that_did_not_come(place: Rendezvous) -> None:
    def act(rank: Rank) -> None:
        if rank.rank in (0, 2):
            barrier(place, rank, "start", 0.2)

    first, _, third, _ = together(4, act)
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, StalledError)
        assert re.search(rf"rank {rank} of 4\b.*0\.2 s.*'barrier start'.*ranks 1 and 3\b", str(error))


def test_a_silent_rank_0_is_named_even_if_it_came() -> None:
    notes = Notes({"penstock/barrier b/2/0/0": b""})
    with pytest.raises(StalledError, match=r"rank 0\b"):
        barrier(notes, Rank(1, 2), "b", 0.05)


def test_used_notes_are_taken_away() -> None:
    notes = Notes()

    def act(rank: Rank) -> None:
        for _ in range(40):
            barrier(notes, rank, "b", PATIENCE)

    assert together(2, act) == [None, None]
    assert len(notes) <= 16 + 2 * 3


def test_one_rank_needs_nobody() -> None:
    notes = Notes()
    barrier(notes, Rank(), "alone", 0)
    end = EndOfEpoch(notes, Rank(), 0, 0)
    end.passed(0)
    assert end.more(0)
    end.ended(1)
    assert (end.more(1), end.steps, len(notes)) == (False, 1, 0)
    assert gather_states({"step": 3}, rank=Rank(), rendezvous=notes) == {"step": 3}


def test_processes_that_share_a_data_rank_meet_as_one() -> None:
    """Two processes for each data rank, in turn: the second pair finds the answers of the first."""
    notes = Notes()
    states = [{"streams": {"0": 5}}, {"streams": {"1": 7}}]
    expected = [{"streams": {"0": 5, "1": 7}}] * 2

    def act(rank: Rank) -> Any:
        return gather_states(states[rank.rank], rank=rank, rendezvous=notes, timeout_seconds=PATIENCE)

    assert together(2, act) == expected
    module_turns = _forget_turns(notes)
    assert together(2, act) == expected
    assert module_turns == 2


def test_groups_of_different_sizes_do_not_mix_their_notes() -> None:
    """Ranks 0 and 1 have met before, as a group of two; rank 2 has not."""
    notes = Notes()

    def act(rank: Rank) -> Any:
        return gather_states({"streams": {rank.rank: 0}}, rank=rank, rendezvous=notes, timeout_seconds=PATIENCE / 3)

    assert together(2, act) == [{"streams": {"0": 0, "1": 0}}] * 2
    assert together(3, act) == [{"streams": {"0": 0, "1": 0, "2": 0}}] * 3


def _forget_turns(notes: Notes) -> int:
    """As if another process used the notes, which has its own count of meetings."""
    from penstock.distributed import synchronization as rendezvous

    return len(rendezvous._turns_of_stores.pop(notes))


def run_epoch(end: EndOfEpoch, own_steps: int, step_together: Callable[[], Any] = lambda: None) -> int:
    """A streaming loader in small: data as long as there is some, then blanks as long as others have data."""
    step = 0
    while True:
        if step < own_steps:
            end.passed(step)
        else:
            end.ended(own_steps)
        if not end.more(step):
            return step
        step_together()
        step += 1


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), lockstep=st.booleans())
def test_all_ranks_stop_after_the_longest(lengths: list[int], lockstep: bool) -> None:
    """In lockstep a rank that posted its step sits in a collective until the others have come as far."""
    notes, collective = Notes(), threading.Barrier(len(lengths), timeout=PATIENCE)
    ends: dict[int, EndOfEpoch] = {}

    def act(rank: Rank) -> int:
        ends[rank.rank] = end = EndOfEpoch(notes, rank, 0, PATIENCE)
        return run_epoch(end, lengths[rank.rank], collective.wait if lockstep else lambda: None)

    assert together(len(lengths), act) == [max(lengths)] * len(lengths)
    assert {end.steps for end in ends.values()} == {max(lengths)}


def test_notes_of_an_earlier_pass_over_the_same_epoch_mean_nothing(place: Rendezvous) -> None:
    def act(rank: Rank) -> list[int]:
        return [run_epoch(EndOfEpoch(place, rank, 4, PATIENCE), steps * (rank.rank + 1)) for steps in (1, 3, 0, 2)]

    assert together(2, act) == [[2, 6, 0, 4]] * 2


def test_a_rank_with_data_does_not_wait() -> None:
    end = EndOfEpoch(Notes(), Rank(0, 4), 0, timeout_seconds=0)
    for step in range(100):
        end.passed(step)
        assert end.more(step)
    assert end.steps is None


def test_a_rank_that_knows_its_data_ahead_posts_once() -> None:
    posted = []

    class Counting(Notes):
        def set(self, key: str, value: bytes) -> None:
            posted.append(value)
            super().set(key, value)

    notes = Counting()
    ahead, ended = EndOfEpoch(notes, Rank(0, 2), 0, PATIENCE), EndOfEpoch(notes, Rank(1, 2), 0, 0)
    ahead.passed(99)
    for step in range(100):
        ahead.passed(step)
    assert posted == [b"passed 100"]
    ended.ended(3)
    assert all(ended.more(step) for step in range(100))


def test_a_rank_that_ended_names_those_it_waits_for() -> None:
    notes = Notes()
    ends = [EndOfEpoch(notes, Rank(number, 4), 7, 0.1) for number in range(4)]
    ends[1].ended(2)
    ends[2].passed(4)
    ends[0].ended(5)
    with pytest.raises(StalledError) as caught:
        ends[0].more(5)
    assert re.search(
        r"rank 0 of 4\b.*0\.1 s.*ranks 2 and 3\b.*step 5 of epoch 7\b.*rank 2: step 4\b", str(caught.value)
    )
    ends[2].ended(5)
    ends[3].passed(5)
    assert ends[0].more(5), "it may be asked again"


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_killed_rank_is_named_with_its_last_step(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from penstock.distributed import DirectoryRendezvous, EndOfEpoch, Rank
end = EndOfEpoch(DirectoryRendezvous(sys.argv[1]), Rank(1, 2), 0)
for step in range(3):
    end.passed(step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    end = EndOfEpoch(DirectoryRendezvous(tmp_path), Rank(0, 2), 0, 0.1)
    end.ended(1)
    assert [end.more(step) for step in range(3)] == [True, True, True]
    with pytest.raises(StalledError, match=r"rank 1\b.*step 3\b"):
        end.more(3)


def test_contradictions_are_refused() -> None:
    end = EndOfEpoch(Notes(), Rank(0, 2), 0, 0)
    with pytest.raises(ConfigError, match=r"step 0\b"):
        end.more(0)
    end.passed(5)
    with pytest.raises(ConfigError, match=r"step 3\b"):
        end.ended(3)
    end.ended(6)
    end.ended(6)
    with pytest.raises(ConfigError, match=r"step 6\b"):
        end.passed(6)
    with pytest.raises(ConfigError, match=r"step 7\b"):
        end.ended(7)


def test_a_broken_rendezvous_says_so() -> None:
    class Broken(Notes):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nframe #0: 0xdead")

    with pytest.raises(StalledError, match=r"rank 1\b.*rank 0\b"):
        barrier(Broken(), Rank(1, 2), "b", 1)
    end = EndOfEpoch(Broken(), Rank(1, 2), 0, 1)
    end.ended(0)
    with pytest.raises(StalledError, match=r"step 0\b.*epoch 0\b"):
        end.more(0)


def test_without_torch_there_is_no_rendezvous_to_find() -> None:
    with pytest.raises(ConfigError, match=r"rendezvous=penstock\.distributed\.DirectoryRendezvous"):
        find_rendezvous()
    assert penstock.distributed.DirectoryRendezvous is DirectoryRendezvous, "as the message names it"


STATE = {"version": 1, "plan": "abc", "step": 12, "sources": {"web": {"epoch": 0}}}


@given(
    cursors=st.dictionaries(st.integers(0, 99), st.integers() | st.lists(st.integers(), max_size=2), min_size=1),
    world=st.integers(1, 6),
    data=st.data(),
)
def test_merging_undoes_any_division_of_the_streams(cursors: dict[int, Any], world: int, data: st.DataObject) -> None:
    owners = {stream: data.draw(st.sets(st.integers(0, world - 1), min_size=1)) for stream in cursors}
    states: list[dict[str, Any]] = [
        {**STATE, "streams": {stream: cursors[stream] for stream in cursors if rank in owners[stream]}}
        for rank in range(world)
    ]
    merged = merge_states(states)
    assert merged == {**STATE, "streams": {str(stream): cursors[stream] for stream in sorted(cursors)}}
    assert list(merged["streams"]) == [str(stream) for stream in sorted(cursors)]
    assert merge_states([json.loads(json.dumps(state)) for state in states]) == merged
    assert merge_states([merged, merged]) == merged


def test_streams_are_merged_at_any_depth() -> None:
    states = [
        {"sources": {"web": {"epoch": 1, "streams": {"0": 5}}}},
        {"sources": {"web": {"epoch": 1, "streams": {}}}},
    ]
    assert merge_states(states) == states[0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"plan": "xyz"}, r"'plan'.*'abc'"),
        ({"step": 13}, "'step'"),
        ({"sources": {"web": {"epoch": 1}}}, r"'sources\.web\.epoch'"),
        ({"sources": None}, "'sources'"),
        ({"more": 1}, "'more'"),
        ({"streams": {"3": 9}}, "'streams'"),
    ],
)
def test_states_of_different_runs_or_steps_are_not_merged(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ResumeError, match=complaint):
        merge_states([{**STATE, "streams": {"3": 4}}, {**STATE, "streams": {"4": 4}, **change}])


def test_a_stream_that_no_rank_brought_is_missed() -> None:
    with pytest.raises(ResumeError, match="'streams'"):
        merge_states([{"streams": {"0": 1}}, {"streams": {"2": 1}}], streams=4)
    with pytest.raises(ResumeError):
        merge_states([])


def test_gathered_states_are_the_same_on_every_rank(place: Rendezvous) -> None:
    def act(rank: Rank) -> list[Any]:
        return [
            gather_states(
                {"step": step, "streams": {rank.rank: [step, "x"]}},
                rank=rank,
                rendezvous=place,
                timeout_seconds=PATIENCE,
            )
            for step in range(3)
        ]

    expected = [{"step": step, "streams": {str(rank): [step, "x"] for rank in range(3)}} for step in range(3)]
    assert together(3, act) == [expected] * 3


def test_what_cannot_be_merged_every_rank_refuses(place: Rendezvous) -> None:
    def act(rank: Rank) -> Any:
        return gather_states({"step": rank.rank}, rank=rank, rendezvous=place, timeout_seconds=PATIENCE)

    for error in together(3, act):
        assert isinstance(error, ResumeError)
        assert "'step'" in str(error)


def test_a_state_that_is_no_json_is_refused_before_anybody_waits() -> None:
    with pytest.raises(ResumeError, match=r"rank 0\b"):
        gather_states({"step": object()}, rank=Rank(0, 2), rendezvous=Notes(), timeout_seconds=0)


def test_a_directory_shows_notes_whole_and_takes_any_name(tmp_path: Path) -> None:
    place = DirectoryRendezvous(tmp_path / "new" / "meet")
    assert not place.check(["a/b c"])
    place.set("a/b c", b"1")
    place.set("a/b c", b"22")
    assert (place.check(["a/b c"]), place.get("a/b c")) == (True, b"22")
    assert (place.delete_key("a/b c"), place.delete_key("a/b c")) == (True, False)
    assert list(place.path.iterdir()) == []


def test_two_objects_for_one_directory_are_one_place(tmp_path: Path) -> None:
    def act(rank: Rank) -> list[int]:
        return [run_epoch(EndOfEpoch(DirectoryRendezvous(tmp_path), rank, 0, PATIENCE), n) for n in (2 + rank.rank, 4)]

    assert together(2, act) == [[3, 4]] * 2


def test_rank_0_does_not_wait_long_for_ranks_that_never_take_their_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.01)
    notes = Notes()
    ends = [EndOfEpoch(notes, Rank(number, 2), 0, PATIENCE) for number in range(2)]
    for end in ends:
        end.ended(1)
    assert not ends[0].more(1)


def test_merged_states_have_a_checksum_of_their_own_and_damaged_ones_are_not_merged() -> None:
    form = StateFormat("streams", "a stream")
    states = [form.write({"step": 3, "streams": {str(rank): "abc"}}) for rank in range(2)]
    merged = form.read(merge_states([{"loader": state} for state in states])["loader"])
    assert merged["streams"] == {"0": "abc", "1": "abc"}
    with pytest.raises(ResumeError, match=r"\b1\b.*checksum"):
        merge_states([states[0], states[1] | {"streams": {"1": "abd"}}])
