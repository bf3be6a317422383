from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import wait_for

from lazy_modules import LazyModule
from penstock.errors import ConfigError, PenstockError, PoolFullError
from penstock.loaders.memory import MemoryConfig, UnifiedMemoryManager
from penstock.memory import MemoryBudget
from penstock.pipeline.pipeline import Pipeline
from penstock.sources.memory import MemorySource

MIB = 1 << 20
LONG = 300.0
torch = LazyModule("torch")
KINDS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.dtype("float32"),
    "torch": lambda: torch.float32,
    "mlx": lambda: mx.float32,
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = mx.set_cache_limit(64 * MIB)
    mx.set_cache_limit(64 * MIB)
    yield
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "penstock-tensors"])
    assert mx.set_cache_limit(before) == 64 * MIB, "the limit of MLX is not what it was"


def address(tensor: Any) -> int:
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def manager_of(pool_size_mb: int = 8, **more: Any) -> UnifiedMemoryManager:
    return UnifiedMemoryManager(MemoryConfig(pool_size_mb=pool_size_mb, **more))


def test_the_block_of_the_seed_runs_as_printed() -> None:
    config = MemoryConfig(pool_size_mb=512, enable_pooling=True, enable_unified_memory=True)

    manager = UnifiedMemoryManager(config)

    # Allocate tensors from pool
    tensor = manager.allocate_tensor(shape=(32, 512), dtype=mx.float32)

    # Cache frequently used tensors
    manager.cache_tensor("embeddings", tensor)

    assert isinstance(tensor, mx.array)
    assert (tensor.shape, tensor.dtype) == ((32, 512), mx.float32)
    assert not tensor.any()
    assert manager.get_tensor("embeddings") is tensor
    stats = manager.get_statistics()
    assert (stats["allocated"], stats["in_use_bytes"], stats["cached"]) == (1, 32 * 512 * 4, 1)
    assert stats["limit_bytes"] == 512 * MIB
    manager.close()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["numpy", "torch", "mlx"]),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(["float32", "int32", "uint8", "bool", "float16", "int64"]),
    st.booleans(),
)
def test_tensors_are_zeros_of_the_shape_and_type_asked_for(
    backend: Any, shape: list[int], dtype: str, pooling: bool
) -> None:
    with manager_of(1, backend=backend, enable_pooling=pooling) as manager:
        for _ in range(2):  # the second lies where the first was
            tensor = manager.allocate_tensor(shape, dtype)
            assert tuple(tensor.shape) == tuple(shape)
            assert dtype in str(tensor.dtype)
            assert type(tensor).__module__.startswith(backend)
            assert not tensor.any()
            if backend != "mlx":
                tensor += np.ones((), dtype) if backend == "numpy" else torch.ones((), dtype=tensor.dtype)
            del tensor


@pytest.mark.parametrize(
    ("dtype", "kind", "name"),
    [
        (mx.bfloat16, mx.array, "mlx.core.bfloat16"),
        (mx.bool_, mx.array, "mlx.core.bool"),
        (None, None, "torch.bfloat16"),
        (np.float16, mx.array, "mlx.core.float16"),
        (np.dtype("int32"), mx.array, "mlx.core.int32"),
        (float, mx.array, "mlx.core.float32"),
        ("int64", mx.array, "mlx.core.int64"),
    ],
)
def test_the_type_says_whose_array_it_is(dtype: Any, kind: Any, name: str) -> None:
    if name == "torch.bfloat16":
        dtype, kind = torch.bfloat16, torch.Tensor
    with manager_of() as manager:
        tensor: Any = manager.allocate_tensor((2, 3), dtype)
        assert type(tensor) is kind
        assert str(tensor.dtype) == name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_memory_of_a_tensor_that_is_gone_is_used_again(kind: str) -> None:
    dtype = KINDS[kind]()
    with manager_of(backend="numpy") as manager:
        tensor = manager.allocate_tensor((256, 256), dtype)
        tensor[:] = 7
        where = address(tensor)
        assert where % 64 == 0
        view = tensor[3:, ::2]
        del tensor
        other = manager.allocate_tensor((256, 256), dtype)
        assert address(other) != where, "handed out while a view of it lives"
        assert manager.get_statistics()["in_use"] == 2
        del view
        again = manager.allocate_tensor((256, 256), dtype)
        assert address(again) == where
        assert not again.any()
        stats = manager.get_statistics()
        assert (stats["allocated"], stats["reused"], stats["in_use"]) == (3, 1, 2)
        del other, again


