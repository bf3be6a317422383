"""Real text from what is installed: the sources and documents of Python and its packages, as JSONL under `.data/`."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from corpus import DATA

_SUFFIXES = {".py", ".md", ".rst", ".txt"}
_MOST_BYTES, _DOCUMENT = 200_000, 3_000
_VOCABULARY = 32_000
_TURNS = ["user", "assistant"]


def make_text(megabytes: float) -> Path:
    """Documents of about 3 KB, cut at blank lines, until there are enough."""
    path = DATA / f"realtext-v2-{megabytes:g}mb.jsonl"
    if not path.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        written = 0
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as out:
            for number, text in enumerate(_documents()):
                written += out.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")
                if written >= megabytes * 1e6:
                    break
        partial.rename(path)
    return path


def make_chats(megabytes: float) -> Path:
    """Conversations of one to three turns, cut out of the same documents."""
    path = DATA / f"realchat-v2-{megabytes:g}mb.jsonl"
    if not path.exists():
        draw, written = random.Random(7), 0
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as out:
            for text in _documents():
                pieces = [text[i : i + 500].strip() or "..." for i in range(0, len(text), 500)][
                    : 2 * draw.randint(1, 3)
                ]
                messages = [{"role": _TURNS[i % 2], "content": piece} for i, piece in enumerate(pieces)]
                if len(messages) % 2:
                    messages.append({"role": "assistant", "content": "Yes."})
                written += out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                if written >= megabytes * 1e6:
                    break
        partial.rename(path)
    return path


def make_tokenizer() -> Path:
    """A byte-level BPE of 32,000 tokens trained on the first documents, with a ChatML template and its tokens."""
    home = DATA / "tokenizer-32k"
    if not (home / "tokenizer_config.json").exists():
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        home.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        trainer = trainers.BpeTrainer(
            vocab_size=_VOCABULARY,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        some = (text for number, text in zip(range(8000), _documents()))
        tokenizer.train_from_iterator(some, trainer)
        tokenizer.save(str(home / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        config["chat_template"] = (
            "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
            "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def _documents() -> Iterator[str]:
    homes = {Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")}
    files = sorted((file for home in homes for file in home.rglob("*") if file.suffix in _SUFFIXES), key=str)
    random.Random(1).shuffle(files)
    for file in files:
        try:
            if file.stat().st_size > _MOST_BYTES:
                continue
            whole = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        document = ""
        for paragraph in whole.split("\n\n"):
            document += paragraph + "\n\n"
            if len(document) >= _DOCUMENT:
                yield from _plain(document)
                document = ""
        if len(document) > 200:
            yield from _plain(document)


def _plain(document: str) -> Iterator[str]:
    """Not those with the text of special tokens in them: libraries differ in what they make of it, and mean to."""
    if "<|" not in document:
        yield document
