"""Cache of parts: whole or not at all, fetched once, within its size, and never damaged bytes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash

from penstock.errors import ConfigError
from penstock.files import part_cache
from penstock.files.part_cache import DamagedPartError, PartCache

SIZE = 1000


def name_of(number: int) -> str:
    return f"{number:032x}.0"


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


class Origin:
    """Where parts come from, and how often."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def of(self, number: int) -> Callable[[], Iterable[bytes]]:
        def fetch() -> Iterable[bytes]:
            self.fetched.append(number)
            yield content(number)[:300]
            yield content(number)[300:]

        return fetch

    def get(self, cache: PartCache, number: int) -> bytes:
        digest = xxhash.xxh3_128_hexdigest(content(number))
        return cache.get(name_of(number), SIZE, self.of(number), digest).to_pybytes()


class Uses:
    """Somebody who knows when parts are used next, by their numbers."""

    near_steps = 0.0

    def __init__(self, steps: dict[int, float]) -> None:
        self.steps = {name_of(number): step for number, step in steps.items()}

    def next_uses(self, names: Sequence[str]) -> npt.NDArray[np.float64]:
        return np.array([self.steps.get(name, np.nan) for name in names])


def numbers_in(cache: PartCache) -> list[int]:
    return sorted(int(file.name[:32], 16) for file in cache.directory.glob("??/*"))


def test_a_part_is_fetched_once_and_shared_by_processes_of_a_directory(tmp_path: Path) -> None:
    origin = Origin()
    for _ in range(2):
        cache = PartCache(tmp_path, 1 << 20)
        assert [origin.get(cache, number) for number in (1, 2, 1)] == [content(1), content(2), content(1)]
    assert origin.fetched == [1, 2]
    assert cache.fetched_bytes == 0
    assert cache.has(name_of(1), SIZE)
    assert not cache.has(name_of(1), SIZE + 1)


def test_threads_that_want_one_part_wait_for_the_one_that_fetches_it(tmp_path: Path) -> None:
    cache, origin, begun, wait = PartCache(tmp_path, 1 << 20), Origin(), threading.Event(), threading.Event()

    def slow() -> Iterable[bytes]:
        begun.set()
        assert wait.wait(30)
        yield from origin.of(1)()

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, name_of(1), SIZE, slow)
        assert begun.wait(30)
        others = [pool.submit(PartCache(tmp_path, 1 << 20).get, name_of(1), SIZE, slow) for _ in range(3)]
        wait.set()
        assert {future.result().to_pybytes() for future in (first, *others)} == {content(1)}
    assert origin.fetched == [1]


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_part_is_fetched_again_and_said(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    origin.get(PartCache(tmp_path, 1 << 20), 1)
    (file,) = tmp_path.glob("??/*")
    data = bytearray(file.read_bytes())
    data[17] ^= 4
    file.write_bytes({"flipped": bytes(data), "short": bytes(data[:-20]), "empty": b""}[damage])
    assert origin.get(PartCache(tmp_path, 1 << 20), 1) == content(1)
    assert origin.fetched == [1, 1]
    assert "damaged" in caplog.text
    assert file.name in caplog.text


def test_bytes_that_do_not_match_are_neither_returned_nor_kept(tmp_path: Path) -> None:
    cache = PartCache(tmp_path, 1 << 20)
    with pytest.raises(DamagedPartError, match="checksum"):
        cache.get(name_of(1), SIZE, Origin().of(2), xxhash.xxh3_128_hexdigest(content(1)))
    with pytest.raises(DamagedPartError, match="1000 bytes were fetched, expected 7"):
        cache.get(name_of(1), 7, Origin().of(1))
    assert [*tmp_path.glob("??/*"), *tmp_path.glob("??/.*")] == []


def test_parts_that_are_used_last_go_first_and_those_of_others_by_their_age(tmp_path: Path) -> None:
    cache, origin = PartCache(tmp_path, 10 * 1016), Origin()
    uses = Uses({1: 50, 2: 3, 3: np.inf, 4: 7})
    cache.add_users(uses)
    for number in range(1, 9):
        origin.get(cache, number)
    assert len(numbers_in(cache)) == 8
    for number, age in ((5, 10_000), (6, 20_000)):  # of a run that ended long ago; 7 and 8 are of one that goes on
        (file,) = tmp_path.glob(f"??/{name_of(number)}")
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    gone: list[list[int]] = []
    for number in range(9, 15):
        before = set(numbers_in(cache))
        uses.steps[name_of(number)] = 0
        origin.get(cache, number)
        gone.append(sorted(before - set(numbers_in(cache))))
    assert gone == [[6], [5], [3], [1], [4], [2]]
    assert sum(file.stat().st_size for file in tmp_path.glob("??/*")) <= cache.limit_bytes


def test_parts_needed_soon_outlive_those_of_other_runs(tmp_path: Path) -> None:
    cache, origin = PartCache(tmp_path, 4 * 1016), Origin()
    uses = Uses({1: 3, 2: 4, 3: 0})
    uses.near_steps = 5
    cache.add_users(uses)
    for number in (1, 2, 9, 3):
        origin.get(cache, number)
    assert numbers_in(cache) == [1, 2, 3]


def test_an_evicted_part_stays_readable_for_those_who_have_it(tmp_path: Path) -> None:
    cache, origin = PartCache(tmp_path, 1500), Origin()
    held = cache.get(name_of(1), SIZE, origin.of(1))
    origin.get(cache, 2)
    assert 1 not in numbers_in(cache)
    assert held.to_pybytes() == content(1)
    shutil.rmtree(tmp_path)
    assert origin.get(cache, 3) == content(3)
    assert held.to_pybytes() == content(1)


@pytest.mark.parametrize(("windows", "fetched"), [(False, [1, 2, 1]), (True, [1] * 3 + [2] * 3 + [1] * 3)])
def test_a_part_that_another_process_evicts_as_soon_as_it_appears_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: bool, fetched: list[int]
) -> None:
    cache, other, origin = PartCache(tmp_path, 1 << 20), PartCache(tmp_path, 1), Origin()

    class Crowded(part_cache.AtomicFile):
        def commit(self) -> None:
            super().commit()
            assert other.evict() == SIZE + 16

    monkeypatch.setattr(part_cache, "AtomicFile", Crowded)
    monkeypatch.setattr(part_cache, "_ON_WINDOWS", windows)  # where a file that is mapped cannot be renamed
    assert [origin.get(cache, number) for number in (1, 2, 1)] == [content(1), content(2), content(1)]
    assert origin.fetched == fetched
    assert cache.fetched_bytes == 3 * SIZE
    assert numbers_in(cache) == []


