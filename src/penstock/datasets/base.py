"""Fundamental types of a competition's data, and `KaggleDataset`, the base of every dataset."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock._dtypes import did_you_mean
from penstock.datasets._checking import check_data, id_column_of
from penstock.datasets._frames import column_of, take_rows, with_plain_targets
from penstock.datasets._spec import SPLITS, ColumnKind, ColumnSpec, CompetitionType, DatasetSpec
from penstock.datasets._wrapping import Inside, is_inside, transformed, with_options
from penstock.errors import ConfigError, DataError, SchemaError

if TYPE_CHECKING:
    from penstock.datasets._encoding import TextEncoder
    from penstock.datasets.folds import Folds
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["ColumnKind", "ColumnSpec", "CompetitionType", "DatasetSpec", "KaggleDataset"]

log = logging.getLogger(__name__)


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
    - a check of the rows against the spec: counts, target, ids, columns without a single value; and a warning if the
      text of the first sample says its target.

    `_data` may be a pandas or Polars DataFrame, a `pyarrow.Table`, or a list of dicts. Whole-number targets of a pandas
    frame are made Python's numbers (floats for a regression), since `mx.array([row["y"]])` refuses NumPy's.
    """

    competition: ClassVar[str | None] = None
    """The name of the competition; None: told by the name of the class."""

    says_whole_rows: ClassVar[bool] = True
    """Whether a text might have the target in it: the first sample is then looked at, and a warning logged."""

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
            raise ConfigError(f"a dataset is made from a DatasetSpec, got {spec!r:.80}")
        if transform is not None and not callable(transform):
            raise ConfigError(f"transform must be a function of a sample, got {transform!r}")
        self.spec, self.transform = spec, transform
        self._may_leak = self.says_whole_rows
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else None
        self.folds: Folds | None = given.get("folds", folds)
        self.fold: int = given.get("fold", fold)
        self._tokenizer: Any = given.get("tokenizer", tokenizer)
        self.max_length: int | None = given.get("max_length", max_length)
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
            raise ConfigError(f"split must be one of {list(SPLITS)}, got {split!r}{did_you_mean(str(split), SPLITS)}")
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
        """The column with the ids: that of the spec, or a first column that is called so and has no value twice."""
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
            from penstock.datasets._encoding import TextEncoder

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
        """16 hex digits that name the rows, as far as the base knows them: class, spec, split and fold."""
        rows = None if self.rows is None else xxhash.xxh3_128_hexdigest(self.rows.tobytes())
        told = [type(self).__qualname__, self.spec.to_dict(), self._split, rows, len(self), self.max_length]
        return xxhash.xxh3_64_hexdigest(orjson.dumps(told, option=orjson.OPT_SORT_KEYS, default=str))

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
        from penstock.datasets.reading import find_file

        return "val" in self.spec.files or find_file(self.spec.dataset_path, "val") is not None

    def _load(self) -> None:
        with Inside(self):
            try:
                self._load_data()
            except (FileNotFoundError, NotADirectoryError) as error:
                from penstock.datasets.reading import explain_missing

                raise FileNotFoundError(explain_missing(self.spec, self._source, error)) from error
            if getattr(self, "_data", None) is None:
                raise DataError(f"{type(self).__name__}._load_data() must put the rows into self._data; it did not")
            self._validate_data()
        check_data(self._data, self.spec, self._source)
        self._id_column = id_column_of(self._data, self.spec)
        if self._source != "test":
            classes = self.spec.competition_type.is_classification or self.spec.competition_type.has_classes
            self._data = with_plain_targets(self._data, self.spec.targets, as_floats=not classes)
        if self.folds is not None and self._source == "train":
            chosen = self.folds.split(self._data, self.spec, self.fold)
            self.rows = chosen.train if self._split == "train" else chosen.val
            if not len(self.rows):
                raise SchemaError(f"fold {self.fold} of {self.folds} has no rows for {self._split!r}; use fewer folds")
            self._data = take_rows(self._data, self.rows)
        log.debug("%r read from %s", self, self.spec.dataset_path)
