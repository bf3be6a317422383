"""Recipe: how raw rows become the rows of a token store.

`Recipe` is what the user writes down. `OpenedRecipe` is a recipe with its input: source, columns, tokenizer, transforms
and key, each opened once and shared by `prepare`, the loaders and the streams.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson
import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean, named_options
from penstock.chat.format_chat import CHAT_OPTIONS, FormatChat, detect_format, json_columns
from penstock.chat.format_preference import FormatPreference, preference_kind
from penstock.chat.formats import refuse_labels
from penstock.chat.templates import load_template
from penstock.corpus.dedup.stages import Dedup, ExactDedup, MinHashDedup, dedup_stages
from penstock.corpus.quality.filters import quality_filters
from penstock.corpus.raw_rows import (
    PeekedSource,
    RowNumbers,
    as_transforms,
    content_name,
    describe_transforms,
    first_rows,
    on_json,
    open_rows,
    schema_after,
)
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.checksums import FileFingerprint
from penstock.files.filesystems import is_remote, shown_place
from penstock.files.ranges.remote_file import InputFile
from penstock.pipeline import Source, Transform
from penstock.pipeline.stages import Fitting
from penstock.sources import (
    ArrowSource,
    CsvSource,
    IteratorSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    SqlSource,
    open_source,
)
from penstock.sources.by_suffix import SourceFiles, find_source
from penstock.sources.file_source import check_columns
from penstock.sources.inputs import Input, as_input
from penstock.sources.lakes.base import LakeSource
from penstock.sources.logs.base import LogSource
from penstock.store import Lineage
from penstock.store.manifest import LABELS, label_column, rejected_column
from penstock.tokenizers.load import TokenizerSpec
from penstock.transforms import Select
from penstock.transforms.tokenization import Tokenize, Tokenizer, load_tokenizer

Made = TypeVar("Made")
_log = logging.getLogger(__name__)
_DEDUPS: dict[str, type[ExactDedup] | type[MinHashDedup]] = {"exact": ExactDedup, "minhash": MinHashDedup}


@dataclass(frozen=True, kw_only=True)
class RowRecipe:
    """Options for raw rows of any kind, before they become tokens."""

    transforms: Sequence[Any] = ()
    """Transforms that run first: stages, functions of a row, or names of transforms (`"drop_nulls"`, `{"lower":
    "text"}`), those of plugins too. Their content is part of the key of the store."""
    columns: Sequence[str] | Mapping[str, str] | None = None
    """Names of the columns to read; by default those that are needed. For chats in plain columns: the column of each
    role, as `{"user": "question", "assistant": "answer"}`."""
    allow_empty: bool = False
    """Pass over files of 0 bytes, which are an error otherwise."""


@dataclass(frozen=True, kw_only=True)
class DocumentRecipe:
    """Options for rows that are documents: rows with a column of text."""

    column: str | None = None
    """Column with the text; by default `text`."""
    filters: Sequence[Any] = ()
    """Names of quality filters, those of plugins too, or transforms."""
    dedup: Sequence[str] = ()
    add_bos: bool | None = None
    """Begin documents with BOS; None: if the tokenizer itself begins a text with it."""
    add_eos: bool | None = None
    """End documents with EOS; None: if the tokenizer has one."""


@dataclass(frozen=True, kw_only=True)
class ChatRecipe:
    """Options for rows that are chats or preferences."""

    template: str | None = None
    """A built-in name, a path or Jinja text; by default the tokenizer's own template."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """More options of `FormatChat`, such as `train_on`."""
    preference: bool | None = None
    """True: pairs (chosen, rejected) and labelled answers (KTO) are prepared as preferences. False: as plain chats, so
    that `chosen` alone, or every answer regardless of its label, is supervised. None: such rows are refused."""
    max_prompt_length: int | None = None
    """Of preferences: a longer prompt loses its beginning."""


