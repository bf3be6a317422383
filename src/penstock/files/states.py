"""Format of saved states: a kind, a version, and a checksum, so that a changed state is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
import xxhash

from penstock.errors import ResumeError

CHECKSUM = "checksum"
_PLAIN = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
_WHAT_TO_DO = "load another copy of it, or an earlier state, or start without one"
_NAMES: dict[type | None, str] = {
    int: "a whole number",
    str: "text",
    bool: "True or False",
    dict: "a dict",
    list: "a list",
    None: "None",
}

Fields: TypeAlias = dict[str, tuple[type | None, ...]]
"""The types that each value of a state may have. Integers are places and counts: from 0 to 2^63 - 1."""


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The states of one kind of object: `write` makes them, `read` refuses what is not one, or was changed since.

        _STATE = StateFormat("rows in memory", "a MemorySource")
        state = _STATE.write({"row": 3})     # {"kind": ..., "version": 1, "row": 3, "checksum": "9a..."}
        _STATE.read(state)["row"]

    A state stays what it is through JSON: tuples may become lists, and keys that are numbers text.
    """

    kind: str
    """Names the format in the state."""
    owner: str
    """Name of what is saved, for error messages."""
    version: int = 1
    fields: Fields = field(default_factory=dict)
    """Values without which `read` refuses a state."""

    def write(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The facts as a state, which is small: the whole of it is hashed."""
        return with_checksum({"kind": self.kind, "version": self.version, **facts})

    def read(self, state: Any) -> dict[str, Any]:
        """The state itself, if it is one of this kind and nothing in it was changed since it was written."""
        if not isinstance(state, Mapping) or not {"version", "kind"} & state.keys():
            raise ResumeError(f"not a state of {self.owner}: {state!r:.200}; state_dict() makes one")
        version = state.get("version")
        if type(version) is int and version > self.version and state.get("kind") == self.kind:
            raise ResumeError(
                f"the state has version {version}, this release reads up to {self.version}; update penstock"
            )
        if CHECKSUM not in state:
            raise ResumeError(
                f"not a state of {self.owner}: it has no checksum, so an earlier release saved it, or a part of it is "
                f"lost; {_WHAT_TO_DO}"
            )
        check_state(state)
        if state.get("kind") != self.kind:
            raise ResumeError(
                f"the state is not one of {self.owner}: its kind is {state.get('kind')!r}, expected {self.kind!r}; "
                "load it where it was saved"
            )
        if type(version) is not int or version != self.version:
            raise ResumeError(
                f"the state has version {version!r}, this release reads {self.version}; resume it with the release "
                "that saved it, or start without it"
            )
        check_fields(state, self.fields)
        return dict(state)


def check_fields(values: Any, fields: Fields, name: str = "the state") -> None:
    """Refuse values of other types, as another program may have written them: their checksum can be right."""
    if not isinstance(values, Mapping):
        raise ResumeError(f"{name} is damaged: expected a dict, got {values!r:.80}; {_WHAT_TO_DO}")
    for key, kinds in fields.items():
        if key not in values:
            raise ResumeError(f"{name} is damaged: it has no {key!r}; {_WHAT_TO_DO}")
        if not any(_is_of(values[key], kind) for kind in kinds):
            expected = " or ".join(_NAMES[kind] for kind in kinds)
            raise ResumeError(f"{name} is damaged: {key!r} is {values[key]!r:.80}, expected {expected}; {_WHAT_TO_DO}")


def _is_of(value: Any, kind: type | None) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 63
    if kind is dict:
        return isinstance(value, Mapping)
    if kind is list:
        return isinstance(value, (list, tuple))
    return value is None if kind is None else isinstance(value, kind)


def check_state(state: Mapping[str, Any], name: str = "the state") -> None:
    """Refuse a state in which anything was changed since its checksum was made."""
    try:
        actual = state_checksum(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResumeError(f"{name} is damaged: {error}; {_WHAT_TO_DO}") from error
    if state[CHECKSUM] != actual:
        raise ResumeError(
            f"{name} is damaged: its checksum is {state[CHECKSUM]!r:.40}, and that of its content {actual!r}; "
            f"{_WHAT_TO_DO}"
        )


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a checksum of all else in it, in place of the one it has, if any."""
    try:
        checksum = state_checksum(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResumeError(
            f"the state cannot be saved: {error}; a state holds dicts with text as keys, lists, text, numbers, "
            "True, False and None"
        ) from error
    return {**state, CHECKSUM: checksum}


def state_checksum(state: Mapping[str, Any]) -> str:
    """16 hex digits of everything in a state but the checksum, the same before and after a way through JSON."""
    return xxhash.xxh3_64_hexdigest(to_json({key: value for key, value in state.items() if key != CHECKSUM}))


def is_state(value: Any) -> bool:
    """True for a mapping that `StateFormat.write` made, intact or not."""
    return isinstance(value, Mapping) and {"kind", "version", CHECKSUM} <= value.keys()


def to_json(value: Any, *, indent: bool = False) -> bytes:
    """Plain values as JSON, keys in order. Whole numbers may have any size, as those of random generators do."""
    try:
        return orjson.dumps(value, _plain, _PLAIN | (orjson.OPT_INDENT_2 if indent else 0))
    except TypeError:
        named = json.loads(json.dumps(value, default=_plain))  # keys as text first: numbers sort in another order
        return json.dumps(named, sort_keys=True, indent=2 if indent else None).encode()


def parse_json(data: bytes) -> Any:
    """Value that `to_json` wrote, with integers of any size. Raises ValueError if it is not JSON."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _plain(value: Any) -> Any:
    """Plain values for other mappings, sequences and NumPy's numbers."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value: {value!r:.80}")
