from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st
from queues import Clock, consumer, fill, ks, names, numbers, reaper_of, take

from penstock.fsqueue import DatasetConsumer


def taken_for_dead(reader: DatasetConsumer) -> int:
    """Everybody else thinks that its lease is out; returns how many files were given back."""
    clock = Clock()
    reaper = reaper_of(reader.queue_dir, clock)
    reaper.reap()
    clock.go(31.0)
    return len(reaper.reap().claims)


def fell_asleep(reader: DatasetConsumer) -> None:
    """Its own clock says so too, whether or not its thread has beaten since."""
    reader._member.lapses += 1


def crashed(reader: DatasetConsumer) -> None:
    """Its files stay as they are."""
    reader._member.leave()
    reader._readers.clear()


def test_consumers_in_threads_share_a_split_without_a_batch_twice(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 201)
    found: list[list[int]] = [[] for _ in range(4)]

    def read(mine: list[int]) -> None:
        with consumer(path) as reader:
            for batch in reader:
                mine += ks(iter([batch]))

    threads = [threading.Thread(target=read, args=[mine]) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(k for mine in found for k in mine) == list(range(201))
    assert names(path) == []


def test_what_was_not_delivered_is_given_back_and_nothing_else(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    with consumer(path) as first:
        assert take(first, 6) == [0, 1, 2, 3, 4, 5]
        assert numbers(path) == [1, 2]
    assert [name[:21] for name in names(path)] == ["000000000001-n4-s2-r0", "000000000002-n4-s0-r0"]
    with consumer(path) as second:
        assert ks(second) == [6, 7, 8, 9, 10, 11]
        assert second.counts().redelivered == 0


def test_a_file_that_is_finished_is_done_with_at_close(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as first:
        take(first, 4)
        assert numbers(path) == [0, 1], "the last batch may still be in use"
    assert numbers(path) == [1]


def test_after_a_crash_and_the_lease_everything_of_its_file_comes_again_and_is_counted(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    first = consumer(path, lease_seconds=0.5)
    assert take(first, 2) == [0, 1]
    crashed(first)
    with consumer(path, lease_seconds=0.5) as second:
        assert take(second, 4) == [4, 5, 6, 7]
        assert ks(second) == [0, 1, 2, 3], "it is not the end while a dead one has something"
        assert second.counts().redelivered == 4


@pytest.mark.parametrize("delivered", [1, 3])
def test_one_that_slept_beyond_its_lease_delivers_no_more_and_deletes_nothing(delivered: int, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as late, consumer(path) as other:
        assert take(late, delivered) == list(range(delivered))
        assert taken_for_dead(late) == 1
        assert take(other, 2) == [0, 1]
        fell_asleep(late)
        assert take(late, 1) == [4], "it goes on with a file of its own"
        assert late.counts().lost == 1
        assert take(other, 2) == [2, 3]
        assert other.counts().redelivered == 4
        assert sorted(numbers(path)) == [0, 1]
    with consumer(path) as rest:
        assert ks(rest) == [5, 6, 7]


def test_one_that_does_not_know_it_slept_finds_out_when_it_is_done_with_the_file(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as late, consumer(path) as other:
        take(late, 4)
        assert taken_for_dead(late) == 1
        assert take(other, 1) == [0]
        assert take(late, 1) == [4]
        assert late.counts().lost == 1
        assert late.counts().files == 0
        assert take(other, 3) == [1, 2, 3]
    assert numbers(path) == [1]


def test_one_that_closes_after_it_slept_gives_nothing_back(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    with consumer(path) as other:
        with consumer(path) as late:
            take(late, 2)
            taken_for_dead(late)
            assert take(other, 1) == [0]
            counts = late.counts()
        assert counts.lost == 1
        assert ks(other) == [1, 2, 3]


@settings(max_examples=25, deadline=None)
@given_that(before=st.integers(0, 12), after=st.integers(0, 6), lease_out=st.booleans())
def test_a_resumed_consumer_goes_on_where_the_state_was_taken(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, lease_out: bool
) -> None:
    path = fill(tmp_path_factory.mktemp("q") / "q", 20)
    first = consumer(path, acknowledge="committed")
    assert take(first, before) == list(range(before))
    first.counts()
    state = json.loads(json.dumps(first.state_dict()))
    first.commit(state)
    take(first, after)
    if lease_out:
        taken_for_dead(first)
    crashed(first)
    with consumer(path, acknowledge="committed") as second:
        second.load_state_dict(state)
        found = ks(second)
        assert sorted(found) == list(range(before, 20)), "nothing is lost, nothing comes twice"
        if not lease_out:
            assert found == sorted(found)
        second.commit()
    assert names(path) == []


def test_committed_files_go_and_the_others_stay(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 16)
    with consumer(path, acknowledge="committed") as reader:
        take(reader, 6)
        state = reader.state_dict()
        assert state["splits"]["train"]["held"] == [[1, 2]]
        assert state["splits"]["train"]["finished"] == [0]
        take(reader, 4)
        assert numbers(path) == [0, 1, 2, 3]
        reader.commit(state)
        assert numbers(path) == [1, 2, 3]
        reader.commit(state)
        assert numbers(path) == [1, 2, 3]
    with consumer(path) as reader:
        assert ks(reader) == list(range(6, 16)), "what was delivered and not committed comes again"


def test_a_trainer_that_closes_without_a_commit_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 16)
    with consumer(path, acknowledge="committed") as reader:
        take(reader, 2)
        state = reader.state_dict()
        reader.commit(state)
        assert take(reader, 7) == [2, 3, 4, 5, 6, 7, 8]
    with consumer(path, acknowledge="committed") as reader:
        reader.load_state_dict(state)
        assert ks(reader) == list(range(2, 16))


@pytest.mark.parametrize("order", ["any", "strict"])
def test_loading_a_state_is_no_commit_and_an_earlier_one_can_be_gone_back_to(order: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 12)
    first = consumer(path, acknowledge="committed", order=order)
    take(first, 2)
    early = first.state_dict()
    take(first, 6)
    late = first.state_dict()
    crashed(first)
    with consumer(path, acknowledge="committed", order=order) as second:
        second.load_state_dict(late)
        assert take(second, 2) == [8, 9]
        assert numbers(path) == [0, 1, 2], "nothing was committed"
        late = second.state_dict()
    with consumer(path, acknowledge="committed", order=order) as third:
        third.load_state_dict(early)
        assert sorted(ks(third)) == list(range(2, 12))
        third.commit()
    assert numbers(path) == []


def test_a_consumer_can_go_back_to_its_own_state(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path, acknowledge="committed") as reader:
        take(reader, 1)
        state = reader.state_dict()
        assert take(reader, 5) == [1, 2, 3, 4, 5]
        reader.load_state_dict(state)
        assert ks(reader) == [1, 2, 3, 4, 5, 6, 7]


def test_files_of_a_state_that_others_took_over_are_lost_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fill(tmp_path / "q", 8)
    first = consumer(path)
    take(first, 2)
    state = first.state_dict()
    taken_for_dead(first)
    crashed(first)
    with consumer(path, lease_seconds=2.0) as other:  # seen alive at its next heartbeat
        assert take(other, 1) == [0]
        with consumer(path) as second:
            second.load_state_dict(state)
            assert ks(second) == [4, 5, 6, 7]
            assert second.counts().lost == 1
            assert "[0]" in caplog.text
        assert ks(other) == [1, 2, 3]


@pytest.mark.parametrize("taken", [1, 4, 6])
def test_a_state_holds_after_a_second_consumer_from_it_has_died_too(tmp_path: Path, taken: int) -> None:
    path = fill(tmp_path / "q", 12)
    options: dict[str, Any] = {"acknowledge": "committed", "lease_seconds": 0.5}
    first, second = consumer(path, **options), consumer(path, **options)
    begun = take(first, taken)
    state = first.state_dict()
    crashed(first)
    second.load_state_dict(state)
    take(second, 1)
    crashed(second)
    with consumer(path, **options) as third:
        third.load_state_dict(state)
        assert begun + ks(third) == list(range(12))
        assert third.counts().lost == 0


def test_a_file_whose_batches_were_all_delivered_is_passed_over(tmp_path: Path) -> None:
    """A strict reader left it, at the end of a split."""
    path = fill(tmp_path / "q", 6)
    last = path / "train" / names(path)[1]
    last.rename(last.with_name(last.name.replace("-s0-", "-s2-")))
    with consumer(path) as reader:
        assert ks(reader) == [0, 1, 2, 3]
    assert names(path) == []


def test_states_are_small(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 80)
    with consumer(path) as reader:
        take(reader, 79)
        state: dict[str, Any] = reader.state_dict()
    assert len(json.dumps(state)) < 300
