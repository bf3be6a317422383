"""One rank of a run in strict order: saves its place every few batches, and goes on from the last place it saved.

The log holds every batch that was delivered; at a resume it is cut to what the saved place had seen, as a trainer's
weights are.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from queue_batches import LEASE_SECONDS, Judge, slow_down

from penstock.fsqueue import DatasetConsumer

if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    log, saved, steps = Path(facts["log"]), Path(facts["saved"]), facts["steps"]
    draw = random.Random(facts["seed"])
    slow_down(facts["seed"])
    judge = Judge(facts["queue"])
    with DatasetConsumer(
        facts["queue"],
        order="strict",
        acknowledge="committed",
        rank=facts["rank"],
        world_size=facts["world"],
        backend="numpy",
        lease_seconds=LEASE_SECONDS,
    ) as consumer:
        seen: list[int] = []
        if saved.exists():
            state = json.loads(saved.read_text())
            consumer.load_state_dict(state["queue"])
            seen = state["seen"]
        lines = log.open("a")
        lines.write(f"from {len(seen)}\n")
        until_saved = draw.randint(1, 12)
        while len(seen) < steps:
            batch = consumer.get_arrays("train")
            assert batch is not None
            seen.append(judge.number_of(batch))
            print(seen[-1], file=lines, flush=True)
            until_saved -= 1
            if until_saved == 0 or len(seen) == steps:
                until_saved = draw.randint(1, 12)
                state = {"queue": consumer.state_dict(), "seen": seen}
                beside = saved.with_suffix(".new")
                beside.write_text(json.dumps(state))
                beside.replace(saved)
                consumer.commit(state["queue"])
