"""Sinks of batches: files that appear whole or not at all, memory, iteration."""

from penstock.sinks.delta import DeltaSink
from penstock.sinks.formats import ArrowSink, CsvSink, JsonlSink, ParquetSink, open_sink
from penstock.sinks.memory import IteratorSink, MemorySink
from penstock.sinks.store import StoreSink

__all__ = [
    "ArrowSink",
    "CsvSink",
    "DeltaSink",
    "IteratorSink",
    "JsonlSink",
    "MemorySink",
    "ParquetSink",
    "StoreSink",
    "open_sink",
]
