"""Cost of a plan by rows and sources, on indexes that are arithmetic: a trillion rows take no memory and no disk.

    python benchmarks/scale_plan.py                              # the whole table, some minutes
    python benchmarks/scale_plan.py --orders packed --rows 1e12 --sources 1,10000

Every case is a process of its own. Times are of its CPU: a plan is arithmetic in one thread, and other work on the
machine does not count. `looked at` counts the lengths that the first batch needed; `held MB` is the peak of
the process above its size after the imports. A case that takes longer than `--timeout` or more memory than `--memory`
is listed as such.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.truncation import Truncation
from penstock.order import BlockShuffle, Plan, PlanSource, Position, Schedule
from penstock.order.sample_orders import (
    BucketOrder,
    BudgetOrder,
    ChopOrder,
    FittedOrder,
    Order,
    OrderPosition,
    PackedOrder,
    RowOrder,
)
from penstock.order.states import from_state, to_state

Ints = npt.NDArray[np.int64]
LENGTH = 2048
ORDERS = ("rows", "blocks", "concat", "packed", "fitted", "buckets", "budget")
MIXES = ("constant", "schedule", "once")
COLUMNS = ("order", "mix", "rows", "sources", "construct s", "first batch s", "looked at", "step ms", "edit s")
COLUMNS += ("save ms", "state bytes", "resume s", "held MB")

_PERIOD = 1 << 16
_PATTERN = np.random.default_rng(0).lognormal(6, 1, _PERIOD).astype(np.int64).clip(1, LENGTH)
_ENDS = np.cumsum(_PATTERN)


class ArithmeticTable:
    """Rows whose lengths repeat every 65,536 rows, so that nothing about them is stored."""

    looked_at = 0
    """Lengths that were looked at, in all tables."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        whole, rest = divmod(rows, _PERIOD)
        self.tokens = whole * int(_ENDS[-1]) + (int(_ENDS[rest - 1]) if rest else 0)

    def lengths(self, rows: npt.ArrayLike) -> Ints:
        wanted = np.asarray(rows)
        ArithmeticTable.looked_at += len(wanted)
        return _PATTERN[wanted % _PERIOD]

    def find_tokens(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        whole, rest = np.divmod(np.asarray(positions), int(_ENDS[-1]))
        inside = np.searchsorted(_ENDS, rest, side="right")
        return whole * _PERIOD + inside, rest - (_ENDS[inside] - _PATTERN[inside])


def make_order(kind: str, rows: int, name: str) -> Order:
    table, facts = ArithmeticTable(rows), {"shuffle": True, "seed": 7, "name": name}
    cut, split = Truncation(max_length=LENGTH), Truncation("split", LENGTH // 2)
    if kind == "concat":
        return ChopOrder(table, LENGTH, **facts)  # type: ignore[arg-type]
    if kind == "packed":
        return PackedOrder(table, cut, **facts)  # type: ignore[arg-type]
    if kind == "fitted":
        return FittedOrder(table, split, **facts)  # type: ignore[arg-type]
    if kind == "buckets":
        return BucketOrder(table, cut, size=8, **facts)  # type: ignore[arg-type]
    if kind == "budget":
        return BudgetOrder(table, cut, max_tokens=8 * LENGTH, **facts)  # type: ignore[arg-type]
    shuffle = BlockShuffle() if kind == "blocks" else True
    return RowOrder(table, cut, **{**facts, "shuffle": shuffle})  # type: ignore[arg-type]


def make_plan(kind: str, mix: str, rows: int, sources: int, batch: int) -> Plan:
    if sources == 1:
        return Plan((PlanSource("web", make_order(kind, rows, "web")),), batch)
    names = [f"source-{number:05}" for number in range(sources)]
    # Sizes as they come: some sources are a hundred times as large as others.
    shares = np.random.default_rng(1).lognormal(0, 1.5, sources)
    sizes = np.maximum((rows * shares / shares.sum()).astype(np.int64), 1000).tolist()
    orders = [make_order(kind, size, name) for name, size in zip(names, sizes)]
    weights = {name: order.table.tokens for name, order in zip(names, orders)}
    schedule = Schedule.constant(weights)
    if mix == "schedule":
        schedule = Schedule.of([(0, weights), (100_000, dict.fromkeys(names, 1.0))], interpolation="linear")
    stopping = "all_exhausted_without_replacement" if mix == "once" else "first_exhausted"
    return Plan(
        tuple(PlanSource(name, order) for name, order in zip(names, orders)),
        batch,
        schedule=schedule,
        stopping=stopping,
    )


def read_steps(plan: Plan, position: Position, count: int, seconds: float) -> tuple[int, Position]:
    """Up to `count` steps, in blocks as a loader reads them."""
    done, started = 0, time.process_time()
    while done < count and time.process_time() - started < seconds:
        block = plan.read_block(position, min(64, count - done))
        done, position = done + len(block), block[-1][1]
    return done, position


def run_case(kind: str, mix: str, rows: int, sources: int, batch: int, steps: int, limit: int) -> dict[str, Any]:
    """Figures of one case, in this process."""
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    base = _peak_bytes()
    facts: dict[str, Any] = {}
    started = time.process_time()
    plan = make_plan(kind, mix, rows, sources, batch)
    position = plan.start()
    facts["construct s"] = time.process_time() - started
    _show(facts)
    ArithmeticTable.looked_at, started = 0, time.process_time()
    ((_, position),) = plan.read_block(position, 1)
    facts["first batch s"], facts["looked at"] = time.process_time() - started, ArithmeticTable.looked_at
    _show(facts)
    started = time.process_time()
    done, position = read_steps(plan, position, steps, 20)
    facts["step ms"] = (time.process_time() - started) / done * 1e3
    _show(facts)
    if sources == 1:
        window = max(plan.sources[0].order.windows // 2, 0)
        position = Position((OrderPosition(0, window, 3),), 10_000_000, 0, 10_000_000 * batch, None, (OrderPosition(),))
    started = time.process_time()
    state = json.dumps(to_state(plan, position))
    facts["save ms"], facts["state bytes"] = (time.process_time() - started) * 1e3, len(state)
    _show(facts)
    fresh = make_plan(kind, mix, rows, sources, batch)
    started = time.process_time()
    resumed, there = from_state(fresh, json.loads(state))
    assert there == position
    resumed.read_block(there, 1)
    facts["resume s"] = time.process_time() - started
    _show(facts)
    started = time.process_time()
    edited = plan.skip(position.step + 2, position.step + 5)
    if sources > 1:
        names = edited.names
        edited = edited.ban({names[0]: [5]}, step=position.step).reweight(position.step + 6, dict.fromkeys(names, 1.0))
    read_steps(edited, position, 8, 20)
    facts["edit s"] = time.process_time() - started
    facts["held MB"] = (_peak_bytes() - base) / 1e6
    return facts


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _show(facts: dict[str, Any]) -> None:
    """What is known so far, for the case that does not end."""
    print(json.dumps(facts | {"held MB": _peak_bytes() / 1e6}), flush=True)


def measured(arguments: argparse.Namespace, kind: str, mix: str, rows: int, sources: int) -> dict[str, Any]:
    """Figures of one case in a process of its own, as far as it came."""
    options = (arguments.batch, arguments.steps, int(arguments.memory * 1e9))
    command = [sys.executable, __file__, "--case", json.dumps([kind, mix, rows, sources, *options])]
    facts = {"order": kind, "mix": mix if sources > 1 else "", "rows": f"{rows:.0e}", "sources": sources}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout)
        lines, error = ended.stdout.splitlines(), ended.stderr.strip().splitlines()[-1:] if ended.returncode else []
    except subprocess.TimeoutExpired as late:
        lines, error = (late.stdout or b"").decode().splitlines(), [f"no end after {arguments.timeout:g} s"]
    return facts | (json.loads(lines[-1]) if lines else {}) | ({"error": error[0][:60]} if error else {})


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--orders", default=",".join(ORDERS))
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--rows", default="1e6,1e9,1e12", help="rows of all sources together")
    parser.add_argument("--sources", default="1,100,10000")
    parser.add_argument("--batch", type=int, default=512, help="samples of a global batch")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=120)
    parser.add_argument("--memory", type=float, default=8, help="most gigabytes of a case")
    parser.add_argument("--json", help="file for the figures")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(*json.loads(arguments.case))))
        return
    print(" | ".join(COLUMNS))
    found = []
    for kind in arguments.orders.split(","):
        for sources in map(int, arguments.sources.split(",")):
            mixes = arguments.mixes.split(",") if sources > 1 else ["constant"]
            for mix in mixes if kind in ("rows", "packed", "concat") or sources == 1 else ():
                for rows in (int(float(count)) for count in arguments.rows.split(",")):
                    if sources > 1 and rows < max(1000 * sources, 10**12):
                        continue
                    found.append(measured(arguments, kind, mix, rows, sources))
                    line = " | ".join(_shown(found[-1].get(name, "-")) for name in COLUMNS)
                    print(line, found[-1].get("error", ""), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
