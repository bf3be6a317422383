from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.errors import ConfigError
from penstock.memory.budget import MemoryBudget
from penstock.memory.cost_cache import CostAwareCache


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def saved_by_lru(accesses: list[int], cost: list[float], size: list[int], max_bytes: int) -> float:
    """An independent cache of the same size that forgets what was used longest ago."""
    held: OrderedDict[int, int] = OrderedDict()
    saved, total = 0.0, 0
    for key in accesses:
        if key in held:
            held.move_to_end(key)
            saved += cost[key]
            continue
        held[key] = size[key]
        total += size[key]
        while total > max_bytes:
            total -= held.popitem(last=False)[1]
    return saved


def saved_by_hot(accesses: list[int], cost: list[float], size: list[int], max_bytes: int) -> float:
    clock, saved = Clock(), 0.0
    cache: CostAwareCache[int] = CostAwareCache(max_bytes, clock=clock)

    def build(key: int) -> int:
        clock.now += cost[key]
        return key

    for key in accesses:
        before = clock.now
        assert cache.get_or_build(key, partial(build, key), size[key]) == key
        saved += cost[key] if clock.now == before else 0.0
        assert cache.nbytes <= max_bytes
    stats = cache.stats()
    assert stats.saved_seconds == pytest.approx(saved)
    assert stats.spent_seconds == pytest.approx(sum(cost[key] for key in accesses) - saved)
    assert stats.hits + stats.misses == len(accesses)
    return saved


def patterns() -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    items, uses = 600, 8000
    shares = 1 / np.arange(1, items + 1)
    skewed = rng.permutation(items)[rng.choice(items, uses, p=shares / shares.sum())]
    other = rng.permutation(items)[rng.choice(items, uses, p=shares / shares.sum())]
    epochs = np.concatenate([rng.permutation(items) for _ in range(12)])
    scan = np.where(rng.random(uses) < 0.5, rng.integers(0, 40, uses), np.arange(uses) % items)
    return {
        "skewed": skewed.tolist(),
        "what is hot changes": [*skewed.tolist(), *other.tolist()],
        "shuffled epochs": epochs.tolist(),
        "the same order in every epoch": list(range(items)) * 12,
        "a few hot ones beside a scan": scan.tolist(),
    }


@pytest.mark.parametrize("pattern", patterns().values(), ids=patterns().keys())
def test_it_saves_more_seconds_than_forgetting_what_was_used_longest_ago(pattern: list[int]) -> None:
    rng = np.random.default_rng(3)
    cost = (rng.lognormal(0, 1.5, 600) * 1e-3).tolist()
    size = (rng.lognormal(0, 1, 600) * 1000 + 1).astype(int).tolist()
    max_bytes = sum(size) // 8
    spent = sum(cost[key] for key in pattern)
    lru, hot = saved_by_lru(pattern, cost, size, max_bytes), saved_by_hot(pattern, cost, size, max_bytes)
    assert hot > 1.05 * lru
    assert hot > lru + 0.03 * spent


def test_it_follows_when_other_things_become_hot() -> None:
    """Ten rounds over as many new items as fit: the old ones, however hot they were, are gone."""
    cache: CostAwareCache[str] = CostAwareCache(1000)
    for key in [*list(range(10)) * 50, *list(range(100, 110)) * 40]:
        if cache.get(key) is None:
            cache.put(key, str(key), 100, 1.0)
    assert all(key in cache for key in range(100, 110))


def test_what_is_slow_to_make_stays_and_what_is_cheap_goes() -> None:
    cache: CostAwareCache[str] = CostAwareCache(300)
    assert cache.put("slow", "a", 100, 10.0)
    assert cache.put("cheap", "b", 100, 0.1)
    assert cache.put("large", "c", 100, 1.0)
    assert cache.put("new", "d", 100, 2.0)
    assert "cheap" not in cache
    assert "slow" in cache
    assert not cache.put("cheaper still", "e", 100, 0.001), "worth less than everything that is there"
    assert (cache.stats().evicted, cache.stats().refused, len(cache)) == (1, 1, 3)


def test_an_item_is_judged_by_its_seconds_for_each_byte() -> None:
    cache: CostAwareCache[str] = CostAwareCache(1000)
    cache.put("large and slow", "a", 900, 9.0)
    assert cache.put("small and dense", "b", 200, 4.0)
    assert "large and slow" not in cache


def test_a_refused_item_costs_nobody_their_place() -> None:
    cache: CostAwareCache[str] = CostAwareCache(200)
    cache.put("a", "a", 100, 0.1)
    cache.put("b", "b", 100, 100.0)
    assert not cache.put("wide", "w", 200, 50.0)
    assert "a" in cache
    assert "b" in cache


