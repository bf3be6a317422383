"""Parameters of an address: texts and numbers from outside, checked."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import ConfigError

_MOST_DIGITS = 18


class Params:
    """Parameters of a request."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def text(self, name: str, most: int = 200) -> str:
        text = self._given.get(name, "")
        if len(text) > most:
            raise ConfigError(f"{name}: expected at most {most:,} characters, got {len(text):,}")
        return text

    def number(self, name: str) -> int | None:
        """A number of 0 or more, with or without separators of thousands; None if there is none."""
        return read_number(name, self._given.get(name, ""))


def read_number(name: str, text: str) -> int | None:
    plain = text.strip().replace(",", "").replace("_", "")
    if not plain:
        return None
    if not (plain.isascii() and plain.isdecimal()) or len(plain) > _MOST_DIGITS:
        raise ConfigError(f"{name}: expected a number of 0 or more, got {text[:40]!r}")
    return int(plain)
