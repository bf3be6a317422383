"""What becomes of rows on their way into a token store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import orjson
import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean
from penstock.chat.format_chat import FormatChat, detect_format, json_columns
from penstock.chat.format_preference import FormatPreference, preference_kind
from penstock.chat.formats import refuse_labels
from penstock.corpus.dedup.stages import Dedup, ExactDedup, MinHashDedup, dedup_stages
from penstock.corpus.quality.filters import quality_filters
from penstock.errors import ConfigError, SchemaError
from penstock.files.checksums import FileFingerprint
from penstock.files.listing import PathLike
from penstock.pipeline import Source, Transform
from penstock.sources import JsonlSource, ParquetSource, open_source
from penstock.store import Lineage
from penstock.store.preferences import LABELS, label_column, rejected_column
from penstock.tokenizers.load import TokenizerSpec
from penstock.transforms import Select
from penstock.transforms.tokenization import Tokenize, Tokenizer, load_tokenizer

__all__ = ["Recipe", "Steps"]

_DEDUPS: dict[str, type[ExactDedup] | type[MinHashDedup]] = {"exact": ExactDedup, "minhash": MinHashDedup}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a store holds, but the input.

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
    preference: bool | None = None
    """Whether pairs (chosen, rejected) and labelled answers (KTO) are prepared as such; False: as plain chats, of which
    `chosen` alone, or every answer whatever its label, is trained on. None: such rows are refused."""
    max_prompt_length: int | None = None
    """Of preferences: a longer prompt loses its beginning."""
    fast: bool = True
    """Whether the fast tokenizer may be used, where it gives the ids of the reference."""

    _opened: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What is dear to make, and the same each time."""

    def __post_init__(self) -> None:
        if self.truncation != "error" and self.max_length is None:
            raise ConfigError(f"truncation={self.truncation!r} needs a max_length")
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
                    f"{name}={value!r} is for documents, and a template or options of a chat were given too; "
                    "a template writes BOS and EOS itself, and chats are neither filtered nor deduplicated"
                )

    def open(self, inputs: PathLike | Iterable[PathLike]) -> Source:
        """The source of some files, which reads no more of them than the recipe needs."""
        source: Any = open_source(inputs)
        if isinstance(source, JsonlSource):
            # Text is text: if nothing else is wanted, there is no type to be found by looking at every row.
            names = source.first_columns()
            if not self.keep and self._text in names and not self._is_chat(names):
                text = pa.schema([(self._text, pa.string())])
                return type(source)(source.files, schema=text, columns=[self._text])
            # In chats text stands beside lists of parts, and arguments of tools have any type: they stay as they are.
            named = self.chat.get("columns") or {}
            return type(source)(source.files, mixed="json", verbatim=json_columns(named.values()))
        elif isinstance(source, ParquetSource) and not self._is_chat(source.schema.names):
            return ParquetSource(source.files, columns=self._wanted(source.schema.names))
        return cast(Source, source)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded once."""
        if "tokenizer" not in self._opened:
            self._opened["tokenizer"] = load_tokenizer(self.tokenizer, fast=self.fast)
        return cast(Tokenizer, self._opened["tokenizer"])

    def steps(self, schema: pa.Schema, work: Path | None = None) -> Steps:
        """The transforms for rows of this schema; `work` is where deduplication keeps what it has seen."""
        tokenizer = self.load_tokenizer()
        self._wanted(schema.names)
        if self._is_chat(schema.names):
            steps = self._chat_steps(tokenizer, schema)
        else:
            steps = self._text_steps(tokenizer, schema, work)
        return replace(steps, tokenizer_path=_path_of(self.tokenizer))

    @property
    def _text(self) -> str:
        return self.column or "text"

    def _wanted(self, there: Sequence[str]) -> list[str]:
        """The columns that documents are made of, and those to keep; the latter must be there."""
        for name in self.keep:
            if name not in there:
                raise ConfigError(f"keep={name!r}: there is no such column in the input, which has {list(there)}")
        return list(dict.fromkeys([self._text, *self.keep]))

    def _is_chat(self, names: Sequence[str]) -> bool:
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
            f"the rows have a column 'text' and the columns of a chat ({form}); pass column='text' (--column text) to "
            "take them as documents, or a template to take them as chats"
        )

    def _chat_steps(self, tokenizer: Tokenizer, schema: pa.Schema) -> Steps:
        if self.filters or self.dedup:
            raise ConfigError("filters and deduplication need a column of text, and these rows are chats")
        last = self.format_chat(tokenizer, schema)
        shape = self._shape(schema)
        side = "chosen_" if shape == "preference" else ""
        return Steps(
            [last],
            [f"{_described(last)} {last.gate!r}"],
            tokenizer,
            template=xxhash.xxh3_128_hexdigest(last.template.source.encode()),
            tokens=f"{side}input_ids",
            mask=f"{side}loss_mask",
        )

    def format_chat(self, tokenizer: TokenizerSpec, schema: pa.Schema) -> FormatChat | FormatPreference:
        """The transform of chats with these columns; preferences are refused until it is said what they are for."""
        options: dict[str, Any] = {"max_length": self.max_length, "truncation": self.truncation, **self.chat}
        if self.preference is False:
            # Labels and rejected answers stay beside the tokens, so that whoever reads the store is told as well.
            told = {*LABELS, rejected_column(schema)}
            labels = [name for name in schema.names if name in told and name not in self.keep]
            return FormatChat(tokenizer, self.template, keep=[*self.keep, *labels], **options)
        kind = preference_kind(schema, self._shape(schema))
        if self.preference is None and kind is not None:
            raise ConfigError(_untold(kind, label_column(schema)))
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

    def _shape(self, schema: pa.Schema) -> str:
        """Which of the forms of chat data the rows have."""
        given = "columns" in self.chat or self.chat.get("format", "auto") != "auto"
        return self.chat.get("format", "columns") if given else _chat_format(schema)

    def _text_steps(self, tokenizer: Tokenizer, schema: pa.Schema, work: Path | None) -> Steps:
        if self._text not in schema.names:
            raise ConfigError(
                f"there is no column {self._text!r} in the input, which has {schema.names}; name the column with the "
                "text of documents (text_column= of a loader, --column), or take the rows as chats "
                "(ConversationDataLoader, a template)"
            )
        filters = quality_filters(self.filters, column=self._text)
        dedups = [self._dedup(name, work) for name in self.dedup]
        add_eos = self.add_eos if self.add_eos is not None else tokenizer.special.eos is not None
        last = Tokenize(
            tokenizer,
            self._text,
            add_bos=self.add_bos,
            add_eos=add_eos,
            max_length=self.max_length,
            truncation=self.truncation,  # type: ignore[arg-type]
            keep=list(self.keep),
        )
        wanted = self._wanted(schema.names)
        select: list[Transform] = [Select(wanted)] if wanted != schema.names else []
        stages = [*select, *filters, *dedup_stages(*dedups), last]
        return Steps(stages, [*map(_described, [*filters, *dedups]), _described(last)], tokenizer)

    def _dedup(self, name: str, work: Path | None) -> Dedup:
        if name not in _DEDUPS:
            hint = did_you_mean(name, _DEDUPS)
            raise ConfigError(f"no deduplication is called {name!r}{hint}; there are {', '.join(_DEDUPS)}")
        return _DEDUPS[name](self._text, directory=work)


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
    mask: str | None = None
    """The column that says which of them are supervised."""
    tokenizer_path: str | None = None
    """Where the tokenizer was loaded from, for whoever looks into the store."""

    def lineage(self, inputs: Iterable[FileFingerprint], on_error: str) -> Lineage:
        """A store that left bad rows out is another one than a store that would not have been made with them."""
        left_out = [f"bad rows: {on_error}"] if on_error != "raise" else []
        return Lineage(
            inputs=tuple(inputs),
            tokenizer=self.tokenizer.fingerprint,
            template=self.template,
            transforms=(*self.described, *left_out),
            notes={"tokenizer": self.tokenizer.name, "tokenizer_path": self.tokenizer_path},
        )


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
        raise SchemaError(f"{error}; for documents, name the column with their text") from None


def _untold(kind: str, label: str | None) -> str:
    """Why preferences are not prepared as plain chats unasked."""
    if kind == "pairs":
        what = "the rows are preferences (columns 'chosen' and 'rejected')"
        loss, plain = "would train on 'chosen' and leave 'rejected' out", "to train on 'chosen' alone"
    else:
        what = f"the rows are answers with labels (column {label!r}, as for KTO)"
        loss, plain = "would train on bad answers as on good ones", "to train on all of them whatever the label"
    return (
        f"{what}, and as plain chats a model {loss}; use PreferenceDataLoader, or prepare them with preference=True "
        f"(--preference); pass preference=False (--no-preference) {plain}, or drop or rename the column"
    )