def _with_chat_options(kind: type[Made]) -> type[Made]:
    """Decorator of `Recipe`: options of `FormatChat` may be passed by name, as the errors of chats say."""
    init = kind.__init__

    @wraps(init)
    def checked(self: Any, **options: Any) -> None:
        chat, rest = split_chat_options(options)
        if chat:
            rest["chat"] = {**(rest.get("chat") or {}), **chat}
        init(self, **rest)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def split_chat_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `FormatChat` among some options, and the others. `columns` is an option of all rows."""
    chat = {name: value for name, value in options.items() if name in CHAT_OPTIONS and name != "columns"}
    return chat, {name: value for name, value in options.items() if name not in chat}


@_with_chat_options
@named_options
@dataclass(frozen=True, kw_only=True)
class Recipe(RowRecipe, DocumentRecipe, ChatRecipe):
    """Everything that decides the content of a store, except the input.

    Rows with a `column` of text are documents; `template`, or rows in one of the chat formats, make them chats. Filters
    and deduplication need text, so they are for documents. Documents begin with BOS if the tokenizer begins a text with
    it, and end with EOS if it has one.
    """

    tokenizer: TokenizerSpec
    max_length: int | None = None
    truncation: str = "error"
    keep: Sequence[str] = ()
    """Columns to keep in addition to the tokens."""
    fast: bool = True
    """Use the fast tokenizer where it gives the ids of the reference."""
    chat_template: InitVar[str | None] = None
    """Another name of `template`."""

    def __post_init__(self, chat_template: str | None) -> None:
        if chat_template is not None:
            if self.template not in (None, chat_template):
                raise ConfigError("template and chat_template are two names of one option; pass one of them")
            object.__setattr__(self, "template", chat_template)
        if self.transforms != ():
            object.__setattr__(self, "transforms", as_transforms(self.transforms))
        if isinstance(self.columns, Mapping):
            if self.chat.get("columns") not in (None, self.columns):
                raise ConfigError("columns and chat['columns'] are two names of one option; pass one of them")
            object.__setattr__(self, "chat", {**self.chat, "columns": dict(self.columns)})
            object.__setattr__(self, "columns", None)
        elif self.columns is not None:
            object.__setattr__(self, "columns", check_columns(self.columns))
        if self.truncation != "error" and self.max_length is None:
            raise ConfigError(f"truncation={self.truncation!r} needs a max_length")
        if isinstance(self.dedup, str):
            object.__setattr__(self, "dedup", tuple(name.strip() for name in self.dedup.split(",") if name.strip()))
        twice = [name for name in self.dedup if list(self.dedup).count(name) > 1]
        if twice:
            raise ConfigError(f"dedup names {twice[0]!r} more than once: {list(self.dedup)}")
        if self.max_prompt_length is not None and not self.preference:
            raise ConfigError(f"max_prompt_length={self.max_prompt_length} is for preferences; pass preference=True")
        if self.template is None and not self.chat and not self.preference:
            return
        given: dict[str, Any] = {"column": self.column, "add_bos": self.add_bos or None, "add_eos": self.add_eos}
        given |= {"filters": self.filters or None, "dedup": self.dedup or None}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name}={value!r} is for documents, and the recipe has a template or options of a chat; "
                    "a template writes BOS and EOS itself, and chats are neither filtered nor deduplicated"
                )

    def open(self, inputs: Input) -> Source:
        """The source of files or data in any form; it reads only the columns that the recipe needs."""
        return cast(Source, OpenedRecipe.of(self, inputs).source)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer, fast=self.fast)

    def steps(self, schema: pa.Schema, work: Path | None = None) -> Steps:
        """The transforms for rows of this schema; deduplication keeps its index in `work`."""
        tokenizer = self.load_tokenizer()
        self.wanted_columns(schema.names)
        if self.is_chat(schema.names):
            steps = self._chat_steps(tokenizer, schema)
        else:
            steps = self._document_steps(tokenizer, schema, work)
        return replace(steps, tokenizer_path=_path_of(self.tokenizer))

    @property
    def names(self) -> list[str] | None:
        """Columns to read, if they were named."""
        return None if self.columns is None else list(self.columns)

    @property
    def text_column(self) -> str:
        return self.column or "text"

    def wanted_columns(self, there: Sequence[str]) -> list[str]:
        """The columns that documents need, and those to keep; the latter must exist."""
        for name in self.keep:
            if name not in there:
                raise ConfigError(f"keep={name!r}: there is no such column in the input, which has {list(there)}")
        return list(dict.fromkeys([self.text_column, *self.keep]))

    def is_chat(self, names: Sequence[str]) -> bool:
        """True if rows with these columns are chats, False if they are documents."""
        if self.template is not None or self.chat or self.preference:
            return True
        if self.column is not None:
            return False
        if "text" not in names:
            return True
        try:
            form = detect_format(pa.schema([(name, pa.null()) for name in names]))
        except SchemaError:
            return False
        raise ConfigError(
            f"the rows have a column 'text' and the columns of a chat ({form}); pass column='text' "
            "(text_column= of a loader, --column text) to take them as documents, or template= to take them as chats"
        )

    def _chat_steps(self, tokenizer: Tokenizer, schema: pa.Schema) -> Steps:
        if self.filters or self.dedup:
            raise ConfigError("filters and deduplication need a column of text, and these rows are chats")
        last = self.format_chat(tokenizer, schema)
        side = "chosen_" if self._format(schema) == "preference" else ""
        return Steps(
            [last],
            [f"{content_name(last)} {last.gate!r}"],
            tokenizer,
            template=xxhash.xxh3_128_hexdigest(last.template.source.encode()),
            tokens=f"{side}input_ids",
            mask=f"{side}loss_mask",
        )

    def format_chat(self, tokenizer: TokenizerSpec, schema: pa.Schema) -> FormatChat | FormatPreference:
        """The transform of chats with these columns; preferences are refused unless `preference` is set."""
        options: dict[str, Any] = {"max_length": self.max_length, "truncation": self.truncation, **self.chat}
        if self.preference is False:
            # Labels and rejected answers stay next to the tokens, so that readers of the store see them too.
            preferences = {*LABELS, rejected_column(schema)}
            labels = [name for name in schema.names if name in preferences and name not in self.keep]
            return FormatChat(tokenizer, self.template, keep=[*self.keep, *labels], **options)
        kind = preference_kind(schema, self._format(schema))
        if self.preference is None and kind is not None:
            raise ConfigError(_refusal(kind, label_column(schema)))
        if self.preference is None:
            refuse_labels(schema, self.keep)
            return FormatChat(tokenizer, self.template, keep=list(self.keep), **options)
        if kind is None:
            raise ConfigError(
                f"preference=True (--preference), and the columns {schema.names} hold no preferences: pairs have "
                "'chosen' and 'rejected', labelled answers a chat and a boolean 'label' or 'kto_tag'"
            )
        options["max_prompt_length"] = self.max_prompt_length
        return FormatPreference(tokenizer, self.template, keep=list(self.keep), **options)

    def _format(self, schema: pa.Schema) -> str:
        """The chat format of the rows."""
        if "columns" in self.chat or self.chat.get("format", "auto") != "auto":
            return str(self.chat.get("format", "columns"))
        try:
            return detect_format(schema)
        except SchemaError as error:
            raise SchemaError(
                f"{error}; for documents, name the column with their text (text_column= of a loader, --column)"
            ) from None

    def _document_steps(self, tokenizer: Tokenizer, schema: pa.Schema, work: Path | None) -> Steps:
        if self.text_column not in schema.names:
            raise ConfigError(
                f"there is no column {self.text_column!r} in the input, which has {schema.names}; name the column with "
                "the text of documents (text_column= of a loader, --column), or take the rows as chats "
                "(ConversationDataLoader, a template)"
            )
        filters = quality_filters(self.filters, column=self.text_column)
        dedups = [self._dedup(name, work) for name in self.dedup]
        last = Tokenize(
            tokenizer,
            self.text_column,
            add_bos=self.add_bos,
            add_eos=self.add_eos if self.add_eos is not None else tokenizer.special.eos is not None,
            max_length=self.max_length,
            truncation=self.truncation,  # type: ignore[arg-type]
            keep=list(self.keep),
        )
        wanted = self.wanted_columns(schema.names)
        select: list[Transform] = [Select(wanted)] if wanted != schema.names else []
        stages = [*select, *filters, *dedup_stages(*dedups), last]
        return Steps(stages, [*map(content_name, [*filters, *dedups]), content_name(last)], tokenizer)

    def _dedup(self, name: str, work: Path | None) -> Dedup:
        if name not in _DEDUPS:
            hint = did_you_mean(name, _DEDUPS)
            raise ConfigError(f"unknown deduplication {name!r}{hint}; valid names: {', '.join(_DEDUPS)}")
        return _DEDUPS[name](self.text_column, directory=work)


@dataclass(frozen=True, slots=True)
class Steps:
    """The transforms of a recipe and their descriptions."""

    transforms: list[Transform]
    described: list[str]
    tokenizer: Tokenizer
    template: str | None = None
    """Fingerprint of the chat template; None for documents."""
    tokens: str = "input_ids"
    """Column with the tokens of a row."""
    mask: str | None = None
    """Column that is true for supervised tokens."""
    tokenizer_path: str | None = None
    """Path that the tokenizer was loaded from, noted in the store."""
    unnamed: str | None = None
    """Reason why a store made by these transforms has no key."""

    def lineage(self, inputs: Iterable[FileFingerprint], on_error: str, left_out: Iterable[InputFile] = ()) -> Lineage:
        """Lineage of a store. A store that skipped bad rows has another key than one that would have failed on them."""
        skipped = [f"bad rows: {on_error}"] if on_error != "raise" else []
        return Lineage(
            inputs=tuple(inputs),
            tokenizer=self.tokenizer.fingerprint,
            template=self.template,
            transforms=(*self.described, *skipped),
            notes={"tokenizer": self.tokenizer.name, "tokenizer_path": self.tokenizer_path}
            | ({"left_out": names} if (names := [file.name for file in left_out]) else {})
            | ({"unnamed": self.unnamed} if self.unnamed is not None else {}),
        )


@dataclass(frozen=True)
class OpenedRecipe:
    """A recipe and its input: source, schema, tokenizer and steps, each opened once, when it is first needed."""

    recipe: Recipe
    given: Any
    """A source, or `SourceFiles`, which are opened when `source` is needed."""
    memory: int | None = None
    """Bytes of the budget that its rows will be read with, if they are known."""

    @classmethod
    def of(cls, recipe: Recipe, inputs: Input, *, memory: int | None = None) -> OpenedRecipe:
        """The recipe with files, or data in any form that `open_source` takes."""
        given = as_input(inputs)
        if isinstance(given, LakeSource) and recipe.names is not None:
            given = given.with_columns(recipe.names)
        if not isinstance(given, list):
            return cls(recipe, given, memory)
        found = find_source(given)
        return cls(recipe, found if isinstance(found, SourceFiles) else open_source(found), memory)

    @property
    def source(self) -> Any:
        """The source, which reads only the columns that the recipe needs."""
        return self._needed[0]

    @property
    def names(self) -> Sequence[str] | None:
        """Columns of JSON rows, as the first rows show them; None for a format that has a schema."""
        return self._needed[1]

    @cached_property
    def _needed(self) -> tuple[Any, Sequence[str] | None]:
        recipe, source = self.recipe, self.given
        if isinstance(source, SourceFiles):
            source = open_rows(source, recipe.names, allow_empty=recipe.allow_empty)
        if self.memory is not None and isinstance(source, Fitting):
            source.fit_budget(self.memory)  # for the look at its columns, too
        if isinstance(source, MemorySource | IteratorSource | LogSource):
            there = source.column_names()
            if not there or source.size_hint() == 0:
                raise DataError("there are no rows in the input", file=repr(source))
            if recipe.transforms or recipe.is_chat(recipe.names or there):
                source.keep_json(json_columns((recipe.chat.get("columns") or {}).values()))
            return source, None
        if "schema" not in dir(source):  # a look at it could read all rows
            source = PeekedSource(source)
        if recipe.transforms or recipe.columns is not None:  # a transform may need any column
            if isinstance(source, JsonlSource):
                source.keep_json(json_columns((recipe.chat.get("columns") or {}).values()))
            return source, None
        if isinstance(source, ParquetSource) and not recipe.is_chat(source.names):
            wanted = recipe.wanted_columns(source.names)
            return source.with_columns(wanted, allow_empty=recipe.allow_empty), None
        if isinstance(source, SqlSource) and not recipe.is_chat(source.schema.names):
            return source.only(recipe.wanted_columns(source.schema.names)), None
        if not isinstance(source, JsonlSource):
            return _without_conflicts(source, recipe), None
        names, text = source.first_columns(), recipe.text_column
        if not recipe.keep and text in names and not recipe.is_chat(names):
            # Only text is needed, so no types have to be inferred from all rows.
            source.close()
            schema = pa.schema([(text, pa.string())])
            only = type(source)(source.files, schema=schema, columns=[text], allow_empty=recipe.allow_empty)
            return only, [text]
        # In chats, content is text or a list of parts, and arguments of tools have any type: they stay JSON.
        source.keep_json(json_columns((recipe.chat.get("columns") or {}).values()))
        return source, names

    @property
    def left_out(self) -> Sequence[InputFile]:
        """Files of the directory that are not read."""
        return self.given.left_out if isinstance(self.given, SourceFiles) else ()

    @property
    def files(self) -> Sequence[InputFile]:
        return cast(Sequence[Path], getattr(self.given, "files", ()))

    def request(self, inputs: Iterable[FileFingerprint], on_error: str) -> str | None:
        """Hash of everything that decides the key of the store; None if the input or some option has no text.

        It needs neither the rows nor the vocabulary, so a store that exists is found without them.
        """
        if not isinstance(self.given, SourceFiles):
            return None
        recipe, tokenizer = self.recipe, self.tokenizer
        own: str | None = getattr(tokenizer, "chat_template", None)
        described, unnamed = describe_transforms(recipe.transforms) if recipe.transforms else ([], None)
        if unnamed is not None:
            return None
        options = {item.name: getattr(recipe, item.name) for item in fields(recipe)} | {"transforms": described}
        template = load_template(recipe.template, own).source if recipe.template else None
        asked = options | {
            "code": _code_stamp(),
            "source": self.given.name,
            "inputs": list(inputs),
            "tokenizer": [tokenizer.fingerprint, tokenizer.special, own],
            "template": template,
            "on_error": on_error,
        }
        try:
            return xxhash.xxh3_128_hexdigest(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))
        except TypeError:
            return None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.recipe.load_tokenizer()

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns with their types, for which all rows of some formats are read."""
        source = self.source
        return cast(pa.Schema, source.learned_schema() if isinstance(source, IteratorSource) else source.schema)

    @cached_property
    def transforms(self) -> list[Transform]:
        """The transforms of raw rows."""
        recipe, names = self.recipe, self.recipe.names
        transforms = on_json(recipe.transforms, self.schema) if recipe.transforms else []
        if names is None or names == self.schema.names:
            return transforms
        return [Select(names), *transforms]  # the source cannot leave columns out

    @cached_property
    def row_schema(self) -> pa.Schema:
        """The columns after the transforms of raw rows."""
        if not self.transforms:
            return self.schema
        batch = first_rows(self.source)
        return self.schema if batch is None else schema_after(self.transforms, batch)

    @cached_property
    def _steps(self) -> Steps:
        return self._with_transforms(self.recipe.steps(self.row_schema))

    def steps(self, work: Path | None = None) -> Steps:
        """The transforms, made once; those that keep an index in `work` are made for it."""
        if not self.recipe.dedup or work is None:
            return self._steps
        return self._with_transforms(self.recipe.steps(self.row_schema, work))

    def _with_transforms(self, steps: Steps) -> Steps:
        """The steps after the transforms of raw rows."""
        described, unnamed = describe_transforms(self.recipe.transforms)
        if self.recipe.columns is not None:
            described = [f"columns: {list(self.recipe.columns)}", *described]
        return replace(
            steps,
            transforms=[*self.transforms, *steps.transforms],
            described=[*described, *steps.described],
            unnamed=unnamed,
        )

    def log_bos(self, steps: Steps) -> None:
        """Log that documents begin with BOS, if the tokenizer decided it."""
        last = steps.transforms[-1]
        if self.recipe.add_bos is None and isinstance(last, Tokenize) and last.cut.bos is not None:
            _log.info(
                "%s begins a text with BOS (id %d), so every document begins with it; pass add_bos=False (--no-bos) "
                "to leave it out",
                steps.tokenizer.name,
                last.cut.bos,
            )

    def _has(self, text: str) -> bool:
        """True if the rows of a CSV file are documents with this column."""
        return self.recipe.template is None and text in self.source.layout_of(0).names

    def for_streams(self, row_column: str) -> tuple[Any, Steps]:
        """A source that knows its columns without reading all rows, and steps that keep the column of row numbers."""
        source, recipe = self.source, self.recipe
        if hasattr(source, "close") and not isinstance(source, IteratorSource):
            source.close()  # rows are read by others, from any place
        text = recipe.text_column
        if isinstance(source, JsonlSource) and self.names is None:
            source.learn_first()
        elif isinstance(source, CsvSource) and not recipe.transforms and recipe.columns is None and self._has(text):
            schema = pa.schema([(text, pa.string())])
            source = CsvSource(source.files, schema=schema, columns=[text], allow_empty=recipe.allow_empty)
        if self.transforms:
            schema = self.row_schema
        elif self.names is None or source.has_schema:
            schema = self.schema if source is self.source else source.schema
        elif not self.names:
            raise DataError("there are no rows in the input", file=str(source.files[0]))
        else:
            schema = pa.schema([(name, pa.null()) for name in self.names])
        with_rows = replace(recipe, keep=[row_column], tokenizer=self.tokenizer)
        steps = self._with_transforms(with_rows.steps(schema.append(pa.field(row_column, pa.int64()))))
        self.log_bos(steps)
        raw = [RowNumbers(each, row_column) for each in self.transforms]
        return source, replace(steps, transforms=[*raw, *steps.transforms[len(raw) :]])


