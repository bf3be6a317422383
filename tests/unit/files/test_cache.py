from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, StalledError
from penstock.files.cache import CacheBackend, DiskCache, default_cache_directory, get_or_make_file, lock_of
from penstock.files.locks import FileLock


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 1000)


def only_file(cache: DiskCache) -> Path:
    (file,) = cache._all_files()
    return file


def used_at(cache: DiskCache, key: str, when: int) -> None:
    (file,) = cache._files(key)
    os.utime(file, (when, when))


def test_what_was_put_comes_back_until_it_is_deleted(cache: DiskCache) -> None:
    backend: CacheBackend = cache
    assert backend.get("a") is None
    backend.put("a", b"one")
    backend.put("b", b"")
    backend.put("a", b"other")
    assert (backend.get("a"), backend.get("b")) == (b"other", b"")
    assert sorted(entry.key for entry in backend.entries()) == ["a", "b"]
    assert cache.size() == 5
    assert (backend.delete("a"), backend.delete("a")) == (True, False)
    assert backend.get("a") is None
    cache.clear()
    assert list(backend.entries()) == []


def test_an_entry_knows_its_size_and_when_it_was_used(cache: DiskCache) -> None:
    cache.put("a", b"12345")
    used_at(cache, "a", 1000)
    entry = cache.stat("a")
    assert entry is not None
    assert (entry.key, entry.size, entry.used) == ("a", 5, 1000.0)
    cache.get("a")
    entry = cache.stat("a")
    assert entry is not None
    assert entry.used > 1000
    assert cache.stat("b") is None


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden", "UPPER", "a~b", "x" * 129, "é", "a b", "-x", "a\n"])
def test_keys_that_are_no_file_names_everywhere_are_refused(cache: DiskCache, key: str) -> None:
    for use in (cache.get, cache.delete, cache.stat, lambda key: cache.put(key, b"")):
        with pytest.raises(ConfigError, match="content_key"):
            use(key)
    with pytest.raises(ConfigError, match="content_key"):
        cache.get_or_make(key, bytes)


@pytest.mark.parametrize("key", ["con", "nul", "a.b-c_d", "0" * 128, "locks"])
def test_keys_that_only_look_odd_are_fine(cache: DiskCache, key: str) -> None:
    assert cache.get_or_make(key, lambda: b"made") == b"made"
    assert cache.get(key) == b"made"


@pytest.mark.parametrize("key", ["con", "nul", "aux.txt", "com1.a.b"])
def test_no_file_has_the_name_of_a_device_of_windows(cache: DiskCache, key: str) -> None:
    """There the name up to the first dot decides, whatever comes behind it."""
    names: list[str] = []

    def make() -> bytes:
        names.extend(file.name for file in cache.directory.rglob("*"))
        return b"made"

    cache.get_or_make(key, make)
    assert [entry.key for entry in cache.entries()] == [key]
    names.extend(file.name for file in cache.directory.rglob("*"))
    assert len(names) >= 4
    assert not [name for name in names if name.partition(".")[0] in ("con", "nul", "aux", "com1")]


def test_a_key_is_not_taken_for_the_beginning_of_another(cache: DiskCache) -> None:
    for key in ("a", "ab", "a.b", "a-b"):
        cache.put(key, key.encode())
    assert cache.delete("a")
    assert [cache.get(key) for key in ("a", "ab", "a.b", "a-b")] == [None, b"ab", b"a.b", b"a-b"]


