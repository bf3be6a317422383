"""Any source in, ready training batches out, through one memory-budgeted engine.

from penstock import MemoryBudget, Pipeline
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import Filter, Lower

Pipeline(JsonlSource("in.jsonl"), [Lower("text"), Filter("len(text) > 200")], ParquetSink("out.parquet"),
         budget=MemoryBudget("256 MiB")).run()
"""

from penstock.errors import (
    ConfigError,
    DataError,
    FailureBudgetError,
    PenstockError,
    PluginError,
    ResumeError,
    SchemaError,
    StageError,
    StalledError,
    StoppedError,
)
from penstock.memory import BufferPool, MemoryBudget, MemoryPressureHandler
from penstock.pipeline import DataProcessor, Pipeline, PipelineConfig, Report, Sink, Source, Stateful, Transform
from penstock.types import Field, Schema

__version__ = "0.1.0"

__all__ = [
    "BufferPool",
    "ConfigError",
    "DataError",
    "DataProcessor",
    "FailureBudgetError",
    "Field",
    "MemoryBudget",
    "MemoryPressureHandler",
    "PenstockError",
    "Pipeline",
    "PipelineConfig",
    "PluginError",
    "Report",
    "ResumeError",
    "Schema",
    "SchemaError",
    "Sink",
    "Source",
    "StageError",
    "StalledError",
    "Stateful",
    "StoppedError",
    "Transform",
]
