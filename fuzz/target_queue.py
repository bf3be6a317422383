"""Descriptions of a queue, with a fingerprint that is right."""

from __future__ import annotations

import orjson
import xxhash

from fuzz.target_jsonl import FOLDER
from penstock.fsqueue.queue import Queue


def run(data: bytes) -> None:
    home = FOLDER / "queue"
    home.mkdir(exist_ok=True)
    try:
        facts = orjson.loads(data)
        decisive = {"meta": facts["meta"], "settings": facts["settings"]}
        facts["fingerprint"] = xxhash.xxh3_128_hexdigest(orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS))
        data = orjson.dumps(facts)
    except (ValueError, TypeError, KeyError):
        pass  # as it is
    (home / "queue.json").write_bytes(data)
    Queue.open(home)
