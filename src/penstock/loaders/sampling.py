"""From rows of tokens to a source of a loader: how samples are made of rows, and what their batches look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock._suggest import did_you_mean
from penstock.batching.backends import get_backend
from penstock.batching.collate import BatchForm
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.loaders.inputs import Inputs
from penstock.order.overlong import Fit, Truncation
from penstock.order.plan import PlanSource
from penstock.order.sample_orders import BudgetOrder, ChopOrder, FittedOrder, Order, PackedOrder, RowOrder

__all__ = ["LoaderSource", "Packing", "Sampling", "batch_form", "build_source"]

Packing = Literal["concat", "best_fit", "first_fit"] | bool | None
_LONGEST = 1 << 26
_KINDS = ("concat", "best_fit", "first_fit")
# What the field calls them.
_OTHER_NAMES = {"bfd": "best_fit", "ffd": "first_fit", "wrapped": "concat", "chop": "concat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How samples are made of rows.

    `packing` is None (a row is a sample), `concat` (all rows end to end, cut every `length` tokens), or `best_fit` or
    `first_fit` (whole rows packed by decreasing length; True means `best_fit`). `bfd`, `ffd` and `wrapped` are other
    names of the three.
    """

    packing: Packing = None
    length: int | None = None
    truncation: Truncation = "error"

    def __post_init__(self) -> None:
        kind = self.kind
        if kind is not None and self.length is None:
            raise ConfigError(f"packing={self.packing!r} needs a length: pass chunk_size or max_length")
        if isinstance(self.length, int) and self.length > _LONGEST:
            raise ConfigError(
                f"a length of {self.length} tokens is more than any row has, such as tokenizers say when they do not "
                "know; pass the context length of the model"
            )
        if self.length is not None and (isinstance(self.length, bool) or not isinstance(self.length, int)):
            raise ConfigError(f"the length of a sample is a whole number of tokens, got {self.length!r}")
        if self.length is not None and self.length < 1:
            raise ConfigError(f"a sample holds at least one token, got a length of {self.length!r}")

    @property
    def kind(self) -> str | None:
        if self.packing is None or self.packing is False:
            return None
        if self.packing is True:
            return "best_fit"
        name = _OTHER_NAMES.get(self.packing, self.packing)
        if name not in _KINDS:
            known = [*_KINDS, *_OTHER_NAMES]
            raise ConfigError(
                f"packing must be one of {', '.join(known)} or None, got {name!r}{did_you_mean(str(name), known)}"
            )
        return name

    def order(self, inputs: Inputs, options: Options, name: str) -> Order:
        table, fit = inputs.table, Fit(self.length, self.truncation)
        if options.max_tokens is not None:
            return self._budget_order(inputs, options, name)
        if self.kind is None and not fit.keeps_count:
            return FittedOrder(table, fit, shuffle=options.shuffle, seed=options.seed, name=name)
        if self.kind is None:
            return RowOrder(table, fit, shuffle=options.shuffle, seed=options.seed, name=name)
        if self.kind == "concat":
            assert self.length is not None
            return ChopOrder(table, self.length, shuffle=options.shuffle, seed=options.seed, name=name)
        return PackedOrder(table, fit, strategy=self.kind, shuffle=options.shuffle, seed=options.seed, name=name)

    def _budget_order(self, inputs: Inputs, options: Options, name: str) -> Order:
        """Batches by tokens: packed to the budget if nothing is padded, else rows of about one length together."""
        assert options.max_tokens is not None
        if self.kind == "concat" or (self.kind is not None and not options.padding_free):
            raise ConfigError(
                f"max_tokens={options.max_tokens} makes batches of whole rows, and packing={self.packing!r} makes "
                "samples of one length, whose number is batch_size; use one of them"
            )
        length = options.max_tokens if self.length is None else min(self.length, options.max_tokens)
        if options.padding_free:
            # Rows keep their own limit; a batch of them is a bin.
            return PackedOrder(
                inputs.table,
                Fit(length, self.truncation),
                capacity=options.max_tokens,
                strategy=self.kind or "best_fit",
                shuffle=options.shuffle,
                seed=options.seed,
                name=name,
            )
        return BudgetOrder(
            inputs.table,
            Fit(length, self.truncation),
            max_tokens=options.max_tokens,
            multiple=options.pad_to_multiple_of or 1,
            shuffle=options.shuffle,
            seed=options.seed,
            name=name,
        )


@dataclass(frozen=True, slots=True)
class LoaderSource:
    """One source of a loader: its rows, how samples are made of them and in which order, and what batches look like."""

    inputs: Inputs
    sampling: Sampling
    feed: PlanSource
    form: BatchForm


def build_source(
    inputs: Inputs, sampling: Sampling, options: Options, name: str, max_epochs: int | None = None
) -> LoaderSource:
    """A source of a loader."""
    feed = PlanSource(name, sampling.order(inputs, options, name), inputs.identity, max_epochs)
    return LoaderSource(inputs, sampling, feed, batch_form(sampling, options, inputs.pad_id))


def batch_form(sampling: Sampling, options: Options, pad_id: int) -> BatchForm:
    """What batches look like."""
    packed = sampling.kind is not None or (options.max_tokens is not None and options.padding_free)
    return BatchForm(
        padding_free=options.padding_free,
        length=sampling.length if sampling.kind is not None and not options.padding_free else None,
        multiple=options.pad_to_multiple_of or 1,
        packed=packed,
        split=options.max_tokens is not None,
        pad_id=pad_id if options.pad_id is None else options.pad_id,
        side=options.padding_side,
        integer=get_backend(options.backend).integer,
        fields=options.wanted_fields,
    )
