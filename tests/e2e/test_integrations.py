"""Classes of `penstock.integrations`: epochs, validation, DPO and GRPO, and what cannot work."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lazy_modules import LazyModule
from tests.trainer_runs import (
    EXAMPLES,
    LEAF,
    Ids,
    Make,
    batches,
    equal,
    example,
    flat,
    hf_arguments,
    ids,
    run_hf,
    tiny_llama,
)

from penstock import (
    DataLoader,
    MixedDataLoader,
    PreferenceDataLoader,
    PretrainDataLoader,
    Rollout,
    RolloutDataLoader,
)
from penstock.errors import ConfigError, ResumeError

torch = LazyModule("torch")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_hugging_face_trainer_counts_the_epochs_of_the_loader(mixed: Make, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations.transformers import LoaderTrainer

    with mixed() as loader:
        counts = [loader.num_batches_of_epoch(epoch) for epoch in range(3)]
        given = hf_arguments(tmp_path, -1, 2) | {"save_strategy": "epoch", "num_train_epochs": 3}
        trainer = LoaderTrainer(tiny_llama(), transformers.TrainingArguments(**given), train_dataset=loader)
        trainer.train()
    steps = -(-sum(counts) // 2)
    assert trainer.state.global_step == steps
    ends = {-(-sum(counts[: epoch + 1]) // 2) for epoch in range(3)}
    saved = {int(path.name.rpartition("-")[2]): path for path in (tmp_path / "run").glob("checkpoint-*")}
    assert set(saved) == ends
    half = json.loads((saved[min(ends)] / "trainer_state.json").read_text())["epoch"]
    assert 1 <= half < 1.5


def test_a_checkpoint_of_another_trainer_and_a_loader_of_other_ranks_are_refused(stores: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations.transformers import LoaderTrainer

    args = transformers.TrainingArguments(**hf_arguments(tmp_path, 2))
    with PretrainDataLoader(stores / "text", chunk_size=16, batch_size=4, rank=1, world_size=2) as loader:
        with pytest.raises(ConfigError, match="2 ranks"):
            LoaderTrainer(tiny_llama(), args, train_dataset=loader).train()
        with pytest.raises(ConfigError, match="train_dataset"):
            LoaderTrainer(tiny_llama(), args, train_dataset=[1, 2])
    run_hf(lambda: PretrainDataLoader(stores / "text", chunk_size=16, batch_size=4), tmp_path, 2, 1)
    path = tmp_path / "run" / "checkpoint-1" / "trainer_state.json"
    state = json.loads(path.read_text())
    del state["stateful_callbacks"]["LoaderState"]
    path.write_text(json.dumps(state))
    with pytest.raises(ResumeError, match="step 1"):
        run_hf(
            lambda: PretrainDataLoader(stores / "text", chunk_size=16, batch_size=4),
            tmp_path / "again",
            2,
            1,
            checkpoint=str(path.parent),
        )


def trl_parts(kind: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Trainer, arguments and model of a kind, and what else the trainer is given."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    from penstock.integrations import trl as ours

    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES.parent / "sample" / "tokenizer", eos_token="z")
    tokenizer.pad_token = tokenizer.eos_token
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1024, **shape))
    settings = hf_arguments(folder, 4) | {"bf16": False}
    if kind == "dpo":
        given = {"model": model, "ref_model": copy.deepcopy(model), "processing_class": tokenizer}
        return ours.LoaderDPOTrainer, trl.DPOConfig(**settings), given
    return ours.LoaderGRPOTrainer, trl.GRPOConfig(**settings), {"model": model, "processing_class": tokenizer}


def preferences() -> DataLoader:
    sample = EXAMPLES.parent / "sample"
    return PreferenceDataLoader(
        sample / "pairs.jsonl", sample / "tokenizer", max_length=256, chat_template="chatml", batch_size=2
    )


def rollouts() -> DataLoader:
    rows = [
        Rollout(
            prompt_ids=[3, 4 + n // 4],
            response_ids=[7, 8, 9, 10][: 2 + n % 3],
            reward=float(n % 2),
            logprobs=[-1.0] * (2 + n % 3),
        )
        for n in range(16)
    ]
    return RolloutDataLoader(rows, preset="trl", batch_size=8, pad_id=0)


@pytest.mark.parametrize(("kind", "make"), [("dpo", preferences), ("grpo", rollouts)])
def test_trls_other_trainers_learn_from_the_batches_of_the_loader_and_resume_exactly(
    kind: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[int] = []
    monkeypatch.setattr(RolloutDataLoader, "commit", lambda loader: committed.append(loader.step))

    def run(folder: Path, checkpoint: str | None = None) -> tuple[list[Any], dict[str, Any]]:
        trainer, args, given = trl_parts(kind, folder)
        seen: list[Any] = []

        class Seeing(trainer):  # type: ignore[misc,valid-type]
            def compute_loss(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
                seen.append(flat(inputs["input_ids" if kind == "dpo" else "completion_ids"]))
                return super().compute_loss(model, inputs, *more, **others)

        with make() as loader:
            Seeing(**given, args=args, train_dataset=loader).train(resume_from_checkpoint=checkpoint)
        return seen, {key: value.clone() for key, value in given["model"].state_dict().items()}

    whole, weights = run(tmp_path)
    expected = batches(make, 4)
    assert whole == [flat(batch.input_ids if kind == "dpo" else batch.responses) for batch in expected]
    assert committed == ([1, 2, 3, 4] if kind == "grpo" else [])
    resumed, again = run(tmp_path / "again", str(tmp_path / "run" / "checkpoint-2"))
    assert resumed == whole[2:]
    assert equal(weights, again)
    fresh = trl_parts(kind, tmp_path)[2]["model"].state_dict()
    assert not equal(weights, fresh)


def test_trls_options_that_a_loader_replaces_are_refused(packed: Make, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from penstock.integrations.trl import LoaderDPOTrainer, LoaderSFTTrainer

    with packed() as loader:
        with pytest.raises(ConfigError, match="packing"):
            LoaderSFTTrainer(
                tiny_llama(), trl.SFTConfig(**hf_arguments(tmp_path, 1), packing=True), train_dataset=loader
            )
        with pytest.raises(ConfigError, match="PreferenceDataLoader"):
            LoaderDPOTrainer(tiny_llama(), train_dataset=loader)


@LEAF
def test_lightning_validates_on_the_whole_of_a_loader_and_refuses_epochs_that_it_would_cut(
    chopped: Make, packed: Make, stores: Path
) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from penstock.integrations.lightning import LoaderDataModule

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    seen: Ids = []

    model = example("lightning_fit").Model

    class Validated(model):  # type: ignore[misc,valid-type]
        def validation_step(self, batch: Any) -> None:
            seen.append(flat(batch.input_ids))

    with chopped() as loader, packed() as held_out:
        count = len(held_out)
        trainer = pl.Trainer(max_epochs=2, num_sanity_val_steps=0, enable_checkpointing=False, **quiet)
        trainer.fit(Validated(), datamodule=LoaderDataModule(loader, held_out))
    assert seen == ids(packed, count) * 2
    with MixedDataLoader(
        {"text": stores / "text", "chats": stores / "chats"}, {"text": 0.7, "chats": 0.3}, chunk_size=16, batch_size=1
    ) as loader:
        counts = [loader.num_batches_of_epoch(epoch) for epoch in range(3)]
        assert len(set(counts)) > 1
        trainer = pl.Trainer(max_epochs=3, enable_checkpointing=False, **quiet)
        with pytest.raises(ConfigError, match=f"max_steps={sum(counts)}"):
            trainer.fit(model(), datamodule=LoaderDataModule(loader))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_loader_is_saved_and_restored_by_a_distributed_checkpoint_of_torch(chopped: Make, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with chopped() as loader:
        loader.edit(loader.plan.skip(4, 6))
        seen = [flat(loader.get_batch().input_ids) for _ in range(3)]
        dcp.save({"loader": loader}, checkpoint_id=tmp_path / "saved")
        following = flat(loader.get_batch().input_ids)
    with chopped() as loader:
        dcp.load({"loader": loader}, checkpoint_id=tmp_path / "saved")
        assert (loader.step, len(loader.plan.edits)) == (len(seen), 1)
        assert flat(loader.get_batch().input_ids) == following


def test_a_worker_of_ray_has_its_rank_and_restores_the_loader_from_a_checkpoint(
    chopped: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the two functions of Ray that are called, and its checkpoint, which gives a folder."""
    from penstock.integrations.ray_train import LoaderCheckpoint, find_ray_rank

    checkpoint: Any = SimpleNamespace(as_directory=lambda: nullcontext(str(tmp_path)))
    where = SimpleNamespace(get_world_rank=lambda: 1, get_world_size=lambda: 4)
    train = SimpleNamespace(get_context=lambda: where, get_checkpoint=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    assert find_ray_rank() == {"rank": 1, "world_size": 4}
    with chopped() as loader:
        saved = LoaderCheckpoint(loader)
        assert not saved.restore()
        with pytest.raises(ResumeError, match="penstock_loader"):
            saved.restore(checkpoint)
        loader.get_batch()
        saved.save(tmp_path)
        following = flat(loader.get_batch().input_ids)
    train.get_checkpoint = lambda: checkpoint
    with chopped() as loader:
        assert LoaderCheckpoint(loader).restore()
        assert flat(loader.get_batch().input_ids) == following


MISSING = """
import importlib, sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "trl", "lightning", "pytorch_lightning", "accelerate", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Missing)
for name in ("transformers", "trl", "lightning", "accelerate", "ray_train"):
    try:
        importlib.import_module(f"penstock.integrations.{name}").find_ray_rank()
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_a_trainer_that_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["transformers", "trl", "lightning", "accelerate", "ray_train"]
    assert all("is not installed" in line and "pip install 'penstock[" in line for line in lines)
