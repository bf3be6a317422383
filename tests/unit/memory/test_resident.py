"""What allocators keep is charged too, and given back when the budget gets tight."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from textwrap import dedent

import pytest

from penstock.memory import MemoryBudget, ResidentWatch, resident_bytes
from penstock.memory import pressure as resident

MIB = 1 << 20


@pytest.fixture
def occupied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    size = [100 * MIB]
    monkeypatch.setattr(resident, "resident_bytes", lambda: size[0])
    return size


def room(budget: MemoryBudget) -> int:
    """The largest reservation that is admitted now, beside another one."""
    low, high = 0, budget.capacity
    with budget.charge(0):
        while low < high:
            middle = (low + high + 1) // 2
            admitted = budget.try_reserve(middle)
            if admitted is None:
                high = middle - 1
            else:
                admitted.release()
                low = middle
    return low


def test_the_resident_size_is_that_of_this_process() -> None:
    assert 10 * MIB < resident_bytes() < 1 << 40


def test_half_of_the_budget_is_held_back_at_first_and_nothing_afterwards(occupied: list[int]) -> None:
    budget = MemoryBudget(200 * MIB)
    watch = ResidentWatch(budget)
    watch.begin()
    assert room(budget) == 100 * MIB
    assert budget.used == 0, "what is set aside is not in use"
    watch.end()
    assert room(budget) == 200 * MIB


def test_the_charge_comes_down_to_what_is_measured_while_much_is_in_flight(occupied: list[int]) -> None:
    budget = MemoryBudget(200 * MIB)
    watch = ResidentWatch(budget)
    watch.begin()
    with budget.reserve(80 * MIB, "pipeline"):
        occupied[0] = (100 + 90) * MIB  # ten more than is charged
        for _ in range(600):
            watch.look()
        assert room(budget) == 200 * MIB - 80 * MIB - (10 * MIB + 30 * MIB)


def test_an_idle_moment_proves_nothing(occupied: list[int]) -> None:
    budget = MemoryBudget(200 * MIB)
    watch = ResidentWatch(budget)
    watch.begin()
    for _ in range(50):
        watch.look()
    assert room(budget) == 100 * MIB


def test_growth_that_is_not_charged_takes_room_but_never_all_of_it(occupied: list[int]) -> None:
    budget = MemoryBudget(200 * MIB)
    watch = ResidentWatch(budget)
    watch.begin()
    occupied[0] = 10_000 * MIB
    watch.look()
    assert room(budget) == 25 * MIB


def test_pages_are_given_back_only_when_it_gets_tight(occupied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    class Pool:
        def release_unused(self) -> None:
            given.append("default")

    monkeypatch.setattr(resident.pa, "default_memory_pool", Pool)
    watch = ResidentWatch(MemoryBudget(200 * MIB))
    watch.look()
    watch.give_back()
    assert not given
    occupied[0] += 150 * MIB
    watch.look()
    watch.give_back()
    assert given == ["default"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_freed_blocks_below_another_block_leave_the_process() -> None:
    assert bytes_kept({}) < 24 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_threshold_of_the_user_stays(name: str) -> None:
    prefix = "glibc.malloc.mmap_threshold=" if name == "GLIBC_TUNABLES" else ""
    assert bytes_kept({name: f"{prefix}{32 << 20}"}) > 40 << 20


def bytes_kept(settings: dict[str, str]) -> int:
    """Memory that stays when blocks of 4 MiB, 64 MiB in all, are freed while smaller ones stand above them."""
    code = """
        import ctypes, numpy as np
        from penstock.memory.pressure import free_large_blocks_at_once, resident_bytes
        if not hasattr(ctypes.CDLL(None), "mallopt"):
            raise SystemExit(print(0))
        free_large_blocks_at_once()
        first = np.ones(30 << 20, np.uint8)
        del first  # from here on glibc keeps blocks of this size
        before = resident_bytes()
        blocks = [np.ones(4 << 20, np.uint8) for _ in range(16)]
        above = [bytes(100_000) for _ in range(50)]
        del blocks
        print(resident_bytes() - before)
    """
    names = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(names)} | settings
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a call of glibc")
def test_free_pages_of_malloc_leave_the_process() -> None:
    code = """
        from penstock.memory.pressure import resident_bytes, trim_malloc
        before = resident_bytes()
        blocks = [bytes(50_000) for _ in range(2_000)]
        kept = blocks[-1]
        del blocks
        held = resident_bytes() - before
        trim_malloc()
        print(held, resident_bytes() - before)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    held, left = map(int, done.stdout.split())
    assert held > 64 * MIB, "a block above the others keeps them"
    assert left < 16 * MIB


def test_a_large_process_spends_little_of_its_time_on_returning_free_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 100.0, 0

    def slow(_: int) -> None:
        nonlocal now, calls
        now, calls = now + 0.25, calls + 1

    monkeypatch.setattr(resident, "_trim_at", float("-inf"))
    monkeypatch.setattr(resident, "_c_function", lambda name: slow)
    monkeypatch.setattr(resident.time, "monotonic", lambda: now)
    for _ in range(1000):
        resident.trim_malloc()
        now += 0.05
    assert 10 <= calls <= 11  # a twentieth of 52 seconds


@pytest.mark.parametrize("missing", ["function", "linker"])
def test_a_c_library_without_the_calls_of_glibc_is_left_alone(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def library(name: str | None) -> object:
        if missing == "linker":
            raise OSError("Dynamic loading not supported")
        return object()

    monkeypatch.setattr(resident, "_c_function", resident._c_function.__wrapped__)
    monkeypatch.setattr(resident.sys, "platform", "linux")
    monkeypatch.setattr(resident.ctypes, "CDLL", library)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    resident.give_back_memory()
    resident.free_large_blocks_at_once()
