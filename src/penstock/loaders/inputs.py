"""What a loader is pointed at, as rows of tokens: stores as they are, raw files as the store made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.errors import ConfigError
from penstock.files.caching import default_cache_directory
from penstock.files.listing import PathLike
from penstock.memory import MemoryBudget
from penstock.store import Store, open_store
from penstock.store.gather import TokenTable
from penstock.store.manifest import is_store
from penstock.store.shards import Verify

if TYPE_CHECKING:
    from penstock.loaders.recipes import Recipe
    from penstock.transforms.tokenization import Tokenizer

__all__ = ["Inputs", "Paths", "open_inputs", "pad_id_of"]

Paths = PathLike | Iterable[PathLike] | Store


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows of tokens, what names them, and the tokenizer they were made with if it is at hand."""

    table: TokenTable
    tokenizer: Tokenizer | None

    @property
    def identity(self) -> str:
        """A hash of the content of all rows: of what was prepared, not of where it lies or when it was made."""
        digest = xxhash.xxh3_64()
        for store in self.table.stores:
            for shard in store.manifest.shards:
                digest.update(f"{shard.name} {shard.index_checksum}\n".encode())
        return digest.hexdigest()

    @property
    def pad_id(self) -> int:
        return pad_id_of(self.tokenizer)


def pad_id_of(tokenizer: Tokenizer | None) -> int:
    """The token that rows are filled up with."""
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
) -> Inputs:
    """A store, several stores, a directory of stores, or raw files, which `recipe` makes a store of, once.

    Of several processes that need the same store one makes it, and the others wait.
    """
    stores = _stores(paths, verify)
    if stores is None:
        if recipe is None:
            raise ConfigError(f"{_shown(paths)} are raw files, which need a tokenizer; pass tokenizer=")
        from penstock.loaders.preparation import prepare_cached  # what makes stores is loaded by those who make one

        home = (default_cache_directory() if cache is None else cache) / "stores"
        made = prepare_cached(_listed(paths), home, recipe, budget=budget)
        stores = [open_store(made.path, verify=verify)]
    tokenizer = None if recipe is None else recipe.load_tokenizer()
    table = TokenTable(stores)
    if tokenizer is not None:
        for store in stores:
            _check_tokenizer(store, tokenizer)
    return Inputs(table, tokenizer)


def _stores(paths: Paths, verify: Verify) -> list[Store] | None:
    """The stores that were named, None if it is something else that was named."""
    if isinstance(paths, Store):
        return [paths]
    listed = _listed(paths)
    homes: list[Path] = []
    for path in listed:
        found = _stores_at(Path(path).expanduser())
        if found is None and not homes:
            if len(listed) > 1 and any(_stores_at(Path(other).expanduser()) for other in listed):
                raise ConfigError(f"{_shown(paths)}: stores and raw files together; prepare the raw files, or mix them")
            return None
        if found is None:
            raise ConfigError(f"{_shown(paths)}: stores and raw files together; prepare the raw files, or mix them")
        homes += found
    return [open_store(home, verify=verify) for home in homes]


def _stores_at(path: Path) -> list[Path] | None:
    if is_store(path):
        return [path]
    if path.is_dir():
        inside = sorted(child for child in path.iterdir() if child.is_dir() and is_store(child))
        return inside or None
    if any(sign in path.name for sign in "*?["):
        matches = sorted(child for child in path.parent.glob(path.name) if child.is_dir() and is_store(child))
        return matches or None
    return None


def _listed(paths: Any) -> Sequence[PathLike]:
    if isinstance(paths, (str, Path)) or hasattr(paths, "__fspath__"):
        return [paths]
    listed = list(paths)
    if not listed:
        raise ConfigError("no path was given")
    return listed


def _shown(paths: Any) -> str:
    return ", ".join(str(path) for path in _listed(paths))


def _check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    made_with = store.manifest.tokenizer
    if made_with is not None and made_with != tokenizer.fingerprint:
        name = store.manifest.lineage[-1].notes.get("tokenizer") if store.manifest.lineage else None
        raise ConfigError(
            f"{store.shown} was made with the tokenizer {name or ''} ({made_with}), and the one given is "
            f"{tokenizer.name} ({tokenizer.fingerprint}); its ids would mean other tokens: pass the tokenizer it was "
            "made with, or prepare the text again"
        )
