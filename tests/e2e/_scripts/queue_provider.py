"""Fills a queue until it is told to stop, or the split is at its end."""

from __future__ import annotations

import json
import sys

from queue_batches import make_provider, on_terminate, slow_down

if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    slow_down(facts["seed"])
    provider = make_provider(facts["queue"])
    on_terminate(provider.stop)
    provider.run(max_batches=facts["max_batches"])
