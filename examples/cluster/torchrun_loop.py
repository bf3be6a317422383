"""torchrun on several nodes: each rank trains on its share of every batch, and another number of ranks resumes.

On each node, with a folder that all of them see:

torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HEAD:29500 torchrun_loop.py FOLDER --steps 60
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock import PretrainDataLoader

SAMPLE = Path(__file__).parents[1] / "sample"
GLOBAL_BATCH = 12  # samples of a step, on any number of ranks that divides it


class Model(nn.Module):
    """Model that predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(1024, 16), nn.Linear(16, 1024))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
        scores = self.layers(input_ids)[:, :-1].flatten(0, 1)  # labels come unshifted; the model shifts them
        return nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")


def train(folder: Path, steps: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Model()
    model, checkpoint = DistributedDataParallel(plain), folder / "checkpoint.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Rank and world size come from torch.distributed.
    with (
        PretrainDataLoader(
            SAMPLE / "documents.jsonl",
            SAMPLE / "tokenizer",
            chunk_size=64,
            batch_size=GLOBAL_BATCH // world,
            cache_dir=folder,
        ) as loader,
        (folder / f"seen-{rank}.jsonl").open("a") as seen,
    ):
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            plain.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])  # the same on every rank, for any number of ranks
        for batch in loader:
            # The count is that of the global batch, and gradients are averaged over the ranks.
            loss = model(**batch) / batch.num_items_in_batch * world
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.write(json.dumps([batch.metadata["step"], rank, batch.input_ids.tolist()]) + "\n")
            if loader.step == steps:
                break
        if rank == 0:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(state, folder / "half.pt")
            (folder / "half.pt").replace(checkpoint)
            print(f"step {loader.step} on {world} ranks, loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    train(given.folder, given.steps)
    dist.destroy_process_group()
