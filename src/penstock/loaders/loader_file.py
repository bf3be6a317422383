"""File that describes a loader: the keywords of its constructor, in YAML or JSON.

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
    world_size: 8                        # the planned number of data ranks; a run on another number is refused
    seed: 7
    epochs: 2                            # how far `penstock plan` counts
    edits:
      - skip: [340, 360]
      - {ban: {web: [17, 4711]}, step: 500}
      - {reweight: {web: 0.2, chat: 0.8}, step: 2000}

A training script reads the same file:

    with load_config("train.yaml").open() as loader: ...

A source of a mixture that is a mapping is a loader of its own. It inherits tokenizer, length, packing and truncation
from the mixture. Paths are relative to the current directory. The file cannot run code.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from penstock._suggest import check_options, nearest, unknown_option
from penstock.batching.options import LoaderOptions, Shard, flat_options
from penstock.config.settings import ByteSize
from penstock.distributed.sharding import Balanced, Contiguous, Strided
from penstock.errors import ConfigError, PenstockError
from penstock.files.documents import read_document, set_value
from penstock.files.filesystems import shown
from penstock.files.listing import PathLike
from penstock.files.remote import fetched_path
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.source import stored_kind
from penstock.memory import MemoryBudget
from penstock.order.plan import Plan
from penstock.order.schedules import Schedule
from penstock.store import open_store
from penstock.store.foreign.lookup import is_foreign
from penstock.store.manifest import is_bucket_store, is_store, refuse_remote_store
from penstock.types.conversion import Problems, convert

LOADERS: dict[str, type[DataLoader]] = {
    "pretrain": PretrainDataLoader,
    "conversation": ConversationDataLoader,
    "mixed": MixedDataLoader,
    "preference": PreferenceDataLoader,
}
_OWN_KEYS = ("loader", "epochs", "edits")
"""Keys that are not arguments of a loader."""
_OBJECTS = ("group", "shard", "pad", "output", "raw")
"""Arguments that no file can hold."""
_PLACE = ("rank", "model_parallel_size", "group", "dp", "cp", "tp", "pp")
"""Arguments that say where this process is."""
SHARDINGS: dict[str, Callable[[], Any]] = {"contiguous": Contiguous, "strided": Strided, "balanced": Balanced}
_KINDS: dict[str, Any] = {
    "path": str | list[str],
    "sharding": Literal["contiguous", "strided", "balanced"] | None,
    "shuffle": bool | Literal["blocks"],
    "budget": ByteSize | None,
    "cache_bytes": ByteSize,
    "epochs": int | None,
    "sources": dict[str, Any],
    "weights": Any,
}
"""Keys whose value in a file is not what the constructor takes."""
_EDITS: dict[str, Any] = {
    "skip": tuple[int, int],
    "ban": list[int] | dict[str, list[int]],
    "reweight": dict[str, float],
}
_LENGTHS = {"pretrain": "chunk_size", "conversation": "max_length"}


@dataclass(frozen=True, slots=True)
class LoaderConfig:
    """Description of a loader, read from a file. `open` makes the loader."""

    name: str
    """Name of the file, for errors."""
    kind: str
    """`pretrain`, `conversation`, `mixed` or `preference`."""
    tree: Mapping[str, Any]
    """Content of the file, with overrides."""
    epochs: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of the loader, as the file has them."""
        return {key: value for key, value in self.tree.items() if key not in _OWN_KEYS}

    @property
    def shown_tree(self) -> dict[str, Any]:
        """The content for pages and reports: without the passwords of URLs."""
        return {key: _without_secrets(value) for key, value in self.tree.items()}

    def open(self, **more: Any) -> DataLoader:
        """The loader, with its plan edited. Arguments in `more` override those of the file."""
        given = flat_options(more)
        arguments = {**self.arguments, **given}
        if given.get("rank") is None or given.get("world_size") is None:  # else the caller says where this process is
            self._find_rank(arguments)
        try:
            loader = self._make(arguments)
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

    def _make(self, arguments: dict[str, Any]) -> DataLoader:
        if arguments.get("budget") is not None:  # one for all sources
            arguments["budget"] = MemoryBudget.of(arguments["budget"])
        if isinstance(arguments.get("sharding"), str):
            arguments["sharding"] = SHARDINGS[arguments["sharding"]]()
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

    def _find_rank(self, arguments: dict[str, Any]) -> None:
        """With `world_size` alone the file is the same on every rank, and each rank finds its own number."""
        planned = arguments.get("world_size")
        place = {name: arguments[name] for name in _PLACE if arguments.get(name) is not None}
        sized = any(place.get(name, 1) != 1 for name in ("cp", "tp", "pp")) or "dp" in place
        if planned is None or ("rank" in place and not sized):
            return
        if "rank" in place and "dp" not in place:
            place["dp"] = arguments["dp"] = planned
        here = Shard(**place).find_rank()
        if here.world_size != planned:
            counted = " (world_size is the number of data ranks; ranks of cp, tp and pp share samples)" if sized else ""
            raise ConfigError(
                f"{self.name} is planned for world_size={planned}, and this is {here}{counted}; start that many ranks, "
                "change world_size in the file, or pass rank= and world_size="
            )
        del arguments["world_size"]


