"""Batch sizes and worker counts follow CPU time and throughput, inside the budget."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock import PipelineConfig
from penstock.pipeline.tuner import RunTotals, Tuner

MIB = 1 << 20
TICK = 0.05


def tuner(limit: int = 512 * MIB, **options: object) -> Tuner:
    return Tuner(PipelineConfig(**options), lambda: limit)  # type: ignore[arg-type]


@dataclass
class Machine:
    """Simulated machine: `cores` that share a lock for `locked` of the work, with `overhead` seconds a batch.

    Each worker beyond the first costs every other `hindrance` of its time, as shared caches do. `waits` are seconds for
    a mebibyte in which a batch waits for a service.
    """

    cores: int = 4
    seconds_per_mib: float = 0.02
    overhead: float = 0.001
    locked: float = 0.0
    hindrance: float = 0.0
    waits: float = 0.0
    spinning: bool = False
    """True if a thread that waits for the lock burns CPU time."""
    others: float = 1.0
    """Factor by which other programs slow everything."""

    def rate(self, workers: int, nbytes: int) -> float:
        """Bytes a second."""
        cpu = self.cpu(workers, nbytes)
        alone = cpu + self.waits * nbytes / MIB
        by_cores = self.cores / cpu
        by_workers = workers / alone
        by_lock = 1 / (self.locked * cpu) if self.locked else float("inf")
        return nbytes * min(by_cores, by_workers, by_lock) / self.others

    def cpu(self, workers: int, nbytes: int) -> float:
        """CPU seconds of a batch, spinning left out."""
        return (self.seconds_per_mib * nbytes / MIB + self.overhead) * (1 + self.hindrance * (workers - 1))

    def seconds(self, workers: int, nbytes: int) -> float:
        """Seconds that a worker has a batch in hand."""
        return workers * nbytes / self.rate(workers, nbytes)

    def best(self, most_workers: int) -> float:
        sizes = [(32 << 10) * 2**i for i in range(9)]
        return max(self.rate(workers, size) for workers in range(1, most_workers + 1) for size in sizes)


class Simulation:
    """Run of a tuner on a simulated machine: no threads, no clock but its own."""

    def __init__(self, machine: Machine, limit: int = 1024 * MIB, **options: object) -> None:
        self.machine, self.now = machine, 0.0
        config = PipelineConfig(**{"max_workers": machine.cores, **options})  # type: ignore[arg-type]
        self.tuner = Tuner(config, lambda: limit, clock=lambda: self.now)
        self.part = self.cpu = self.busy = 0.0

    def run(self, seconds: float, starving: Callable[[], bool] = lambda: True) -> Simulation:
        for _ in range(round(seconds / TICK)):
            workers, nbytes = self.tuner.workers, self.tuner.batch_bytes
            batches = TICK * self.machine.rate(workers, nbytes) / nbytes
            end = self.now + TICK
            self.part += batches
            while self.part >= 1:
                self.part -= 1
                self.now = end - TICK * self.part / batches
                self.tuner.saw_need(nbytes, 2 * nbytes)
            self.now = end
            spun = self.machine.seconds(workers, nbytes) if self.machine.spinning else 0.0
            self.cpu += batches * max(self.machine.cpu(workers, nbytes), spun)
            self.busy += batches * self.machine.seconds(workers, nbytes)
            self.tuner.look(RunTotals(self.cpu, self.busy, self.cpu, self.busy, backlog=10, starving=starving()))
        return self

    @property
    def rate(self) -> float:
        return self.machine.rate(self.tuner.workers, self.tuner.batch_bytes)


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"locked": 0.3},
        {"locked": 1.0},  # the interpreter lock
        {"locked": 0.3, "spinning": True},
        {"hindrance": 0.05},
        {"locked": 0.2, "hindrance": 0.1},
        {"seconds_per_mib": 2.0},
        {"seconds_per_mib": 2.0, "locked": 1.0, "hindrance": 0.02},
    ],
)
def test_throughput_comes_near_the_best_that_the_machine_can_give(cores: int, kind: dict[str, float]) -> None:
    machine = Machine(cores=cores, **kind)  # type: ignore[arg-type]
    assert Simulation(machine).run(60).rate >= 0.85 * machine.best(cores)


@pytest.mark.parametrize("workers", ["auto", 16])
@pytest.mark.parametrize("kind", [{}, {"locked": 0.3, "spinning": True}, {"hindrance": 0.1}])
def test_a_contended_start_leaves_no_small_batches_behind(workers: object, kind: dict[str, float]) -> None:
    machine = Machine(cores=16, **kind)  # type: ignore[arg-type]
    calm = machine.seconds_per_mib, machine.others
    machine.seconds_per_mib, machine.others = 0.5, 20.0
    run = Simulation(machine, workers=workers).run(20)
    machine.seconds_per_mib, machine.others = calm
    run.run(40)
    assert run.tuner.batch_bytes >= MIB
    best = machine.best(16) if workers == "auto" else max(machine.rate(16, size << 20) for size in (1, 2, 4, 8))
    assert run.rate >= 0.85 * best


@pytest.mark.parametrize("kind", [{}, {"locked": 0.3}, {"locked": 0.5, "hindrance": 0.1}, {"locked": 1.0}])
def test_more_cores_are_never_slower(kind: dict[str, float]) -> None:
    rates = [Simulation(Machine(cores=cores, **kind)).run(60).rate for cores in (1, 2, 4, 8, 16)]  # type: ignore[arg-type]
    assert all(after >= 0.95 * before for before, after in itertools.pairwise(rates)), rates


def test_wall_time_alone_does_not_shrink_batches() -> None:
    """The collapse: threads that wait for each other took over a quarter of a second for each batch."""
    machine = Machine(cores=2, others=20.0)
    run = Simulation(machine, workers=16).run(20)
    assert machine.seconds(16, MIB) > 1.0
    assert run.tuner.batch_bytes >= MIB


def test_batches_that_take_much_cpu_time_shrink_and_those_that_take_none_grow() -> None:
    assert Simulation(Machine(seconds_per_mib=4.0, overhead=0.0)).run(120).tuner.batch_bytes < MIB
    assert Simulation(Machine(seconds_per_mib=0.001)).run(5).tuner.batch_bytes == 8 * MIB


def test_batches_of_a_stage_that_waits_for_a_service_take_seconds_and_not_minutes() -> None:
    run = Simulation(Machine(cores=4, waits=100.0), workers=4).run(600)
    assert run.machine.seconds(4, run.tuner.batch_bytes) <= 10.0


def test_a_stage_that_waits_for_a_service_keeps_all_its_workers() -> None:
    run = Simulation(Machine(cores=8, waits=0.1)).run(60)
    assert run.tuner.workers >= 7


def test_fewer_workers_suffice_when_the_source_sets_the_pace() -> None:
    machine = Machine(cores=16, locked=1.0)
    assert Simulation(machine).run(60).tuner.workers <= 4


def test_a_step_that_failed_is_tried_again_ever_more_seldom() -> None:
    run = Simulation(Machine(cores=8, waits=0.1))
    tried = []
    for _ in range(200):
        before = run.tuner.workers
        run.run(0.5)
        tried.append(run.tuner.workers < before)
    assert sum(tried[:100]) > sum(tried[100:])


def test_no_batch_is_larger_than_what_the_budget_has_for_all_workers() -> None:
    roomy, tight = tuner(limit=1024 * MIB, workers=16), tuner(limit=200 * MIB, workers=16)
    for one in (roomy, tight):
        for step in range(200):
            one.saw_need(MIB, 4 * MIB)
            one.look(RunTotals(stage_cpu=1e-4 * step))
    assert roomy.batch_bytes * 6 * 40 == pytest.approx(1024 * MIB, rel=0.1)
    assert tight.batch_bytes == MIB


def test_a_shrunken_budget_shrinks_the_batches_at_once() -> None:
    limit = [512 * MIB]
    one = Tuner(PipelineConfig(), lambda: limit[0])
    assert one.batch_bytes == MIB
    limit[0] = 16 * MIB
    assert one.batch_bytes == 128 << 10


def test_rows_are_asked_for_by_their_width() -> None:
    one = tuner()
    assert one.batch_rows == 256
    one.saw_read(256, 256 * 1024)
    assert one.batch_rows == one.batch_bytes // 1024
    one.saw_read(10, 10 * MIB)  # wider rows count at once
    assert one.batch_rows == 1


def test_a_fixed_batch_size_is_kept() -> None:
    run = Simulation(Machine(), batch_rows=77).run(10)
    run.tuner.saw_read(77, 77 * MIB)
    assert run.tuner.batch_rows == 77


def test_what_is_reserved_follows_what_was_needed_quickly_up_and_slowly_down() -> None:
    one = tuner()
    before = one.to_reserve(100)
    one.saw_need(100, 1000)
    assert one.to_reserve(100) == 1500 > before
    one.saw_need(100, 200)
    assert 1400 < one.to_reserve(100) < 1500


def test_a_given_number_of_workers_is_left_alone() -> None:
    assert Simulation(Machine(locked=1.0), workers=3).run(30).tuner.workers == 3


def test_a_batch_that_took_a_thousand_times_its_size_reserves_no_more_than_the_budget() -> None:
    one = tuner(limit=32 * MIB)
    one.saw_need(100, 100 * MIB)
    assert one.to_reserve(one.batch_bytes) == 32 * MIB


def test_chance_seldom_takes_workers_away_on_a_machine_that_is_busy_otherwise() -> None:
    chance, ended = random.Random(5), []
    for _ in range(30):
        run = Simulation(Machine(cores=2))
        for _ in range(60):
            run.machine.others = chance.uniform(1.0, 6.0)
            run.run(0.5)
        ended.append(run.tuner.workers)
    assert ended.count(2) > ended.count(1), ended


def test_batches_of_many_columns_are_larger_within_the_budget() -> None:
    def batch_bytes(columns: int, limit: int, **options: object) -> int:
        tuned = tuner(limit, **options)
        tuned.saw_read(3, 3 << 17)
        tuned.saw_need(3 << 17, 4 << 17, columns)
        return tuned.batch_bytes

    assert batch_bytes(5000, 64 * MIB) == 4 * MIB  # a sixteenth of the budget
    assert batch_bytes(5000, 1024 * MIB) == 5000 << 10
    assert batch_bytes(20, 64 * MIB) == MIB // 2
    assert batch_bytes(5000, 64 * MIB, rows_ahead=8) <= 2 << 17  # few rows were asked for


@pytest.mark.parametrize("cores", [2, 4])
def test_a_run_of_seconds_keeps_all_its_workers(cores: int) -> None:
    """The trial of fewer took a large part of runs that were over before it could have brought anything."""
    run = Simulation(Machine(cores=cores, seconds_per_mib=0.004, others=2.0))
    workers = [run.run(0.1).tuner.workers for _ in range(25)]
    assert workers == [cores] * 25
    assert min(run.run(0.1).tuner.workers for _ in range(50)) < cores, "a longer run tries fewer"


def test_many_workers_that_hinder_each_other_become_fewer_at_once() -> None:
    run = Simulation(Machine(cores=16, seconds_per_mib=0.004, locked=0.3, hindrance=0.1))
    assert min(run.run(0.1).tuner.workers for _ in range(25)) < 16
