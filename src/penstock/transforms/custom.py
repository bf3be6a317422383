"""Your own transforms: a function with a decorator is enough.

    @transform
    def shorten(row: dict, *, length: int = 100) -> dict:
        return {**row, "text": row["text"][:length]}

    Pipeline(source, [shorten(length=20)], sink)          # or just [shorten], with the defaults

`DataProcessor` and `Transform` are the same protocol, for classes with more to say.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, overload

import pyarrow as pa
import xxhash

from penstock.errors import ConfigError
from penstock.pipeline.functions import Map, function_name
from penstock.pipeline.stages import DataProcessor, Transform

__all__ = ["CustomTransform", "DataProcessor", "Transform", "transform"]


class CustomTransform(Map):
    """A function as a transform. Called with keywords only it is a copy with those options; called with data it is
    the function itself.

    Options are the keyword-only parameters of the function; the first parameter is the row (a dict) or, by its
    annotation or with `batch=True`, the `pyarrow.RecordBatch`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: bool | None = None,
        schema: pa.Schema | Any | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.options = function, dict(options or {})
        self._batch, self._schema = batch, schema
        self._check_options()
        bound = functools.partial(function, **self.options) if self.options else function
        super().__init__(bound, batch=batch, schema=schema)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *data: Any, **options: Any) -> Any:
        if data:
            return self.function(*data, **self.options | options)
        return CustomTransform(
            self.function, batch=self._batch, schema=self._schema, options={**self.options, **options}
        )

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        missing = [name for name, required in self._accepted().items() if required and name not in self.options]
        if missing:
            raise ConfigError(
                f"{self!r} needs {', '.join(missing)}; pass {function_name(self.function)}({missing[0]}=...)"
            )
        return super().transform(batch)

    def __repr__(self) -> str:
        """The function and its options: a checkpoint goes on only under the same name."""
        options = [f"{name}={_shown(self.options[name])}" for name in self._accepted() if name in self.options]
        return f"{function_name(self.function)}({', '.join(options)})"

    def _check_options(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise ConfigError(f"@transform takes a function, got {self.function!r}")
        accepted = self._accepted()
        for name in self.options:
            if name not in accepted:
                raise ConfigError(
                    f"{function_name(self.function)} has no option {name!r}; its keyword-only parameters are "
                    f"{list(accepted) or 'none'}"
                )

    def _accepted(self) -> dict[str, bool]:
        """The options of the function, and whether each must be given."""
        parameters = inspect.signature(self.function).parameters.values()
        return {one.name: one.default is one.empty for one in parameters if one.kind is one.KEYWORD_ONLY}


def _shown(value: Any) -> str:
    """A value as it prints, alike in every process, and short: of a long one the beginning and a hash of it all."""
    if isinstance(value, set | frozenset) and value:
        text = f"{{{', '.join(sorted(map(_shown, value)))}}}"
    else:
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... #{xxhash.xxh3_64_hexdigest(text.encode(errors='replace'))}"


@overload
def transform(function: Callable[..., Any], /) -> CustomTransform: ...


@overload
def transform(
    *, batch: bool | None = None, schema: pa.Schema | Any | None = None
) -> Callable[[Callable[..., Any]], CustomTransform]: ...


def transform(
    function: Callable[..., Any] | None = None, /, *, batch: bool | None = None, schema: pa.Schema | Any | None = None
) -> CustomTransform | Callable[[Callable[..., Any]], CustomTransform]:
    """Make a transform of a function, bare (`@transform`) or with arguments (`@transform(batch=True)`).

    A row function takes a dict and returns one; a batch function takes and returns a `pyarrow.RecordBatch`. `schema`
    names the columns a row function returns, where the first rows may mislead. The function must be pure: it is called
    from several threads, and again where it fails.
    """
    if function is not None:
        return CustomTransform(function, batch=batch, schema=schema)
    return functools.partial(CustomTransform, batch=batch, schema=schema)
