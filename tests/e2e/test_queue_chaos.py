"""kill -9 on everybody who is at work on a queue, again and again: nothing is lost, nothing torn, what comes twice is
counted, and nothing of the dead is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _scripts.processes import DEADLINE_SECONDS, Program, Programs, programs, wait_for_end, wait_until
from _scripts.queue_batches import LEASE_SECONDS, PER_FILE, Judge, make_provider

from penstock.fsqueue import DatasetConsumer, Queue
from penstock.fsqueue.layout import Lanes

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

BLOWS_DUE = int(os.environ.get("PENSTOCK_CHAOS_BLOWS", "240"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", 5))
PROVIDERS, CONSUMERS = 3, 4
PAUSE_SECONDS = 0.12
"""Longest pause between two blows. Each of the seven lives a few tenths of a second, and changes a directory in each
hundredth of it.
"""
KILLS_OF_RANKS = 10
BLOWS = {"kill": 7, "sleep": 2, "terminate": 1}


class Crowd:
    """Providers and consumers, each replaced as soon as it has gone."""

    def __init__(self, started: Programs, queue: Path, folder: Path, draw: random.Random) -> None:
        self.started, self.queue, self.folder, self.draw = started, queue, folder, draw
        self.max_batches: int | None = None
        self.count = 0
        self.living = [self.start(role) for role in ["provider"] * PROVIDERS + ["consumer"] * CONSUMERS]
        self.asleep: list[tuple[float, Program]] = []
        self.blows: Counter[str] = Counter()

    def start(self, role: str) -> tuple[str, Program]:
        self.count += 1
        facts = {"queue": self.queue, "seed": self.draw.getrandbits(30), "max_batches": self.max_batches}
        return role, self.started.start(f"queue_{role}", **facts, log=self.folder / f"{self.count}.log")

    def strike(self) -> None:
        """Somebody is killed, or told to go, or made to sleep beyond the lease and wake up as if nothing had been."""
        place = self.draw.randrange(len(self.living))
        role, program = self.living[place]
        (blow,) = self.draw.choices(list(BLOWS), list(BLOWS.values()))
        assert program.returncode is None, program.complaints.read_text()
        if blow == "sleep":
            program.process.send_signal(signal.SIGSTOP)
            self.asleep.append((time.monotonic() + LEASE_SECONDS * (0.5 + self.draw.random()), program))
        else:
            if blow == "terminate":
                self.wake([program])
                program.process.terminate()
                program.process.wait(DEADLINE_SECONDS)
                # One that was told to go while it was starting up has no manners yet.
                assert program.returncode in (0, -signal.SIGTERM), program.complaints.read_text()
            else:
                program.kill()
            self.living[place] = self.start(role)
        self.blows[f"{blow} {role}"] += 1

    def wake(self, programs: Sequence[Program] = ()) -> None:
        """Those who have slept enough, and these."""
        now = time.monotonic()
        for until, program in self.asleep:
            if until <= now or program in programs:
                program.process.send_signal(signal.SIGCONT)
        self.asleep = [(until, program) for until, program in self.asleep if until > now and program not in programs]

    def finish(self, max_batches: int) -> None:
        """The last providers make what is missing up to the end, and the last consumers read it."""
        self.max_batches = max_batches
        for _, program in self.living:
            program.kill()
        self.living = [self.start(role) for role, _ in self.living]
        wait_for_end([program for _, program in self.living])


def drained(queue: Path) -> list[tuple[int, int]]:
    """What the dead had when everybody else was done: it is not the end before that has come back."""
    judge, found = Judge(queue), []
    with DatasetConsumer(queue, backend="numpy", lease_seconds=LEASE_SECONDS) as consumer:
        while (batch := consumer.get_arrays("train")) is not None:
            found.append((judge.number_of(batch), consumer._readers["train"]._current.file.returns))  # type: ignore[attr-defined]
        assert files_of(queue) == []

        def alone() -> bool:
            consumer.get_arrays("train")  # and in passing tidies up
            return len(names_in(queue / "members")) == 1

        wait_until(alone, [], "the dead to be forgotten")
    return found


def files_of(queue: Path) -> list[str]:
    """Everything in the split that is not its lanes or cursors."""
    return [name for name in names_in(queue / "train") if name not in ("lanes", "cursors")]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_whoever_is_killed_every_batch_arrives_and_what_comes_twice_is_marked(tmp_path: Path) -> None:
    queue, draw = tmp_path / "queue", random.Random(SEED)
    made = Queue.create(queue, make_provider(queue).description())
    with programs(tmp_path / "said") as started:
        crowd = Crowd(started, queue, tmp_path, draw)
        until = time.monotonic() + DEADLINE_SECONDS
        # As many are struck as are due, and one among them whose batches others get again.
        while time.monotonic() < until and (crowd.blows.total() < BLOWS_DUE or not twice_in(read_logs(tmp_path)[0])):
            time.sleep(draw.random() * PAUSE_SECONDS)
            crowd.strike()
            crowd.wake()
        lanes = Lanes(made.split("train").lanes, made.description.lanes)
        # The end is in the middle of a file.
        end = (max(lane.number for lane in lanes.all()) + 2) * PER_FILE + 1
        crowd.finish(end)
    delivered, counted = read_logs(tmp_path)
    delivered += drained(queue)

    assert {k for k, _ in delivered} == set(range(end)), "nothing is lost, and nothing is made up"
    assert max(Counter(delivered).values()) == 1, "one delivery a lease"
    twice = twice_in(delivered)
    again = sum(returns > 0 for _, returns in delivered)
    assert 0 < twice <= again, "a batch came twice only out of a file whose name says that a lease on it ran out"
    assert counted["redelivered"] <= again

    assert files_of(queue) == []
    assert names_in(queue / "members") == []
    assert all(lane.owner is None and lane.number * PER_FILE >= end for lane in lanes.all())
    assert len(lanes.all()) == made.description.lanes
    assert crowd.blows.total() >= BLOWS_DUE
    print(f"{end} batches, {twice} twice of {again} marked, {dict(crowd.blows)}, {dict(counted)}")


def twice_in(delivered: list[tuple[int, int]]) -> int:
    return len(delivered) - len({k for k, _ in delivered})


def read_logs(folder: Path) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Every delivery that was written down, `(k, returns)`, and what those who came to their end had counted."""
    delivered: list[tuple[int, int]] = []
    counted: Counter[str] = Counter()
    for path in folder.glob("*.log"):
        lines = [line.split(maxsplit=1) for line in path.read_text().splitlines()]
        mine = [(int(k), int(returns)) for k, returns in lines if k != "="]
        for sign, said in lines:
            if sign == "=":
                counts: dict[str, Any] = json.loads(said)
                assert counts["delivered"] == len(mine)
                assert counts["redelivered"] == sum(returns > 0 for _, returns in mine)
                counted.update(counts)
        delivered += mine
    return delivered, counted


