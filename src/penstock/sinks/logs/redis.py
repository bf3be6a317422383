"""Rows as entries of a stream of Redis."""

from __future__ import annotations

from penstock.connections.logs import Log
from penstock.sinks.logs.base import LogSink


class RedisStreamSink(LogSink):
    """Rows as entries of a stream of Redis, which is made if it does not exist: `redis://host:6379/0?stream=NAME`.

    An entry has one field, `field`, with the row as a JSON object, or with the text or bytes of `column`. Exactly-once
    under `run(checkpoint=...)`: entries have ids of the sink's own, milliseconds of its beginning and a number, which
    Redis takes only once. So no one else can append to the stream meanwhile: that is an error.
    """

    def __init__(
        self,
        url: str,
        stream: str | None = None,
        *,
        field: str = "data",
        column: str | None = None,
        retry_seconds: float = 60.0,
    ) -> None:
        self._address = (url, stream, field)
        super().__init__(column=column, key=None, retry_seconds=retry_seconds)

    def _new_log(self) -> Log:
        from penstock.connections.redis_streams import RedisLog  # here: most runs need no broker

        url, stream, field = self._address
        return RedisLog(url, stream, field=field)

    def _partitions_of_log(self) -> list[int]:
        return [0]
