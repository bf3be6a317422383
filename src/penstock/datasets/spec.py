"""Types of a competition's data: competition type, columns, files. Nothing here reads a file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from penstock._suggest import check_options, did_you_mean
from penstock.datasets.dates import compile_format
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.templates.columns import ColumnFormat

ColumnKind = Literal["numeric", "categorical", "text", "boolean", "date", "id", "ignore"]

SPLITS = ("train", "val", "test")


class CompetitionType(Enum):
    """Kind of prediction task. `CompetitionType("binary")` finds the member too, in any case and with dashes."""

    BINARY_CLASSIFICATION = "binary_classification"
    MULTICLASS_CLASSIFICATION = "multiclass_classification"
    MULTILABEL_CLASSIFICATION = "multilabel_classification"
    ORDINAL_REGRESSION = "ordinal_regression"
    """Ordered classes, such as 1 to 5 stars."""
    REGRESSION = "regression"
    MULTI_TARGET_REGRESSION = "multi_target_regression"
    RANKING = "ranking"
    TIME_SERIES = "time_series"
    """Forecast of a number; rows are ordered in time."""

    @property
    def is_classification(self) -> bool:
        return self.value.endswith("_classification")

    @property
    def has_classes(self) -> bool:
        """True if every row has exactly one class, so that labels are class numbers."""
        return self in _ONE_CLASS

    @property
    def has_many_targets(self) -> bool:
        return self in (CompetitionType.MULTILABEL_CLASSIFICATION, CompetitionType.MULTI_TARGET_REGRESSION)

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        text = str(value).strip().lower().replace("-", "_").replace(" ", "_")
        text = _SHORT.get(text, text)
        for member in cls:
            if text in (member.value, member.name.lower()):
                return member
        known = [member.value for member in cls]
        raise ConfigError(f"{value!r} is not a competition type; expected one of {known}{did_you_mean(text, known)}")


_SHORT = {
    "binary": "binary_classification",
    "multiclass": "multiclass_classification",
    "multi_class": "multiclass_classification",
    "multi_class_classification": "multiclass_classification",
    "multilabel": "multilabel_classification",
    "multi_label": "multilabel_classification",
    "multi_label_classification": "multilabel_classification",
    "ordinal": "ordinal_regression",
    "ordinal_classification": "ordinal_regression",
    "multitarget_regression": "multi_target_regression",
    "multi_target": "multi_target_regression",
    "forecasting": "time_series",
    "time_series_forecasting": "time_series",
}
_ONE_CLASS = frozenset(
    CompetitionType(name) for name in ("binary_classification", "multiclass_classification", "ordinal_regression")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSpec:
    """Kind of a column, and its form in a text."""

    kind: ColumnKind | None = None
    """None: as in the file. "ignore" omits the column from texts and validation; "id" and "text" keep every character
    of the cells, "categorical" keeps a 007 among numbers."""
    name: str = ""
    """Name of the column in a text; empty: its own."""
    description: str = ""
    unit: str = ""
    prefix: str = ""
    categories: Mapping[Any, str] = field(default_factory=dict, hash=False)
    """Allowed values and their names; a list of values names each by itself."""
    missing: str = "omit"
    """Text of a missing value; "omit" leaves it out, "error" refuses the row."""
    decimals: int | None = None
    thousands: bool = False
    date_format: str = ""
    """Format of a "date", such as "%d.%m.%Y"; empty: ISO, or found in the values of the column."""

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in get_args(ColumnKind):
            known = get_args(ColumnKind)
            raise ConfigError(f"kind must be one of {list(known)}, got {self.kind!r}{did_you_mean(self.kind, known)}")
        object.__setattr__(self, "categories", _categories(self.categories))
        if self.date_format:
            compile_format(self.date_format)
            if self.kind not in ("date", "id", "ignore"):
                raise ConfigError(
                    f"date_format={self.date_format!r} is for kind='date', and the column has kind={self.kind!r}"
                )

    def format(self) -> ColumnFormat:
        """Format for templates; a value that is not among `categories` is rendered unchanged."""
        from penstock.templates.columns import ColumnFormat

        rules: dict[str, Any] = {"missing": self.missing}
        if self.missing not in ("omit", "error"):
            rules = {"missing": "say", "missing_text": self.missing}
        if self.categories:
            rules |= {"categories": dict(self.categories), "unseen": "keep"}
        for key in ("name", "description", "unit", "prefix", "decimals", "thousands"):
            value = getattr(self, key)
            if value != "" and value is not None and value is not False:  # 0 decimals count
                rules[key] = value
        return ColumnFormat(**rules)

    def to_dict(self) -> dict[str, Any]:
        """Fields that differ from their default, as JSON values; inverse of `from_dict`."""
        fields = plain_fields(self)
        if self.categories:  # pairs: keys of a JSON object are text, and a category may be a number
            fields["categories"] = [[value, name] for value, name in self.categories.items()]
        return fields

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        return cls(**checked_fields(cls, given))


@dataclass(frozen=True, eq=False)
class DataFiles(Mapping[str, str]):
    """File names of splits ("train", "val", "test") and "sample_submission", and the format of CSV files."""

    names: Mapping[str, str] = field(default_factory=dict)
    delimiter: str | None = field(default=None, kw_only=True)
    """None: detected."""
    encoding: str | None = field(default=None, kw_only=True)
    """None: UTF-8, or that of a byte order mark."""

    def __post_init__(self) -> None:
        names = _mapping(self.names, "files", "{'train': 'training.csv'}")
        object.__setattr__(self, "names", {split: _text(name, f"files[{split!r}]") for split, name in names.items()})
        known = (*SPLITS, "sample_submission")
        for split in self.names:
            if split not in known:
                raise ConfigError(f"files has {split!r}; expected some of {list(known)}{did_you_mean(split, known)}")
        check_delimiter(self.delimiter)
        _text(self.encoding, "encoding")

    def __getitem__(self, split: str) -> str:
        return self.names[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DataFiles):
            return (self.names, self.delimiter, self.encoding) == (other.names, other.delimiter, other.encoding)
        return self.names == other

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class DatasetSpec:
    """Data of a competition: its directory, columns and target.

    `num_samples` is the number of rows of the training file, `num_features` that of its columns without id and target;
    files with other numbers are refused, and None allows any. A path such as `s3://bucket/titanic` is remote, and
    `dataset_path / "train.csv"` works for it too.
    """

    competition_name: str
    dataset_path: Path
    competition_type: CompetitionType
    num_samples: int | None = None
    num_features: int | None = None
    target_column: str | tuple[str, ...] | None = None
    """One column, or several targets."""
    id_column: str | None = None
    columns: Mapping[str, ColumnSpec] = field(default_factory=dict, kw_only=True, hash=False)
    """Columns with a kind or a format; the others are read as in the file."""
    group_column: str | None = field(default=None, kw_only=True)
    """Group of a row (a patient, a query); a group is never split between training and validation."""
    time_column: str | None = field(default=None, kw_only=True)
    """Time of a row; validation is later than training. With a group column too, training excludes the groups that
    are validated."""
    class_names: tuple[Any, ...] | None = field(default=None, kw_only=True)
    """Values of the target in the order of their class numbers; None: those of the training file, sorted."""
    files: DataFiles = field(default_factory=lambda: DataFiles(), kw_only=True, hash=False)
    """File names that are not the usual ones, and the CSV format; a mapping of names works too."""

    def __post_init__(self) -> None:
        if not isinstance(self.competition_name, str) or not self.competition_name.strip():
            raise ConfigError(f"competition_name must be a text that is not empty, got {self.competition_name!r}")
        into = object.__setattr__
        for name in ("num_samples", "num_features"):
            count = plain(getattr(self, name))
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
                raise ConfigError(f"{name} must be a count or None, got {count!r}")
            into(self, name, count)
        for name in ("id_column", "group_column", "time_column"):
            into(self, name, _text(getattr(self, name), name))
        into(self, "dataset_path", as_path(self.dataset_path))
        into(self, "competition_type", CompetitionType(self.competition_type))
        into(self, "target_column", _targets(self.target_column))
        if self.class_names is not None:
            into(self, "class_names", _class_names(self.class_names))
        columns = _mapping(self.columns, "columns", "{'Age': ColumnSpec(kind='numeric')}")
        into(self, "columns", {name: _column(name, given) for name, given in columns.items()})
        into(self, "files", self.files if isinstance(self.files, DataFiles) else DataFiles(self.files))
        self._check()

    @property
    def targets(self) -> tuple[str, ...]:
        """Target columns; empty if there is none."""
        if self.target_column is None:
            return ()
        return (self.target_column,) if isinstance(self.target_column, str) else self.target_column

    @property
    def ignored(self) -> frozenset[str]:
        """Columns of kind "ignore"."""
        return frozenset(name for name, column in self.columns.items() if column.kind == "ignore")

    @property
    def date_formats(self) -> dict[str, str]:
        """Date formats by column."""
        return {name: column.date_format for name, column in self.columns.items() if column.date_format}

    @property
    def csv_options(self) -> dict[str, Any]:
        """Delimiter and encoding, as options of `read_table` and `read_names`."""
        return {"delimiter": self.files.delimiter, "encoding": self.files.encoding}

    def to_dict(self) -> dict[str, Any]:
        """Fields that differ from their default, as JSON values; inverse of `from_dict`."""
        fields = plain_fields(self) | {
            "dataset_path": str(self.dataset_path),
            "competition_type": self.competition_type.value,
        }
        if self.columns:
            fields["columns"] = {name: column.to_dict() for name, column in self.columns.items()}
        if fields.pop("files", None):
            fields["files"] = dict(self.files)
        return fields | {key: value for key, value in self.csv_options.items() if value is not None}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        csv = {key: given[key] for key in ("delimiter", "encoding") if isinstance(given, Mapping) and key in given}
        fields = checked_fields(cls, {key: given[key] for key in given if key not in csv} if csv else given)
        if csv:
            fields["files"] = DataFiles(fields.get("files", {}), **csv)
        if missing := [name for name in ("competition_name", "dataset_path", "competition_type") if name not in fields]:
            raise ConfigError(f"a spec needs {missing[0]!r}; it has {sorted(fields)}")
        return cls(**fields)

    def _check(self) -> None:
        many = self.competition_type.has_many_targets
        if len(self.targets) > 1 and not many:
            raise ConfigError(
                f"{self.competition_type.value} has one target column, got {list(self.targets)}; several targets are "
                "multilabel_classification or multi_target_regression"
            )
        if len(set(self.targets)) != len(self.targets):
            raise ConfigError(f"target columns must differ, got {list(self.targets)}")
        if self.id_column is not None and self.id_column in self.targets:
            raise ConfigError(f"{self.id_column!r} is both the id and the target")
        names = self.class_names
        if names is not None and len(set(map(_class_key, names))) != len(names):
            raise ConfigError(f"class_names must differ, got {list(names)}")
        if names is not None and self.competition_type is CompetitionType.BINARY_CLASSIFICATION and len(names) != 2:
            raise ConfigError(f"binary_classification has two class_names, got {list(names)}")


def check_delimiter(delimiter: Any) -> None:
    """Raise unless the delimiter of a CSV file is None or one ASCII character."""
    valid = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii() and delimiter not in '"\r\n'
    if delimiter is not None and not valid:
        raise ConfigError(f"delimiter must be one ASCII character, no quote and no line end, got {delimiter!r}")


def as_path(given: Any) -> Any:
    """Path object, remote if the path has a scheme, so that `dataset_path / "train.csv"` works."""
    from penstock.files.remote import path_of

    return path_of(given) if isinstance(given, str | os.PathLike) else given


def checked_fields(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of a mapping from a file, with only fields of the dataclass as keys."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{cls.__name__} is made from a mapping, got {given!r:.80}")
    known = [field.name for field in dataclasses.fields(cls)]
    check_options(given, known, "field", where=cls.__name__)
    return dict(given)


def plain_fields(value: Any) -> dict[str, Any]:
    """Fields that differ from their default, with tuples as lists."""
    fields = {}
    for each in dataclasses.fields(value):
        given = getattr(value, each.name)
        default = each.default_factory() if each.default_factory is not dataclasses.MISSING else each.default
        if default is dataclasses.MISSING or given != default:
            fields[each.name] = list(given) if isinstance(given, tuple) else given
    return fields


def _column(name: str, given: Any) -> ColumnSpec:
    if isinstance(given, ColumnSpec):
        return given
    if isinstance(given, str):
        return ColumnSpec(kind=given)  # type: ignore[arg-type]
    if isinstance(given, Mapping):
        return ColumnSpec.from_dict(given)
    raise ConfigError(f"column {name!r}: expected a ColumnSpec, a kind or a mapping, got {given!r}")


def _categories(given: Mapping[Any, str] | Sequence[Any] | Iterable[Any] | None) -> dict[Any, str]:
    """Names by value, from a mapping, a list of values, or a list of pairs (as in JSON)."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {plain(value): str(name) for value, name in given.items()}
    pairs = [entry if isinstance(entry, list | tuple) else (entry, entry) for entry in given]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise ConfigError(f"categories are values, or pairs of a value and its name, got {wrong[0]!r}")
    return {plain(value): str(name) for value, name in pairs}


