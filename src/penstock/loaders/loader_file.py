"""A file that describes a loader: the keywords of its constructor, one by one.

    loader: mixed                        # or pretrain, conversation, preference
    sources:
      web: web.store
      chat: {loader: conversation, path: chats.jsonl, tokenizer: model/, chat_template: chatml}
    weights:                             # or {web: 0.9, chat: 0.1}
      interpolation: linear
      points:
        - {step: 0, weights: {web: 0.9, chat: 0.1}}
        - {step: 1000, weights: {web: 0.5, chat: 0.5}}
    chunk_size: 4096
    packing: best_fit
    batch_size: 16
    world_size: 8                        # what the run is planned for; a run on another number of ranks is refused
    seed: 7
    epochs: 2                            # how far `penstock plan` looks
    edits:
      - skip: [340, 360]
      - {ban: {web: [17, 4711]}, step: 500}
      - {reweight: {web: 0.2, chat: 0.8}, step: 2000}

A training script reads the same file:

    with load_config("train.yaml").open() as loader: ...

A source of a mixture that is a mapping is a loader of its own; what it does not say (tokenizer, length, packing,
truncation) is as in the mixture. Paths are relative to the current directory. The file can run no code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from penstock._suggest import did_you_mean
from penstock.batching.options import LoaderOptions
from penstock.distributed.ranks import find_rank
from penstock.distributed.sharding import Balanced, Contiguous, Strided
from penstock.errors import ConfigError, PenstockError
from penstock.files.documents import read_document, set_value
from penstock.files.listing import PathLike
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.inputs import stored_kind
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.memory import MemoryBudget
from penstock.order.plan import Plan
from penstock.order.schedules import Schedule
from penstock.store import open_store
from penstock.store.manifest import is_store

__all__ = ["LOADERS", "LoaderConfig", "keys_of", "load_config"]

LOADERS: dict[str, type[DataLoader]] = {
    "pretrain": PretrainDataLoader,
    "conversation": ConversationDataLoader,
    "mixed": MixedDataLoader,
    "preference": PreferenceDataLoader,
}
_OWN = ("loader", "epochs", "edits")
"""Keys that are not arguments of a loader."""
_OBJECTS = ("group", "shard", "pad", "output")
"""Arguments that no file can hold."""
_SHARDINGS: dict[str, Callable[[], Any]] = {
    "contiguous": Contiguous,
    "strided": Strided,
    "balanced": Balanced,
}
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    types.NoneType: ((types.NoneType,), "null"),
}
_LENGTHS = {"pretrain": "chunk_size", "conversation": "max_length"}
_EXAMPLE = "loader: pretrain"


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """A loader as a file describes it. Nothing is opened yet."""

    name: str
    """Of the file, for errors."""
    kind: str
    """`pretrain`, `conversation`, `mixed` or `preference`."""
    tree: Mapping[str, Any]
    """The file, with what was changed in it."""
    epochs: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of the loader, as the file has them."""
        return {key: value for key, value in self.tree.items() if key not in _OWN}

    def open(self, **more: Any) -> DataLoader:
        """The loader, with edits made. `more` are arguments that go before those of the file."""
        arguments = {**self.arguments, **more}
        self._leave_rank_to_the_run(arguments)
        try:
            loader = self._made(arguments)
        except PenstockError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: {error}") from error
        try:
            if edits := self.tree.get("edits"):
                loader.edit(_edited(loader.plan, edits))
        except PenstockError as error:
            loader.close()
            raise ConfigError(f"{self.name}: edits: {error}") from error
        return loader

    def _made(self, arguments: dict[str, Any]) -> DataLoader:
        if arguments.get("budget") is not None and not isinstance(arguments["budget"], MemoryBudget):
            arguments["budget"] = MemoryBudget(arguments["budget"])
        if isinstance(arguments.get("sharding"), str):
            arguments["sharding"] = _SHARDINGS[arguments["sharding"]]()
        if self.kind == "mixed":
            options = {name: arguments[name] for name in LoaderOptions.__annotations__ if name in arguments}
            arguments["weights"] = read_weights(arguments.get("weights"))
            arguments["sources"] = {
                name: self._source(given, arguments, options) if isinstance(given, Mapping) else given
                for name, given in arguments["sources"].items()
            }
        return LOADERS[self.kind](**arguments)

    def _source(self, given: Mapping[str, Any], whole: Mapping[str, Any], options: Mapping[str, Any]) -> DataLoader:
        kind = given.get("loader", "pretrain")
        length = _LENGTHS[kind]
        common = {name: whole[name] for name in ("tokenizer", "truncation") if name in whole}
        common |= {length: whole.get("chunk_size", 2048), "packing": whole.get("packing", "concat")}
        return LOADERS[kind](**{**options, **common, **{k: v for k, v in given.items() if k != "loader"}})

    def _leave_rank_to_the_run(self, arguments: dict[str, Any]) -> None:
        """A file that says `world_size` alone is the same on every rank: each finds out which one it is."""
        planned = arguments.get("world_size")
        if planned is None or arguments.get("rank") is not None:
            return
        here = find_rank(model_parallel_size=arguments.get("model_parallel_size", 1), group=arguments.get("group"))
        if here.world_size != planned:
            raise ConfigError(
                f"{self.name} is made for world_size={planned}, and this is {here}; start as many ranks as it says, "
                "change it there, or pass rank= and world_size="
            )
        del arguments["world_size"]


