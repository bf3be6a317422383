"""TRL's SFTTrainer with packed, masked chats of a penstock loader: TRL tokenizes, packs and collates nothing."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig

from penstock import ConversationDataLoader
from penstock.integrations.trl import LoaderSFTTrainer

SAMPLE = Path(__file__).parents[1] / "sample"


def train(folder: Path, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **shape))
    args = SFTConfig(
        output_dir=str(folder / "run"),
        max_steps=12,
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    with ConversationDataLoader(
        SAMPLE / "chats.jsonl", SAMPLE / "tokenizer", max_length=128, chat_template="chatml", packing="best_fit",
        padding_free=True, batch_size=2, cache_dir=folder,
    ) as loader:  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
        trainer = LoaderSFTTrainer(model, args, train_dataset=loader, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=checkpoint)
        print(f"step {trainer.state.global_step}; the loader is at step {loader.step}, epoch {loader.epoch}")
    return model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        resumed = train(Path(name), f"{name}/run/checkpoint-5")
        print("the same model:", all(torch.equal(whole[key], resumed[key]) for key in whole))