@cache
def _code_stamp() -> str:
    """Hash of the sizes and times of penstock's modules: other code may give other rows."""
    root = Path(__file__).parents[1]
    stats = [(str(file.relative_to(root)), file.stat()) for file in sorted(root.rglob("*.py"))]
    return xxhash.xxh3_64_hexdigest(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode())


def _without_conflicts(source: Any, recipe: Recipe) -> Any:
    """The source without columns that have another type in each file, if nothing needs them."""
    if not isinstance(source, ParquetSource | ArrowSource) or not (conflicts := source.conflicts()):
        return source
    needed = {recipe.text_column, *recipe.keep, *json_columns((recipe.chat.get("columns") or {}).values()), *LABELS}
    conflicts = [name for name in conflicts if name not in needed]  # one that is needed raises, and names the file
    names = [name for name in source.names if name not in conflicts]
    if not conflicts or not names:
        return source
    _log.warning(
        "%r: columns %s are left out, because files have them in types that do not go together",
        source,
        ", ".join(conflicts),
    )
    return type(source)(source.files, columns=names, allow_empty=recipe.allow_empty)


def _path_of(tokenizer: TokenizerSpec) -> str | None:
    if not isinstance(tokenizer, (str, Path)):
        return None
    if is_remote(tokenizer):
        return shown_place(str(tokenizer))
    path = Path(tokenizer).expanduser()
    return str(path.resolve()) if path.exists() else str(tokenizer)


def _refusal(kind: str, label: str | None) -> str:
    """Message for preferences that a recipe does not mention."""
    if kind == "pairs":
        rows = "the rows are preferences (columns 'chosen' and 'rejected')"
        loss, plain = "would train on 'chosen' and leave 'rejected' out", "to train on 'chosen' alone"
    else:
        rows = f"the rows are answers with labels (column {label!r}, as for KTO)"
        loss, plain = "would train on bad answers as on good ones", "to train on all of them regardless of the label"
    return (
        f"{rows}, and as plain chats a model {loss}; use PreferenceDataLoader, or prepare them with preference=True "
        f"(--preference); pass preference=False (--no-preference) {plain}, or drop or rename the column "
        "before (transforms=, --transform drop=NAME)"
    )
