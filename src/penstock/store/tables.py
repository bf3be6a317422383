"""Tables of a store: its rows for Arrow, polars and pandas, and its summary for a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock._optional import require
from penstock.errors import PenstockError
from penstock.html import facts, figure, fragment, note, table
from penstock.html.charts import histogram
from penstock.html.tokens import token_legend, token_view
from penstock.tokenizers.pieces import id_pieces, token_pieces

if TYPE_CHECKING:
    from penstock.store.manifest import Manifest
    from penstock.tokenizers.base import Tokenizer

_MOST_LENGTHS = 2_000_000
_MOST_TOKENS = 300


class StoreTables:
    """Exports of a store."""

    manifest: Manifest

    if TYPE_CHECKING:  # what `Store` has

        @property
        def schema(self) -> pa.Schema: ...
        @property
        def tokens(self) -> int: ...
        @property
        def lengths(self) -> npt.NDArray[np.int32]: ...
        def __len__(self) -> int: ...
        def take(self, rows: npt.ArrayLike, columns: Sequence[str] | None = None) -> pa.RecordBatch: ...
        def batches(
            self, start: int = 0, stop: int | None = None, *, columns: Sequence[str] | None = None
        ) -> Iterator[pa.RecordBatch]: ...
        def _projected(self, columns: Sequence[str] | None) -> pa.Schema: ...

    def to_arrow(self, columns: Sequence[str] | None = None, rows: slice | npt.ArrayLike | None = None) -> pa.Table:
        """Rows as an Arrow table: all of them, a slice, or those with these numbers.

        All rows, and a slice without a step, are views of the mapped files: nothing is copied, and a page is read when
        it is touched. Of a store in a bucket they are fetched. Rows by number are copied.
        """
        schema = self._projected(columns)
        if rows is None or isinstance(rows, slice):
            start, stop, step = (rows or slice(None)).indices(len(self))
            if step == 1:
                return pa.Table.from_batches(
                    list(self.batches(start, max(start, stop), columns=columns)), schema=schema
                )
            rows = np.arange(start, stop, step)
        return pa.Table.from_batches([self.take(rows, columns)], schema=schema)

    def to_polars(self, columns: Sequence[str] | None = None, rows: slice | npt.ArrayLike | None = None) -> Any:
        """Rows as a polars DataFrame; see `to_arrow`."""
        return require("polars", "polars").from_arrow(self.to_arrow(columns, rows))

    def to_pandas(self, columns: Sequence[str] | None = None, rows: slice | npt.ArrayLike | None = None) -> Any:
        """Rows as a pandas DataFrame, which copies them; see `to_arrow`."""
        require("pandas", "pandas")
        return self.to_arrow(columns, rows).to_pandas()

    def _repr_html_(self) -> str:
        """Summary for a notebook: figures, lengths, columns, and the tokens of the first row."""
        manifest = self.manifest
        shown: list[tuple[object, ...]] = [("rows", len(self)), ("tokens", self.tokens)]
        if manifest.supervised is not None and manifest.tokens:
            shown.append(("supervised", f"{manifest.supervised / manifest.tokens:.1%}"))
        parts: list[object] = [facts(shown)]
        if manifest.tokens_column is not None and 0 < len(self) <= _MOST_LENGTHS:
            chart = histogram(self.lengths, label="Lengths of rows", unit="tokens", x_label="tokens", bins=32)
            parts.append(figure(chart, "Tokens of a row"))
        rows = [(each.name, str(each.type).replace("item: ", "")) for each in self.schema]
        parts.append(table(rows, ["column", "type"], caption="Columns"))
        if len(self) and manifest.tokens_column is not None:
            parts += self._first_row(manifest.tokens_column)
        return fragment(*parts)

    def _first_row(self, column: str) -> list[object]:
        mask_column = self.manifest.mask_column
        row = self.to_arrow([column, *([mask_column] if mask_column else [])], slice(0, 1))
        ids = row[column][0].values.to_numpy(zero_copy_only=False)[:_MOST_TOKENS]
        mask = None
        if mask_column is not None:
            mask = row[mask_column][0].values.to_numpy(zero_copy_only=False)[:_MOST_TOKENS].astype(bool)
        tokenizer = self._own_tokenizer()
        pieces = token_pieces(tokenizer, ids, mask) if tokenizer is not None else id_pieces(ids, mask)
        named = [(text, kind.endswith("special")) for kind, text in pieces]
        parts = ["template" if special else "content" for _, special in named]
        view = token_view([text for text, _ in named], ids, mask, parts=parts, label="Tokens of row 0", tooltips=True)
        return [note(f"Row 0, its first {len(ids):,} tokens"), token_legend(("template", "content")), view]

    def _own_tokenizer(self) -> Tokenizer | None:
        from penstock.store.origin import store_tokenizer  # which needs the manifest of this package

        try:
            return store_tokenizer(self.manifest)
        except (PenstockError, OSError, ImportError):
            return None
