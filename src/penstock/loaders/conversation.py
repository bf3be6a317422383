"""Chats for supervised fine-tuning, with labels on what the model is to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.indexed import Indexed
from penstock.loaders.inputs import Inputs, Paths, open_inputs
from penstock.loaders.options import LoaderOptions, read_options
from penstock.loaders.stocking import Packing, Sampling, stock
from penstock.order.orders import Truncation

if TYPE_CHECKING:
    from penstock.loaders.streams import StreamOptions
    from penstock.transforms._tokenizers.loading import TokenizerSpec

__all__ = ["ConversationDataLoader"]


class ConversationDataLoader(DataLoader):
    """Conversations as a chat template writes them, at most `max_length` tokens each.

        loader = ConversationDataLoader("sft.jsonl", tokenizer, max_length=2048, chat_template="chatml")

    `path` is raw files in any of the chat formats, or a store made of such. `chat` has more options of `FormatChat`,
    such as `train_on`. A conversation that is too long is an error, unless `truncation` says what to do with it; it is
    cut when the store is made, where a conversation left with nothing to learn is noticed.
    """

    def __init__(
        self,
        path: Paths,
        tokenizer: TokenizerSpec | None = None,
        max_length: int = 2048,
        chat_template: str | None = None,
        *,
        streaming: bool | StreamOptions = False,
        packing: Packing = None,
        truncation: Truncation = "error",
        chat: Mapping[str, Any] | None = None,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> None:
        chosen = read_options(options)
        sampling = Sampling(packing=packing, length=max_length, truncation=truncation)
        recipe = None
        if tokenizer is not None:
            from penstock.loaders.recipes import Recipe

            recipe = Recipe(
                tokenizer=tokenizer,
                template=chat_template,
                chat=dict(chat or {}),
                max_length=max_length,
                truncation=truncation,
            )
        if streaming:
            from penstock.loaders.streamed import Streamed

            super().__init__(Streamed(path, recipe, sampling, chosen, streaming))
            return
        inputs = open_inputs(path, recipe, cache=chosen.cache, verify=chosen.verify, budget=chosen.budget)
        _check_masked(inputs)
        super().__init__(Indexed([stock(inputs, sampling, chosen, name)], chosen))


def _check_masked(inputs: Inputs) -> None:
    if not inputs.table.masked:
        store = inputs.table.stores[0]
        raise ConfigError(
            f"{store.shown} does not say which tokens are to be learned, so it holds no conversations (its columns are "
            f"{store.schema.names}); use PretrainDataLoader for it, or prepare the chats with a template"
        )
