"""Sources of batches: files of the usual formats, data in memory, iterators.

source = open_source("corpus/*.jsonl.zst")      # by suffix; or JsonlSource(...), ParquetSource(...), ...
batch = source.next_batch(1024)                 # None at the end
"""

from penstock.sources.by_suffix import open_source
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.csv import CsvSource
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.mds import MdsSource
from penstock.sources.memory import IteratorSource, MemorySource
from penstock.sources.store import StoreSource
from penstock.sources.text import TextSource
from penstock.sources.token_files import TokenFileSource
from penstock.sources.webdataset import WebDatasetSource

__all__ = [
    "ArrowSource",
    "CsvSource",
    "IteratorSource",
    "JsonSource",
    "JsonlSource",
    "MdsSource",
    "MemorySource",
    "ParquetSource",
    "StoreSource",
    "TextSource",
    "TokenFileSource",
    "WebDatasetSource",
    "open_source",
]