@pytest.mark.parametrize("meanwhile", ["evicted", "replaced by a damaged one"])
def test_a_part_that_changes_between_the_look_at_it_and_the_map_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    cache, other, origin, changes = PartCache(tmp_path, 1 << 20), PartCache(tmp_path, 1), Origin(), [True]
    origin.get(cache, 1)
    (file,) = tmp_path.glob("??/*")
    map_file = part_cache.pa.memory_map

    def change_and_map(path: str) -> pa.MemoryMappedFile:
        if changes and changes.pop():
            other.evict()
            if meanwhile != "evicted":
                file.write_bytes(bytes(SIZE + 16))
        return map_file(path)

    monkeypatch.setattr(part_cache.pa, "memory_map", change_and_map)
    assert origin.get(cache, 1) == content(1)
    assert origin.fetched == [1, 1]
    assert changes == []


def test_a_part_that_is_replaced_while_its_use_is_noted_counts_as_one_that_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Origin()
    origin.get(PartCache(tmp_path, 1 << 20), 1)
    cache = PartCache(tmp_path, 1 << 20)
    (file,) = tmp_path.glob("??/*")
    note = os.utime

    def replace_and_note(path: Path) -> None:
        damaged = tmp_path / "damaged"
        damaged.write_bytes(bytes(SIZE + 16))
        damaged.replace(file)
        note(path)

    with monkeypatch.context() as patch:
        patch.setattr(part_cache.os, "utime", replace_and_note)
        assert origin.get(cache, 1) == content(1)
    assert origin.get(cache, 1) == content(1)
    assert origin.fetched == [1, 1]


def test_threads_and_processes_that_crowd_one_another_out_read_every_part(tmp_path: Path) -> None:
    origin = Origin()

    def read(first: int) -> list[bytes]:
        cache = PartCache(tmp_path, 1500)  # its own, as a process has it, with room for one part
        return [origin.get(cache, (first + number) % 8) for number in range(40)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(8)))
    assert found == [[content((first + number) % 8) for number in range(40)] for first in range(8)]


def test_a_damaged_part_that_cannot_be_removed_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    origin.get(PartCache(tmp_path, 1 << 20), 1)
    (file,) = tmp_path.glob("??/*")
    file.write_bytes(bytes(SIZE + 16))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert origin.get(PartCache(tmp_path, 1 << 20), 1) == content(1)
    assert origin.fetched == [1, 1]
    assert "is damaged" in caplog.text


def test_users_may_come_while_others_are_asked_what_to_evict(tmp_path: Path) -> None:
    cache, origin, first, later = PartCache(tmp_path, 1500), Origin(), Uses({1: 1, 2: 9}), Uses({})
    waiting = [later]

    class Crowd(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for users in super().__iter__():
                if waiting:
                    cache.add_users(waiting.pop())
                yield users

    cache._users = Crowd([first])
    assert [origin.get(cache, number) for number in (1, 2)] == [content(1), content(2)]
    assert waiting == []
    assert set(cache._users) == {first, later}
    assert numbers_in(cache) == [1]


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    cache, origin = PartCache(tmp_path, 1 << 20), Origin()
    origin.get(cache, 1)
    (file,) = tmp_path.glob("??/*")
    half = file.with_name(f".{file.name}.12345-0123abcd.tmp")
    half.write_bytes(b"half")
    lock = tmp_path / "locks" / name_of(3)
    lock.write_bytes(b"{}")
    os.utime(lock, (1, 1))
    cache.evict()
    assert not half.exists()
    assert not lock.exists()
    assert numbers_in(cache) == [1]


def test_a_full_disk_makes_the_cache_smaller_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, origin = PartCache(tmp_path, 1 << 20), Origin()
    room = 4 * 1016
    kept = part_cache.AtomicFile

    class Disk(kept):  # type: ignore[misc,valid-type]
        def commit(self) -> None:
            if sum(file.stat().st_size for file in tmp_path.glob("??/*")) + 1016 > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().commit()

    monkeypatch.setattr(part_cache, "AtomicFile", Disk)
    with caplog.at_level(logging.WARNING):
        assert [origin.get(cache, number) for number in range(12)] == [content(number) for number in range(12)]
    assert len(caplog.records) == 1
    assert "No space left on device; going on with a cache of" in caplog.text
    assert cache.limit_bytes < room
    assert 1 <= len(numbers_in(cache)) <= 4


def test_without_any_room_parts_are_held_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache, origin = PartCache(tmp_path / "file" / "parts", 1 << 20), Origin()
    assert [origin.get(cache, number) for number in (1, 1, 2)] == [content(1), content(1), content(2)]
    assert "in memory alone" in caplog.text
    assert len(caplog.records) == 1


def test_a_size_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        PartCache(tmp_path, 0)
