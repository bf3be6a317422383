"""The engine. All concurrency lives here.

    source thread -> read -> lanes of the workers -> settled -> ready -> sink thread, or whoever iterates

`stages` says what the parts are, `pipeline` describes and drives a run, `runner` owns the threads, `channel` the four
buffers between them, `chain` applies transforms and finds bad rows, `tuning` picks batch sizes and worker counts.
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.pipeline.config import PipelineConfig
    from penstock.pipeline.functions import Map
    from penstock.pipeline.metrics import Report
    from penstock.pipeline.pipeline import Pipeline
    from penstock.pipeline.stages import (
        Acknowledged,
        Block,
        BlockSource,
        DataProcessor,
        Decoded,
        Durable,
        Finishing,
        Fitting,
        Located,
        Origin,
        Publishing,
        Rejected,
        Sink,
        Source,
        State,
        Stateful,
        Transform,
    )

__all__ = [
    "Acknowledged",
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
    "Publishing",
    "Rejected",
    "Report",
    "Sink",
    "Source",
    "State",
    "Stateful",
    "Transform",
]

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "PipelineConfig": "penstock.pipeline.config",
        "Map": "penstock.pipeline.functions",
        "Report": "penstock.pipeline.metrics",
        "Pipeline": "penstock.pipeline.pipeline",
        "Block": "penstock.pipeline.stages",
        "BlockSource": "penstock.pipeline.stages",
        "DataProcessor": "penstock.pipeline.stages",
        "Decoded": "penstock.pipeline.stages",
        "Durable": "penstock.pipeline.stages",
        "Finishing": "penstock.pipeline.stages",
        "Fitting": "penstock.pipeline.stages",
        "Located": "penstock.pipeline.stages",
        "Origin": "penstock.pipeline.stages",
        "Rejected": "penstock.pipeline.stages",
        "Sink": "penstock.pipeline.stages",
        "Source": "penstock.pipeline.stages",
        "State": "penstock.pipeline.stages",
        "Acknowledged": "penstock.pipeline.stages",
        "Publishing": "penstock.pipeline.stages",
        "Stateful": "penstock.pipeline.stages",
        "Transform": "penstock.pipeline.stages",
    },
)
