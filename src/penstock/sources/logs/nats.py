"""Messages of NATS JetStream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.connections.logs import Log
from penstock.sources.logs.base import LogSource, MessageFormat, Metadata, Place


class NatsSource(LogSource):
    """Messages of a stream of NATS JetStream, in the order of their sequence numbers.

    `nats://host:4222/STREAM`, or the server and `stream=`. `subject` reads only messages of that subject, which may
    have wildcards. `until="end"` (default) ends where the stream ended when reading began, an offset or time before it,
    None never. `credentials` is a file of user credentials.

    Messages are JSON objects, one row each; with `format` text (column `text`), bytes (column `value`) or Arrow IPC.
    `metadata` adds columns: partition, offset, key (the subject), timestamp, headers. Nothing is acknowledged, and no
    durable consumer is made on the server: the position is in the state.
    """

    def __init__(
        self,
        url: str,
        stream: str | None = None,
        *,
        subject: str | None = None,
        start: Place = "earliest",
        until: Place | None = "end",
        format: MessageFormat = "json",
        schema: pa.Schema | Any | None = None,
        columns: Sequence[str] | None = None,
        metadata: Metadata = (),
        max_wait_seconds: float | None = 1.0,
        retry_seconds: float = 60.0,
        credentials: str | None = None,
    ) -> None:
        self._address = (url, stream, subject, credentials)
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
        from penstock.connections.nats import NatsLog  # here: most runs need no broker

        url, stream, subject, credentials = self._address
        return NatsLog(url, stream, subject=subject, credentials=credentials)
