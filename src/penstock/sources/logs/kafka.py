"""Messages of Kafka."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.connections.logs import Log
from penstock.sources.logs.base import LogSource, MessageFormat, Metadata, Place


class KafkaSource(LogSource):
    """Messages of a topic of Kafka: partition after partition up to an end, in turns without one.

    `kafka://host:9092/topic`, or the servers and `topic=`. `options` are settings of librdkafka, for example for TLS
    and SASL. No group is joined and no offset is committed: the position is in the state. Otherwise as `NatsSource`.
    """

    def __init__(
        self,
        url: str,
        topic: str | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        start: Place = "earliest",
        until: Place | None = "end",
        format: MessageFormat = "json",
        schema: pa.Schema | Any | None = None,
        columns: Sequence[str] | None = None,
        metadata: Metadata = (),
        max_wait_seconds: float | None = 1.0,
        retry_seconds: float = 60.0,
    ) -> None:
        self._address = (url, topic, dict(options or {}))
        super().__init__(
            start=start,
            until=until,
            format=format,
            schema=schema,
            columns=columns,
            metadata=metadata,
            max_wait_seconds=max_wait_seconds,
            retry_seconds=retry_seconds,
        )

    def _new_log(self) -> Log:
        from penstock.connections.kafka import KafkaLog  # here: most runs need no broker

        url, topic, options = self._address
        return KafkaLog(url, topic, options=options)
