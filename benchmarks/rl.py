"""RL numerics: penstock and the formulas of its peers on the same arrays, in one process, interleaved.

    python benchmarks/rl.py                          # every suite
    python benchmarks/rl.py --suite gae --runs 9 --threads 1

`gae`: advantages and returns of 1024 x 4096 tokens, masked: `padded` has responses of 1000 to 4096 tokens, `gaps` tool
output in the middle of them as well. `grpo`: 65,536 responses in groups of 8, with ids in order (`ids`), in any order
(`shuffled`), as strings (`strings`), and as a group size (`size`).
`assembly`: 512 rollouts of 4096 tokens (`full`), or of 456 to 4096 (`ragged`), with log-probs, reference log-probs,
values, advantages and returns, sharded to 8 ranks by length and collated into the batches of all ranks, as torch
tensors, in one thread. The peer is TRL, which has a tensor for each rollout and column, and pads lists of them.
The formulas of the peers are written here as plain torch, as their trainers run them: a loop over tokens, with all rows
in each step (TRL's PPO, which knows no gaps; verl, which skips them), products of chunks of 128 in float32 with a loop
over chunks (slime), a loop over responses with a dictionary of groups (verl's GRPO), and reshaping, for groups that are
equal and in order (TRL's GRPO). The results are compared before the timing.
Times are medians; `CPU` is that of all threads, the steadier figure on a busy machine. Ratios are of wall time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from table import table

from penstock.arrays.ragged import Ragged
from penstock.distributed.sharding import Balanced
from penstock.rl.advantages import gae, grpo
from penstock.rl.batch import RolloutBatch
from penstock.rl.collate import RolloutForm, assemble
from penstock.rl.rollout import RolloutTable

GAMMA, LAM = 0.99, 0.95
QUICK_RUNS = 3
"""Runs per turn of cases that are not slow."""


@dataclass(frozen=True, slots=True)
class Case:
    """One implementation; `slow` cases run fewer times."""

    name: str
    work: Callable[[], Any]
    slow: bool = False


# -- the peers' formulas -----------------------------------------------------------------------------------------------


def trl_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, values = rewards * mask, values * mask
    steps = rewards.shape[1]
    running: torch.Tensor | float = 0.0
    backwards = []
    for t in range(steps - 1, -1, -1):
        following = values[:, t + 1] if t + 1 < steps else 0.0
        running = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * running
        backwards.append(running)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def verl_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    following: torch.Tensor | float = 0.0
    running: torch.Tensor | float = 0.0
    backwards = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = mask[:, t]
        advanced = rewards[:, t] + GAMMA * following - values[:, t] + GAMMA * LAM * running
        following = values[:, t] * here + (1 - here) * following
        running = advanced * here + (1 - here) * running
        backwards.append(running)
    advantages = torch.stack(backwards[::-1], dim=1)
    return advantages, advantages + values


def slime_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunk = 128
    rewards, values = rewards * mask, values * mask
    following = torch.cat([values[:, 1:], torch.zeros(len(values), 1)], dim=1)
    backwards = torch.flip(rewards + GAMMA * following - values, dims=[1])
    exponents = torch.arange(chunk)[None, :] - torch.arange(chunk)[:, None]
    kernel = torch.where(exponents >= 0, (GAMMA * LAM) ** exponents.clamp(min=0).float(), 0.0)
    inflow = (GAMMA * LAM) ** torch.arange(1, chunk + 1).float()
    chunks = (backwards.reshape(-1, chunk) @ kernel).view(len(values), -1, chunk)
    out = torch.empty_like(backwards)
    carry = torch.zeros(len(values))
    for c in range(chunks.shape[1]):
        done = chunks[:, c] + carry[:, None] * inflow
        out[:, c * chunk : (c + 1) * chunk] = done
        carry = done[:, -1]
    advantages = torch.flip(out, dims=[1])
    return advantages, advantages + values


def verl_grpo(rewards: torch.Tensor, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    scores = rewards.clone()
    members = defaultdict(list)
    for i in range(len(scores)):
        members[ids[i]].append(scores[i])
    mean, std = {}, {}
    for key, group in members.items():
        stacked = torch.stack(group)
        mean[key], std[key] = torch.mean(stacked), torch.std(stacked)
    for i in range(len(scores)):
        scores[i] = (scores[i] - mean[ids[i]]) / (std[ids[i]] + 1e-6)
    return scores


def trl_grpo(rewards: torch.Tensor, size: int) -> torch.Tensor:
    grouped = rewards.view(-1, size)
    mean = torch.nanmean(grouped, dim=1, keepdim=True)
    count = torch.sum(~torch.isnan(grouped), dim=1, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    std = torch.sqrt(torch.nanmean((grouped - mean) ** 2, dim=1, keepdim=True) * correction)
    advantages = (rewards - mean.repeat_interleave(size)) / (std.repeat_interleave(size) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


# -- the suites --------------------------------------------------------------------------------------------------------


def gae_suite(rows: int = 1024, tokens: int = 4096) -> dict[str, list[Case]]:
    rng = np.random.default_rng(0)
    rewards, values = (rng.normal(size=(rows, tokens)).astype(np.float32) for _ in range(2))
    lengths = rng.integers(min(1000, tokens), tokens + 1, rows)
    padded = np.arange(tokens) < lengths[:, None]
    gaps = padded.copy()
    for row, length in enumerate(lengths):
        for start in rng.integers(0, max(1, length - 200), 4):
            gaps[row, start : start + rng.integers(20, 200)] = False
    r, v = torch.from_numpy(rewards), torch.from_numpy(values)

    def cases(mask: np.ndarray[Any, Any], *peers: Case) -> list[Case]:
        tensor = torch.from_numpy(mask)
        return [
            Case("penstock (NumPy)", lambda: gae(rewards, values, mask=mask, gamma=GAMMA, lam=LAM)),
            Case("penstock (torch)", lambda: gae(r, v, mask=tensor, gamma=GAMMA, lam=LAM)),
            *peers,
        ]

    m, g = torch.from_numpy(padded).float(), torch.from_numpy(gaps).float()
    suite = {
        "gae, padded": cases(
            padded,
            Case("TRL's loop", lambda: trl_gae(r, v, m), slow=True),
            Case("verl's loop", lambda: verl_gae(r, v, m), slow=True),
            Case("slime's chunks", lambda: slime_gae(r, v, m)),
        ),
        "gae, gaps": cases(gaps, Case("verl's loop", lambda: verl_gae(r, v, g), slow=True)),
    }
    for (name, found), mask in zip(suite.items(), (m, g)):
        expected = verl_gae(r.double(), v.double(), mask.double())[0] * mask
        for case in found:
            apart = float((torch.as_tensor(case.work()[0]) * mask - expected).abs().max())
            assert apart < 2e-5, f"{name}, {case.name}: {apart:.2g} apart"
    return suite


def grpo_suite(responses: int = 65_536, size: int = 8) -> dict[str, list[Case]]:
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=responses).astype(np.float32)
    ids = np.arange(responses) // size
    order = rng.permutation(responses)
    mixed, mixed_ids = rewards[order], ids[order]
    names = [f"prompt-{i}" for i in mixed_ids]
    tensor, mixed_tensor = torch.from_numpy(rewards), torch.from_numpy(mixed)
    verl = Case("verl's loop", lambda: verl_grpo(mixed_tensor, mixed_ids), slow=True)
    suite = {
        "grpo, shuffled ids": [
            Case("penstock (NumPy)", lambda: grpo(mixed, mixed_ids)),
            Case("penstock (torch)", lambda: grpo(mixed_tensor, mixed_ids)),
            Case("penstock (NumPy, strings)", lambda: grpo(mixed, names)),
            verl,
        ],
        "grpo, ids in order": [
            Case("penstock (NumPy)", lambda: grpo(rewards, ids, preset="trl")),
            Case("penstock (torch)", lambda: grpo(tensor, ids, preset="trl")),
            Case("penstock (NumPy, size)", lambda: grpo(rewards, size, preset="trl")),
            Case("penstock (torch, size)", lambda: grpo(tensor, size, preset="trl")),
            Case("TRL's reshape", lambda: trl_grpo(tensor, size)),
            Case("verl's loop", lambda: verl_grpo(tensor, ids), slow=True),
        ],
    }
    np.testing.assert_allclose(grpo(mixed, mixed_ids), verl.work(), atol=2e-5)
    np.testing.assert_allclose(grpo(rewards, ids, preset="trl"), trl_grpo(tensor, size), atol=2e-5)
    return suite


def assembly_suite(count: int = 512, tokens: int = 4096, world: int = 8) -> dict[str, list[Case]]:
    rng = np.random.default_rng(2)
    prompts = rng.integers(256, 1025, count)
    suite = {}
    for name, responses in (("full", tokens - prompts), ("ragged", rng.integers(200, tokens - 1024 + 1, count))):
        rollouts = made_up(rng, prompts, responses)
        offsets = rollouts.response_ids.offsets
        extra = {
            key: Ragged(rng.normal(size=offsets[-1]).astype(np.float32), offsets) for key in ("advantages", "returns")
        }
        sides = lambda t=rollouts, e=extra: ranks_of(t, e, RolloutForm(), world)  # noqa: E731
        free = lambda t=rollouts, e=extra: ranks_of(t, e, RolloutForm(padding="free"), world)  # noqa: E731
        lists = as_tensors(rollouts, extra)
        trl = lambda t=rollouts, c=lists: [trl_padding(c, rows) for rows in Balanced().shares(t.lengths, world)]  # noqa: E731
        for ours, theirs in zip(sides(), trl()):
            view = ours.as_trl()
            assert all(torch.equal(view[key], theirs[key]) for key in ("prompt_ids", "completion_ids", "advantages"))
        suite[f"assembly, {name}"] = [
            Case("penstock, padded", sides),
            Case("penstock, padding-free", free),
            Case("penstock, sharding alone", lambda t=rollouts: Balanced().shares(t.lengths, world)),
            Case("TRL's padding", trl),
        ]
    return suite


def made_up(rng: np.random.Generator, prompts: np.ndarray[Any, Any], responses: np.ndarray[Any, Any]) -> RolloutTable:
    """Rollouts of these lengths, with all columns except text."""

    def ragged(lengths: np.ndarray[Any, Any], make: Callable[[int], np.ndarray[Any, Any]]) -> Ragged:
        ends = np.cumsum(lengths)
        return Ragged(make(int(ends[-1])), np.concatenate([[0], ends]))

    count = len(prompts)
    names = np.array([str(number) for number in range(count)], object)
    numbers = [ragged(responses, lambda size: rng.normal(size=size).astype(np.float32)) for _ in range(3)]
    return RolloutTable(
        prompt_ids=ragged(prompts, lambda size: rng.integers(1, 150_000, size)),
        response_ids=ragged(responses, lambda size: rng.integers(1, 150_000, size)),
        loss_mask=ragged(responses, lambda size: rng.random(size) < 0.9),
        rewards=rng.normal(size=count),
        groups=np.array([number // 8 for number in range(count)], object),
        versions=np.zeros(count, np.int64),
        tokenized=np.zeros(count, bool),
        ids=names,
        finish_reasons=names,
        metadata=np.array([{} for _ in range(count)], object),
        logprobs=numbers[0],
        ref_logprobs=numbers[1],
        values=numbers[2],
    )


def ranks_of(rollouts: RolloutTable, extra: dict[str, Ragged], form: RolloutForm, world: int) -> list[RolloutBatch]:
    """Batches of all ranks."""
    shards = Balanced().shares(rollouts.lengths, world)
    return [RolloutBatch.from_numpy(*assemble(rollouts, form, rows=rows, per_token=extra)) for rows in shards]


def as_tensors(rollouts: RolloutTable, extra: dict[str, Ragged]) -> dict[str, list[torch.Tensor]]:
    columns = {
        "prompt_ids": rollouts.prompt_ids,
        "completion_ids": rollouts.response_ids,
        "tool_mask": rollouts.loss_mask,
        "old_per_token_logps": rollouts.logprobs,
        "ref_per_token_logps": rollouts.ref_logprobs,
        "values": rollouts.values,
        **extra,
    }
    return {
        key: [torch.from_numpy(column[row].copy()) for row in range(len(rollouts))]
        for key, column in columns.items()
        if column is not None
    }


def trl_padding(columns: dict[str, list[torch.Tensor]], rows: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    """Columns of a rank and masks of its ids, padded row by row; and the inputs of a model."""
    chosen = {key: [column[row] for row in rows.tolist()] for key, column in columns.items()}
    for part in ("prompt", "completion"):
        chosen[f"{part}_mask"] = [torch.ones_like(ids) for ids in chosen[f"{part}_ids"]]
    found = {}
    for key, tensors in chosen.items():
        longest = max(len(tensor) for tensor in tensors)
        found[key] = torch.full((len(tensors), longest), 0, dtype=tensors[0].dtype)
        for row, tensor in enumerate(tensors):
            start = longest - len(tensor) if key.startswith("prompt") else 0
            found[key][row, start : start + len(tensor)] = tensor
    mask = torch.cat([found["prompt_mask"], found["completion_mask"]], dim=1)
    found["input_ids"] = torch.cat([found["prompt_ids"], found["completion_ids"]], dim=1)
    found["attention_mask"], found["position_ids"] = mask, (mask.cumsum(1) - 1).clamp(min=0)
    return found


SUITES: dict[str, Callable[[], dict[str, list[Case]]]] = {
    "gae": gae_suite,
    "grpo": grpo_suite,
    "assembly": assembly_suite,
}


def run(title: str, cases: list[Case], runs: int) -> None:
    wall: dict[str, list[float]] = {case.name: [] for case in cases}
    cpu: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(runs):
        for case in cases:
            if case.slow and turn >= max(3, runs // 3):
                continue
            times = 1 if case.slow else QUICK_RUNS
            case.work()  # warm-up: the previous case owned the caches, and its threads may be asleep
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(times):
                case.work()
            wall[case.name].append((time.perf_counter() - start) / times)
            cpu[case.name].append((time.process_time() - start_cpu) / times)
    ours = median(wall[cases[0].name])
    lines = [
        [
            case.name,
            f"{median(wall[case.name]) * 1e3:.2f}",
            f"{median(cpu[case.name]) * 1e3:.2f}",
            f"{median(wall[case.name]) / ours:.2f}",
        ]
        for case in cases
    ]
    print(table([title, "ms", "CPU ms", "times the first"], lines), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), help="only this one")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int, help="of torch; as many as there are cores if left out")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for name, suite in SUITES.items():
        if arguments.suite in (None, name):
            for title, cases in suite().items():
                run(title, cases, arguments.runs)


if __name__ == "__main__":
    main()
