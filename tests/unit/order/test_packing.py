"""pack: exactly best-fit and first-fit decreasing, on counts instead of documents."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.order import packing as _first_fit
from penstock.order.packing import STRATEGIES, Bins, count_bins, pack


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths and a capacity: few or many distinct lengths, also none and zero."""
    capacity = draw(st.sampled_from([1, 2, 7, 10, 30, 100, 1000]))
    some = draw(st.lists(st.integers(0, capacity), min_size=1, max_size=40))
    lengths = draw(st.one_of(st.just(some), st.lists(st.sampled_from(some), max_size=120)))
    return lengths, capacity


def one_by_one(lengths: list[int], capacity: int, strategy: str) -> list[list[int]]:
    """The textbook loop: document after document, bin after bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[document]]
        if not fitting:
            bins.append([])
            rooms.append(capacity)
            fitting = [len(bins) - 1]
        number = min(fitting, key=lambda number: rooms[number]) if strategy == "best_fit" else fitting[0]
        bins[number].append(document)
        rooms[number] -= lengths[document]
    return bins


def log_normal(documents: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, documents), 1, 4096).astype(np.int64)


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestExactness:
    @settings(deadline=None, max_examples=300)
    @given(problem=problems())
    @example(problem=([], 10))
    @example(problem=([0], 10))
    @example(problem=([0, 0, 0], 1))
    @example(problem=([10, 0, 10, 3, 0], 10))
    @example(problem=([5, 5, 4, 4, 3, 3, 3, 2, 2], 9))
    @example(problem=([13, 13, 9, 9, 9, 9, 5, 5, 2], 20))  # two bins join two that were opened later
    def test_bins_are_those_of_the_textbook_loop(self, strategy: str, problem: tuple[list[int], int]) -> None:
        lengths, capacity = problem
        bins = pack(lengths, capacity, strategy)
        assert list(bins) == one_by_one(lengths, capacity, strategy)
        assert count_bins(lengths, capacity, strategy) == len(bins)

    def test_a_window_of_real_size_follows_the_textbook_loop(self, strategy: str) -> None:
        lengths = log_normal(3000)
        assert list(pack(lengths, 4096, strategy)) == one_by_one(lengths.tolist(), 4096, strategy)

    @pytest.mark.parametrize("capacity", [2**17, 2**20, 2**40])
    def test_few_documents_in_large_bins_follow_the_textbook_loop(self, strategy: str, capacity: int) -> None:
        lengths = np.random.default_rng(1).integers(0, capacity + 1, 400)
        assert list(pack(lengths, capacity, strategy)) == one_by_one(lengths.tolist(), capacity, strategy)
        assert count_bins(lengths, capacity, strategy) == len(pack(lengths, capacity, strategy))

    def test_more_bins_than_sixteen_bits_count_are_all_whole(self, strategy: str) -> None:
        lengths = np.random.default_rng(2).permutation(np.repeat([3, 2, 1], 70_000))
        bins = pack(lengths, 4, strategy)
        check(bins, lengths, 4)
        assert len(bins) == 105_000  # 70,000 of 3 + 1 and 35,000 of 2 + 2: nothing is left over


class TestWhatHolds:
    @settings(deadline=None, max_examples=40)
    @given(seed=st.integers(0, 1000), documents=st.integers(1, 4000), strategy=st.sampled_from(STRATEGIES))
    def test_every_document_is_in_one_bin_and_no_bin_is_over_full(
        self, seed: int, documents: int, strategy: str
    ) -> None:
        lengths = log_normal(documents, seed)
        bins = pack(lengths, 4096, strategy)
        check(bins, lengths, 4096)
        rooms = 4096 - bins.sizes(lengths)
        # No two bins fit into one: what any decreasing fit promises.
        assert len(bins) < 2 or np.sort(4096 - rooms)[:2].sum() > 4096

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_a_window_of_log_normal_lengths_is_nearly_full(self, strategy: str) -> None:
        lengths = log_normal(65_536)
        bins = pack(lengths, 4096, strategy)
        check(bins, lengths, 4096)
        assert bins.efficiency(lengths, 4096) > 0.999
        assert bins.efficiency(lengths, 4096) == pytest.approx(lengths.sum() / (len(bins) * 4096))

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(problem=problems())
    def test_first_fit_in_blocks_is_first_fit(
        self, problem: tuple[list[int], int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_first_fit, "_BLOCK", 2)
        monkeypatch.setattr(_first_fit, "_FEW", 0)
        assert list(pack(*problem, "first_fit")) == one_by_one(*problem, "first_fit")

    def test_documents_of_one_length_keep_their_order(self) -> None:
        assert list(pack([2, 2, 2, 2, 2], 4)) == [[0, 1], [2, 3], [4]]

    def test_best_fit_and_first_fit_differ_where_they_should(self) -> None:
        # After 7 | 5 4 the rooms are 3 and 1: the last document fits behind both.
        assert list(pack([7, 5, 4, 1], 10, "first_fit")) == [[0, 3], [1, 2]]
        assert list(pack([7, 5, 4, 1], 10, "best_fit")) == [[0], [1, 2, 3]]

    @pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
    def test_any_integers_will_do(self, dtype: type[np.integer]) -> None:
        bins = pack(np.array([200, 100, 50, 50], dtype), np.int32(250))  # type: ignore[arg-type]
        assert list(bins) == [[0, 2], [1, 3]]
        assert bins.documents.dtype == bins.offsets.dtype == np.dtype(np.int64)

    def test_no_documents_make_no_bins(self) -> None:
        bins = pack([], 10)
        assert (len(bins), bins.documents.tolist(), bins.offsets.tolist()) == (0, [], [0])
        assert bins.efficiency([], 10) == 1.0


class TestBadInput:
    @pytest.mark.parametrize("act", [pack, count_bins])
    def test_a_document_that_fits_no_bin_is_named_with_the_remedy(self, act: object) -> None:
        with pytest.raises(ConfigError, match=r"\b1\b.*\b11\b.*\b10\b"):
            act([3, 11, 12], 10)  # type: ignore[operator]

    def test_a_negative_length_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"\b2\b.*-4\b"):
            pack([3, 4, -4, 99], 10)

    def test_a_length_beyond_int64_is_too_long_rather_than_negative(self) -> None:
        with pytest.raises(ConfigError, match=str(2**64 - 1)):
            pack(np.array([1, 2**64 - 1], np.uint64), 10)

    @pytest.mark.parametrize("capacity", [0, -5])
    def test_a_capacity_that_holds_nothing_is_refused(self, capacity: int) -> None:
        with pytest.raises(ConfigError, match=str(capacity)):
            pack([1], capacity)

    @pytest.mark.parametrize("lengths", [[1.5], [[1, 2]], ["a"], 3])
    def test_lengths_that_are_not_a_row_of_integers_are_refused(self, lengths: object) -> None:
        with pytest.raises(ConfigError, match="lengths"):
            pack(lengths, 10)  # type: ignore[arg-type]

    def test_an_unknown_strategy_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"'worst_fit'.*best_fit, first_fit"):
            pack([1], 10, "worst_fit")


def check(bins: Bins, lengths: npt.NDArray[np.int64], capacity: int) -> None:
    assert np.array_equal(np.sort(bins.documents), np.arange(len(lengths)))
    assert (bins.offsets[0], bins.offsets[-1]) == (0, len(lengths))
    assert np.all(np.diff(bins.offsets) > 0)
    sizes = [int(lengths[bins.documents[low:high]].sum()) for low, high in zip(bins.offsets, bins.offsets[1:])]
    assert bins.sizes(lengths).tolist() == sizes
    assert max(sizes) <= capacity
