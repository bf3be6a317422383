"""Inputs of a loader: stores as they are, raw files as the store made of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.files.cache import default_cache_directory
from penstock.files.filesystems import local_or_none
from penstock.files.listing import PathLike, list_files
from penstock.store import Store, open_store
from penstock.store.gather import TokenTable
from penstock.store.manifest import Manifest, is_store, refuse_remote_store
from penstock.store.preferences import label_column
from penstock.store.shards import Verify

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe
    from penstock.transforms.tokenization import Tokenizer

__all__ = [
    "Inputs",
    "Paths",
    "check_plain",
    "check_preferences",
    "check_stores",
    "open_inputs",
    "pad_id_of",
    "stored_kind",
    "stores_at",
]

Paths = PathLike | Iterable[PathLike] | Store


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of tokens, and the tokenizer they were made with, if it was given."""

    table: TokenTable
    tokenizer: Tokenizer | None
    owned: bool = True
    """True if the loader closes the table."""

    @property
    def identity(self) -> str:
        """Hash of the content of all rows, independent of paths and times."""
        digest = xxhash.xxh3_64()
        for store in self.table.stores:
            for shard in store.manifest.shards:
                digest.update(f"{shard.name} {shard.index_checksum}\n".encode())
        return digest.hexdigest()

    @property
    def pad_id(self) -> int:
        return pad_id_of(self.tokenizer)


def pad_id_of(tokenizer: Tokenizer | None) -> int:
    """Padding token of a tokenizer: its own, else its EOS, else 0."""
    if tokenizer is None:
        return 0
    special = tokenizer.special
    found = special.pad if special.pad is not None else special.eos
    return 0 if found is None else found


def open_inputs(
    paths: Paths,
    recipe: Recipe | None,
    options: Options,
    *,
    preference: bool | None = None,
) -> Inputs:
    """Open a store, several stores, a directory of stores, or raw files, which `recipe` prepares into a store once.

    Of several processes that need the same store, one makes it and the others wait. Stores of preferences are refused
    unless `preference` is set.
    """
    paths = paths if isinstance(paths, Store) else _listed(paths)  # once: it may be an iterator
    stores = _stores(paths, options.verify)
    if stores is not None and recipe is not None:
        _check_unprepared(recipe, stores)
    if stores is None:
        if recipe is None:
            list_files(_listed(paths))  # reports a missing path
            raise ConfigError(f"{_shown(paths)} are raw files, which need a tokenizer; pass tokenizer=")
        from penstock.corpus.prepare import prepare_cached  # imported only to make a store

        home = (options.cache or default_cache_directory()) / "stores"
        made = prepare_cached(_listed(paths), home, recipe, budget=options.memory)
        stores = [open_store(made.path, verify=options.verify)]
    tokenizer = None if recipe is None else recipe.load_tokenizer()
    for store in stores if preference is None else ():
        check_plain(store.manifest, store.shown)
    table = TokenTable(stores)
    if tokenizer is not None:
        for store in stores:
            _check_tokenizer(store, tokenizer)
    return Inputs(table, tokenizer, owned=not isinstance(paths, Store))


def check_stores(paths: Paths, tokenizer: Tokenizer) -> None:
    """Refuse stores that were made with another tokenizer."""
    for store in stores_at(paths):
        _check_tokenizer(store, tokenizer)


def stores_at(paths: Paths) -> list[Store]:
    """Stores at these paths; none if they are raw files."""
    return _stores(paths if isinstance(paths, Store) else _listed(paths), "fast") or []


def _stores(paths: Paths, verify: Verify) -> list[Store] | None:
    """Stores at these paths; None if there are none."""
    if isinstance(paths, Store):
        return [paths]
    listed = _listed(paths)
    for path in listed:
        refuse_remote_store(path)
    homes = [[] if (local := local_or_none(path)) is None else _stores_at(local) for path in listed]
    if not any(homes):
        return None
    for path, there in zip(listed, homes):
        if not there:
            list_files(path)  # reports a missing path
            raise ConfigError(
                f"{_shown(paths)} are stores and raw files; prepare the raw files, or pass both to MixedDataLoader"
            )
    return [open_store(home, verify=verify) for found in homes for home in found]


