"""Schema of samples, read from the first one: token-wise fields, numbers of one shape, and metadata."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import backend_of
from penstock.batching.collate import IGNORE
from penstock.errors import DataError, SchemaError

__all__ = [
    "FILLS",
    "IGNORE",
    "FieldKind",
    "Objective",
    "SampleSchema",
    "array_of",
    "as_array",
    "keeps_type",
    "read_schema",
]

logger = logging.getLogger(__name__)

Objective = Literal["classification", "regression", "masked_lm"] | None
Role = Literal["tokens", "fixed", "meta"]

FILLS = {"attention_mask": 0, "labels": IGNORE, "special_tokens_mask": 1}
"""Padding of token-wise fields; 0 for all others."""
_BY_TOKEN = frozenset({"attention_mask", "position_ids", "special_tokens_mask", "token_type_ids"})
_METADATA = frozenset({"id", "metadata", "text"})
"""Fields that are always metadata."""


@dataclass(frozen=True, slots=True)
class FieldKind:
    """Kind of a field: `tokens` (a number for each token), `fixed` (numbers of one shape) or `meta` (metadata)."""

    role: Role
    real: bool = False
    """Floating-point numbers instead of integers."""
    shape: tuple[int, ...] = ()
    narrow: Literal["bool", "uint8"] | None = None
    """Integer dtype to keep in batches instead of widening it."""
    by_row: bool = False
    """Labels of whole rows, by the objective."""

    def __str__(self) -> str:
        numbers = "fractions" if self.real else "whole numbers"
        return {"tokens": f"{numbers} by token", "fixed": f"{numbers} of shape {self.shape}", "meta": "no number"}[
            self.role
        ]


@dataclass(frozen=True, slots=True)
class SampleSchema:
    """Fields that every sample has, by name."""

    kinds: Mapping[str, FieldKind]
    left_out: frozenset[str] = frozenset()
    """Fields of samples that batches do not have."""
    details: tuple[str, ...] = ()
    """Entries of the samples' `metadata` that are also kept under their own names."""

    @property
    def has_tokens(self) -> bool:
        return "input_ids" in self.kinds

    def check_keys(self, sample: Any, row: int) -> None:
        """Refuse a sample with other fields than the first."""
        if not isinstance(sample, Mapping):
            raise DataError(
                f"row {row} is {type(sample).__name__} ({sample!r:.80}), expected a mapping such as "
                "{'input_ids': [...], 'labels': 1}",
                row=row,
            )
        here, wanted = set(sample), set(self.kinds) | self.left_out
        if here != wanted:
            differences = [f"no {', '.join(sorted(map(str, wanted - here)))}"] if wanted - here else []
            differences += [f"also {', '.join(sorted(map(str, here - wanted)))}"] if here - wanted else []
            raise SchemaError(
                f"row {row} has {' and '.join(differences)}, unlike row 0 with {', '.join(sorted(wanted))}; give every "
                "sample the same keys"
            )


def keeps_type(name: str) -> bool:
    """True if a field keeps bool and uint8 in batches: all but ids, labels and masks."""
    return name != "labels" and not name.endswith(("_ids", "_mask"))


