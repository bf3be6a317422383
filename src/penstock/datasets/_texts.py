"""Rows as texts: which template a dataset uses, and what of a table it may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.datasets._spec import ColumnSpec, DatasetSpec
from penstock.errors import ConfigError
from penstock.templates.base_template import BaseTemplate
from penstock.templates.converters import TabularTextConverter, array_of, make_style
from penstock.templates.few_shot import FewShot
from penstock.templates.sentences import SentenceTemplate

__all__ = ["few_shot_template", "template_for", "texts_of"]


def template_for(wanted: Any, features: Sequence[str], spec: DatasetSpec) -> BaseTemplate:
    """The template that was asked for: a style over the features, a sentence, or one that is given as it is."""
    formats = {name: column.format() for name, column in spec.columns.items() if column.kind != "ignore"}
    if isinstance(wanted, str) and "{" not in wanted:
        said = {name: rule for name, rule in formats.items() if name in features}
        template = make_style(wanted, columns=said, only=list(features))
    elif isinstance(wanted, str):
        template = SentenceTemplate(spec.competition_name, wanted, columns=formats)
    elif isinstance(wanted, TabularTextConverter):
        template = wanted.template
    elif isinstance(wanted, BaseTemplate):
        template = wanted
    else:
        raise ConfigError(
            f"template must be a style, a sentence, a template or a TabularTextConverter, got {type(wanted).__name__}"
        )
    for target in spec.targets:
        if target in template.columns(()):
            raise ConfigError(f"template {template.name!r} says {target!r}, which is what is to be predicted")
    return template


def few_shot_template(
    template: BaseTemplate, examples: pa.Table, spec: DatasetSpec, count: int, id_column: str | None
) -> FewShot:
    """The template with `count` labelled rows of `examples` before each row."""
    if len(spec.targets) != 1:
        raise ConfigError(f"few_shot shows rows with their one target, and there are {list(spec.targets)}")
    target = spec.targets[0]
    labelled = spec.columns.get(target, ColumnSpec())
    visible = _visible(template, examples, spec, id_column, keep_id=True)
    return FewShot(
        template,
        visible.append_column(target, examples[target]),
        labels=target,
        count=count,
        id_column=id_column,
        label_format=labelled.format(),
        answer=f"{labelled.name or target}: ",
    )


def texts_of(template: BaseTemplate, table: pa.Table, spec: DatasetSpec, id_column: str | None) -> pa.Array:
    """The text of every row; the template sees neither the target nor, unless it names it, the id."""
    keep_id = isinstance(template, FewShot)
    return array_of(template, _visible(template, table, spec, id_column, keep_id=keep_id))


def _visible(
    template: BaseTemplate, table: pa.Table, spec: DatasetSpec, id_column: str | None, *, keep_id: bool
) -> pa.Table:
    out = {*spec.targets, *spec.ignored} - set(template.columns(()))
    if id_column is not None and not keep_id and id_column not in template.columns(()):
        out.add(id_column)
    return table.select([name for name in table.column_names if name not in out])
