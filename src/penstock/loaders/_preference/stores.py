"""Which stores hold preferences, and who may read them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.store import Store
from penstock.store.labels import label_column
from penstock.store.manifest import Manifest

__all__ = ["check_plain", "check_preferences", "stored_kind"]

_CHOSEN, _PROMPT_LENGTH = "chosen_input_ids", "prompt_length"


def stored_kind(manifest: Manifest) -> str | None:
    """`pairs`, `labels`, or None for a store of plain text or chats."""
    if manifest.tokens_column == _CHOSEN:
        return "pairs"
    return "labels" if manifest.mask_column is not None and label_column(manifest.schema) is not None else None


def check_plain(manifest: Manifest, shown: object, preference: bool | None = None) -> None:
    """Refuse a store of preferences where plain text or chats are read, unless `preference=False` says they are."""
    kind = stored_kind(manifest)
    if kind is None or preference is False:
        return
    what, loss = "pairs of chosen and rejected answers", "'rejected' would be left out"
    if kind == "labels":
        what, loss = "answers with labels (KTO)", "bad answers would be trained on as good ones are"
    raise ConfigError(
        f"{shown} holds {what}, and read as plain chats {loss}; use PreferenceDataLoader, or "
        "ConversationDataLoader(..., preference=False) to train on them all the same"
    )


def check_preferences(stores: Sequence[Store]) -> str:
    """`pairs` or `labels`: what these stores hold, which were prepared as preferences or are refused."""
    for store in stores:
        if stored_kind(store.manifest) is None or _PROMPT_LENGTH not in store.schema.names:
            raise ConfigError(
                f"{store.shown} was not prepared as preferences: it has the columns {store.schema.names}, and pairs "
                "have chosen_input_ids, rejected_input_ids and prompt_length, labelled answers input_ids, label and "
                "prompt_length; prepare the raw files with preference=True (--preference)"
            )
    return str(stored_kind(stores[0].manifest))  # columns that differ are refused wherever stores are read as one
