"""No estimator and no loss waits for a device: on tensors without data, on the CPU treated as one, and on CUDA.

A tensor of torch's device "meta" has a shape and no values, so whatever reads one fails; copies from main memory are
watched, since those of a CUDA device must not block. On a machine with CUDA:

    python -m pytest -c /dev/null --noconftest tests/unit/rl/test_cuda_sync.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.rl import advantages as rl

torch: Any = pytest.importorskip("torch")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS, TOKENS = 16, 70


class Inputs(NamedTuple):
    """Tensors on one device."""

    rewards: Any
    ids: Any
    unequal: Any
    tokens: Any
    values: Any
    mask: Any
    lengths: Any
    divisors: Any


def arrays(device: str) -> Inputs:
    """Inputs of 16 responses of at most 70 tokens, with gaps, in groups of 4 or 8."""
    rng = np.random.default_rng(0)
    mask = (rng.random((ROWS, TOKENS)) < 0.8) & (np.arange(TOKENS) < rng.integers(2, TOKENS, ROWS)[:, None])
    mask[:, 0] = True
    host: dict[str, Any] = {
        "rewards": rng.integers(0, 5, ROWS).astype("f"),
        "ids": np.arange(ROWS) % 4,
        "unequal": np.minimum(np.arange(ROWS), 5) // 2,
        "tokens": rng.normal(size=(ROWS, TOKENS)).astype("f"),
        "values": rng.normal(size=(ROWS, TOKENS)).astype("f"),
        "mask": mask,
        "lengths": mask.sum(axis=1),
        "divisors": np.full(ROWS, 7.0, "f"),
    }
    return Inputs(**{name: torch.from_numpy(value).to(device) for name, value in host.items()})


def in_place(sums: Any) -> None:
    """Sum over ranks, of which there is one."""
    sums.mul_(1.0)


Case = Callable[[Any], Any]
CASES: dict[str, Case] = {
    "grpo": lambda a: rl.grpo(a.rewards, 8),
    "grpo with ids of the host": lambda a: rl.grpo(a.rewards, np.arange(ROWS) % 4),
    "grpo with names": lambda a: rl.grpo(a.rewards, [f"prompt {row % 2}" for row in range(ROWS)]),
    "grpo with ids of the device": lambda a: rl.grpo(a.rewards, a.ids),
    "grpo of unequal groups": lambda a: rl.grpo(a.rewards, a.unequal, single_member_group="zero"),
    "grpo of unequal groups as one": lambda a: rl.grpo(a.rewards, a.unequal, preset="slime"),
    "grpo on tokens": lambda a: rl.grpo(a.rewards, 8, mask=a.mask),
    "grpo, missing rewards": lambda a: rl.grpo(a.rewards, 8, preset="trl"),
    "grpo over the batch": lambda a: rl.grpo(a.rewards, 8, scale="batch", reduce=in_place),
    "dr_grpo": lambda a: rl.dr_grpo(a.rewards, 8),
    "rloo": lambda a: rl.rloo(a.rewards, a.ids),
    "opo": lambda a: rl.opo(a.rewards, 8, lengths=a.lengths),
    "opo, by mask": lambda a: rl.opo(a.rewards, a.ids, mask=a.mask),
    "gpg": lambda a: rl.gpg(a.rewards, 8),
    "pass_at_k": lambda a: rl.pass_at_k(a.rewards, 8),
    "pass_at_k with ids of the device": lambda a: rl.pass_at_k(a.rewards, a.ids, nan="exclude"),
    "dynamic_sampling": lambda a: rl.dynamic_sampling(a.rewards, 4, preset="verl"),
    "gae": lambda a: rl.gae(a.tokens, a.values, mask=a.mask),
    "gae, skip": lambda a: rl.gae(a.tokens, a.values, mask=a.mask, gamma=0.99, lam=0.95),
    "gae, plain": lambda a: rl.gae(a.tokens, a.values, mask=a.mask, gamma=0.99, lam=0.95, gap="plain"),
    "gae, through": lambda a: rl.gae(a.tokens, a.values, mask=a.mask, gamma=0.99, lam=0.95, gap="through"),
    "gae without a mask": lambda a: rl.gae(a.tokens, a.values, gamma=0.99, lam=0.95),
    "gae_ragged": lambda a: rl.gae_ragged(a.tokens[0], a.values[0], [0, 5, 5, 70], gamma=0.9, empty="zero"),
    "reward_to_go": lambda a: rl.reward_to_go(a.tokens, mask=a.mask),
    "reward_to_go, discounted": lambda a: rl.reward_to_go(a.tokens, mask=a.mask, gamma=0.9),
    "reward_to_go, through": lambda a: rl.reward_to_go(a.tokens, mask=a.mask, gap="through"),
    "token_rewards": lambda a: rl.token_rewards(a.rewards, a.mask, kl=a.tokens, beta=0.1),
    "remax": lambda a: rl.remax(a.rewards, a.rewards * 0.5, mask=a.mask),
    "reinforce_plus_plus": lambda a: rl.reinforce_plus_plus(a.rewards, a.mask, kl=a.tokens, beta=0.1, gamma=0.9),
    "reinforce_plus_plus_baseline": lambda a: rl.reinforce_plus_plus_baseline(
        a.rewards, 8, mask=a.mask, kl=a.tokens, beta=0.1, reduce=in_place
    ),
    "whiten": lambda a: rl.whiten(a.tokens, a.mask),
    "whiten, biased": lambda a: rl.whiten(a.tokens, preset="openrlhf", shift_mean=False),
    "kl_estimate": lambda a: rl.kl_estimate(a.tokens, a.values, preset="verl"),
    "overlong_penalty": lambda a: rl.overlong_penalty(a.lengths, 60, 20),
    "loss_denominators": lambda a: rl.loss_denominators(a.mask),
    "loss_denominators of sequences": lambda a: rl.loss_denominators(a.mask, "sequence-mean", reduce=in_place),
    "aggregate_loss": lambda a: rl.aggregate_loss(a.tokens, a.mask, a.divisors),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def compare(found: Any, expected: Any) -> None:
    for ours, theirs in zip(
        found if isinstance(found, tuple) else [found], expected if isinstance(expected, tuple) else [expected]
    ):
        np.testing.assert_allclose(ours.cpu(), theirs, rtol=1e-5, atol=2e-6)


class BlockingCopyError(Exception):
    """Copy from main memory that waits for the device."""


def watcher() -> Any:
    """Context that refuses blocking copies to a device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watcher(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            target = args[0].device if "copy_" in str(function) else given.get("device")
            source = next((arg for arg in reversed(args) if isinstance(arg, torch.Tensor)), None)
            moved = "copy" in str(function) and source is not None and target not in (None, source.device)
            if (
                moved
                and source.device.type == "cpu"
                and not (given.get("non_blocking") or any(arg is True for arg in args))
            ):
                raise BlockingCopyError(str(function))
            return function(*args, **given)

    return Watcher()


@every_case
def test_nothing_reads_a_value_or_blocks_in_a_copy(case: Case) -> None:
    given = arrays("meta")
    with watcher():
        found = case(given)
    for array in found if isinstance(found, tuple) else [found]:
        assert array.device.type == "meta"


def test_a_read_and_a_blocking_copy_would_be_noticed() -> None:
    given = arrays("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        rl.grpo(given.rewards, 8, check=True)
    with watcher(), pytest.raises(BlockingCopyError):
        torch.ones(3).to("meta")


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch on the CPU computes as on a device whose values are not read."""
    from penstock.batching.backends import torch as module

    backend = module.TorchBackend()

    def operations(torch: Any) -> Any:
        return module.TorchOperations(backend, torch, torch.device("cpu"), check=False)

    monkeypatch.setattr(module, "HostTorchOperations", operations)


@pytest.fixture
def expected() -> dict[str, Any]:
    """Results of NumPy's way."""
    given = arrays("cpu")
    return {name: case(given) for name, case in CASES.items()}


def test_numbers_are_those_of_the_host(expected: dict[str, Any], deferred: None) -> None:
    given = arrays("cpu")
    for name, case in CASES.items():
        compare(case(given), expected[name])


def test_large_batches_are_computed_in_blocks_of_rows(
    expected: dict[str, Any], deferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.batching.backends.torch.AT_ONCE", 5 * TOKENS)
    given = arrays("cpu")
    for name in ("gae, skip", "gae", "gae_ragged"):
        compare(CASES[name](given), expected[name])


KERNELS = {
    "grpo": 8,
    "grpo with ids of the host": 23,
    "grpo with ids of the device": 43,
    "grpo on tokens": 10,
    "dr_grpo": 6,
    "gae": 12,
    "gae, skip": 30,
    "gae, plain": 27,
    "reward_to_go": 9,
    "token_rewards": 11,
    "reinforce_plus_plus": 48,
    "whiten": 19,
    "loss_denominators": 9,
    "kl_estimate": 6,
    "aggregate_loss": 5,
}
"""Operations of torch that a call may have, other than views. Small batches cost what it takes to launch them."""
VIEWS = {"view", "_unsafe_view", "slice", "select", "expand", "unsqueeze", "detach", "alias"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_has_few_operations(name: str, deferred: None) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    given = arrays("cpu")
    with Counter():
        CASES[name](given)
    kernels = [each for each in seen if each not in VIEWS]
    assert len(kernels) <= KERNELS[name], kernels


def nan_rows(array: Any) -> list[int]:
    wrong = torch.isnan(array)
    return torch.nonzero(wrong if wrong.ndim == 1 else wrong.any(1)).flatten().tolist()  # type: ignore[no-any-return]


def test_a_reward_that_is_no_number_makes_its_group_nan(deferred: None) -> None:
    functions = (rl.grpo, rl.rloo, rl.dr_grpo, rl.gpg, rl.pass_at_k, partial(rl.pass_at_k, scale="none"))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        for place in (3, 4, 5):
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 2.0])
            rewards[place] = wrong
            for groups in (3, [0, 0, 1, 2, 2, 2], torch.tensor([4, 4, 4, 9, 9, 9])):
                for function in (*functions, partial(rl.opo, lengths=torch.arange(1, 7))):
                    found = function(rewards, groups, single_member_group="zero")
                    assert nan_rows(found) == [3, 4, 5], (function, found)
    with pytest.raises(DataError, match=r"row 2\b"):
        rl.grpo(torch.tensor([1.0, 0.0, torch.nan, 2.0]), 2, check=True)


def test_a_group_of_one_without_a_number_is_nan(deferred: None) -> None:
    rewards = torch.tensor([1.0, torch.inf, 0.0, torch.nan])
    for groups in ([0, 1, 0, 2], torch.tensor([3, 8, 3, 9])):
        for rule in ("zero", "reward"):
            assert nan_rows(rl.dr_grpo(rewards, groups, single_member_group=rule)) == [1, 3]


def test_dynamic_sampling_drops_groups_with_a_reward_that_is_no_number(deferred: None) -> None:
    for wrong in (torch.nan, torch.inf):
        rewards = torch.tensor([1.0, 0.0, 1.0, wrong, 1.0, 1.0, wrong, 3.0])
        for groups in ([0, 0, 1, 1, 2, 2, 3, 4], torch.tensor([0, 0, 1, 1, 2, 2, 3, 4])):
            for preset, single in (("penstock", False), ("verl", True)):
                kept = [True, True, False, False, False, False, False, single]
                assert rl.dynamic_sampling(rewards, groups, preset=preset).tolist() == kept
                equal = rl.zero_variance_groups(rewards, groups, preset=preset)
                assert equal.tolist() == [not each for each in kept]
        assert rl.dynamic_sampling(rewards[:6], 2).tolist() == [True, True, False, False, False, False]


def test_an_infinite_reward_is_not_excluded(deferred: None) -> None:
    rewards = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 1.0, 2.0])
    assert nan_rows(rl.grpo(rewards, 3, nan="exclude")) == [3, 4, 5]


