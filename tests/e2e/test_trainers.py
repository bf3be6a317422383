"""Trainers see the batches of the loader and no others, in its order, also when they were stopped and resumed.

The classes that connect a trainer to a loader are those of `penstock.integrations`.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.forked_programs import ForkedProgram
from tests.lazy_modules import LazyModule
from tests.trainer_runs import (
    EXAMPLES,
    FOLDER,
    LEAF,
    Ids,
    Make,
    Witness,
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
    ConversationDataLoader,
    DataLoader,
    MixedDataLoader,
    PretrainDataLoader,
)
from penstock.loaders.adapters import RepeatLoader

torch = LazyModule("torch")
# Workers that are forked from a process in which another test has started JAX, or a thread.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
    pytest.mark.filterwarnings(r"ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]


# A plain loop


@pytest.mark.parametrize("kind", ["chopped", "packed", "mixed"])
def test_a_torch_loop_that_is_stopped_again_and_again_sees_what_an_endless_one_does(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    make: Make = request.getfixturevalue(kind)
    seen: Ids = []
    checkpoint = tmp_path / "checkpoint.pt"
    for stop in (3, 4, 11, 30):
        with make() as loader:
            if checkpoint.exists():
                loader.load_state_dict(torch.load(checkpoint, weights_only=True)["loader"])
            for batch in RepeatLoader(loader):
                seen.append(flat(batch.input_ids))
                if len(seen) == stop:
                    break
            torch.save({"loader": loader.state_dict()}, checkpoint)
    assert seen == ids(make, 30)


def test_an_endless_loader_ends_when_its_sources_are_used_up(stores: Path) -> None:
    def make() -> DataLoader:
        return MixedDataLoader({"text": stores / "text"}, {"text": 1.0}, chunk_size=16, batch_size=4, max_epochs=2)

    with make() as loader:
        seen = [flat(batch.input_ids) for batch in RepeatLoader(loader)]
        assert len(seen) == len(loader.plan.delivered_steps(0)) + len(loader.plan.delivered_steps(1))
    assert seen == ids(make, len(seen))


def test_an_endless_loader_in_use_goes_on_where_a_state_says(chopped: Make) -> None:
    expected = ids(chopped, 9)
    with chopped() as loader:
        endless = RepeatLoader(loader)
        running = iter(endless)
        next(running)
        state = endless.state_dict()
        for _ in range(4):
            next(running)
        endless.load_state_dict(state)
        assert [flat(next(running).input_ids) for _ in range(8)] == expected[1:]
    assert not hasattr(endless, "__len__")
    assert not hasattr(endless, "set_epoch")


def test_gradients_accumulated_over_two_batches_are_those_of_one_twice_as_large(stores: Path) -> None:
    model = example("torch_loop").Model()

    def gradients(batch_size: int, count: int) -> list[Any]:
        group = batches(lambda: PretrainDataLoader(stores / "text", chunk_size=16, batch_size=batch_size), count)
        items = sum(batch.num_items_in_batch for batch in group)
        model.zero_grad()
        for batch in group:
            (model(**batch) / items).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for one, other in zip(gradients(8, 1), gradients(4, 2)):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


# torch's DataLoader


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")  # Python 3.12 says so of any fork
@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn")])
def test_workers_of_a_torch_dataloader_give_the_batches_of_the_loader(
    workers: int, context: str | None, packed: Make
) -> None:
    if context == "fork" and not hasattr(os, "fork"):
        pytest.skip("there is no fork here")
    with packed() as loader:
        count = len(loader)
        expected = batches(packed, 2 * count)
        loader.set_epoch(0 if context != "spawn" else 1)
        around = torch.utils.data.DataLoader(
            loader,
            batch_size=None,
            sampler=loader.sampler(),
            num_workers=workers,
            multiprocessing_context=context,
        )
        seen = [batch for _ in range(2 if context != "spawn" else 1) for batch in around]
    expected = expected[-len(seen) :]
    assert [flat(batch.input_ids) for batch in seen] == [flat(batch.input_ids) for batch in expected]
    for got, wanted in zip(seen, expected):
        assert type(got) is type(wanted)
        assert got.as_dict().keys() == wanted.as_dict().keys()
        assert flat(got.labels) == flat(wanted.labels)
        assert flat(got.cu_seqlens) == flat(wanted.cu_seqlens)
        assert (got.num_items_in_batch, got.max_seqlen) == (wanted.num_items_in_batch, wanted.max_seqlen)
        assert (got.metadata["step"], got.metadata["epoch"]) == (wanted.metadata["step"], wanted.metadata["epoch"])
        assert got.metadata["row"].tolist() == wanted.metadata["row"].tolist()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_torch_dataloader_goes_on_from_a_batch_of_the_epoch(chopped: Make) -> None:
    with chopped() as loader:
        loader.seek(5)
        rest = torch.utils.data.DataLoader(
            loader, batch_size=None, sampler=loader.sampler(), num_workers=1, multiprocessing_context="fork"
        )
        assert [flat(batch.input_ids) for batch in rest] == ids(chopped, len(loader))[5:]


def test_items_of_any_epoch_of_a_mixture_are_the_batches_of_that_epoch(mixed: Make) -> None:
    with mixed() as walked, mixed() as loader:
        for epoch in range(5):
            expected = [flat(batch.input_ids) for batch in walked]
            assert loader.epoch == epoch
            rest = torch.utils.data.DataLoader(loader, batch_size=None, sampler=loader.sampler())
            assert [flat(batch.input_ids) for batch in rest] == expected


def test_items_leave_out_what_the_plan_skips(chopped: Make) -> None:
    with chopped() as loader:
        loader.edit(loader.plan.skip(2, 5))
        expected = [batch.metadata["step"] for batch in loader]
        loader.reset()
        assert [loader[number].metadata["step"] for number in range(len(loader))] == expected


# Hugging Face


@pytest.mark.parametrize("kind", ["packed", "mixed"])
def test_the_hugging_face_trainer_sees_the_batches_of_the_loader_and_resumes_exactly(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    make: Make = request.getfixturevalue(kind)
    steps, accumulate = 9, 3
    whole, weights = run_hf(make, tmp_path, steps, accumulate)
    expected = batches(make, steps * accumulate)
    assert expected[-1].metadata["epoch"] >= 2  # accumulation goes on from an epoch to the next, and resume too
    assert whole.ids == [flat(batch.input_ids) for batch in expected]
    assert whole.labels == [flat(batch.labels) for batch in expected]
    counted = [batch.num_items_in_batch for batch in expected]
    groups = [sum(counted[at : at + accumulate]) for at in range(0, len(counted), accumulate)]
    assert whole.items == [items for items in groups for _ in range(accumulate)]

    for step in (1, 4):
        checkpoint = str(tmp_path / "run" / f"checkpoint-{step}")
        resumed, again = run_hf(make, tmp_path / str(step), steps, accumulate, checkpoint=checkpoint)
        assert resumed.ids == whole.ids[step * accumulate :]
        assert resumed.items == whole.items[step * accumulate :]
        assert equal(weights, again)


def test_the_hugging_face_trainer_resumes_when_it_restores_its_callbacks_by_itself(
    chopped: Make, tmp_path: Path
) -> None:
    whole, weights = run_hf(chopped, tmp_path, 4, 1, restore_callback_states_from_checkpoint=True)
    resumed, again = run_hf(
        chopped,
        tmp_path / "again",
        4,
        1,
        checkpoint=str(tmp_path / "run" / "checkpoint-2"),
        restore_callback_states_from_checkpoint=True,
    )
    assert whole.ids == ids(chopped, 4)
    assert resumed.ids == whole.ids[2:]
    assert equal(weights, again)


def test_the_hugging_face_trainer_accumulates_to_the_weights_of_batches_twice_as_large(
    stores: Path, tmp_path: Path
) -> None:
    def make(batch_size: int) -> Make:
        return lambda: ConversationDataLoader(
            stores / "chats", max_length=32, packing="best_fit", padding_free=True, batch_size=batch_size
        )

    _, weights = run_hf(make(6), tmp_path / "one", 3, 1, optim="sgd", max_grad_norm=0.0)
    _, same = run_hf(make(3), tmp_path / "two", 3, 2, optim="sgd", max_grad_norm=0.0)
    _, fresh = run_hf(make(3), tmp_path / "none", 1, 1, optim="sgd", max_grad_norm=0.0)
    assert not all(torch.allclose(weights[key], fresh[key]) for key in weights)
    for key in weights:
        torch.testing.assert_close(weights[key], same[key])


def test_the_hugging_face_trainer_evaluates_on_the_whole_of_a_loader_each_time(
    chopped: Make, packed: Make, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    from penstock.integrations.transformers import LoaderTrainer

    model = tiny_llama()
    witness = Witness(model)
    args = transformers.TrainingArguments(
        **hf_arguments(tmp_path, 4), eval_strategy="steps", eval_steps=2, prediction_loss_only=True
    )
    with chopped() as loader, packed() as held_out:
        count = len(held_out)
        LoaderTrainer(model, args, train_dataset=loader, eval_dataset=held_out).train()
        assert loader.step == 4
    training, first = ids(chopped, 4), ids(packed, count)
    assert witness.ids == training[:2] + first + training[2:] + first


def test_the_state_is_in_the_checkpoint_as_json_and_another_plan_refuses_it(
    chopped: Make, packed: Make, tmp_path: Path
) -> None:
    run_hf(chopped, tmp_path, 3, 1)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["LoaderState"]
    assert saved["attributes"]["position"]["step"] == 2
    with pytest.raises(ValueError, match="plan"):
        run_hf(packed, tmp_path / "other", 3, 1, checkpoint=str(checkpoint))


def run_sft(make: Make, folder: Path, steps: int, accumulate: int, checkpoint: str | None = None) -> Any:
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    from penstock.integrations.trl import LoaderSFTTrainer

    model = tiny_llama()
    witness = Witness(model)
    args = trl.SFTConfig(**hf_arguments(folder, steps, accumulate), bf16=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES.parent / "sample" / "tokenizer")
    counted: list[int] = []

    class Counting(LoaderSFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            counted.append(int(num_items_in_batch))
            return super().compute_loss(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    with make() as loader:
        trainer = Counting(model, args, train_dataset=loader, processing_class=tokenizer)
        trainer.train(resume_from_checkpoint=checkpoint)
        tokens = trainer.state.log_history[-1]["num_tokens"]
    return witness, {key: value.clone() for key, value in model.state_dict().items()}, counted, tokens


def test_the_sft_trainer_learns_from_packed_masked_batches_and_resumes_exactly(packed: Make, tmp_path: Path) -> None:
    whole, weights, counted, tokens = run_sft(packed, tmp_path, 6, 2)
    expected = batches(packed, 12)
    assert whole.ids == [flat(batch.input_ids) for batch in expected]
    assert whole.labels == [flat(batch.labels) for batch in expected]
    assert all(-100 in labels for labels in whole.labels)
    pairs = zip(expected[::2], expected[1::2])
    assert counted[::2] == counted[1::2] == [a.num_items_in_batch + b.num_items_in_batch for a, b in pairs]
    assert tokens == sum(batch.num_tokens for batch in expected)

    resumed, again, _, _ = run_sft(packed, tmp_path / "again", 6, 2, str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.ids == whole.ids[8:]
    assert equal(weights, again)


# Lightning


def run_lightning(
    make: Make, folder: Path, *, hooks: bool = True, checkpoint: Path | None = None, **more: Any
) -> tuple[Ids, dict[str, Any], int]:
    """What was seen, the weights, and the step that the loader is at."""
    pl = pytest.importorskip("pytorch_lightning")
    from penstock.integrations.lightning import LoaderDataModule

    shown = example("lightning_fit")

    class Seeing(shown.Model):
        def __init__(self) -> None:
            super().__init__()
            self.ids: Ids = []

        def training_step(self, batch: Any) -> Any:
            self.ids.append(flat(batch.input_ids))
            return super().training_step(batch)

    pl.seed_everything(0, verbose=False)
    model, saving = Seeing(), more.pop("saving")
    trainer = pl.Trainer(
        **more,
        accelerator="cpu",
        callbacks=[pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, **saving)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with make() as loader:
        data = {"datamodule": LoaderDataModule(loader)} if hooks else {"train_dataloaders": loader}
        trainer.fit(model, **data, ckpt_path=checkpoint)
        return model.ids, {key: value.clone() for key, value in model.state_dict().items()}, loader.step


@LEAF
@FOLDER
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_resumes_exactly_in_the_middle_of_an_epoch(
    hooks: bool, accumulate: int, packed: Make, tmp_path: Path
) -> None:
    with packed() as loader:
        count = len(loader)
    assert count % (2 * accumulate), "a checkpoint at the end of an epoch would be another test"
    how = {"hooks": hooks, "saving": {"every_n_train_steps": 2}, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    whole, weights, step = run_lightning(packed, tmp_path, **how)
    resumed, again, same = run_lightning(packed, tmp_path, checkpoint=tmp_path / "step=2.ckpt", **how)
    assert step == same == 2 * count
    assert whole == ids(packed, 2 * count)
    assert resumed == whole[2 * accumulate :]
    assert equal(weights, again)


@LEAF
@FOLDER
@pytest.mark.parametrize("when", ["after its last batch", "after it"])
def test_lightning_resumes_exactly_at_the_end_of_an_epoch(when: str, packed: Make, tmp_path: Path) -> None:
    with packed() as loader:
        count = len(loader)
    saving = {"every_n_train_steps": count} if when == "after its last batch" else {"save_on_train_epoch_end": True}
    how = {"saving": saving, "max_epochs": 2}
    whole, weights, _ = run_lightning(packed, tmp_path, **how)
    resumed, again, _ = run_lightning(packed, tmp_path, checkpoint=tmp_path / f"step={count}.ckpt", **how)
    assert whole == ids(packed, 2 * count)
    assert resumed == whole[count:]
    assert equal(weights, again)


@LEAF
@FOLDER
def test_lightning_told_how_many_steps_to_take_gets_every_epoch_of_a_mixture_whole(mixed: Make, tmp_path: Path) -> None:
    how = {"saving": {"every_n_train_steps": 1}, "max_steps": 30, "max_epochs": -1}
    whole, weights, _ = run_lightning(mixed, tmp_path, **how)
    expected = batches(mixed, 30)
    assert whole == [flat(batch.input_ids) for batch in expected]
    epochs = [batch.metadata["epoch"] for batch in expected]
    ends = [step for step in range(1, 30) if epochs[step] != epochs[step - 1]]
    assert len(ends) >= 2
    for step in (ends[1] - 1, ends[1], ends[1] + 1):
        resumed, again, _ = run_lightning(mixed, tmp_path, checkpoint=tmp_path / f"step={step}.ckpt", **how)
        assert resumed == whole[step:]
        assert equal(weights, again)


# Accelerate


def test_accelerate_leaves_the_loader_as_it_is_and_keeps_its_state(mixed: Make, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from penstock.integrations.accelerate import LoaderFeed

    expected = ids(mixed, 12)
    accelerator = accelerate.Accelerator(cpu=True)
    with mixed() as loader:
        assert accelerator.prepare(loader) is loader
        seen = []
        for batch in LoaderFeed(accelerator, loader, max_steps=12):
            seen.append(flat(batch.input_ids))
            if len(seen) == 7:
                accelerator.save_state(tmp_path / "checkpoint")
    assert seen == expected
    accelerator = accelerate.Accelerator(cpu=True)
    with mixed() as loader:
        feed = LoaderFeed(accelerator, loader, max_steps=12)
        accelerator.load_state(tmp_path / "checkpoint")
        assert [flat(batch.input_ids) for batch in feed] == expected[7:]
        assert list(feed) == []


RANK_SCRIPT = """
import json, os, sys
from datetime import timedelta
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from penstock import ConversationDataLoader
from penstock.integrations.transformers import LoaderTrainer

