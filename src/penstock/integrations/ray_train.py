"""Ray Train on a loader: the rank of a worker, and the loader's state in the checkpoints that workers report.

def train_loop_per_worker(config):
    loader = PretrainDataLoader("corpus.store", chunk_size=2048, batch_size=8, **find_ray_rank())
    saved = LoaderCheckpoint(loader)
    saved.restore()
    for batch in loader:
        ...
        with tempfile.TemporaryDirectory() as folder:
            saved.save(folder)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock._optional import require
from penstock.errors import ResumeError
from penstock.files.atomic import write_atomic

FILE = "penstock_loader.json"


def find_ray_rank() -> dict[str, int]:
    """Rank and world size of this worker, as options of a loader.

    With `TorchTrainer` a loader finds them by itself, from torch.distributed; other trainers need them.
    """
    context = _ray_train().get_context()
    return {"rank": int(context.get_world_rank()), "world_size": int(context.get_world_size())}


class LoaderCheckpoint:
    """State of a loader in the folders of Ray's checkpoints. It is the same on every rank, so one may save it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def save(self, folder: str | Path) -> None:
        """Write the state into the folder of a checkpoint, before it is reported."""
        write_atomic(Path(folder) / FILE, json.dumps(self.loader.state_dict()).encode())

    def restore(self, checkpoint: Any = None) -> bool:
        """Go to the position of a checkpoint, by default that of `ray.train.get_checkpoint()`; False without one."""
        found = _ray_train().get_checkpoint() if checkpoint is None else checkpoint
        if found is None:
            return False
        with found.as_directory() as folder:
            path = Path(folder) / FILE
            if not path.is_file():
                raise ResumeError(f"the checkpoint {found} has no {FILE}; save the loader in it before it is reported")
            self.loader.load_state_dict(json.loads(path.read_bytes()))
        return True


def _ray_train() -> Any:
    return require("ray.train", "ray")
