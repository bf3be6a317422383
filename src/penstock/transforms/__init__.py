"""What happens to batches on the way: functions, columns, text, cleaning, validation, scaling, encoding, augmentation.

A transform is anything with `transform(batch) -> batch`. Without a `state_dict` it must be a pure function of the
batch, and runs on several threads at once.
"""

from penstock.pipeline.expressions import parse_expression
from penstock.transforms.augmentation import Augment, DropWords, Jitter, SwapChars
from penstock.transforms.cleaning import Clip, DropNulls, FillNulls, ReplaceRegex
from penstock.transforms.columns import Cast, Drop, Rename, Select
from penstock.transforms.encoding import HashingEncoder, OneHotEncoder, OrdinalEncoder
from penstock.transforms.functions import Filter, FlatMap, Map
from penstock.transforms.scaling import MinMaxScaler, StandardScaler
from penstock.transforms.text import CountChars, CountWords, Lower, NormalizeUnicode, NormalizeWhitespace, Strip
from penstock.transforms.validation import Validate

__all__ = [
    "Augment",
    "Cast",
    "Clip",
    "CountChars",
    "CountWords",
    "Drop",
    "DropNulls",
    "DropWords",
    "FillNulls",
    "Filter",
    "FlatMap",
    "HashingEncoder",
    "Jitter",
    "Lower",
    "Map",
    "MinMaxScaler",
    "NormalizeUnicode",
    "NormalizeWhitespace",
    "OneHotEncoder",
    "OrdinalEncoder",
    "Rename",
    "ReplaceRegex",
    "Select",
    "StandardScaler",
    "Strip",
    "SwapChars",
    "Validate",
    "parse_expression",
]
