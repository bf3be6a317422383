"""Entries of streams of Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.connections.logs import Log
from penstock.sources.logs.base import LogSource, MessageFormat, Metadata, Place


class RedisStreamSource(LogSource):
    """Entries of one or more streams of Redis, in the order of their ids; each stream is a partition.

    `redis://host:6379/0?stream=NAME`, or the server and `stream=`. The message of an entry is its field `field`; None
    takes all fields as an object of texts. Offsets are ids such as `1526919030474-55`. Otherwise as `NatsSource`; there
    are no keys and no headers.
    """

    def __init__(
        self,
        url: str,
        stream: str | Sequence[str] | None = None,
        *,
        field: str | None = "data",
        start: Place = "earliest",
        until: Place | None = "end",
        format: MessageFormat = "json",
        schema: pa.Schema | Any | None = None,
        columns: Sequence[str] | None = None,
        metadata: Metadata = (),
        max_wait_seconds: float | None = 1.0,
        retry_seconds: float = 60.0,
    ) -> None:
        self._address = (url, stream, field)
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
        from penstock.connections.redis_streams import RedisLog  # here: most runs need no broker

        url, stream, field = self._address
        return RedisLog(url, stream, field=field)