def test_mlx_takes_the_memory_of_an_array_that_is_gone_from_its_pool() -> None:
    with manager_of(64) as manager:
        mx.clear_cache()
        active = mx.get_active_memory()
        tensor = manager.allocate_tensor((1024, 1024), mx.float32)
        assert mx.get_active_memory() - active >= 4 * MIB
        kept = mx.get_cache_memory()
        del tensor
        assert mx.get_cache_memory() - kept >= 4 * MIB, "kept for the next one"
        kept = mx.get_cache_memory()
        tensor = manager.allocate_tensor((1024, 1024), mx.float32)
        assert kept - mx.get_cache_memory() >= 4 * MIB, "and taken from there"
        stats = manager.get_statistics()
        assert (stats["allocated"], stats["reused"]) == (2, 1)
        assert stats["mlx"] == {"active": mx.get_active_memory(), "cached": mx.get_cache_memory()}
        del tensor


def test_without_pooling_nothing_is_kept_and_mlx_is_left_alone() -> None:
    with manager_of(backend="numpy", enable_pooling=False) as manager:
        tensor = manager.allocate_tensor((256, 256))
        assert address(tensor) % 64 == 0
        assert manager.get_statistics()["in_use_bytes"] == 256 * 256 * 4
        view = tensor[1:]
        del tensor
        assert manager.get_statistics()["in_use"] == 1
        del view
        assert manager.get_statistics()["in_use"] == 0
        manager.allocate_tensor((4, 4), mx.float32)
        assert mx.set_cache_limit(64 * MIB) == 64 * MIB
        assert manager.get_statistics()["pool_bytes"] == 0


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_an_error_that_names_the_sizes(kind: str) -> None:
    with manager_of(8) as manager:
        held = [manager.allocate_tensor((MIB,), KINDS[kind]())]
        with pytest.raises(PoolFullError, match=r"\b5\.0\b.*\b4\.0\b") as caught:
            manager.allocate_tensor((5, MIB), "uint8" if kind == "mlx" else torch.uint8)
        assert isinstance(caught.value, (PenstockError, MemoryError))
        held.clear()
        assert manager.allocate_tensor((5, MIB), "uint8") is not None


def test_a_tensor_larger_than_the_pool_drives_nothing_out() -> None:
    with manager_of(8, backend="numpy") as manager:
        manager.cache_tensor("kept", manager.allocate_tensor((1000,)))
        with pytest.raises(PoolFullError):
            manager.allocate_tensor((16 * MIB,), "uint8")
        assert manager.get_tensor("kept") is not None


def test_what_is_only_cached_gives_way_to_what_is_needed() -> None:
    with manager_of(8, backend="numpy") as manager:
        for name in ("used", "unused"):
            assert manager.cache_tensor(name, manager.allocate_tensor((2 * MIB,), "uint8"))
        assert manager.get_tensor("used") is not None
        assert manager.get_statistics()["in_use_bytes"] == 4 * MIB
        tensor = manager.allocate_tensor((6 * MIB,), "uint8")
        assert manager.get_tensor("unused") is None
        assert manager.get_tensor("used") is not None
        assert manager.get_statistics()["in_use_bytes"] == 8 * MIB
        del tensor


