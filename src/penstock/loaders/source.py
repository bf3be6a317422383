"""Sources of a loader: rows of tokens, the samples made of them, their order, and the layout of their batches.

Stores are opened as they are, raw files as the store made of them.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import xxhash

from penstock._suggest import did_you_mean
from penstock.arrays.truncation import Policy, Truncation
from penstock.batching.backends import get_backend
from penstock.batching.collate import BatchLayout
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.files.cache import default_cache_directory
from penstock.files.filesystems import is_object_url, local_or_none
from penstock.files.listing import PathLike, as_paths, list_files, names_rows
from penstock.order.packing import STRATEGIES
from penstock.order.plan import PlanSource
from penstock.order.sample_orders import BudgetOrder, ChopOrder, FittedOrder, Order, PackedOrder, RowOrder, Table
from penstock.sources.inputs import Input, as_input, shown_input
from penstock.sources.tables import kind_of
from penstock.store import Store, open_store
from penstock.store.foreign.base import ForeignStore
from penstock.store.foreign.lookup import has_texts, is_foreign, open_dataset
from penstock.store.gather import TokenTable
from penstock.store.manifest import Manifest, bucket_stores, is_store, label_column, refuse_remote_store

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe
    from penstock.tokenizers.load import TokenizerSpec
    from penstock.transforms.tokenization import Tokenizer

Paths: TypeAlias = PathLike | Iterable[PathLike] | Store | Input


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
    """Open a store, several stores, a directory of stores, or raw data, which `recipe` prepares into a store once.

    Raw data is files, or anything else that `open_source` takes.

    Of several processes that need the same store, one makes it and the others wait. Stores of preferences are refused
    unless `preference` is set.
    """
    if not isinstance(paths, Store):
        # Once: it may be an iterator.
        saved = None if as_paths(paths) else dataset_store(paths, alone=recipe is not None)
        paths = saved or as_paths(paths) or as_input(paths)
    stores = _stores(paths, options, alone=recipe is not None)
    if stores is not None and recipe is not None:
        _check_unprepared(recipe, stores)
    if stores is None:
        if isinstance(paths, list):
            paths = as_input(paths)  # it may be a table of a lake
        if recipe is None or not (isinstance(paths, list) and all(map(names_rows, paths))):
            stores = _converted(paths, recipe, options)
    if stores is None:
        if recipe is None:
            if not isinstance(paths, list):
                raise ConfigError(f"{shown_input(paths)} holds raw rows, which need a tokenizer; pass tokenizer=")
            list_files(paths)  # reports a missing path
            raise ConfigError(f"{shown_input(paths)} are raw files, which need a tokenizer; pass tokenizer=")
        from penstock.corpus.prepare import prepare_cached  # imported only to make a store
        from penstock.observe import pipeline_progress

        home = (options.cache_home or default_cache_directory()) / "stores"
        made = prepare_cached(
            paths,
            home,
            recipe,
            config=options.pipeline,
            budget=options.memory,
            progress=pipeline_progress if options.progress else None,
            cache=options.shared_cache,
        )
        stores = [open_store(made.path, verify=options.verify)]
    tokenizer = None if recipe is None else recipe.load_tokenizer()
    for store in stores if preference is None else ():
        check_plain(store.manifest, store.shown)
    table = TokenTable(stores)
    if tokenizer is not None:
        for store in stores:
            _check_tokenizer(store, tokenizer)
    return Inputs(table, tokenizer, owned=not isinstance(paths, Store))


def _converted(data: Any, recipe: Recipe | None, options: Options) -> list[Store] | None:
    """Store made of rows that are tokens already, but cannot be read in place; None if they are texts."""
    from penstock.corpus.convert import convert_cached, token_rows  # imported only for what is no store

    if isinstance(data, list):
        list_files(data)  # reports a missing path
    rows = token_rows(data, alone=recipe is not None)
    if rows is None:
        return None
    from penstock.observe import pipeline_progress
    from penstock.transforms.token_columns import SelectTokens

    home = (options.cache_home or default_cache_directory()) / "stores"
    progress = pipeline_progress if options.progress else None
    made = convert_cached(
        rows, SelectTokens(), home, budget=options.memory, progress=progress, cache=options.shared_cache
    )
    return [open_store(made, verify=options.verify)]


def build_recipe(tokenizer: TokenizerSpec | None, options: Options, **given: Any) -> Recipe | None:
    """Recipe for raw files with the options of a loader; None without a tokenizer, if no option needs one."""
    if tokenizer is None:
        needing = [name for name, value in {**given, **options.rows}.items() if value]
        if needing:
            raise ConfigError(f"{needing[0]} applies to raw files, which need a tokenizer; pass tokenizer=")
        return None
    from penstock.corpus.recipe import Recipe  # imported only to prepare raw files

    return Recipe(tokenizer=tokenizer, **{**given, **options.rows})


def check_stores(paths: Paths, tokenizer: Tokenizer) -> None:
    """Refuse stores that were made with another tokenizer."""
    for store in stores_at(paths):
        _check_tokenizer(store, tokenizer)


def stores_at(paths: Paths) -> list[Store]:
    """Stores at these paths; none if they are raw files."""
    given = paths if isinstance(paths, Store) else as_input(paths)
    return _stores(given, Options(verify="fast"), alone=True) or []


def dataset_store(data: Any, *, alone: bool = False) -> Store | None:
    """Store over a dataset of Hugging Face that holds tokens; None if it cannot be read in place."""
    if kind_of(data) != "Dataset" or (alone and has_texts(data.data.schema)):
        return None
    return open_dataset(data)


def _stores(paths: Any, options: Options, *, alone: bool = False) -> list[Store] | None:
    """Stores at these paths; None if there are none. With `alone`, tokens beside texts do not count."""
    if isinstance(paths, Store):
        return [paths]
    if not isinstance(paths, list):
        return None
    listed: list[PathLike] = paths
    homes: list[Sequence[PathLike]] = []
    for path in listed:
        if is_object_url(path):
            homes.append(bucket_stores(path))
        else:
            refuse_remote_store(path)
            homes.append([] if (local := local_or_none(path)) is None else _stores_at(local, alone))
    if not any(homes):
        return None
    for path, there in zip(listed, homes):
        if not there:
            list_files(path)  # reports a missing path
            raise ConfigError(
                f"{shown_input(paths)} are stores and raw files; prepare the raw files, or pass both to MixedDataLoader"
            )
    return [
        open_store(home, verify=options.verify, cache_dir=options.cache_dir, cache_bytes=options.cache_bytes)
        for found in homes
        for home in found
    ]


def _stores_at(path: Path, alone: bool) -> list[Path]:
    """Stores at a path: itself, those in a directory, or those that a glob matches."""
    if is_store(path) or (not names_rows(path) and is_foreign(path, alone=alone)):
        return [path]
    if path.is_dir():
        flat = [] if alone else sorted(child.name for child in path.iterdir() if child.suffix == ".bin")
        if flat:
            raise ConfigError(
                f"{path} holds files of tokens, {', '.join(flat[:4])}: they may be splits of one data set; pass one "
                f"of them, such as {path / flat[0]}, or a glob"
            )
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
        found = [Path(name) for name in names if not name.endswith(".idx")]  # the index of a .bin
        return sorted(each for each in found if is_store(each) or is_foreign(each, alone=alone))
    return []


def _check_unprepared(recipe: Recipe, stores: Sequence[Store]) -> None:
    """Refuse options for raw files where there is a store: they would be ignored."""
    options = ("filters", "dedup", "chat", "transforms", "columns", "add_bos", "add_eos")
    for name, value in ((name, getattr(recipe, name)) for name in options):
        if value or value is False:
            raise ConfigError(
                f"{name}={value!r} applies to raw files, and {stores[0].shown} is a store; omit {name} to use it "
                "as it is, or prepare the raw files again"
            )


def _check_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    if isinstance(store, ForeignStore):
        store.limit_ids(tokenizer.vocab_size)
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


def check_plain(manifest: Manifest, shown: object) -> None:
    """Refuse a store of preferences where plain text or chats are read."""
    kind = stored_kind(manifest)
    if kind is None:
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


Packing = Literal["concat", "best_fit", "first_fit"] | bool | None
_LONGEST = 1 << 26
_STRATEGIES = ("concat", *STRATEGIES)
_ALIASES = {"bfd": "best_fit", "ffd": "first_fit", "wrapped": "concat", "chop": "concat"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Rule by which rows become samples.

    `packing` is None (a row is a sample), `concat` (all rows end to end, cut every `length` tokens), or `best_fit` or
    `first_fit` (whole rows packed by decreasing length; True means `best_fit`). `bfd`, `ffd` and `wrapped` are other
    names of the three.
    """

    packing: str | bool | None = None
    length: int | None = None
    truncation: Policy = "error"
    """Policy for rows longer than `length`, unless they are cut anyway."""

    def __post_init__(self) -> None:
        length = self.length
        Truncation(self.truncation)  # refuses an unknown policy, also where rows are cut anyway
        if self.strategy is not None and length is None:
            raise ConfigError(f"packing={self.packing!r} needs a length; pass chunk_size or max_length")
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ConfigError(f"the length of a sample must be an integer of at least 1, got {length!r}")
        if length is not None and length > _LONGEST:
            raise ConfigError(
                f"the length of a sample must be at most {_LONGEST} tokens, got {length} (tokenizers report that "
                "for an unknown limit); pass the context length of the model"
            )

    @property
    def strategy(self) -> str | None:
        """Packing strategy by its full name; None if a row is a sample."""
        if self.packing is None or self.packing is False:
            return None
        name = "best_fit" if self.packing is True else _ALIASES.get(self.packing, self.packing)
        if name not in _STRATEGIES:
            known = [*_STRATEGIES, *_ALIASES]
            hint = did_you_mean(str(name), known)
            raise ConfigError(f"packing must be one of {', '.join(known)} or None, got {name!r}{hint}")
        return name

    def order(self, table: Table, options: Options, name: str) -> Order:
        """Order of the samples of a source."""
        shuffle, seed, strategy = options.block_shuffle, options.seed, self.strategy
        if options.max_tokens is not None:
            return self._budget_order(table, options, name)
        if strategy == "concat":
            assert self.length is not None
            return ChopOrder(table, self.length, shuffle=shuffle, seed=seed, name=name)
        truncation = Truncation(self.truncation, self.length)
        if strategy is not None:
            return PackedOrder(table, truncation, strategy=strategy, shuffle=shuffle, seed=seed, name=name)
        kind = RowOrder if truncation.one_to_one else FittedOrder
        return kind(table, truncation, shuffle=shuffle, seed=seed, name=name)

    def _budget_order(self, table: Table, options: Options, name: str) -> Order:
        shuffle, seed, most, strategy = options.block_shuffle, options.seed, options.max_tokens, self.strategy
        assert most is not None
        if strategy == "concat" or (strategy is not None and not options.padding_free):
            raise ConfigError(
                f"max_tokens={most} makes batches of whole rows, and packing={self.packing!r} makes samples of one "
                "length, whose number is batch_size; pass one of them"
            )
        truncation = Truncation(self.truncation, most if self.length is None else min(self.length, most))
        if options.padding_free:
            # Rows keep their own limit; a batch of them is a bin.
            return PackedOrder(
                table,
                truncation,
                capacity=most,
                strategy=strategy or "best_fit",
                shuffle=shuffle,
                seed=seed,
                name=name,
            )
        multiple = options.pad_to_multiple_of or 1
        return BudgetOrder(table, truncation, max_tokens=most, multiple=multiple, shuffle=shuffle, seed=seed, name=name)


