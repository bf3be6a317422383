"""Unknown names: the error that says which are valid, and the nearest one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

from penstock.errors import ConfigError, PenstockError

__all__ = ["check_options", "did_you_mean", "named_options", "nearest", "unknown_option"]

Kind = TypeVar("Kind", bound=type)


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


def check_options(
    given: Iterable[str],
    known: Iterable[str],
    what: str = "option",
    *,
    where: str = "",
    error: type[PenstockError] = ConfigError,
) -> None:
    """Raise for the first name that is not known. `where` begins the message: a file, or the owner of the options."""
    names = list(known)
    for name in given:
        if name not in names:
            raise error(f"{where}: {unknown_option(name, names, what)}" if where else unknown_option(name, names, what))


def named_options(kind: Kind) -> Kind:
    """Decorator of a class of options: an unknown one is a `ConfigError` that names the nearest, not a `TypeError`."""
    init = kind.__init__  # type: ignore[misc]
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if not options.keys() <= set(known):
            check_options(options, known, where=kind.__name__)
        init(self, *args, **options)

    kind.__init__ = checked  # type: ignore[misc]
    return kind
