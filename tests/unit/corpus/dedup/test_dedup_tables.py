"""The hash table in memory and the sorted runs on disk behave like Python's set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.arrays.hashes import Words
from penstock.corpus.dedup import seen_keys
from penstock.corpus.dedup.key_table import KeyTable
from penstock.corpus.dedup.seen_keys import KeyRuns, SeenKeys
from penstock.files.machine_code import Functions

TOP = (1 << 64) - 1
# Few different words, and many at both ends of the table: clusters, and keys that run over the end.
firsts = st.sampled_from([1, 2, 3, 1 << 62, TOP, TOP - 1, TOP - 2, TOP - (1 << 53)]) | st.integers(1, TOP)
seconds = st.sampled_from([0, 1, 7])
relaxed = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["NumPy", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Functions | None:
    """What tables are made with."""
    return None if request.param == "NumPy" else request.getfixturevalue("compiled")


def new_table(width: int, kernels: Functions | None) -> KeyTable:
    table = KeyTable(width)
    table.kernels = kernels
    return table


def as_keys(rows: list[list[tuple[int, int]]], bands: int, width: int) -> Words:
    flat = [key[:width] for row in rows for key in row]
    return np.array(flat, np.uint64).reshape(len(rows), bands, width)


def grouped(bands: int) -> st.SearchStrategy[list[list[tuple[int, int]]]]:
    return st.lists(st.lists(st.tuples(firsts, seconds), min_size=bands, max_size=bands), max_size=12)


@given(st.data(), st.integers(1, 2), st.integers(1, 3))
@relaxed
def test_a_row_is_a_duplicate_if_a_key_of_it_was_known_or_in_an_earlier_row(
    kernels: Functions | None, data: st.DataObject, width: int, bands: int
) -> None:
    table = new_table(width, kernels)
    outside = {key[:width] for key in data.draw(st.sets(st.tuples(firsts, seconds), max_size=4))}
    seen: set[tuple[int, ...]] = set(outside)
    for rows in data.draw(st.lists(grouped(bands), max_size=4)):
        keys = as_keys(rows, bands, width)
        known = np.array([[key[:width] in outside for key in row] for row in rows], np.bool_).reshape(-1, bands)
        wanted, new = [], []
        for row in rows:
            cut = list(dict.fromkeys(key[:width] for key in row))
            wanted.append(any(key in seen for key in cut))
            new += [key for key in cut if key not in seen]
            seen.update(cut)
        table.grow_for(table.stored + keys.shape[0] * bands)
        duplicate, fresh = table.add_rows(keys, known)
        assert duplicate.tolist() == wanted
        assert list(map(tuple, fresh.tolist())) == new
    stored = seen - outside
    assert table.stored == len(stored)
    order = [key for piece in table.in_order() for key in map(tuple, piece.tolist())]
    assert set(order) == stored
    assert len(order) == len(stored)
    assert [key[0] for key in order] == sorted(key[0] for key in order)


@given(st.sets(st.tuples(firsts, seconds), max_size=40), st.data(), st.integers(1, 2))
@relaxed
def test_removed_keys_are_gone_and_the_others_are_still_found(
    kernels: Functions | None, given_keys: set[tuple[int, int]], data: st.DataObject, width: int
) -> None:
    cut = sorted({key[:width] for key in given_keys})
    out = data.draw(st.sets(st.sampled_from(cut))) if cut else set()
    keys = np.array(cut, np.uint64).reshape(-1, 1, width)
    table = new_table(width, kernels)
    table.add_rows(keys, None)
    table.remove(np.array(sorted(out), np.uint64).reshape(-1, width))
    assert table.stored == len(cut) - len(out)
    duplicate, _ = table.add_rows(keys, None)
    assert duplicate.tolist() == [key not in out for key in cut]


def test_a_table_grows_and_keeps_its_keys(kernels: Functions | None) -> None:
    rng = np.random.default_rng(0)
    table, total = new_table(1, kernels), 0
    for size in (10, 1000, 30_000):
        keys = rng.integers(1, TOP, (size, 1, 1), np.uint64, endpoint=True)
        table.grow_for(table.stored + size)
        assert not table.add_rows(keys, None)[0].any()
        assert table.add_rows(keys, None)[0].all()
        total += size
    assert table.stored == total
    assert total * 8 <= table.nbytes <= total * 32
    pieces = list(table.in_order())
    assert (np.diff(np.concatenate(pieces)[:, 0].astype(object)) > 0).all()


@given(st.integers(0, 1 << 30), st.integers(1, 2), st.sampled_from([7, 300, 700]))
@settings(relaxed, max_examples=16)
def test_a_crowd_of_keys_at_the_end_of_the_table_runs_over_to_its_beginning(
    kernels: Functions | None, seed: int, width: int, per_call: int
) -> None:
    rng = np.random.default_rng(seed)
    keys = TOP - rng.integers(0, 1 << 50, (700, 1, width), np.uint64)
    keys[100:200, :, 0] = keys[0, 0, 0]  # the same first word, with one of three second ones
    keys[:, :, 1:] = rng.integers(0, 3, (700, 1, width - 1))
    keys[200:350] = rng.integers(1, TOP, (150, 1, width), np.uint64)
    order = [tuple(key) for key in keys[:, 0].tolist()]
    table, seen = new_table(width, kernels), set[tuple[int, ...]]()
    for start in range(0, 700, per_call):
        wanted = []
        for key in order[start : start + per_call]:
            wanted.append(key in seen)
            seen.add(key)
        assert table.add_rows(keys[start : start + per_call], None)[0].tolist() == wanted
    for size in (0, 2000, 5000):
        table.grow_for(size)
        assert table.add_rows(keys, None)[0].all()
        kept = [tuple(key) for piece in table.in_order() for key in piece.tolist()]
        assert sorted(kept) == sorted(seen)
        assert [key[0] for key in kept] == sorted(key[0] for key in kept)


@pytest.mark.parametrize(("nbytes", "loads", "compiles"), [(1 << 20, 0, 0), (40 << 20, 3, 0), (80 << 20, 3, 2)])
def test_machine_code_is_for_many_keys_and_enough_memory(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, loads: int, compiles: int
) -> None:
    asked: list[bool] = []

    class Asked:
        loaded = None

        def functions(self, *, compile_missing: bool) -> None:
            asked.append(compile_missing)

    monkeypatch.setattr(seen_keys, "KERNELS", Asked())
    monkeypatch.setattr(seen_keys, "_LOAD_KEYS", 100)
    monkeypatch.setattr(seen_keys, "_COMPILE_KEYS", 200)
    seen = SeenKeys(1, nbytes=nbytes)
    for start in range(1, 401, 100):
        seen.add(np.arange(start, start + 100, dtype=np.uint64).reshape(-1, 1, 1))
    assert (len(asked), sum(asked)) == (loads, compiles)
    seen.add(np.arange(1000, 1400, dtype=np.uint64).reshape(-1, 2, 1))
    assert len(asked) == loads, "rows of several keys have a kernel of numba's own"


@given(st.lists(st.sets(st.tuples(firsts, seconds), max_size=20), max_size=9), st.integers(1, 2))
@relaxed
def test_runs_have_what_was_added_and_nothing_else(batches: list[set[tuple[int, int]]], width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_keys, "_BLOCK", 3)  # so that equal first words lie across blocks
        patch.setattr(seen_keys, "_PART", 5)
        runs = KeyRuns(width, 512, None)
        held: set[tuple[int, ...]] = set()
        for batch in batches:
            new = sorted({key[:width] for key in batch} - held)
            held |= set(new)
            keys = np.array(new, np.uint64).reshape(-1, width)
            runs.add([keys[:7], keys[7:]])
        asked = sorted(held | {(1, 0)[:width], (TOP - 5, 7)[:width], (1 << 40, 1)[:width]})
        assert runs.has(np.array(asked, np.uint64)).tolist() == [key in held for key in asked]
        runs.fit(64 << 10)
        assert runs.has(np.array(asked, np.uint64)).tolist() == [key in held for key in asked]


def test_runs_merge_so_that_few_files_are_asked_and_none_stays_behind(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0

    rng, before = np.random.default_rng(0), open_files()
    runs = KeyRuns(1, 1 << 20, tmp_path)
    keys = np.unique(rng.integers(1, TOP, 300_000, np.uint64))
    for part in range(21):
        runs.add([keys[part::21, None]])
    assert runs.has(keys[:, None]).all()
    assert not runs.has(rng.integers(1, TOP, (1000, 1), np.uint64)).any()
    if before:
        assert open_files() - before <= 3 * 3
    del runs
    assert open_files() == before
    assert not list(tmp_path.iterdir())


def test_the_filter_lets_few_unknown_keys_through_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    keys = np.sort(rng.integers(1, TOP, (1 << 16, 1), np.uint64), axis=0)
    runs = KeyRuns(1, (1 << 16) * 16 // 8, None)  # 16 bits for each key
    runs.add([keys])
    asked = 0

    def counted(_: object, keys: Words) -> np.ndarray:
        nonlocal asked
        asked = len(keys)
        return np.zeros(len(keys), np.bool_)

    monkeypatch.setattr(seen_keys._Run, "has", counted)
    runs.has(rng.integers(1, TOP, (20_000, 1), np.uint64))
    assert 0 < asked < 400
