"""Hugging Face Trainer with a penstock loader: after a resume it ends with the same weights."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from penstock import PretrainDataLoader
from penstock.integrations.transformers import LoaderTrainer

SAMPLE = Path(__file__).parents[1] / "sample"


def train(folder: Path, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **shape))
    args = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=30,  # or num_train_epochs: epochs of the loader
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
        trainer = LoaderTrainer(model, args, train_dataset=loader)
        trainer.train(resume_from_checkpoint=checkpoint)
        print(f"step {trainer.state.global_step}; the loader is at step {loader.step}, epoch {loader.epoch}")
    return model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        resumed = train(Path(name), f"{name}/run/checkpoint-10")
        print("the same model:", all(torch.equal(whole[key], resumed[key]) for key in whole))