def load_config(path: PathLike, overrides: Iterable[str] = ()) -> LoaderConfig:
    """The loader that a YAML or JSON file describes, with overrides such as `a.b=value`.

    All problems of the file are in one ConfigError. A token store instead of a file means a loader of that store with
    default options.
    """
    refuse_remote_store(path)
    file: PathLike
    name = shown(path)
    if is_bucket_store(path):
        file = os.fspath(path)
    else:
        file = fetched_path(path)
    if isinstance(file, str) or is_store(file) or is_foreign(file):
        with open_store(file) as store:
            kind = "pretrain" if store.manifest.mask_column is None else "conversation"
            if stored_kind(store.manifest) is not None:
                kind = "preference"
        tree: dict[str, Any] = {"loader": kind, "path": str(file)}
    else:
        tree = read_document(file, such_as="loader: pretrain", name=name)
    # `loader` first: it decides which keys are valid.
    for override in sorted(overrides, key=lambda text: text.partition("=")[0].strip() != "loader"):
        set_value(tree, override, known=keys_of(tree.get("loader")))
    problems = Problems()
    _check(tree, problems)
    problems.check(name)
    return LoaderConfig(name, tree["loader"], tree, tree.get("epochs") or 1)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_without_secrets(key): _without_secrets(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return shown(value) if isinstance(value, str) and "://" in value else value


def open_rank(config: LoaderConfig, rank: int = 0, **more: Any) -> DataLoader:
    """The loader of one planned data rank. The default backend is NumPy, which is always installed.

    Ranks that share samples are not told apart, and sequences are whole.
    """
    place = {"rank": rank, "world_size": planned_world(config), "model_parallel_size": 1}
    alone = {"dp": None, "cp": 1, "tp": 1, "pp": 1, "context": None}
    return config.open(**{"backend": config.arguments.get("backend") or "numpy", **place, **alone, **more})


def planned_world(config: LoaderConfig) -> int:
    """Data ranks that a file is planned for."""
    return int(config.arguments.get("world_size") or config.arguments.get("dp") or 1)


def keys_of(kind: Any) -> list[str]:
    """The valid keys of a file for a kind of loader; for an unknown kind, those of all."""
    loaders = [LOADERS[kind]] if isinstance(kind, str) and kind in LOADERS else LOADERS.values()
    own = [name for loader in loaders for name in _keywords(loader)]
    options = [name for name in LoaderOptions.__annotations__ if name not in _OBJECTS]
    return list(dict.fromkeys([*_OWN_KEYS, *own, *options]))


def read_weights(given: Any) -> Any:
    """Weights of a mixture: a list of points, or points with `interpolation`, becomes a Schedule."""
    interpolation = "constant"
    if isinstance(given, Mapping) and "points" in given and not isinstance(given["points"], (int, float)):
        check_options(given, ("points", "interpolation"))
        given, interpolation = given["points"], given.get("interpolation", "constant")
    elif not (isinstance(given, list) and any(isinstance(point, Mapping) for point in given)):
        return given
    points: list[tuple[int, Mapping[str, float]]] = []
    for number, point in enumerate(given if isinstance(given, list) else [given]):
        if not isinstance(point, Mapping) or set(point) != {"step", "weights"}:
            raise ConfigError(f"point {number}: expected {{step: 0, weights: {{web: 1}}}}, got {point!r:.80}")
        points.append((point["step"], convert(point["weights"], Mapping)))
    return Schedule.of(points, interpolation)  # type: ignore[arg-type]  # it checks the name itself


def _check(tree: dict[str, Any], problems: Problems) -> None:
    kind = tree.get("loader")
    try:
        convert(kind, Literal["pretrain", "conversation", "mixed", "preference"])
    except ConfigError as error:
        problems.add("loader", error if "loader" in tree else f"missing; expected one of {', '.join(LOADERS)}")
        kind = None
    _check_keys(tree, keys_of(kind), kind, "", problems)
    if (epochs := tree.get("epochs")) is not None and isinstance(epochs, int) and epochs < 1:
        problems.add("epochs", f"expected a positive number, got {epochs}")
    world_size, dp = tree.get("world_size"), tree.get("dp")
    if world_size is not None and dp is not None and world_size != dp:
        problems.add(
            "world_size",
            f"{world_size} contradicts dp={dp}: world_size is the number of data ranks, {dp} here, whatever cp, tp and "
            "pp are; omit it, dp says it",
        )
    _check_edits(tree.get("edits"), problems)
    if kind == "mixed":
        _check_mixture(tree, problems)


def _check_keys(tree: dict[str, Any], known: list[str], kind: str | None, place: str, problems: Problems) -> None:
    unknown = [key for key in tree if key not in known]
    for key in unknown:
        problems.add(f"{place}{key}", unknown_option(key, known))
    if kind is None:
        return
    kinds = {**_hints(LOADERS[kind].__init__), **get_type_hints(LoaderOptions), **_KINDS}
    for key in tree:
        if key not in unknown and key not in ("loader", "edits"):
            converted = problems.attempt(f"{place}{key}", convert, tree[key], kinds.get(key, Any))
            if isinstance(tree[key], float):
                tree[key] = converted  # 4.0 as a whole number
    needed = "sources" if kind == "mixed" else "path"
    if needed not in tree and needed not in {nearest(key, known) for key in unknown}:
        problems.add(f"{place}{needed}", "missing")


def _check_mixture(tree: Mapping[str, Any], problems: Problems) -> None:
    sources = tree.get("sources")
    for name, given in sources.items() if isinstance(sources, Mapping) else ():
        if not isinstance(given, Mapping):
            problems.attempt(f"sources.{name}", convert, given, _KINDS["path"])
            continue
        kinds = Literal["pretrain", "conversation"]
        kind = problems.attempt(f"sources.{name}.loader", convert, given.get("loader", "pretrain"), kinds)
        if kind is None:
            continue
        known = ["loader", *(key for key in _keywords(LOADERS[kind]) if key != "name")]
        _check_keys(dict(given), known, kind, f"sources.{name}.", problems)
    problems.attempt("weights", read_weights, tree.get("weights"))


def _check_edits(given: Any, problems: Problems) -> None:
    if given is not None and not isinstance(given, list):
        problems.add("edits", f"expected a list such as '- skip: [340, 360]', got {given!r:.80}")
        return
    for number, edit in enumerate(given or ()):
        place = f"edits[{number}]"
        kinds = [kind for kind in _EDITS if isinstance(edit, Mapping) and kind in edit]
        if len(kinds) != 1 or set(edit) - {kinds[0], "step"} or ("step" in edit and kinds[0] == "skip"):
            problems.add(place, f"expected skip, ban or reweight (the last two with a step), got {edit!r:.80}")
            continue
        problems.attempt(f"{place}.{kinds[0]}", convert, edit[kinds[0]], _EDITS[kinds[0]])
        step = problems.attempt(f"{place}.step", convert, edit.get("step", 0), int)
        if step is not None and step < 0:
            problems.add(f"{place}.step", f"expected 0 or more, got {step}")


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


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function; names that only a type checker imports become Any."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return get_type_hints(function, localns=unknown)
        except NameError as error:
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = Any
