"""Sources of messages: logs with partitions and offsets, one adapter a broker."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import is_remote, scheme_of

_SCHEMES = {
    "nats": ("nats", "NatsSource"),
    "redis": ("redis", "RedisStreamSource"),
    "rediss": ("redis", "RedisStreamSource"),
    "kafka": ("kafka", "KafkaSource"),
}


def open_log(url: Any, **options: Any) -> Any | None:
    """The source for the URL of a broker, alone or as a list of one; None for anything else."""
    if isinstance(url, list | tuple) and url and isinstance(url[0], str) and any(map(_is_broker, url)):
        if len(url) > 1:
            raise ConfigError(f"a log of messages is opened alone; got {len(url)} inputs")
        (url,) = url
    if not _is_broker(url):
        return None
    module, name = _SCHEMES[scheme_of(url)]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)(url, **options)


def _is_broker(url: Any) -> bool:
    return isinstance(url, str) and is_remote(url) and scheme_of(url) in _SCHEMES
