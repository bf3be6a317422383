"""Origin of a store's tokens: the tokenizer that its manifest names."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.store.manifest import Manifest
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.load import load_tokenizer


def store_tokenizer(manifest: Manifest, given: str | None = None) -> Tokenizer:
    """The tokenizer given, or the one that the store names; its fingerprint must be that of the store."""
    path = given or (manifest.lineage[-1].notes.get("tokenizer_path") if manifest.lineage else None)
    if path is None:
        raise ConfigError("the store has no path of its tokenizer; pass --tokenizer")
    loaded = load_tokenizer(path)
    if manifest.tokenizer not in (None, loaded.fingerprint):
        raise ConfigError(
            f"{path} is not the tokenizer of this store: expected the fingerprint {manifest.tokenizer}, got "
            f"{loaded.fingerprint}; pass the right one with --tokenizer"
        )
    return loaded
