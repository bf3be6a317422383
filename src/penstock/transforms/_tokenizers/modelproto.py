"""What the Python interface of SentencePiece does not tell about a model, read from the serialised model itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["BYTE", "CONTROL", "NORMAL", "UNKNOWN", "UNUSED", "USER_DEFINED", "ModelFacts", "model_facts"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class ModelFacts(NamedTuple):
    """`kinds` has one of the constants above for each piece; `rule` is "" if the model does not normalise text."""

    kinds: list[int]
    rule: str


def model_facts(model: bytes) -> ModelFacts:
    """From a valid model: SentencePiece itself has read it before."""
    kinds: list[int] = []
    rule, rules = "", b""
    for number, value in _fields(model):
        if number == 1:
            kinds.append(next((kind for field, kind in _fields(value) if field == 3 and isinstance(kind, int)), NORMAL))
        elif number == 3:
            for field, part in _fields(value):
                if field == 1 and isinstance(part, bytes):
                    rule = part.decode()
                elif field == 2 and isinstance(part, bytes):
                    rules = part
    return ModelFacts(kinds, (rule or "unnamed") if rules else "")


def _fields(message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protobuf message: numbers as numbers, everything else as its bytes."""
    assert isinstance(message, bytes)
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        match key & 7:
            case 0:
                value, at = _number(message, at)
                yield key >> 3, value
                continue
            case 2:
                length, at = _number(message, at)
            case other:
                length = 8 if other == 1 else 4
        yield key >> 3, message[at : at + length]
        at += length


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and where the next thing begins."""
    value = shift = 0
    while (byte := message[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1