def load_config(path: PathLike, overrides: Iterable[str] = ()) -> LoaderConfig:
    """What a YAML or JSON file describes, changed by `a.b=value`. Every problem with it is told at once.

    A token store instead of a file is a loader of that store with nothing else said.
    """
    file = Path(path)
    if is_store(file):
        with open_store(file) as store:
            kind = "pretrain" if store.manifest.mask_column is None else "conversation"
            if stored_kind(store.manifest) is not None:
                kind = "preference"
        tree: dict[str, Any] = {"loader": kind, "path": str(file)}
    else:
        tree = read_document(file, such_as=_EXAMPLE)
    overrides = list(overrides)
    for assignment in overrides:
        if assignment.partition("=")[0].strip() == "loader":  # it decides which keys there are
            set_value(tree, assignment, known=["loader"])
    for assignment in overrides:
        set_value(tree, assignment, known=keys_of(tree.get("loader")))
    problems = list(_problems(tree))
    if len(problems) == 1:
        raise ConfigError(f"{path}: {problems[0]}")
    if problems:
        raise ConfigError(f"{path} has {len(problems)} problems:" + "".join(f"\n  {one}" for one in problems))
    return LoaderConfig(str(path), tree["loader"], tree, tree.get("epochs") or 1)


def keys_of(kind: Any) -> list[str]:
    """The keys that a file may have for a kind of loader; for an unknown kind, those of all."""
    loaders = [LOADERS[kind]] if isinstance(kind, str) and kind in LOADERS else LOADERS.values()
    own = [name for loader in loaders for name in _keywords(loader)]
    options = [name for name in LoaderOptions.__annotations__ if name not in _OBJECTS]
    return list(dict.fromkeys([*_OWN, *own, *options]))


def read_weights(given: Any) -> Any:
    """Weights as the file has them, for a mixture: a list of points, or points and `interpolation`, is a schedule."""
    interpolation = "constant"
    if isinstance(given, Mapping) and "points" in given and not _is_number(given["points"]):
        unknown = [key for key in given if key not in ("points", "interpolation")]
        if unknown:
            hint = did_you_mean(str(unknown[0]), ("points", "interpolation"))
            raise ConfigError(f"a schedule has points and interpolation, not {unknown[0]!r}{hint}")
        given, interpolation = given["points"], given.get("interpolation", "constant")
    elif not (isinstance(given, list) and given and not all(map(_is_number, given))):
        return given
    points: list[tuple[int, Mapping[str, float]]] = []
    for number, point in enumerate(given if isinstance(given, list) else [given]):
        if not isinstance(point, Mapping) or set(point) != {"step", "weights"}:
            raise ConfigError(f"point {number} must be like {{step: 0, weights: {{web: 1}}}}, got {point!r:.80}")
        if not isinstance(point["weights"], Mapping):
            raise ConfigError(f"the weights of point {number} are a mapping of sources, got {point['weights']!r:.80}")
        points.append((point["step"], point["weights"]))
    return Schedule.of(points, interpolation)  # type: ignore[arg-type]  # it says itself what it does not know


def _problems(tree: Mapping[str, Any]) -> Iterable[str]:
    kind = tree.get("loader")
    if not isinstance(kind, str) or kind not in LOADERS:
        known = ", ".join(LOADERS)
        if kind is None:
            yield f"loader: is missing; it is one of {known}"
        else:
            yield f"loader: expected one of {known}, got {kind!r}{did_you_mean(str(kind), LOADERS)}"
    yield from _key_problems(tree, keys_of(kind), kind if isinstance(kind, str) else "", "")
    if (epochs := tree.get("epochs")) is not None and (not _is_number(epochs) or epochs != int(epochs) or epochs < 1):
        yield f"epochs: expected a positive whole number, got {epochs!r}"
    yield from _edit_problems(tree.get("edits"))
    if kind == "mixed":
        yield from _mixture_problems(tree)


def _key_problems(tree: Mapping[str, Any], known: list[str], kind: str, where: str) -> Iterable[str]:
    meant: set[str] = set()
    for key in tree:
        if key not in known:
            hint = did_you_mean(str(key), known)
            meant.update(name for name in known if repr(name) in hint)
            yield f"{where}{key}: unknown key{hint or '; the keys are ' + ', '.join(known)}"
    loader = LOADERS.get(kind)
    if loader is None:
        return
    hints = _hints(loader) | get_type_hints(LoaderOptions)
    for key, value in tree.items():
        if key in known and key not in _OWN:
            if key == "path" and not _is_path(value):
                yield f"{where}path: expected a path or a list of paths, got {value!r:.80}"
            elif key == "budget" and isinstance(value, (str, int)):
                continue
            elif key == "sharding" and value is not None:
                if not isinstance(value, str) or value not in _SHARDINGS:
                    hint = did_you_mean(str(value), _SHARDINGS)
                    yield f"{where}sharding: expected one of {', '.join(_SHARDINGS)}, got {value!r}{hint}"
            elif misfit := _misfit(value, hints.get(key, Any)):
                yield f"{where}{key}: {misfit}"
    needed = "sources" if kind == "mixed" else "path"
    if needed not in tree and needed not in meant:
        yield f"{where}{needed}: is missing"


