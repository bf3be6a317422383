"""Several sources in one stream of batches, by weights that may change from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from penstock._suggest import did_you_mean
from penstock.batching.options import LoaderOptions, Options, read_options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import Paths, open_inputs
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.sampling import LoaderSource, Packing, Sampling, build_source
from penstock.order.overlong import Truncation
from penstock.order.schedules import Schedule, temperature_weights

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe
    from penstock.tokenizers.load import TokenizerSpec

__all__ = ["MixedDataLoader"]

Weights = Mapping[str, float] | Sequence[float] | Schedule | None


class MixedDataLoader(DataLoader):
    """Samples of several sources, so many of each as the weights say, within one at every step.

        loader = MixedDataLoader(
            {"web": "web.store", "code": "code/*.jsonl"},
            weights={"web": 0.7, "code": 0.3},
            tokenizer="model/",
            chunk_size=2048,
        )

    A source is a path, as of `PretrainDataLoader`, or a loader, whose rows, lengths and packing are taken over and
    whose position is left alone. Samples of one length make weights shares of tokens; with `packing=None` they are
    shares of rows.

    `weights` may be a `Schedule` over steps. Without any, sources count by their tokens, with a `temperature` above 1
    more evenly. Sources are used again from the beginning when they end, at most `max_epochs` times. An epoch of the
    mixture ends with the step in which a source ends for the first time (`first_exhausted`), or the last of them does
    (`all_exhausted`), or when each was used exactly once (`all_exhausted_without_replacement`), or never.
    """

    def __init__(
        self,
        sources: Mapping[str, Paths | DataLoader] | Sequence[DataLoader],
        weights: Weights = None,
        *,
        tokenizer: TokenizerSpec | None = None,
        chunk_size: int = 2048,
        packing: Packing = "concat",
        truncation: Truncation = "error",
        text_column: str | None = None,
        temperature: float = 1.0,
        max_epochs: Mapping[str, int] | int | None = None,
        stopping_strategy: str = "first_exhausted",
        **options: Unpack[LoaderOptions],
    ) -> None:
        chosen = read_options(options)
        sampling = Sampling(packing=packing, length=chunk_size, truncation=truncation)
        recipe = None if tokenizer is None else _recipe(tokenizer, text_column)
        named = _named(sources)
        limits = _limits(max_epochs, list(named))
        stocks = [
            _taken_over(source, name, chosen, limits.get(name))
            if isinstance(source, DataLoader)
            else _opened(source, recipe, sampling, chosen, name, limits.get(name))
            for name, source in named.items()
        ]
        _check_tokenizers(stocks)
        schedule = _schedule(weights, temperature, stocks)
        super().__init__(PlanEngine(stocks, chosen, schedule=schedule, stopping=stopping_strategy))


def _recipe(tokenizer: TokenizerSpec, column: str | None) -> Recipe:
    from penstock.corpus.recipe import Recipe  # what makes stores is loaded by those who make one

    return Recipe(tokenizer=tokenizer, column=column)


def _opened(
    path: Paths, recipe: Recipe | None, sampling: Sampling, options: Options, name: str, max_epochs: int | None
) -> LoaderSource:
    inputs = open_inputs(path, recipe, cache=options.cache, verify=options.verify, budget=options.budget)
    return build_source(inputs, sampling, options, name, max_epochs)


def _taken_over(loader: DataLoader, name: str, options: Options, max_epochs: int | None) -> LoaderSource:
    """The source of another loader under a name of its own, in the order that this one's seed gives."""
    if len(loader.stocks) != 1:
        raise ConfigError(f"{name!r} is a mixture already; give its sources one by one")
    if isinstance(loader, PreferenceDataLoader):
        raise ConfigError(f"{name!r} is a loader of preferences, whose batches have another form; it cannot be mixed")
    there = loader.stocks[0]
    return build_source(replace(there.inputs, owned=False), there.sampling, options, name, max_epochs)


def _check_tokenizers(stocks: Sequence[LoaderSource]) -> None:
    known = {}
    for each in stocks:
        store = each.inputs.table.stores[0]
        if store.manifest.tokenizer is not None:
            known[each.feed.name] = store.manifest.tokenizer
    if len(set(known.values())) > 1:
        raise ConfigError(
            f"sources that are mixed need the same tokenizer, or one id would mean several tokens; they were made with "
            f"{known}: prepare them again with one"
        )


def _named(sources: Any) -> dict[str, Paths | DataLoader]:
    if isinstance(sources, Mapping):
        named = dict(sources)
    elif isinstance(sources, Sequence) and not isinstance(sources, str):
        named = {f"source{number}": source for number, source in enumerate(sources)}
    else:
        raise ConfigError(f"sources are a dict of names and paths, got {sources!r}")
    if not named:
        raise ConfigError("a mixture needs at least one source")
    return named


def _limits(max_epochs: Mapping[str, int] | int | None, names: list[str]) -> dict[str, int]:
    if max_epochs is None:
        return {}
    limits = dict(max_epochs) if isinstance(max_epochs, Mapping) else dict.fromkeys(names, max_epochs)
    for name, limit in limits.items():
        if name not in names:
            raise ConfigError(
                f"max_epochs names the unknown source {name!r}{did_you_mean(name, names)}; there are {names}"
            )
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"max_epochs of {name!r} must be a positive whole number, got {limit!r}")
    return limits


def _schedule(weights: Weights, temperature: float, stocks: Sequence[LoaderSource]) -> Schedule:
    names = [each.feed.name for each in stocks]
    if weights is None:
        sizes = {each.feed.name: float(max(each.inputs.table.tokens, 1)) for each in stocks}
        return Schedule.constant(temperature_weights(sizes, temperature))
    if temperature != 1.0:
        raise ConfigError(
            f"temperature={temperature} makes weights of sizes, and weights were given too; pass one of them"
        )
    if isinstance(weights, Schedule):
        return weights
    if not isinstance(weights, Mapping):
        if isinstance(weights, str) or not isinstance(weights, Iterable):
            raise ConfigError(f"weights are a dict by source, a list or a Schedule, got {weights!r}")
        given = list(weights)
        if len(given) != len(names):
            raise ConfigError(f"there are {len(names)} sources and {len(given)} weights; give one for each of {names}")
        weights = dict(zip(names, given))
    for name in weights:
        if name not in names:
            raise ConfigError(f"weights name the unknown source {name!r}{did_you_mean(name, names)}; there are {names}")
    return Schedule.constant(weights)
