"""Plain torch loop: stopped in the middle of an epoch, it resumes with the exact next batch."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from penstock import PretrainDataLoader

SAMPLE = Path(__file__).parents[1] / "sample"


class Model(nn.Module):
    """Model that predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(1024, 32), nn.Linear(32, 1024))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> torch.Tensor:
        scores = self.layers(input_ids)[:, :-1].flatten(0, 1)  # labels come unshifted; the model shifts them
        return nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")


def train(folder: Path, steps: int, seen: list[list[int]]) -> Model:
    """Train up to a total number of steps; resumes from the checkpoint if there is one."""
    torch.manual_seed(0)
    model, checkpoint = Model(), folder / "checkpoint.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, batch_size=4, cache_dir=folder
    ) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        while loader.step < steps:
            for batch in loader:  # the rest of the epoch
                loss = model(**batch) / batch.num_items_in_batch
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(batch.input_ids.flatten().tolist())
                if loader.step == steps:
                    break
        print(f"step {loader.step}, epoch {loader.epoch}, loss {loss.item():.3f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, checkpoint)
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
        whole: list[list[int]] = []
        parts: list[list[int]] = []
        one = train(Path(once), 60, whole)
        train(Path(twice), 25, parts)
        other = train(Path(twice), 60, parts)
        print("the same batches:", whole == parts)
        print("the same model:", all(map(torch.equal, one.parameters(), other.parameters())))
