from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from queues import Clock, Maker

from penstock.errors import ConfigError
from penstock.fsqueue import Queue
from penstock.fsqueue.layout import Member, list_members
from penstock.fsqueue.leases import MemberWatch
from penstock.fsqueue.members import QueueMember, QueueOptions, facts_of

Joins = Callable[..., QueueMember]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Maker(tmp_path / "q").queue


@pytest.fixture
def home(queue: Queue) -> Path:
    return queue.members


@pytest.fixture
def joins(queue: Queue, clock: Clock) -> Iterator[Joins]:
    """Members that beat when they are told, since their thread is stopped."""
    joined: list[QueueMember] = []

    def join(lease_seconds: float = 10.0) -> QueueMember:
        member = QueueMember(queue, "c", {}, QueueOptions(lease_seconds=lease_seconds), clock=clock).join()
        member._heartbeat.stop()
        joined.append(member)
        return member

    yield join
    for member in joined:
        member.leave()


def watch(home: Path, clock: Clock, lease_seconds: float = 10.0) -> MemberWatch:
    return MemberWatch(home, lease_seconds=lease_seconds, clock=clock)


def test_who_beats_lives_and_who_stops_is_dead_after_its_lease(home: Path, clock: Clock, joins: Joins) -> None:
    onlooker, quick, slow = watch(home, clock), joins(lease_seconds=2.0), joins(lease_seconds=10.0)
    assert not onlooker.is_dead(quick.id)
    for _ in range(10):
        clock.go(1.9)
        quick.beat()
        slow.beat()
        assert not onlooker.is_dead(quick.id)
        assert not onlooker.is_dead(slow.id)
    clock.go(2.1)
    assert onlooker.is_dead(quick.id)
    assert not onlooker.is_dead(slow.id), "every member has the lease it asked for"
    quick.beat()
    assert not onlooker.is_dead(quick.id), "it was asleep"


def test_an_onlooker_that_slept_takes_nobody_for_dead(home: Path, clock: Clock, joins: Joins) -> None:
    onlooker, member = watch(home, clock), joins()
    assert not onlooker.is_dead(member.id)
    clock.go(1000)
    member.beat()
    assert not onlooker.is_dead(member.id)


def test_one_who_was_never_listed_is_dead_a_lease_after_it_was_first_asked_for(home: Path, clock: Clock) -> None:
    onlooker = watch(home, clock, 10.0)
    assert not onlooker.is_dead("c0")
    clock.go(9.9)
    assert not onlooker.is_dead("c0")
    clock.go(0.2)
    assert onlooker.is_dead("c0")


def test_the_time_of_day_does_not_matter(
    home: Path, clock: Clock, joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    onlooker, member = watch(home, clock), joins()
    onlooker.is_dead(member.id)
    for now in (0.0, 4e9, -1e9):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        clock.go(4.0)
        member.beat()
        for file in home.iterdir():
            file.touch()
        assert not onlooker.is_dead(member.id)
        assert not member.lapsed(0)
    clock.go(10.1)
    for file in home.iterdir():
        file.touch()
    assert onlooker.is_dead(member.id), "the time of a file says nothing"


def test_a_late_beat_is_remembered_by_whoever_holds_something(clock: Clock, joins: Joins) -> None:
    member = joins()
    since = member.lapses
    clock.go(9.0)
    assert not member.lapsed(since)
    member.beat()
    assert not member.lapsed(since)
    clock.go(10.1)
    assert member.lapsed(since)
    member.beat()
    assert member.lapsed(since), "the thread has beaten again before the caller could look"
    assert not member.lapsed(member.lapses)


def test_the_lease_counts_from_when_others_can_see_the_beat(
    clock: Clock, joins: Joins, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, rename = joins(), os.rename
    since = member.lapses

    def sleepy(*given: Any) -> None:
        rename(*given)
        clock.go(10.1)

    monkeypatch.setattr("penstock.fsqueue.layout.os.rename", sleepy)
    member.beat()
    assert member.lapsed(since), "it was stopped right after the beat"


def test_a_member_that_was_tidied_away_comes_back(home: Path, clock: Clock, joins: Joins) -> None:
    onlooker, member = watch(home, clock), joins()
    onlooker.members(fresh=True)
    clock.go(11.0)
    assert onlooker.is_dead(member.id)
    onlooker.forget(member.id)
    assert list_members(home) == {}
    member.beat()
    assert list(list_members(home)) == [member.id]
    assert not onlooker.is_dead(member.id)
    member.leave()
    member.leave()
    assert list(home.iterdir()) == []


def test_a_beat_without_a_directory_is_no_error(queue: Queue, home: Path) -> None:
    member = QueueMember(queue, "c", {}).join()
    for file in home.iterdir():
        file.unlink()
    home.rmdir()
    member.beat()
    member.leave()


def test_a_beat_that_fails_is_said(
    home: Path, joins: Joins, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = joins()

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("penstock.fsqueue.layout.os.rename", broken)
    with caplog.at_level(logging.WARNING):
        member.beat()
    assert str(member.id) in caplog.text


def test_the_thread_beats_by_itself(queue: Queue, home: Path) -> None:
    member = QueueMember.provider(queue, {}, QueueOptions(lease_seconds=0.05)).join().join()
    deadline = time.monotonic() + 300
    while list_members(home)[member.id].beat < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    member.done = 7
    while list_members(home)[member.id].done < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert facts_of(home, list_members(home)[member.id])["role"] == "provider"
    member.leave()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("lease", [0.05, 1, 30.0, 12.345, 86400.0, 1e7, 123456.789])
def test_every_lease_can_be_read_from_a_name(lease: float) -> None:
    member = Member("c1", lease, 3, 4)
    assert Member.parse(member.name) == member


@pytest.mark.parametrize("lease", [0, -1, 0.01, float("nan"), float("inf")])
def test_a_lease_is_a_positive_time(lease: float) -> None:
    with pytest.raises(ConfigError, match="lease_seconds"):
        QueueOptions(lease_seconds=lease)


def test_options_are_given_as_an_object_a_mapping_or_keywords() -> None:
    wanted = QueueOptions(lease_seconds=5.0, durable=True)
    assert QueueOptions.of(wanted, {}) == wanted
    assert QueueOptions.of({"lease_seconds": 5.0}, {"durable": True}) == wanted
    assert QueueOptions.of(wanted, {"lease_seconds": 7.0}).lease_seconds == 7.0
    assert QueueOptions.of(None, {}, timeout_seconds=None).timeout_seconds is None
    with pytest.raises(ConfigError, match=r"'lease_second'.*'lease_seconds'"):
        QueueOptions.of(None, {"lease_second": 5.0})
