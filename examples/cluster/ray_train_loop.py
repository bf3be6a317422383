"""Ray Train on several nodes: checkpoints hold the loader's state, and another number of workers resumes.

On a machine of the cluster, with a folder that all nodes see: python ray_train_loop.py FOLDER
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from penstock import PretrainDataLoader
from penstock.integrations.ray_train import LoaderCheckpoint

SAMPLE = Path(__file__).resolve().parents[1] / "sample"
GLOBAL_BATCH = 12  # samples of a step, on any number of workers that divides it


def make_loader(folder: str, **options: Any) -> PretrainDataLoader:
    return PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, cache_dir=folder, **options
    )


def train_loop(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(1024, 16), nn.Linear(16, 1024))
    model = prepare_model(plain)
    # Rank and world size come from torch.distributed, which Ray has initialised.
    with (
        make_loader(config["folder"], batch_size=GLOBAL_BATCH // world) as loader,
        Path(config["folder"], f"seen-{rank}.jsonl").open("a") as seen,
    ):
        saved = LoaderCheckpoint(loader)
        if saved.restore():  # that of the last run of this name, and after a failure that of this one
            with ray.train.get_checkpoint().as_directory() as at:
                plain.load_state_dict(torch.load(Path(at) / "model.pt"))
        for batch in loader:
            scores = model(batch.input_ids)[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, batch.labels[:, 1:].flatten(), reduction="sum")
            # The count is that of the global batch, and gradients are averaged over the workers.
            (loss / batch.num_items_in_batch * world).backward()
            with torch.no_grad():
                for weights in plain.parameters():
                    weights -= weights.grad
                    weights.grad = None
            seen.write(json.dumps([batch.metadata["step"], rank, batch.input_ids.tolist()]) + "\n")
            if loader.step == config["steps"]:
                break
        with tempfile.TemporaryDirectory() as at:
            if rank == 0:  # the state is the same on every rank
                saved.save(at)
                torch.save(plain.state_dict(), Path(at) / "model.pt")
            metrics = {"step": loader.step, "workers": world}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(at) if rank == 0 else None)


def train(folder: str, workers: int, steps: int) -> None:
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"folder": folder, "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run_config=RunConfig(name="example", storage_path=f"{folder}/runs"),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    folder = str(Path(sys.argv[1]).resolve())
    train(folder, workers=2, steps=4)
    train(folder, workers=1, steps=6)