def test_a_group_of_one_is_nan_where_its_size_is_on_the_device(deferred: None) -> None:
    rewards, ids = torch.tensor([1.0, 5.0, 0.0]), torch.tensor([3, 8, 3])
    assert nan_rows(rl.grpo(rewards, ids)) == [1]
    assert rl.grpo(rewards, ids, single_member_group="zero")[1] == 0
    assert rl.dr_grpo(rewards, ids, single_member_group="reward")[1] == 5
    with pytest.raises(DataError, match=r"row 1\b.*group 8\b"):
        rl.grpo(rewards, ids, check=True)
    with pytest.raises(DataError, match=r"row 1\b.*group 8\b"):
        rl.grpo(rewards, ids.tolist())  # sizes are on the host
    with pytest.raises(DataError, match=r"row 0\b.*group 0\b"):
        rl.rloo(rewards, 1)


def test_ids_of_the_device_are_one_a_row(deferred: None) -> None:
    with pytest.raises(DataError, match=r"\bids\b"):
        rl.grpo(torch.ones(3), torch.ones(2))
    with pytest.raises(DataError, match="groups"):
        rl.grpo(torch.ones(3), torch.ones(3, 1))


def test_a_row_without_tokens_is_nan(deferred: None) -> None:
    mask, ones = torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.ones(2, 3)
    for found in (
        rl.gae(ones, ones, mask=mask)[1],
        rl.gae(ones, ones, mask=mask, gamma=0.9)[0],
        rl.reward_to_go(ones, mask=mask),
        rl.token_rewards(torch.ones(2), mask),
        rl.remax(torch.ones(2), torch.ones(2), mask=mask),
        rl.reinforce_plus_plus(torch.ones(2), mask),
        rl.reinforce_plus_plus_baseline(torch.ones(2), 2, mask=mask),
        rl.loss_denominators(mask),
    ):
        assert nan_rows(found) == [1]
    assert torch.isnan(rl.aggregate_loss(ones, mask, rl.loss_denominators(mask)))
    assert nan_rows(rl.reward_to_go(ones, mask=mask, empty="zero")) == []
    for call in (rl.reward_to_go, rl.gae):
        with pytest.raises(DataError, match=r"row 1\b.*mask 1"):
            call(*[ones] * (2 if call is rl.gae else 1), mask=mask, check=True)