store, folder = sys.argv[1:]
torch.set_num_threads(1)
second = os.fork()  # of a process that has imported all of this
rank = 0 if second else 1
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=100)
)
found = {"accelerate": [], "trainer": [], "items": []}

accelerator = Accelerator(cpu=True)
assert (accelerator.num_processes, accelerator.process_index) == (2, rank)
with ConversationDataLoader(store, max_length=32, packing="best_fit", batch_size=2, drop_last=True) as loader:
    assert loader.rank.world_size == 2
    for batch in accelerator.prepare(loader):
        found["accelerate"].append([batch.metadata["step"], batch.input_ids.tolist(), batch.num_items_in_batch])

class Noting(LoaderTrainer):
    def compute_loss(self, model, inputs, num_items_in_batch=None, **more):
        found["trainer"].append(inputs["input_ids"].tolist())
        found["items"].append(int(num_items_in_batch))
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **more)

shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape))
args = TrainingArguments(output_dir=folder, max_steps=3, save_strategy="no", report_to="none", disable_tqdm=True,
                         use_cpu=True, ddp_backend="gloo")
with ConversationDataLoader(store, max_length=32, packing="best_fit", batch_size=2, drop_last=True) as loader:
    Noting(model, args, train_dataset=loader).train()
with open(f"{folder}/rank{rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
if rank == 1:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""


@pytest.mark.slow
def test_two_ranks_share_each_global_batch_and_nothing_shards_it_again(stores: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    # The port is asked for and not used: the processes meet at a file.
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    said = tmp_path / "said"
    program = ForkedProgram(
        script, str(stores / "chats"), str(tmp_path), said=said, environment={**os.environ, **common}
    )
    try:
        assert program.wait(150) == 0, said.read_text()
    finally:
        program.close()
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    with ConversationDataLoader(
        stores / "chats", max_length=32, packing="best_fit", batch_size=4, drop_last=True
    ) as loader:
        expected = list(loader)
    assert len(expected) > 3
    for way, count in (("accelerate", len(expected)), ("trainer", 3)):
        assert len(ranks[0][way]) == len(ranks[1][way]) == count
    for step, batch in enumerate(expected):
        (first, mine, items), (second, theirs, same) = ranks[0]["accelerate"][step], ranks[1]["accelerate"][step]
        assert first == second == step
        assert mine + theirs == batch.input_ids.tolist()
        assert items == same == batch.num_items_in_batch
    for step, batch in enumerate(expected[:3]):
        assert ranks[0]["trainer"][step] + ranks[1]["trainer"][step] == batch.input_ids.tolist()
        assert ranks[0]["items"][step] == ranks[1]["items"][step] == batch.num_items_in_batch


# The examples

PRINTS = {
    "accelerate_loop": (["accelerate"], ["step 60, epoch 1", "the same model: True"]),
    "hf_trainer": (["transformers", "accelerate"], ["step 30; the loader is at step 60", "the same model: True"]),
    "lightning_fit": (
        ["pytorch_lightning"],
        ["the same model from step 23 on: True", "the same model from step 46 on: True"],
    ),
    "torch_dataloader": ([], ["92 batches of 2 workers, the same: True", "from batch 20 on: True"]),
    "torch_loop": ([], ["step 25, epoch 0", "the same batches: True", "the same model: True"]),
    "trl_sft": (["trl", "datasets"], ["step 12; the loader is at step 12", "the same model: True"]),
}


def test_every_training_example_is_tested_and_short() -> None:
    files = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(PRINTS)
    assert not [name for name, path in files.items() if len(path.read_text().splitlines()) > 80]


@LEAF
@FOLDER
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", PRINTS)
def test_a_training_example_runs_and_prints_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages, promised = PRINTS[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert not [text for text in promised if text not in printed], printed
    assert not list(tmp_path.iterdir()), "it left something behind"
