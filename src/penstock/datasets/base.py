"""Fundamental types of a competition's data, and `KaggleDataset`, the base of every dataset."""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean
from penstock.datasets.cache import content_of
from penstock.datasets.checks import check_data, check_ids, id_column_of, possible_id, shared_ids
from penstock.datasets.frames import column_names, column_of, take_rows, with_plain_targets
from penstock.datasets.labels import Labels, target_values, training_values
from penstock.datasets.spec import SPLITS, ColumnKind, ColumnSpec, CompetitionType, DatasetSpec, plain
from penstock.datasets.wrap import Inside, is_inside, transformed, with_options
from penstock.errors import ConfigError, DataError, PenstockError, SchemaError
from penstock.files.filesystems import require_local

if TYPE_CHECKING:
    from penstock.datasets.folds import Folds
    from penstock.datasets.metrics import Metric
    from penstock.datasets.predictions import PredictionsAre
    from penstock.datasets.text_encoder import TextEncoder
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["ColumnKind", "ColumnSpec", "CompetitionType", "DatasetSpec", "KaggleDataset"]

log = logging.getLogger(__name__)

_MEANT = {"training": "train", "valid": "val", "validation": "val", "dev": "val", "eval": "val", "testing": "test"}


class KaggleDataset(ABC):
    """The rows of one split of a competition, as samples: dicts of a text, its token ids and its label.

    A dataset says how its rows are read, what they must be, and what a sample is:

        class HousePricesDataset(KaggleDataset):
            def _load_data(self):
                self._data = pd.read_csv(self.spec.dataset_path / f"{self.split}.csv")

            def _validate_data(self): ...

            def __getitem__(self, index): ...

    and gets for it, by keywords that its own constructor need not know:

    - `folds`, `fold`: "train" and "val" are then the two sides of that fold of the training file, the same in every
      process. While the dataset's own methods run, `self.split` is the file that its rows are from, so that a dataset
      written for `train.csv` and `test.csv` needs no change; for everybody else it is "val".
    - `transform`, applied to every sample exactly once, however often `__getitem__` calls itself or its parent's.
    - `tokenizer`, `max_length`, `add_special_tokens` for `_tokenize`; without a tokenizer, tokens are bytes. What is
      cut off is counted in `cut_rows` and `cut_tokens` and logged.
    - a check of the rows against the spec: counts, target, ids, columns without a single value, ids of a val file that
      the training file has too; and a warning if the text of the first sample says its target.

    `_data` may be a pandas or Polars DataFrame, a `pyarrow.Table`, or a list of dicts. Whole-number targets of a pandas
    frame are made Python's numbers (floats for a regression), since `mx.array([row["y"]])` refuses NumPy's.
    """

    competition: ClassVar[str | None] = None
    """The name of the competition; None: told by the name of the class."""

    spec_from: ClassVar[str] = "infer(path).spec"
    """What makes a spec from a directory, for whoever gives the directory itself."""

    says_whole_rows: ClassVar[bool] = True
    """Whether a text might have the target in it: the first sample is then looked at, and a warning logged."""

    metric: str | Metric | None = None
    """How the competition scores, which `score` and `submission` go by unless they are told otherwise."""

    data_version: int | None = None
    """Which version of the competition's data this is, by its number in the registry that loaded it."""

    _data: Any

    def __init__(
        self,
        spec: DatasetSpec,
        split: str = "train",
        transform: Callable[[Any], Any] | None = None,
        cache_dir: str | Path | None = None,
        *,
        folds: Folds | None = None,
        fold: int = 0,
        tokenizer: Any = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        given = self.__dict__.pop("_given", {})
        if not isinstance(spec, DatasetSpec):
            hint = f"; for the files of a directory: {self.spec_from}" if isinstance(spec, str | os.PathLike) else ""
            raise ConfigError(f"a dataset is made from a DatasetSpec, got {spec!r:.80}{hint}")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be a function of a sample, got {transform!r}")
        self.spec, self.transform = spec, transform
        self._may_leak = self.says_whole_rows
        self.cache_dir = require_local(cache_dir, "cache_dir") if cache_dir is not None else None
        self.folds: Folds | None = given.get("folds", folds)
        self.fold: int = plain(given.get("fold", fold))
        self._tokenizer: Any = given.get("tokenizer", tokenizer)
        self.max_length: int | None = plain(given.get("max_length", max_length))
        self.add_special_tokens: bool = given.get("add_special_tokens", add_special_tokens)
        self._encoder: TextEncoder | None = None
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 1):
            raise ConfigError(f"max_length must be a number of tokens or None, got {self.max_length!r}")
        self.split = split
        self.rows: npt.NDArray[np.int64] | None = None
        """The rows of the training file that this fold has; None without folds, when it is all of them."""
        self._source = self._source_of(split)
        self._load()

    @property
    def split(self) -> str:
        """The split that was asked for; within the dataset's own methods the file that its rows are from."""
        return self._source if is_inside(self) else self._split

    @split.setter
    def split(self, split: str) -> None:
        if split not in SPLITS:
            meant = _MEANT.get(str(split).lower(), str(split).lower())
            raise ConfigError(f"split must be one of {list(SPLITS)}, got {split!r}{did_you_mean(meant, SPLITS)}")
        self._split = self._source = split

    @abstractmethod
    def _load_data(self) -> None:
        """Read the rows of `self.split` into `self._data`."""

    @abstractmethod
    def _validate_data(self) -> None:
        """Raise if `self._data` is not what it must be."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample."""

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def has_labels(self) -> bool:
        """Whether the rows of this split come with what is to be predicted."""
        return self._source != "test"

    @property
    def id_column(self) -> str | None:
        """The column with the ids: that of the spec, or a first column that is called so and has no value twice.

        The whole training file decides, whatever the split and the fold; `columns={"store_id": "categorical"}` in the
        spec says of a column that it is no id.
        """
        return self._id_column

    def ids(self) -> pa.Array:
        """The id of every row, or its number where the competition has no ids."""
        if self._id_column is None:
            return pa.array(np.arange(len(self)) if self.rows is None else self.rows)
        return column_of(self._data, self._id_column)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the samples, loaded when it is first needed."""
        return self.encoder.tokenizer

    @property
    def encoder(self) -> TextEncoder:
        """How texts become token ids: the tokenizer, the tokens around a text, the length it is cut to."""
        if self._encoder is None:
            from penstock.datasets.text_encoder import TextEncoder

            given = "byte" if self._tokenizer is None else self._tokenizer
            self._encoder = TextEncoder.of(
                given, add_special_tokens=self.add_special_tokens, max_length=self.max_length
            )
        return self._encoder

    @property
    def cut_rows(self) -> int:
        """How many texts were longer than `max_length`, of those encoded so far."""
        return 0 if self._encoder is None else self._encoder.cut_rows

    @property
    def cut_tokens(self) -> int:
        """How many tokens they lost."""
        return 0 if self._encoder is None else self._encoder.cut_tokens

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the rows, as far as the base knows them: class, spec, split, fold, and their values.

        Rows that are no table (a list of arrays, say) count by the content of their file, if it is called as usual.
        """
        rows = None if self.rows is None else xxhash.xxh3_128_hexdigest(self.rows.tobytes())
        told = [type(self).__qualname__, self.spec.to_dict(), self._split, rows, len(self), self.max_length]
        told.append(content_of(self._data) or self._file_checksum())
        return xxhash.xxh3_64_hexdigest(orjson.dumps(told, option=orjson.OPT_SORT_KEYS, default=str))

    # -- what is to be predicted -------------------------------------------------------------------------------------

    @functools.cached_property
    def class_names(self) -> tuple[Any, ...] | None:
        """The values of the target, in the order of their numbers; None where there are no classes."""
        return self._label_rules.classes

    def targets(self) -> npt.NDArray[Any] | None:
        """What is to be predicted as it is in the file; None for a test file."""
        return self._label_rules.values(self._data) if self.has_labels and self.spec.targets else None

    def labels(self) -> npt.NDArray[Any] | None:
        """What a model learns: class numbers (int32), numbers (float32), or (rows, targets) of 0 and 1 or numbers."""
        return self._label_rules.numbers(self._data) if self.has_labels and self.spec.targets else None

    def class_of(self, predictions: Any) -> npt.NDArray[Any]:
        """The class names of predictions: class numbers, (rows, classes) of scores, or probabilities of the second.

        `score` and `submission` know that what comes from here is names, also where these are numbers.
        """
        return self._label_rules.class_of(predictions)

    def score(
        self, predictions: Any, metric: str | Metric | None = None, *, predictions_are: PredictionsAre | None = None
    ) -> float:
        """How good predictions for these rows are, by a metric or by that of the competition (`self.metric`).

        Classes may be given by their numbers, by their names, as the probability of the second, or as (rows, classes)
        of scores; several columns as an array in the order of classes or targets, or by their names. Plain numbers
        that may be numbers as well as names of classes are refused unless `predictions_are` says what they are.
        """
        from penstock.datasets.metrics import get_metric
        from penstock.datasets.scoring import score_rows

        if not self.has_labels or not self.spec.targets:
            raise ConfigError(f"{self!r} has no targets to score against; score a training or validation split")
        wanted = self.metric if metric is None else metric
        if wanted is None:
            raise ConfigError(
                f"nobody said how {self.spec.competition_name!r} is scored; pass a metric, such as "
                "score(predictions, metadata.evaluation_metric), or set dataset.metric"
            )
        return score_rows(
            self._label_rules, self._data, predictions, get_metric(wanted),
            ids=self.ids(), id_column=self.id_column, are=predictions_are,
        )  # fmt: skip

    def submission(self, predictions: Any, path: str | Path, **options: Any) -> Path:
        """Write the file that the competition expects; see `penstock.datasets.submission.write_submission`."""
        from penstock.datasets.submission import write_submission

        return write_submission(self, predictions, path, **options)

    def __repr__(self) -> str:
        fold = "" if self.folds is None else f", fold {self.fold} of {self.folds.count}"
        return f"{type(self).__name__}({self.spec.competition_name!r}, {self._split!r}{fold}: {len(self)} rows)"

    def _tokenize(self, text: str) -> dict[str, list[int]]:
        """The token ids of a text, and a mask of ones for them."""
        ids = self.encoder.encode(pa.array([text], pa.string()))[0].as_py()
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    # -- inside ------------------------------------------------------------------------------------------------------

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = with_options(cls.__dict__["__init__"])  # type: ignore[method-assign]
        if "__getitem__" in cls.__dict__ and not getattr(cls.__getitem__, "__isabstractmethod__", False):
            cls.__getitem__ = transformed(cls.__dict__["__getitem__"])  # type: ignore[method-assign]

    @functools.cached_property
    def _label_rules(self) -> Labels:
        """Which targets there are, and which classes: those of the whole training file, whatever the fold."""
        whole = self._class_values if self._source == "train" else training_values(self.spec)
        return Labels.of_values(whole, self.spec)

    def _file_checksum(self) -> str | None:
        from penstock.datasets.versions import contents

        found = contents(self.spec, [self._source]).get(self._source)
        return None if found is None else found.checksum

    def _source_of(self, split: str) -> str:
        """The split whose file has the rows; also a check that folds and split go together."""
        if self.folds is not None and not hasattr(self.folds, "split"):
            raise ConfigError(f"folds must be Folds(...), such as Folds(5), got {self.folds!r}")
        if self.folds is None:
            if split == "val" and not self._has_validation_file():
                raise ConfigError(
                    f"split='val' of {self.spec.competition_name!r} needs a val file or folds: pass the same "
                    "folds=Folds(5) and fold=0 to split='train' and split='val', or the two would share rows"
                )
            return split
        if isinstance(self.fold, bool) or not isinstance(self.fold, int) or not 0 <= self.fold < self.folds.count:
            raise ConfigError(f"fold must be from 0 to {self.folds.count - 1}, got {self.fold!r}")
        return "test" if split == "test" else "train"

    def _has_validation_file(self) -> bool:
        from penstock.datasets.tables import find_file

        return "val" in self.spec.files or find_file(self.spec.dataset_path, "val") is not None

    def _find_id_column(self) -> str | None:
        if self._source == "train" or self.spec.id_column is not None:
            return id_column_of(self._data, self.spec)
        training = self._training_ids()
        found = id_column_of(self._data if training is None else training, self.spec)
        return found if found in column_names(self._data) else None

    def _training_ids(self) -> pa.Table | None:
        """The column of the training file that can be its ids, if any; None if there is no such file to be read."""
        from penstock.datasets.tables import read_names, read_table, split_file

        options: dict[str, Any] = {"delimiter": self.spec.delimiter, "encoding": self.spec.encoding}
        try:
            path = split_file(self.spec, "train")
            name = possible_id(read_names(path, **options), self.spec)
            return pa.table({}) if name is None else read_table(path, columns=[name], kinds={name: "id"}, **options)
        except (OSError, PenstockError) as error:  # a dataset may read files of its own, its own way
            log.debug("the ids of the training file of %r are not known: %s", self.spec.competition_name, error)
            return None

    def _check_foreign_ids(self, ids: pa.Array) -> None:
        """Ids of a file that is not the training file: they differ, and those of val are not for training too."""
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
            raise DataError(
                f"{problem}; what is trained on cannot be validated on: take them out of one of the files, or give "
                "folds=Folds(5) to divide the training file"
            )
        log.warning("%s; if they are the same rows, validation will look better than it is", problem)

    def _load(self) -> None:
        with Inside(self):
            try:
                self._load_data()
            except (FileNotFoundError, NotADirectoryError) as error:
                from penstock.datasets.tables import explain_missing

                raise FileNotFoundError(explain_missing(self.spec, self._source, error)) from error
            if getattr(self, "_data", None) is None:
                raise DataError(f"{type(self).__name__}._load_data() must put the rows into self._data; it did not")
            self._validate_data()
        check_data(self._data, self.spec, self._source)
        self._id_column = self._find_id_column()
        if self._id_column is not None and self._source != "train":
            self._check_foreign_ids(column_of(self._data, self._id_column))
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
