"""View of a batch: its rows with token boundaries, supervision and padding, on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.html import facts, fragment, note, table
from penstock.html.tokens import token_legend, token_view
from penstock.tokenizers.pieces import bracketed, coloured, id_pieces, token_pieces

if TYPE_CHECKING:
    from penstock.tokenizers.base import Tokenizer

_MOST_ROWS, _MOST_TOKENS = 4, 400


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Row of a batch: ids, supervised tokens, and tokens that are padding."""

    number: int
    ids: npt.NDArray[Any]
    supervised: npt.NDArray[np.bool_]
    padding: npt.NDArray[np.bool_]
    documents: int

    @property
    def title(self) -> str:
        """`row 0: 128 tokens, 40 supervised, 3 documents, 12 of padding`."""
        parts = [f"{len(self.ids):,} tokens", f"{int(self.supervised.sum()):,} supervised"]
        parts += [f"{self.documents:,} documents"] if self.documents > 1 else []
        parts += [f"{count:,} of padding"] if (count := int(self.padding.sum())) else []
        return f"row {self.number}: {', '.join(parts)}"

    def pieces(self, tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
        """Kind and text of each token; numbers without a tokenizer."""
        made = token_pieces(tokenizer, self.ids, self.supervised) if tokenizer else id_pieces(self.ids, self.supervised)
        for (kind, text), padded in zip(made, self.padding.tolist()):
            yield ("padding" if padded else kind), text


class BatchView:
    """Views of a batch for people."""

    if TYPE_CHECKING:

        def to_numpy(self) -> dict[str, Any]: ...

    def show(self, tokenizer: Any = None, *, rows: int = _MOST_ROWS, tokens: int = _MOST_TOKENS) -> None:
        """Print rows on the terminal: every second token underlined, supervised ones green, padding red.

        Without colours (`NO_COLOR`, or no terminal) tokens are separated by bars, and supervised spans are between [[
        and ]]. `tokenizer` is anything `load_tokenizer` takes; without it, ids are shown.
        """
        from rich.console import Console

        from penstock.tokenizers.load import load_tokenizer

        loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
        console = Console()
        colours = console.color_system is not None and not console.no_color
        for row in batch_rows(self.to_numpy(), rows, tokens):
            pieces = list(row.pieces(loaded))
            console.print(row.title, style="bold", highlight=False, markup=False)
            shown = coloured(pieces, boundaries=True) if colours else bracketed(pieces, boundaries=True)
            console.print(shown, highlight=False, soft_wrap=True)

    def _repr_html_(self) -> str:
        """Fields and rows for a notebook; ids, since a batch does not know its tokenizer (`show(tokenizer)` prints)."""
        arrays = self.to_numpy()
        fields = [
            (name, str(value.dtype), " x ".join(map(str, value.shape)))
            for name, value in arrays.items()
            if isinstance(value, np.ndarray)
        ]
        numbers = [(name, value) for name, value in arrays.items() if not isinstance(value, np.ndarray)]
        parts: list[object] = [facts(numbers)] if numbers else []
        parts.append(table(fields, ["field", "type", "shape"], caption=type(self).__name__))
        shown = list(batch_rows(arrays, _MOST_ROWS, _MOST_TOKENS))
        if shown:
            parts.append(token_legend(("content", "padding")))
        for row in shown:
            names = ["padding" if padded else "content" for padded in row.padding.tolist()]
            texts = [text for _, text in row.pieces(None)]
            parts.append(note(row.title))
            parts.append(token_view(texts, row.ids, row.supervised, parts=names, label=row.title, tooltips=True))
        return fragment(*parts)


def batch_rows(arrays: dict[str, Any], rows: int, tokens: int) -> Iterator[BatchRow]:
    """The first rows of a batch, each up to a number of tokens; none if it has no ids."""
    ids = arrays.get("input_ids")
    if ids is None or ids.ndim != 2:
        return
    labels, loss_mask = arrays.get("labels"), arrays.get("loss_mask")
    marks = arrays.get("document_ids")
    marks = arrays.get("attention_mask") if marks is None else marks
    for number in range(min(rows, len(ids))):
        own = ids[number, :tokens]
        if labels is not None:
            supervised = labels[number, :tokens] != -100
        elif loss_mask is not None and loss_mask.shape == ids.shape:
            supervised = loss_mask[number, :tokens].astype(bool)
        else:
            supervised = np.zeros(len(own), bool)
        padding, documents = np.zeros(len(own), bool), 1
        if marks is not None and marks.shape == ids.shape:
            padding = marks[number, :tokens] == 0
            documents = len(np.unique(marks[number][marks[number] != 0]))
        yield BatchRow(number, own, supervised, padding, documents)
