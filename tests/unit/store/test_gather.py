"""Tokens copied out of stores against the rows as the store itself gives them."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DataError, SchemaError
from penstock.store import open_store
from penstock.store.gather import TokenTable
from token_stores import make_masks, make_rows, make_store

ROWS = make_rows(300, 70, seed=1, shortest=0)
MASKS = make_masks(ROWS)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("stores")
    return [
        make_store(home / "many", ROWS, MASKS, shard_bytes=4000),
        make_store(home / "one", ROWS[:50], MASKS[:50]),
        make_store(home / "wide", ROWS, MASKS, dtype=pa.uint32(), shard_bytes=9000),
    ]


def table_of(*paths: Path) -> TokenTable:
    return TokenTable([open_store(path) for path in paths])


def test_the_store_under_test_has_many_shards(stores: list[Path]) -> None:
    assert len(open_store(stores[0]).manifest.shards) > 5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_parts_are_copied_to_where_they_belong(stores: list[Path], data: st.DataObject) -> None:
    which = data.draw(st.sampled_from([[0], [1], [2], [0, 1]]))
    table = table_of(*(stores[number] for number in which))
    rows = [row for number in which for row in (ROWS if number != 1 else ROWS[:50])]
    masks = [mask for number in which for mask in (MASKS if number != 1 else MASKS[:50])]
    assert (table.rows, table.tokens) == (len(rows), sum(map(len, rows)))
    assert table.supervised == sum(sum(mask) for mask in masks)
    chosen = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=20)), np.int64)
    lengths = table.lengths(chosen)
    assert lengths.tolist() == [len(rows[row]) for row in chosen]
    starts = np.array([data.draw(st.integers(0, int(length))) for length in lengths], np.int64)
    sizes = np.array([data.draw(st.integers(0, int(n - s))) for n, s in zip(lengths, starts)], np.int64)
    if len(sizes) and data.draw(st.booleans()):  # rows of one length, with or without gaps between them
        sizes[:] = sizes.min()
    gap = data.draw(st.sampled_from([0, 2]))
    at = np.cumsum(sizes + gap) - sizes
    size = int((sizes + gap).sum()) + 2
    out, mask = np.full(size, -1, np.int64), np.zeros(size, np.bool_)
    with patch("penstock.store.gather._STRETCH_TOKENS", data.draw(st.sampled_from([1, 100, 1 << 15]))):
        table.copy(chosen, starts, sizes, out, at)
    table.copy_mask(chosen, starts, sizes, mask, at)
    wanted, learned = np.full_like(out, -1), np.zeros_like(mask)
    for row, start, size, target in zip(chosen, starts, sizes, at):
        wanted[target : target + size] = rows[row][start : start + size]
        learned[target : target + size] = masks[row][start : start + size]
    assert out.tolist() == wanted.tolist()
    assert mask.tolist() == learned.tolist()


@pytest.mark.parametrize("few_rows", [0, 1 << 20])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_the_row_of_a_token_is_found_by_its_number(stores: list[Path], few_rows: int, data: st.DataObject) -> None:
    table = table_of(stores[0], stores[1])
    with patch("penstock.store.gather._FEW_ROWS", few_rows):  # beyond it, rows are looked up by groups
        table.find_tokens(np.arange(table.tokens))  # opens all shards
    flat = [(row, token) for row, tokens in enumerate([*ROWS, *ROWS[:50]]) for token in range(len(tokens))]
    positions = data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=30))
    rows, tokens = table.find_tokens(np.array(positions, np.int64))
    assert list(zip(rows.tolist(), tokens.tolist())) == [flat[position] for position in positions]


def test_rows_of_one_length_are_filled_at_once(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 60000, (100, 64))
    table = table_of(make_store(tmp_path / "s", rows.tolist(), shard_bytes=3000))
    chosen = np.random.default_rng(1).integers(0, 100, 40)
    found = table.rows_from(table.locate(chosen, np.full(40, 3)), 60)
    assert found.dtype == table.dtype
    assert (found == rows[chosen, 3:63]).all()


def test_lists_of_a_fixed_size_and_large_lists_are_tokens_too(tmp_path: Path) -> None:
    from penstock.store import StoreWriter

    for number, kind in enumerate([pa.list_(pa.int32(), 4), pa.large_list(pa.int64())]):
        with StoreWriter(tmp_path / str(number)) as writer:
            writer.write(pa.record_batch({"input_ids": pa.array([[i, i, i, i] for i in range(50)], kind)}))
            writer.publish()
        out = np.zeros(8, np.int64)
        table_of(tmp_path / str(number)).copy(
            np.array([7, 49]), np.array([1, 0]), np.array([3, 4]), out, np.array([0, 4])
        )
        assert out.tolist() == [7, 7, 7, 0, 49, 49, 49, 49]


def test_a_table_travels_to_another_process(stores: list[Path]) -> None:
    table = pickle.loads(pickle.dumps(table_of(stores[0])))  # noqa: S301 - our own
    out = np.zeros(len(ROWS[5]), np.int64)
    table.copy(np.array([5]), np.array([0]), np.array([len(ROWS[5])]), out, np.array([0]))
    assert out.tolist() == ROWS[5]


def test_a_shard_that_changes_under_a_reader_is_noticed(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", ROWS[:20])
    table = table_of(path)
    table.lengths(np.array([0]))
    table.check_unchanged()
    (shard,) = (path / "shards").glob("*.arrow")
    os.utime(shard, (1, 1))
    with pytest.raises(DataError, match="shards"):
        table.check_unchanged()
    shard.unlink()
    with pytest.raises(DataError, match="shards"):
        table.check_unchanged()


def test_stores_that_do_not_go_together_are_refused(tmp_path: Path, stores: list[Path]) -> None:
    plain = make_store(tmp_path / "plain", ROWS[:5])
    with pytest.raises(SchemaError, match=r"\bplain\b"):
        table_of(stores[0], plain)
    with pytest.raises(SchemaError, match="'input_ids'"):
        table_of(stores[0], stores[2])


def test_rows_that_are_not_there_are_refused(stores: list[Path]) -> None:
    with pytest.raises(IndexError):
        table_of(stores[1]).lengths(np.array([50]))


def test_offsets_that_point_outside_their_values_are_damage_not_a_crash(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", [[1, 2, 3]] * 40)
    (shard,) = (path / "shards").glob("*.arrow")
    data = bytearray(shard.read_bytes())
    place = data.find(np.arange(0, 123, 3, dtype=np.int32).tobytes())
    assert place > 0
    data[place + 80 : place + 84] = np.int32(1 << 29).tobytes()
    shard.write_bytes(data)
    table = TokenTable([open_store(path, verify="fast")])
    with pytest.raises(DataError, match="shards"):
        table.locate(np.array([20]), np.array([0]))


def test_an_index_that_says_other_lengths_is_damage_not_other_rows(tmp_path: Path) -> None:
    path = make_store(tmp_path / "s", [[1, 2, 3]] * 40)
    (index,) = (path / "shards").glob("*.index")
    data = bytearray(index.read_bytes())
    data[40:44] = np.int32(9000).tobytes()
    index.write_bytes(data)
    table = TokenTable([open_store(path, verify="fast")])
    with pytest.raises(DataError, match="shards"):
        table.locate(np.array([20]), np.array([0]))


@pytest.mark.parametrize("few_rows", [0, 1 << 20])
def test_an_index_with_too_few_tokens_is_damage_not_another_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_rows: int
) -> None:
    monkeypatch.setattr("penstock.store.gather._FEW_ROWS", few_rows)
    path = make_store(tmp_path / "s", [[1, 2, 3]] * 40)
    (index,) = (path / "shards").glob("*.index")
    data = bytearray(index.read_bytes())
    data[:160] = np.full(40, 2, "<i4").tobytes()
    index.write_bytes(data)
    table = TokenTable([open_store(path, verify="fast")])
    with pytest.raises(DataError, match="does not add up"):
        table.find_tokens(np.array([5, 119]))


def test_of_many_shards_some_are_looked_at_each_time(stores: list[Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(stores[0], tmp_path / "many"))
    table = table_of(path)
    table.lengths(np.arange(table.rows))
    count = len(table.stores[0].manifest.shards)
    for _ in range(2 * count):
        table.check_unchanged(3)
    os.truncate(path / table.stores[0].manifest.shards[count // 2].file, 0)

    def some() -> None:
        for _ in range(-(-count // 3)):
            table.check_unchanged(3)

    with pytest.raises(DataError, match="changed"):
        some()


def test_shards_beyond_a_number_are_let_go_of_and_opened_again(
    stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.gather._MOST_SHARDS", 3)
    table = table_of(stores[0])
    for rows in np.random.default_rng(0).integers(0, len(ROWS), (20, 30)):
        held = table.held()
        places, lengths = table.locate(rows, np.zeros(30, np.int64), held), table.lengths(rows)
        out = np.zeros(int(lengths.sum()), np.int64)
        table.copy_from(places, lengths, out, np.cumsum(lengths) - lengths)
        assert out.tolist() == [token for row in rows for token in ROWS[row]]
        del held
        assert len(table.held()) <= 3
    for row in range(0, len(ROWS), 3):
        table.copy(np.array([row]), np.array([0]), np.array([len(ROWS[row])]), np.zeros(99, np.int64), np.array([0]))
    assert len(table.entries) > 5
    assert len(table.stores[0]._readers) <= 4
