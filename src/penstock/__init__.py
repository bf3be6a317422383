"""Any source in, ready training batches out, in a memory budget.

from penstock import MemoryBudget, Pipeline
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import Filter, Lower

Pipeline(JsonlSource("in.jsonl"), [Lower("text"), Filter("len(text) > 200")], ParquetSink("out.parquet"),
         budget=MemoryBudget("256 MiB")).run()
"""

from penstock._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
