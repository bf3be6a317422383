"""Sinks of batches: files that appear whole or not at all, tables of databases, memory, iteration."""

from penstock.sinks.formats import ArrowSink, CsvSink, JsonlSink, ParquetSink, open_sink
from penstock.sinks.memory import IteratorSink, MemorySink
from penstock.sinks.sql import SqlSink
from penstock.sinks.store import StoreSink

__all__ = [
    "ArrowSink",
    "CsvSink",
    "IteratorSink",
    "JsonlSink",
    "MemorySink",
    "ParquetSink",
    "SqlSink",
    "StoreSink",
    "open_sink",
]