def test_memory_kept_and_in_use_are_never_more_than_the_pool() -> None:
    budget = MemoryBudget(64 * MIB)
    with manager_of(8, backend="numpy", budget=budget) as manager:
        rng = np.random.default_rng(0)
        held: list[Any] = []
        for _ in range(200):
            try:
                held.append(manager.allocate_tensor((int(rng.integers(1, 3 * MIB)),), "uint8"))
            except PoolFullError:
                held.pop(int(rng.integers(len(held))))
            stats = manager.get_statistics()
            assert stats["in_use_bytes"] + stats["pool_bytes"] <= 8 * MIB
            assert stats["in_use_bytes"] >= sum(tensor.nbytes for tensor in held)
            assert budget.used == stats["in_use_bytes"] + stats["pool_bytes"]
        assert manager.get_statistics()["reused"] > 0
        held.clear()
    assert budget.used == 0


def test_while_the_budget_is_lowered_less_fits() -> None:
    budget = MemoryBudget(16 * MIB)
    with manager_of(8, backend="numpy", budget=budget) as manager:
        budget.shrink_to(2 * MIB)
        with pytest.raises(PoolFullError, match="pool_size_mb"):
            manager.allocate_tensor((4 * MIB,), "uint8")


# -- the budget ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_charged_to_the_budget_until_they_are_gone(kind: str) -> None:
    budget = MemoryBudget(64 * MIB)
    with manager_of(budget=budget) as manager:
        tensor = manager.allocate_tensor((MIB,), KINDS[kind]())
        assert budget.by_owner()["tensors"] == 4 * MIB
        del tensor
        wait_for(lambda: "tensors" not in budget.by_owner())


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_the_budget_goes_on_when_a_tensor_is_dropped(kind: str) -> None:
    budget = MemoryBudget(8 * MIB)
    with manager_of(8, budget=budget, enable_pooling=False) as manager:
        tensor = manager.allocate_tensor((7 * MIB // 4,), KINDS[kind]())
        stream, got = object(), threading.Event()
        first = budget.reserve(1, "batches", by=stream)

        def wait() -> None:
            budget.reserve(4 * MIB, "batches", by=stream, timeout_seconds=LONG).release()
            got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.05)
        del tensor  # nobody calls the manager after this
        assert got.wait(LONG)
        waiting.join()
        first.release()


def test_a_pipeline_on_the_same_budget_comes_to_its_end_beside_tensors() -> None:
    budget = MemoryBudget(8 * MIB)
    rows = [{"text": "x" * 1000, "row": row} for row in range(5000)]
    with manager_of(6, backend="numpy", budget=budget) as manager:
        tensor = manager.allocate_tensor((6 * MIB,), "uint8")
        seen = 0
        for batch in Pipeline(MemorySource(rows), budget=budget):
            seen += batch.num_rows
            if seen > 2000:
                tensor = None
        assert seen == 5000
        assert tensor is None
    assert budget.used == 0


# -- the cache -----------------------------------------------------------------------------------------------------


def test_the_cache_keeps_what_was_used_last() -> None:
    with manager_of(8, cache_size_mb=2, backend="numpy") as manager:
        for number in range(6):
            manager.cache_tensor(number, np.zeros(MIB, np.uint8))
            manager.get_tensor(1)
        assert [number for number in range(6) if manager.get_tensor(number) is not None] == [1, 5]
        stats = manager.get_statistics()
        assert (stats["hits"], stats["misses"], stats["cached"], stats["evictions"]) == (7, 5, 2, 4)
        assert stats["cached_bytes"] == stats["in_use_bytes"] == 2 * MIB


def test_a_tensor_of_ours_that_is_cached_is_counted_once() -> None:
    with manager_of(backend="numpy") as manager:
        for dtype in (each() for each in KINDS.values()):
            tensor = manager.allocate_tensor((MIB // 4,), dtype)
            for cached in (tensor, *([tensor[10:]] if not isinstance(tensor, mx.array) else [])):
                manager.cache_tensor("a", cached)
                assert manager.get_statistics()["in_use_bytes"] == MIB
            del cached
            manager.clear_cache()
            del tensor
            assert manager.get_statistics()["in_use_bytes"] == 0


def test_a_cached_tensor_from_elsewhere_is_charged_while_it_is_cached() -> None:
    budget = MemoryBudget(64 * MIB)
    with manager_of(budget=budget) as manager:
        mine = mx.ones((MIB // 4,))
        manager.cache_tensor("mine", mine)
        assert budget.by_owner() == {"tensors": MIB}
        assert manager.release("mine")
        assert not manager.release("mine")
        assert budget.by_owner() == {}
        manager.cache_tensor("mine", mine)
        manager.cache_tensor("mine", np.zeros(10, np.uint8))
        assert budget.by_owner() == {"tensors": 10}


def test_a_tensor_from_elsewhere_is_not_cached_where_it_would_be_more_than_the_pool() -> None:
    budget = MemoryBudget(64 * MIB)
    with manager_of(10, backend="numpy", budget=budget) as manager:
        tensor = manager.allocate_tensor((8 * MIB,), "uint8")
        assert manager.cache_tensor("small", np.zeros(MIB, np.uint8))
        assert not manager.cache_tensor("large", np.zeros(5 * MIB, np.uint8)), "evicting would not make room"
        assert manager.get_tensor("small") is not None
        assert manager.get_or_build("large", lambda: np.zeros(5 * MIB, np.uint8)).nbytes == 5 * MIB
        assert manager.get_tensor("large") is None
        assert manager.get_statistics()["peak_bytes"] <= 10 * MIB
        assert manager.cache_tensor("newer", np.zeros(2 * MIB, np.uint8))
        assert manager.get_tensor("small") is None, "it was evicted"
        assert manager.get_statistics()["in_use_bytes"] == manager.get_statistics()["peak_bytes"] == 10 * MIB
        assert budget.by_owner() == {"tensors": 10 * MIB}
        del tensor
        assert manager.cache_tensor("large", np.zeros(3 * MIB, np.uint8))


def test_half_of_the_smallest_pool_is_a_cache() -> None:
    with manager_of(1, backend="numpy") as manager:
        assert manager.get_statistics()["cache_limit_bytes"] == MIB // 2
        assert manager.cache_tensor("a", np.zeros(1000))


def test_get_or_build_builds_once_and_keeps_what_it_made() -> None:
    with manager_of() as manager:
        built = []

        def build() -> Any:
            built.append(1)
            return manager.allocate_tensor((100,), mx.float32)

        first = manager.get_or_build("embeddings", build)
        assert manager.get_or_build("embeddings", build) is first
        assert built == [1]
        assert manager.get_statistics()["in_use_bytes"] == 400
        assert manager.get_tensor("nothing") is None


# -- several managers, threads, lifetimes --------------------------------------------------------------------------


def limit_now() -> int:
    now = mx.set_cache_limit(0)
    mx.set_cache_limit(now)
    return int(now)


def test_the_limit_of_mlx_follows_the_largest_manager_and_goes_back_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]):
        managers = [manager_of(size) for size in (100, 300, 200)]
        assert limit_now() == 64 * MIB, "nothing is done before the first array"
        for manager in managers:
            manager.allocate_tensor((2,), mx.float32)
        alive = {0: 100, 1: 300, 2: 200}
        assert limit_now() == 300 * MIB
        for number in order:
            managers[number].close()
            managers[number].close()
            del alive[number]
            assert limit_now() == max(alive.values(), default=64) * MIB


def test_a_manager_that_is_forgotten_gives_everything_back() -> None:
    budget = MemoryBudget(64 * MIB)
    manager = manager_of(budget=budget, backend="numpy")
    manager.allocate_tensor((2,), mx.float32)
    tensor = manager.allocate_tensor((1000,))
    manager.cache_tensor("other", np.zeros(5000))
    manager.allocate_tensor((5000,))
    assert budget.used > 40_000
    del manager
    gc.collect()
    assert limit_now() == 64 * MIB
    wait_for(lambda: budget.by_owner().get("tensors") == 4096)
    tensor += 1
    del tensor
    wait_for(lambda: budget.used == 0)


def test_tensors_outlive_a_closed_manager() -> None:
    manager = manager_of(backend="numpy")
    tensor = manager.allocate_tensor((1000,))
    manager.close()
    tensor += 1
    assert tensor.sum() == 1000
    assert manager.budget.used == 0
    with pytest.raises(ConfigError, match="closed"):
        manager.allocate_tensor((1,))
    with pytest.raises(ConfigError, match="closed"):
        manager.cache_tensor("a", tensor)


def test_many_threads_share_a_manager() -> None:
    budget = MemoryBudget(64 * MIB)
    with manager_of(32, budget=budget) as manager:

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for step in range(60):
                dtype = list(KINDS.values())[step % 3]()
                tensor = manager.allocate_tensor((int(rng.integers(1, 5000)),), dtype)
                if isinstance(tensor, (np.ndarray, torch.Tensor)):
                    tensor += seed
                    assert (tensor == seed).all()
                manager.cache_tensor(int(rng.integers(5)), tensor)
                manager.get_tensor(int(rng.integers(5)))
                manager.get_or_build((seed, "own"), lambda: manager.allocate_tensor((10,), mx.float32))

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, seed) for seed in range(4)]:
                future.result(LONG)
        manager.clear_cache()
        stats = manager.get_statistics()
        assert stats["allocated"] == 4 * 60 + 4
        assert (stats["in_use"], stats["in_use_bytes"], stats["cached"]) == (0, 0, 0)
    assert budget.used == 0


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pool_size_mb": 0}, "pool_size_mb"),
        ({"pool_size_mb": 1.5}, "pool_size_mb"),
        ({"cache_size_mb": -1}, "cache_size_mb"),
        ({"pool_size_mb": 8, "cache_size_mb": 9}, "cache_size_mb"),
        ({"backend": "jax"}, "backend"),
        ({"budget": MemoryBudget("1 MiB")}, "budget"),
    ],
)
def test_a_config_that_cannot_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MemoryConfig(**wrong)