def test_ranks_killed_again_and_again_read_what_they_would_have_read(tmp_path: Path) -> None:
    queue, draw, world, steps = tmp_path / "queue", random.Random(SEED), 2, 400
    Queue.create(queue, make_provider(queue).description())

    def start(of: Programs, rank: int) -> Program:
        facts = {"queue": queue, "seed": draw.getrandbits(30), "rank": rank, "world": world, "steps": steps}
        return of.start("queue_rank", **facts, log=tmp_path / f"{rank}.log", saved=tmp_path / f"{rank}.json")

    def lines(rank: int) -> int:
        path = tmp_path / f"{rank}.log"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def has_read(rank: int, least: int) -> bool:
        return lines(rank) >= least or ranks[rank].returncode == 0

    kills = 0
    with programs(tmp_path / "said") as started:
        maker = started.start("queue_provider", queue=queue, seed=1, max_batches=None)
        ranks = [start(started, rank) for rank in range(world)]
        while kills < KILLS_OF_RANKS:
            # One of them, or both; each has read something since it was started.
            chosen = draw.choice([[0], [1], [0, 1]])
            wanted = [lines(rank) + draw.randint(2, 30) for rank in chosen]
            for rank, least in zip(chosen, wanted):
                wait_until(partial(has_read, rank, least), [ranks[rank]], "should be reading", ends=True)
            if all(program.returncode == 0 for program in ranks):
                break
            for rank in chosen:
                ranks[rank].kill()
            for rank in chosen:
                ranks[rank] = start(started, rank)
            kills += len(chosen)
        wait_for_end(ranks)
        maker.process.terminate()
        wait_for_end([maker])
    assert kills >= 5
    for rank in range(world):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())["seen"]
        assert seen == list(range(rank, world * steps, world))
        runs = (tmp_path / f"{rank}.log").read_text().split("from ")[1:]
        for run in runs:
            begun, *ks = map(int, run.split())
            assert ks == [rank + world * step for step in range(begun, begun + len(ks))]
    split = Queue.open(queue).split("train")

    def left(done: int) -> list[int]:
        return [file.number for file in split.files() if file.number < done // PER_FILE]

    assert left(split.done_floor(world)) == [], "what every rank noted as done is gone"
    # A rank that died between its state and its commit has not committed it, and one that was started again behind one
    # that had ended does not know how far that one was: the next run's commit says both.
    again = [
        DatasetConsumer(queue, order="strict", acknowledge="committed", rank=rank, world_size=world, backend="numpy")
        for rank in range(world)
    ]
    for rank, consumer in enumerate(again):
        consumer.load_state_dict(json.loads((tmp_path / f"{rank}.json").read_text())["queue"])
    for consumer in again:
        consumer.commit()
        consumer.close()
    assert left(world * steps) == []
    print(f"{kills} kills")
