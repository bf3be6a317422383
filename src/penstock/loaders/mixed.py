"""Mixtures: several sources in one stream of batches, by weights that may change from step to step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from penstock._suggest import did_you_mean
from penstock.arrays.truncation import Policy
from penstock.batching.batch import TrainingBatch
from penstock.batching.options import LoaderOptions, Options, read_options
from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.loaders.base import DataLoader
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.source import LoaderSource, Packing, Paths, Sampling, build_recipe, build_source, open_inputs
from penstock.order.mixing import Drawn, Mixture
from penstock.order.schedules import Schedule, temperature_weights
from penstock.order.steps import STOPPING
from penstock.sources.tables import kind_of, refuse_splits

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

Weights = Mapping[str, float] | Sequence[float] | Schedule | None
_STATE = StateFormat("mixed loaders", "a mixture of loaders")


class MixedDataLoader(DataLoader, options=(Options,)):
    """Samples of several sources in the proportion of their weights, exact to one sample at every step.

        loader = MixedDataLoader(
            {"web": "web.store", "code": "code/*.jsonl"},
            weights={"web": 0.7, "code": 0.3},
            tokenizer="model/",
            chunk_size=2048,
        )

    A source is a path or data, as of `PretrainDataLoader`, or a loader, whose rows, lengths and packing are used and
    whose position does not change. With samples of one length, weights are shares of tokens; with `packing=None`, of
    rows. With a loader of your own (see `DataLoader`) among the sources, all of them must be loaders; they are mixed by
    batches then, and the mixture moves them.

    Loaders with `streaming=True` are mixed by samples too, if all are streams. Weights are needed then, and every rank
    reads all streams. Seed, shuffle and batch size are those of the mixture.

    `weights` may be a `Schedule` over steps. Without weights, sources count by their tokens; a `temperature` above 1
    evens them out. Sources that end begin again, at most `max_epochs` times. An epoch of the mixture ends with the step
    in which the first source ends (`first_exhausted`), or the last one (`all_exhausted`), or when each was used exactly
    once (`all_exhausted_without_replacement`), or never.
    """

    def __init__(
        self,
        sources: Mapping[str, Paths | DataLoader] | Sequence[DataLoader],
        weights: Weights = None,
        *,
        tokenizer: TokenizerSpec | None = None,
        chunk_size: int = 2048,
        packing: Packing = "concat",
        truncation: Policy = "error",
        text_column: str | None = None,
        temperature: float = 1.0,
        max_epochs: Mapping[str, int] | int | None = None,
        stopping_strategy: str = "first_exhausted",
        **options: Unpack[LoaderOptions],
    ) -> None:
        chosen = read_options(options, type(self))
        sampling = Sampling(packing=packing, length=chunk_size, truncation=truncation)
        named = _named(sources)
        limits = _limits(max_epochs, list(named))
        if any(isinstance(source, DataLoader) and source._engine is None for source in named.values()):
            _check_unused(options, tokenizer=tokenizer, text_column=text_column)
            loaders = {name: _as_loader(name, source) for name, source in named.items()}
            sizes = {name: float(max(len(loader), 1)) for name, loader in loaders.items()}
            schedule = _schedule(weights, temperature, sizes)
            super().__init__(_LoaderMixEngine(loaders, chosen, schedule, limits, stopping_strategy))
            return
        if any(map(_is_stream, named.values())):
            for unused, value in (("tokenizer", tokenizer), ("text_column", text_column)):
                if value is not None:
                    raise ConfigError(f"{unused} has no effect: streams have their own; pass it to the loaders")
            super().__init__(_stream_mixture(named, chosen, weights, limits, temperature, stopping_strategy))
            return
        recipe = build_recipe(tokenizer, chosen, **({"column": text_column} if tokenizer is not None else {}))
        found: list[LoaderSource] = []
        for name, source in named.items():
            rule = sampling
            if isinstance(source, DataLoader):
                known = _single_source(source, name)
                inputs, rule = replace(known.inputs, owned=False), known.sampling
            else:
                inputs = open_inputs(source, recipe, chosen)
            found.append(build_source(inputs, rule, chosen, name, limits.get(name)))
        _check_tokenizers(found)
        sizes = {source.name: float(max(source.inputs.table.tokens, 1)) for source in found}
        schedule = _schedule(weights, temperature, sizes)
        super().__init__(PlanEngine(found, chosen, schedule=schedule, stopping=stopping_strategy))


def _is_stream(source: Any) -> bool:
    from penstock.loaders.streamed.engine import StreamEngine  # imported only if there are loaders

    return isinstance(source, DataLoader) and isinstance(source._engine, StreamEngine)


def _stream_mixture(
    named: Mapping[str, Any],
    options: Options,
    weights: Weights,
    limits: Mapping[str, int],
    temperature: float,
    stopping: str,
) -> Any:
    from penstock.loaders.streamed.mixture import StreamMixEngine

    for name, source in named.items():
        if not _is_stream(source):
            raise ConfigError(
                f"{name!r} is no stream, and others are; pass a loader with streaming=True for each source (a store "
                "can be streamed too), or prepare all of them"
            )
    if weights is None:
        raise ConfigError("a mixture of streams needs weights=, because their sizes are not known")
    if limits:
        raise ConfigError("max_epochs needs the lengths of the sources, which streams do not know; prepare the data")
    schedule = _schedule(weights, temperature, dict.fromkeys(named, 1.0))
    return StreamMixEngine({name: source._engine for name, source in named.items()}, options, schedule, stopping)


_ALWAYS_USED = frozenset({"budget", "device", "metrics", "pin_memory", "prefetch"})
"""Options that apply to batches of any origin."""


def _check_unused(options: Mapping[str, Any], **more: Any) -> None:
    """Refuse options that have no effect where loaders without a plan are mixed by batches."""
    unused = [
        *(name for name in options if name not in _ALWAYS_USED),
        *(name for name, value in more.items() if value is not None),
    ]
    if unused:
        raise ConfigError(
            f"{unused[0]} has no effect: loaders without a plan are mixed by batches that they make by themselves; "
            "pass it to the loaders"
        )


def _single_source(loader: DataLoader, name: str) -> LoaderSource:
    if len(loader.sources) != 1:
        raise ConfigError(f"{name!r} is a mixture itself; pass its sources one by one")
    if isinstance(loader, PreferenceDataLoader):
        raise ConfigError(f"{name!r} is a loader of preferences, whose batches have another layout and cannot be mixed")
    return loader.sources[0]


def _as_loader(name: str, source: Any) -> DataLoader:
    if not isinstance(source, DataLoader):
        raise ConfigError(f"{name!r} must be a loader, since others are loaders without a plan, got {source!r}")
    return source


def _check_tokenizers(sources: Sequence[LoaderSource]) -> None:
    known = {source.name: source.inputs.table.stores[0].manifest.tokenizer for source in sources}
    known = {name: tokenizer for name, tokenizer in known.items() if tokenizer is not None}
    if len(set(known.values())) > 1:
        raise ConfigError(f"mixed sources need one tokenizer, got {known}; prepare them again with one tokenizer")


def _named(sources: Any) -> dict[str, Paths | DataLoader]:
    if isinstance(sources, Mapping):
        if kind_of(sources) is not None:
            refuse_splits(sources)
        named = dict(sources)
    elif isinstance(sources, Sequence) and not isinstance(sources, str):
        named = {f"source{number}": source for number, source in enumerate(sources)}
    else:
        raise ConfigError(f"sources must be a dict of names and paths or loaders, got {sources!r}")
    if not named:
        raise ConfigError("a mixture needs at least one source")
    return named


def _limits(max_epochs: Mapping[str, int] | int | None, names: list[str]) -> dict[str, int]:
    if max_epochs is None:
        return {}
    limits = dict(max_epochs) if isinstance(max_epochs, Mapping) else dict.fromkeys(names, max_epochs)
    for name, limit in limits.items():
        if name not in names:
            raise ConfigError(f"max_epochs has unknown source {name!r}{did_you_mean(name, names)}; sources are {names}")
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"max_epochs of {name!r} must be a positive integer, got {limit!r}")
    return limits


def _schedule(weights: Weights, temperature: float, sizes: Mapping[str, float]) -> Schedule:
    names = list(sizes)
    if weights is None:
        return Schedule.constant(temperature_weights(sizes, temperature))
    if temperature != 1.0:
        raise ConfigError(f"temperature={temperature} and weights were both given; pass one of them")
    if isinstance(weights, Schedule):
        return weights
    if not isinstance(weights, Mapping):
        if isinstance(weights, str) or not isinstance(weights, Iterable):
            raise ConfigError(f"weights must be a dict by source, a list or a Schedule, got {weights!r}")
        given = list(weights)
        if len(given) != len(names):
            raise ConfigError(
                f"weights has {len(given)} entries for {len(names)} sources; give one for each of {names}"
            )
        weights = dict(zip(names, given))
    for name in weights:
        if name not in names:
            raise ConfigError(f"weights has unknown source {name!r}{did_you_mean(name, names)}; sources are {names}")
    return Schedule.constant(weights)


class _MixPosition(NamedTuple):
    """Position in a mixture of loaders."""

    drawn: Drawn
    step: int = 0
    epoch: int = 0
    epoch_start: tuple[int, ...] = ()
    """Batches of each loader before this epoch."""


class _LoaderMixEngine:
    """Batches of several loaders, interleaved by weight: each step is a batch of one of them.

    Loaders only go forwards, so going back resets them and reads up to the position.
    """

    def __init__(
        self,
        loaders: Mapping[str, DataLoader],
        options: Options,
        schedule: Schedule,
        max_epochs: Mapping[str, int],
        stopping: str,
    ) -> None:
        if stopping not in STOPPING:
            hint = did_you_mean(stopping, STOPPING)
            raise ConfigError(f"stopping_strategy must be one of {', '.join(STOPPING)}, got {stopping!r}{hint}")
        self.options, self.rank, self.batch_size = options, options.find_rank(), options.batch_size
        self._names, self._loaders, self._stopping = tuple(loaders), tuple(loaders.values()), stopping
        self._mixture = Mixture(self._names, schedule, 1)
        self._lengths = [len(loader) for loader in self._loaders]
        if not all(self._lengths):
            raise ConfigError(f"every loader of a mixture needs a batch, got {dict(zip(self._names, self._lengths))}")
        self._most = [
            max_epochs[name] * length if name in max_epochs else None
            for name, length in zip(self._names, self._lengths)
        ]
        self._rewind()

    @property
    def names(self) -> str:
        return ", ".join(self._names)

    def start(self) -> _MixPosition:
        return _MixPosition(self._mixture.start(), epoch_start=(0,) * len(self._names))

    def seek(self, step: int) -> _MixPosition:
        position = next(islice(self._walk(), step, None), None)
        if position is None:
            raise IndexError(f"step {step} does not exist; the mixture ends before it")
        return position

    def seek_epoch(self, epoch: int, position: _MixPosition) -> _MixPosition:
        found = next((each for each in self._walk() if each.epoch >= epoch), None)
        if found is None:
            raise IndexError(f"epoch {epoch} does not exist; the mixture ends before it")
        return found

    def one(self, position: _MixPosition, batch_size: int | None) -> tuple[TrainingBatch, _MixPosition]:
        if batch_size is not None:
            raise ConfigError(f"batch_size={batch_size}: mixed loaders have batches of their own; omit batch_size")
        drawn = self._draw(position)
        if drawn is None:
            raise EOFError("no batch is left: every loader was used as often as max_epochs allows")
        return self._batch(position, *drawn), self._settled(drawn[1])

    def item(self, epoch: int, number: int) -> TrainingBatch:
        raise TypeError("mixed loaders give their batches in order; iterate, or use prepared data to get one by number")

    def position_of(self, epoch: int, number: int) -> _MixPosition:
        raise TypeError("mixed loaders give their batches in order and cannot be used by worker processes of torch")

    number_of: Any = position_of

    def count(self, epoch: int) -> int:
        if self._stopping == "never":
            raise TypeError("a mixture with stopping_strategy='never' has no number of steps")
        return sum(1 for found in self._walk(epoch + 1) if found.epoch == epoch)

    def batches(self, position: _MixPosition) -> Generator[tuple[TrainingBatch, _MixPosition], None, None]:
        epoch = position.epoch
        while position.epoch == epoch and (drawn := self._draw(position)) is not None:
            following = self._settled(drawn[1])
            yield self._batch(position, *drawn), following
            position = following

    def to_state(self, position: _MixPosition) -> dict[str, Any]:
        facts = {"names": list(self._names), "step": position.step, "epoch": position.epoch}
        return _STATE.write({**facts, "drawn": position.drawn.to_json(), "epoch_start": list(position.epoch_start)})

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> _MixPosition:
        _STATE.read(state)
        if state.get("names") != list(self._names):
            raise ResumeError(f"the state has the loaders {state.get('names')}, and this mixture {list(self._names)}")
        drawn = Drawn.from_json(state["drawn"])
        return _MixPosition(drawn, int(state["step"]), int(state["epoch"]), tuple(state["epoch_start"]))

    def close(self) -> None:
        self._rewind()

    def _walk(self, epochs: int | None = None) -> Iterator[_MixPosition]:
        """Positions of all steps, without their batches."""
        position = self.start()
        while epochs is None or position.epoch < epochs:
            drawn = self._draw(position)
            yield position
            if drawn is None:
                return
            position = self._settled(drawn[1])

    def _draw(self, position: _MixPosition) -> tuple[int, _MixPosition] | None:
        """Loader of the next batch, and the next position; None at the end of an epoch."""
        ids, drawn = self._mixture.draw(position.drawn, 1, self._limits(position))
        if self._is_over(position) or not len(ids):
            return None
        return int(ids[0]), position._replace(drawn=drawn, step=position.step + 1)

    def _settled(self, position: _MixPosition) -> _MixPosition:
        """Position in the next epoch, if this one is over."""
        if self._draw(position) is not None:
            return position
        drawn = position.drawn
        drawn = replace(drawn, start=drawn.position, base=drawn.counts, owed=(), out=()) if drawn.out else drawn
        return position._replace(epoch=position.epoch + 1, epoch_start=drawn.counts, drawn=drawn)

    def _limits(self, position: _MixPosition) -> list[int | None]:
        if self._stopping != "all_exhausted_without_replacement":
            return self._most
        ends = (start + length for start, length in zip(position.epoch_start, self._lengths))
        return [end if most is None else min(end, most) for end, most in zip(ends, self._most)]

    def _is_over(self, position: _MixPosition) -> bool:
        if self._stopping == "never":
            return False
        counts, starts = position.drawn.counts, position.epoch_start
        passed = [count - start >= length for count, start, length in zip(counts, starts, self._lengths)]
        if self._stopping == "first_exhausted":
            return any(passed)
        return all(done or count == most for done, count, most in zip(passed, counts, self._most))

    def _batch(self, position: _MixPosition, which: int, following: _MixPosition) -> TrainingBatch:
        """Next batch of a loader. Loaders that are elsewhere are brought to the position first."""
        wanted = position.drawn.counts
        if any(count > target for count, target in zip(self._read, wanted)):
            self._rewind()
        for number, target in enumerate(wanted):
            while self._read[number] < target:
                self._next(number)
        batch = self._next(which)
        batch.metadata |= {"step": position.step, "epoch": position.epoch, "loader": self._names[which]}
        return batch

    def _next(self, which: int) -> TrainingBatch:
        iterator = self._iterators[which]
        batch = None if iterator is None else next(iterator, None)
        if batch is None:
            loader = self._loaders[which]
            if iterator is None or loader._engine is None:
                loader.reset()
            iterator = self._iterators[which] = loader.get_iterator()
            batch = next(iterator)
        self._read[which] += 1
        return batch

    def _rewind(self) -> None:
        self._iterators: list[Iterator[TrainingBatch] | None] = [None] * len(self._loaders)
        self._read = [0] * len(self._loaders)
