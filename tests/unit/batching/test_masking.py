"""Masked-language-model corruption: what is hidden depends on the row alone, at the promised rates, in whole words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from penstock.batching.collate import IGNORE
from penstock.batching.masked_lm import MaskedLM, WordBorders
from penstock.errors import ConfigError, DataError
from penstock.transforms.tokenization import ByteTokenizer, load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, CLS, SEP, MASK = 0, 2, 3, 4
TEXTS = [
    "The passenger is a woman of 29 years, travelling alone in first class; she paid 211.3375 pounds.",
    "Mr. Karl Johansson (33) embarked at Southampton, with 2 siblings and no children!",
    "Unbelievably overcrowded accommodation: cabins C23, C25 and C27 were shared by several families.",
    "He said nothing. Nobody answered; everybody waited, disappointed and thunderstruck.",
]
PLAIN = MaskedLM(mask_id=MASK, vocab_size=1000, special_ids=(PAD, 1, CLS, SEP))


def word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    return made


def byte_pairs(splitting: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = splitting
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"vocab_size": 330, "special_tokens": SPECIAL, "initial_alphabet": alphabet}
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    return made


def single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])


def metaspace() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL))
    return made


def with_suffix() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    options: Any = {"vocab_size": 150, "special_tokens": SPECIAL, "end_of_word_suffix": "</w>"}
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    return made


TOKENIZERS = {
    "WordPiece": word_piece,
    "byte-level BPE": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level BPE with a space before": lambda: byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte-level BPE of single digits": lambda: byte_pairs(single_digits()),
    "metaspace": metaspace,
    "end-of-word suffix": with_suffix,
}


def framed(rows: list[list[int]], *, width: int | None = None, left: bool = False) -> tuple[Any, Any]:
    """Rows between [CLS] and [SEP], padded to `width` on one side."""
    full = [[CLS, *row, SEP] for row in rows]
    width = width or max(map(len, full))
    ids = np.full((len(full), width), PAD, np.int32)
    mask = np.zeros((len(full), width), np.int32)
    for number, row in enumerate(full):
        here = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, here], mask[number, here] = row, 1
    return ids, mask


rows_of_ids = st.lists(st.lists(st.integers(5, 999), min_size=0, max_size=30), min_size=1, max_size=6)
hiding = st.builds(
    lambda words, probability, seed: replace(
        PLAIN,
        probability=probability,
        seed=seed,
        whole_words=words,
        word_starts=np.arange(1000) % 3 == 0,
    ),
    st.booleans(),
    st.sampled_from([0.01, 0.15, 0.5, 1.0]),
    st.integers(0, 2**40),
)


@given(rows=rows_of_ids, hide=hiding, epoch=st.integers(0, 5), more=st.integers(0, 9), left=st.booleans())
def test_a_row_is_hidden_the_same_alone_and_among_others_however_it_is_padded(
    rows: list[list[int]], hide: MaskedLM, epoch: int, more: int, left: bool
) -> None:
    numbers = np.arange(len(rows)) * 7 + 2**35
    ids, mask = framed(rows, width=max(map(len, rows)) + 2 + more, left=left)
    together = [part[mask == 1].tolist() for part in hide.corrupt(ids, mask, numbers, epoch)]
    alone: list[list[int]] = [[], []]
    for row, number in zip(rows, numbers, strict=True):
        one, shown = framed([row])
        for into, part in zip(alone, hide.corrupt(one, shown, [number], epoch), strict=True):
            into.extend(part[0].tolist())
    assert together == alone


@given(rows=rows_of_ids, hide=hiding)
def test_labels_are_the_hidden_ids_and_everything_else_stays(rows: list[list[int]], hide: MaskedLM) -> None:
    ids, mask = framed(rows)
    before = ids.copy()
    corrupted, labels = hide.corrupt(ids, mask, np.arange(len(rows)), 0)
    chosen = labels != IGNORE
    assert np.array_equal(ids, before), "the batch that was given is left alone"
    assert np.array_equal(labels[chosen], ids[chosen])
    assert np.array_equal(corrupted[~chosen], ids[~chosen])
    assert not chosen[(mask == 0) | (ids < 5)].any(), "specials and padding are never chosen"
    assert np.array_equal(chosen.any(axis=1), [len(row) > 0 for row in rows]), "at least one label where one can be"
    put_in = corrupted[chosen]
    assert ((put_in == MASK) | (put_in >= 5)).all(), "no special token is put in at random"


def test_epochs_seeds_and_rows_hide_different_tokens() -> None:
    ids, mask = framed([list(range(5, 405))] * 2)
    seen = {
        replace(PLAIN, seed=seed).corrupt(ids, mask, [row, row + 1], epoch)[1][0].tobytes()
        for seed in (0, 1)
        for row in (0, 1, 2**40)
        for epoch in (0, 1)
    }
    assert len(seen) == 12
    labels = PLAIN.corrupt(ids, mask, [0, 1], 0)[1]
    both = ((labels[0] != IGNORE) & (labels[1] != IGNORE)).sum()
    assert both < 30, "two rows with the same text agree by chance alone: 9 of 400 are expected"


def rates(hidden: Any, labels: Any, ids: Any) -> Any:
    """Of the tokens, how many are chosen; of those, how many are masked, changed and left."""
    chosen = labels != IGNORE
    masked = (hidden == MASK) & chosen
    left = (hidden == ids) & chosen
    count = chosen.sum()
    return np.array([count / (ids >= 5).sum(), masked.sum() / count, 1 - (masked | left).sum() / count])


def test_rates_are_those_of_bert_and_of_the_collator_of_transformers() -> None:
    import torch
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    rng = np.random.default_rng(0)
    ids, mask = framed(rng.integers(5, 1000, (400, 250)).tolist())
    ours = rates(*PLAIN.corrupt(ids, mask, np.arange(400), 3), ids)
    # Four standard deviations of 100,000 draws, and of the 15,000 that are chosen.
    bounds = 4 * np.sqrt(np.array([0.15 * 0.85 / 1e5, 0.8 * 0.2 / 1.5e4, 0.1 * 0.9 / 1.5e4]))
    assert (np.abs(ours - [0.15, 0.8, 0.1]) < bounds).all(), ours

    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *map(str, range(5, 1000))])}
    plain = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", **names)  # type: ignore[no-untyped-call]
    collate = DataCollatorForLanguageModeling(wrapped, mlm_probability=0.15, seed=5)
    theirs = collate([{"input_ids": row} for row in torch.tensor(ids)])
    other = rates(theirs["input_ids"].numpy(), theirs["labels"].numpy(), ids)
    assert (np.abs(ours - other) < 2 * bounds).all(), (ours, other)


def test_random_replacements_reach_every_ordinary_id_about_equally_often() -> None:
    hide = MaskedLM(mask_id=4, vocab_size=15, special_ids=(0, 1, 2, 3), probability=1.0, mask=0.0, random=1.0)
    ids = np.full((50, 400), 9)
    corrupted, labels = hide.corrupt(ids, None, np.arange(50), 0)
    counts = np.bincount(corrupted.ravel(), minlength=15)
    assert (labels == 9).all()
    assert (counts[:5] == 0).all()
    assert (np.abs(counts[5:] - 2000) < 4 * np.sqrt(2000)).all(), counts


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_words_are_those_of_the_tokenizer(kind: str) -> None:
    made = TOKENIZERS[kind]()
    borders = WordBorders.of(made)
    several = 0
    for text in [*TEXTS, "unseen wordings, 1912 (April 15)"]:
        encoded = made.encode(text, add_special_tokens=False)
        words = np.array(encoded.word_ids)
        ids = np.array([encoded.ids])
        expected = np.concatenate([[True], words[1:] != words[:-1]])
        assert borders.starts(ids)[0].tolist() == expected.tolist(), encoded.tokens
        several += int((~expected).sum())
    assert several > 30, "the words under test are of several tokens"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_of_a_chosen_word_every_token_is_labelled(kind: str) -> None:
    made = TOKENIZERS[kind]()
    hide = MaskedLM.of(made, whole_words=True, probability=0.3, seed=1)
    encoded = [made.encode(text, add_special_tokens=False) for text in TEXTS]
    ids, mask = framed([one.ids for one in encoded], left=True)
    labelled = 0
    for epoch in range(20):
        labels = hide.corrupt(ids, mask, np.arange(len(TEXTS)), epoch)[1]
        for row, one in enumerate(encoded):
            chosen = (labels[row] != IGNORE)[mask[row] == 1][1:-1]
            words = np.array(one.word_ids)
            unknown = np.array(one.ids) == 1  # which is special: never chosen, and nothing goes on across it
            for word in np.unique(words[~unknown]):
                pieces = chosen[(words == word) & ~unknown]
                assert pieces.all() or not pieces.any() or unknown[words == word].any()
                labelled += int(pieces.all())
    expected = 20 * 0.3 * sum(len(set(one.word_ids)) for one in encoded)
    assert abs(labelled - expected) < 5 * np.sqrt(expected)


def test_of_finds_the_mask_and_the_specials_of_a_tokenizer_and_options_win() -> None:
    hide = MaskedLM.of(word_piece(), probability=0.4, special_ids=(7,))
    found = MaskedLM.of(load_tokenizer(word_piece()))
    assert (found.mask_id, found.special_ids, found.vocab_size) == (4, (0, 1, 2, 3, 4), 120)
    assert (hide.probability, hide.special_ids, hide.mask_id) == (0.4, (7,), 4)


def test_bytes_have_words_too() -> None:
    tokenizer = ByteTokenizer(("<bos>", "<eos>", "<pad>", "<mask>"))
    hide = MaskedLM.of(tokenizer, whole_words=True)
    ids = np.asarray(tokenizer.encode(pa.array(["Tea at 17, née!"]))[0].values)[None].astype(np.int64)
    begins = hide._borders.starts(ids)[0]
    text = "Tea at 17, née!".encode()
    cuts = [*np.flatnonzero(begins).tolist(), len(text)]
    assert [text[a:b].decode() for a, b in pairwise(cuts)] == ["Tea", " at", " 17", ",", " née", "!"]


def test_words_of_a_tiktoken_encoding_are_those_of_its_pattern() -> None:
    import regex  # type: ignore[import-untyped,unused-ignore]
    import tiktoken

    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merged in (b"th", b"the", b" t", b" the", b"an", b"er", b"ll", b"20", b" 1", b"in"):
        ranks[merged] = len(ranks)
    encoding = tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<mask>": len(ranks)})
    hide = MaskedLM.of(encoding, whole_words=True)
    assert hide.mask_id == len(ranks)
    for text in [*TEXTS, "In 1912, the\nother - 20 1nights..."]:
        ids = encoding.encode(text)
        ends = np.cumsum([len(encoding.decode_single_token_bytes(token)) for token in ids])
        begins = [0, *ends[:-1].tolist()]
        expected = {match.start() for match in regex.finditer(pattern, text)}
        assert {b for b, new in zip(begins, hide._borders.starts(np.array([ids]))[0], strict=True) if new} == expected


def test_words_of_sentencepiece_begin_with_their_space() -> None:
    import io

    import sentencepiece

    model = io.BytesIO()
    symbols: Any = {"user_defined_symbols": ["[MASK]"], "minloglevel": 2, "model_type": "bpe"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=90, **symbols
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = processor.encode(TEXTS[0])
    expected = [number == 0 or processor.id_to_piece(token).startswith("▁") for number, token in enumerate(ids)]
    hide = MaskedLM.of(processor, whole_words=True)
    assert hide._borders.starts(np.array([ids]))[0].tolist() == expected
    assert expected.count(False) > 20
    assert processor.id_to_piece(hide.mask_id) == "[MASK]"


def test_a_tokenizer_whose_tokens_do_not_show_words_is_refused() -> None:
    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=90, special_tokens=SPECIAL))
    MaskedLM.of(made)
    with pytest.raises(ConfigError, match="whole_words"):
        MaskedLM.of(made, whole_words=True)


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\bbyte\b.*mask_id="):
        MaskedLM.of("byte")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 0}, "probability"),
        ({"probability": 1.5}, r"probability.*1\.5"),
        ({"mask": 0.9, "random": 0.2}, r"\bmask\b"),
        ({"mask_id": 1000}, "vocab_size"),
        ({"special_ids": (-1,)}, r"\[-1\]"),
        ({"whole_words": True}, "word_starts"),
        ({"whole_words": True, "word_starts": np.ones(3, np.bool_)}, "word_starts"),
        ({"vocab_size": 5}, "random=0"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PLAIN, **options)


@pytest.mark.parametrize(
    ("ids", "mask", "rows", "message"),
    [
        (np.ones(4, np.int32), None, [0], "input_ids"),
        (np.ones((1, 4)), None, [0], "input_ids"),
        (np.full((1, 4), 1000), None, [0], "input_ids"),
        (np.full((1, 4), -1), None, [0], r"-1\b"),
        (np.ones((2, 4), np.int32), np.ones((2, 3)), [0, 1], "attention_mask"),
        (np.ones((2, 4), np.int32), None, [0], r"\brows\b.*\b2\b"),
    ],
)
def test_batches_that_do_not_fit_are_refused(ids: Any, mask: Any, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PLAIN.corrupt(ids, mask, rows, 0)


def test_narrow_unsigned_ids_keep_their_type_and_labels_are_signed() -> None:
    corrupted, labels = PLAIN.corrupt(np.full((3, 9), 700, np.uint16), None, [0, 1, 2], 0)
    assert corrupted.dtype == np.uint16
    assert labels.dtype == np.int32
    assert set(np.unique(labels)) == {IGNORE, 700}
    narrow = replace(PLAIN, mask_id=900, mask=1.0, random=0.0).corrupt(np.full((3, 9), 200, np.uint8), None, [0, 1, 2])
    assert set(np.unique(narrow[0])) == {200, 900}, "a mask token beyond the type of the ids is not cut to it"


def test_what_decides_the_corruption_is_described_as_plain_values() -> None:
    words = replace(PLAIN, whole_words=True, word_starts=np.arange(1000) % 3 == 0)
    others = [replace(PLAIN, seed=1), replace(PLAIN, mask=0.7), replace(PLAIN, special_ids=(0,)), words]
    others.append(replace(words, word_starts=np.arange(1000) % 4 == 0))
    told = [str(sorted(one.describe().items())) for one in (PLAIN, *others)]
    assert len(set(told)) == len(told)
    assert replace(PLAIN).describe() == PLAIN.describe()


def test_nothing_and_rows_without_ordinary_tokens_go_through() -> None:
    for shape in ((0, 5), (3, 0)):
        corrupted, labels = PLAIN.corrupt(np.zeros(shape, np.int64), None, np.arange(shape[0]), 0)
        assert corrupted.shape == labels.shape == shape
    corrupted, labels = PLAIN.corrupt([[CLS, SEP, PAD]], [[1, 1, 0]], [0], 0)
    assert (corrupted.tolist(), labels.tolist()) == ([[CLS, SEP, PAD]], [[IGNORE] * 3])
