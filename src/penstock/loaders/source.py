"""Sources of a loader: rows of tokens, the samples made of them, their order, and the layout of their batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock._suggest import did_you_mean
from penstock.arrays.truncation import Policy, Truncation
from penstock.batching.backends import get_backend
from penstock.batching.collate import BatchLayout
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.loaders.inputs import Inputs
from penstock.order.packing import STRATEGIES
from penstock.order.plan import PlanSource
from penstock.order.sample_orders import BudgetOrder, ChopOrder, FittedOrder, Order, PackedOrder, RowOrder, Table

__all__ = ["LoaderSource", "Packing", "Sampling", "batch_layout", "build_source"]

Packing = Literal["concat", "best_fit", "first_fit"] | bool | None
_LONGEST = 1 << 26
_STRATEGIES = ("concat", *STRATEGIES)
_ALIASES = {"bfd": "best_fit", "ffd": "first_fit", "wrapped": "concat", "chop": "concat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Rule by which rows become samples.

    `packing` is None (a row is a sample), `concat` (all rows end to end, cut every `length` tokens), or `best_fit` or
    `first_fit` (whole rows packed by decreasing length; True means `best_fit`). `bfd`, `ffd` and `wrapped` are other
    names of the three.
    """

    packing: str | bool | None = None
    length: int | None = None
    truncation: Policy = "error"
    """Policy for rows longer than `length`, unless they are cut anyway."""

    def __post_init__(self) -> None:
        length = self.length
        Truncation(self.truncation)  # refuses an unknown policy, also where rows are cut anyway
        if self.strategy is not None and length is None:
            raise ConfigError(f"packing={self.packing!r} needs a length; pass chunk_size or max_length")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ConfigError(f"the length of a sample must be an integer of at least 1, got {length!r}")
        if length is not None and length > _LONGEST:
            raise ConfigError(
                f"the length of a sample must be at most {_LONGEST} tokens, got {length} (tokenizers report that "
                "for an unknown limit); pass the context length of the model"
            )

    @property
    def strategy(self) -> str | None:
        """Packing strategy by its full name; None if a row is a sample."""
        if self.packing is None or self.packing is False:
            return None
        name = "best_fit" if self.packing is True else _ALIASES.get(self.packing, self.packing)
        if name not in _STRATEGIES:
            known = [*_STRATEGIES, *_ALIASES]
            hint = did_you_mean(str(name), known)
            raise ConfigError(f"packing must be one of {', '.join(known)} or None, got {name!r}{hint}")
        return name

    def order(self, table: Table, options: Options, name: str) -> Order:
        """Order of the samples of a source."""
        shuffle, seed, strategy = options.shuffle, options.seed, self.strategy
        if options.max_tokens is not None:
            return self._budget_order(table, options, name)
        if strategy == "concat":
            assert self.length is not None
            return ChopOrder(table, self.length, shuffle=shuffle, seed=seed, name=name)
        truncation = Truncation(self.truncation, self.length)
        if strategy is not None:
            return PackedOrder(table, truncation, strategy=strategy, shuffle=shuffle, seed=seed, name=name)
        kind = RowOrder if truncation.one_to_one else FittedOrder
        return kind(table, truncation, shuffle=shuffle, seed=seed, name=name)

    def _budget_order(self, table: Table, options: Options, name: str) -> Order:
        shuffle, seed, most, strategy = options.shuffle, options.seed, options.max_tokens, self.strategy
        assert most is not None
        if strategy == "concat" or (strategy is not None and not options.padding_free):
            raise ConfigError(
                f"max_tokens={most} makes batches of whole rows, and packing={self.packing!r} makes samples of one "
                "length, whose number is batch_size; pass one of them"
            )
        truncation = Truncation(self.truncation, most if self.length is None else min(self.length, most))
        if options.padding_free:
            # Rows keep their own limit; a batch of them is a bin.
            return PackedOrder(
                table,
                truncation,
                capacity=most,
                strategy=strategy or "best_fit",
                shuffle=shuffle,
                seed=seed,
                name=name,
            )
        multiple = options.pad_to_multiple_of or 1
        return BudgetOrder(table, truncation, max_tokens=most, multiple=multiple, shuffle=shuffle, seed=seed, name=name)


@dataclass(frozen=True, slots=True)
class LoaderSource:
    """Source of a loader: its rows, the rule for samples, their order in a plan, and the layout of batches."""

    inputs: Inputs
    sampling: Sampling
    plan_source: PlanSource
    layout: BatchLayout

    @property
    def name(self) -> str:
        return self.plan_source.name


def build_source(
    inputs: Inputs, sampling: Sampling, options: Options, name: str, max_epochs: int | None = None
) -> LoaderSource:
    """Source of a loader from opened inputs."""
    plan_source = PlanSource(name, sampling.order(inputs.table, options, name), inputs.identity, max_epochs)
    return LoaderSource(inputs, sampling, plan_source, batch_layout(sampling, options, inputs.pad_id))


def batch_layout(sampling: Sampling, options: Options, pad_id: int) -> BatchLayout:
    """Layout of the batches of a loader."""
    packed = sampling.strategy is not None
    return BatchLayout(
        padding_free=options.padding_free,
        length=sampling.length if packed and not options.padding_free else None,
        multiple=options.pad_to_multiple_of or 1,
        packed=packed or (options.max_tokens is not None and options.padding_free),
        split=options.max_tokens is not None,
        pad_id=pad_id if options.pad_id is None else options.pad_id,
        side=options.padding_side,
        integer=get_backend(options.backend).integer,
        fields=options.wanted_fields,
    )
