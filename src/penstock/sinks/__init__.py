"""Sinks of batches: files that appear whole or not at all, databases, messages of brokers, memory, iteration."""

from penstock.sinks.delta import DeltaSink
from penstock.sinks.formats import ArrowSink, CsvSink, JsonlSink, ParquetSink, open_sink
from penstock.sinks.logs.kafka import KafkaSink
from penstock.sinks.logs.nats import NatsSink
from penstock.sinks.logs.redis import RedisStreamSink
from penstock.sinks.memory import IteratorSink, MemorySink
from penstock.sinks.sql import SqlSink
from penstock.sinks.store import StoreSink

__all__ = [
    "ArrowSink",
    "CsvSink",
    "DeltaSink",
    "IteratorSink",
    "JsonlSink",
    "KafkaSink",
    "MemorySink",
    "NatsSink",
    "ParquetSink",
    "RedisStreamSink",
    "SqlSink",
    "StoreSink",
    "open_sink",
]
