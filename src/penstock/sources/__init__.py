"""Sources of batches: files of the usual formats, databases, lakes, messages of brokers, data in memory, iterators.

source = open_source("corpus/*.jsonl.zst")      # by suffix; or JsonlSource(...), ParquetSource(...), ...
batch = source.next_batch(1024)                 # None at the end
"""

from penstock.sources.async_iterator import AsyncIteratorSource
from penstock.sources.by_suffix import open_source
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.csv import CsvSource
from penstock.sources.foreign.mds import MdsSource
from penstock.sources.foreign.token_files import TokenFileSource
from penstock.sources.foreign.webdataset import WebDatasetSource
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.lakes.delta import DeltaSource
from penstock.sources.lakes.iceberg import IcebergSource
from penstock.sources.logs.kafka import KafkaSource
from penstock.sources.logs.nats import NatsSource
from penstock.sources.logs.redis import RedisStreamSource
from penstock.sources.memory import IteratorSource, MemorySource
from penstock.sources.sql import SqlSource
from penstock.sources.store import StoreSource
from penstock.sources.text import TextSource

__all__ = [
    "ArrowSource",
    "AsyncIteratorSource",
    "CsvSource",
    "DeltaSource",
    "IcebergSource",
    "IteratorSource",
    "JsonSource",
    "JsonlSource",
    "KafkaSource",
    "MdsSource",
    "MemorySource",
    "NatsSource",
    "ParquetSource",
    "RedisStreamSource",
    "SqlSource",
    "StoreSource",
    "TextSource",
    "TokenFileSource",
    "WebDatasetSource",
    "open_source",
]
