"""Suggestions for misspelled names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest", "unknown_option"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'text'?`, or an empty string if no known name is close."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to the word, if one is close."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1)), None)


def unknown_option(name: str, known: Iterable[str], what: str = "option") -> str:
    """`unknown option 'batchsize'; did you mean 'batch_size'? Valid options: batch_size, rank`."""
    names = list(known)
    hint = did_you_mean(str(name), names)
    return f"unknown {what} {name!r}{hint or '.'} Valid {what}s: {', '.join(names) or 'none'}"
