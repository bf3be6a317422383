"""Appends groups of rollouts to a queue, and writes down each that was accepted; ids say whose they are."""

from __future__ import annotations

import json
import os
import sys

from queue_batches import LEASE_SECONDS, slow_down

from penstock.rl.queue import RolloutQueue

if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    log, say = os.open(facts["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.write
    slow_down(facts["seed"])
    with RolloutQueue(facts["queue"], durable=False, lease_seconds=LEASE_SECONDS) as queue:
        for number in range(facts["most"]):
            name = f"{facts['life']}.{number}"
            rows = [{"prompt_ids": [1], "response_ids": [2, number], "reward": part} for part in (0, 1)]
            queue.append([{**row, "group": name, "id": f"{name}.{part}"} for part, row in enumerate(rows)])
            say(log, f"{name}\n".encode())
        if facts["last"]:
            queue.finish()
