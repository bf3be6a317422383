"""Supervised fine-tuning: chats, with labels on the turns of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from penstock._suggest import check_options
from penstock.arrays.truncation import Policy
from penstock.batching.options import GROUPS, LoaderOptions, Options, read_options
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.source import Inputs, Packing, Paths, Sampling, build_recipe, build_source, open_inputs

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe
    from penstock.loaders.streamed.reader import StreamOptions
    from penstock.tokenizers.load import TokenizerSpec


class ConversationDataLoader(DataLoader, options=(Options,)):
    """Conversations in a chat template, at most `max_length` tokens each.

        loader = ConversationDataLoader("sft.jsonl", tokenizer, max_length=2048, chat_template="chatml")

    `path` is raw files or other rows (a dataset, a DataFrame, a list of dicts) in any of the chat formats, or a store.
    `chat` has further options of `FormatChat`, such as `train_on`. `truncation` is the policy for conversations that
    are too long. They are cut when the store is made, which notices conversations without a supervised token left.

    Preferences are for `PreferenceDataLoader` and refused here; `preference=False` reads them as plain chats: only
    `chosen` of pairs, and all labelled answers (KTO) regardless of their label.
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
        truncation: Policy = "error",
        chat: Mapping[str, Any] | None = None,
        preference: Literal[False] | None = None,
        name: str = "data",
        **options: Unpack[LoaderOptions],
    ) -> None:
        if preference:
            raise ConfigError(
                f"preference must be False or None, got {preference!r}; for preferences use PreferenceDataLoader"
            )
        chosen, chat = read_chat_options(options, chat, type(self))
        sampling = Sampling(packing=packing, length=max_length, truncation=truncation)
        recipe = build_chat_recipe(tokenizer, chosen, chat_template, chat)
        if recipe is not None:
            recipe = replace(recipe, max_length=max_length, truncation=truncation, preference=preference)
        if streaming is not False:
            from penstock.loaders.streamed.engine import StreamEngine

            super().__init__(StreamEngine(path, recipe, sampling, chosen, streaming, preference=preference))
            return
        inputs = open_inputs(path, recipe, chosen, preference=preference)
        if not inputs.table.masked:
            store = inputs.table.stores[0]
            raise ConfigError(
                f"{store.shown} has no supervision mask, so it holds no conversations (its columns are "
                f"{store.schema.names}); use PretrainDataLoader, or prepare the chats with a template"
            )
        if recipe is not None and recipe.template is not None:
            check_template(inputs, recipe.template)
        super().__init__(PlanEngine([build_source(inputs, sampling, chosen, name)], chosen))


def read_chat_options(
    options: Mapping[str, Any], chat: Mapping[str, Any] | None, loader: type[Any]
) -> tuple[Options, dict[str, Any]]:
    """Options of a loader, and those of `FormatChat`, which may be in `chat` or among the others."""
    more: dict[str, Any] = {}
    if options.keys() - {*Options.__dataclass_fields__, *GROUPS}:
        from penstock.corpus.recipe import split_chat_options

        more, options = split_chat_options(options)
    twice = more.keys() & (chat or {}).keys()
    if twice:
        raise ConfigError(f"{min(twice)} is given twice: as a keyword and in chat={{...}}")
    chosen = {**(chat or {}), **more}
    check_chat_options(chosen)
    return read_options(options, loader), chosen


def build_chat_recipe(
    tokenizer: TokenizerSpec | None, options: Options, chat_template: str | None, chat: Mapping[str, Any] | None
) -> Recipe | None:
    """Recipe for raw files of chats; None without a tokenizer."""
    template = {} if chat_template is None else {"chat_template": chat_template}
    return build_recipe(tokenizer, options, **template, **({"chat": dict(chat)} if chat else {}))


def check_chat_options(chat: Mapping[str, Any]) -> None:
    """Refuse unknown options of `FormatChat`."""
    from penstock.chat.format_chat import CHAT_OPTIONS

    check_options(chat, CHAT_OPTIONS, "chat option")


def check_template(inputs: Inputs, template: str) -> None:
    """Refuse a template other than the one a store was made with: it would be ignored."""
    from penstock.chat.templates import load_template

    assert inputs.tokenizer is not None
    given = load_template(template, inputs.tokenizer.chat_template).fingerprint
    for store in inputs.table.stores:
        made_with = store.manifest.template
        if made_with is not None and made_with != given:
            raise ConfigError(
                f"{store.shown} was made with chat template {made_with}, and {template!r:.80} is {given}; omit "
                "chat_template to use the store as it is, or prepare the chats again"
            )
