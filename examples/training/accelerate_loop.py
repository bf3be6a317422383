"""Accelerate: the loader is already sharded and is not prepared; its state is part of the checkpoints."""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from penstock import PretrainDataLoader
from penstock.integrations.accelerate import LoaderFeed

SAMPLE = Path(__file__).parents[1] / "sample"


def train(folder: Path, steps: int, checkpoint: Path | None = None) -> list[torch.Tensor]:
    set_seed(0)
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = nn.Sequential(nn.Embedding(1024, 32), nn.Linear(32, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Rank and world size come from torch.distributed, which the accelerator has initialised.
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, batch_size=4, cache_dir=folder
    ) as loader:  # fmt: skip
        feed = LoaderFeed(accelerator, loader, max_steps=steps)  # its state is part of save_state and load_state
        if checkpoint is not None:
            accelerator.load_state(checkpoint)
        for batch in feed:
            scores = model(batch.input_ids)[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(scores, batch.labels[:, 1:].flatten(), reduction="sum")
            # The count refers to the global batch, and gradients are averaged over the ranks.
            accelerator.backward(loss / batch.num_items_in_batch * accelerator.num_processes)
            optimizer.step()
            optimizer.zero_grad()
            if loader.step == 25:
                accelerator.save_state(folder / "checkpoint")
        print(f"step {loader.step}, epoch {loader.epoch}, loss {loss.item() / batch.num_items_in_batch:.3f}")
    return list(accelerator.unwrap_model(model).parameters())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name), 60)
        resumed = train(Path(name), 60, Path(name) / "checkpoint")
        print("the same model:", all(map(torch.equal, whole, resumed)))
