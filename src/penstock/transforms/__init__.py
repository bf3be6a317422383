"""What happens to batches on the way: functions, columns, text, cleaning, validation, scaling, encoding, augmentation,
quality filters, deduplication, tokenizing, chats.

A transform is anything with `transform(batch) -> batch`. Without a `state_dict` it must be a pure function of the
batch, and runs on several threads at once.
"""

from penstock.pipeline.expressions import parse_expression
from penstock.transforms.augmentation import Augment, DropWords, Jitter, SwapChars
from penstock.transforms.cleaning import Clip, DropNulls, FillNulls, ReplaceRegex
from penstock.transforms.columns import Cast, Drop, Rename, Select
from penstock.transforms.custom import CustomTransform, transform
from penstock.transforms.decontamination import Decontaminate
from penstock.transforms.deduplication import ExactDedup, MinHashDedup, dedup_stages
from penstock.transforms.encoding import HashingEncoder, OneHotEncoder, OrdinalEncoder
from penstock.transforms.filtering import (
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    LanguageCharacters,
    LengthFilter,
    RegexFilter,
    WordListFilter,
    quality_filters,
)
from penstock.transforms.formatting import FormatChat, Gate, ToMessages, detect_format
from penstock.transforms.functions import Filter, FlatMap, Map
from penstock.transforms.preference import FormatPreference
from penstock.transforms.scaling import MinMaxScaler, StandardScaler
from penstock.transforms.scrubbing import ScrubPII
from penstock.transforms.text import CountChars, CountWords, Lower, NormalizeUnicode, NormalizeWhitespace, Strip
from penstock.transforms.tokenization import (
    ByteTokenizer,
    CharTokenizer,
    SpecialTokens,
    Tokenize,
    Tokenizer,
    load_tokenizer,
)
from penstock.transforms.validation import Validate

__all__ = [
    "Augment",
    "ByteTokenizer",
    "C4Quality",
    "Cast",
    "CharTokenizer",
    "Clip",
    "CountChars",
    "CountWords",
    "CustomTransform",
    "Decontaminate",
    "Drop",
    "DropNulls",
    "DropWords",
    "ExactDedup",
    "FillNulls",
    "Filter",
    "FineWebQuality",
    "FlatMap",
    "FormatChat",
    "FormatPreference",
    "Gate",
    "GopherQuality",
    "GopherRepetition",
    "HashingEncoder",
    "Jitter",
    "LanguageCharacters",
    "LengthFilter",
    "Lower",
    "Map",
    "MinHashDedup",
    "MinMaxScaler",
    "NormalizeUnicode",
    "NormalizeWhitespace",
    "OneHotEncoder",
    "OrdinalEncoder",
    "RegexFilter",
    "Rename",
    "ReplaceRegex",
    "ScrubPII",
    "Select",
    "SpecialTokens",
    "StandardScaler",
    "Strip",
    "SwapChars",
    "ToMessages",
    "Tokenize",
    "Tokenizer",
    "Validate",
    "WordListFilter",
    "dedup_stages",
    "detect_format",
    "load_tokenizer",
    "parse_expression",
    "quality_filters",
    "transform",
]
