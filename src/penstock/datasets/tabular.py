"""`TabularDataset`: any table of a competition, rendered as texts and tokenised at once."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock._forks import renewed
from penstock._suggest import did_you_mean
from penstock.arrays.text import is_text
from penstock.connections.shared_cache import CacheSpec, shared_cache
from penstock.datasets.base import DatasetSpec, KaggleDataset
from penstock.datasets.dates import with_dates
from penstock.datasets.labels import Labels
from penstock.datasets.rows import (
    check_same_columns,
    check_unseen,
    digest_of,
    id_column_of,
    possible_id,
    seen_values,
)
from penstock.datasets.tables import find_file, read_names, read_table, split_file
from penstock.datasets.text_encoder import few_shot_template, kept_table, template_for
from penstock.errors import ConfigError, SchemaError
from penstock.files.cache import default_cache_directory

if TYPE_CHECKING:
    from penstock.datasets.folds import Folds
    from penstock.templates.base_template import BaseTemplate
    from penstock.templates.converters import TabularTextConverter

Unseen = Literal["error", "keep"]

_CUT = b"penstock.cut"
"""Metadata key of cached tables: the numbers of truncated rows and lost tokens."""


class DatasetOptions(TypedDict, total=False):
    """Options that every dataset takes."""

    folds: Folds | None
    fold: int | None
    tokenizer: Any
    max_length: int | None
    add_special_tokens: bool
    cache: CacheSpec | None


class TabularDataset(KaggleDataset):
    """Rows of a CSV or Parquet table as texts, token ids and labels, from the spec alone.

        dataset = TabularDataset(spec, "train", tokenizer="model/", folds=Folds(5))
        dataset[0]               {"text", "input_ids", "attention_mask", "labels", "metadata": {"id": ...}}
        dataset.to_columns()     the same for all rows at once, as loaders take it

    `template` is a style ("natural", "key_value", "markdown", "json", "list"), a written sentence, a template or a
    converter. The text never contains the target, and the id only if the template names it. `exclude` omits columns,
    and the `[...]` parts of a sentence that name them. `few_shot=k` puts k labelled rows of the training fold, never
    the row itself, before each row. `options` are those of `KaggleDataset`: `folds`, `fold`, `tokenizer`, `max_length`,
    `add_special_tokens`, `cache`.

    All texts are rendered and tokenised together on first use. With a `cache_dir` the token ids are cached under a key
    of the texts, labels and ids, and mapped by any number of processes. With a `cache` (its URL, see `open_cache`)
    other machines find them there.

    Columns have the types of the training file; ids and categories keep leading zeros (see `read_table`). If training
    has numbers and the spec has no kind for a column, a code such as 01234 in another file is an error.

    Labels are class numbers (int32) by `class_names`, or float32 numbers; with several targets a row of them. The whole
    training file decides which classes there are. A category that neither the spec nor the training file has is an
    error, or kept with `unseen="keep"`.
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
        **options: Unpack[DatasetOptions],
    ) -> None:
        if unseen not in ("error", "keep"):
            raise ConfigError(f"unseen must be 'error' or 'keep', got {unseen!r}")
        if isinstance(few_shot, bool) or not isinstance(few_shot, int) or few_shot < 0:
            raise ConfigError(f"few_shot must be a number of examples, got {few_shot!r}")
        self.unseen, self.few_shot = unseen, few_shot
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._given_template = template
        self._template: BaseTemplate | None = None
        self._texts: pa.Array | None = None
        self._encoded: pa.Table | None = None
        self._lock = renewed(threading.RLock())
        self._ids_of_training: pa.Table | None = None
        super().__init__(spec, split, transform, cache_dir, **options)
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
            if training is not None:  # a word in a column of numbers is a mistake, not a new type
                name = possible_id(training.column_names, self.spec)
                self._ids_of_training = training.select([] if name is None else [name])
                given, kinds = kinds, _followed(training, kinds, id_column_of(training, self.spec))
                followed = {
                    field.name: field.type
                    for field in training.schema
                    if kinds.get(field.name) == "numeric" and given.get(field.name) != "numeric"
                }
        self._data, _ = self._read(self.file, kinds, formats, followed)
        self._whole: pa.Table | None = self._data if training is None else training
        """Training file, dropped after validation unless few-shot examples need it."""

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
        """Columns that a style renders: all but id, target and excluded ones."""
        others = {self.id_column, *self.spec.targets, *self.spec.ignored, *self.exclude}
        return [name for name in self._data.column_names if name not in others]

    def default_template(self) -> BaseTemplate | str:
        """Default of `template`; datasets of one competition override it."""
        return "natural"

    # -- texts and tokens --------------------------------------------------------------------------------------------

    @property
    def template(self) -> BaseTemplate:
        """Template of the texts, with few-shot examples."""
        if self._template is None:
            template = self.default_template() if self._given_template is None else self._given_template
            made = template_for(template, self.feature_names, self.spec, id_column=self.id_column, exclude=self.exclude)
            if self.few_shot:
                made = few_shot_template(made, self._examples(), self.spec, self.few_shot, self.id_column)
            self._template = made
        return self._template

    def texts(self) -> list[str]:
        """Text of every row."""
        return self._text_column().to_pylist()  # type: ignore[no-any-return]

    def _text_column(self) -> pa.Array:
        """Text of every row, rendered once."""
        with self._lock:
            if self._texts is None:
                self._texts = self.template.convert_table(self._data)
            return self._texts

    def encoded(self) -> pa.Table:
        """Table with `input_ids` (lists), `labels` if there are any, and `id`; made once."""
        with self._lock:
            if self._encoded is None:
                self._encoded = self._kept_or_made()
            return self._encoded

    @property
    def to_columns(self) -> Callable[[], pa.Table]:
        """`encoded`, for loaders that read whole datasets; missing with a transform, which applies to samples."""
        if self.transform is not None:
            raise AttributeError("a dataset with a transform has no to_columns; it is read sample by sample")
        return self.encoded

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each row."""
        return np.concatenate([np.diff(np.asarray(chunk.offsets)) for chunk in self.encoded()["input_ids"].chunks])

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = operator.index(index)
        except TypeError:
            raise TypeError(
                f"the index of a row is an integer, got {index!r:.80}; for several rows use "
                "[dataset[i] for i in range(0, 3)], or dataset.encoded().slice(0, 3) for their columns"
            ) from None
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"row {index} is out of range: {self!r}")
        row %= count
        encoded = self.encoded()
        ids = np.asarray(encoded["input_ids"][row].values).astype(np.int32)
        sample: dict[str, Any] = {
            "text": self._text_column()[row].as_py(),
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
        formats: Mapping[str, str],
        followed: dict[str, pa.DataType] | None = None,
    ) -> tuple[pa.Table, dict[str, str]]:
        """Rows of a file, and the formats of its dates: the given ones, and those found in its values."""
        spec = self.spec
        table = read_table(path, kinds=kinds, followed=followed, date_formats=formats, **spec.csv_options)
        taken = {*spec.targets, possible_id(table.column_names, spec)}
        free = [name for name in table.column_names if kinds.get(name) is None and name not in taken]
        return with_dates(table, free, file=path.name, formats=formats)

    def _other_file(self, split: str) -> Any | None:
        return split_file(self.spec, split) if split in self.spec.files else find_file(self.spec.dataset_path, split)

    def _check_files(self) -> None:
        """Check that training and test file have the same columns."""
        other = "test" if self.split == "train" else "train"
        path = self._other_file(other)
        if path is not None:
            names = read_names(path, **self.spec.csv_options)
            check_same_columns({self.split: self._data.column_names, other: names}, self.spec)

    def _training_ids(self) -> pa.Table | None:
        return super()._training_ids() if self._ids_of_training is None else self._ids_of_training

    def _examples(self) -> pa.Table:
        """Rows for few-shot examples: the training fold, or the training file without folds."""
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
        """16 hex digits of the samples: texts, labels, ids and encoder, but not the transform."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self._key, option=orjson.OPT_SORT_KEYS))

    @functools.cached_property
    def _key(self) -> dict[str, str]:
        # Of the content, and not of its source: a file may change, and a subclass may change its rows.
        content = digest_of({"text": self._text_column(), "labels": self.labels(), "id": self.ids()})
        return {"content": content, "encoder": self.encoder.fingerprint}

    def _kept_or_made(self) -> pa.Table:
        if self.cache_dir is None and self.cache is None:
            return self._make_columns()
        before, directory = self.cut_rows, self.cache_dir or default_cache_directory() / "tables"
        shared = None if self.cache is None else shared_cache(self.cache)
        table = kept_table(directory, self._key, self._make_columns, rows=len(self), cache=shared)
        if self.cut_rows == before:  # read from the cache, with the counts of its making
            rows, tokens = orjson.loads(table.schema.metadata[_CUT])
            self.encoder.count_cut(rows, tokens, len(self))
        return table

    def _make_columns(self) -> pa.Table:
        rows, tokens = self.cut_rows, self.cut_tokens
        columns: dict[str, Any] = {"input_ids": self.encoder.encode(self._text_column())}
        labels = self.labels()
        if labels is not None:
            columns["labels"] = _arrow(labels)
        columns["id"] = self.ids()
        cut = orjson.dumps([self.cut_rows - rows, self.cut_tokens - tokens])
        return pa.table(columns, metadata={_CUT: cut})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = renewed(threading.RLock())


def _followed(training: pa.Table, given: dict[str, Any], id_column: str | None) -> dict[str, Any]:
    """Kinds of columns for other files: those of the spec, and those that the training file shows."""
    found = {field.name: _kind_of(field.type) for field in training.schema}
    kinds: dict[str, Any] = {name: kind for name, kind in found.items() if kind is not None}
    for name, kind in given.items():
        if kind not in (None, "categorical") or (kind == "categorical" and kinds.get(name) != "text"):
            kinds[name] = kind
    if id_column is not None and given.get(id_column) in (None, "categorical"):
        kinds[id_column] = "id"
    return kinds


def _kind_of(kind: pa.DataType) -> str | None:
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "numeric"
    if pa.types.is_temporal(kind):
        return "date"
    return "boolean" if pa.types.is_boolean(kind) else "text" if is_text(kind) else None


def _arrow(labels: npt.NDArray[Any]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(labels).reshape(-1))
    return flat if labels.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, labels.shape[1])
