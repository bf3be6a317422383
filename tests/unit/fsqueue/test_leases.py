from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from queues import PER_FILE, Clock, Maker, consumer, fill, ks, listed, names, numbers, reaper_of, take

from penstock.errors import StalledError
from penstock.fsqueue.layout import SplitDirectory
from penstock.fsqueue.members import Backoff


def test_the_living_keep_what_they_have(tmp_path: Path) -> None:
    path, clock = tmp_path / "q", Clock()
    maker = Maker(path)
    maker.member.join()
    maker.make()
    maker.reserve()
    with consumer(path) as reader:
        take(reader, 1)
        keeper, before = reaper_of(path, clock), (names(path), listed(path / "train" / "lanes"))
        for _ in range(20):
            for member in (maker.member, reader._member):
                member.beat()
            assert not keeper.reap()
            clock.go(9.0)
        assert (names(path), listed(path / "train" / "lanes")) == before
    maker.member.leave()


def test_of_the_dead_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = fill(tmp_path / "q", 8), Clock()
    reader = consumer(path)
    take(reader, 3)
    reader._member._heartbeat.stop()
    maker = Maker(path)
    maker.member.join()
    maker.member._heartbeat.stop()
    number = maker.reserve()
    (path / "train" / f".{number:012d}~{maker.member.id}.tmp").write_bytes(b"half a fi")
    (path / "train" / f".other~{maker.member.id}.tmp").write_bytes(b"half a fi")
    keeper = reaper_of(path, clock)
    assert not keeper.reap()
    clock.go(29.0)
    assert not keeper.reap(), "their leases are of 30 seconds"
    clock.go(2.0)
    with caplog.at_level(logging.WARNING):
        found = keeper.reap()
    assert len(found.claims) == 1
    assert found.lanes == [number]
    assert sorted(found.members) == sorted([reader._member.id, maker.member.id])
    assert re.search(r"1 claimed files.*1 numbers", caplog.text)
    assert [name[12:21] for name in names(path)] == ["-n4-s0-r1", "-n4-s0-r0"]
    assert listed(path / "members") == []
    assert not [lane for lane in listed(path / "train" / "lanes") if ".by-" in lane]
    assert not keeper.reap()
    assert keeper.claims_returned == 1
    reader._readers.clear()
    reader.close()
    maker.member.leave()


def test_a_starved_member_does_not_reap_itself(tmp_path: Path) -> None:
    path, clock = fill(tmp_path / "q", 8), Clock()
    with consumer(path) as reader:
        take(reader, 1)
        reader._member._heartbeat.stop()
        keeper = reaper_of(path, clock)
        keeper.reap(alive=reader._member.id)
        clock.go(31.0)
        assert not keeper.reap(alive=reader._member.id)
        assert take(reader, 3) == [1, 2, 3]


def test_a_claim_whose_owner_is_not_listed_is_given_back_as_well(tmp_path: Path) -> None:
    path, clock = fill(tmp_path / "q", 4), Clock()
    file = path / "train" / names(path)[0]
    file.rename(file.with_name(f"{file.name}.by-c0"))
    keeper = reaper_of(path, clock)
    keeper.reap()
    clock.go(10.1)
    assert len(keeper.reap().claims) == 1
    with consumer(path) as reader:
        assert ks(reader) == [0, 1, 2, 3]


def test_a_round_is_due_four_times_a_lease(tmp_path: Path) -> None:
    clock = Clock()
    keeper = reaper_of(fill(tmp_path / "q", 4), clock, lease_seconds=8.0)
    assert not keeper.due
    clock.go(2.0)
    assert keeper.due
    keeper.reap()
    assert not keeper.due


def test_one_who_dies_while_tidying_up_is_tidied_up_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, clock = tmp_path / "q", Clock()
    dead = Maker(path)
    dead.reserve()
    first, second = reaper_of(path, clock), reaper_of(path, clock)
    for keeper in (first, second):
        keeper.reap()
    clock.go(10.1)
    with monkeypatch.context() as patched:

        def die(*_: object) -> bool:
            raise KeyboardInterrupt

        patched.setattr("penstock.fsqueue.leases.settle", die)
        with pytest.raises(KeyboardInterrupt):
            first.reap()
    assert [name for name in listed(path / "train" / "lanes") if name.startswith("000000000000.by-k")]
    second.reap()
    clock.go(10.1)
    assert second.reap().lanes == [0]
    assert Maker(path).make() == 0


