"""Shuffle by blocks: one-to-one, both ways, local, and part of plan and state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.token_stores import make_rows, make_store

from penstock import PretrainDataLoader
from penstock.errors import ConfigError, ResumeError
from penstock.order.block_shuffle import BlockPermutation, BlockShuffle
from penstock.order.permutation import Permutation

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=80)
@given(st.integers(1, 6000), st.integers(1, 700), st.integers(1, 9), KEYS)
def test_every_value_comes_once_and_goes_back(size: int, block: int, window: int, key: int) -> None:
    permutation = BlockPermutation(size, key, block=block, window=window)
    values = permutation(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))
    assert np.array_equal(permutation.inverse(values), np.arange(size))


@settings(max_examples=40)
@given(st.data(), st.integers(1025, 2**62), st.integers(1, 2**40), st.integers(1, 2**10), KEYS)
def test_huge_sizes_stay_in_range_and_go_back(
    data: st.DataObject, size: int, block: int, window: int, key: int
) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    permutation = BlockPermutation(size, key, block=block, window=window)
    values = permutation(indices)
    assert 0 <= values.min() <= values.max() < size
    assert permutation.inverse(values).tolist() == indices
    assert permutation(indices[0]) == values[0]
    assert isinstance(permutation.inverse(int(values[0])), int)


@settings(max_examples=60)
@given(st.integers(1, 6000), st.integers(1, 300), st.integers(1, 9), KEYS)
def test_a_window_holds_whole_blocks_and_every_block_is_in_one_window(
    size: int, block: int, window: int, key: int
) -> None:
    permutation = BlockPermutation(size, key, block=block, window=window)
    values = permutation(np.arange(size))
    firsts = permutation.first_indices(values)
    assert (np.diff(firsts) >= 0).all()  # windows come one after the other
    windows = np.unique(firsts, return_inverse=True)[1]
    assert np.array_equal(np.unique(firsts), firsts[np.flatnonzero(np.diff(firsts, prepend=-1))])
    of_block: dict[int, set[int]] = {}
    for value, where in zip((values // block).tolist(), windows.tolist()):
        of_block.setdefault(value, set()).add(where)
    assert all(len(found) == 1 for found in of_block.values())
    counts = np.bincount([next(iter(found)) for found in of_block.values()])
    assert (counts[:-1] == window).all()
    assert counts[-1] <= window


def test_blocks_and_their_content_are_mixed() -> None:
    values = BlockPermutation(100_000, 7, block=500, window=10)(np.arange(100_000))
    inside = values[:5000]
    assert len(np.unique(inside // 500)) == 10
    # Neighbours in the order are of all blocks of the window, not of one after the other.
    assert np.mean(np.diff(inside // 500) == 0) < 0.15
    assert abs(np.corrcoef(np.arange(5000), inside % 500)[0, 1]) < 0.1
    assert not np.array_equal(values, BlockPermutation(100_000, 8, block=500, window=10)(np.arange(100_000)))


def test_an_index_out_of_range_is_refused() -> None:
    with pytest.raises(IndexError, match=r"10.*size 10"):
        BlockPermutation(10, 1, block=3, window=2)(10)


def test_sizes_follow_the_tokens_and_the_corpus() -> None:
    large = BlockShuffle().permutation(1 << 24, 1 << 36, 1)  # 4096 tokens each
    assert (large.block, large.window) == (1 << 10, 64)
    small = BlockShuffle().permutation(6400, 64_000, 1)
    assert (small.block, small.window) == (200, 2)
    assert BlockShuffle().permutation(3, 30, 1).block == 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [({"block_tokens": 0}, "block_tokens"), ({"block_tokens": True}, "block_tokens"), ({"window_tokens": 5}, "whole")],
)
def test_bad_sizes_are_refused(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BlockShuffle(**sizes)


@pytest.mark.parametrize("more", [{}, {"packing": None, "truncation": "split"}, {"packing": "best_fit"}])
def test_a_loader_by_blocks_has_every_token_once_and_refuses_other_states(tmp_path: Path, more: dict[str, str]) -> None:
    if more.get("packing") == "best_fit":
        more = {**more, "truncation": "split"}
    make_store(tmp_path / "a.store", make_rows(300, 40, seed=3), shard_bytes=4096)
    given = {"chunk_size": 16, "batch_size": 4, "backend": "numpy", **more}
    exact = PretrainDataLoader(tmp_path / "a.store", **given)
    loader = PretrainDataLoader(tmp_path / "a.store", shuffle="blocks", **given)
    batches = [batch["input_ids"].copy() for batch in loader]
    assert [batch["input_ids"].tolist() for batch in exact] != [batch.tolist() for batch in batches]

    def tokens(one: PretrainDataLoader) -> list[int]:
        one.reset()
        return sorted(t for b in one for t, kept in zip(b["input_ids"].ravel(), b["attention_mask"].ravel()) if kept)

    assert tokens(loader) == tokens(exact)
    loader.reset()
    with pytest.raises(ResumeError, match=r"shuffle is \[true\] in the state and \[.blocks 4Mi/256Mi.\] here"):
        loader.load_state_dict(exact.state_dict())
    loader.seek(3)
    again = PretrainDataLoader(tmp_path / "a.store", shuffle=BlockShuffle(), **given)
    again.load_state_dict(loader.state_dict())
    assert np.array_equal(again.get_batch()["input_ids"], batches[3])
    with pytest.raises(ResumeError, match="shuffle"):
        PretrainDataLoader(tmp_path / "a.store", shuffle=BlockShuffle(block_tokens=64), **given).load_state_dict(
            loader.state_dict()
        )
    row = again.plan.step(2).samples.rows[0]
    assert 2 in [use.step for use in again.plan.trace(int(row))]


def test_the_default_is_the_exact_shuffle() -> None:
    assert not isinstance(Permutation(10, 1), BlockPermutation)
    with pytest.raises(ConfigError, match=r"shuffle must be True, False.*'block'"):
        PretrainDataLoader("nowhere", shuffle="block")  # type: ignore[arg-type]
