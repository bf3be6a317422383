"""Chats for fine-tuning: labels as somebody would write them by hand, truncation, packing, stores and raw files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import ConversationDataLoader
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError, DataError, PenstockError, StageError
from penstock.transforms.tokenization import ByteTokenizer
from token_stores import make_store

TOKENIZER = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
EOS, START, END = 257, 258, 259

# What is trained on stands between ⟦ and ⟧.
CHATS = {
    "Hi": "<bos><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n",
    "A?": "<bos><|im_start|>user\nA?<|im_end|>\n<|im_start|>assistant\n⟦Bee<|im_end|>⟧\n"
    "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n⟦D<|im_end|>⟧\n",
    "ü": "<bos><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nü<|im_end|>\n<|im_start|>assistant\n⟦ö!<|im_end|>⟧\n",
}
ROWS = [
    [("user", "Hi"), ("assistant", "Yo")],
    [("user", "A?"), ("assistant", "Bee"), ("user", "C"), ("assistant", "D")],
    [("system", "S"), ("user", "ü"), ("assistant", "ö!")],
]


def by_hand(text: str) -> tuple[list[int], list[int]]:
    """Ids and labels of a text with marks, byte by byte."""
    ids: list[int] = []
    labels: list[int] = []
    learning = False
    named = {"<bos>": 256, "<eos>": EOS, "<|im_start|>": START, "<|im_end|>": END}
    while text:
        special = next((name for name in named if text.startswith(name)), None)
        if text[0] in "⟦⟧":
            learning, text = text[0] == "⟦", text[1:]
            continue
        tokens = [named[special]] if special else list(text[0].encode())
        ids += tokens
        labels += tokens if learning else [IGNORE] * len(tokens)
        text = text[len(special) if special else 1 :]
    return ids, labels


WANTED = [by_hand(text) for text in CHATS.values()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chats")
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in ROWS]
    (home / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return home


def make(home: Path, *, path: Any = None, tokenizer: Any = TOKENIZER, **more: Any) -> ConversationDataLoader:
    options: dict[str, Any] = {"max_length": 128, "chat_template": "chatml", "shuffle": False, "batch_size": 3}
    options |= {"backend": "numpy", "cache_dir": home / "cache", **more}
    return ConversationDataLoader(path or home / "sft.jsonl", tokenizer, **options)


def test_ids_and_labels_are_those_written_by_hand(home: Path) -> None:
    batch = make(home).get_batch()
    width = max(len(ids) for ids, _ in WANTED)
    assert batch.input_ids.tolist() == [ids + [EOS] * (width - len(ids)) for ids, _ in WANTED]
    assert batch.labels.tolist() == [labels + [IGNORE] * (width - len(labels)) for _, labels in WANTED]
    assert batch.attention_mask.tolist() == [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in WANTED]
    assert batch.num_items_in_batch == sum(label != IGNORE for _, labels in WANTED for label in labels)
    assert batch.position_ids[0, :5].tolist() == [0, 1, 2, 3, 4]


def test_packed_chats_keep_their_labels_and_begin_anew(home: Path) -> None:
    batch = make(home, packing="best_fit", padding_free=True).get_batch(1)
    assert batch.attention_mask is None
    ends = batch.cu_seqlens.tolist()
    for number, row in enumerate(batch.metadata["row"].tolist()):
        low, high = ends[number : number + 2]
        assert (batch.input_ids[0, low:high].tolist(), batch.labels[0, low:high].tolist()) == WANTED[row]
        assert batch.position_ids[0, low:high].tolist() == list(range(high - low))
    assert sorted(batch.metadata["row"].tolist()) == [0, 1, 2]


def test_what_is_trained_on_can_be_chosen(home: Path) -> None:
    batch = make(home, chat={"train_on": "all"}).get_batch()
    assert int((batch.labels != IGNORE).sum()) > 2 * sum(label != IGNORE for _, labels in WANTED for label in labels)


def test_the_store_of_the_chats_can_be_loaded_without_a_tokenizer(home: Path, tmp_path: Path) -> None:
    wanted = make(home, cache_dir=tmp_path / "cache").get_batch()
    (store,) = made(tmp_path)
    for tokenizer in (None, TOKENIZER):
        batch = ConversationDataLoader(
            store, tokenizer, 128, shuffle=False, batch_size=3, backend="numpy", pad_id=EOS
        ).get_batch()
        assert batch.input_ids.tolist() == wanted.input_ids.tolist()
        assert batch.labels.tolist() == wanted.labels.tolist()


def made(home: Path) -> list[Path]:
    return sorted(path for path in (home / "cache" / "stores").iterdir() if (path / "manifest.json").exists())


@pytest.mark.parametrize(
    ("truncation", "wanted"),
    [
        ("drop", [WANTED[0][0], WANTED[2][0]]),
        ("right", [WANTED[0][0], WANTED[1][0][:40], WANTED[2][0]]),
        ("left", [WANTED[0][0], WANTED[1][0][-40:], WANTED[2][0]]),
        ("split", [WANTED[0][0], WANTED[1][0][:40], WANTED[1][0][40:], WANTED[2][0]]),
    ],
)
def test_a_chat_that_is_too_long_is_treated_as_asked(home: Path, truncation: Any, wanted: list[list[int]]) -> None:
    batch = make(home, max_length=40, truncation=truncation, batch_size=8).get_batch()
    found = [row[: int(mask.sum())].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask)]
    assert found == wanted


def test_a_chat_that_is_too_long_is_an_error_that_names_it(home: Path) -> None:
    with pytest.raises(StageError, match=r"max_length=40.*truncation='right'"):
        make(home, max_length=40)


def test_a_row_of_a_store_that_is_too_long_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [[1] * 5, [2] * 9], [[True] * 5, [True] * 9])
    with pytest.raises(DataError, match=r"row 1\b"):
        list(ConversationDataLoader(store, max_length=6, backend="numpy"))


def test_a_store_without_a_mask_holds_no_conversations(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", [[1, 2, 3]])
    with pytest.raises(ConfigError, match="'input_ids'"):
        ConversationDataLoader(store)


def test_another_tokenizer_than_that_of_the_store_is_refused_naming_both(home: Path) -> None:
    make(home)
    other = ByteTokenizer(("<eos>",))
    with pytest.raises(ConfigError, match=rf"{TOKENIZER.fingerprint}.*{other.fingerprint}"):
        make(home, path=made(home)[0], tokenizer=other, chat_template=None)


def test_another_template_than_that_of_the_store_is_refused(home: Path) -> None:
    make(home)
    make(home, path=made(home)[0])
    with pytest.raises(ConfigError, match=r"'zephyr'.*chat_template"):
        make(home, path=made(home)[0], chat_template="zephyr")


def test_a_template_without_a_tokenizer_is_not_left_unused_in_silence(home: Path) -> None:
    make(home)
    with pytest.raises(ConfigError, match="chat_template"):
        make(home, path=made(home)[0], tokenizer=None, chat_template="zephyr")
    with pytest.raises(ConfigError, match=r"chat=.*\bchat\b"):
        make(home, path=made(home)[0], chat_template=None, chat={"train_on": "all"})


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"chat_template": None}, ConfigError, "template="),
        ({"chat_template": "chatlm"}, ConfigError, "'chatlm'"),
        ({"chat": {"train_onn": "all"}}, ConfigError, r"\bchat\b.*'train_onn'"),
        ({"chat": {"max_length": 3}}, ConfigError, r"\bchat\b.*'max_length'"),
        (
            {"tokenizer": None, "chat_template": None},
            ConfigError,
            r"tokenizer.*tokenizer=",
        ),
        ({"truncation": "rigth"}, ConfigError, "truncation"),
        ({"max_length": 0}, ConfigError, r"length.*\b0\b"),
        ({"max_length": "12"}, ConfigError, "'12'"),
        ({"packing": "bestfit"}, ConfigError, "'best_fit'"),
        ({"batchsize": 3}, ConfigError, "'batch_size'"),
    ],
)
def test_what_cannot_work_is_refused(home: Path, more: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(home, **more)


def test_documents_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(PenstockError, match=r"\bcache\b"):
        ConversationDataLoader(tmp_path / "text.jsonl", TOKENIZER, backend="numpy", cache_dir=tmp_path / "cache")


def test_options_of_the_chat_format_are_keywords_too(home: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "numpy", "cache_dir": tmp_path / "cache", "shuffle": False}
    with ConversationDataLoader(home / "sft.jsonl", TOKENIZER, template="chatml", train_on="last", **options) as found:
        got = [row.tolist() for batch in found for row in batch.labels]
    more = {"chat_template": "chatml", "chat": {"train_on": "last"}}
    with ConversationDataLoader(home / "sft.jsonl", TOKENIZER, **more, **options) as wanted:
        assert got == [row.tolist() for batch in wanted for row in batch.labels]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "x"}, "unknown option 'tools'"),
        ({"template": "chatml", "chat_template": "qwen"}, "template and chat_template"),
        ({"train_on": "last", "chat": {"train_on": "all"}}, "train_on is given twice"),
        ({"columns": {"user": "a"}, "chat": {"columns": {"user": "b"}}}, "columns and chat"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ConversationDataLoader(tmp_path, TOKENIZER, **options)
