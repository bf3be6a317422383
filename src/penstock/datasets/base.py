"""`KaggleDataset`, the base of every dataset, with the types of a competition's data."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean
from penstock.connections.shared_cache import CacheSpec, require_cache_dir, shared_cache
from penstock.datasets.labels import Labels, score_rows, target_values, training_values
from penstock.datasets.rows import (
    check_data,
    check_ids,
    column_names,
    column_of,
    content_of,
    id_column_of,
    possible_id,
    shared_ids,
    take_rows,
    with_plain_targets,
)
from penstock.datasets.spec import SPLITS, ColumnKind, ColumnSpec, CompetitionType, DataFiles, DatasetSpec, plain
from penstock.datasets.tables import explain_missing, file_contents, find_file, read_names, read_table, split_file
from penstock.errors import ConfigError, DataError, PenstockError, SchemaError
from penstock.templates.columns import hiding

if TYPE_CHECKING:
    from penstock.datasets.folds import Folds
    from penstock.datasets.metrics import Metric
    from penstock.datasets.predictions import PredictionsAre
    from penstock.datasets.text_encoder import TextEncoder
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["ColumnKind", "ColumnSpec", "CompetitionType", "DataFiles", "DatasetSpec", "KaggleDataset"]

log = logging.getLogger(__name__)

_OPTIONS = ("folds", "fold", "tokenizer", "max_length", "add_special_tokens", "cache")
_SYNONYMS = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "eval": "val", "testing": "test"}
_active = threading.local()
"""Datasets whose own methods run in this thread, by id."""


class KaggleDataset(ABC):
    """Rows of one split of a competition, as samples: dicts of a text, its token ids and its label.

    A subclass defines how rows are read, how they are validated, and what a sample is:

        class HousePricesDataset(KaggleDataset):
            def _load_data(self):
                self._data = pd.read_csv(self.spec.dataset_path / f"{self.split}.csv")

            def _validate_data(self): ...

            def __getitem__(self, index): ...

    The base adds the following, by keywords that the subclass's constructor need not name:

    - `folds`, `fold`: "train" and "val" are the two sides of that fold of the training file, the same in every process.
      The default is fold 0; in time it is the last one, which trains on most of the past.
      Inside the dataset's own methods `self.split` is the file of its rows ("train"), so that a dataset written for
      `train.csv` and `test.csv` needs no change; outside it is "val".
    - `transform`, applied to every sample once, also if `__getitem__` calls itself or its parent's.
    - `tokenizer`, `max_length`, `add_special_tokens` for `_tokenize`. The default tokenizer encodes bytes. Truncated
      texts are counted in `cut_rows` and `cut_tokens`, and logged.
    - Validation against the spec: counts, target, ids, columns without a value, ids that the val and the training file
      share. A warning is logged if the text of the first sample contains its target.

    `_data` may be a pandas or Polars DataFrame, a `pyarrow.Table`, or a list of dicts. Integer targets of a pandas
    frame become Python numbers (floats for a regression), since `mx.array([row["y"]])` refuses NumPy's.
    """

    competition: ClassVar[str | None] = None
    """Name of the competition; None: derived from the name of the class."""
    spec_from: ClassVar[str] = "infer(path).spec"
    """Expression that makes a spec from a directory, for error messages."""
    says_whole_rows: ClassVar[bool] = True
    """True if a text may contain the target, so that the first sample is checked."""
    metric: str | Metric | None = None
    """Default metric of `score` and `submission`."""
    data_version: int | None = None
    """Version of the competition's data in the registry that loaded it."""

    _data: Any

    def __init__(
        self,
        spec: DatasetSpec,
        split: str = "train",
        transform: Callable[[Any], Any] | None = None,
        cache_dir: str | Path | None = None,
        *,
        folds: Folds | None = None,
        fold: int | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        cache: CacheSpec | None = None,
    ) -> None:
        given = self.__dict__.pop("_given", {})
        if not isinstance(spec, DatasetSpec):
            hint = f"; for a directory use {self.spec_from}" if isinstance(spec, str | os.PathLike) else ""
            raise ConfigError(f"a dataset needs a DatasetSpec, got {spec!r:.80}{hint}")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be a function of a sample, got {transform!r}")
        self.spec, self.transform = spec, transform
        self._check_leak = self.says_whole_rows
        self.cache_dir = require_cache_dir(cache_dir) if cache_dir is not None else None
        self.cache: CacheSpec | None = given.get("cache", cache)
        if self.cache is not None:
            shared_cache(self.cache)
        self.folds: Folds | None = given.get("folds", folds)
        self.fold: int = self._fold_of(plain(given.get("fold", fold)))
        self._tokenizer: Any = given.get("tokenizer", tokenizer)
        self.max_length: int | None = plain(given.get("max_length", max_length))
        self.add_special_tokens: bool = given.get("add_special_tokens", add_special_tokens)
        self._encoder: TextEncoder | None = None
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 1):
            raise ConfigError(f"max_length must be a number of tokens or None, got {self.max_length!r}")
        self.split = split
        self.rows: npt.NDArray[np.int64] | None = None
        """Row numbers of this fold in the training file; None without folds."""
        self._source = self._source_of(split)
        self._load()

    @property
    def split(self) -> str:
        """Split of the dataset; inside the dataset's own methods, the split of the file that its rows are from."""
        return self._source if id(self) in _active_datasets() else self._split

    @split.setter
    def split(self, split: str) -> None:
        if split not in SPLITS:
            meant = _SYNONYMS.get(str(split).lower(), str(split).lower())
            raise ConfigError(f"split must be one of {list(SPLITS)}, got {split!r}{did_you_mean(meant, SPLITS)}")
        self._split = self._source = split

    @abstractmethod
    def _load_data(self) -> None:
        """Read the rows of `self.split` into `self._data`."""

    @abstractmethod
    def _validate_data(self) -> None:
        """Raise if `self._data` is invalid."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample."""

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def has_labels(self) -> bool:
        """True unless the rows are from the test file."""
        return self._source != "test"

    @property
    def id_column(self) -> str | None:
        """Column of the ids: that of the spec, or the first column if its name is that of an id and it is unique.

        The whole training file decides, for every split and fold. `columns={"store_id": "categorical"}` in the spec
        declares that a column is not an id.
        """
        return self._id_column

    def ids(self) -> pa.Array:
        """Id of every row; row numbers in a competition without ids."""
        if self._id_column is None:
            return pa.array(np.arange(len(self)) if self.rows is None else self.rows)
        return column_of(self._data, self._id_column)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the samples, loaded on first use."""
        return self.encoder.tokenizer

    @property
    def encoder(self) -> TextEncoder:
        """Encoder of texts: tokenizer, special tokens around a text, and length limit."""
        if self._encoder is None:
            from penstock.datasets.text_encoder import TextEncoder

            tokenizer = "byte" if self._tokenizer is None else self._tokenizer
            special = self.add_special_tokens
            self._encoder = TextEncoder.of(tokenizer, add_special_tokens=special, max_length=self.max_length)
        return self._encoder

    @property
    def cut_rows(self) -> int:
        """Number of encoded texts that were longer than `max_length`."""
        return 0 if self._encoder is None else self._encoder.cut_rows

    @property
    def cut_tokens(self) -> int:
        """Number of tokens that these texts lost."""
        return 0 if self._encoder is None else self._encoder.cut_tokens

    @property
    def fingerprint(self) -> str:
        """16 hex digits of class, spec, split, fold and values.

        Rows that are not a table (a list of arrays, say) count by the content of their file, if it has a usual name.
        """
        rows = None if self.rows is None else xxhash.xxh3_128_hexdigest(self.rows.tobytes())
        content = content_of(self._data)
        if content is None and (file := file_contents(self.spec, [self._source]).get(self._source)) is not None:
            content = file.checksum
        parts = [type(self).__qualname__, self.spec.to_dict(), self._split, rows, len(self), self.max_length, content]
        return xxhash.xxh3_64_hexdigest(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS, default=str))

    # -- targets -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def class_names(self) -> tuple[Any, ...] | None:
        """Values of the target in the order of their class numbers; None without classes."""
        return self._label_rules.classes

    def targets(self) -> npt.NDArray[Any] | None:
        """Targets as they are in the file; None for a test file."""
        return self._label_rules.values(self._data) if self.has_labels and self.spec.targets else None

    def labels(self) -> npt.NDArray[Any] | None:
        """Targets for training: class numbers (int32), numbers (float32), or (rows, targets); None for a test file."""
        return self._label_rules.numbers(self._data) if self.has_labels and self.spec.targets else None

    def class_of(self, predictions: Any) -> npt.NDArray[Any]:
        """Class names of predictions: class numbers, (rows, classes) of scores, or probabilities of the second class.

        `score` and `submission` recognise the returned array as names, also if the names are numbers.
        """
        return self._label_rules.class_of(predictions)

    def score(
        self, predictions: Any, metric: str | Metric | None = None, *, predictions_are: PredictionsAre | None = None
    ) -> float:
        """Score of predictions for these rows, by a metric or by that of the competition (`self.metric`).

        Classes may be given as numbers, as names, as the probability of the second class, or as (rows, classes) of
        scores; several columns as an array in the order of classes or targets, or by their names. Plain numbers that
        may be numbers or names of classes are refused unless `predictions_are` is "numbers" or "names".
        """
        from penstock.datasets.metrics import get_metric

        if not self.has_labels or not self.spec.targets:
            raise ConfigError(f"{self!r} has no targets to score against; score a training or validation split")
        wanted = self.metric if metric is None else metric
        if wanted is None:
            raise ConfigError(
                f"{self.spec.competition_name!r} has no default metric; pass one, such as "
                "score(predictions, metadata.evaluation_metric), or set dataset.metric"
            )
        return score_rows(
            self._label_rules, self._data, predictions, get_metric(wanted),
            ids=self.ids(), id_column=self.id_column, are=predictions_are,
        )  # fmt: skip

    def submission(self, predictions: Any, path: str | Path, **options: Any) -> Path:
        """Write the submission file; see `penstock.datasets.submission.write_submission`."""
        from penstock.datasets.submission import write_submission

        return write_submission(self, predictions, path, **options)

    def __repr__(self) -> str:
        fold = "" if self.folds is None else f", fold {self.fold} of {self.folds.count}"
        return f"{type(self).__name__}({self.spec.competition_name!r}, {self._split!r}{fold}: {len(self)} rows)"

    def _tokenize(self, text: str) -> dict[str, list[int]]:
        """Token ids of a text, with a mask of ones."""
        ids = self.encoder.encode(pa.array([text], pa.string()))[0].as_py()
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    # -- inside ------------------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A dataset as the design document prints it has a constructor of four parameters and a `__getitem__` that
        # reads `self.split`. These two wrappers give it folds, a tokenizer and a transform.
        if "__init__" in cls.__dict__:
            cls.__init__ = _with_options(cls.__dict__["__init__"])  # type: ignore[method-assign]
        if "__getitem__" in cls.__dict__ and not getattr(cls.__getitem__, "__isabstractmethod__", False):
            cls.__getitem__ = _transformed(cls.__dict__["__getitem__"])  # type: ignore[method-assign]

    @functools.cached_property
    def _label_rules(self) -> Labels:
        whole = self._class_values if self._source == "train" else training_values(self.spec)
        return Labels.of_values(whole, self.spec)

    def _fold_of(self, given: int | None) -> int:
        """Number of the fold; by default the first, or in time the last, which trains on most of the past."""
        if given is not None:
            return given
        folds = self.folds
        if folds is None or not hasattr(folds, "kind_for") or folds.kind_for(self.spec) != "time":
            return 0
        return folds.count - 1

    def _source_of(self, split: str) -> str:
        """Split whose file has the rows; raises if folds and split do not fit."""
        if self.folds is not None and not hasattr(self.folds, "split"):
            raise ConfigError(f"folds must be Folds(...), such as Folds(5), got {self.folds!r}")
        if self.folds is None:
            has_file = "val" in self.spec.files or find_file(self.spec.dataset_path, "val") is not None
            if split == "val" and not has_file:
                raise ConfigError(
                    f"split='val' of {self.spec.competition_name!r} needs a val file or folds: pass the same "
                    "folds=Folds(5) to split='train' and split='val'"
                )
            return split
        if isinstance(self.fold, bool) or not isinstance(self.fold, int) or not 0 <= self.fold < self.folds.count:
            raise ConfigError(f"fold must be from 0 to {self.folds.count - 1}, got {self.fold!r}")
        return "test" if split == "test" else "train"

    def _load(self) -> None:
        with _inside(self):
            try:
                self._load_data()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise FileNotFoundError(explain_missing(self.spec, self._source, error)) from error
            if getattr(self, "_data", None) is None:
                raise DataError(f"{type(self).__name__}._load_data() must assign the rows to self._data")
            self._validate_data()
        check_data(self._data, self.spec, self._source, test_columns=self._test_columns)
        self._id_column = self._find_id_column()
        if self._id_column is not None and self._source != "train":
            self._check_other_ids(column_of(self._data, self._id_column))
        if self._source != "test":
            classes = self.spec.competition_type.is_classification or self.spec.competition_type.has_classes
            self._data = with_plain_targets(self._data, self.spec.targets, as_floats=not classes)
        self._class_values = target_values(self._data, self.spec) if self._source == "train" else None
        if self.folds is not None and self._source == "train":
            chosen = self.folds.split(self._data, self.spec, self.fold)
            self.rows = chosen.train if self._split == "train" else chosen.val
            if not len(self.rows):
                raise SchemaError(f"fold {self.fold} of {self.folds} has no rows for {self._split!r}; use fewer folds")
            self._data = take_rows(self._data, self.rows)
        log.debug("%r read from %s", self, self.spec.dataset_path)

    def _find_id_column(self) -> str | None:
        if self._source == "train" or self.spec.id_column is not None:
            return id_column_of(self._data, self.spec)
        training = self._training_ids()
        found = id_column_of(self._data if training is None else training, self.spec)
        return found if found in column_names(self._data) else None

    def _test_columns(self) -> list[str]:
        """Columns of the test file; none if there is no readable test file."""
        try:
            return read_names(split_file(self.spec, "test"), **self.spec.csv_options)
        except (OSError, PenstockError):
            return []

    def _training_ids(self) -> pa.Table | None:
        """Possible id column of the training file; None if there is no readable training file."""
        try:
            path = split_file(self.spec, "train")
            name = possible_id(read_names(path, **self.spec.csv_options), self.spec)
            return (
                pa.table({})
                if name is None
                else read_table(path, columns=[name], kinds={name: "id"}, **self.spec.csv_options)
            )
        except (OSError, PenstockError) as error:  # a dataset may read other files in another way
            log.debug("the ids of the training file of %r are unknown: %s", self.spec.competition_name, error)
            return None

    def _check_other_ids(self, ids: pa.Array) -> None:
        """Check the ids of a val or test file: they are unique, and no id of val is in the training file."""
        name = str(self._id_column)
        if self.spec.id_column is None:
            check_ids(ids, name, self._source)
        training = self._training_ids() if self._source == "val" else None
        if training is None or name not in training.column_names:
            return
        both = shared_ids(ids, column_of(training, name))
        if not len(both):
            return
        problem = (
            f"{len(both)} of the {len(ids)} ids of the val file are in the training file too, such as "
            f"{both[0].as_py()!r} in {name!r}"
        )
        if self.spec.id_column is not None:
            raise DataError(f"{problem}; remove them from one of the files, or pass folds=Folds(5) instead")
        log.warning("%s; if they are the same rows, validation scores are too good", problem)


def _active_datasets() -> set[int]:
    datasets: set[int] = _active.__dict__.setdefault("datasets", set())
    return datasets


@contextmanager
def _inside(dataset: KaggleDataset) -> Iterator[bool]:
    """Mark that a dataset's own method runs in this thread; yields False in nested calls.

    While active, templates that render whole rows omit the target columns and the id.
    """
    active, key = _active_datasets(), id(dataset)
    if key in active:
        yield False
        return
    active.add(key)
    try:
        shown = dataset.spec.id_column
        with hiding(dataset.spec.targets if shown is None else (*dataset.spec.targets, shown)):
            yield True
    finally:
        active.discard(key)


def _with_options(own: Callable[..., None]) -> Callable[..., None]:
    """Constructor that also takes the base's options that it does not name, and leaves them for the base."""
    parameters = inspect.signature(own).parameters
    others = [name for name in _OPTIONS if name not in parameters]
    if not others or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return own

    @functools.wraps(own)
    def __init__(self: KaggleDataset, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if given := {name: kwargs.pop(name) for name in others if name in kwargs}:
            self.__dict__["_given"] = self.__dict__.get("_given", {}) | given
        own(self, *args, **kwargs)

    return __init__


def _transformed(own: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """`__getitem__` whose outermost call applies the dataset's transform."""

    @functools.wraps(own)
    def __getitem__(self: KaggleDataset, index: int) -> Any:  # noqa: N807
        with _inside(self) as outermost:
            sample = own(self, index)
        if not outermost:
            return sample
        if self.__dict__.get("_check_leak"):
            self._check_leak = False
            _warn_of_leak(self, index, sample)
        if self.transform is None:
            return sample
        changed = self.transform(sample)
        if changed is None:
            raise DataError(f"transform returned None for row {index} of {self!r}; it must return the sample")
        return changed

    return __getitem__


def _warn_of_leak(dataset: KaggleDataset, index: int, sample: Any) -> None:
    """Warn if the text of a sample contains the target: a model would learn to read it off."""
    text = sample.get("text") if isinstance(sample, dict) else None
    if not isinstance(text, str) or not isinstance(index, int | np.integer) or not dataset.has_labels:
        return
    for target in dataset.spec.targets:
        value = column_of(dataset._data, target)[int(index) % len(dataset)].as_py()
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if all(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text) for word in (target, value)):
            log.warning(
                "the text of row %s contains %s, the target: %.80r...; exclude it, for example with "
                "TabularTextConverter(target=%r)", index, target, text, target,
            )  # fmt: skip
