"""Facts of a loader for trainers: the batches of several epochs, and whether its ranks are those of the trainer."""

from __future__ import annotations

import math
from typing import Any

from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader


def count_batches(loader: DataLoader, epochs: float, remedy: str) -> int:
    """Batches of the first epochs, of which the last may be a fraction; epochs may differ in length."""
    whole = math.floor(epochs)
    try:
        counts = [loader.num_batches_of_epoch(epoch) for epoch in range(math.ceil(epochs))]
    except TypeError as error:
        raise ConfigError(f"the batches of {epochs:g} epochs cannot be counted ({error}); {remedy}") from error
    return sum(counts[:whole]) + sum(math.ceil(count * (epochs - whole)) for count in counts[whole:])


def check_world_size(loader: Any, world_size: int) -> None:
    """Refuse a loader that was made for another number of ranks: ranks would train on the same batches, or on a part.

    A loader with `group=` is not checked: only its caller knows which ranks share batches.
    """
    if not isinstance(loader, DataLoader) or loader._engine is None or loader.options.group is not None:
        return
    options, ranks = loader.options, loader.rank.world_size
    sizes = {name: getattr(options, name) for name in ("model_parallel_size", "cp", "tp", "pp")}
    if ranks * math.prod(sizes.values()) != world_size:
        given = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        shared = f" with {given}" if given else ""
        raise ConfigError(
            f"the loader was made for {ranks} ranks{shared}, and the trainer has {world_size}; make the loader after "
            "the trainer's process group, or pass rank= and world_size=, or shard=Shard.from_mesh(mesh)"
        )
