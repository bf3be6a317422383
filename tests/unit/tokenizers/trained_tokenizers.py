"""Small tokenizers of every kind, trained on the spot, and texts that are hard for tokenizers."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import orjson
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CORPUS = [
    "A penstock is the gated pipe that feeds a turbine: all the water it can take, and never more.",
    "It's 1234 litres a second, isn't it? They've 56 of them; we'll see 7 more, I'd say.",
    "def feed(turbine):\n    return [water for water in river if water.flows]\n\n\tprint('done')",
    "Größe, naïve, café, Ålesund, smørrebrød, 日本語のテキスト、中文文本。 Привет, мир! 🎉🎉",
    "the the the water water feeds feeds turbine turbine pipe pipe gate gate gated gated    spaces",
] * 8

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _byte_level(splitting: Any, normalizer: Any = None, **model: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(**model))
    made.pre_tokenizer, made.decoder = splitting, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def _split(pattern: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _gpt2() -> tokenizers.Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _gpt2_prefix() -> tokenizers.Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def _llama3() -> tokenizers.Tokenizer:
    return _byte_level(_split(LLAMA3), ignore_merges=True)


def _qwen() -> tokenizers.Tokenizer:
    return _byte_level(_split(QWEN2), normalizers.NFC())


def _llama2() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    return _with_bytes(made)


def _gemma() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_bytes(made)


def _with_bytes(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    special = ["<unk>", "<s>", "</s>", *SPECIAL]
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *every_byte], show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    # Byte tokens belong to the model; as special tokens they would be read from the text "<0x41>".
    config = orjson.loads(made.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(orjson.dumps(config).decode())


def _wordpiece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def _unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


HUGGING_FACE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": functools.cache(_gpt2),
    "gpt2 with a space before": functools.cache(_gpt2_prefix),
    "llama3": functools.cache(_llama3),
    "qwen": functools.cache(_qwen),
    "llama2": functools.cache(_llama2),
    "gemma": functools.cache(_gemma),
    "wordpiece": functools.cache(_wordpiece),
    "unigram": functools.cache(_unigram),
}
FAST = {"gpt2", "gpt2 with a space before", "llama3", "qwen", "llama2", "gemma"}


@functools.cache
def encoding() -> tiktoken.Encoding:
    """Ranks of the bytes and of some merges, with the pattern of cl100k."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for text in (
        "th",
        "the",
        " th",
        " the",
        "wa",
        "wat",
        " wa",
        " wat",
        "er",
        " water",
        "in",
        "ing",
        "  ",
        "\n\n",
        "é",
    ):
        ranks[text.encode()] = len(ranks)
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    )
    special = {"<|endoftext|>": len(ranks), "<|im_end|>": len(ranks) + 1}
    return tiktoken.Encoding("small", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


@functools.cache
def sentencepiece_model(
    kind: str = "bpe", missing: str = "bytes", rule: str = "nmt_nfkc", spaces: str = "squeezed"
) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=420 if missing == "bytes" else 150,
        model_type=kind,
        byte_fallback=missing == "bytes",
        normalization_rule_name=rule,
        remove_extra_whitespaces=spaces == "squeezed",
        user_defined_symbols=["<sep>", "<|im_start|>", "▁▁▁", "\n"],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


_FRAGMENTS = [
    *("the water", " feeds", "it's", "DON'T", "we'll", "1234", "12 345", "\n\n", "\r\n", "\t", "  ", " ", "   x"),
    *(
        "é",
        "e\u0301",
        "ﬁ",
        "日本語",
        "中文。",
        "한국어",
        "Привет",
        "🎉",
        "👩‍👩‍👧",
        "🇩🇪",
        "\0",
        "\x07",
        "\x7f",
        "\u200b",
        "\ufeff",
    ),
    *(
        "\uff1csep\uff1e",
        "<\u017fep>",
        "<SEP>",
        "ﾊﾟｿｺﾝ",
        "ｶﾞ",
        "½\u0301",
        "①\u0302",
        "ﬁ\u0301",
        "ﾡￂ",
        "ㅋㅏ",
        "กำ",
        "각\u11a8",
        "क्\u200dष",
        "\U0001f1e9\U0001f1ea",
    ),
    *("\u3000", "\u00a0", "\u2028", "▁", "▁▁a", "<0x41>", "a" * 40, "!" * 30, "🎉" * 12, "ab" * 30),
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "<s>",
        "</s>",
        "<unk>",
        "<sep>",
        "[CLS]",
        "<|im_",
        "end|>",
    ),
]
characters = st.characters(exclude_categories=["Cs"])
texts = st.lists(st.sampled_from(_FRAGMENTS) | st.text(characters, max_size=6), max_size=8).map("".join)
# The first use of a tokenizer loads it, which takes longer than an example may.
some_examples = settings(deadline=None, max_examples=60)
columns = st.lists(texts, min_size=1, max_size=4)