def test_options_may_be_passed_by_name() -> None:
    with UnifiedMemoryManager(pool_size_mb=3, backend="numpy") as manager:
        assert manager.config == MemoryConfig(pool_size_mb=3, backend="numpy")
    with pytest.raises(ConfigError, match=r"'pool_size'.*'pool_size_mb'"):
        UnifiedMemoryManager(pool_size=3)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((2, -1), "float32", "(?i)shape"),
        ("wide", "float32", "(?i)shape"),
        ((1.5,), "float32", "(?i)shape"),
        ((2,), "flaot32", r"'flaot32'.*'float32'"),
        ((2,), object, r"(?i)\bmlx\b"),
    ],
)
def test_a_shape_or_type_that_is_none_is_refused(shape: Any, dtype: Any, words: str) -> None:
    with manager_of() as manager, pytest.raises(ConfigError, match=words):
        manager.allocate_tensor(shape, dtype)


def test_what_is_no_tensor_is_not_cached() -> None:
    with manager_of() as manager, pytest.raises(ConfigError, match="'a'"):
        manager.cache_tensor("a", [1, 2])


def test_without_unified_memory_there_are_no_mlx_arrays() -> None:
    with manager_of(enable_unified_memory=False) as manager:
        assert isinstance(manager.allocate_tensor((2,), "float32"), np.ndarray)
        assert isinstance(manager.allocate_tensor((2,), torch.float32), torch.Tensor)
        with pytest.raises(ConfigError, match="enable_unified_memory=False"):
            manager.allocate_tensor((2,), mx.float32)