def test_waiting_consumers_look_after_the_queue_by_themselves(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 4)
    file = path / "train" / names(path)[0]
    file.rename(file.with_name(f"{file.name}.by-c0"))
    (path / "train" / "lanes" / "end-4").unlink()  # so that there is something to wait for
    with consumer(path, lease_seconds=0.1) as reader:
        assert take(reader, 4) == [0, 1, 2, 3]
        assert reader.counts().redelivered == 4
    assert numbers(path) == []


def test_backoff_ends_with_a_word_about_what_was_waited_for() -> None:
    clock = Clock()
    backoff = Backoff(5.0, lambda: "rain", poll_seconds=0.001, clock=clock)
    assert backoff.waited == 0.0
    backoff.pause()
    clock.go(4.9)
    backoff.pause()
    assert backoff.waited == 4.9
    clock.go(0.2)
    with pytest.raises(StalledError, match=r"\brain\b"):
        backoff.pause()


def test_a_long_wait_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    backoff = Backoff(None, lambda: "rain", poll_seconds=0.001, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            backoff.pause()
            clock.go(10.0)
    assert caplog.text.count("waiting for rain") == 1


def test_pauses_are_short_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = Clock(), []
    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), clock.go(seconds)))
    backoff = Backoff(None, lambda: "rain", clock=clock)
    for _ in range(3000):
        backoff.pause()
    assert pauses[0] <= 0.001
    assert max(pauses[:1000]) <= 0.005, "a file that comes within seconds is met within 5 ms"
    assert max(pauses) <= 0.025


def test_a_lane_that_is_taken_over_while_its_file_is_acknowledged_does_not_make_the_file_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "q", Clock()
    dead = Maker(path)
    dead.member.join()
    dead.member._heartbeat.stop()
    number = dead.reserve()
    monkeypatch.setattr(dead.publisher.lanes, "advance", lambda *of: True)  # it dies before it can move on
    dead.publish(number)
    keeper = reaper_of(path, clock)
    keeper.reap()
    clock.go(1000.0)
    with consumer(path) as reader:
        assert take(reader, PER_FILE) == list(range(PER_FILE))
        lanes = reader._readers["train"]._acknowledger.lanes  # type: ignore[attr-defined]
        looked = lanes.all

        def late() -> Any:
            found = looked()
            monkeypatch.setattr(lanes, "all", looked)
            keeper.reap()  # takes the lane over, between our look and our move
            return found

        monkeypatch.setattr(lanes, "all", late)
    assert numbers(path) == []
    assert min(lane.number for lane in looked()) == 1


def test_a_member_whose_lease_expires_during_a_round_is_not_removed_before_its_files_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = fill(tmp_path / "q", 8), Clock()
    with consumer(path) as reader:
        take(reader, 1)
        reader._member._heartbeat.stop()
        keeper = reaper_of(path, clock)
        keeper.reap()
        clock.go(29.0)

        def late(directory: SplitDirectory) -> list[tuple[str, str]]:
            clock.go(2.0)  # after the files of the split, before its members
            return []

        with monkeypatch.context() as patch:
            patch.setattr(SplitDirectory, "temporaries", late)
            assert not keeper.reap()
        reaped = keeper.reap()
        assert len(reaped.claims) == 1
        assert reaped.members == [reader._member.id]
        reader._readers.clear()


def test_a_split_has_no_end_while_the_owner_of_a_claim_is_not_listed(tmp_path: Path) -> None:
    path = fill(tmp_path / "q", 8)
    with consumer(path) as dead, consumer(path) as reader:
        take(dead, 1)
        take(reader, 1)
        dead._member._heartbeat.stop()
        split, owner = reader._readers["train"].split, dead._member.id
        beats: dict[str, int | None] = {}
        assert split.any_silent({owner}, beats)
        for file in (path / "members").glob(f"*{owner}*"):
            file.unlink()
        reader._member.watch.members(fresh=True)
        assert reader._member.watch.beat_of(owner) is None
        assert split.any_silent({owner}, beats)
        dead._readers.clear()