def test_an_item_larger_than_the_cache_is_given_but_not_kept() -> None:
    cache: CostAwareCache[bytes] = CostAwareCache(100)
    cache.put("small", b"s", 60, 1.0)
    assert cache.get_or_build("large", lambda: b"x" * 101, len) == b"x" * 101
    assert "large" not in cache
    assert "small" in cache
    assert cache.stats().refused == 1


def test_an_older_value_goes_even_if_the_new_one_is_not_kept() -> None:
    cache: CostAwareCache[str] = CostAwareCache(100)
    cache.put("a", "old", 50, 1.0)
    assert not cache.put("a", "new", 500, 1.0)
    assert cache.get("a") is None
    assert cache.nbytes == 0


def test_without_a_known_cost_items_are_worth_what_is_usual() -> None:
    cache: CostAwareCache[str] = CostAwareCache(300)
    cache.put("dear", "a", 100, 10.0)
    cache.put("cheap", "b", 100, 0.001)
    cache.put("unknown", "c", 100)
    assert cache.put("another", "d", 100, 9.0)
    assert "cheap" not in cache
    assert "unknown" in cache


def test_two_builders_of_one_key_build_once() -> None:
    cache: CostAwareCache[object] = CostAwareCache(1000)
    started, go = threading.Event(), threading.Event()
    built: list[object] = []

    def build() -> object:
        started.set()
        assert go.wait(10)
        built.append(object())
        return built[-1]

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get_or_build, "key", build, 10)
        assert started.wait(10)
        others = [pool.submit(cache.get_or_build, "key", build, 10) for _ in range(3)]
        go.set()
        values = [future.result(10) for future in (first, *others)]
    assert len(built) == 1
    assert all(value is built[0] for value in values)
    assert (cache.stats().misses, cache.stats().hits) == (1, 3)


