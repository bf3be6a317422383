"""Files of a path: a file, a directory, a glob, a URL, or a list of these."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.files.ranges.remote_file import InputFile

_log = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

COMPRESSED = (".gz", ".zst", ".bz2", ".lz4", ".xz")
_LONGEST_NAME = 255
_HUB_NAME = re.compile(r"[\w-]+/[\w-]+(\.[\d][\w.-]*)?")


class FoundFiles(list["InputFile"]):
    """Files, local or remote, and the directories in which each was found, which may hold partition columns.

    `base` is the requested directory, the part of a glob before its first wildcard, or the directory of a
    file; of several paths it is what they have in common. `folders` are the directories of each file. Both are in
    parts, and remote files have those of the URL.
    """

    def __init__(self, files: Iterable[InputFile], base: tuple[str, ...], folders: Iterable[tuple[str, ...]]) -> None:
        super().__init__(files)
        self.base, self.folders = base, list(folders)

    @classmethod
    def joined(cls, groups: Sequence[FoundFiles]) -> FoundFiles:
        """The files of all groups, from the directory on that the groups have in common."""
        levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*(group.base for group in groups)))
        files = [file for group in groups for file in group]
        return cls(files, tuple(parts[0] for parts in levels), [folder for group in groups for folder in group.folders])

    def only(self, chosen: Collection[InputFile]) -> FoundFiles:
        """Some of the files."""
        kept = [(file, folder) for file, folder in zip(self, self.folders) if file in chosen]
        return FoundFiles([file for file, _ in kept], self.base, [folder for _, folder in kept])

    @property
    def partitions(self) -> list[tuple[str, ...]]:
        """For each file the directories below the base that are called `name=value`."""
        depth = len(self.base)
        return [tuple(part for part in folder[depth:] if part.find("=") > 0) for folder in self.folders]


def list_files(paths: PathLike | Iterable[PathLike], suffixes: Sequence[str] = ()) -> FoundFiles:
    """The files of `paths`, each group sorted by name so that the order is the same everywhere.

    A directory means every file below it with one of `suffixes` (compressed or not), hidden ones left out; a directory
    in it that may not be read is an error, and so is a link in it that leads nowhere. Nothing found is one too: a
    typing mistake must not look like an empty data set. What a URL means (`s3://bucket/part-*.csv`) are
    `RemoteFile`s, which are read where they are. Of file systems that have no ranges the files are copied
    (`files/remote.py`), and the copies are the files.
    """
    if isinstance(paths, (str, os.PathLike)):
        return _expand(paths, suffixes)
    if isinstance(paths, FoundFiles):
        return paths
    groups = [_expand(path, suffixes) for path in paths]
    if not groups:
        raise FileNotFoundError("no input files: the list of paths is empty")
    return FoundFiles.joined(groups)


DATABASE_SCHEMES = frozenset(
    {"postgresql", "postgres", "sqlite", "duckdb", "snowflake", "bigquery", "grpc", "grpc+tls", "grpc+tcp"}
)
SERVICES = {
    **dict.fromkeys(DATABASE_SCHEMES, ("sql", "Sql")),
    "nats": ("logs.nats", "Nats"),
    "redis": ("logs.redis", "RedisStream"),
    "rediss": ("logs.redis", "RedisStream"),
    "kafka": ("logs.kafka", "Kafka"),
}
"""Databases and brokers by the scheme of their URL: module in `sources` and in `sinks`, and beginning of its class."""


def is_service(data: Any) -> bool:
    """True for the URL of a database or a broker, which is not a path."""
    if not isinstance(data, str) or "://" not in data:
        return False
    return data.partition("://")[0].lower() in SERVICES


def service_of(data: Any) -> str | None:
    """The URL of a database or a broker, which may be alone in a list; None for anything else."""
    if isinstance(data, (list, tuple)) and len(data) == 1:
        (data,) = data
    return data if is_service(data) else None


_ROW_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet"})


def names_rows(path: PathLike) -> bool:
    """True for the name of a file of rows or text, which is neither a table of a lake nor token data."""
    return split_suffix(path)[0] in _ROW_SUFFIXES and not os.fspath(path).endswith(".metadata.json")


def as_paths(data: Any) -> list[PathLike] | None:
    """One path, or a list of paths, as a list; None for anything else, such as the URL of a database."""
    if service_of(data) is not None:
        return None
    if isinstance(data, (str, os.PathLike)):
        data = [data]
    if isinstance(data, (list, tuple)) and data and all(isinstance(item, (str, os.PathLike)) for item in data):
        for item in data:
            if is_service(item):
                scheme = str(item).partition("://")[0]
                raise ConfigError(f"{scheme}:// is a database or a broker, which is opened alone, not in a list")
            _refuse_text(str(item))
        return data if isinstance(data, list) else [*data]
    return None


def _refuse_text(path: str) -> None:
    """Refuse what no file system takes for a path, before it is looked for."""
    if "://" not in path and any(len(part.encode()) > _LONGEST_NAME for part in path.split("/")):
        raise ConfigError(
            f"{path[:60]!r}... is too long for a path, and looks like text; pass texts as rows, such as "
            "[{'text': text} for text in texts]"
        )


def names_of(files: Sequence[InputFile]) -> list[str]:
    """The names of files without their directories, which may be others after a move; but with those that are called
    `name=value`, since these are part of the data."""
    partitions = files.partitions if isinstance(files, FoundFiles) else [()] * len(files)
    return ["/".join((*folders, file.name)) for folders, file in zip(partitions, files)]


def split_suffix(path: PathLike) -> tuple[str, str]:
    """`(".jsonl", ".gz")` for `a/b.jsonl.gz`: the format, and the compression or an empty string."""
    name = Path(getattr(path, "name", path))
    outer = name.suffix.lower()
    if outer in COMPRESSED:
        return name.with_suffix("").suffix.lower(), outer
    return outer, ""


def _expand(path: PathLike, suffixes: Sequence[str]) -> FoundFiles:
    text = os.fspath(path)
    if "://" in text:
        from penstock.files.ranges.remote_file import RemoteFile
        from penstock.files.remote import RemotePath, fetch_files, path_of  # it imports this module

        if isinstance(path, RemoteFile):  # listed before, and meant as it was then
            folder = tuple(text.partition("://")[2].split("/")[:-1])
            return FoundFiles([path], folder, [folder])
        if text.startswith("hf://"):
            from penstock.files.hub import fetch_url
            from penstock.files.ranges.hub import find_hub_files

            on_hub = find_hub_files(text, suffixes)
            if on_hub is not None:
                return on_hub
            local = fetch_url(text)
            try:
                return _expand(local, suffixes)
            except FileNotFoundError as error:
                raise FileNotFoundError(str(error).replace(local, text)) from error
        place = path_of(text)
        if isinstance(place, RemotePath):
            from penstock.files.ranges.catalog import find_remote

            found = find_remote(text, suffixes)
            return found if found is not None else fetch_files(place, suffixes)
        text = str(place)
    here = Path(text).expanduser()
    if here.is_dir():
        return _found(_inside(here, suffixes), here)
    if here.exists():
        if here.is_fifo() or here.is_socket():
            kind = "named pipe" if here.is_fifo() else "socket"
            raise FileNotFoundError(
                f"{text!r} is a {kind}, which can be read only once; write what comes out of it to a file, or read it "
                "with IteratorSource"
            )
        _warn_of_tables([here])
        return _found([here], here.parent)
    if glob.has_magic(text):
        names = glob.glob(str(here), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = sorted((Path(name) for name in names if _is_file(Path(name))), key=lambda file: file.parts)
        if not files:
            raise FileNotFoundError(f"no file matches {text!r} (looked from {Path.cwd()})")
        _warn_of_tables(files)
        return _found(files, Path(*takewhile(lambda part: not glob.has_magic(part), here.parts)))
    hub = f"; a dataset of the Hugging Face Hub is 'hf://datasets/{text}'" if _HUB_NAME.fullmatch(text) else ""
    raise FileNotFoundError(f"no such file or directory: {text!r} (looked from {Path.cwd()}){hub}")


def _found(files: list[Path], base: Path) -> FoundFiles:
    return FoundFiles(files, base.parts, [file.parent.parts for file in files])


_DELTA_LOG = "_delta_log"
_ICEBERG = ".metadata.json"


def refuse_tables(files: Iterable[str], where: str) -> None:
    """Refuse the files of a directory, listed with `/`, if they are those of a lake table: some hold removed rows."""
    for file in files:
        folder, _, name = file.rpartition("/")
        home, _, last = folder.rpartition("/")
        delta = last == _DELTA_LOG
        if not delta and not (last == "metadata" and name.endswith(_ICEBERG)):
            continue
        kind = "a Delta table" if delta else "an Iceberg table"
        raise ConfigError(
            f"{home or where!r} is {kind}, and its files also hold rows that were removed from it; pass that directory "
            f"alone to open_source or to {'DeltaSource' if delta else 'IcebergSource'}"
        )


def homes_of(folder: Sequence[str]) -> list[Sequence[str]]:
    """Directories, in parts, that may be the table in which a directory of data files lies: above its partitions
    (`name=value`), and one more, since Iceberg has its files in `data`."""
    depth = len(folder)
    while depth and "=" in folder[depth - 1]:
        depth -= 1
    return [folder[:each] for each in (depth, depth - 1) if each > 0]


def refuse_part_of_table(where: str, home: str, kind: str) -> NoReturn:
    """Refuse a directory that lies in a lake table."""
    raise ConfigError(
        f"{where!r} lies in {home!r}, which is {kind} table, and its files also hold rows that were removed from it; "
        f"pass {home!r} to open_source, and choose rows with filter=[(column, operator, value)]"
    )


def _table_above(folder: Path) -> tuple[Path, str] | None:
    """The lake table in which a directory lies, and its kind; None if it lies in none."""
    for parts in homes_of(folder.absolute().parts):
        home = Path(*parts)
        if (home / _DELTA_LOG).is_dir():
            return home, "a Delta"
        if any((home / "metadata").glob(f"*{_ICEBERG}")):
            return home, "an Iceberg"
    return None


def _warn_of_tables(files: Iterable[Path]) -> None:
    """Say it if files that were named, or match a glob, are some of those of a lake table."""
    for folder in dict.fromkeys(file.parent for file in files if file.suffix == ".parquet"):
        if (table := _table_above(folder)) is not None:
            _log.warning(
                "%s is %s table, and its files also hold rows that were removed from it; pass the directory alone to "
                "read the rows of a version",
                *table,
            )
            return


def _inside(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    files = sorted(_walk(directory), key=lambda file: file.parts)
    refuse_tables(map(str, files), str(directory))
    if (table := _table_above(directory)) is not None and any(file.suffix == ".parquet" for file in files):
        refuse_part_of_table(str(directory), str(table[0]), table[1])
    chosen = [file for file in files if split_suffix(file)[0] in suffixes] if suffixes else files
    if not chosen:
        wanted = f"{', '.join(suffixes)} file" if suffixes else "file"
        there = ", ".join(sorted({"".join(split_suffix(file)) or "no suffix" for file in files})) or "nothing"
        raise FileNotFoundError(f"no {wanted} in directory {str(directory)!r}; it holds: {there}")
    return chosen


def _walk(directory: Path) -> Iterator[Path]:
    """Every file below a directory that is not hidden; links are followed, but into no directory twice."""
    seen: set[str] = set()
    for root, folders, names in os.walk(directory, onerror=_refuse, followlinks=True):
        here = os.path.realpath(root)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (path for name in names if name[0] != "." and _is_file(path := Path(root, name)))


def _is_file(path: Path) -> bool:
    """True for a file. A dangling link is an error: its rows are missing."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(f"{path} is a dangling symbolic link to {path.readlink()}; repair or remove it")
    return path.is_file()


def _refuse(error: OSError) -> NoReturn:
    raise error
