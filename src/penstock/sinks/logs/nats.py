"""Rows as messages of NATS JetStream."""

from __future__ import annotations

from penstock.connections.logs import Log
from penstock.errors import ConfigError
from penstock.sinks.logs.base import LogSink


class NatsSink(LogSink):
    """Rows as messages of a stream of NATS JetStream, which has to exist: `nats://host:4222/STREAM`.

    A message is the row as a JSON object, or the text or bytes of `column`. Its subject is `subject`, or that of the
    row in the column `key`; by default the first subject of the stream without wildcards. Exactly-once under
    `run(checkpoint=...)`; messages have an id (`Nats-Msg-Id`), by which the server drops what is sent twice.
    """

    def __init__(
        self,
        url: str,
        stream: str | None = None,
        *,
        subject: str | None = None,
        column: str | None = None,
        key: str | None = None,
        retry_seconds: float = 60.0,
        credentials: str | None = None,
    ) -> None:
        if key is not None and subject is not None:
            raise ConfigError(f"subject={subject!r} and key={key!r} both name the subject of a message; pass one")
        self._address = (url, stream, subject, credentials)
        super().__init__(column=column, key=key, retry_seconds=retry_seconds)

    def _new_log(self) -> Log:
        from penstock.connections.nats import NatsLog  # here: most runs need no broker

        url, stream, subject, credentials = self._address
        return NatsLog(url, stream, subject=subject, credentials=credentials)
