"""Work of a job as bytes for other processes; an error that names the object inside that cannot be sent."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.pipeline.chain import stage_name

_DEPTH = 12
_STAGE_METHODS = ("transform", "next_batch", "consume")


def pickled(work: Any) -> bytes:
    """Bytes of the work, by cloudpickle, which takes lambdas and closures too."""
    import cloudpickle

    try:
        return cast(bytes, cloudpickle.dumps(work))
    except Exception as error:
        stage, steps, culprit, reason = _culprit(work, error)
        whose = stage_name(stage) if stage is not None else "the pipeline"
        where = f" at {' -> '.join(steps)}" if steps else ""
        raise ConfigError(
            f"{whose} cannot be sent to other processes: it holds {_described(culprit)}{where}, which cannot be "
            f"pickled ({reason}); open files, locks and connections inside the function, when it is first called"
        ) from error


def _culprit(work: Any, error: Exception) -> tuple[Any, list[str], Any, Exception]:
    """Innermost stage on the way to the object that fails, the steps from there, the object, and its error."""
    stage: Any = None
    steps: list[str] = []
    seen = {id(work)}
    for _ in range(_DEPTH):
        for name, part in _parts(work):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if (reason := _failure(part)) is not None:
                work, error = part, reason
                if any(callable(getattr(part, method, None)) for method in _STAGE_METHODS):
                    stage, steps = part, []
                else:
                    steps.append(name)
                break
        else:
            break
    return stage, steps, work, error


def _failure(part: Any) -> Exception | None:
    import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception as error:  # noqa: BLE001 - any object may raise anything when it is pickled
        return error
    return None


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Named objects inside an object, which pickling it would reach."""
    if isinstance(thing, types.MethodType):
        yield "self", thing.__self__
    elif isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or ()):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"variable {name!r} of {thing.__name__}", cell.cell_contents
        for name in thing.__code__.co_names:
            if name in thing.__globals__:
                yield f"global {name!r} of {thing.__name__}", thing.__globals__[name]
        for index, default in enumerate(thing.__defaults__ or ()):
            yield f"default {index} of {thing.__name__}", default
    elif isinstance(thing, functools.partial):
        yield "function", thing.func
        yield from ((f"argument {name!r}", value) for name, value in (*enumerate(thing.args), *thing.keywords.items()))
    elif isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from ((f"[{index}]", value) for index, value in enumerate(thing))
    else:
        names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
        yield from ((f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name))


def _described(thing: Any) -> str:
    kind = type(thing)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
