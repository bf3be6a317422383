"""Conversion of token data: between stores and files of Megatron or MDS, and once into the cache for a loader.

No text is tokenized: rows keep their tokens. What is made appears in one step, so a run that was killed leaves nothing
that could be read, and is run again; one that makes a store continues where it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa
import xxhash

from penstock._suggest import did_you_mean
from penstock.connections.shared_cache import SharedCache
from penstock.errors import ConfigError
from penstock.files.atomic import check_own_directory, remove_own_directory
from penstock.files.cache import default_cache_directory
from penstock.files.filesystems import local_or_none, output_place, require_local, shown_place
from penstock.files.listing import PathLike, as_paths
from penstock.files.locks import FileLock
from penstock.files.objects import bucket_has
from penstock.files.remote import RemotePath
from penstock.memory import MemoryBudget
from penstock.pipeline import Pipeline, Report, Source
from penstock.sinks import StoreSink
from penstock.sinks.mds import MdsSink
from penstock.sinks.megatron import MegatronSink
from penstock.sources import StoreSource, TokenFileSource, open_source
from penstock.sources.file_source import FileSource
from penstock.sources.foreign.mds import MdsSource
from penstock.sources.foreign.mds_index import is_mds, read_index
from penstock.sources.inputs import Input, as_input, fingerprints_of
from penstock.sources.jsonl import JsonlSource
from penstock.sources.memory import MemorySource
from penstock.store import Lineage, is_complete
from penstock.store.foreign.base import ForeignOptions
from penstock.store.foreign.lookup import has_texts, is_token_file
from penstock.store.foreign.saved_dataset import STATE, TOKEN_COLUMNS, token_column
from penstock.store.manifest import MANIFEST_NAME, is_store
from penstock.store.shared_files import fetch_store, share_store
from penstock.transforms.token_columns import SelectTokens

FORMATS = ("store", "megatron", "mds")
_OWN = re.compile("rows-[0-9a-f]{16}")
"""Checkpoints of unfinished runs."""
_LONGEST_WAIT = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Converted:
    """Data that was converted."""

    path: Path | RemotePath
    rows: int
    report: Report


def convert(
    source: Input,
    out: PathLike,
    to: str,
    *,
    drop_mask: bool = False,
    compression: str | None = None,
    overwrite: bool = False,
    budget: MemoryBudget | int | str | None = None,
    progress: Callable[[Pipeline], Any] | None = None,
    **layout: Unpack[ForeignOptions],
) -> Converted:
    """Token data as a store, as files of Megatron (`out` is their name without a suffix) or as MDS shards.

        convert("corpus_text_document", "corpus.store", "store")
        convert("corpus.store", "corpus_mds", "mds", compression="zstd")

    `source` is a store, token data of another program (`layout`: see `open_store`), or rows with a column of token ids
    in any form that `open_source` takes: MDS, WebDataset, Parquet, a dataset. Padding (`attention_mask`) is left out,
    `labels` become a mask. The same rows make the same files. A store may be written to a bucket.
    """
    if to not in FORMATS:
        raise ConfigError(f"to must be one of {', '.join(FORMATS)}, got {to!r}{did_you_mean(str(to), FORMATS)}")
    place = output_place(out, "out") if to == "store" else require_local(out, "out")
    if compression is not None and to != "mds":
        raise ConfigError(f"compression={compression!r} is for MDS, and {to} files are mapped as they are; omit it")
    rows, columns = open_tokens(source, layout)
    if isinstance(place, Path):
        place.parent.mkdir(parents=True, exist_ok=True)
    checkpoint: Path | None = None
    sink: Any
    if to == "megatron":
        sink = MegatronSink(place, drop_mask=drop_mask, overwrite=overwrite)
    elif to == "mds":
        sink = MdsSink(place, compression=compression, rename={"input_ids": "tokens"}, overwrite=overwrite)
    else:
        there = is_store(place) if isinstance(place, Path) else bucket_has(f"{place}/{MANIFEST_NAME}")
        if there and not overwrite:
            shown = shown_place(place)
            raise ConfigError(f"{shown} exists; delete it, write elsewhere, or pass overwrite (--overwrite)")
        lineage = _lineage(rows, columns)
        sink = StoreSink(place, mode="overwrite" if overwrite else "create", lineage=lineage)
        checkpoint = _checkpoint(place, rows, lineage) if isinstance(place, Path) else None
    report = _run(Pipeline(rows, [columns], sink, budget=budget), checkpoint, progress)
    return Converted(sink.path, report.rows_out, report)


def _run(pipeline: Pipeline, checkpoint: Path | None, progress: Callable[[Pipeline], Any] | None) -> Report:
    if progress is None:
        report = pipeline.run(checkpoint)
    else:
        with progress(pipeline) as shown:
            report = pipeline.run(checkpoint, progress=shown)
    if checkpoint is not None:
        remove_own_directory(checkpoint.parent, _OWN)
    return report


def _checkpoint(out: Path, rows: Any, lineage: Lineage) -> Path:
    """Directory of the checkpoint of this run; what a run of other rows left there is removed."""
    content = rows.manifest.checksum if isinstance(rows, StoreSource) else lineage.key
    mark = xxhash.xxh3_64_hexdigest(f"{rows!r} {content} {lineage.transforms}".encode())
    work = out.parent / f".{out.name}.converting"
    check_own_directory(work, _OWN)
    if not (work / f"rows-{mark}").exists():
        remove_own_directory(work, _OWN)
    return work / f"rows-{mark}"


def convert_cached(
    rows: Source,
    columns: SelectTokens,
    home: Path,
    *,
    budget: Any = None,
    progress: Any = None,
    cache: SharedCache | None = None,
) -> Path:
    """The store of rows of tokens below `home`, named by its key; made if it does not exist. Other processes wait.

    It is looked for in `cache` before it is made, and put there afterwards.
    """
    lineage = _lineage(rows, columns)
    if lineage.key is None:
        raise ConfigError(
            f"the content of {rows!r} is not known before it is read, so its store cannot be found again; make one "
            "with penstock.loaders.convert(data, 'name.store', 'store') and open that"
        )
    out = home / lineage.key
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(out.parent / f".{out.name}.converting.lock") as lock:
        if not lock.acquire(_LONGEST_WAIT):
            raise ConfigError(f"{out} is being made by {lock.owner()}; wait for it")
        if cache is not None and not out.exists():
            fetch_store(cache, lineage.key, out)
        if not is_complete(out, lineage.key):
            pipeline = Pipeline(rows, [columns], StoreSink(out, lineage=lineage), budget=budget)
            _run(pipeline, _checkpoint(out, rows, lineage), progress)
            if cache is not None:
                share_store(cache, out, lineage.key)
    return out


def token_rows(data: Any, *, alone: bool) -> Source | None:
    """The source of data whose rows are tokens, by its first file; None if they are texts, or not known.

    With `alone`, rows that have texts beside their tokens do not count, and only formats are looked at that often hold
    tokens: MDS, WebDataset, and datasets of Hugging Face.
    """
    given = as_paths(data)
    if alone and given is not None and not any(map(_may_hold_tokens, given)):
        return None
    source: Any = open_source(given) if given is not None else as_input(data)
    schema = _first_schema(source, json=not alone)
    if schema is None:
        return None
    if isinstance(source, MdsSource) and not alone:
        _refuse_bytes(schema, source)
    return None if token_column(schema) is None or (alone and has_texts(schema)) else source


def _first_schema(source: Any, *, json: bool) -> pa.Schema | None:
    """Columns of the first file, or of rows in memory; of JSON Lines only if they may be tokens, since all are read."""
    if isinstance(source, FileSource):
        return source._file_schema(source.files[0])
    if isinstance(source, JsonlSource) and json:
        names = source.first_columns()
        source.close()
        return source.schema if {*TOKEN_COLUMNS} & {*names} else None
    return source.schema if isinstance(source, MemorySource) else None


def _refuse_bytes(schema: pa.Schema, source: MdsSource) -> None:
    for name in TOKEN_COLUMNS:
        if name in schema.names and pa.types.is_binary(schema.field(name).type):
            raise ConfigError(
                f"the column {name!r} of {source!r} holds bytes, and nothing says of which type its tokens are; make a "
                "store with `penstock convert FOLDER OUT --to store --dtype int64` (int64 is usual for shards of LLM "
                "Foundry)"
            )


def _may_hold_tokens(path: PathLike) -> bool:
    local = local_or_none(path)
    if local is None:
        return False
    return ".tar" in local.suffixes or local.suffix == ".tgz" or is_mds(local) or (local / STATE).is_file()


def open_tokens(data: Any, layout: ForeignOptions) -> tuple[Source, SelectTokens]:
    """The source of token data of any kind, and the transform that makes the columns of a store of its rows."""
    chosen: dict[str, Any] = {name: value for name, value in layout.items() if value is not None}
    columns = SelectTokens(**{name: chosen.pop(name, None) for name in ("tokens", "mask", "vocab_size")})
    path = as_paths(data)
    local = local_or_none(path[0]) if path is not None and len(path) == 1 else None
    if local is not None and is_store(local):
        source: Any = StoreSource(local)
    elif local is not None and is_token_file(local):
        return TokenFileSource(local, **chosen), columns
    elif local is not None and is_mds(local):
        source = open_source([local], **_dtypes(local, columns.tokens, chosen.pop("dtype", None)))
    else:
        source = open_source(data)
    if chosen:
        name = next(iter(chosen))
        raise ConfigError(f"{name}={chosen[name]!r} does not apply to {source!r}; omit it")
    return source, columns


def _dtypes(folder: Path, tokens: str | None, dtype: str | None) -> dict[str, Any]:
    """Options of an `MdsSource`; a column of bytes needs a dtype."""
    encodings = {name: encoding for name, encoding, _ in read_index(folder)[0].columns}
    name = tokens or next((each for each in TOKEN_COLUMNS if each in encodings), None)
    if name is None or encodings.get(name) != "bytes":
        if dtype is not None:
            raise ConfigError(
                f"dtype={dtype!r} is for tokens in columns of bytes, and {folder} has {encodings}; omit it"
            )
        return {}
    if dtype is None:
        raise ConfigError(
            f"the column {name!r} of {folder} holds bytes, and nothing says of which type its tokens are; pass dtype= "
            "(--dtype): int64 is usual for shards of LLM Foundry"
        )
    return {"dtypes": {name: dtype}}


def _lineage(rows: Any, columns: SelectTokens) -> Lineage:
    memo = default_cache_directory() / "fingerprints.json"
    inputs = [] if isinstance(rows, StoreSource) else fingerprints_of(rows, memo=memo)
    made = rows.manifest.lineage[-1] if isinstance(rows, StoreSource) and rows.manifest.lineage else Lineage()
    return Lineage(
        inputs=tuple(inputs),
        tokenizer=made.tokenizer,
        template=made.template,
        transforms=(repr(columns),),
        notes={"converted": repr(rows)},
    )
