"""Rows to texts to token ids: the template of a dataset, its text encoder, and the cache of encoded tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock.arrays.ragged import Ragged, list_array
from penstock.connections.shared_cache import SharedCache
from penstock.datasets.spec import ColumnSpec, DatasetSpec
from penstock.errors import ConfigError, DataError
from penstock.files.cache import get_or_make_file
from penstock.files.checksums import ARROW_TAIL, HashedFile, check_file
from penstock.store.shared_files import fetch_file, share_file
from penstock.templates.base_template import BaseTemplate, names_of
from penstock.templates.converters import TabularTextConverter, make_style
from penstock.templates.few_shot import FewShot
from penstock.templates.sentences import SentenceTemplate
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.load import load_tokenizer
from penstock.tokenizers.token_rows import TokenTruncation
from penstock.transforms.counts import Counts

log = logging.getLogger(__name__)

ENCODER_VERSION = 1
"""Part of the fingerprint; raised when the same options give other ids."""
TABLE_VERSION = 2
_PAIRS = (("[CLS]", "[SEP]"), ("<cls>", "<sep>"), ("<cls>", "<eos>"))
_MAX_LOADED = 4
_loaded: dict[tuple[str, Any], Tokenizer] = {}
"""Last tokenizers, shared by the datasets of a competition, so that each is loaded and verified once."""
_ROWS, _TOKENS = "rows cut to max_length", "tokens cut off"


# -- texts to ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextEncoder:
    """Tokenizer with the special tokens around each text.

    These are [CLS] and [SEP] if the tokenizer has them, else its BOS and EOS tokens, if any. They stay when a text is
    truncated, and count for `max_length`.
    """

    tokenizer: Tokenizer
    before: int | None = None
    after: int | None = None
    max_length: int | None = None
    _lost: Counts = field(default_factory=Counts, repr=False, compare=False)

    def __post_init__(self) -> None:
        length = self.max_length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length <= self._around):
            raise ConfigError(
                f"max_length must be an integer above {self._around}, the number of special tokens, got {length!r}"
            )

    @classmethod
    def of(cls, tokenizer: Any, *, add_special_tokens: bool = True, max_length: int | None = None) -> Self:
        """Encoder with anything that `load_tokenizer` takes."""
        loaded = load_tokenizer(tokenizer)
        if loaded is not tokenizer:
            loaded = _loaded.setdefault((loaded.fingerprint, getattr(loaded, "chat_template", None)), loaded)
            while len(_loaded) > _MAX_LOADED:
                _loaded.pop(next(iter(_loaded)), None)
        before, after = _special_tokens(loaded) if add_special_tokens else (None, None)
        return cls(loaded, before, after, max_length)

    @property
    def fingerprint(self) -> str:
        """Text that is equal exactly if the ids are."""
        return f"{ENCODER_VERSION}-{self.tokenizer.fingerprint}-{self.before}-{self.after}-{self.max_length}"

    @property
    def cut_rows(self) -> int:
        return self._lost.totals().get(_ROWS, 0)

    @property
    def cut_tokens(self) -> int:
        return self._lost.totals().get(_TOKENS, 0)

    def encode(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        """Ids of each text, as lists of the narrowest integers that hold the vocabulary."""
        if isinstance(texts, pa.ChunkedArray):
            return pa.chunked_array([self.encode(chunk) for chunk in texts.chunks], pa.list_(self.tokenizer.dtype))
        if texts.null_count:
            raise DataError("a text is null, expected one for every row")
        ids = self.tokenizer.encode(texts)
        if not self._around and self.max_length is None:
            return ids
        rows = Ragged(np.asarray(ids.values), np.asarray(ids.offsets).astype(np.int64))
        if self.max_length is not None:
            cut = TokenTruncation(max_length=self.max_length - self._around, truncation="right").rows(rows)
            self.count_cut(sum(cut.changed.values()), sum(cut.dropped_tokens.values()), len(texts))
            rows = cut.ids
        # In a second step: a truncated text keeps its last special token.
        framed = TokenTruncation(bos=self.before, eos=self.after).rows(rows).ids
        if framed.offsets[-1] > np.iinfo(np.int32).max:
            half = len(texts) // 2
            return pa.concat_arrays([self.encode(texts[:half]), self.encode(texts[half:])])
        return list_array(framed, self.tokenizer.dtype)

    def count_cut(self, rows: int, tokens: int, of: int) -> None:
        """Count truncated texts, now or when they were cached; the first are logged."""
        if rows and not self.cut_rows:
            log.warning(
                "%d of %d texts are longer than max_length=%s and lose %d tokens in all; further ones are counted in "
                "cut_rows and cut_tokens", rows, of, self.max_length, tokens,
            )  # fmt: skip
        if rows:
            self._lost.add({_ROWS: rows, _TOKENS: tokens})

    @property
    def _around(self) -> int:
        return (self.before is not None) + (self.after is not None)


def _special_tokens(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    named = tokenizer.special.named
    for first, last in _PAIRS:
        if first in named and last in named:
            return named[first], named[last]
    return tokenizer.special.bos, tokenizer.special.eos


# -- rows to texts ---------------------------------------------------------------------------------------------------


class WithoutColumns(BaseTemplate):
    """Template that does not see some columns, so that it cannot render them."""

    def __init__(self, template: BaseTemplate, hidden: Iterable[str]) -> None:
        super().__init__(template.name, version=template.version)
        self.template, self.hidden = template, frozenset(hidden)
        self.slice_rows = template.slice_rows

    def columns(self, available: Sequence[str] = ()) -> tuple[str, ...]:
        return self.template.columns([name for name in available if name not in self.hidden])

    def validate(self, columns: pa.Schema | pa.Table | Sequence[str]) -> None:
        names = names_of(columns)
        # A style may exclude the target itself, also for a test file that has none.
        self.template.validate([*names, *sorted(self.hidden.difference(names))])

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        return self.template.render_slice(table, first_row)

    def missing_rules(self) -> Mapping[str, str]:
        return self.template.missing_rules()

    def rules(self) -> dict[str, Any]:
        return {"template": self.template.describe(), "hidden": sorted(self.hidden)}


def template_for(
    wanted: Any, features: Sequence[str], spec: DatasetSpec, *, id_column: str | None, exclude: Collection[str]
) -> BaseTemplate:
    """Template of a dataset: a style over the features, a sentence, or a given template.

    It renders no target, no id unless it names the id column, and no column that the spec ignores or `exclude` names.
    """
    formats = {name: column.format() for name, column in spec.columns.items() if column.kind != "ignore"}
    left_out, targets = {*spec.ignored, *exclude}, set(spec.targets)
    template: Any = wanted
    if isinstance(wanted, str) and "{" not in wanted:
        styled = {name: rule for name, rule in formats.items() if name in features}
        template = make_style(wanted, columns=styled, only=list(features))
    elif isinstance(wanted, str):
        template = SentenceTemplate.of(spec.competition_name, wanted, columns=formats)
    elif isinstance(wanted, TabularTextConverter):
        template = wanted.template
        targets.update(wanted.target)
    if not isinstance(template, BaseTemplate):
        raise ConfigError(
            f"template must be a style, a sentence, a template or a TabularTextConverter, got {type(wanted).__name__}"
        )
    named = template.columns(())
    for target in spec.targets:
        if target in named:
            raise ConfigError(f"template {template.name!r} renders {target!r}, the target")
    if isinstance(template, SentenceTemplate):
        return template.without(left_out) if left_out & set(named) else template
    if refused := [name for name in named if name in left_out]:
        raise ConfigError(
            f"template {template.name!r} names {refused[0]!r}, which exclude= or kind='ignore' in the spec leaves out"
        )
    if template.columns(features) == named:
        return template
    # The rows follow given few-shot examples, which contain the id or not.
    kept = id_column is None or id_column in named or isinstance(template, FewShot)
    return WithoutColumns(template, targets | left_out | (set() if kept else {str(id_column)}))


def few_shot_template(
    template: BaseTemplate, examples: pa.Table, spec: DatasetSpec, count: int, id_column: str | None
) -> FewShot:
    """Template with `count` labelled rows of `examples` before each row."""
    if len(spec.targets) != 1:
        raise ConfigError(f"few_shot needs one target column, got {list(spec.targets)}")
    target = spec.targets[0]
    column = spec.columns.get(target, ColumnSpec())
    return FewShot(
        template, examples, labels=target, count=count, id_column=id_column,
        label_format=column.format(), answer=f"{column.name or target}: ",
    )  # fmt: skip


# -- cache -----------------------------------------------------------------------------------------------------------


def kept_table(
    directory: Path,
    key: Mapping[str, Any],
    make: Callable[[], pa.Table],
    *,
    rows: int,
    wait_seconds: float = 3600.0,
    cache: SharedCache | None = None,
) -> pa.Table:
    """Table of a key, mapped from its Arrow file; if there is none, one process makes it and the others wait.

    A file that is damaged, or has not `rows` rows, is made again. It is looked for in `cache` before it is made, and
    put there afterwards.
    """
    name = xxhash.xxh3_128_hexdigest(orjson.dumps({"version": TABLE_VERSION, **key}, option=orjson.OPT_SORT_KEYS))
    found: pa.Table | None = None
    made = False

    def is_valid(file: Path) -> bool:
        nonlocal found
        found = _read(file, rows)
        return found is not None

    def write(file: BinaryIO) -> None:
        nonlocal made
        if cache is not None and fetch_file(cache, name, file):
            file.flush()
            if _read(Path(file.name), rows) is not None:
                return
            file.seek(0)
            file.truncate()
        made, table = True, make()
        hashed = HashedFile(file)
        with pa.ipc.new_file(hashed, table.schema) as writer:
            writer.write_table(table)
            hashed.cut()
            hashed.hold()
        hashed.finish(ARROW_TAIL)

    file = directory / f"encoded-{name}.arrow"
    get_or_make_file(file, write, is_valid=is_valid, wait_seconds=wait_seconds)
    if found is None:
        found = _read(file, rows)
    if made and cache is not None:
        share_file(cache, name, file)
    assert found is not None
    return found


def _read(file: Path, rows: int) -> pa.Table | None:
    if not file.is_file():
        return None
    try:
        check_file(file, ARROW_TAIL)
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        table.validate()
    except (pa.ArrowInvalid, DataError, OSError) as error:
        log.warning("%s is damaged (%s) and is made again", file, error)
        return None
    if table.num_rows != rows:
        log.warning("%s has %d rows, expected %d, and is made again", file, table.num_rows, rows)
        return None
    return table
