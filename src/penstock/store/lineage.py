"""Lineage of a store: its inputs and steps, and the content key of the combination."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.files.checksums import FileFingerprint

__all__ = ["Lineage", "combined_key", "content_key"]

_KEY_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Inputs and steps of a run. Everything but `notes` goes into the key."""

    inputs: tuple[FileFingerprint, ...] = ()
    tokenizer: str | None = None
    """The tokenizer's fingerprint."""
    template: str | None = None
    """The chat template's fingerprint."""
    transforms: tuple[str, ...] = ()
    """`describe()` of each step, in order; a step whose results change has to describe itself differently."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, as plain values."""

    @property
    def key(self) -> str | None:
        """None if the inputs are not known: the content of the store has no name then."""
        if not self.inputs:
            return None
        return content_key(self.inputs, tokenizer=self.tokenizer, template=self.template, transforms=self.transforms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": [{"name": file.name, "size": file.size, "xxh3": file.xxh3} for file in self.inputs],
            "tokenizer": self.tokenizer,
            "template": self.template,
            "transforms": list(self.transforms),
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Lineage:
        return cls(
            inputs=tuple(FileFingerprint(**file) for file in facts["inputs"]),
            tokenizer=facts["tokenizer"],
            template=facts["template"],
            transforms=tuple(facts["transforms"]),
            notes=facts["notes"],
        )


def content_key(
    inputs: Sequence[FileFingerprint],
    *,
    tokenizer: str | None = None,
    template: str | None = None,
    transforms: Iterable[str] = (),
) -> str:
    """Names a prepared data set by what it is made of: the bytes of its inputs in order, tokenizer, template, steps.

    File names, times, worker counts and machines are no part of it, so the same work is found again anywhere. But the
    directories that stand for columns are: other names are other values.
    """
    facts = {
        "key": _KEY_VERSION,
        "inputs": [[file.size, file.xxh3, *_partitions(file.name)] for file in inputs],
        "tokenizer": tokenizer,
        "template": template,
        "transforms": list(transforms),
    }
    return _digest(facts)


def combined_key(lineage: Sequence[Lineage]) -> str | None:
    """The key of rows that several runs added one after the other; of one run, its own."""
    keys = [run.key for run in lineage]
    if not keys or None in keys:
        return None
    return keys[0] if len(keys) == 1 else _digest(keys)


def _partitions(name: str) -> list[str]:
    return [folder for folder in name.split("/")[:-1] if "=" in folder]


def _digest(facts: object) -> str:
    return hashlib.blake2b(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()
