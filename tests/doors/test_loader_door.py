"""The door of design document 000: its names, its signatures, and its usage examples as it prints them.

The example for rollouts is in test_rl_door.py.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import penstock
from penstock import ConversationDataLoader, DataLoader, MixedDataLoader, PretrainDataLoader, TrainingBatch

SFT = """
    loader = ConversationDataLoader(
        path="sft_data.jsonl",
        tokenizer=tokenizer,
        max_length=2048,
        chat_template="chatml"
    )
    batch = loader.get_batch(batch_size=32)
"""
PRETRAINING = """
    loader = PretrainDataLoader(
        path="corpus/",
        tokenizer=tokenizer,
        chunk_size=2048,
        streaming=True
    )
    for batch in loader.get_iterator():
        # Train on batch
        train(batch)
"""
TEXTS = [f"Penstock number {number} feeds its turbine, and never more than it can take. " * 40 for number in range(30)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files of the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chats = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(50)
    ]
    (tmp_path / "sft_data.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        rows = [json.dumps({"text": text}) + "\n" for text in TEXTS[number::3]]
        (tmp_path / "corpus" / f"part-{number}.jsonl").write_text("".join(rows))
    return tmp_path


def run(example: str, **names: Any) -> dict[str, Any]:
    """Run an example; what it names in the end."""
    exec(compile(textwrap.dedent(example), "<the document>", "exec"), names)
    return names


def test_the_example_for_fine_tuning_runs_as_printed(home: Path, tokenizer: Any) -> None:
    import torch

    there = run(SFT, ConversationDataLoader=ConversationDataLoader, tokenizer=tokenizer)
    batch: TrainingBatch = there["batch"]
    assert isinstance(batch, TrainingBatch)
    assert batch.batch_size == 32
    for part in (batch.input_ids, batch.attention_mask, batch.labels, batch.loss_mask):
        assert isinstance(part, torch.Tensor)
        assert part.shape == batch.input_ids.shape
    for place, row in enumerate(batch.metadata["row"].tolist()):
        learned = batch.input_ids[place][batch.labels[place] != -100].tolist()
        assert tokenizer.decode(learned, skip_special_tokens=False) == f"It is {row}.<|im_end|>"
    assert isinstance(batch.metadata, dict)
    there["loader"].close()


def test_the_example_for_pretraining_runs_as_printed(home: Path, tokenizer: Any) -> None:
    seen: list[TrainingBatch] = []
    there = run(PRETRAINING, PretrainDataLoader=PretrainDataLoader, tokenizer=tokenizer, train=seen.append)
    assert {batch.input_ids.shape[1] for batch in seen} == {2048}
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(TEXTS))
    found = sum(int(batch.attention_mask.sum()) for batch in seen)
    assert found in (tokens, tokens + len(TEXTS)), "every token once, and an end to every document if there is one"
    assert not (home / "cache").exists() or not list((home / "cache").rglob("manifest.json")), "nothing is prepared"
    there["loader"].close()


def test_the_example_for_pretraining_runs_without_streaming_too(home: Path, tokenizer: Any) -> None:
    example = PRETRAINING.replace("streaming=True", "streaming=False")
    seen: list[TrainingBatch] = []
    there = run(example, PretrainDataLoader=PretrainDataLoader, tokenizer=tokenizer, train=seen.append)
    assert len(seen) == there["loader"].get_num_batches() or there["loader"].epoch == 1
    assert sum(batch.num_tokens for batch in seen) >= sum(len(e.ids) for e in tokenizer.encode_batch(TEXTS))
    assert list((home / "cache").rglob("manifest.json"))


def test_a_tokenizer_of_transformers_or_a_path_gives_the_same_batch(home: Path, tokenizer: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    (home / "model").mkdir()
    tokenizer.save(str(home / "model" / "tokenizer.json"))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    batches = [
        run(SFT, ConversationDataLoader=ConversationDataLoader, tokenizer=given)["batch"]
        for given in (tokenizer, wrapped, home / "model", str(home / "model" / "tokenizer.json"))
    ]
    assert all(batch.input_ids.equal(batches[0].input_ids) for batch in batches)
    assert all(batch.labels.equal(batches[0].labels) for batch in batches)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("get_batch", ["batch_size"]), ("get_iterator", []), ("get_num_batches", []), ("reset", [])],
)
def test_every_loader_has_the_methods_of_the_document(name: str, arguments: list[str]) -> None:
    for kind in (DataLoader, ConversationDataLoader, PretrainDataLoader, MixedDataLoader):
        assert list(inspect.signature(getattr(kind, name)).parameters) == ["self", *arguments]
        assert issubclass(kind, DataLoader)


def test_a_batch_begins_with_the_fields_of_the_document() -> None:
    names = [part.name for part in fields(TrainingBatch)]
    assert names[:5] == ["input_ids", "attention_mask", "labels", "loss_mask", "metadata"]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ConversationDataLoader, ["path", "tokenizer", "max_length", "chat_template"]),
        (PretrainDataLoader, ["path", "tokenizer", "chunk_size", "streaming"]),
    ],
)
def test_constructors_take_the_arguments_of_the_document(kind: type, arguments: list[str]) -> None:
    assert list(inspect.signature(kind).parameters)[: len(arguments)] == arguments


def test_an_iterator_is_what_the_document_says(home: Path, tokenizer: Any) -> None:
    loader = ConversationDataLoader(path="sft_data.jsonl", tokenizer=tokenizer, chat_template="chatml", batch_size=8)
    batches = loader.get_iterator()
    assert isinstance(batches, Iterator)
    assert len(list(batches)) == loader.get_num_batches() == 7
    loader.reset()
    again = [batch.metadata["row"].tolist() for batch in loader.get_iterator()]
    loader.reset()
    assert [loader.get_batch(batch_size=8).metadata["row"].tolist() for _ in range(7)] == again


def test_the_names_are_imported_from_the_package() -> None:
    for name in (
        "DataLoader",
        "TrainingBatch",
        "ConversationDataLoader",
        "PretrainDataLoader",
        "MixedDataLoader",
        "Plan",
    ):
        assert name in penstock.__all__
        assert getattr(penstock, name).__name__ == name
