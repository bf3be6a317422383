"""Hugging Face Trainer with a penstock loader: after a resume it ends with the same weights."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

from penstock import PretrainDataLoader, RepeatLoader

SAMPLE = Path(__file__).parents[1] / "sample"


class FedTrainer(Trainer):
    def get_train_dataloader(self) -> RepeatLoader:
        return RepeatLoader(self.train_dataset)  # not prepared by Accelerate, which would shard it again


class LoaderState(TrainerCallback, ExportableState):
    """State of the loader, saved in the trainer_state.json of every checkpoint."""

    loader: Any = None

    def state(self) -> dict[str, Any]:
        position = None if self.loader is None else self.loader.state_dict()
        return {"args": {}, "attributes": {"position": position}}

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        self.loader = train_dataloader
        if state.global_step:
            self.loader.load_state_dict(state.stateful_callbacks["LoaderState"]["attributes"]["position"])


def train(folder: Path, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **shape))
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=30,  # steps, not epochs: the loader counts epochs
        ignore_data_skip=True,  # the loader seeks by itself
        gradient_accumulation_steps=2,
        save_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    with PretrainDataLoader(
        SAMPLE / "documents.jsonl", SAMPLE / "tokenizer", chunk_size=64, batch_size=4, packing="best_fit",
        truncation="split", cache_dir=folder,
    ) as loader:  # fmt: skip
        trainer = FedTrainer(model, args, train_dataset=loader, callbacks=[LoaderState()])
        trainer.train(resume_from_checkpoint=checkpoint)
        print(f"step {trainer.state.global_step}; the loader is at step {loader.step}, epoch {loader.epoch}")
    return model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        resumed = train(Path(name), f"{name}/run/checkpoint-10")
        print("the same model:", all(torch.equal(whole[key], resumed[key]) for key in whole))
