"""What is put around the methods that a dataset writes: options it does not name, and its transform."""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.datasets.frames import column_of
from penstock.errors import DataError
from penstock.templates.columns import hiding

if TYPE_CHECKING:
    from penstock.datasets.base import KaggleDataset

__all__ = ["Inside", "is_inside", "transformed", "with_options"]

log = logging.getLogger(__name__)

_OPTIONS = ("folds", "fold", "tokenizer", "max_length", "add_special_tokens")
"""What every dataset takes, also one whose constructor does not name it."""

_here = threading.local()


class Inside:
    """While a dataset's own method runs, in this thread. Nested calls change nothing.

    Texts made of whole rows do not say what is to be predicted meanwhile.
    """

    def __init__(self, dataset: KaggleDataset) -> None:
        self.key, self._hiding = id(dataset), hiding(dataset.spec.targets)

    def __enter__(self) -> bool:
        """Whether this is the outermost."""
        inside = _inside()
        self.outermost = self.key not in inside
        inside.add(self.key)
        if self.outermost:
            self._hiding.__enter__()
        return self.outermost

    def __exit__(self, *_: object) -> None:
        if self.outermost:
            self._hiding.__exit__(None, None, None)
            _inside().discard(self.key)


def is_inside(dataset: KaggleDataset) -> bool:
    """Whether one of the dataset's own methods runs in this thread."""
    return id(dataset) in _inside()


def _inside() -> set[int]:
    inside: set[int] = _here.__dict__.setdefault("inside", set())
    return inside


def with_options(own: Callable[..., None]) -> Callable[..., None]:
    """A constructor that also takes the options it does not name, and leaves them for the base to find."""
    parameters = inspect.signature(own).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return own
    others = [name for name in _OPTIONS if name not in parameters]
    if not others:
        return own

    @functools.wraps(own)
    def __init__(self: KaggleDataset, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = {name: kwargs.pop(name) for name in others if name in kwargs}
        if given:
            self.__dict__["_given"] = self.__dict__.get("_given", {}) | given
        own(self, *args, **kwargs)

    return __init__


def transformed(own: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A `__getitem__` whose outermost call puts the sample through the dataset's transform."""

    @functools.wraps(own)
    def __getitem__(self: KaggleDataset, index: int) -> Any:  # noqa: N807
        with Inside(self) as outermost:
            sample = own(self, index)
        if not outermost:
            return sample
        if self.__dict__.get("_may_leak"):
            self._may_leak = False
            _warn_of_leak(self, index, sample)
        if self.transform is None:
            return sample
        changed = self.transform(sample)
        if changed is None:
            raise DataError(f"transform returned None for row {index} of {self!r}; it must return the sample")
        return changed

    return __getitem__


def _warn_of_leak(dataset: KaggleDataset, index: int, sample: Any) -> None:
    """Log if the text of a sample says what is to be predicted: a model would learn to read it off."""
    text = sample.get("text") if isinstance(sample, dict) else None
    if not isinstance(text, str) or not isinstance(index, int | np.integer) or not dataset.has_labels:
        return
    for target in dataset.spec.targets:
        value = column_of(dataset._data, target)[int(index) % len(dataset)].as_py()
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        if all(re.search(rf"(?<!\w){re.escape(str(said))}(?!\w)", text) for said in (target, value)):
            log.warning(
                "the text of row %s says %s, which is what is to be predicted: %.80r...; leave it out, such as with "
                "TabularTextConverter(target=%r)", index, target, text, target,
            )  # fmt: skip
