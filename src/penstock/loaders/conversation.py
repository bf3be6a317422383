"""Chats for supervised fine-tuning, with labels on what the model is to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

import xxhash

from penstock._suggest import did_you_mean
from penstock.batching.options import LoaderOptions, read_options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import Inputs, Paths, open_inputs
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.sampling import Packing, Sampling, build_source
from penstock.order.overlong import Truncation

if TYPE_CHECKING:
    from penstock.loaders.streamed.reader import StreamOptions
    from penstock.tokenizers.load import TokenizerSpec

__all__ = ["ConversationDataLoader", "check_chat_options", "check_template"]


class ConversationDataLoader(DataLoader):
    """Conversations as a chat template writes them, at most `max_length` tokens each.

        loader = ConversationDataLoader("sft.jsonl", tokenizer, max_length=2048, chat_template="chatml")

    `path` is raw files in any of the chat formats, or a store made of such. `chat` has more options of `FormatChat`,
    such as `train_on`. A conversation that is too long is an error, unless `truncation` says what to do with it; it is
    cut when the store is made, where a conversation left with nothing to learn is noticed.

    Preferences are for `PreferenceDataLoader` and refused here; `preference=False` takes them as plain chats: of pairs
    `chosen` alone, of labelled answers (KTO) all, whatever the label.
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
        preference: Literal[False] | None = None,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> None:
        if preference:
            raise ConfigError(
                f"preference={preference!r}: use PreferenceDataLoader, or preference=False for plain chats"
            )
        chosen = read_options(options)
        sampling = Sampling(packing=packing, length=max_length, truncation=truncation)
        recipe = None
        if tokenizer is None and (chat_template is not None or chat):
            raise ConfigError("chat_template and chat say how raw chats are written, which needs a tokenizer; pass one")
        if tokenizer is not None:
            from penstock.corpus.recipe import Recipe

            check_chat_options(chat or {})
            recipe = Recipe(
                tokenizer=tokenizer,
                template=chat_template,
                chat=dict(chat or {}),
                max_length=max_length,
                truncation=truncation,
                preference=preference,
            )
        if streaming:
            from penstock.loaders.streamed.engine import StreamEngine

            super().__init__(StreamEngine(path, recipe, sampling, chosen, streaming, preference=preference))
            return
        inputs = open_inputs(
            path, recipe, cache=chosen.cache, verify=chosen.verify, budget=chosen.budget, preference=preference
        )
        _check_masked(inputs)
        if recipe is not None and chat_template is not None:
            check_template(inputs, chat_template)
        super().__init__(PlanEngine([build_source(inputs, sampling, chosen, name)], chosen))


def _check_masked(inputs: Inputs) -> None:
    if not inputs.table.masked:
        store = inputs.table.stores[0]
        raise ConfigError(
            f"{store.shown} does not say which tokens are to be learned, so it holds no conversations (its columns are "
            f"{store.schema.names}); use PretrainDataLoader for it, or prepare the chats with a template"
        )


def check_chat_options(chat: Mapping[str, Any]) -> None:
    from penstock.chat.format_chat import CHAT_OPTIONS

    for name in chat:
        if name not in CHAT_OPTIONS:
            hint = did_you_mean(name, CHAT_OPTIONS)
            raise TypeError(f"chat has no option {name!r}{hint}; it has {', '.join(CHAT_OPTIONS)}")


def check_template(inputs: Inputs, template: str) -> None:
    """A store says with which template it was made; another one would be left unused in silence."""
    from penstock.chat.templates import load_template

    assert inputs.tokenizer is not None
    given = xxhash.xxh3_128_hexdigest(load_template(template, inputs.tokenizer.chat_template).source.encode())
    for store in inputs.table.stores:
        made_with = store.manifest.template
        if made_with is not None and made_with != given:
            raise ConfigError(
                f"{store.shown} was made with the chat template {made_with}, and {template!r:.80} is {given}; leave "
                "chat_template out to take the store as it is, or prepare the chats again"
            )
