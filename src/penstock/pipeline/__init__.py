"""The engine. All concurrency lives here.

    source thread -> read -> lanes of the workers -> settled -> ready -> sink thread, or whoever iterates

`stages` says what the parts are, `pipeline` describes and drives a run, `runner` owns the threads, `channel` the four
buffers between them, `chain` applies transforms and finds bad rows, `tuning` picks batch sizes and worker counts.
"""

from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.functions import Map
from penstock.pipeline.metrics import Report
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import (
    Block,
    BlockSource,
    DataProcessor,
    Decoded,
    Durable,
    Finishing,
    Fitting,
    Located,
    Origin,
    Rejected,
    Sink,
    Source,
    State,
    Stateful,
    Transform,
)

__all__ = [
    "Block",
    "BlockSource",
    "DataProcessor",
    "Decoded",
    "Durable",
    "Finishing",
    "Fitting",
    "Located",
    "Map",
    "Origin",
    "Pipeline",
    "PipelineConfig",
    "Rejected",
    "Report",
    "Sink",
    "Source",
    "State",
    "Stateful",
    "Transform",
]
