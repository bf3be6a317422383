"""One rank of a training run: `python training.py RUN STEPS WORLD_SIZE RANK`, in the directory of the data.

Every step is appended to a log, with a hash of each sample. Rank 0 regularly saves the model and the state of the
loader; the next run resumes from them.
"""

import json
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import nn

from penstock import TrainingBatch
from penstock.loaders.adapters import RepeatLoader
from penstock.loaders.loader_file import load_config

GLOBAL_BATCH = 8
FIELDS = ("input_ids", "labels", "loss_mask", "position_ids", "document_ids", "attention_mask")


class Model(nn.Module):
    """One block of attention, within documents only."""

    def __init__(self, vocabulary: int = 1024, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, batch: TrainingBatch) -> torch.Tensor:
        """Summed loss. Labels come unshifted; the model shifts them."""
        hidden = self.tokens(batch.input_ids) + self.places(batch.position_ids)
        query, key, value = (part.unsqueeze(1) for part in self.mix(hidden).chunk(3, dim=-1))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=batch.block_mask())
        scores = self.scores(self.norm(hidden + self.out(seen.squeeze(1))))
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")


def sample_hashes(batch: TrainingBatch) -> list[str]:
    """Hash of all fields of each sample."""
    arrays = batch.to_numpy()
    rows = range(batch.batch_size)
    return [xxhash.xxh3_64_hexdigest(b"".join(arrays[field][row].tobytes() for field in FIELDS)) for row in rows]


def train(run: int, steps: int, world: int, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=Path(f"meet-{run}").resolve().as_uri(), rank=rank, world_size=world)
    model, checkpoint, process = Model(), Path("checkpoint.pt"), psutil.Process()
    # The rank comes from torch.distributed. The global batch is the same for any number of ranks.
    loader = load_config("train.yaml", [f"batch_size={GLOBAL_BATCH // world}"]).open()
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
    with loader, Path(f"log-{run}-{rank}.jsonl").open("w") as log:
        batches, asked = iter(RepeatLoader(loader)), time.perf_counter()
        while loader.step < steps:
            batch = next(batches)
            got = time.perf_counter()
            loss = model(batch) / batch.num_items_in_batch
            loss.backward()
            dist.all_reduce(loss.detach())  # in place: the loss of the global batch, for the display
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # a sum: the loss was divided by the items of all ranks
                parameter.data -= 0.5 * parameter.grad  # any optimizer of torch.optim takes a second to load
                parameter.grad = None
            if rank == 0 and loader.step % (steps // 7) == 0:
                save(checkpoint, model=model.state_dict(), loader=loader.state_dict())
            ended = time.perf_counter()
            facts = {"step": batch.metadata["step"], "tokens": batch.num_tokens, "loss": loss.item()}
            facts |= {"wait": got - asked, "took": ended - asked, "memory": process.memory_info().rss}
            print(json.dumps(facts | {"samples": sample_hashes(batch)}), file=log, flush=True)
            asked = time.perf_counter()
    dist.destroy_process_group()


def save(path: Path, **state: object) -> None:
    """Save atomically, so that a kill leaves the old file or the new one."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
