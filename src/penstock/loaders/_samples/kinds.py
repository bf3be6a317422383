"""What the values of a sample are, told by the first one: tokens, numbers of one shape, or something to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.backends import backend_of
from penstock.errors import DataError, SchemaError

__all__ = ["FILLS", "Kind", "Objective", "Schema", "array_of", "as_array", "read_schema"]

Objective = Literal["classification", "regression", "masked_lm"] | None
Role = Literal["tokens", "fixed", "meta"]

FILLS = {"attention_mask": 0, "labels": -100, "special_tokens_mask": 1}
"""What the padding of token-wise columns is; 0 for all others."""
_BY_TOKEN = frozenset({"attention_mask", "position_ids", "special_tokens_mask", "token_type_ids"})
_BESIDE = frozenset({"id", "metadata", "text"})
"""Never given to a model, whatever they are."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`tokens` is one number for each token, `fixed` numbers of one shape, `meta` anything, kept beside the batch."""

    role: Role
    real: bool = False
    """Numbers with a fraction, and not whole ones."""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = "fractions" if self.real else "whole numbers"
        return {"tokens": f"{numbers} by token", "fixed": f"{numbers} of shape {self.shape}", "meta": "no number"}[
            self.role
        ]


@dataclass(frozen=True, slots=True)
class Schema:
    """The values that every sample has, by name."""

    kinds: Mapping[str, Kind]
    left_out: frozenset[str] = frozenset()
    """Values that samples have and batches do not."""

    def check_keys(self, sample: Any, row: int) -> None:
        """Refuse what is not a sample like the first one."""
        if not isinstance(sample, Mapping):
            raise DataError(
                f"row {row} is {type(sample).__name__} ({sample!r:.80}), and a sample is a mapping such as "
                "{'input_ids': [...], 'labels': 1}",
                row=row,
            )
        here, wanted = set(sample), set(self.kinds) | self.left_out
        if here != wanted:
            told = [f"no {', '.join(sorted(map(str, wanted - here)))}"] if wanted - here else []
            told += [f"also {', '.join(sorted(map(str, here - wanted)))}"] if here - wanted else []
            raise SchemaError(
                f"row {row} has {' and '.join(told)}, unlike row 0, which has {', '.join(sorted(wanted))}; give every "
                "sample the same keys"
            )


def read_schema(sample: Any, objective: Objective, keep: frozenset[str] = frozenset()) -> Schema:
    """What samples are like, by the sample of row 0. `keep` names values that go beside the batch."""
    if not isinstance(sample, Mapping):
        Schema({}).check_keys(sample, 0)
    if "input_ids" not in sample:
        raise SchemaError(
            f"row 0 has no input_ids, only {', '.join(map(str, sample)) or 'nothing'}; tokenize first, or name the "
            "column of tokens input_ids"
        )
    ids = array_of("input_ids", sample["input_ids"], 0)
    if ids is None or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise DataError(f"input_ids of row 0 are no list of whole numbers: {sample['input_ids']!r:.80}", row=0)
    kinds: dict[str, Kind] = {}
    left_out = set()
    for name, value in sample.items():
        if not isinstance(name, str):
            raise SchemaError(f"the keys of a sample are texts, row 0 has {name!r}")
        if name == "labels" and objective == "masked_lm":
            left_out.add(name)
        elif name in _BESIDE or name in keep:
            kinds[name] = Kind("meta")
        else:
            kinds[name] = _kind(name, array_of(name, value, 0), len(ids), objective)
    return Schema(kinds, frozenset(left_out))


def _kind(name: str, array: npt.NDArray[Any] | None, length: int, objective: Objective) -> Kind:
    if name == "input_ids":
        return Kind("tokens")
    if array is None:
        if name == "labels":
            raise DataError("labels of row 0 are no numbers; turn classes into numbers from 0 on", row=0)
        return Kind("meta")
    real = array.dtype.kind == "f"
    by_token = name in _BY_TOKEN or (name == "labels" and objective is None and length > 1 and not real)
    if by_token and array.shape == (length,):
        return Kind("tokens", real)
    if name == "labels" and objective == "regression":
        real = True
    if name == "labels" and objective == "classification" and array.size == 1:
        real = False
    return Kind("fixed", real, array.shape)


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """Numbers of any framework, or Python's, as a NumPy array; None if it is something else.

    An array of a lazy framework is computed here, in the thread that calls.
    """
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biuf" else None
    if isinstance(value, (bool, int, float, np.generic)):
        array = np.asarray(value)
        return array if array.dtype.kind in "biuf" else None
    if isinstance(value, (list, tuple)):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            return None
        if array.size == 0:
            return array.astype(np.int64)
        return array if array.dtype.kind in "biuf" else None
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        array = np.asarray(backend_of(value).to_numpy(value))
        return array if array.dtype.kind in "biuf" else None
    return None


def array_of(name: str, value: Any, row: int) -> npt.NDArray[Any] | None:
    """The same for a value of a row, which is named if a framework cannot give its numbers."""
    try:
        return as_array(value)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if "Stream" in told:
            told += (
                "; an array that is computed when it is needed can only be so in the thread that made it: call mx.eval "
                "on what the dataset holds, or use num_workers=0"
            )
        raise DataError(f"{name} of row {row} cannot be turned into numbers: {told}", row=row) from error
