"""The rule of all targets, their seeds, and mutations without atheris."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from penstock.errors import PenstockError

CORPUS = Path(__file__).parent / "corpus"
TARGETS = ("jsonl", "json", "csv", "states", "manifest", "queue", "template", "yaml")
_TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\n", b"\r", b"\x00", b"\xff", b"\xed\xa0\x80"),
    *(b"-1", b"0", b"null", b"true", b"1e999", b"9" * 40, b"[" * 300, b"../"),
    *(b"{{", b"}}", b"{%", b"*a", b"&a ", b"2024-13-45"),
]


def target(name: str) -> ModuleType:
    return importlib.import_module(f"fuzz.target_{name}")


def seeds(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def check(module: ModuleType, data: bytes) -> None:
    """Run a target; anything it raises but a PenstockError is a finding."""
    with contextlib.suppress(PenstockError):
        module.run(data)


def mutations(name: str, count: int, seed: int = 0) -> Iterator[bytes]:
    """Seeds with a few bytes changed, cut, doubled or put in; always the same."""
    kept, rng = seeds(name), random.Random(f"{name} {seed}")
    for _ in range(count):
        data = bytearray(rng.choice(kept))
        for _ in range(rng.randint(1, 4)):
            at = rng.randint(0, len(data))
            match rng.randrange(5):
                case 0:
                    data[at:at] = rng.choice(_TOKENS)
                case 1:
                    del data[at : at + rng.randint(1, 8)]
                case 2 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 3:
                    data[at:at] = data[at : at + rng.randint(1, 32)]
                case _:
                    data[at : at + rng.randint(1, 8)] = rng.choice(_TOKENS)
        yield bytes(data)