def test_a_token_that_is_no_number_makes_its_row_nan(deferred: None) -> None:
    rewards, values = torch.ones(3, 50), torch.ones(3, 50)
    values[1, 40] = torch.nan
    assert nan_rows(rl.gae(rewards, values, gamma=0.9, lam=0.9)[0]) == [1]
    assert nan_rows(rl.gae(rewards, values)[0]) == [1]
    assert nan_rows(rl.reward_to_go(values)) == [1]
    for gamma in (1.0, 0.9):
        with pytest.raises(DataError, match=r"row 1\b.*token 40\b"):
            rl.gae(rewards, values, gamma=gamma, check=True)
    mask = torch.ones(3, 50)
    mask[1, 40] = 0  # what a mask hides never counts
    assert nan_rows(rl.gae(rewards, values, mask=mask, gamma=0.9, lam=0.9)[0]) == []
    assert nan_rows(rl.gae(rewards, values, mask=mask)[1]) == []


@pytest.fixture(params=["bfloat16", "float64"])
def default_type(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another default type of torch's floats, as models are made under."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_the_default_type(
    name: str, expected: dict[str, Any], deferred: None, default_type: None
) -> None:
    found = CASES[name](arrays("cpu"))
    compare(found, expected[name])
    for array in found if isinstance(found, tuple) else [found]:
        assert array.dtype in (torch.float32, torch.bool)