class Watched(threading.Event):
    """Says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.set()
        return super().wait(timeout)


def test_a_value_that_is_too_large_to_keep_is_shared_with_who_waited() -> None:
    cache: CostAwareCache[list[int]] = CostAwareCache(1)
    started, go = threading.Event(), threading.Event()

    def build() -> list[int]:
        started.set()
        assert go.wait(10)
        return [1]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_build, "key", build, 10)
        assert started.wait(10)
        cache._building["key"].done = done = Watched()
        second = pool.submit(cache.get_or_build, "key", build, 10)
        assert done.asked.wait(10)
        go.set()
        assert first.result(10) is second.result(10)
    assert "key" not in cache
    assert (cache.stats().misses, cache.stats().hits) == (1, 1)


def test_when_a_build_fails_its_caller_hears_of_it_and_the_next_one_tries() -> None:
    cache: CostAwareCache[str] = CostAwareCache(1000)
    started, go = threading.Event(), threading.Event()

    def fails() -> str:
        started.set()
        assert go.wait(10)
        raise OSError("no such file")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get_or_build, "key", fails, 1)
        assert started.wait(10)
        second = pool.submit(cache.get_or_build, "key", lambda: "made", 1)
        go.set()
        with pytest.raises(OSError, match="no such file"):
            first.result(10)
        assert second.result(10) == "made"
    assert cache.get("key") == "made"


def test_a_build_that_asks_for_itself_is_an_error_and_not_a_deadlock() -> None:
    cache: CostAwareCache[str] = CostAwareCache(1000)
    with pytest.raises(ConfigError, match="'a'"):
        cache.get_or_build("a", lambda: cache.get_or_build("a", lambda: "x", 1), 1)
    assert cache.get_or_build("a", lambda: cache.get_or_build("b", lambda: "x", 1), 1) == "x"


def test_the_budget_is_charged_for_what_is_held() -> None:
    budget = MemoryBudget(1000)
    cache: CostAwareCache[str] = CostAwareCache(600, budget=budget, owner="samples")
    cache.put("a", "a", 200, 1.0)
    cache.put("b", "b", 300, 1.0)
    assert budget.by_owner() == {"samples": 500}
    cache.discard("a")
    assert budget.by_owner() == {"samples": 300}
    other: CostAwareCache[str] = CostAwareCache(600, budget=budget, owner="samples")
    other.put("a", "a", 100, 1.0)
    assert budget.by_owner() == {"samples": 400}
    cache.close()
    assert budget.by_owner() == {"samples": 100}


def test_while_the_budget_is_lowered_the_cache_keeps_its_share_of_it() -> None:
    budget = MemoryBudget(1000)
    cache: CostAwareCache[str] = CostAwareCache(800, budget=budget)
    for key in range(8):
        cache.put(key, "x", 100, 1.0 + key)
    budget.shrink_to(500)
    cache.put("new", "x", 100, 50.0)
    assert cache.nbytes == 400
    assert "new" in cache
    assert 0 not in cache


def test_trimming_lets_go_of_the_least_worthy_first() -> None:
    cache: CostAwareCache[str] = CostAwareCache(1000)
    for key, seconds in [("a", 3.0), ("b", 1.0), ("c", 2.0)]:
        cache.put(key, key, 100, seconds)
    assert cache.trim(250) == 100
    assert "b" not in cache
    assert cache.trim() == 200
    assert len(cache) == 0


def test_what_dies_with_an_item_may_use_the_cache() -> None:
    cache: CostAwareCache[object] = CostAwareCache(100)

    class Dying:
        def __del__(self) -> None:
            cache.put("from the grave", "x", 1, 100.0)

    cache.put("a", Dying(), 100, 0.001)
    cache.put("b", "b", 50, 1.0)
    assert "from the grave" in cache
    cache.put("c", Dying(), 20, 1e6)
    cache.clear()
    assert "from the grave" in cache


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: CostAwareCache(-1), "max_bytes"),
        (lambda: CostAwareCache("2 KiB", budget=MemoryBudget("1 KiB")), "budget"),
        (lambda: CostAwareCache[int](10).put("a", 1, -1), "'a'"),
        (lambda: CostAwareCache[int](10).put("a", 1, 1, float("nan")), "cost_seconds"),
        (lambda: CostAwareCache[int](10).put("a", 1, 1, -1.0), "cost_seconds"),
        (lambda: CostAwareCache[str](10).get_or_build("a", lambda: "text"), "size="),
    ],
)
def test_mistakes_are_named(mistake: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mistake()  # type: ignore[operator]


def test_many_threads_leave_it_consistent() -> None:
    budget = MemoryBudget(10_000)
    cache: CostAwareCache[int] = CostAwareCache(1000, budget=budget)
    alive: dict[int, int] = {}
    lock = threading.Lock()

    def build(key: int) -> int:
        with lock:
            alive[key] = alive.get(key, 0) + 1
            assert alive[key] == 1, "built twice at once"
        with lock:
            alive[key] -= 1
        return key

    def work(seed: int) -> None:
        for key in np.random.default_rng(seed).zipf(1.3, 800).tolist():
            assert cache.get_or_build(key % 50, partial(build, key % 50), 10 + key % 50) == key % 50
            assert cache.nbytes <= 1000

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, seed) for seed in range(4)]:
            future.result(60)
    stats = cache.stats()
    assert stats.hits + stats.misses == 3200
    assert stats.nbytes == sum(10 + key for key in range(50) if key in cache)
    assert budget.by_owner().get("hot cache", 0) == stats.nbytes


class Model(RuleBasedStateMachine):
    """Whatever is done to it: it never lies about a value or its bytes, and never holds more than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(10_000)
        self.cache: CostAwareCache[int] = CostAwareCache(500, budget=self.budget)
        self.known: dict[int, tuple[int, int]] = {}
        self.ages = [0.0]

    @rule(key=st.integers(0, 9), value=st.integers(), nbytes=st.integers(0, 600), cost=st.floats(0, 10) | st.none())
    def put(self, key: int, value: int, nbytes: int, cost: float | None) -> None:
        if self.cache.put(key, value, nbytes, cost):
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
    def holds_what_it_says(self) -> None:
        self.ages.append(self.cache._age)
        held = {key: nbytes for key, (_, nbytes) in self.known.items() if key in self.cache}
        assert len(held) == len(self.cache)
        assert sum(held.values()) == self.cache.nbytes == self.cache.stats().nbytes <= 500
        assert self.budget.used == self.cache.nbytes
        assert all(before <= after for before, after in pairwise(self.ages))


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=200))
def test_of_equal_seconds_for_each_byte_nothing_is_ever_above_the_limit(accesses: list[tuple[int, int]]) -> None:
    cache: CostAwareCache[int] = CostAwareCache(100)
    for key, nbytes in accesses:
        if cache.get(key) is None:
            cache.put(key, key + 1, nbytes, nbytes * 1e-6)
        assert cache.nbytes <= 100
        assert cache.get(key) in (None, key + 1)


def test_looking_at_a_value_is_not_using_it() -> None:
    cache: CostAwareCache[str] = CostAwareCache(100)
    cache.put("a", "value", 10, 1.0)
    assert (cache.peek("a"), cache.peek("b")) == ("value", None)
    assert (cache.stats().hits, cache.stats().misses) == (0, 0)
