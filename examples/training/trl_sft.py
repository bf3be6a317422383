"""TRL's SFTTrainer with packed, masked chats of a penstock loader: TRL tokenizes, packs and collates nothing."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from transformers.trainer_callback import ExportableState
from trl import SFTConfig, SFTTrainer

from penstock import ConversationDataLoader, RepeatLoader

SAMPLE = Path(__file__).parents[1] / "sample"


class FedTrainer(SFTTrainer):
    loader: RepeatLoader

    def get_train_dataloader(self) -> RepeatLoader:
        return self.loader


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
    args = SFTConfig(
        output_dir=str(folder / "run"),
        max_steps=12,
        ignore_data_skip=True,  # the loader seeks by itself
        dataset_kwargs={"skip_prepare_dataset": True},
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
        asked_for = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})  # TRL requires a dataset; it is never read
        tokenizer = AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")
        trainer = FedTrainer(
            model, args, train_dataset=asked_for, processing_class=tokenizer, callbacks=[LoaderState()]
        )
        trainer.loader = RepeatLoader(loader)
        trainer.train(resume_from_checkpoint=checkpoint)
        print(f"step {trainer.state.global_step}; the loader is at step {loader.step}, epoch {loader.epoch}")
    return model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        resumed = train(Path(name), f"{name}/run/checkpoint-5")
        print("the same model:", all(torch.equal(whole[key], resumed[key]) for key in whole))
