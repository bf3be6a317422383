"""`TabularDataset`: any table of a competition, its rows said as texts and tokenised all at once."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean
from penstock.arrays.text import is_text
from penstock.datasets.base import DatasetSpec, KaggleDataset
from penstock.datasets.cache import digest_of, kept_table
from penstock.datasets.checks import (
    check_same_columns,
    check_unseen,
    feature_names,
    id_column_of,
    possible_id,
    seen_values,
)
from penstock.datasets.dates import with_dates
from penstock.datasets.labels import Labels
from penstock.datasets.tables import find_file, read_names, read_table, split_file
from penstock.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from penstock.datasets.folds import Folds
    from penstock.templates.base_template import BaseTemplate
    from penstock.templates.converters import TabularTextConverter

__all__ = ["TabularDataset", "Unseen"]

Unseen = Literal["error", "keep"]

_CUT = b"penstock.cut"
"""How many rows and tokens were cut, in the metadata of a table that is kept."""


class TabularDataset(KaggleDataset):
    """Rows of a CSV or Parquet table as texts, token ids and labels; works from the spec alone.

        dataset = TabularDataset(spec, "train", tokenizer="model/", folds=Folds(5))
        dataset[0]               {"text", "input_ids", "attention_mask", "labels", "metadata": {"id": ...}}
        dataset.to_columns()     the same for all rows at once, as loaders take it

    `template` is a style ("natural", "key_value", "markdown", "json", "list"), a sentence as it is written, a template
    or a converter; the target is never in the text, the id only where a template names it. What `exclude` names, or the
    spec ignores, is left out: of a sentence the `[...]` that it stands in. `few_shot=k` puts k labelled rows of the
    training fold, never the row itself, before each.

    All texts are rendered and tokenised together when they are first needed; with a `cache_dir` the ids are kept there
    under a key of the texts, labels and ids themselves, and mapped from there the next time, by any number of
    processes. Tokens are then not made again, texts are.

    The types of columns are those of the training file; ids and categories keep their zeros (see `read_table`). Where
    training has numbers and the spec says nothing, a code such as 01234 in another file is an error.

    Labels are class numbers (int32) by `class_names`, or float32 numbers; with several targets a row of them. Which
    classes there are is decided by the whole training file, whatever the fold. A value of a categorical column that
    neither the spec nor the training file knows is an error, or kept with `unseen="keep"`.
    """

    says_whole_rows: ClassVar[bool] = False

    def __init__(
        self,
        spec: DatasetSpec,
        split: str = "train",
        transform: Callable[[Any], Any] | None = None,
        cache_dir: str | Path | None = None,
        *,
        template: BaseTemplate | TabularTextConverter | str | None = None,
        exclude: Sequence[str] = (),
        few_shot: int = 0,
        unseen: Unseen = "error",
        folds: Folds | None = None,
        fold: int = 0,
        tokenizer: Any = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        if unseen not in ("error", "keep"):
            raise ConfigError(f"unseen must be 'error' or 'keep', got {unseen!r}")
        if isinstance(few_shot, bool) or not isinstance(few_shot, int) or few_shot < 0:
            raise ConfigError(f"few_shot must be a number of examples, got {few_shot!r}")
        self.unseen, self.few_shot = unseen, few_shot
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._wanted = template
        self._template: BaseTemplate | None = None
        self._texts: pa.Array | None = None
        self._encoded: pa.Table | None = None
        self._making = threading.RLock()
        self._ids_of_training: pa.Table | None = None
        super().__init__(
            spec,
            split,
            transform,
            cache_dir,
            folds=folds,
            fold=fold,
            tokenizer=tokenizer,
            max_length=max_length,
            add_special_tokens=add_special_tokens,
        )
        self._ids_of_training = None

    # -- rows --------------------------------------------------------------------------------------------------------

    def _load_data(self) -> None:
        self.file = split_file(self.spec, self.split)
        kinds: dict[str, Any] = {name: column.kind for name, column in self.spec.columns.items()}
        if self.spec.id_column is not None and kinds.get(self.spec.id_column) is None:
            kinds[self.spec.id_column] = "id"
        training, followed, formats = None, {}, self.spec.date_formats
        if self.split != "train":
            path = self._other_file("train")
            if path is not None:
                training, formats = self._read(path, kinds, formats)
            if training is not None:  # a word among the numbers of another file is a mistake, not a new type
                name = possible_id(training.column_names, self.spec)
                self._ids_of_training = training.select([] if name is None else [name])
                said, kinds = kinds, _followed(training, kinds, id_column_of(training, self.spec))
                followed = {
                    field.name: field.type
                    for field in training.schema
                    if kinds.get(field.name) == "numeric" and said.get(field.name) != "numeric"
                }
        self._data, _ = self._read(self.file, kinds, formats, followed)
        self._whole: pa.Table | None = self._data if training is None else training
        """The training file, until it is known what is needed of it."""

    def _validate_data(self) -> None:
        self._check_files()
        names = self._data.column_names
        for name in self.exclude:
            if name not in names and name not in self.spec.targets:
                raise SchemaError(f"exclude has {name!r}; the columns are {names}{did_you_mean(str(name), names)}")
        whole = self._whole if self.split == "train" or self._whole is not self._data else None
        if self.unseen == "error":
            check_unseen(self._data, self.spec, seen_values(whole, self.spec), self.split)
        self._label_rules = Labels.of(whole, self.spec)
        examples = self.spec.targets and self.few_shot
        self._whole = whole if examples else None

    @property
    def feature_names(self) -> list[str]:
        """The columns a style says: all but id, target, and those left out."""
        names = feature_names(self._data.column_names, self.spec, self.id_column)
        return [name for name in names if name not in self.exclude]

    def default_template(self) -> BaseTemplate | str:
        """What says the rows unless a `template` is given; datasets of one competition have their own."""
        return "natural"

    # -- texts and tokens --------------------------------------------------------------------------------------------

    @property
    def template(self) -> BaseTemplate:
        """What the texts are made by, few-shot examples included."""
        if self._template is None:
            from penstock.datasets.row_texts import few_shot_template, template_for

            wanted = self.default_template() if self._wanted is None else self._wanted
            made = template_for(wanted, self.feature_names, self.spec, id_column=self.id_column, exclude=self.exclude)
            if self.few_shot:
                made = few_shot_template(made, self._examples(), self.spec, self.few_shot, self.id_column)
            self._template = made
        return self._template

    def texts(self) -> pa.Array:
        """The text of every row, made once."""
        with self._making:
            if self._texts is None:
                self._texts = self.template.convert_table(self._data)
            return self._texts

    def encoded(self) -> pa.Table:
        """`input_ids` (lists), `labels` where there are some, and `id`, a row for each row; made once."""
        with self._making:
            if self._encoded is None:
                self._encoded = self._kept_or_made()
            return self._encoded

    @property
    def to_columns(self) -> Callable[[], pa.Table]:
        """`encoded`, for loaders that take a dataset whole. With a transform, which is of samples, there is none."""
        if self.transform is not None:
            raise AttributeError("to_columns: a dataset with a transform is read sample by sample")
        return self.encoded

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens each row has."""
        return np.concatenate([np.diff(np.asarray(chunk.offsets)) for chunk in self.encoded()["input_ids"].chunks])

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = operator.index(index)
        except TypeError:
            raise TypeError(
                f"a row is asked for by its number, got {index!r:.80}; for several: [dataset[i] for i in range(0, 3)], "
                "or dataset.encoded().slice(0, 3) for their columns"
            ) from None
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"row {index} is out of range: {self!r}")
        row %= count
        encoded = self.encoded()
        ids = np.asarray(encoded["input_ids"][row].values).astype(np.int32)
        sample: dict[str, Any] = {
            "text": self.texts()[row].as_py(),
            "input_ids": ids,
            "attention_mask": np.ones(len(ids), np.int32),
        }
        if "labels" in encoded.column_names:
            sample["labels"] = np.asarray(encoded["labels"][row].as_py(), self._label_rules.dtype)[()]
        sample["metadata"] = {"id": encoded["id"][row].as_py()}
        return sample

    # -- inside ------------------------------------------------------------------------------------------------------

    def _read(
        self,
        path: Any,
        kinds: dict[str, Any],
        date_formats: Mapping[str, str],
        followed: dict[str, pa.DataType] | None = None,
    ) -> tuple[pa.Table, dict[str, str]]:
        """The rows of a file, and the formats of its dates: those that are given, and those that its values tell."""
        table = read_table(
            path,
            delimiter=self.spec.delimiter,
            encoding=self.spec.encoding,
            kinds=kinds,
            followed=followed,
            date_formats=date_formats,
        )
        taken = {*self.spec.targets, possible_id(table.column_names, self.spec)}
        free = [name for name in table.column_names if kinds.get(name) is None and name not in taken]
        return with_dates(table, free, file=path.name, formats=date_formats)

    def _other_file(self, split: str) -> Any | None:
        return split_file(self.spec, split) if split in self.spec.files else find_file(self.spec.dataset_path, split)

    def _check_files(self) -> None:
        """The other of training and test file must have the same columns."""
        other = "test" if self.split == "train" else "train"
        path = self._other_file(other)
        if path is not None:
            names = read_names(path, delimiter=self.spec.delimiter, encoding=self.spec.encoding)
            check_same_columns({self.split: self._data.column_names, other: names}, self.spec)

    def _training_ids(self) -> pa.Table | None:
        return super()._training_ids() if self._ids_of_training is None else self._ids_of_training

    def _examples(self) -> pa.Table:
        """The rows that may be shown as examples: the training fold, or the training file if there are no folds."""
        if self._whole is None:
            raise ConfigError(
                f"few_shot={self.few_shot} needs a training file and a target column; "
                f"{str(self.spec.dataset_path)!r} has {'no target' if not self.spec.targets else 'no train file'}"
            )
        if self.folds is None:
            return self._whole
        return self._whole.take(pa.array(self.folds.split(self._whole, self.spec, self.fold).train))

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the samples: texts, labels, ids, and how they are encoded; but for a transform."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self._key, option=orjson.OPT_SORT_KEYS))

    @functools.cached_property
    def _key(self) -> dict[str, str]:
        """What is encoded, rather than what it was made from: a file may change, and a subclass change its rows."""
        said = {"text": self.texts(), "labels": self.labels(), "id": self.ids()}
        return {"content": digest_of(said), "encoder": self.encoder.fingerprint}

    def _kept_or_made(self) -> pa.Table:
        if self.cache_dir is None:
            return self._make_columns()
        before = self.cut_rows
        table = kept_table(self.cache_dir, self._key, self._make_columns, rows=len(self))
        if self.cut_rows == before:  # not made here: what was cut when it was made is still cut
            rows, tokens = orjson.loads(table.schema.metadata[_CUT])
            self.encoder.count_cut(rows, tokens, len(self))
        return table

    def _make_columns(self) -> pa.Table:
        rows, tokens = self.cut_rows, self.cut_tokens
        columns: dict[str, Any] = {"input_ids": self.encoder.encode(self.texts())}
        labels = self.labels()
        if labels is not None:
            columns["labels"] = _arrow(labels)
        columns["id"] = self.ids()
        cut = orjson.dumps([self.cut_rows - rows, self.cut_tokens - tokens])
        return pa.table(columns, metadata={_CUT: cut})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_making"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._making = threading.RLock()


def _followed(training: pa.Table, told: dict[str, Any], id_column: str | None) -> dict[str, Any]:
    """The kinds of columns that another file has to follow: those of the spec, and those that training shows."""
    kinds: dict[str, Any] = {}
    for field in training.schema:
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            kinds[field.name] = "numeric"
        elif pa.types.is_temporal(field.type):
            kinds[field.name] = "date"
        elif pa.types.is_boolean(field.type):
            kinds[field.name] = "boolean"
        elif is_text(field.type):
            kinds[field.name] = "text"
    categories = {
        name: "categorical" for name, kind in told.items() if kind == "categorical" and kinds.get(name) != "text"
    }
    said = {name: kind for name, kind in told.items() if kind not in (None, "categorical")}
    ids = {id_column: "id"} if id_column is not None and id_column not in said else {}
    return kinds | categories | said | ids


def _arrow(labels: npt.NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(labels).reshape(-1))
    return flat if labels.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, labels.shape[1])
