"""Tokens of a row for the token view: parts by the marks of templates, and tokens of a raw row by a recipe."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.chat.templates import load_template
from penstock.corpus.recipe import OpenedRecipe, Recipe
from penstock.errors import DataError, PenstockError
from penstock.ui.rows import TokenPart
from penstock.ui.vocabulary import Vocabulary

_SPANS = (
    ("thought", re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)),
    ("tool call", re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)),
    ("tool result", re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)),
)


def parts_of(pieces: Sequence[str], ids: Sequence[int], special: Collection[int]) -> list[str]:
    """Part of each token where the template is not known: special tokens, roles behind them, and tags.

    A text that looks like a mark is taken for one.
    """
    parts = ["content"] * len(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    text = "".join(pieces)
    for name, pattern in _SPANS:
        for found in pattern.finditer(text):
            first, last = np.searchsorted(ends, [found.start(), found.end() - 1], side="right")
            parts[int(first) : int(last) + 1] = [name] * (int(last) - int(first) + 1)
    opened = False
    for at, (piece, token) in enumerate(zip(pieces, ids)):
        if token in special:
            opened = "start" in piece
            parts[at] = "template"
        elif opened:
            parts[at] = "template"
            opened = "\n" not in piece
    return parts


class RowTokenizer:
    """Tokens of raw rows, as `penstock prepare` with this tokenizer and template would make them."""

    def __init__(self, tokenizer: str, template: str | None = None) -> None:
        self._recipe = Recipe(tokenizer=tokenizer, template=template)
        loaded = self._recipe.load_tokenizer()
        self.vocabulary = Vocabulary(loaded)
        self.template = _fingerprint(template, loaded.chat_template)

    def tokens(self, row: Mapping[str, Any]) -> tuple[list[TokenPart], str]:
        """Tokens of a row, and the reason if there are none."""
        try:
            opened = OpenedRecipe.of(self._recipe, [dict(row)])
            made = opened.source.next_batch(1)
            for transform in (*opened.transforms, opened.steps().transforms[-1]):
                made = transform.transform(made) if made.num_rows else made
        except DataError as error:
            return [], error.reason.removeprefix("row 0 of the batch: ")
        except (PenstockError, ValueError, TypeError, LookupError) as error:  # what a row may hold has no end
            return [], str(error)
        if not made.num_rows:
            return [], "the recipe drops this row"
        parts = []
        for name in made.schema.names:
            if name.endswith("input_ids"):
                side = name.removesuffix("input_ids")
                mask = made.column(f"{side}loss_mask") if f"{side}loss_mask" in made.schema.names else None
                ids = made.column(name)[0].values.to_numpy(zero_copy_only=False)
                parts.append(TokenPart(side.rstrip("_"), ids, _flags(mask)))
        return parts, ""


def _fingerprint(template: str | None, own: str | None) -> str | None:
    try:
        return load_template(template, own).fingerprint
    except PenstockError:
        return None  # documents need no template, and each chat says what is wrong with it


def _flags(mask: pa.Array | None) -> Any:
    return None if mask is None else np.asarray(mask[0].values.to_numpy(zero_copy_only=False), bool)
