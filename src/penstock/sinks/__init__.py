"""Where batches go: files that appear whole or not at all, memory, iteration."""

from penstock.sinks.by_suffix import open_sink
from penstock.sinks.columnar import ArrowSink, ParquetSink
from penstock.sinks.memory import IteratorSink, MemorySink
from penstock.sinks.store import StoreSink
from penstock.sinks.text import CsvSink, JsonlSink

__all__ = ["ArrowSink", "CsvSink", "IteratorSink", "JsonlSink", "MemorySink", "ParquetSink", "StoreSink", "open_sink"]
