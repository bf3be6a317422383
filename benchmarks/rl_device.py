"""RL on a device: penstock and plain torch on the same tensors, in one process, interleaved.

    python benchmarks/rl_device.py                       # on "cuda", or on the CPU if there is none
    python benchmarks/rl_device.py --runs 51 --sizes 512x4096

`ms` is the median time of a call until the device is done, `ratio` that of penstock over that of plain torch, `syncs`
the number of times that the call waits for the device (`torch.cuda.set_sync_debug_mode`), `blocked ms` the time that
the call holds the host while the device has some 50 ms of other work to do first, `compiled ms` (`--compiled`) the time
of the same call of penstock under `torch.compile`. The plain formulas compute in float32, without checks and without
presets; penstock's in float64. Their results are compared before the timing. `assembly` turns rollouts of NumPy arrays
into a padded batch with GRPO advantages on the device; the plain way pads row by row.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from table import table

from penstock.rl import advantages as rl

GAMMA, LAM, SIZE = 0.99, 0.95, 8


@dataclass(frozen=True, slots=True)
class Case:
    """One function, and the plain way to compute the same."""

    name: str
    ours: Callable[[], Any]
    plain: Callable[[], Any] | None = None


def chunked_gae(rewards: Any, values: Any, mask: Any) -> tuple[Any, Any]:
    """GAE in chunks of 128 tokens, with a loop over chunks; no gaps."""
    chunk = min(128, rewards.shape[1])
    rewards, values = rewards * mask, values * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    backwards = torch.flip(rewards + GAMMA * following - values, dims=[1])
    steps = torch.arange(chunk, device=rewards.device)
    exponents = steps[None, :] - steps[:, None]
    kernel = torch.where(exponents >= 0, (GAMMA * LAM) ** exponents.clamp(min=0).float(), 0.0)
    inflow = (GAMMA * LAM) ** (steps + 1).float()
    chunks = (backwards.reshape(-1, chunk) @ kernel).view(len(values), -1, chunk)
    out, carry = torch.empty_like(backwards), torch.zeros(len(values), device=rewards.device)
    for number in range(chunks.shape[1]):
        done = chunks[:, number] + carry[:, None] * inflow
        out[:, number * chunk : (number + 1) * chunk] = done
        carry = done[:, -1]
    advantages = torch.flip(out, dims=[1])
    return advantages * mask, (advantages + values) * mask


def plain_grpo(rewards: Any) -> Any:
    grouped = rewards.view(-1, SIZE)
    mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)
    return ((grouped - mean) / (std + 1e-6)).view(-1)


def plain_grpo_ids(rewards: Any, ids: Any, count: int) -> Any:
    ones = torch.ones_like(rewards)
    counts = torch.zeros(count, device=rewards.device).index_add_(0, ids, ones)
    mean = torch.zeros_like(counts).index_add_(0, ids, rewards) / counts
    apart = rewards - mean[ids]
    std = (torch.zeros_like(counts).index_add_(0, ids, apart * apart) / (counts - 1)).sqrt()
    return apart / (std[ids] + 1e-6)


def plain_whiten(values: Any, mask: Any) -> Any:
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = (((values - mean) ** 2) * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask


def plain_rloo(rewards: Any) -> Any:
    grouped = rewards.view(-1, SIZE)
    others = (grouped.sum(1, keepdim=True) - grouped) / (SIZE - 1)
    return (grouped - others).view(-1)


def plain_token_rewards(rewards: Any, mask: Any, kl: Any) -> Any:
    found = -0.1 * kl * mask
    last = mask.shape[1] - 1 - mask.flip(1).float().argmax(1)
    found[torch.arange(len(rewards), device=mask.device), last] += rewards
    return found


def cases(rows: int, tokens: int, device: str) -> list[Case]:
    rng = np.random.default_rng(0)
    on = lambda array: torch.from_numpy(array).to(device)  # noqa: E731
    tokenwise, values, kl = (on(rng.normal(size=(rows, tokens)).astype(np.float32)) for _ in range(3))
    mask = on(np.arange(tokens) < rng.integers(tokens // 4, tokens + 1, rows)[:, None])
    gaps = mask & on(rng.random((rows, tokens)) < 0.95)
    gaps[:, 0] = True
    rewards = on(rng.normal(size=rows).astype(np.float32))
    host_ids = rng.permutation(rows) // SIZE
    ids, weights = on(host_ids), mask.float()

    def to_go() -> Any:
        return (tokenwise * weights).flip(1).cumsum(1).flip(1) * weights

    def plus_plus() -> Any:
        rewarded = plain_token_rewards(rewards, mask, kl)
        return plain_whiten((rewarded * weights).flip(1).cumsum(1).flip(1), weights)

    return [
        Case("grpo, size=8", lambda: rl.grpo(rewards, SIZE), lambda: plain_grpo(rewards)),
        Case("grpo, missing rewards (trl)", lambda: rl.grpo(rewards, SIZE, preset="trl")),
        Case(
            "grpo, ids NumPy",
            lambda: rl.grpo(rewards, host_ids),
            lambda: plain_grpo_ids(rewards, torch.from_numpy(host_ids).to(device), rows // SIZE),
        ),
        Case("grpo, ids device", lambda: rl.grpo(rewards, ids), lambda: plain_grpo_ids(rewards, ids, rows // SIZE)),
        Case(
            "grpo with mask",
            lambda: rl.grpo(rewards, SIZE, mask=mask),
            lambda: plain_grpo(rewards)[:, None] * weights,
        ),
        Case("rloo", lambda: rl.rloo(rewards, SIZE), lambda: plain_rloo(rewards)),
        Case(
            "gae, padded",
            lambda: rl.gae(tokenwise, values, mask=mask, gamma=GAMMA, lam=LAM),
            lambda: chunked_gae(tokenwise, values, weights),
        ),
        Case("gae, gaps", lambda: rl.gae(tokenwise, values, mask=gaps, gamma=GAMMA, lam=LAM)),
        Case("gae, gap='plain'", lambda: rl.gae(tokenwise, values, mask=gaps, gamma=GAMMA, lam=LAM, gap="plain")),
        Case("gae, gamma=lam=1", lambda: rl.gae(tokenwise, values, mask=mask)),
        Case("reward_to_go", lambda: rl.reward_to_go(tokenwise, mask=mask), to_go),
        Case("reward_to_go, gamma=0.99", lambda: rl.reward_to_go(tokenwise, mask=mask, gamma=GAMMA)),
        Case("whiten", lambda: rl.whiten(tokenwise, mask), lambda: plain_whiten(tokenwise, weights)),
        Case(
            "token_rewards with kl",
            lambda: rl.token_rewards(rewards, mask, kl=kl, beta=0.1),
            lambda: plain_token_rewards(rewards, mask, kl),
        ),
        Case("reinforce_plus_plus", lambda: rl.reinforce_plus_plus(rewards, mask, kl=kl, beta=0.1), plus_plus),
        Case(
            "loss_denominators",
            lambda: rl.loss_denominators(mask),
            lambda: torch.ones(rows, device=device) * mask.sum().clamp(min=1),
        ),
        Case(
            "kl_estimate k3",
            lambda: rl.kl_estimate(tokenwise, values),
            lambda: torch.exp(values - tokenwise) - 1 + (tokenwise - values),
        ),
        Case(
            "aggregate_loss",
            lambda: rl.aggregate_loss(tokenwise, mask, rewards.abs() + 1),
            lambda: (torch.where(mask, tokenwise, 0.0) / (rewards.abs() + 1)[:, None]).sum(),
        ),
    ]


def largest_difference(ours: Any, plain: Any) -> float:
    pairs = zip(ours, plain) if isinstance(ours, tuple) else [(ours, plain)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return (time.perf_counter() - start) * 1e3


def syncs(work: Callable[[], Any], device: str) -> str:
    if device != "cuda":
        return "-"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return str(sum("synchroniz" in str(warning.message) for warning in seen))


def blocked(work: Callable[[], Any], device: str) -> str:
    if device != "cuda":
        return "-"
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 50 ms of cycles
    start = time.perf_counter()
    work()
    held = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return f"{held:.2f}"


def functions(rows: int, tokens: int, device: str, runs: int, *, compiled: bool) -> str:
    lines = []
    for case in cases(rows, tokens, device):
        works = [work for work in (case.ours, case.plain) if work is not None]
        results = [work() for work in works]
        apart = f"{largest_difference(*results[:2]):.1e}" if case.plain is not None else "-"
        if compiled:
            torch._dynamo.reset()
            works.append(torch.compile(case.ours))
        times: list[list[float]] = [[] for _ in works]
        for _ in range(3 + runs):
            for work, taken in zip(works, times):
                taken.append(milliseconds(work, device))
        medians = [median(taken[3:]) for taken in times]
        cells = []
        for work, taken in list(zip(works, medians))[: 1 if case.plain is None else 2]:
            cells += [f"{taken:.3f}", syncs(work, device), blocked(work, device)]
        ratio = "-" if case.plain is None else f"{medians[0] / medians[1]:.2f}"
        more = [f"{medians[-1]:.3f}"] if compiled else []
        lines.append([case.name, *cells, *["-"] * (6 - len(cells)), ratio, apart, *more])
    head = ["", "ms", "syncs", "blocked ms", "plain ms", "syncs", "blocked ms", "ratio", "difference"]
    return str(table([*head, "compiled ms"] if compiled else head, lines))


def assembly(rows: int, tokens: int, device: str, runs: int) -> str:
    """Rollouts of NumPy arrays to a batch on the device."""
    from penstock import Rollout, RolloutDataLoader

    rng = np.random.default_rng(0)
    prompts = rng.integers(tokens // 16, tokens // 4, rows)
    rollouts = [
        Rollout(
            prompt_ids=rng.integers(0, 32_000, prompt),
            response_ids=rng.integers(0, 32_000, tokens - prompt),
            logprobs=-rng.random(tokens - prompt).astype(np.float32),
            ref_logprobs=-rng.random(tokens - prompt).astype(np.float32),
            reward=float(row % 3),
            group=f"{row // SIZE}",
        )
        for row, prompt in enumerate(prompts.tolist())
    ]

    rules: Any = {"group_prompts": "any"}

    def loader(**options: Any) -> Any:
        return RolloutDataLoader(rollouts, batch_size=rows, shuffle=False, device=device, **rules, **options)

    def plain() -> Any:
        left, right = max(len(r.prompt_ids) for r in rollouts), max(len(r.response_ids) for r in rollouts)
        ids = torch.zeros(rows, left + right, dtype=torch.int64)
        attention = torch.zeros_like(ids)
        mask = torch.zeros(rows, right, dtype=torch.bool)
        log_probs, reference = torch.zeros(rows, right), torch.zeros(rows, right)
        for row, rollout in enumerate(rollouts):
            prompt, response = torch.from_numpy(rollout.prompt_ids), torch.from_numpy(rollout.response_ids)
            ids[row, left - len(prompt) : left], ids[row, left : left + len(response)] = prompt, response
            attention[row, left - len(prompt) : left + len(response)] = 1
            mask[row, : len(response)] = True
            log_probs[row, : len(response)] = torch.from_numpy(rollout.logprobs)
            reference[row, : len(response)] = torch.from_numpy(rollout.ref_logprobs)
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        return [x.to(device) for x in (ids, attention, mask, log_probs, reference, plain_grpo(rewards), rewards)]

    held = loader(ppo_epochs=1_000)
    again = iter(held)
    next(again)
    fields = ("input_ids", "attention_mask")

    def read(batch: Any) -> list[Any]:
        """What the plain way makes."""
        mask, rewards = batch.response_mask, batch.rewards
        given = [batch.old_log_probs, batch.ref_log_probs, batch.advantages]
        return [batch.input_ids, batch.attention_mask, mask, *given, rewards]

    ways = {
        "penstock, the same arrays": lambda: read(next(iter(loader()))),
        "penstock, and the labels": lambda: (batch := next(iter(loader())), read(batch), batch.labels),
        f"penstock, fields={fields}": lambda: read(next(iter(loader(fields=fields)))),
        "penstock, a further minibatch": lambda: next(again),
        "plain torch": plain,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, way in ways.items():
            taken[name].append(milliseconds(way, device))
    plainly = median(taken["plain torch"])
    lines = [[name, f"{median(times):.1f}", f"{median(times) / plainly:.2f}"] for name, times in taken.items()]
    return str(table(["assembly", "ms", "ratio"], lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", default=["512x4096", "64x512"], help="rows x tokens")
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--no-assembly", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="torch.compile of the same calls, too: minutes more")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}")
    for size in options.sizes:
        rows, tokens = map(int, size.split("x"))
        print(f"\n{rows} x {tokens}\n")
        print(functions(rows, tokens, options.device, options.runs, compiled=options.compiled))
        if not options.no_assembly:
            print()
            print(assembly(rows, tokens, options.device, min(options.runs, 7)))


if __name__ == "__main__":
    main()
