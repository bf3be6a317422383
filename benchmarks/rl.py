"""RL numerics: penstock and the formulas of its peers on the same arrays, in one process and in turns.

    python benchmarks/rl.py                          # every suite
    python benchmarks/rl.py --suite gae --runs 9 --threads 1

`gae`: advantages and returns of 1024 x 4096 tokens, masked: `padded` has responses of 1000 to 4096 tokens, `gaps` tool
output in the middle of them as well. `grpo`: 65,536 responses in groups of 8, with ids in order (`ids`), in any order
(`shuffled`), as strings (`strings`), and as a group size (`size`).
The formulas of the peers are written here as plain torch, as their trainers run them: a loop over tokens, with all rows
in each step (TRL's PPO, which knows no gaps; verl, which skips them), products of chunks of 128 in float32 with a loop
over chunks (slime), a loop over responses with a dictionary of groups (verl's GRPO), and reshaping, for groups that are
equal and in order (TRL's GRPO). Before anything is timed the results are compared.
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

from penstock.transforms.advantages import gae, grpo

GAMMA, LAM = 0.99, 0.95
QUICK_RUNS = 3
"""Of cases that are not slow, in a turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to compute something; `slow` cases run fewer times."""

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


SUITES: dict[str, Callable[[], dict[str, list[Case]]]] = {"gae": gae_suite, "grpo": grpo_suite}


def run(title: str, cases: list[Case], runs: int) -> None:
    wall: dict[str, list[float]] = {case.name: [] for case in cases}
    cpu: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(runs):
        for case in cases:
            if case.slow and turn >= max(3, runs // 3):
                continue
            times = 1 if case.slow else QUICK_RUNS
            case.work()  # the case before it has had the caches, and may have sent threads to sleep
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
