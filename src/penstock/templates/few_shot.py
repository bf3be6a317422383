"""Few-shot template: labelled examples before each row, drawn from a given table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import Context
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.hashes import hash64, mix64
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.order.permutation import derive_key
from penstock.templates.base_template import BaseTemplate, identity, names_of
from penstock.templates.columns import ColumnFormat, ColumnFormatter
from penstock.templates.converters import TabularTextConverter, targets_in
from penstock.templates.frames import as_row, as_table
from penstock.templates.values import TEXT, join

_STEP = 0x9E3779B97F4A7C15
_TRIES_PER_EXAMPLE = 16

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


class FewShot(BaseTemplate):
    """`count` examples with their labels, then the row, each rendered by `template` or a converter.

        FewShot(template, train_fold, labels="Survived", count=4, answer="Survived: ",
                label_format=ColumnFormat(categories={0: "no", 1: "yes"}))

    `examples` must be the training fold only. The seed and the text of a row (or its `id_column`) decide which examples
    it gets, and not its position, so that a row has the same text in a batch and alone. An example with the same text
    or id as the row is never drawn for it: neither the row itself nor a copy.
    """

    slice_rows = 8192

    def __init__(
        self,
        template: BaseTemplate | TabularTextConverter,
        examples: Any,
        labels: str | Sequence[Any],
        count: int = 4,
        seed: int = 0,
        *,
        label_format: ColumnFormat | None = None,
        id_column: str | None = None,
        instruction: str = "",
        answer: str = "Answer: ",
        between: str = "\n\n",
        name: str | None = None,
        version: str | int | None = None,
    ) -> None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"count must be a positive number of examples, got {count!r}")
        targets = template.target if isinstance(template, TabularTextConverter) else ()
        template = template.template if isinstance(template, TabularTextConverter) else template
        if not isinstance(template, BaseTemplate):
            raise ConfigError(f"template must be a template or a TabularTextConverter, got {type(template).__name__}")
        super().__init__(
            f"{template.name}_{count}_shot" if name is None else name,
            version=template.version if version is None else version,
        )
        self.template, self.count, self.seed, self.id_column = template, count, seed, id_column
        self.label_format = label_format or ColumnFormat()
        self.instruction, self.answer, self.between = instruction, answer, between
        table = as_table(examples)
        if isinstance(labels, str) and labels in template.columns(()):
            raise ConfigError(f"template {template.name!r} renders the label column {labels!r}; exclude it")
        self._unsaid = frozenset((*targets, labels) if isinstance(labels, str) else targets)
        if not isinstance(labels, str):
            targets_in(table.schema.names, targets, template)
        said = self._said_labels(table, labels)
        table = self._without_labels(table)
        self._ids = self._id_hashes(table) if id_column is not None else None
        texts = template.render(table)
        self._texts = _hashes(texts)
        self._examples = join(_whole(texts), f"\n{answer}", said)

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        used = self.template.columns(self._visible(available))
        return used if self.id_column is None or self.id_column in used else (*used, self.id_column)

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        super().validate(columns)
        names = names_of(columns)
        self.template.validate(self._visible(names))

    def missing_rules(self) -> Mapping[str, str]:
        return self.template.missing_rules()

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        table = self._without_labels(table)
        used = self.template.columns(table.schema.names)
        texts = pc.cast(self.template.render_slice(table.select(list(used)), first_row), TEXT)
        ids = None if self.id_column is None else self._id_hashes(table)
        drawn = self._draw(_hashes(texts), ids, first_row)
        return self._assembled(texts, [self._examples.take(pa.array(column)) for column in drawn.T])

    def render_row(self, row: Any) -> str:
        values = as_row(row)
        self.validate(list(values))
        text = self.template.render_row({name: values[name] for name in self._visible(list(values))})
        one = pa.array([text], TEXT)
        ids = None if self.id_column is None else self._id_hashes(pa.table({self.id_column: [values[self.id_column]]}))
        drawn = self._draw(_hashes(one), ids, 0)
        return str(self._assembled(one, [self._examples.take(pa.array(column)) for column in drawn.T])[0].as_py())

    def rules(self) -> dict[str, Any]:
        # Columns that the template would render, also if a dataset hides some of them now.
        said = Context().run(self.template.columns, sorted(self._unsaid))
        return {
            "template": {"kind": identity(type(self.template)), **self.template.rules()},
            "examples": self._digest,
            "unsaid": [name for name in said if name in self._unsaid],
            "count": self.count,
            "seed": self.seed,
            "id_column": self.id_column,
            "instruction": self.instruction,
            "answer": self.answer,
            "between": self.between,
        }

    @cached_property
    def _digest(self) -> str:
        """Digest of the examples and their order, which both decide what is drawn."""
        digest = xxhash.xxh3_128()
        for text in self._examples.to_pylist():
            digest.update(f"{len(text)}:{text}".encode())
        if self._ids is not None:
            digest.update(self._ids.tobytes())
        return str(digest.hexdigest())

    def _assembled(self, texts: pa.Array, examples: Sequence[pa.Array]) -> pa.Array:
        first = [self.instruction] if self.instruction else []
        last = join(texts, f"\n{self.answer}".rstrip(" "))  # the model writes the space before the answer
        return join(*first, *examples, last, between=self.between)

    def _visible(self, names: Sequence[str]) -> list[str]:
        """Columns without label and targets, unless the template excludes them itself."""
        said = set(self.template.columns(names)) & self._unsaid
        return [name for name in names if name not in said]

    def _without_labels(self, table: pa.Table) -> pa.Table:
        return table.select(self._visible(table.schema.names))

    def _said_labels(self, table: pa.Table, labels: str | Sequence[Any]) -> pa.Array:
        if isinstance(labels, str):
            if labels not in table.schema.names:
                raise SchemaError(
                    f"the label column {labels!r} is not in the examples, which have {table.schema.names}"
                )
            values: Any = table[labels]
        else:
            values = as_table({"label": labels})["label"]
        if len(values) != table.num_rows:
            raise SchemaError(f"{table.num_rows} examples have {len(values)} labels; there must be one for each")
        said = ColumnFormatter(labels if isinstance(labels, str) else "label", self.label_format).many(values)
        if said.null_count:
            raise DataError(f"example {said.is_null().index(True).as_py()} has no label; leave such rows out")
        return said

    def _id_hashes(self, table: pa.Table) -> Hashes:
        assert self.id_column is not None
        if self.id_column not in table.schema.names:
            raise SchemaError(f"the id column {self.id_column!r} is not among {table.schema.names}")
        said = ColumnFormatter(self.id_column, ColumnFormat(missing="error")).many(table[self.id_column])
        return _hashes(said)

    def _draw(self, said: Hashes, ids: Hashes | None, first_row: int) -> Rows:
        """Numbers of the examples of each row: (rows, count), without repetition and without the row itself."""
        keys = mix64((said if ids is None else ids) ^ np.uint64(derive_key(self.seed, "few shot")))
        size = len(self._texts)
        drawn = np.full((len(keys), self.count), -1, np.int64)
        filled = np.zeros(len(keys), np.int64)
        open_rows = np.arange(len(keys))
        for turn in range(self.count * _TRIES_PER_EXAMPLE if size > 2 * self.count else 0):
            candidates = (mix64(keys[open_rows] + np.uint64(turn * _STEP % 2**64)) % np.uint64(size)).astype(np.int64)
            fits = (drawn[open_rows] != candidates[:, None]).all(axis=1) & self._foreign(
                candidates, said, ids, open_rows
            )
            taken = open_rows[fits]
            drawn[taken, filled[taken]] = candidates[fits]
            filled[taken] += 1
            open_rows = open_rows[filled[open_rows] < self.count]
            if not len(open_rows):
                return drawn
        everything = np.arange(size)
        for row in open_rows.tolist():  # few examples, or many equal ones: shuffle them all for this row
            mine = np.full(size, row)
            allowed = everything[self._foreign(everything, said, ids, mine)]
            if len(allowed) < self.count:
                raise DataError(
                    f"row {first_row + row}: {self.count} examples are needed, and {len(allowed)} of the {size} "
                    "differ from the row; pass more examples, or a lower count",
                    row=first_row + row,
                )
            order = np.argsort(mix64(mix64(allowed.astype(np.uint64)) + keys[row]), kind="stable")
            drawn[row] = allowed[order[: self.count]]
        return drawn

    def _foreign(self, candidates: Rows, said: Hashes, ids: Hashes | None, rows: Rows) -> npt.NDArray[np.bool_]:
        """Flags of candidates that are not the row itself."""
        foreign: npt.NDArray[np.bool_] = self._texts[candidates] != said[rows]
        if ids is not None and self._ids is not None:
            foreign &= self._ids[candidates] != ids[rows]
        return foreign


def _whole(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    wide = pc.cast(texts, TEXT)
    return wide.combine_chunks() if isinstance(wide, pa.ChunkedArray) else wide


def _hashes(texts: pa.Array | pa.ChunkedArray) -> Hashes:
    return hash64(_whole(texts), 0)
