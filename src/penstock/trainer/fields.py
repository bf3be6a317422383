"""Which array of a batch is what: read from the roles of `batch_schema`, for the plain pair and for dicts alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, SchemaError

__all__ = ["Batch", "Fields"]

_ROLES = {
    "input": ("input",),
    "target": ("target", "label"),
    "attend": ("mask", "attention_mask"),
    "weight": ("loss_mask", "weight"),
}
_NAMES = {"x": "input", "y": "target"}
"""The roles of the plain pair where a schema names none."""


@dataclass(frozen=True)
class Batch:
    """What the model and the objective see of a batch; all on the device."""

    x: Tensor
    """[batch, length] of token ids."""
    y: Tensor
    """Targets: [batch, length] of the same positions, or [batch] of classes."""
    attend: Tensor | None = None
    """[batch, length], true where there is a token and not padding."""
    weight: Tensor | None = None
    """Of the shape of `y`: how much each target counts; 0 or false: not at all."""


@dataclass(frozen=True)
class Fields:
    """The names of a schema's arrays by what the trainer does with them."""

    x: str
    y: str
    attend: str | None
    weight: str | None
    unused: tuple[str, ...]
    length: int
    slips: Mapping[str, str] = field(default_factory=dict)
    """Of unused arrays the role, where it looks like a slip of the pen: `{"w": "'weigth'; did you mean 'weight'?"}`."""

    @classmethod
    def of(cls, schema: Sequence[Mapping[str, Any]] | None, *, block_size: int, per_sample: bool) -> Fields:
        """Reads a schema. `per_sample`: the target is one class of the whole sample, and not one of every position.

        Of several targets the one of that shape is taken; arrays nobody uses are listed in `unused`.
        """
        if not schema:
            raise SchemaError("the queue's metadata has no batch_schema; let build_meta() give one, and prepare again")
        listed = [(str(each["name"]), _role(each), _shape(each)) for each in schema]
        x, shape = _only("input", listed, None)
        if len(shape) != 1:
            raise SchemaError(
                f"the input {x!r} has the shape {list(shape)} a sample; tokens have one dimension, [length]"
            )
        if shape[0] > block_size:
            raise ConfigError(
                f"the queue's samples have {shape[0]} positions ({x!r}), the config says block_size={block_size}; "
                f"use the config the queue was prepared with, or purge it and prepare again"
            )
        wanted = () if per_sample else shape
        y, _ = _only("target", listed, wanted)
        attend, weight = _maybe("attend", listed, shape), _maybe("weight", listed, wanted)
        used = {x, y, attend, weight}
        unused = {name: _slip(role) for name, role, _ in listed if name not in used}
        slips = {name: slip for name, slip in unused.items() if slip}
        return cls(x, y, attend, weight, tuple(unused), shape[0], slips)

    def read(self, batch: Any) -> Batch:
        """A batch of the consumer: the pair (X, Y), or a dict of arrays."""
        if not isinstance(batch, Mapping):
            batch = dict(zip((self.x, self.y), batch, strict=True))
        attend = None if self.attend is None else batch[self.attend].bool()
        weight = None if self.weight is None else batch[self.weight]
        return Batch(batch[self.x].long(), batch[self.y].long(), attend, weight)


def _role(entry: Mapping[str, Any]) -> str:
    return str(entry.get("role") or _NAMES.get(entry["name"], ""))


def _slip(role: str) -> str:
    """`'weigth'; did you mean 'weight'?`, or nothing: a role may be anything that the trainer has no use for."""
    known = [name for names in _ROLES.values() for name in names]
    near = "" if role in known else did_you_mean(role, known)
    return f"{role!r}{near}" if near else ""


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in entry.get("shape") or ())


_Listed = list[tuple[str, str, tuple[int, ...]]]


def _only(use: str, listed: _Listed, shape: tuple[int, ...] | None) -> tuple[str, tuple[int, ...]]:
    """The one array of this use (and shape, unless any will do)."""
    of_role = [(name, found) for name, role, found in listed if role in _ROLES[use]]
    fitting = [each for each in of_role if shape is None or each[1] == shape]
    if len(fitting) == 1:
        return fitting[0]
    asked = f"one array of the role {' or '.join(map(repr, _ROLES[use]))}"
    if shape is not None:
        asked += f" and of the shape {list(shape)} a sample"
    known = ", ".join(f"{name} ({role!r}, {list(found)})" for name, role, found in listed)
    slips = "".join(f"; {name} has the role {slip}" for name, role, _ in listed if (slip := _slip(role)))
    raise SchemaError(f"training needs {asked}, and the batch_schema has {len(fitting)}; it lists {known}{slips}")


def _maybe(use: str, listed: _Listed, shape: tuple[int, ...]) -> str | None:
    if not any(role in _ROLES[use] for _, role, _ in listed):
        return None
    return _only(use, listed, shape)[0]
