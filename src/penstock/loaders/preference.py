"""Preferences for DPO, ORPO, SimPO and reward models, and labelled answers for KTO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from penstock.batching.options import LoaderOptions, Options, read_options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import check_chat_options, check_template
from penstock.loaders.inputs import Inputs, Paths, open_inputs
from penstock.loaders.preferences.batch import EXTRA
from penstock.loaders.preferences.engine import PreferenceEngine
from penstock.loaders.preferences.mismatch import check_preferences
from penstock.loaders.sampling import Packing, Sampling, build_source
from penstock.store.preferences import PairTable

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

__all__ = ["PreferenceDataLoader"]

_AT_ONCE = 1 << 20


class PreferenceDataLoader(DataLoader):
    """Preferences as a chat template writes them: chosen and rejected answers behind one prompt, or labelled answers.

        loader = PreferenceDataLoader("dpo.jsonl", tokenizer, max_length=1024, truncation="left", batch_size=8)
        for batch in loader:                   # PreferenceBatch: 8 chosen rows, then the 8 rejected ones
            ...

    `path` is raw files, or a store made of such with `preference=True`: rows with `chosen` and `rejected` are pairs,
    rows with a boolean `label` (or `kto_tag`) labelled answers. `batch_size` counts pairs, `max_length` the tokens of
    each side with its prompt, `max_tokens` those of both sides. `truncation` is as of `FormatPreference` and done when
    the store is made; of a store, longer rows are an "error" or "drop"ped.

    - `completion`: what counts of an answer. "supervised": what the model is to say, with the token that ends its turn;
      "all": everything behind the prompt, as TRL counts, with what the template writes behind the turn too.
    - `packing`: "best_fit" or "first_fit": several pairs in a row of `max_length` tokens; document d of row i is the
      chosen, and document d of row `pairs + i` the rejected answer of the same pair.
    - `kl`: for KTO: each prompt also with the answer of another row of the global batch, as `KL_input_ids` and so on.
    """

    def __init__(
        self,
        path: Paths,
        tokenizer: TokenizerSpec | None = None,
        max_length: int = 2048,
        chat_template: str | None = None,
        *,
        streaming: bool = False,
        packing: Packing = None,
        truncation: Literal["error", "drop", "left", "right"] = "error",
        max_prompt_length: int | None = None,
        completion: Literal["supervised", "all"] = "supervised",
        kl: bool = False,
        chat: Mapping[str, Any] | None = None,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> None:
        if streaming:
            raise ConfigError(
                "preferences cannot be streamed; leave streaming out: raw files are prepared on first use"
            )
        if completion not in ("supervised", "all"):
            raise ConfigError(f"completion must be 'supervised' or 'all', got {completion!r}")
        asked = _checked_fields(read_options(options))
        sampling = Sampling(packing=packing, length=max_length, truncation="drop" if truncation == "drop" else "error")
        if sampling.kind == "concat":
            raise ConfigError("packing='concat' cuts answers, which are compared as a whole; use best_fit or first_fit")
        if truncation not in ("error", "drop", "left", "right"):
            raise ConfigError(f"truncation must be one of error, drop, left, right, got {truncation!r}")
        recipe = None
        if tokenizer is None and (chat_template is not None or chat or max_prompt_length is not None):
            raise ConfigError(
                "chat_template, chat and max_prompt_length say how raw files are prepared, which needs a tokenizer; "
                "pass one"
            )
        if tokenizer is not None:
            from penstock.corpus.recipe import Recipe

            check_chat_options(chat or {})
            recipe = Recipe(
                tokenizer=tokenizer,
                template=chat_template,
                chat=dict(chat or {}),
                max_length=max_length,
                truncation=truncation,
                preference=True,
                max_prompt_length=max_prompt_length,
            )
        inputs = open_inputs(path, recipe, cache=asked.cache, verify=asked.verify, budget=asked.budget, preference=True)
        pairs = check_preferences(inputs.table.stores) == "pairs"
        if pairs:
            inputs = replace(inputs, table=PairTable(inputs.table.stores))
        if recipe is not None and chat_template is not None:
            check_template(inputs, chat_template)
        if truncation in ("left", "right"):
            _check_cut(inputs, max_length, truncation)
        _check_kl(kl, pairs=pairs, packed=sampling.kind is not None, options=asked)
        planned = asked
        if pairs and asked.max_tokens is not None:
            planned = replace(asked, max_tokens=max(asked.max_tokens // 2, 1))  # of each side
        engine = PreferenceEngine(
            build_source(inputs, sampling, planned, name), asked, everything=completion == "all", kl=kl
        )
        super().__init__(engine)


def _checked_fields(options: Options) -> Options:
    """The options with the fields that are made of every batch; those of preferences are always there."""
    from penstock.batching.collate import FIELDS

    wanted = list(FIELDS if options.fields is None else options.fields)
    if options.padding_free and "cu_seqlens" not in wanted:
        wanted.append("cu_seqlens")  # nothing else says where one answer ends and the next begins
    return replace(options, fields=[name for name in wanted if name not in (*EXTRA, "num_items_in_batch")])


def _check_cut(inputs: Inputs, max_length: int, truncation: str) -> None:
    """Rows of a store are as long as they were prepared: cut here, an answer could vanish in silence."""
    table = inputs.table
    for low in range(0, table.rows, _AT_ONCE):
        lengths = table.lengths(np.arange(low, min(low + _AT_ONCE, table.rows)))
        if len(lengths) and lengths.max() > max_length:
            row = low + int(np.argmax(lengths > max_length))
            raise ConfigError(
                f"row {row} of {table.stores[0].shown} has {int(lengths[row - low])} tokens, and rows are cut when a "
                f"store is made; prepare the raw files with max_length={max_length} and truncation={truncation!r}, or "
                "pass truncation='drop', or a larger max_length"
            )


def _check_kl(kl: bool, *, pairs: bool, packed: bool, options: Options) -> None:
    if not kl:
        return
    if pairs:
        raise ConfigError("kl=True is for answers with labels (KTO), and these rows are pairs; leave it out")
    if packed or options.padding_free:
        raise ConfigError("kl=True needs one answer a row; leave out packing and padding_free")