@dataclass(frozen=True, slots=True)
class LoaderSource:
    """Source of a loader: its rows, the rule for samples, their order in a plan, and the layout of batches."""

    inputs: Inputs
    sampling: Sampling
    plan_source: PlanSource
    layout: BatchLayout

    @property
    def name(self) -> str:
        return self.plan_source.name


def build_source(
    inputs: Inputs, sampling: Sampling, options: Options, name: str, max_epochs: int | None = None
) -> LoaderSource:
    """Source of a loader from opened inputs."""
    plan_source = PlanSource(name, sampling.order(inputs.table, options, name), inputs.identity, max_epochs)
    return LoaderSource(inputs, sampling, plan_source, batch_layout(sampling, options, inputs.pad_id))


def batch_layout(sampling: Sampling, options: Options, pad_id: int) -> BatchLayout:
    """Layout of the batches of a loader."""
    packed = sampling.strategy is not None
    return BatchLayout(
        padding_free=options.padding_free,
        length=sampling.length if packed and not options.padding_free else None,
        multiple=options.pad_to_multiple_of or 1,
        packed=packed or (options.max_tokens is not None and options.padding_free),
        split=options.max_tokens is not None,
        pad_id=pad_id if options.pad_id is None else options.pad_id,
        side=options.padding_side,
        integer=get_backend(options.backend).integer,
        fields=options.wanted_fields,
    )
