"""Which files a path means: a file, a directory, a glob, a URL, or a list of these."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["PathLike", "list_files", "split_suffix"]

PathLike = str | os.PathLike[str]

COMPRESSED = (".gz", ".zst", ".bz2", ".lz4", ".xz")


def list_files(paths: PathLike | Iterable[PathLike], suffixes: Sequence[str] = ()) -> list[Path]:
    """The files behind `paths`, each group sorted by name so that the order is the same everywhere.

    A directory means every file below it with one of `suffixes` (compressed or not), hidden ones left out; a directory
    in it that may not be read is an error, and so is a link in it that leads nowhere. Nothing found is one too: a
    typing mistake must not look like an empty data set. What a URL means (`s3://bucket/part-*.csv`, see
    `files/remote.py`) is downloaded once, all of it, and the local copies are the files.
    """
    if isinstance(paths, (str, os.PathLike)):
        return _expand(paths, suffixes)
    found = [file for path in paths for file in _expand(path, suffixes)]
    if not found:
        raise FileNotFoundError("no input files: the list of paths is empty")
    return found


def split_suffix(path: PathLike) -> tuple[str, str]:
    """`(".jsonl", ".gz")` for `a/b.jsonl.gz`: the format, and the compression or an empty string."""
    name = Path(path)
    outer = name.suffix.lower()
    if outer in COMPRESSED:
        return name.with_suffix("").suffix.lower(), outer
    return outer, ""


def _expand(path: PathLike, suffixes: Sequence[str]) -> list[Path]:
    text = os.fspath(path)
    if "://" in text:
        from penstock.files.remote import RemotePath, fetch_files, path_of  # it imports this module

        place = path_of(text)
        if isinstance(place, RemotePath):
            return fetch_files(place, suffixes)
        text = str(place)
    here = Path(text).expanduser()
    if here.is_dir():
        return _inside(here, suffixes)
    if here.exists():
        return [here]
    if glob.has_magic(text):
        names = glob.glob(str(here), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
        files = sorted((Path(name) for name in names if _is_file(Path(name))), key=lambda file: file.parts)
        if not files:
            raise FileNotFoundError(f"no file matches {text!r} (looked from {Path.cwd()})")
        return files
    raise FileNotFoundError(f"no such file or directory: {text!r} (looked from {Path.cwd()})")


def _inside(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    files = sorted(_walk(directory), key=lambda file: file.parts)
    chosen = [file for file in files if split_suffix(file)[0] in suffixes] if suffixes else files
    if not chosen:
        wanted = ", ".join(suffixes) if suffixes else "any"
        there = ", ".join(sorted({"".join(split_suffix(file)) or "no suffix" for file in files})) or "nothing"
        raise FileNotFoundError(f"no {wanted} file in directory {str(directory)!r}; it holds: {there}")
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
    """A link that leads nowhere stands for rows that are not there, so it is not passed over."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a symbolic link that leads nowhere, to {path.readlink()}; mend or remove it"
        )
    return path.is_file()


def _refuse(error: OSError) -> NoReturn:
    raise error