def read_schema(
    sample: Any, objective: Objective, keep: frozenset[str] = frozenset(), others: Iterable[Any] = ()
) -> SampleSchema:
    """Schema by the sample of row 0. `keep` names fields that become metadata.

    `others` are the samples of the next rows. They are read if row 0 has one token and a list of one label, up to the
    first that shows whether labels are token-wise.
    """
    if not isinstance(sample, Mapping):
        SampleSchema({}).check_keys(sample, 0)
    length = None
    if "input_ids" in sample:
        ids = array_of("input_ids", sample["input_ids"], 0)
        if ids is None or ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise DataError(f"input_ids of row 0 must be a list of integers, got {sample['input_ids']!r:.80}", row=0)
        length = len(ids)
    kinds: dict[str, FieldKind] = {}
    left_out = set()
    for name, value in sample.items():
        if not isinstance(name, str):
            raise SchemaError(f"the keys of a sample must be strings, row 0 has {name!r}")
        if name == "labels" and objective == "masked_lm":
            left_out.add(name)
        elif name in _METADATA or name in keep:
            kinds[name] = FieldKind("meta")
        else:
            array = array_of(name, value, 0)
            kinds[name] = _kind(name, array, length, objective)
            single = name == "labels" and objective is None and array is not None and array.shape == (1,) == (length,)
            if single and not kinds[name].real and _are_by_token(others):
                kinds[name] = FieldKind("tokens")
    if length is None and (objective == "masked_lm" or all(kind.role == "meta" for kind in kinds.values())):
        raise SchemaError(
            f"row 0 has no input_ids, only {', '.join(map(str, sample)) or 'nothing'}; tokenize first, or rename the "
            "column of tokens to input_ids"
        )
    return SampleSchema(kinds, frozenset(left_out), _details(sample, kinds))


def _are_by_token(others: Iterable[Any]) -> bool:
    """True if the first sample with more than one token or label has as many labels as tokens."""
    for row, sample in enumerate(others, 1):
        if not isinstance(sample, Mapping) or "input_ids" not in sample or "labels" not in sample:
            return False  # its batch raises the error
        ids, labels = (array_of(name, sample[name], row) for name in ("input_ids", "labels"))
        if ids is None or labels is None or ids.shape != (1,) or labels.shape != (1,):
            return ids is not None and labels is not None and ids.shape == labels.shape
    return False


def _details(sample: Mapping[str, Any], kinds: Mapping[str, FieldKind]) -> tuple[str, ...]:
    """Names of the scalar entries of a sample's metadata that no field has."""
    entries = sample.get("metadata")
    if not isinstance(entries, Mapping):
        return ()
    return tuple(
        name
        for name, value in entries.items()
        if isinstance(name, str)
        and name not in kinds
        and not isinstance(value, (Mapping, list, tuple, set))
        and not getattr(value, "shape", ())
    )


def _kind(name: str, array: npt.NDArray[Any] | None, length: int | None, objective: Objective) -> FieldKind:
    if name == "input_ids":
        return FieldKind("tokens")
    if array is None:
        if name == "labels":
            raise DataError("labels of row 0 are not numbers; number the classes from 0", row=0)
        return FieldKind("meta")
    real = array.dtype.kind == "f"
    if name in _BY_TOKEN:
        if array.shape != (length,):
            raise DataError(
                f"{name} of row 0 has shape {array.shape}, expected one number for each token, and "
                + ("there are no input_ids" if length is None else f"input_ids has {length} tokens"),
                row=0,
            )
        return FieldKind("tokens", real)
    if name == "labels" and objective is None and not real and array.shape == (length,) and array.size > 1:
        if set(array.tolist()) <= {0, 1}:
            logger.warning(
                "labels of row 0 are 0s and 1s, one for each token, and are taken as token-wise; if they are for the "
                "whole row, pass objective='classification'"
            )
        return FieldKind("tokens", real)
    if name == "labels" and objective == "regression":
        real = True
    if name == "labels" and objective == "classification" and array.size == 1:
        real = False
    narrow: Literal["bool", "uint8"] | None = None
    if keeps_type(name) and array.dtype in (np.bool_, np.uint8):
        narrow = "bool" if array.dtype == np.bool_ else "uint8"
    return FieldKind("fixed", real, array.shape, narrow, by_row=name == "labels" and objective is not None)


def as_array(value: Any) -> npt.NDArray[Any] | None:
    """Numbers of Python or any framework as a NumPy array; None for anything else. Lazy arrays are computed now."""
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
    """`as_array` for a field; an error names the row."""
    try:
        return as_array(value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if "Stream" in reason:
            reason += (
                "; a lazy array can only be computed in the thread that made it: call mx.eval on the arrays of the "
                "dataset, or use num_workers=0"
            )
        raise DataError(f"{name} of row {row} cannot be converted to numbers: {reason}", row=row) from error
