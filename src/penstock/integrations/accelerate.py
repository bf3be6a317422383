"""Accelerate on a loader: not prepared, so not sharded again, and part of `save_state` and `load_state`.

feed = LoaderFeed(accelerator, loader, max_steps=1000)
accelerator.load_state(checkpoint)
for batch in feed:
    with accelerator.accumulate(model):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError
from penstock.integrations.loader_facts import check_world_size
from penstock.loaders.adapters import RepeatLoader

require("accelerate", "trainers")


class LoaderFeed:
    """Batches of a loader on the accelerator's device, epoch after epoch, up to `max_steps` of the loader.

    It is registered with the accelerator: `save_state` saves the position after the last batch, and after `load_state`
    the next loop starts there. Make it after the accelerator, and before `load_state`. A loop that is left goes on in
    the next one.
    """

    def __init__(self, accelerator: Any, loader: Any, *, max_steps: int | None = None) -> None:
        if not hasattr(accelerator, "register_for_checkpointing"):
            raise ConfigError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps must be at least 1, or None, got {max_steps}")
        check_world_size(loader, accelerator.num_processes)
        self.loader, self.max_steps, self.device = loader, max_steps, accelerator.device
        accelerator.register_for_checkpointing(self)

    def __iter__(self) -> Iterator[Any]:
        if self._ended():
            return
        for batch in RepeatLoader(self.loader):
            yield batch.to(self.device)
            if self._ended():
                return

    def _ended(self) -> bool:
        return self.max_steps is not None and int(self.loader.step) >= self.max_steps

    def state_dict(self) -> dict[str, Any]:
        """State of the loader."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state."""
        self.loader.load_state_dict(state)
