"""torch's own DataLoader with worker processes: it takes batch i of a penstock loader as item i of a dataset."""

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

        seen = []
        for epoch in range(2):
            loader.set_epoch(epoch)  # before the workers start, which is when the loop does
            # Batches are whole already, so batch_size=None; they are shuffled and sharded too, so no sampler.
            for batch in torch.utils.data.DataLoader(loader, batch_size=None, num_workers=2):
                seen.append(batch.input_ids)
        print(f"{len(seen)} batches of 2 workers, the same:", all(map(torch.equal, seen, expected)))

        # The position is the caller's here: going on after batch 20 is a range that begins there.
        loader.set_epoch(0)
        rest = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=2, sampler=range(20, len(loader)))
        print("from batch 20 on:", all(torch.equal(a.input_ids, b) for a, b in zip(rest, expected[20:], strict=False)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
