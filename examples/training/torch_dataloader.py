"""torch's DataLoader with worker processes: the loader's sampler yields the keys of the batches of each epoch."""

import tempfile
from pathlib import Path

import torch

from penstock import PretrainDataLoader

SAMPLE = Path(__file__).parents[1] / "sample"


def main(folder: Path) -> None:
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, batch_size=4, cache_dir=folder
    ) as loader:
        expected = [batch.input_ids for _ in range(2) for batch in loader]
        loader.reset()

        # Batches are complete, shuffled and sharded: no batch_size, no shuffle, and the loader's sampler.
        batches = torch.utils.data.DataLoader(loader, batch_size=None, sampler=loader.sampler(), num_workers=2)
        seen = [batch.input_ids for _ in range(2) for batch in batches]  # a second loop is the next epoch
        print(f"{len(seen)} batches of 2 workers, the same:", all(map(torch.equal, seen, expected)))

        # Only the training loop knows which batch it used last: save batch.metadata["step"] + 1 and seek there.
        loader.seek(20)
        print(
            "from batch 20 on:", all(torch.equal(a.input_ids, b) for a, b in zip(batches, expected[20:], strict=False))
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
