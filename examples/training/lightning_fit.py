"""Lightning: the loader's state is part of its checkpoints, in the middle of an epoch and at the end of one."""

import tempfile
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn

from penstock import PretrainDataLoader, TrainingBatch
from penstock.integrations.lightning import LoaderDataModule

SAMPLE = Path(__file__).parents[1] / "sample"


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(1024, 32), nn.Linear(32, 1024))

    def training_step(self, batch: TrainingBatch) -> torch.Tensor:
        scores = self.layers(batch.input_ids)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, batch.labels[:, 1:].flatten(), reduction="sum")
        return loss / batch.num_items_in_batch * self.trainer.world_size  # gradients are averaged over the ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(folder: Path, checkpoint: Path | None = None) -> Model:
    pl.seed_everything(0, verbose=False)
    model = Model()
    saving = pl.callbacks.ModelCheckpoint(folder / "run", "{step}", every_n_train_steps=23, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[saving], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, batch_size=4, cache_dir=folder
    ) as loader:
        trainer.fit(model, datamodule=LoaderDataModule(loader), ckpt_path=checkpoint)
        print(f"step {trainer.global_step}; the loader is at step {loader.step}, epoch {loader.epoch}")
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        for step in (23, 46):  # in the middle of the first epoch, and at its end
            resumed = train(Path(name), Path(name) / "run" / f"step={step}.ckpt")
            print(
                f"the same model from step {step} on:", all(map(torch.equal, whole.parameters(), resumed.parameters()))
            )
