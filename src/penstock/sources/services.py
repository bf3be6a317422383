"""Sources of databases and brokers, by the scheme of a URL."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.files.filesystems import scheme_of
from penstock.files.listing import DATABASE_SCHEMES
from penstock.pipeline.stages import Source

_SOURCES = {
    **dict.fromkeys(DATABASE_SCHEMES, ("sql", "SqlSource")),
    "nats": ("logs.nats", "NatsSource"),
    "redis": ("logs.redis", "RedisStreamSource"),
    "rediss": ("logs.redis", "RedisStreamSource"),
    "kafka": ("logs.kafka", "KafkaSource"),
}


def open_service(url: str, **options: Any) -> Source:
    """The source for the URL of a database or a broker (see `is_service`)."""
    module, name = _SOURCES[scheme_of(url)]
    source: Source = getattr(importlib.import_module(f"penstock.sources.{module}"), name)(url, **options)
    return source
