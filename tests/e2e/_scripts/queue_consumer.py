"""Reads a queue with others, and writes down every batch before it asks for the next.

A line is `<k> <how often a lease on its file had run out>`; a last one, `= <counts>`, says how it saw things itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time

from queue_batches import LEASE_SECONDS, Judge, on_terminate, slow_down

from penstock.fsqueue import DatasetConsumer
from penstock.fsqueue.claiming_reader import ClaimingReader

if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    log = os.open(facts["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    say, draw = os.write, random.Random(facts["seed"])
    slow_down(facts["seed"])
    judge, going = Judge(facts["queue"]), [True]
    on_terminate(going.clear)
    with DatasetConsumer(facts["queue"], backend="numpy", lease_seconds=LEASE_SECONDS) as consumer:
        while going and (batch := consumer.get_arrays("train")) is not None:
            reader = consumer._readers["train"]
            assert isinstance(reader, ClaimingReader)
            assert reader._current is not None
            say(log, f"{judge.number_of(batch)} {reader._current.file.returns}\n".encode())
            time.sleep(draw.random() * 0.002)
        counts = consumer.counts()
    say(log, f"= {json.dumps(dataclasses.asdict(counts))}\n".encode())