def _mixture_problems(tree: Mapping[str, Any]) -> Iterable[str]:
    sources = tree.get("sources")
    if sources is not None and (not isinstance(sources, Mapping) or not sources):
        yield f"sources: expected names and paths, such as {{web: web.store}}, got {sources!r:.80}"
    for name, given in sources.items() if isinstance(sources, Mapping) else ():
        if not isinstance(given, Mapping):
            if not _is_path(given):
                yield f"sources.{name}: expected a path, a list of paths or a loader, got {given!r:.80}"
            continue
        kind = given.get("loader", "pretrain")
        if kind not in _LENGTHS:
            yield f"sources.{name}.loader: expected one of {', '.join(_LENGTHS)}, got {kind!r}"
            continue
        known = ["loader", *(key for key in _keywords(LOADERS[kind]) if key != "name")]
        yield from _key_problems(given, known, kind, f"sources.{name}.")
    try:
        read_weights(tree.get("weights"))
    except PenstockError as error:
        yield f"weights: {error}"


def _edit_problems(given: Any) -> Iterable[str]:
    if given is None:
        return
    if not isinstance(given, list):
        yield f"edits: expected a list such as '- skip: [340, 360]', got {given!r:.80}"
        return
    for number, edit in enumerate(given):
        where = f"edits[{number}]"
        kinds = [kind for kind in ("skip", "ban", "reweight") if isinstance(edit, Mapping) and kind in edit]
        if len(kinds) != 1 or set(edit) - {kinds[0], "step"}:
            yield f"{where}: expected skip, ban or reweight (the last two with a step), got {edit!r:.80}"
            continue
        kind, value = kinds[0], edit[kinds[0]]
        step = edit.get("step", 0)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            yield f"{where}.step: expected a whole number from 0 on, got {step!r}"
        if kind == "skip" and not (isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))):
            yield f"{where}.skip: expected the first step and the one after the last, as [340, 360], got {value!r:.80}"
        if kind == "skip" and "step" in edit:
            yield f"{where}: skip says its steps itself; leave out step"
        if kind == "ban" and not all(
            isinstance(rows, list) and all(map(_is_whole, rows)) for rows in _row_lists(value)
        ):
            yield f"{where}.ban: expected rows, as {{web: [17, 4711]}}, got {value!r:.80}"
        if kind == "reweight" and not isinstance(value, Mapping):
            yield f"{where}.reweight: expected weights, as {{web: 0.2, chat: 0.8}}, got {value!r:.80}"


def _row_lists(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _edited(plan: Plan, edits: Iterable[Mapping[str, Any]]) -> Plan:
    for edit in edits:
        if "skip" in edit:
            plan = plan.skip(*edit["skip"])
        elif "ban" in edit:
            plan = plan.ban(edit["ban"], step=edit.get("step", 0))
        else:
            plan = plan.reweight(edit.get("step", 0), edit["reweight"])
    return plan


def _keywords(loader: type[DataLoader]) -> list[str]:
    """The arguments that a loader has beside those of every loader."""
    parameters = list(inspect.signature(loader.__init__).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]


def _hints(loader: type[DataLoader]) -> dict[str, Any]:
    """The annotations of a loader's arguments; names that only a type checker imports stand for anything."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(loader.__init__, localns=unknown)
        except NameError as error:
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = Any


def _misfit(value: Any, hint: Any) -> str | None:
    """Why a plain value is not what an annotation says; what is not plain is left to the loader."""
    members = _members(hint)
    for member in members:
        if member in _PLAIN:
            fits = isinstance(value, _PLAIN[member][0]) and (member is bool or not isinstance(value, bool))
        elif get_origin(member) is Literal:
            fits = isinstance(value, str)  # names have other names, which the loader knows
        elif get_origin(member) in (Mapping, dict):
            fits = isinstance(value, Mapping)
        else:
            fits = True
        if fits:
            return None
    words = dict.fromkeys(_PLAIN[member][1] if member in _PLAIN else _in_words(member) for member in members)
    quotes = "; put quotes around it" if str in members and isinstance(value, (bool, int, float)) else ""
    return f"expected {' or '.join(words)}, got {value!r:.80}{quotes}"


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(inner for member in get_args(hint) for inner in _members(member))
    return (types.NoneType,) if hint is None else (hint,)


def _in_words(hint: Any) -> str:
    return " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else "a mapping"


def _is_path(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(p, str) for p in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
