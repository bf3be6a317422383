"""Rows as messages of Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.connections.logs import Log
from penstock.sinks.logs.base import LogSink


class KafkaSink(LogSink):
    """Rows as messages of a topic of Kafka, which has to exist: `kafka://host:9092/topic`.

    A message is the row as a JSON object, or the text or bytes of `column`. `key` names the column of keys; messages of
    one key go to one partition, others to all in turn. The producer is idempotent, and under `run(checkpoint=...)`
    every row is published exactly once. `options` are settings of librdkafka, for example for TLS and SASL.
    """

    def __init__(
        self,
        url: str,
        topic: str | None = None,
        *,
        column: str | None = None,
        key: str | None = None,
        options: Mapping[str, Any] | None = None,
        retry_seconds: float = 60.0,
    ) -> None:
        self._address = (url, topic, dict(options or {}))
        super().__init__(column=column, key=key, retry_seconds=retry_seconds)

    def _new_log(self) -> Log:
        from penstock.connections.kafka import KafkaLog  # here: most runs need no broker

        url, topic, options = self._address
        return KafkaLog(url, topic, options=options)