# -- the limit -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first(cache: DiskCache) -> None:
    for number, key in enumerate(("a", "b", "c")):
        cache.put(key, b"x" * 300)
        used_at(cache, key, 1000 + number)
    cache.get("a")
    cache.put("d", b"x" * 300)
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "d"]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), max_size=30))
def test_one_process_never_leaves_more_than_the_limit(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    cache = DiskCache(tmp_path_factory.mktemp("cache"), 1000)
    for number, size in enumerate(sizes):
        cache.put(f"k{number}", b"x" * size)
        assert cache.size() <= 1000
        assert cache.get(f"k{number}") is not None, "what was just put is there"


def test_a_cache_that_is_there_already_is_measured(tmp_path: Path) -> None:
    for number in range(4):
        DiskCache(tmp_path, 10_000).put(f"k{number}", b"x" * 300)
    small = DiskCache(tmp_path, 1000)
    small.put("new", b"x" * 100)
    assert small.size() <= 1000
    assert small.get("new") is not None


def test_what_is_larger_than_the_cache_is_refused_or_returned_without_being_kept(
    cache: DiskCache, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"\bbig\b"):
        cache.put("big", b"x" * 1001)
    with caplog.at_level(logging.WARNING):
        assert len(cache.get_or_make("big", lambda: b"x" * 1001)) == 1001
    assert "1001 bytes" in caplog.text
    assert cache.size() == 0
    with pytest.raises(ConfigError, match="limit_bytes"):
        DiskCache("x", 0)


@pytest.mark.parametrize("whole", [True, False])
def test_a_directory_that_is_deleted_while_it_is_listed_has_nothing_more(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    cache.put("a", b"one")
    gone = cache.directory if whole else only_file(cache).parent
    is_dir = Path.is_dir

    def delete_after(path: Path) -> bool:
        found = is_dir(path)
        if path == gone:
            shutil.rmtree(gone)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", delete_after)
        assert list(cache.entries()) == []
    assert not gone.exists()
    cache.put("b", b"other")
    assert cache.get("b") == b"other"


def test_what_killed_writers_left_behind_goes_when_it_is_old(cache: DiskCache) -> None:
    cache.put("a", b"1")
    folder = only_file(cache).parent
    old, young = (f"._{key}~{'0' * 32}.99-0123abcd.tmp" for key in "bc")
    for name, age in ((old, 7200), (young, 10)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age, time.time() - age))
    assert cache.size() == 1
    assert sorted(file.name for file in folder.glob(".*")) == [young]


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"wate", b"watfr", b"water!"])
def test_a_damaged_entry_counts_as_missing_and_is_said_so(
    cache: DiskCache, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    cache.put("a", b"water")
    only_file(cache).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.get("a") is None
    assert "checksum" in caplog.text
    assert list(cache.entries()) == []
    only = cache.get_or_make("a", lambda: b"made again")
    assert only == b"made again"


# -- many at once ----------------------------------------------------------------------------------------------------


def test_of_many_threads_that_ask_one_makes_it(cache: DiskCache) -> None:
    made, got = [], []
    begin = threading.Barrier(8)

    def make() -> bytes:
        made.append(1)
        time.sleep(0.02)
        return b"made"

    def ask() -> None:
        begin.wait()
        got.append(DiskCache(cache.directory, 1000).get_or_make("k", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (got, len(made)) == ([b"made"] * 8, 1)
    assert list((cache.directory / "locks").iterdir()) == []


def test_a_maker_that_fails_leaves_it_to_the_next(cache: DiskCache) -> None:
    def fail() -> bytes:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_make("k", fail)
    assert cache.get_or_make("k", lambda: b"yes") == b"yes"


def test_waiting_for_a_maker_has_an_end(cache: DiskCache) -> None:
    with FileLock(cache._lock_path("k")) as lock:
        lock.acquire()
        with pytest.raises(StalledError, match=str(os.getpid())):
            cache.get_or_make("k", bytes, wait_seconds=0.01)


def test_asking_for_a_key_while_making_it_is_said_at_once(cache: DiskCache) -> None:
    def make() -> bytes:
        return DiskCache(cache.directory, 1000).get_or_make("k", lambda: b"inner")

    with pytest.raises(ConfigError, match=r"\bk\b"):
        cache.get_or_make("k", make)
    assert cache.get_or_make("k", lambda: cache.get_or_make("other", lambda: b"fine")) == b"fine"


MAKE = """
import sys, time
from penstock.files.cache import DiskCache

def make():
    print("making", flush=True)
    time.sleep(60)
    return b""

DiskCache(sys.argv[1]).get_or_make("k", make)
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_a_maker_that_is_killed_is_taken_over(cache: DiskCache) -> None:
    process = subprocess.Popen([sys.executable, "-c", MAKE, str(cache.directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(cache.get_or_make("k", lambda: b"taken over")))
    waiting.start()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    waiting.join(300)
    assert got == [b"taken over"]


def writes(data: bytes) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(data)


def test_of_many_threads_that_request_a_file_one_makes_it(tmp_path: Path) -> None:
    made: list[int] = []
    begin, path = threading.Barrier(8), tmp_path / "new" / "a.bin"

    def make(file: BinaryIO) -> None:
        made.append(1)
        assert not path.exists()
        file.write(b"made")

    def request() -> None:
        begin.wait()
        assert get_or_make_file(path, make).read_bytes() == b"made"

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(request) for _ in range(8)]:
            future.result()
    assert len(made) == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_is_not_valid_is_made_again_and_strays_of_it_go(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    stray, other = tmp_path / ".a.bin.1-00000000.tmp", tmp_path / ".b.bin.1-00000000.tmp"
    stray.touch()
    other.touch()
    get_or_make_file(path, writes(b"new"), is_valid=lambda file: file.read_bytes() == b"new")
    assert path.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_maker_of_a_file_that_fails_leaves_nothing_and_the_next_one_makes_it(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        get_or_make_file(tmp_path / "a", fail)
    assert list(tmp_path.iterdir()) == []
    assert get_or_make_file(tmp_path / "a", writes(b"yes")).read_bytes() == b"yes"


def test_a_maker_that_requests_its_own_file_is_refused_and_a_busy_one_is_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(ConfigError, match=str(path)):
        get_or_make_file(path, lambda file: get_or_make_file(path, writes(b"")))
    with FileLock(lock_of(path)) as lock:
        lock.acquire()
        with pytest.raises(StalledError, match=str(os.getpid())):
            get_or_make_file(path, writes(b""), wait_seconds=0.01)


def content(key: str) -> bytes:
    return key.encode() * 40


def churn(directory: str, seed: int) -> list[str]:
    """Put, get, delete and evict among the others; whatever is seen has to be right."""
    cache, wrong = DiskCache(directory, 3000), []
    for turn in range(60):
        key = f"key-{(turn * (seed + 3)) % 29}"
        got = cache.get_or_make(key, lambda key=key: content(key))
        if got != content(key):
            wrong.append(key)
        if turn % 10 == seed:
            cache.delete(key)
        if turn % 7 == seed:
            cache.evict()
    return wrong


def test_processes_that_put_read_and_evict_at_once_never_see_anything_wrong(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(churn, [str(tmp_path)] * 3, range(3)))
    assert results == [[], [], []]
    # Each may have written a sixteenth since it last looked, and one entry.
    assert DiskCache(tmp_path, 3000).size() <= 3000 + 3 * (3000 // 16 + 240)


def test_caches_go_where_the_system_wants_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_directory() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert "penstock" in default_cache_directory().parts
    assert default_cache_directory().is_relative_to(Path.home())


def test_what_is_no_entry_of_the_cache_is_never_deleted(cache: DiskCache, tmp_path: Path) -> None:
    cache.put("a", b"1")
    theirs = [only_file(cache).parent / "notes.txt", cache.directory / "my" / "thesis.md", tmp_path / "far" / "away"]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    (tmp_path / "far" / ("_a~" + "0" * 32)).write_text("mine")
    taken = {file.parent.name for file in theirs}
    link = next(cache.directory / name for name in ("00", "01") if name not in taken)
    link.symlink_to(tmp_path / "far", target_is_directory=True)
    cache.limit_bytes = 1
    cache.evict()
    cache.clear()
    assert cache.size() == 0
    assert [file.read_text() for file in theirs] == ["mine"] * 3
    assert sorted(file.name for file in (tmp_path / "far").iterdir()) == ["_a~" + "0" * 32, "away"]