def plain(value: Any) -> Any:
    """NumPy scalars and arrays as Python values, for JSON."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _text(given: Any, name: str) -> str | None:
    if given is not None and not isinstance(given, str):
        hint = f"; write {str(given)!r} if that is its name" if name.endswith("_column") else ""
        raise ConfigError(f"{name} must be text, got {given!r}{hint}")
    return None if given is None else str(given)


def _targets(given: Any) -> str | tuple[str, ...] | None:
    if given is None or isinstance(given, str):
        return _text(given, "target_column")
    names = list(plain(given)) if isinstance(given, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"target_column must be a column name, or a list of names, got {given!r}; write a name that looks like a "
            "number in quotes"
        )
    return tuple(map(str, names))


def _class_names(given: Any) -> tuple[Any, ...]:
    names = plain(given)
    if isinstance(names, str | Mapping) or not isinstance(names, Iterable):
        raise ConfigError(f"class_names must be a list of the target's values, such as ['no', 'yes'], got {given!r}")
    names = tuple(plain(name) for name in names)
    for name in names:
        if not isinstance(name, Hashable):
            raise ConfigError(f"class_names must be values such as numbers and texts, got {name!r} among them")
    return names


def _mapping(given: Any, name: str, such_as: str) -> dict[Any, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a mapping such as {such_as}, got {given!r:.80}")
    for key in given:
        if not isinstance(key, str):
            raise ConfigError(f"{name} has {key!r}, which is not text; write {str(key)!r}, in quotes")
    return dict(given)


def _class_key(value: Any) -> tuple[bool, Any]:
    """Key that differs for False and 0, which are equal in Python and different classes."""
    return isinstance(value, bool), value
