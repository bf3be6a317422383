"""What is streamed, and what becomes of its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.listing import PathLike
from penstock.loaders._streaming.windows import ROW
from penstock.loaders.recipes import Recipe
from penstock.sources import CsvSource, JsonlSource, StoreSource, open_source

__all__ = ["Opened", "opened"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The input, and how its rows become tokens."""

    source: Any
    transforms: list[Any]
    described: list[str | None]
    tokens: str
    mask: str | None


def opened(recipe: Recipe | None, paths: list[PathLike]) -> Opened:
    """Files or a token store, looked at just far enough to know their columns."""
    source = open_source(paths)
    if isinstance(source, StoreSource):
        manifest = source.manifest
        if manifest.tokens_column is None:
            raise ConfigError(f"{source.path} holds no tokens; prepare it with a tokenizer")
        return Opened(source, [], ["store", manifest.checksum], manifest.tokens_column, manifest.mask_column)
    if recipe is None:
        raise ConfigError(f"{paths} are raw files, so it must be said how they become tokens; pass a tokenizer")
    source = _source(recipe, paths)
    if isinstance(source, JsonlSource) and not source.has_schema:
        names = source.first_columns()
        if not names:
            raise DataError("there are no rows in the input", file=str(source.files[0]))
        schema = pa.schema([(name, pa.null()) for name in names])
    else:
        schema = source.schema
    numbered = schema.append(pa.field(ROW, pa.int64()))
    steps = replace(recipe, keep=[ROW]).steps(numbered)
    described = [steps.tokenizer.fingerprint, steps.template, *steps.described]
    return Opened(source, steps.transforms, described, steps.tokens, steps.mask)


def _source(recipe: Recipe, paths: list[PathLike]) -> Any:
    """A source that knows its columns without having read everything."""
    source = replace(recipe, keep=()).open(paths)
    text = recipe.column or "text"
    if isinstance(source, CsvSource) and recipe.template is None and text in _header(source):
        return CsvSource(source.files, schema=pa.schema([(text, pa.string())]), columns=[text])
    return source


def _header(source: CsvSource) -> tuple[str, ...]:
    """The names of the columns of the first file."""
    names: tuple[str, ...] = source.layout_of(0).names  # type: ignore[attr-defined]
    return names
