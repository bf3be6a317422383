"""Permutation: one-to-one, keyed, the same for ever, and without a pattern."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.order.permutation import Permutation, derive_key

KEYS = st.integers(0, 2**64 - 1)
EDGES = [1024, 1025, 1056, 1057, 2047, 2048, 2049, 4095, 4096, 4097, 65535, 65536, 65537, 97656]


def z_of(counts: npt.ArrayLike) -> float:
    """How many standard deviations a chi-square of equally likely counts lies above what it should be."""
    observed = np.asarray(counts, np.float64).ravel()
    expected, freedom = observed.mean(), observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def one_by_one(size: int, key: int, index: int) -> int:
    """The network of sizes above 1,024, written again on Python's own integers."""
    bits: int = (size - 1).bit_length() // 2
    radix = -(-size // 2**bits)
    place = index
    while True:
        high, low = divmod(place, 2**bits)
        for number in range(8):
            drawn = derive_key(key, size, number)
            mixed = ((high if number % 2 else low) * 0x9E3779B1 + drawn) % 2**32
            mixed = (mixed ^ mixed >> 15) * (drawn >> 32 | 1) % 2**32
            if number % 2:
                low ^= mixed >> (32 - bits)
            else:
                high = (high + mixed * radix // 2**32) % radix
        place = high * 2**bits + low
        if place < size:
            return int(place)


class TestOneToOne:
    @pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 31, 1000, *EDGES])
    def test_every_value_comes_exactly_once_and_goes_back(self, size: int) -> None:
        permutation = Permutation(size, derive_key(3, size))
        values = permutation(np.arange(size))
        assert np.array_equal(np.sort(values), np.arange(size))
        assert np.array_equal(permutation.inverse(values), np.arange(size))
        assert len(permutation) == size

    @settings(deadline=None, max_examples=60)
    @given(st.integers(1, 5000), KEYS)
    def test_any_size_and_key_is_a_permutation(self, size: int, key: int) -> None:
        permutation = Permutation(size, key)
        values = permutation(np.arange(size))
        assert np.array_equal(np.sort(values), np.arange(size))
        assert np.array_equal(permutation.inverse(values), np.arange(size))

    @settings(deadline=None, max_examples=60)
    @given(st.data(), st.one_of(st.integers(1025, 2**62), st.sampled_from([2**62, 2**62 - 1, 2**61 + 1])), KEYS)
    def test_huge_sizes_stay_in_range_and_go_back(self, data: st.DataObject, size: int, key: int) -> None:
        indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
        permutation = Permutation(size, key)
        values = permutation(indices)
        assert 0 <= values.min() <= values.max() < size
        assert len(set(values.tolist())) == len(set(indices))
        assert permutation.inverse(values).tolist() == indices
        assert permutation(permutation.inverse(indices)).tolist() == indices

    @settings(deadline=None, max_examples=60)
    @given(st.data(), st.integers(1025, 2**62), KEYS)
    def test_vectors_follow_the_definition_one_by_one(self, data: st.DataObject, size: int, key: int) -> None:
        indices = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
        assert Permutation(size, key)(indices).tolist() == [one_by_one(size, key, index) for index in indices]

    def test_values_do_not_depend_on_what_else_is_asked(self) -> None:
        permutation = Permutation(50_000, 9)
        everything = permutation(np.arange(50_000))
        parts = [permutation(np.arange(start, min(start + 777, 50_000))) for start in range(0, 50_000, 777)]
        assert np.array_equal(np.concatenate(parts), everything)
        assert [permutation(index) for index in range(0, 50_000, 5003)] == everything[::5003].tolist()


