"""Any source in, ready training batches out, through one memory-budgeted engine.

from penstock import MemoryBudget, Pipeline
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import Filter, Lower

Pipeline(JsonlSource("in.jsonl"), [Lower("text"), Filter("len(text) > 200")], ParquetSink("out.parquet"),
         budget=MemoryBudget("256 MiB")).run()
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.backends import Backend, block_diagonal_mask, get_backend
    from penstock.datasets.base import CompetitionType, DatasetSpec, KaggleDataset
    from penstock.datasets.folds import Folds
    from penstock.datasets.metadata import CompetitionMetadata
    from penstock.datasets.registry import DatasetRegistry
    from penstock.datasets.tabular import TabularDataset
    from penstock.distributed import (
        Balanced,
        CanonicalStreams,
        Contiguous,
        DirectoryRendezvous,
        EndOfEpoch,
        Rank,
        Rendezvous,
        Sharding,
        Strided,
        attention_cost,
        barrier,
        canonical_streams,
        deal,
        find_rank,
        find_rendezvous,
        gather_states,
        greedy,
        karmarkar_karp,
        merge_states,
        micro_batches,
        worker_rank,
    )
    from penstock.errors import (
        ChangedFileError,
        ConfigError,
        DataError,
        FailureBudgetError,
        PenstockError,
        PluginError,
        PoolFullError,
        QueueNotFoundError,
        ResumeError,
        SchemaError,
        StageError,
        StaleQueueError,
        StalledError,
        StoppedError,
    )
    from penstock.fsqueue import DataProviderBase, DatasetConsumer
    from penstock.loaders._preference.batch import PreferenceBatch
    from penstock.loaders._rollouts.advantages_of import AdvantageSpec, KLPenalty, Overlong
    from penstock.loaders._rollouts.batch import RolloutBatch
    from penstock.loaders._rollouts.live import LiveBuffer
    from penstock.loaders._rollouts.queueing import RolloutQueue
    from penstock.loaders._rollouts.reading import read_rollouts
    from penstock.loaders._rollouts.reading_text import TextRule
    from penstock.loaders._rollouts.rollout import Rollout
    from penstock.loaders.base import DataLoader
    from penstock.loaders.batch import TrainingBatch
    from penstock.loaders.configuration import LoaderConfig, load_config
    from penstock.loaders.conversation import ConversationDataLoader
    from penstock.loaders.integrations import Endless
    from penstock.loaders.masking import MaskedLM
    from penstock.loaders.memory import MemoryConfig, UnifiedMemoryManager
    from penstock.loaders.mixed import MixedDataLoader
    from penstock.loaders.mlx_loader import MLXDataLoader, MLXLoaderConfig
    from penstock.loaders.options import LoaderOptions
    from penstock.loaders.preference import PreferenceDataLoader
    from penstock.loaders.preparation import Prepared, prepare
    from penstock.loaders.pretrain import PretrainDataLoader
    from penstock.loaders.recipes import Recipe
    from penstock.loaders.rollout import RolloutDataLoader
    from penstock.loaders.statistics import PlanFigures, plan_figures
    from penstock.loaders.streaming import StreamingConfig, StreamingPipeline
    from penstock.loaders.streams import StreamOptions
    from penstock.loaders.verification import ResumeReport, verify_resume
    from penstock.memory import BufferPool, MemoryBudget, MemoryPressureHandler
    from penstock.order.edits import Ban, Reweight, Skip
    from penstock.order.mixing import Mixture
    from penstock.order.packing import Bins, pack
    from penstock.order.permutation import Permutation
    from penstock.order.plan import Plan
    from penstock.order.positions import Feed, Position, Step, Use
    from penstock.order.schedules import Schedule, temperature_weights
    from penstock.pipeline import DataProcessor, Pipeline, PipelineConfig, Report, Sink, Source, Stateful, Transform
    from penstock.store.reader import Store, open_store
    from penstock.templates.converters import TabularTextConverter
    from penstock.templates.engine import TextTemplateEngine
    from penstock.types import Field, Schema

__version__ = "0.1.0"

__all__ = [
    "AdvantageSpec",
    "Backend",
    "Balanced",
    "Ban",
    "Bins",
    "BufferPool",
    "CanonicalStreams",
    "ChangedFileError",
    "CompetitionMetadata",
    "CompetitionType",
    "ConfigError",
    "Contiguous",
    "ConversationDataLoader",
    "DataError",
    "DataLoader",
    "DataProcessor",
    "DataProviderBase",
    "DatasetConsumer",
    "DatasetRegistry",
    "DatasetSpec",
    "DirectoryRendezvous",
    "EndOfEpoch",
    "Endless",
    "FailureBudgetError",
    "Feed",
    "Field",
    "Folds",
    "KLPenalty",
    "KaggleDataset",
    "LiveBuffer",
    "LoaderConfig",
    "LoaderOptions",
    "MLXDataLoader",
    "MLXLoaderConfig",
    "MaskedLM",
    "MemoryBudget",
    "MemoryConfig",
    "MemoryPressureHandler",
    "MixedDataLoader",
    "Mixture",
    "Overlong",
    "PenstockError",
    "Permutation",
    "Pipeline",
    "PipelineConfig",
    "Plan",
    "PlanFigures",
    "PluginError",
    "PoolFullError",
    "Position",
    "PreferenceBatch",
    "PreferenceDataLoader",
    "Prepared",
    "PretrainDataLoader",
    "QueueNotFoundError",
    "Rank",
    "Recipe",
    "Rendezvous",
    "Report",
    "ResumeError",
    "ResumeReport",
    "Reweight",
    "Rollout",
    "RolloutBatch",
    "RolloutDataLoader",
    "RolloutQueue",
    "Schedule",
    "Schema",
    "SchemaError",
    "Sharding",
    "Sink",
    "Skip",
    "Source",
    "StageError",
    "StaleQueueError",
    "StalledError",
    "Stateful",
    "Step",
    "StoppedError",
    "Store",
    "StreamOptions",
    "StreamingConfig",
    "StreamingPipeline",
    "Strided",
    "TabularDataset",
    "TabularTextConverter",
    "TextRule",
    "TextTemplateEngine",
    "TrainingBatch",
    "Transform",
    "UnifiedMemoryManager",
    "Use",
    "attention_cost",
    "barrier",
    "block_diagonal_mask",
    "canonical_streams",
    "deal",
    "find_rank",
    "find_rendezvous",
    "gather_states",
    "get_backend",
    "greedy",
    "karmarkar_karp",
    "load_config",
    "merge_states",
    "micro_batches",
    "open_store",
    "pack",
    "plan_figures",
    "prepare",
    "read_rollouts",
    "temperature_weights",
    "verify_resume",
    "worker_rank",
]

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "block_diagonal_mask": "penstock.backends",
        "get_backend": "penstock.backends",
        "Balanced": "penstock.distributed",
        "CanonicalStreams": "penstock.distributed",
        "Contiguous": "penstock.distributed",
        "DirectoryRendezvous": "penstock.distributed",
        "EndOfEpoch": "penstock.distributed",
        "Rank": "penstock.distributed",
        "Sharding": "penstock.distributed",
        "Strided": "penstock.distributed",
        "attention_cost": "penstock.distributed",
        "barrier": "penstock.distributed",
        "find_rank": "penstock.distributed",
        "gather_states": "penstock.distributed",
        "greedy": "penstock.distributed",
        "karmarkar_karp": "penstock.distributed",
        "merge_states": "penstock.distributed",
        "micro_batches": "penstock.distributed",
        "ConfigError": "penstock.errors",
        "ChangedFileError": "penstock.errors",
        "DataError": "penstock.errors",
        "FailureBudgetError": "penstock.errors",
        "PenstockError": "penstock.errors",
        "PluginError": "penstock.errors",
        "ResumeError": "penstock.errors",
        "SchemaError": "penstock.errors",
        "StageError": "penstock.errors",
        "StalledError": "penstock.errors",
        "StoppedError": "penstock.errors",
        "DataLoader": "penstock.loaders.base",
        "TrainingBatch": "penstock.loaders.batch",
        "ConversationDataLoader": "penstock.loaders.conversation",
        "PreferenceBatch": "penstock.loaders._preference.batch",
        "PreferenceDataLoader": "penstock.loaders.preference",
        "Endless": "penstock.loaders.integrations",
        "MixedDataLoader": "penstock.loaders.mixed",
        "Prepared": "penstock.loaders.preparation",
        "prepare": "penstock.loaders.preparation",
        "PretrainDataLoader": "penstock.loaders.pretrain",
        "Recipe": "penstock.loaders.recipes",
        "StreamOptions": "penstock.loaders.streams",
        "BufferPool": "penstock.memory",
        "MemoryBudget": "penstock.memory",
        "MemoryPressureHandler": "penstock.memory",
        "Mixture": "penstock.order.mixing",
        "Bins": "penstock.order.packing",
        "pack": "penstock.order.packing",
        "Permutation": "penstock.order.permutation",
        "Plan": "penstock.order.plan",
        "Feed": "penstock.order.positions",
        "Position": "penstock.order.positions",
        "Step": "penstock.order.positions",
        "Use": "penstock.order.positions",
        "Schedule": "penstock.order.schedules",
        "temperature_weights": "penstock.order.schedules",
        "DataProcessor": "penstock.pipeline",
        "Pipeline": "penstock.pipeline",
        "PipelineConfig": "penstock.pipeline",
        "Report": "penstock.pipeline",
        "Sink": "penstock.pipeline",
        "Source": "penstock.pipeline",
        "Stateful": "penstock.pipeline",
        "Transform": "penstock.pipeline",
        "Store": "penstock.store.reader",
        "open_store": "penstock.store.reader",
        "Field": "penstock.types",
        "Schema": "penstock.types",
        "Ban": "penstock.order.edits",
        "Reweight": "penstock.order.edits",
        "Skip": "penstock.order.edits",
        "LoaderConfig": "penstock.loaders.configuration",
        "load_config": "penstock.loaders.configuration",
        "ResumeReport": "penstock.loaders.verification",
        "verify_resume": "penstock.loaders.verification",
        "PlanFigures": "penstock.loaders.statistics",
        "plan_figures": "penstock.loaders.statistics",
        "Backend": "penstock.backends",
        "Rendezvous": "penstock.distributed",
        "canonical_streams": "penstock.distributed",
        "deal": "penstock.distributed",
        "find_rendezvous": "penstock.distributed",
        "worker_rank": "penstock.distributed",
        "LoaderOptions": "penstock.loaders.options",
        "QueueNotFoundError": "penstock.errors",
        "StaleQueueError": "penstock.errors",
        "DataProviderBase": "penstock.fsqueue",
        "DatasetConsumer": "penstock.fsqueue",
        "RolloutDataLoader": "penstock.loaders.rollout",
        "Rollout": "penstock.loaders._rollouts.rollout",
        "RolloutBatch": "penstock.loaders._rollouts.batch",
        "LiveBuffer": "penstock.loaders._rollouts.live",
        "RolloutQueue": "penstock.loaders._rollouts.queueing",
        "AdvantageSpec": "penstock.loaders._rollouts.advantages_of",
        "KLPenalty": "penstock.loaders._rollouts.advantages_of",
        "Overlong": "penstock.loaders._rollouts.advantages_of",
        "read_rollouts": "penstock.loaders._rollouts.reading",
        "TextRule": "penstock.loaders._rollouts.reading_text",
        "CompetitionType": "penstock.datasets.base",
        "DatasetSpec": "penstock.datasets.base",
        "KaggleDataset": "penstock.datasets.base",
        "CompetitionMetadata": "penstock.datasets.metadata",
        "DatasetRegistry": "penstock.datasets.registry",
        "TabularDataset": "penstock.datasets.tabular",
        "Folds": "penstock.datasets.folds",
        "MLXDataLoader": "penstock.loaders.mlx_loader",
        "MLXLoaderConfig": "penstock.loaders.mlx_loader",
        "StreamingPipeline": "penstock.loaders.streaming",
        "StreamingConfig": "penstock.loaders.streaming",
        "UnifiedMemoryManager": "penstock.loaders.memory",
        "MemoryConfig": "penstock.loaders.memory",
        "MaskedLM": "penstock.loaders.masking",
        "TextTemplateEngine": "penstock.templates.engine",
        "TabularTextConverter": "penstock.templates.converters",
        "PoolFullError": "penstock.errors",
    },
)
