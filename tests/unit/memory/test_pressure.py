from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from penstock.memory.budget import MemoryBudget
from penstock.memory.pool import BufferPool
from penstock.memory.pressure import MemoryPressureHandler, MemoryReading, read_memory, suggest_limit

MIB, GIB = 1 << 20, 1 << 30
FULL = MemoryReading(used_fraction=0.95, limit_bytes=GIB, source="system")
MIDDLE = MemoryReading(used_fraction=0.80, limit_bytes=GIB, source="system")
FREE = MemoryReading(used_fraction=0.30, limit_bytes=GIB, source="system")


class Weather:
    """A reading that a test changes as it likes, and that counts the looks."""

    def __init__(self, now: MemoryReading = FREE) -> None:
        self.now, self.looks = now, 0

    def __call__(self) -> MemoryReading:
        self.looks += 1
        return self.now


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(1000)


@pytest.fixture
def handler(budget: MemoryBudget, weather: Weather) -> MemoryPressureHandler:
    return MemoryPressureHandler(budget, interval_seconds=0, readings=weather)


def limits_of(handler: MemoryPressureHandler, budget: MemoryBudget, steps: int) -> list[int]:
    limits = []
    for _ in range(steps):
        handler.check()
        limits.append(budget.limit)
    return limits


def test_the_budget_shrinks_step_by_step_to_its_floor(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    weather.now = FULL
    assert limits_of(handler, budget, 6) == [700, 489, 342, 250, 250, 250]
    assert (handler.shrunk, handler.restored, handler.lowest_limit) == (4, 0, 250)
    assert handler.under_pressure


def test_the_budget_is_given_back_step_by_step_up_to_its_capacity(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    budget.shrink_to(650)
    assert limits_of(handler, budget, 6) == [750, 850, 950, 1000, 1000, 1000]
    assert (handler.shrunk, handler.restored) == (0, 4)
    assert not handler.under_pressure


def test_between_the_marks_the_limit_stays_where_it_is(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    weather.now = FULL
    assert handler.check()
    weather.now = MIDDLE
    assert limits_of(handler, budget, 5) == [700] * 5
    assert not handler.check()
    weather.now = FREE
    assert handler.check()
    assert budget.limit == 800


@pytest.mark.parametrize(("used", "expected"), [(0.90, 350), (0.8999, 500), (0.75, 500), (0.7499, 600), (None, 500)])
def test_the_marks_are_where_they_were_set(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather, used: float | None, expected: int
) -> None:
    budget.shrink_to(500)
    weather.now = MemoryReading(used_fraction=used)
    handler.check()
    assert budget.limit == expected


def test_stalled_tasks_shrink_the_budget_even_when_memory_looks_free(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    weather.now = MemoryReading(used_fraction=0.3, psi_some=60.0, psi_full=25.0)
    assert handler.check()
    assert budget.limit == 700
    weather.now = MemoryReading(used_fraction=0.3, psi_some=20.0, psi_full=5.0)
    assert not handler.check(), "not calm enough to give anything back"
    weather.now = MemoryReading(used_fraction=0.3, psi_some=1.0, psi_full=0.0)
    assert handler.check()
    assert budget.limit == 800


def test_stalls_alone_are_enough_to_shrink_but_not_to_give_back(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    weather.now = MemoryReading(psi_full=50.0)
    assert handler.check()
    weather.now = MemoryReading(psi_full=0.0)
    assert not handler.check()
    assert budget.limit == 700


def test_pressure_empties_the_pools(weather: Weather) -> None:
    budget = MemoryBudget("64 MiB")
    pool = BufferPool(budget=budget)
    handler = MemoryPressureHandler(budget, pools=[pool], interval_seconds=0, readings=weather)
    pool.acquire(MIB).release()
    handler.check()
    assert pool.stats().free_bytes == budget.used == MIB
    weather.now = FULL
    handler.check()
    assert pool.stats().free_bytes == budget.used == 0


def test_what_is_held_stays_held_while_the_budget_shrinks(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    reservation = budget.reserve(900)
    weather.now = FULL
    handler.check()
    assert (budget.used, budget.limit, budget.available) == (900, 700, 0)
    assert budget.try_reserve(1) is None
    reservation.release()
    assert budget.try_reserve(600) is not None


def test_everything_can_be_given_back_at_once(
    handler: MemoryPressureHandler, budget: MemoryBudget, weather: Weather
) -> None:
    weather.now = FULL
    handler.check()
    handler.restore()
    assert budget.limit == 1000


def test_it_looks_at_most_once_per_interval(budget: MemoryBudget) -> None:
    weather = Weather(FULL)
    handler = MemoryPressureHandler(budget, interval_seconds=3600, readings=weather)
    assert [handler.check() for _ in range(5)] == [True, False, False, False, False]
    assert (weather.looks, budget.limit) == (1, 700)


def test_events_tell_what_changed_and_why(handler: MemoryPressureHandler, weather: Weather) -> None:
    for weather.now in (FULL, MIDDLE, FREE):
        handler.check()
    assert [(e.before, e.after, e.reading) for e in handler.events] == [(1000, 700, FULL), (700, 800, FREE)]
    assert handler.reading == FREE
    for weather.now in (FULL, FREE) * 100:
        handler.check()
    assert len(handler.events) == 100


def test_each_change_of_direction_is_logged_once(
    handler: MemoryPressureHandler, weather: Weather, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "penstock.memory.pressure"):
        for weather.now in (FREE, FULL, FULL, MIDDLE, FULL, FREE, FREE, FREE, FULL):
            handler.check()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "memory is short (system at 95% of 1.0 GiB): budget 1000 B -> 700 B"),
        ("INFO", "memory is free again (system at 30% of 1.0 GiB): budget back from 342 B towards 1000 B"),
        ("WARNING", "memory is short (system at 95% of 1.0 GiB): budget 642 B -> 449 B"),
    ]


def test_a_stall_is_described_in_the_log(
    handler: MemoryPressureHandler, weather: Weather, caplog: pytest.LogCaptureFixture
) -> None:
    weather.now = MemoryReading(psi_full=42.4)
    handler.check()
    assert "42%" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 0.9, "high": 0.9}, r"\blow\b.*\bhigh\b"),
        ({"low": 0.0}, "low"),
        ({"high": 1.5}, "low"),
        ({"floor": 0.0}, r"\bfloor\b"),
        ({"interval_seconds": -1.0}, "interval_seconds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(budget: MemoryBudget, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryPressureHandler(budget, **options)


def test_this_machine_can_be_read() -> None:
    budget = MemoryBudget("64 MiB")
    MemoryPressureHandler(budget).check()
    reading = read_memory()
    assert reading.used_fraction is not None
    assert 0 < reading.used_fraction <= 1.5
    assert reading.limit_bytes is not None
    assert 64 * MIB <= suggest_limit() <= 4 * GIB


class Machine:
    """Trees like /proc and /sys/fs/cgroup, of a machine with 16 GiB of which 8 are free."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.cgroup.mkdir()

    def write(self, path: str, text: str | bytes) -> None:
        where = self.proc.parent / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(text if isinstance(text, bytes) else text.encode())

    def read(self) -> MemoryReading:
        return read_memory(proc=self.proc, cgroup=self.cgroup)

    def suggest(self) -> int:
        return suggest_limit(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=8 * GIB))
    return Machine(tmp_path)


def test_without_control_groups_the_system_is_what_counts(machine: Machine) -> None:
    assert machine.read() == MemoryReading(used_fraction=0.5, limit_bytes=16 * GIB, source="system")


@pytest.mark.parametrize(("available", "used"), [(f"MemAvailable:  {2 << 20} kB\n", 0.75), ("", 0.5)])
def test_the_memory_of_the_system_is_what_the_kernel_says_if_it_does(
    machine: Machine, available: str, used: float
) -> None:
    machine.write("proc/meminfo", f"MemTotal:  {8 << 20} kB\nMemFree:  5 kB\n{available}HugePages_Total:  0\n")
    assert machine.read().used_fraction == used  # without it as psutil has it


def test_stalls_are_read_from_the_kernel(machine: Machine) -> None:
    machine.write(
        "proc/pressure/memory",
        "some avg10=12.34 avg60=1.00 avg300=0.00 total=99\nfull avg10=3.50 avg60=0.50 avg300=0.00 total=9\n",
    )
    reading = machine.read()
    assert (reading.psi_some, reading.psi_full) == (12.34, 3.5)


def test_the_limit_of_our_own_group_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/user/job\n")
    machine.write("cgroup/user/job/memory.current", f"{900 * MIB}\n")
    machine.write("cgroup/user/job/memory.max", f"{1000 * MIB}\n")
    machine.write("cgroup/user/job/memory.high", "max\n")
    machine.write("cgroup/user/job/memory.pressure", "some avg10=7.00 avg60=0\nfull avg10=6.00 avg60=0\n")
    machine.write("proc/pressure/memory", "some avg10=9.00 avg60=0\nfull avg10=1.00 avg60=0\n")
    assert machine.read() == MemoryReading(
        used_fraction=0.9,
        psi_some=9.0,
        psi_full=6.0,
        limit_bytes=1000 * MIB,
        source=str(machine.cgroup / "user" / "job"),
    )


def test_the_tightest_of_all_parents_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/box\n")
    machine.write("cgroup/pod/box/memory.current", f"{100 * MIB}\n")
    machine.write("cgroup/pod/box/memory.max", "max\n")
    machine.write("cgroup/pod/memory.current", f"{700 * MIB}\n")
    machine.write("cgroup/pod/memory.max", f"{GIB}\n")
    machine.write("cgroup/pod/memory.high", f"{800 * MIB}\n")
    reading = machine.read()
    assert reading.used_fraction == 0.875
    assert (reading.limit_bytes, reading.source) == (800 * MIB, str(machine.cgroup / "pod"))


def test_cached_files_do_not_count_as_used(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("cgroup/job/memory.current", f"{1000 * MIB}\n")
    machine.write("cgroup/job/memory.max", f"{1000 * MIB}\n")
    stat = f"anon {600 * MIB}\ninactive_file {300 * MIB}\nactive_file {50 * MIB}\nbroken\nworse x\n"
    machine.write("cgroup/job/memory.stat", stat)
    assert machine.read().used_fraction == 0.65


def test_version_one_groups_are_read_too(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n1:cpu:/\n0::/\n")
    machine.write("cgroup/unified/cgroup.procs", "")
    machine.write("cgroup/memory/docker/abc/memory.usage_in_bytes", f"{900 * MIB}\n")
    machine.write("cgroup/memory/docker/abc/memory.limit_in_bytes", f"{1000 * MIB}\n")
    machine.write("cgroup/memory/docker/abc/memory.stat", f"inactive_file 5\ntotal_inactive_file {100 * MIB}\n")
    machine.write("cgroup/memory/memory.usage_in_bytes", f"{15 * GIB}\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    reading = machine.read()
    assert (reading.used_fraction, reading.source) == (0.8, str(machine.cgroup / "memory" / "docker" / "abc"))


@pytest.mark.parametrize("path", ["/", "/not/visible/here", "/../../outside"])
def test_a_container_that_sees_its_own_group_as_the_root_is_read(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write("cgroup/memory.current", f"{900 * MIB}\n")
    machine.write("cgroup/memory.max", f"{1000 * MIB}\n")
    assert machine.read().used_fraction == 0.9


@pytest.mark.parametrize("content", ["", "max", "-5", "12abc", "0", "²", b"\xff\xfe\x00", "1\n2\n3"])
def test_malformed_files_are_left_out(machine: Machine, content: str | bytes) -> None:
    machine.write("proc/self/cgroup", "garbage\n::::\n0::/job\n4:memory\n")
    machine.write("cgroup/job/memory.current", f"{MIB}\n")
    machine.write("cgroup/job/memory.max", content)
    machine.write("cgroup/job/memory.stat", content)
    machine.write("cgroup/job/memory.pressure", content)
    machine.write("proc/pressure/memory", b"some avg10=nan\nfull avg10=\nfull\navg10=3 " + str(content).encode())
    reading = machine.read()
    assert (reading.psi_full, reading.psi_some) == (None, None)
    assert reading.source == "system"


def test_files_that_are_directories_are_left_out(machine: Machine) -> None:
    machine.write("proc/self/cgroup/oops", "")
    machine.write("proc/pressure/memory/oops", "")
    assert machine.read().source == "system"


@pytest.mark.parametrize("error", [OSError("no"), ValueError("odd"), psutil.Error()])
def test_nothing_known_changes_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    assert machine.read() == MemoryReading(source="unknown")
    assert machine.suggest() == 64 * MIB
    budget = MemoryBudget(1000)
    budget.shrink_to(500)
    assert not MemoryPressureHandler(budget, readings=machine.read).check()
    assert budget.limit == 500


@pytest.mark.parametrize(
    ("available", "suggested"), [(100 * MIB, 64 * MIB), (4 * GIB, GIB), (64 * GIB, 4 * GIB), (GIB + 5, 256 * MIB)]
)
def test_the_suggested_limit_is_a_quarter_of_what_is_available(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, available: int, suggested: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=128 * GIB, available=available))
    assert machine.suggest() == suggested


def test_the_suggested_limit_stays_within_the_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("cgroup/job/memory.current", f"{GIB}\n")
    machine.write("cgroup/job/memory.max", f"{3 * GIB}\n")
    assert machine.read().source == "system", "the system is fuller, the container is smaller"
    assert machine.suggest() == 512 * MIB
