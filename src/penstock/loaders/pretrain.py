"""Pretraining: raw text in chunks of a fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from penstock.arrays.truncation import Policy
from penstock.batching.options import LoaderOptions, Options, read_options
from penstock.loaders.base import DataLoader
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.source import Packing, Paths, Sampling, build_recipe, build_source, open_inputs

if TYPE_CHECKING:
    from penstock.loaders.streamed.reader import StreamOptions
    from penstock.tokenizers.load import TokenizerSpec


class PretrainDataLoader(DataLoader, options=(Options,)):
    """Documents end to end, cut into samples of `chunk_size` tokens.

        loader = PretrainDataLoader("corpus/", tokenizer, chunk_size=2048, batch_size=16)

    `path` is raw files, a directory or a glob of them, or other rows (a Hugging Face dataset, a DataFrame, an Arrow
    table, a list of dicts), which are tokenized into the cache on first use; or a token store, or several.
    `packing="best_fit"` keeps documents whole. With `streaming=True` nothing is prepared: see `docs/loaders.md`.
    """

    def __init__(
        self,
        path: Paths,
        tokenizer: TokenizerSpec | None = None,
        chunk_size: int = 2048,
        *,
        streaming: bool | StreamOptions = False,
        packing: Packing = "concat",
        truncation: Policy = "error",
        text_column: str | None = None,
        filters: Sequence[Any] = (),
        dedup: Sequence[str] = (),
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> None:
        chosen = read_options(options, type(self))
        sampling = Sampling(packing=packing, length=chunk_size, truncation=truncation)
        column = None if tokenizer is None else text_column or "text"
        recipe = build_recipe(tokenizer, chosen, column=column, filters=filters, dedup=dedup)
        if streaming is not False:
            from penstock.loaders.streamed.engine import StreamEngine

            super().__init__(StreamEngine(path, recipe, sampling, chosen, streaming))
            return
        inputs = open_inputs(path, recipe, chosen)
        super().__init__(PlanEngine([build_source(inputs, sampling, chosen, name)], chosen))