def test_denominators_are_exact_with_a_narrow_default_type(deferred: None, default_type: None) -> None:
    mask = torch.ones(3, 1001, dtype=torch.bool)
    assert rl.loss_denominators(mask).tolist() == [3003.0] * 3


def test_whitening_of_too_few_or_wrong_values_is_nan(deferred: None) -> None:
    assert nan_rows(rl.whiten(torch.tensor([2.0]))) == [0]
    assert nan_rows(rl.whiten(torch.tensor([2.0, torch.inf]))) == [0, 1]
    with pytest.raises(DataError, match="ddof=1"):
        rl.whiten(torch.tensor([2.0]), check=True)


def test_wrong_lengths_are_nan(deferred: None) -> None:
    assert nan_rows(rl.opo(torch.ones(4), 2, lengths=torch.tensor([1, 1, 0, 2]))) == [2, 3]
    assert nan_rows(rl.overlong_penalty(torch.tensor([1, -1]), 10, 5)) == [1]


def test_equal_rewards_are_exactly_zero_apart_on_a_device(deferred: None) -> None:
    rewards = torch.tensor([0.1] * 7 + [1 / 3] * 7)
    for groups in (7, [*"a" * 7, *"b" * 7], torch.arange(14) // 7):
        for given in (rewards, rewards.double()):
            assert rl.grpo(given, groups, epsilon=1e-9).tolist() == [0.0] * 14


COMPILED = ["grpo on tokens", "grpo with ids of the device", "gae, skip", "reinforce_plus_plus", "aggregate_loss"]


@pytest.mark.parametrize("name", COMPILED)
def test_torch_compiles_it_as_one_graph(name: str, expected: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CASES[name], fullgraph=True, backend="eager")
    compare(compiled(arrays("cpu")), expected[name])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("kind", ["shuffled", "unequal", "consecutive", "text"])
def test_ids_in_main_memory_are_numbered_outside_of_a_compiled_program(kind: str, device: str) -> None:
    torch._dynamo.reset()
    draw = np.random.default_rng(0)
    rewards = torch.from_numpy(draw.normal(size=64).astype(np.float32)).to(device)
    ids: Any = {
        "shuffled": draw.permutation(64) // 8,
        "unequal": np.r_[draw.integers(0, 9, 46), np.repeat(np.arange(9), 2)],
        "consecutive": np.arange(64) // 8,
        "text": [f"group {number % 5}" for number in range(64)],
    }[kind]
    compiled = torch.compile(lambda: rl.grpo(rewards, ids), backend="eager")
    torch.testing.assert_close(compiled(), rl.grpo(rewards, ids))  # sums on a device have no fixed order


@cuda
@every_case
def test_the_gpu_is_not_waited_for(case: Case) -> None:
    given = arrays("cuda")
    theirs = case(arrays("cpu"))
    case(given)  # libraries are loaded in the first call, and pinned memory is allocated
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = case(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for array in found if isinstance(found, tuple) else [found]:
        assert array.device.type == "cuda"
    compare(found, theirs)


@cuda
def test_a_cuda_graph_can_capture_it() -> None:
    given = arrays("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries are loaded outside of the capture
        for _ in range(2):
            rl.gae(given.tokens, given.values, mask=given.mask, gamma=0.99, lam=0.95)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advantages, _ = rl.gae(given.tokens, given.values, mask=given.mask, gamma=0.99, lam=0.95)
    graph.replay()
    torch.cuda.synchronize()
    compare(advantages, CASES["gae, skip"](arrays("cpu"))[0])
