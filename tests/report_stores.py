"""Stores and refused rows for tests of pages: chats with thoughts and tools, text with filters, hostile strings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.pipeline import PipelineConfig

HOSTILE = "<script>window.hacked=1</script> \u202eevil\u202c \x07 </pre><img src=x onerror=window.hacked=1>"
WORDS = "the river feeds a turbine through one gated pipe and water moves never more than it can take".split()  # noqa: SIM905
CALL = {"type": "function", "function": {"name": "level", "arguments": {"river": "Rhine"}}}


def tokenizer_folder(folder: Path) -> Path:
    """A small BPE tokenizer with the special tokens of Qwen's template, as files."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    texts = [*map(sentence, range(300)), *["user assistant system tool thinking"] * 9]
    made.train_from_iterator(texts, trainer)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    names += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    made.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    made.add_tokens([AddedToken(name, special=False) for name in names[3:]])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentence(seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, int(rng.integers(3, 40)))) + "."


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations with a system message, thoughts, a tool call, and one with hostile text."""
    rows = []
    for number in range(count):
        asked, said = sentence(number), sentence(number + 1000)
        messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "Answer in one sentence."})
        if number % 4 == 1:
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": '{"metres": 4.2}'},
            ]
        if number % 4 == 2:
            said = f"<think>\n{sentence(number + 2000)}\n</think>\n\n{said}"
        messages.append({"role": "assistant", "content": HOSTILE if number == 3 else said})
        if number % 2:
            messages += [{"role": "user", "content": "And \u65e5\u672c\u8a9e?"}, {"role": "assistant", "content": said}]
        rows.append({"messages": messages, "source": ["forum", "manual", "synthetic"][number % 3]})
    return rows


def chat_store(folder: Path, count: int = 60) -> Path:
    """A store of chats; three rows were refused, and are in its quarantine file."""
    rows = chats(count)
    bad = [
        {"messages": [{"role": "user", "content": "no answer here"}], "source": "forum"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}], "source": "forum"},
        {"messages": [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "ok"}]},
    ]
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    recipe = Recipe(tokenizer=str(tokenizer_folder(folder / "tiny")), template="qwen", keep=["source"])
    config = PipelineConfig(on_error="quarantine", workers=1)
    return Path(str(prepare(str(file), folder / "chats.store", recipe, config=config).path))


def text_store(folder: Path, count: int = 300) -> Path:
    """A store of texts, of which duplicates and short ones were dropped and long ones cut."""
    rows = [{"text": sentence(seed % 250) if seed % 10 else HOSTILE, "language": "en"} for seed in range(count)]
    rows += [{"text": "!!! " * 5, "language": "xx"}, {"text": "word " * 400, "language": "en"}]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(
        tokenizer=str(tokenizer_folder(folder / "tiny")),
        dedup=["exact"],
        transforms=[],
        max_length=60,
        truncation="right",
        keep=["language"],
    )
    return Path(str(prepare(str(file), folder / "texts.store", recipe, config=PipelineConfig(workers=1)).path))
