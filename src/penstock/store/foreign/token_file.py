"""Flat files of tokens: those of nanoGPT, without a header, and those of llm.c and modded-nanogpt, with one.

A header is 256 int32: a magic number, a version, the number of tokens, zeros. Read as tokens it would be 512 wrong
ones, so files are told apart by the magic number, and files of other kinds are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.store.foreign.base import FlatReader, ForeignOptions, map_file

HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Type of tokens by magic number and version."""
_OTHER = {
    20240326: "parameters of a model of llm.c",
    20240522: "an evaluation of llm.c",
    20240527: "a training state of llm.c",
    20240803: "parameters of a model of llm.c",
}
_PICKLE = b"\x80\x02"
"""First bytes of a pickle, whose last is a full stop; as tokens they are the id 640, with which a text may begin."""
_FOREIGN = {b"PK\x03\x04": "a zip archive, as torch.save writes", _PICKLE: "a pickle", b"GGUF": "a GGUF model"}
_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LONGEST = 1 << 30
_SCAN_TOKENS = 1 << 24
_SAMPLE_TOKENS, _LEAST_TOKENS = 1 << 16, 32
_UPPER_HALF, _LOWER_HALF = 15, 1023
"""Upper halves of ids of up to a million tokens, and lower ones that such ids surely have."""


def read_token_file(path: Path, options: ForeignOptions) -> FlatReader:
    """Rows of a flat file, mapped: all of it as one document, or documents that `eot` separates.

    A document of more than 2**30 tokens becomes several rows. Finding `eot` reads the file once.
    """
    raw = map_file(path)
    values, has_header = _tokens(raw, path, options.get("dtype"))
    if not len(values):
        raise DataError("there are no tokens in the file", file=str(path))
    eot = options.get("eot")
    side = options.get("eot_side") or ("start" if has_header else "end")
    if side not in ("end", "start"):
        raise ConfigError(f"eot_side must be end or start, got {side!r}")
    begins = np.zeros(1, np.int64)
    if eot is not None:
        marks = _find(values, eot, path) + (side == "end")
        begins = np.unique(np.concatenate([begins, marks[marks < len(values)]]))
    begins = _cut_long(begins, len(values))
    lengths = np.diff(np.concatenate([begins, [len(values)]])).astype(np.int32)
    return FlatReader(path, values, begins.__getitem__, lengths, header_bytes=HEADER_BYTES if has_header else 0)


def _tokens(raw: npt.NDArray[np.uint8], path: Path, dtype: str | None) -> tuple[npt.NDArray[Any], bool]:
    """The tokens, and True if they follow a header."""
    head = raw[:4].tobytes()
    for mark, meaning in _FOREIGN.items():
        if head.startswith(mark) and (mark != _PICKLE or raw[-1:].tobytes() == b"."):
            raise DataError(f"the file is {meaning}, and holds no flat tokens", file=str(path))
    header = np.frombuffer(raw[:12].tobytes(), "<i4") if len(raw) >= 12 else np.zeros(3, np.int32)
    magic, version, count = header.tolist()
    if magic in _OTHER:
        raise DataError(f"the file holds {_OTHER[magic]}, and no tokens", file=str(path))
    if (magic, version) in _HEADERS:
        return _after_header(raw, path, np.dtype(_HEADERS[magic, version]), count, dtype), True
    if magic in {known for known, _ in _HEADERS}:
        raise DataError(f"the header has magic number {magic} and the unknown version {version}", file=str(path))
    name = dtype or "uint16"
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    kind = np.dtype(name)
    if len(raw) % kind.itemsize:
        raise DataError(
            f"it has {len(raw)} bytes, which is no whole number of {name} tokens: it is truncated, or of another type; "
            "pass dtype=, or copy it again",
            file=str(path),
        )
    if dtype is None:
        _refuse_wider(raw.view(kind), path)
    return raw.view(kind), False


def _refuse_wider(words: npt.NDArray[Any], path: Path) -> None:
    """Refuse tokens that look like wider ones read as uint16: then every second one is the upper half of an id."""
    words = words[: len(words) // 2 * 2]
    sample = np.concatenate([words[:_SAMPLE_TOKENS], words[-_SAMPLE_TOKENS:]])
    lower, upper = sample[::2], sample[1::2]
    if len(words) < _LEAST_TOKENS or not lower.any():
        return
    if not upper.any() or (upper.max() <= _UPPER_HALF and lower.max() > _LOWER_HALF):
        kind = "int64" if len(words) % 4 == 0 and not lower[1::2].any() else "uint32"
        raise DataError(
            f"every second 16-bit word of it is {'' if not upper.any() else 'nearly '}0, so it seems to hold tokens of "
            f"{kind}; pass dtype={kind!r}, or dtype='uint16' if it "
            "does not; if Megatron wrote it, copy its .idx beside it",
            file=str(path),
        )


def _after_header(
    raw: npt.NDArray[np.uint8], path: Path, kind: np.dtype[Any], count: int, given: str | None
) -> npt.NDArray[Any]:
    if given is not None and np.dtype(given) != kind:
        raise ConfigError(f"dtype={given!r} was given, and the header of {path} says {kind.name}; omit dtype")
    needed = HEADER_BYTES + (count & 0xFFFFFFFF) * kind.itemsize  # numbers above 2**31 were written as negative ones
    if len(raw) != needed:
        raise DataError(
            f"its header names {count & 0xFFFFFFFF} tokens of {kind.name}, which take {needed} bytes, and it has "
            f"{len(raw)}: it is truncated or damaged; copy it again",
            file=str(path),
        )
    return raw[HEADER_BYTES:].view(kind)


def _find(values: npt.NDArray[Any], eot: int, path: Path) -> npt.NDArray[np.int64]:
    """Places of a token."""
    if isinstance(eot, bool) or not isinstance(eot, int) or not 0 <= eot <= np.iinfo(values.dtype).max:
        raise ConfigError(f"eot must be an id that {values.dtype.name} can hold, got {eot!r}")
    parts = [
        np.flatnonzero(values[low : low + _SCAN_TOKENS] == eot) + low for low in range(0, len(values), _SCAN_TOKENS)
    ]
    found: npt.NDArray[np.int64] = np.concatenate(parts)
    if not len(found):
        raise DataError(
            f"the id {eot}, given as eot, is nowhere in the {len(values)} tokens; pass the id that ends documents in "
            "this file, or omit eot to take the file as one document",
            file=str(path),
        )
    return found


def _cut_long(begins: npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """First tokens of rows, with further ones inside rows that are too long for a length of 32 bits."""
    ends = np.concatenate([begins[1:], [total]])
    more = [np.arange(begins[row], ends[row], _LONGEST) for row in np.flatnonzero(ends - begins > _LONGEST).tolist()]
    return np.unique(np.concatenate([begins, *more]))
