"""What the trainer asks of the queue, where the queue is, and whether it is the one that the config speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.config.settings import thaw
from penstock.errors import StaleQueueError
from penstock.fsqueue.queue import differences, how_to_purge
from penstock.fsqueue.split_reader import ReadCounts

__all__ = ["Consumer", "position_of", "refuse_other_settings", "skipped_by"]

_OWN = ("lanes",)
"""Settings of a queue that no config has."""


class Consumer(Protocol):
    """What the trainer asks of `penstock.fsqueue.DatasetConsumer`, in strict order."""

    @property
    def queue_dir(self) -> Path: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    def schema(self, split: str) -> Sequence[Mapping[str, Any]] | None: ...
    def get_batch(self, split: str = "train") -> Any: ...
    def counts(self, split: str = "train") -> ReadCounts: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def commit(self, state: Mapping[str, Any] | None = None) -> None: ...


def refuse_other_settings(consumer: Consumer, config: Mapping[str, Any]) -> None:
    """An error that names both values, if the batches were made with another seed, size, or setting of the provider.

    Names that only one of the two has are not compared: where the provider is not at hand, as on a machine that only
    trains, the defaults of its settings are not known.
    """
    shared = [name for name in consumer.settings if name in config and name not in _OWN]
    made = {name: consumer.settings[name] for name in shared}
    if found := differences(made, {name: thaw(config[name]) for name in shared}):
        raise StaleQueueError(
            f"{consumer.queue_dir} was made with other settings than the config has: {'; '.join(found)}; train with "
            f"those of the queue, or {how_to_purge(consumer.queue_dir)}"
        )


def position_of(consumer: Consumer, split: str = "train") -> int:
    """The next batch of a split, for all ranks together."""
    consumer.counts(split)  # opens it
    return int(consumer.state_dict()["splits"][split]["position"])


def skipped_by(consumer: Consumer) -> int:
    """Batches of files that could not be read, of all splits that were read from."""
    return sum(consumer.counts(split).skipped for split in consumer.state_dict()["splits"])
