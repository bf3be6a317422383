"""Preferences for DPO, ORPO, SimPO and reward models, and labelled answers for KTO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from penstock.batching.collate import FIELDS
from penstock.batching.options import LoaderOptions, Options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import build_chat_recipe, check_template, read_chat_options
from penstock.loaders.preferences.batch import EXTRA
from penstock.loaders.preferences.engine import PreferenceEngine, no_slices
from penstock.loaders.source import Inputs, Packing, Paths, Sampling, build_source, check_preferences, open_inputs
from penstock.store.preferences import PairTable

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

_ROWS_AT_ONCE = 1 << 20


class PreferenceDataLoader(DataLoader, options=(Options,)):
    """Preferences in a chat template: chosen and rejected answers to one prompt, or labelled answers.

        loader = PreferenceDataLoader("dpo.jsonl", tokenizer, max_length=1024, truncation="left", batch_size=8)
        for batch in loader:                   # PreferenceBatch: 8 chosen rows, then the 8 rejected ones
            ...

    `path` is raw files or other rows, or a store made of them with `preference=True`: rows with `chosen` and `rejected`
    are pairs, rows with a boolean `label` (or `kto_tag`) labelled answers. `batch_size` counts pairs, `max_length` the
    tokens of each side with its prompt, `max_tokens` those of both sides. `truncation` is that of `FormatPreference`,
    applied when the store is made; longer rows of a store are an "error", or "drop"ped.

    - `completion`: tokens of an answer in `completion_mask`. "supervised": the turn of the model with its end token;
      "all": everything after the prompt, as TRL counts, including what the template adds after the turn.
    - `packing`: "best_fit" or "first_fit" puts several pairs into a row of `max_length` tokens; document d of row i is
      the chosen, and document d of row `pairs + i` the rejected answer of the same pair.
    - `kl`: for KTO, each prompt also with the answer of another row of the global batch, as `KL_input_ids` and so on.
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
            raise ConfigError("preferences cannot be streamed; omit streaming: raw files are prepared on first use")
        if completion not in ("supervised", "all"):
            raise ConfigError(f"completion must be 'supervised' or 'all', got {completion!r}")
        chosen, chat = read_chat_options(options, chat, type(self))
        if chosen.context is not None:
            raise no_slices(chosen.context)
        chosen = _with_fields(chosen)
        sampling = Sampling(packing=packing, length=max_length, truncation="drop" if truncation == "drop" else "error")
        if sampling.strategy == "concat":
            raise ConfigError("packing='concat' cuts answers, which are compared whole; pass best_fit or first_fit")
        if truncation not in ("error", "drop", "left", "right"):
            raise ConfigError(f"truncation must be one of error, drop, left, right, got {truncation!r}")
        recipe = build_chat_recipe(tokenizer, chosen, chat_template, chat)
        if recipe is None and max_prompt_length is not None:
            raise ConfigError("max_prompt_length applies to raw files, which need a tokenizer; pass tokenizer=")
        if recipe is not None:
            recipe = replace(recipe, max_length=max_length, truncation=truncation, preference=True)
            recipe = replace(recipe, max_prompt_length=max_prompt_length)
        inputs = open_inputs(path, recipe, chosen, preference=True)
        pairs = check_preferences(inputs.table.stores) == "pairs"
        if pairs:
            inputs = replace(inputs, table=PairTable(inputs.table.stores))
        if recipe is not None and recipe.template is not None:
            check_template(inputs, recipe.template)
        if truncation in ("left", "right"):
            _check_cut(inputs, max_length, truncation)
        if kl and pairs:
            raise ConfigError("kl=True needs labelled answers (KTO), and these rows are pairs; omit kl")
        if kl and (sampling.strategy is not None or chosen.padding_free):
            raise ConfigError("kl=True needs one answer a row; omit packing and padding_free")
        planned = chosen
        if pairs and chosen.max_tokens is not None:
            planned = replace(chosen, max_tokens=max(chosen.max_tokens // 2, 1))  # of each side
        source = build_source(inputs, sampling, planned, name)
        super().__init__(PreferenceEngine(source, chosen, whole_answers=completion == "all", kl=kl))


def _with_fields(options: Options) -> Options:
    """Options with the fields to collate; those of preferences are always there."""
    wanted = list(FIELDS if options.fields is None else options.fields)
    if options.padding_free and "cu_seqlens" not in wanted:
        wanted.append("cu_seqlens")  # the only boundaries between answers
    return replace(options, fields=[name for name in wanted if name not in (*EXTRA, "num_items_in_batch")])


def _check_cut(inputs: Inputs, max_length: int, truncation: str) -> None:
    """Refuse rows that would have to be cut: without their template, an answer could vanish silently."""
    table = inputs.table
    for low in range(0, table.rows, _ROWS_AT_ONCE):
        lengths = table.lengths(np.arange(low, min(low + _ROWS_AT_ONCE, table.rows)))
        if len(lengths) and lengths.max() > max_length:
            row = low + int(np.argmax(lengths > max_length))
            raise ConfigError(
                f"row {row} of {table.stores[0].shown} has {int(lengths[row - low])} tokens, more than "
                f"max_length={max_length}, and the rows of a store are not cut; prepare the raw files with "
                f"truncation={truncation!r}, or pass truncation='drop' or a larger max_length"
            )
