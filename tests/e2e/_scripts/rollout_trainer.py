"""Reads rollouts from a queue to its end, and saves after some steps what it was fed and where it is."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from queue_batches import LEASE_SECONDS, slow_down

from penstock import RolloutDataLoader
from penstock.rl.queue import RolloutQueue

if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    saved, draw = Path(facts["saved"]), random.Random(facts["seed"])
    slow_down(facts["seed"])
    queue = RolloutQueue(facts["queue"], durable=False, lease_seconds=LEASE_SECONDS)
    options = {"estimator": "dr_grpo", "backend": "numpy", "shuffle": False}
    with RolloutDataLoader(queue, rollout_batch_size=4, **options) as loader:
        seen: list[list[object]] = []
        if saved.exists():
            state = json.loads(saved.read_text())
            loader.load_state_dict(state["loader"])
            seen = state["seen"]

        def save() -> None:
            state = {"loader": loader.state_dict(), "seen": seen}
            beside = saved.with_suffix(".new")
            beside.write_text(json.dumps(state))
            beside.replace(saved)
            loader.commit(state["loader"])

        until_saved, going = draw.randint(1, 3), True
        while going:  # a loop is over one rollout batch
            going = False
            for batch in loader:
                going = True
                seen += [[name, ids.tolist()] for name, ids in zip(batch.ids, batch.input_ids)]
                until_saved -= 1
                if not until_saved:
                    save()
                    until_saved = draw.randint(1, 3)
        save()
    Path(facts["ended"]).touch()
