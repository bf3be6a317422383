"""Metadata of a competition: description, metric, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from penstock.datasets.spec import CompetitionType, checked_fields, plain_fields
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.datasets.metrics import Metric


@dataclass(frozen=True)
class CompetitionMetadata:
    """Description of a competition and its metric.

        metadata = CompetitionMetadata("house-prices", "regression", "Predict house prices", "rmse")
        metadata.score(y_true, y_pred)

    An unknown metric, or one that does not fit the type, is refused at construction.
    """

    competition_name: str
    competition_type: CompetitionType
    description: str = ""
    evaluation_metric: str = "accuracy"
    """Name or alias of a metric in `penstock.datasets.metrics.METRICS`."""
    train_file: str = "train.csv"
    test_file: str = "test.csv"
    sample_submission_file: str = "sample_submission.csv"
    url: str = field(default="", kw_only=True)
    license: str = field(default="", kw_only=True)
    tags: tuple[str, ...] = field(default=(), kw_only=True)
    deadline: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.competition_name, str) or not self.competition_name.strip():
            raise ConfigError(f"competition_name must be a text that is not empty, got {self.competition_name!r}")
        object.__setattr__(self, "competition_type", CompetitionType(self.competition_type))
        tags = (self.tags,) if isinstance(self.tags, str) else tuple(self.tags)
        object.__setattr__(self, "tags", tags)
        metric = self.metric
        if not metric.suits(self.competition_type):
            from penstock.datasets.metrics import METRICS

            fitting = sorted(name for name, one in METRICS.items() if one.suits(self.competition_type))
            raise ConfigError(
                f"metric {self.evaluation_metric!r} does not fit {self.competition_type.value}; these do: {fitting}"
            )

    @property
    def metric(self) -> Metric:
        """Metric as a callable."""
        from penstock.datasets.metrics import get_metric

        return get_metric(self.evaluation_metric)

    def score(self, y_true: Any, y_pred: Any, *, classes: Sequence[Any] | None = None) -> float:
        """Score of predictions, in the form that the metric needs.

        `classes` are the classes in the order of the columns of scores, the positive one last. A dataset knows them and
        takes predictions in any form: `dataset.score(predictions, metadata.evaluation_metric)`.
        """
        return self.metric(y_true, y_pred, classes=classes)

    def to_dict(self) -> dict[str, Any]:
        """Fields that differ from their default, as JSON values; inverse of `from_dict`."""
        return plain_fields(self) | {
            "competition_type": self.competition_type.value,
            "evaluation_metric": self.evaluation_metric,
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        fields = checked_fields(cls, given)
        if missing := [name for name in ("competition_name", "competition_type") if name not in fields]:
            raise ConfigError(f"metadata needs {missing[0]!r}; it has {sorted(fields)}")
        return cls(**fields)
