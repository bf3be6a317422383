"""Raw files to a token store: the one pipeline behind `penstock prepare`, and behind every loader given raw files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError, SchemaError
from penstock.files.fingerprints import FileFingerprint, fingerprint_files
from penstock.files.listing import PathLike
from penstock.files.locking import FileLock
from penstock.memory import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig, Report, Source, Transform
from penstock.sinks import StoreSink
from penstock.sources import JsonlSource, ParquetSource, open_source
from penstock.store import Lineage, Manifest, Store, is_complete, open_store
from penstock.transforms import Select
from penstock.transforms._tokenizers.loading import TokenizerSpec
from penstock.transforms.deduplication import Dedup, ExactDedup, MinHashDedup, dedup_stages
from penstock.transforms.filtering import quality_filters
from penstock.transforms.formatting import FormatChat, detect_format
from penstock.transforms.tokenization import Tokenize, Tokenizer, load_tokenizer

__all__ = ["Prepared", "Recipe", "prepare"]

_DEDUPS: dict[str, type[ExactDedup] | type[MinHashDedup]] = {"exact": ExactDedup, "minhash": MinHashDedup}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What becomes of rows on their way into a store: everything that decides what the store holds, but the input.

    Rows with a `column` of text are documents; `template`, or rows in one of the chat formats, make it a chat. Filters
    and deduplication look at the text, so they are for documents. Documents end with EOS if the tokenizer has one.
    """

    tokenizer: TokenizerSpec
    template: str | None = None
    """A built-in name, a path or Jinja text; by default the tokenizer's own, for rows that are chats."""
    column: str | None = None
    """The column with the text of documents; by default `text`, for rows that have one."""
    filters: Sequence[str] = ()
    dedup: Sequence[str] = ()
    max_length: int | None = None
    truncation: str = "error"
    add_bos: bool = False
    add_eos: bool | None = None
    """Whether documents end with EOS; None: if the tokenizer has one."""
    keep: Sequence[str] = ()
    """Columns to keep beside the tokens."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """More options of `FormatChat`, such as `train_on`."""

    def open(self, inputs: PathLike | Iterable[PathLike]) -> Source:
        """The source of some files, which reads no more of them than the recipe needs."""
        source: Any = open_source(inputs)
        column = self.column or "text"
        if isinstance(source, JsonlSource):
            # Text is text: if nothing else is wanted, there is no type to be found by looking at every row.
            if not self.keep and column in source.first_columns() and not self._is_chat(_text_schema(column)):
                return type(source)(source.files, schema=_text_schema(column), columns=[column])
        elif isinstance(source, ParquetSource) and not self._is_chat(source.schema):
            return ParquetSource(source.files, columns=self._wanted())
        return cast(Source, source)

    def _wanted(self) -> list[str]:
        """The columns that documents are made of."""
        return list(dict.fromkeys([self.column or "text", *self.keep]))

    def steps(self, schema: pa.Schema, work: Path | None = None) -> Steps:
        """The transforms for rows of this schema; `work` is where deduplication keeps what it has seen."""
        tokenizer = load_tokenizer(self.tokenizer)
        steps = self._chat_steps(tokenizer, schema) if self._is_chat(schema) else None
        steps = steps or self._text_steps(tokenizer, schema, work)
        return replace(steps, tokenizer_path=_path_of(self.tokenizer))

    def _is_chat(self, schema: pa.Schema) -> bool:
        if self.template is not None or self.chat:
            return True
        if self.column is not None:
            return False
        return "text" not in schema.names

    def _chat_steps(self, tokenizer: Tokenizer, schema: pa.Schema) -> Steps:
        if self.filters or self.dedup:
            raise ConfigError("filters and deduplication need a column of text, and these rows are chats")
        given = "columns" in self.chat or self.chat.get("format", "auto") != "auto"
        shape = None if given else _chat_format(schema)
        last = FormatChat(
            tokenizer,
            self.template,
            max_length=self.max_length,
            truncation=self.truncation,
            keep=list(self.keep),
            **self.chat,
        )
        template = xxhash.xxh3_128_hexdigest(last.template.source.encode())
        tokens = "chosen_input_ids" if shape == "preference" else "input_ids"
        return Steps([last], [_described(last)], tokenizer, template, tokens)

    def _text_steps(self, tokenizer: Tokenizer, schema: pa.Schema, work: Path | None) -> Steps:
        column = self.column or "text"
        if column not in schema.names:
            raise ConfigError(f"there is no column {column!r} in the input, which has {schema.names}")
        filters = quality_filters(self.filters, column=column)
        dedups = [self._dedup(name, column, work) for name in self.dedup]
        add_eos = self.add_eos if self.add_eos is not None else tokenizer.special.eos is not None
        last = Tokenize(
            tokenizer,
            column,
            add_bos=self.add_bos,
            add_eos=add_eos,
            max_length=self.max_length,
            truncation=self.truncation,  # type: ignore[arg-type]
            keep=list(self.keep),
        )
        select: list[Transform] = [Select(self._wanted())] if self._wanted() != schema.names else []
        stages = [*select, *filters, *dedup_stages(*dedups), last]
        described = [*map(_described, filters), *map(repr, dedups), _described(last)]
        return Steps(stages, described, tokenizer)

    @staticmethod
    def _dedup(name: str, column: str, work: Path | None) -> Dedup:
        if name not in _DEDUPS:
            hint = did_you_mean(name, _DEDUPS)
            raise ConfigError(f"no deduplication is called {name!r}{hint}; there are {', '.join(_DEDUPS)}")
        return _DEDUPS[name](column, directory=work)


@dataclass(frozen=True, slots=True)
class Steps:
    """The transforms of a recipe, and what they say about themselves."""

    transforms: list[Transform]
    described: list[str]
    tokenizer: Tokenizer
    template: str | None = None
    """Fingerprint of the chat template; None for documents."""
    tokens: str = "input_ids"
    """The column that counts as the tokens of a row."""
    tokenizer_path: str | None = None
    """Where the tokenizer was loaded from, for whoever looks into the store."""

    def lineage(self, inputs: Iterable[FileFingerprint]) -> Lineage:
        return Lineage(
            inputs=tuple(inputs),
            tokenizer=self.tokenizer.fingerprint,
            template=self.template,
            transforms=tuple(self.described),
            notes={"tokenizer": self.tokenizer.name, "tokenizer_path": self.tokenizer_path},
        )

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that are in no row of the store, by reason."""
        return dict(getattr(self.transforms[-1], "dropped_tokens", {}))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A store that is ready, and how it came to be."""

    path: Path
    manifest: Manifest
    report: Report | None
    """None if it was there already."""
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)

    def open(self) -> Store:
        return open_store(self.path)

    def lengths(self, shares: Sequence[float] = (0.5, 0.9, 0.99, 1.0)) -> dict[float, int]:
        """How many tokens that share of the rows has at most."""
        with self.open() as store:
            lengths = np.sort(store.lengths)
        if not len(lengths):
            return dict.fromkeys(shares, 0)
        return {share: int(lengths[min(len(lengths) - 1, int(share * len(lengths)))]) for share in shares}


def prepare(
    inputs: PathLike | Iterable[PathLike] | Source,
    out: PathLike,
    recipe: Recipe,
    *,
    mode: str = "create",
    config: PipelineConfig | None = None,
    budget: MemoryBudget | None = None,
    wait_seconds: float = 0.0,
    progress: Callable[[Pipeline], Any] | None = None,
) -> Prepared:
    """Make the token store of some files; if it is there already, made of the same bytes in the same way, just say so.

        prepare("corpus/*.jsonl", "corpus.store", Recipe(tokenizer="model/", filters=["gopher"], dedup=["exact"]))

    Killed in the middle, the same call goes on where it was. Of several processes that want the same store one makes
    it; the others wait up to `wait_seconds` for it, or are refused. `progress`, given the pipeline, returns a context
    manager whose value is called with snapshots.
    """
    source = inputs if hasattr(inputs, "next_batch") else recipe.open(inputs)
    out = Path(out).expanduser()
    work = out.parent / f".{out.name}.preparing"
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(work.with_name(f"{work.name}.lock")) as lock:
        if not lock.acquire(wait_seconds):
            raise ConfigError(f"{out} is being prepared by {lock.owner()}; wait for it, or choose another place")
        return _prepare(source, out, recipe, mode, config, budget, work, progress)


def _prepare(
    source: Any,
    out: Path,
    recipe: Recipe,
    mode: str,
    config: PipelineConfig | None,
    budget: MemoryBudget | None,
    work: Path,
    progress: Callable[[Pipeline], Any] | None,
) -> Prepared:
    inputs = fingerprint_files(source.files, memo=work / "fingerprints.json") if hasattr(source, "files") else []
    steps = recipe.steps(source.schema, work / "seen" if recipe.dedup else None)
    lineage = steps.lineage(inputs)
    if mode == "create" and lineage.key is not None and is_complete(out, lineage.key):
        _clear(work)
        with open_store(out) as store:
            return Prepared(out, store.manifest, None)
    sink = StoreSink(out, mode=mode, tokens=steps.tokens, lineage=lineage)
    pipeline = Pipeline(source, steps.transforms, sink, config=config or PipelineConfig(), budget=budget)
    kept = work / (lineage.key or "run")
    if progress is None:
        report = pipeline.run(kept)
    else:
        with progress(pipeline) as shown:
            report = pipeline.run(kept, progress=shown)
    _clear(work)
    with open_store(out) as store:
        return Prepared(out, store.manifest, report, steps.dropped_tokens)


def _text_schema(column: str) -> pa.Schema:
    return pa.schema([(column, pa.string())])


def _described(step: Any) -> str:
    """What a step says about itself, as text: the same text, the same result."""
    facts = step.describe()
    return facts if isinstance(facts, str) else orjson.dumps(facts, option=orjson.OPT_SORT_KEYS).decode()


def _path_of(tokenizer: TokenizerSpec) -> str | None:
    if not isinstance(tokenizer, (str, Path)):
        return None
    path = Path(tokenizer).expanduser()
    return str(path.resolve()) if path.exists() else str(tokenizer)


def _chat_format(schema: pa.Schema) -> str:
    try:
        return detect_format(schema)
    except SchemaError as error:
        raise SchemaError(f"{error}; or name the column of a document's text") from None


def _clear(work: Path) -> None:
    """What was kept for going on after a kill."""
    shutil.rmtree(work, ignore_errors=True)
