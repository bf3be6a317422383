"""Sources of messages: logs with partitions and offsets, one adapter a broker."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.files.filesystems import is_remote, scheme_of

_SCHEMES = {
    "nats": ("nats", "NatsSource"),
    "redis": ("redis", "RedisStreamSource"),
    "rediss": ("redis", "RedisStreamSource"),
    "kafka": ("kafka", "KafkaSource"),
}


def open_log(url: Any, **options: Any) -> Any | None:
    """The source for the URL of a broker; None for anything else."""
    if not isinstance(url, str) or not is_remote(url) or scheme_of(url) not in _SCHEMES:
        return None
    module, name = _SCHEMES[scheme_of(url)]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)(url, **options)
