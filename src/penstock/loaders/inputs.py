"""Inputs of a loader as rows of tokens: stores, or raw files, which are prepared as a store first."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.errors import ConfigError
from penstock.files.cache import default_cache_directory
from penstock.files.filesystems import local_or_none
from penstock.files.listing import PathLike, list_files
from penstock.loaders.preferences.mismatch import check_plain
from penstock.memory import MemoryBudget
from penstock.store import Store, open_store
from penstock.store.gather import TokenTable
from penstock.store.manifest import is_store
from penstock.store.remote import refuse_remote_store
from penstock.store.shards import Verify

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["Inputs", "Paths", "check_stores", "open_inputs", "pad_id_of", "stores_at"]

Paths = PathLike | Iterable[PathLike] | Store


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of tokens, and the tokenizer, if it was given."""

    table: TokenTable
    tokenizer: Tokenizer | None
    owned: bool = True
    """True if the loader closes them."""

    @property
    def identity(self) -> str:
        """Hash of the content of all rows, independent of place and time."""
        digest = xxhash.xxh3_64()
        for store in self.table.stores:
            for shard in store.manifest.shards:
                digest.update(f"{shard.name} {shard.index_checksum}\n".encode())
        return digest.hexdigest()

    @property
    def pad_id(self) -> int:
        return pad_id_of(self.tokenizer)


def pad_id_of(tokenizer: Tokenizer | None) -> int:
    """The token that pads rows."""
    if tokenizer is None:
        return 0
    special = tokenizer.special
    found = special.pad if special.pad is not None else special.eos
    return 0 if found is None else found


def open_inputs(
    paths: Paths,
    recipe: Recipe | None,
    *,
    cache: Path | None = None,
    verify: Verify = "fast",
    budget: MemoryBudget | None = None,
    preference: bool | None = None,
) -> Inputs:
    """A store, several stores, a directory of stores, or raw files, which are prepared as a store by `recipe`, once.

    If several processes need the same store, one makes it and the others wait. Stores of preferences are refused unless
    `preference` is given.
    """
    paths = paths if isinstance(paths, Store) else _listed(paths)  # once: it may be an iterator
    stores = _stores(paths, verify)
    if stores is not None and recipe is not None:
        _check_unprepared(recipe, stores)
    if stores is None:
        if recipe is None:
            list_files(_listed(paths))  # raises for a missing path
            raise ConfigError(f"{_shown(paths)} are raw files, which need a tokenizer; pass tokenizer=")
        from penstock.corpus.prepare import prepare_cached  # imported only to make a store

        home = (default_cache_directory() if cache is None else cache) / "stores"
        made = prepare_cached(_listed(paths), home, recipe, budget=budget)
        stores = [open_store(made.path, verify=verify)]
    tokenizer = None if recipe is None else recipe.load_tokenizer()
    for store in stores if preference is None else ():
        check_plain(store.manifest, store.shown)
    table = TokenTable(stores)
    if tokenizer is not None:
        for store in stores:
            _check_tokenizer(store, tokenizer)
    return Inputs(table, tokenizer, owned=not isinstance(paths, Store))


def check_stores(paths: Paths, tokenizer: Tokenizer) -> None:
    """Raise for stores among these paths that were made with another tokenizer."""
    for store in stores_at(paths):
        _check_tokenizer(store, tokenizer)


def stores_at(paths: Paths) -> list[Store]:
    """The stores among these paths; none if they are raw files."""
    return _stores(paths if isinstance(paths, Store) else _listed(paths), "fast") or []


def _stores(paths: Paths, verify: Verify) -> list[Store] | None:
    """The stores at these paths; None if they are raw files."""
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
            list_files(path)  # raises for a missing path
            raise ConfigError(f"{_shown(paths)}: stores and raw files together; prepare the raw files, or mix them")
    return [open_store(home, verify=verify) for found in homes for home in found]


def _stores_at(path: Path) -> list[Path]:
    """The stores that a path means: itself, those in a directory, or those that a glob matches."""
    if is_store(path):
        return [path]
    if path.is_dir():
        inside = [child for child in sorted(path.iterdir()) if not child.name.startswith((".", "_"))]
        stores = [child for child in inside if child.is_dir() and is_store(child)]
        if stores and len(stores) < len(inside):
            other = next(child for child in inside if child not in stores)
            raise ConfigError(
                f"{path} holds stores and other files ({other.name}) together; name the stores, or the files, by a glob"
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
        raise ConfigError("no path given")
    return listed


def _shown(paths: Any) -> str:
    return ", ".join(str(path) for path in _listed(paths))


def _check_unprepared(recipe: Recipe, stores: Sequence[Store]) -> None:
    """Raise for options that apply to raw files only: ignoring them on a store would be silent."""
    for name, value in {"filters": recipe.filters, "dedup": recipe.dedup, "chat": recipe.chat}.items():
        if value:
            raise ConfigError(
                f"{name}={value!r} is for raw files, and {stores[0].shown} is a prepared store; "
                f"leave {name} out to use it, or prepare the raw files again"
            )


def _check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    made_with = store.manifest.tokenizer
    if made_with is not None and made_with != tokenizer.fingerprint:
        name = store.manifest.lineage[-1].notes.get("tokenizer") if store.manifest.lineage else None
        raise ConfigError(
            f"{store.shown} was made with the tokenizer {name or ''} ({made_with}), and the given one is "
            f"{tokenizer.name} ({tokenizer.fingerprint}), in which its ids are other tokens: pass the tokenizer it was "
            "made with, or prepare the text again"
        )
