"""Rows as texts: which template a dataset uses, and what of a table it may see."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.datasets.spec import ColumnSpec, DatasetSpec
from penstock.errors import ConfigError
from penstock.templates.base_template import BaseTemplate
from penstock.templates.converters import TabularTextConverter, make_style
from penstock.templates.few_shot import FewShot
from penstock.templates.sentences import SentenceTemplate

__all__ = ["few_shot_template", "template_for"]


class Unshown(BaseTemplate):
    """A template that is not shown some columns, so that it cannot say them."""

    def __init__(self, template: BaseTemplate, hidden: Iterable[str]) -> None:
        super().__init__(template.name, version=template.version)
        self.template, self.hidden = template, frozenset(hidden)
        self.slice_rows = template.slice_rows

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        return self.template.columns([name for name in available if name not in self.hidden])

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        names = columns.names if isinstance(columns, pa.Schema) else getattr(columns, "column_names", columns)
        # A style may well leave the target out by itself, also of a test file that has none.
        self.template.validate([*names, *sorted(self.hidden.difference(names))])

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        return self.template.render_slice(table, first_row)

    def missing_rules(self) -> Mapping[str, str]:
        return self.template.missing_rules()

    def rules(self) -> dict[str, Any]:
        return {"template": self.template.describe(), "hidden": sorted(self.hidden)}


def template_for(
    wanted: Any, features: Sequence[str], spec: DatasetSpec, *, id_column: str | None, exclude: Collection[str]
) -> BaseTemplate:
    """The template that was asked for: a style over the features, a sentence, or one that is given as it is.

    It says neither the target, nor the id unless it names it, nor what the spec ignores or `exclude` leaves out.
    """
    formats = {name: column.format() for name, column in spec.columns.items() if column.kind != "ignore"}
    left_out, targets = {*spec.ignored, *exclude}, set(spec.targets)
    if isinstance(wanted, str) and "{" not in wanted:
        said = {name: rule for name, rule in formats.items() if name in features}
        template: Any = make_style(wanted, columns=said, only=list(features))
    elif isinstance(wanted, str):
        template = SentenceTemplate.of(spec.competition_name, wanted, columns=formats)
    elif isinstance(wanted, TabularTextConverter):
        template = wanted.template
        targets.update(wanted.target)
    else:
        template = wanted
    if not isinstance(template, BaseTemplate):
        raise ConfigError(
            f"template must be a style, a sentence, a template or a TabularTextConverter, got {type(wanted).__name__}"
        )
    for target in spec.targets:
        if target in template.columns(()):
            raise ConfigError(f"template {template.name!r} says {target!r}, which is what is to be predicted")
    if isinstance(template, SentenceTemplate):
        return template.without(left_out) if left_out & set(template.columns(())) else template
    named = template.columns(())
    if told := [name for name in named if name in left_out]:
        raise ConfigError(
            f"template {template.name!r} names {told[0]!r}, which exclude= or kind='ignore' in the spec leaves out; "
            "leave it out of the template, or in"
        )
    if template.columns(features) == named:
        return template
    # Few-shot examples that somebody made say the id or not: so do the rows then.
    kept = id_column is None or id_column in named or isinstance(template, FewShot)
    return Unshown(template, targets | left_out | (set() if kept else {str(id_column)}))


def few_shot_template(
    template: BaseTemplate, examples: pa.Table, spec: DatasetSpec, count: int, id_column: str | None
) -> FewShot:
    """The template with `count` labelled rows of `examples` before each row."""
    if len(spec.targets) != 1:
        raise ConfigError(f"few_shot shows rows with their one target, and there are {list(spec.targets)}")
    target = spec.targets[0]
    labelled = spec.columns.get(target, ColumnSpec())
    return FewShot(
        template,
        examples,
        labels=target,
        count=count,
        id_column=id_column,
        label_format=labelled.format(),
        answer=f"{labelled.name or target}: ",
    )