def _stores_at(path: Path) -> list[Path]:
    """Stores at a path: itself, those in a directory, or those that a glob matches."""
    if is_store(path):
        return [path]
    if path.is_dir():
        inside = [child for child in sorted(path.iterdir()) if not child.name.startswith((".", "_"))]
        stores = [child for child in inside if child.is_dir() and is_store(child)]
        if stores and len(stores) < len(inside):
            other = next(child for child in inside if child not in stores)
            raise ConfigError(
                f"{path} holds stores and other files, such as {other.name}; pass a glob that matches one kind"
            )
        return stores
    if glob.has_magic(str(path)):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        return sorted(Path(name) for name in names if is_store(Path(name)))
    return []


def _listed(paths: Any) -> Sequence[PathLike]:
    if isinstance(paths, (str, Path)) or hasattr(paths, "__fspath__"):
        return [paths]
    if not isinstance(paths, Iterable):
        raise ConfigError(f"path must be a path, a list of paths or a store, got {paths!r}")
    listed = list(paths)
    for path in listed:
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"path must be a path, a list of paths or a store, got {path!r} among {len(listed)}")
    if not listed:
        raise ConfigError("path must name at least one file or store, got an empty list")
    return listed


def _shown(paths: Any) -> str:
    return ", ".join(str(path) for path in _listed(paths))


def _check_unprepared(recipe: Recipe, stores: Sequence[Store]) -> None:
    """Refuse options for raw files where there is a store: they would be ignored."""
    for name, value in {"filters": recipe.filters, "dedup": recipe.dedup, "chat": recipe.chat}.items():
        if value:
            raise ConfigError(
                f"{name}={value!r} applies to raw files, and {stores[0].shown} is a store; omit {name} to use it "
                "as it is, or prepare the raw files again"
            )


def _check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    made_with = store.manifest.tokenizer
    if made_with is not None and made_with != tokenizer.fingerprint:
        name = store.manifest.lineage[-1].notes.get("tokenizer") if store.manifest.lineage else None
        raise ConfigError(
            f"{store.shown} was made with tokenizer {name or ''} ({made_with}), and tokenizer={tokenizer.name} "
            f"({tokenizer.fingerprint}) was given; pass the tokenizer of the store, or prepare the text again"
        )


_CHOSEN, _PROMPT_LENGTH = "chosen_input_ids", "prompt_length"


def stored_kind(manifest: Manifest) -> str | None:
    """Kind of preferences in a store: `pairs` or `labels`; None for plain text or chats."""
    if manifest.tokens_column == _CHOSEN:
        return "pairs"
    return "labels" if manifest.mask_column is not None and label_column(manifest.schema) is not None else None


def check_plain(manifest: Manifest, shown: object, preference: bool | None = None) -> None:
    """Refuse a store of preferences where plain text or chats are read, unless `preference=False`."""
    kind = stored_kind(manifest)
    if kind is None or preference is False:
        return
    content, effect = "pairs of chosen and rejected answers", "'rejected' would be ignored"
    if kind == "labels":
        content, effect = "answers with labels (KTO)", "bad answers would be trained on like good ones"
    raise ConfigError(
        f"{shown} holds {content}; as plain chats, {effect}; use PreferenceDataLoader, or "
        "ConversationDataLoader(..., preference=False) to read them as plain chats"
    )


def check_preferences(stores: Sequence[Store]) -> str:
    """Kind of preferences in these stores, `pairs` or `labels`; other stores are refused."""
    for store in stores:
        if stored_kind(store.manifest) is None or _PROMPT_LENGTH not in store.schema.names:
            raise ConfigError(
                f"{store.shown} was not prepared as preferences: it has the columns {store.schema.names}, expected "
                "chosen_input_ids, rejected_input_ids and prompt_length (pairs), or input_ids, label and prompt_length "
                "(labelled answers); prepare the raw files with preference=True (--preference)"
            )
    return str(stored_kind(stores[0].manifest))  # stores of different columns are refused elsewhere
