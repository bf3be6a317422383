from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.errors import ConfigError
from penstock.memory import LRUCache, MemoryBudget


def keys_in(cache: LRUCache[str], keys: str) -> str:
    return "".join(key for key in keys if key in cache)


def test_the_least_recently_used_make_room() -> None:
    cache: LRUCache[str] = LRUCache(300)
    for key in "abc":
        assert cache.put(key, key, 100)
    assert cache.get("a") == "a"
    assert cache.put("d", "d", 150)
    assert keys_in(cache, "abcd") == "ad"
    assert cache.get("b") is None
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evicted, stats.items, stats.nbytes) == (1, 1, 2, 2, 250)


@pytest.mark.parametrize("shuffled", [True, False])
def test_without_eviction_epochs_larger_than_the_cache_still_hit_it(shuffled: bool) -> None:
    rng = np.random.default_rng(7)
    cache: LRUCache[int] = LRUCache(100 * 8, evict=False)
    for _ in range(5):
        for key in rng.permutation(200).tolist() if shuffled else range(200):
            assert cache.get_or_build(key, partial(int, key), lambda _: 8) == key
    assert cache.stats().hits == 4 * 100
    assert cache.stats().refused == 100 + 4 * 100
    assert cache.stats().evicted == 0


def test_an_item_larger_than_the_cache_is_given_but_not_kept() -> None:
    cache: LRUCache[bytes] = LRUCache(100)
    cache.put("small", b"s", 60)
    assert cache.get_or_build("large", lambda: b"x" * 101, len) == b"x" * 101
    assert "large" not in cache
    assert "small" in cache
    assert cache.stats().refused == 1


@pytest.mark.parametrize("evict", [True, False])
def test_an_older_value_goes_even_if_the_new_one_is_not_kept(evict: bool) -> None:
    cache: LRUCache[str] = LRUCache(100, evict=evict)
    cache.put("a", "old", 50)
    assert not cache.put("a", "new", 500)
    assert cache.get("a") is None
    assert cache.nbytes == 0
    assert cache.put("a", "old", 50)
    assert cache.put("a", "new", 100)
    assert cache.get("a") == "new"


def test_a_value_is_built_once_and_measured_by_its_nbytes() -> None:
    cache: LRUCache[np.ndarray] = LRUCache(100)  # type: ignore[type-arg]
    first = cache.get_or_build("a", lambda: np.zeros(10, np.int8))
    assert cache.get_or_build("a", lambda: np.zeros(10, np.int8)) is first
    assert cache.nbytes == 10
    with pytest.raises(ValueError, match="broken"):
        cache.get_or_build("b", lambda: np.array(int("broken")))
    assert cache.get_or_build("b", lambda: first) is first


def test_the_budget_is_charged_for_what_is_held() -> None:
    budget = MemoryBudget(1000)
    cache: LRUCache[str] = LRUCache(600, budget=budget, owner="samples")
    cache.put("a", "a", 200)
    cache.put("b", "b", 300)
    assert budget.by_owner() == {"samples": 500}
    cache.discard("a")
    assert budget.by_owner() == {"samples": 300}
    other: LRUCache[str] = LRUCache(600, budget=budget, owner="samples")
    other.put("a", "a", 100)
    assert budget.by_owner() == {"samples": 400}
    cache.close()
    assert budget.by_owner() == {"samples": 100}


@pytest.mark.parametrize("evict", [True, False])
def test_while_the_budget_is_lowered_the_cache_keeps_its_share_of_it(evict: bool) -> None:
    budget = MemoryBudget(1000)
    cache: LRUCache[str] = LRUCache(800, budget=budget, evict=evict)
    for key in range(8):
        cache.put(key, "x", 100)
    budget.shrink_to(500)
    assert cache.put("new", "x", 100) is evict
    assert cache.nbytes == 400
    assert 0 not in cache


def test_trimming_drops_the_least_recently_used_first() -> None:
    cache: LRUCache[str] = LRUCache(1000)
    for key in "abc":
        cache.put(key, key, 100)
    cache.get("a")
    assert cache.trim(250) == 100
    assert keys_in(cache, "abc") == "ac"
    assert cache.trim() == 200
    assert len(cache) == 0


def test_the_finalizer_of_a_value_may_use_the_cache() -> None:
    cache: LRUCache[object] = LRUCache(100)

    class Dying:
        def __del__(self) -> None:
            cache.put("from the grave", "x", 1)

    cache.put("a", Dying(), 100)
    cache.put("b", "b", 50)
    assert "from the grave" in cache
    cache.put("c", Dying(), 20)
    cache.clear()
    assert "from the grave" in cache


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: LRUCache(-1), "max_bytes"),
        (lambda: LRUCache("2 KiB", budget=MemoryBudget("1 KiB")), "budget"),
        (lambda: LRUCache[int](10).put("a", 1, -1), "'a'"),
    ],
)
def test_mistakes_are_named(mistake: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mistake()  # type: ignore[operator]


def test_many_threads_leave_it_consistent() -> None:
    budget = MemoryBudget(10_000)
    cache: LRUCache[int] = LRUCache(1000, budget=budget)
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        for key in np.random.default_rng(seed).zipf(1.3, 800).tolist():
            assert cache.get_or_build(key % 50, partial(int, key % 50), lambda value: 10 + value) == key % 50
            assert cache.nbytes <= 1000

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result()
    stats = cache.stats()
    assert stats.hits + stats.misses == 3200
    assert stats.nbytes == sum(10 + key for key in range(50) if key in cache)
    assert budget.by_owner().get("cache", 0) == stats.nbytes


class Model(RuleBasedStateMachine):
    """After any operations the cache returns the right values, and holds the bytes that it reports."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(10_000)
        self.cache: LRUCache[int] = LRUCache(500, budget=self.budget)
        self.known: dict[int, tuple[int, int]] = {}

    @rule(key=st.integers(0, 9), value=st.integers(), nbytes=st.integers(0, 600))
    def put(self, key: int, value: int, nbytes: int) -> None:
        if self.cache.put(key, value, nbytes):
            self.known[key] = (value, nbytes)
        else:
            self.known.pop(key, None)
            assert key not in self.cache

    @rule(key=st.integers(0, 9))
    def get(self, key: int) -> None:
        found = self.cache.get(key)
        assert found is None or found == self.known[key][0]

    @rule(key=st.integers(0, 9))
    def discard(self, key: int) -> None:
        self.cache.discard(key)
        assert key not in self.cache

    @rule(most=st.integers(0, 500))
    def trim(self, most: int) -> None:
        self.cache.trim(most)
        assert self.cache.nbytes <= most

    @invariant()
    def holds_what_it_reports(self) -> None:
        held = {key: nbytes for key, (_, nbytes) in self.known.items() if key in self.cache}
        assert len(held) == len(self.cache)
        assert sum(held.values()) == self.cache.nbytes == self.cache.stats().nbytes <= 500
        assert self.budget.used == self.cache.nbytes


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