class TestShapesAndTypes:
    @pytest.mark.parametrize("size", [10, 5000])
    def test_an_int_gives_an_int_and_an_array_its_shape(self, size: int) -> None:
        permutation = Permutation(size, 1)
        assert [type(found) for found in (permutation(3), permutation.inverse(np.int64(3)))] == [int, int]
        grid = permutation(np.arange(6, dtype=np.uint8).reshape(2, 3).T)
        assert grid.shape == (3, 2)
        assert grid.dtype == np.int64
        assert grid[2, 1] == permutation(5)
        assert permutation([]).dtype == np.int64
        assert permutation(np.zeros((0, 4), np.int32)).shape == (0, 4)

    def test_what_was_given_is_left_as_it_was(self) -> None:
        indices = np.arange(3000)
        Permutation(3000, 5)(indices)
        assert np.array_equal(indices, np.arange(3000))

    @pytest.mark.parametrize("size", [10, 5000])
    def test_a_table_cannot_be_changed_through_an_answer(self, size: int) -> None:
        permutation = Permutation(size, 1)
        first = permutation(np.arange(size))
        kept = first.copy()
        first[:] = 0
        assert np.array_equal(permutation(np.arange(size)), kept)

    @pytest.mark.parametrize("size", [0, 10, 5000, 2**62])
    @pytest.mark.parametrize("past", [0, 1, 2**63, 2**70])
    def test_an_index_out_of_range_is_refused_with_the_size(self, size: int, past: int) -> None:
        permutation = Permutation(size, 1)
        with pytest.raises(IndexError, match=rf"{size + past}.*{size}"):
            permutation(size + past)
        with pytest.raises(IndexError, match=rf"{past + 1}.*{size}"):
            permutation.inverse(-1 - past)

    def test_the_first_index_out_of_range_in_an_array_is_named(self) -> None:
        with pytest.raises(IndexError, match=r"-2\b.*\b10\b"):
            Permutation(10, 1)([[3, 9], [-2, 10]])

    @pytest.mark.parametrize("wrong", [1.0, [0.5], [True], "3", None])
    def test_only_integers_are_mapped(self, wrong: object) -> None:
        with pytest.raises(TypeError, match=r"(?i)permutation"):
            Permutation(10, 1)(wrong)  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("size", "key", "says"),
        [(-1, 0, "got -1"), (2**62 + 1, 0, "2\\*\\*62"), (5, 2**64, "derive_key"), (5, -1, "derive_key")],
    )
    def test_a_size_or_key_that_cannot_work_is_refused(self, size: int, key: int, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            Permutation(size, key)

    def test_permutations_are_compared_by_size_and_key(self) -> None:
        used, fresh = Permutation(5000, 1), Permutation(5000, 1)
        used(0)
        assert used == fresh
        assert hash(used) == hash(fresh)
        assert used != Permutation(5000, 2)


class TestKeys:
    def test_keys_never_change(self) -> None:
        assert derive_key(0) == 12375603369157326255
        assert derive_key(7, "shuffle", 3) == 16455334992299444563
        assert derive_key(-1, "", "é", 2**70) == 7528420953354727747

    def test_parts_that_look_alike_make_different_keys(self) -> None:
        alike: list[tuple[int | str, ...]] = [
            (),
            ("",),
            ("", ""),
            ("ab",),
            ("a", "b"),
            ("1",),
            (1,),
            (-1,),
            (11,),
            (1, 1),
            ("i1",),
        ]
        assert len({derive_key(1, *parts) for parts in alike}) == len(alike)
        assert derive_key(1, 2) != derive_key(12)

    def test_every_kind_of_integer_and_string_makes_the_same_key(self) -> None:
        assert derive_key(np.int32(1), np.str_("a"), True) == derive_key(1, "a", 1)  # type: ignore[arg-type]
        assert 0 <= derive_key(5, "lone \ud800 surrogate") < 2**64

    def test_a_part_that_is_neither_is_refused(self) -> None:
        with pytest.raises(TypeError):
            derive_key(1, 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "key", "values"),
    [
        (5, 0, [3, 2, 0, 0, 1]),
        (10, 1, [2, 6, 1, 4, 3]),
        (1000, 2, [886, 964, 977, 283, 262]),
        (1025, 3, [137, 89, 669, 705, 731]),
        (97656, 4, [13792, 1313, 48089, 3324, 3092]),
        (10**9, 5, [956336463, 241983611, 267689195, 177963839, 938949854]),
        (2**40 + 3, 6, [980445476506, 837866430590, 220895037419, 669449539115, 13040531953]),
        (
            2**62,
            2**64 - 1,
            [4340467184369415752, 2589622446559982340, 3132733815271491712, 2881873763014285358, 3648325251949392111],
        ),
    ],
)
def test_the_order_never_changes(size: int, key: int, values: list[int]) -> None:
    # Runs resume by it: if this fails, the code is wrong, not the numbers.
    assert Permutation(size, key)([0, 1, 2, size // 2, size - 1]).tolist() == values


class TestRandomness:
    """Keys are fixed, so these never fail by chance; 5 standard deviations is far from where any of them lies."""

    def test_all_orders_of_four_are_equally_likely(self) -> None:
        seen = Counter(tuple(Permutation(4, key)(np.arange(4)).tolist()) for key in range(12_000))
        assert set(seen) == set(itertools.permutations(range(4)))
        assert z_of(list(seen.values())) < 5

    @pytest.mark.parametrize("size", [8, 100, 1024, 1025, 1500])
    def test_over_keys_every_place_and_every_distance_is_equally_likely(self, size: int) -> None:
        drawn = np.stack([Permutation(size, key)(np.arange(size)) for key in range(1500)])
        for index in (0, 1, size // 2, size - 1):
            assert z_of(np.bincount(drawn[:, index], minlength=size)) < 5
        # Neighbours, and indices that differ in one half of their bits only.
        half = 1 << ((size - 1).bit_length() // 2)
        for other in (1, half):
            apart = (drawn[:, other] - drawn[:, 0]) % size
            assert z_of(np.bincount(apart, minlength=size)[1:]) < 5

    @pytest.mark.parametrize("size", [1024, 1025, 2000])
    def test_fixed_points_and_descents_are_as_frequent_as_chance_has_them(self, size: int) -> None:
        drawn = np.stack([Permutation(size, key)(np.arange(size)) for key in range(1500)])
        fixed = (drawn == np.arange(size)).sum(axis=1)
        assert abs(fixed.mean() - 1) < 5 / math.sqrt(1500)
        assert abs(fixed.var() - 1) < 5 * math.sqrt(3 / 1500)
        descents = (np.diff(drawn, axis=1) < 0).sum(axis=1)
        assert abs(descents.mean() - (size - 1) / 2) < 5 * math.sqrt((size + 1) / 12 / 1500)

    @pytest.mark.parametrize("size", [97_656, 10**9, 2**40 + 3, 2**62])
    @pytest.mark.parametrize("stride", [1, 2, 256, 31_250])
    def test_neighbouring_indices_go_to_unrelated_places(self, size: int, stride: int) -> None:
        permutation = Permutation(size, derive_key(11, size))
        starts = np.arange(60_000)
        here, there = permutation(starts), permutation((starts + stride) % size)
        for part in (1, size // 16):  # its lowest four bits, and the sixteenth it falls into
            pair = (here // part % 16) * 16 + there // part % 16
            assert z_of(np.bincount(pair, minlength=256)) < 5

    @pytest.mark.parametrize("bits", [12, 20, 31, 62])
    def test_one_bit_of_the_index_or_the_key_changes_half_of_the_bits(self, bits: int) -> None:
        size, samples = 1 << bits, 1 << 11
        indices = np.random.default_rng(0).integers(0, size, samples)
        values = Permutation(size, 77)(indices)
        others = [Permutation(size, 77)(indices ^ (1 << bit)) for bit in range(bits)]
        others += [Permutation(size, 77 ^ 1 << bit)(indices) for bit in range(0, 64, 7)]
        for other in others:
            changed = (values ^ other)[:, None] >> np.arange(bits) & 1
            assert np.all(np.abs(changed.mean(axis=0) - 0.5) < 0.08)

    def test_keys_next_to_each_other_and_sizes_next_to_each_other_share_no_order(self) -> None:
        indices = np.arange(50_000)
        base = Permutation(10**9, 5)(indices)
        for other in (Permutation(10**9, 6), Permutation(10**9, 4), Permutation(10**9 - 1, 5)):
            assert abs(np.corrcoef(base, other(indices))[0, 1]) < 5 / math.sqrt(50_000)
            assert (base == other(indices)).sum() < 5
