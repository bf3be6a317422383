"""File systems of URLs, and listings of them: Arrow's own file systems, and those of fsspec."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import ConfigError, PenstockError
from penstock.files.listing import PathLike

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

Answer = TypeVar("Answer")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(?=://)")  # at least two letters: one is a drive on Windows
_PASSWORD = re.compile(
    r"(?P<user>://(?:(?!\[)[^/@:]+:(?!:|\d+(?:[/?#,]|$))|:))[^@]*(?:@[^/@]*)*(?=@)|(?P<web>https?://)[^/@:?#]+(?=@)|"
    r"(?i:(?P<key>[?&][\w-]*(?:password|passwd|pwd|secret|token|signature|sig|key|credential|auth|session|jwt)=))[^&]+"
)
"""`user:password@`, `token@` of web servers, and the options of a query that are called like one.

A password may have `@` and `/` in it, as secret keys of S3 do: only a number up to a `/` is a port.
"""
_ARROW_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_WEB = ("http", "https")
ANSWER_SECONDS = 60.0
"""Longest wait for an answer: to a request, or for the next bytes of a file on a web server."""
_LISTING_SECONDS = 3600.0
"""Longest wait for the list of a directory, which may have millions of files, where single requests are answered."""
_RETRY_SECONDS = 20
"""Google's client tries for a quarter of an hour by default, silently, also without a network."""


def is_remote(path: PathLike) -> bool:
    """True if a path begins with a scheme, as `s3://` and `file://` do."""
    return _SCHEME.match(os.fspath(path)) is not None


def shown(url: PathLike) -> str:
    """The URL for messages: without a password."""
    return _PASSWORD.sub(lambda found: f"{found['user'] or found['web'] or found['key']}***", os.fspath(url))


def has_password(url: PathLike) -> bool:
    """True if a URL holds a secret: a password, a token, a signature."""
    return is_remote(url) and _PASSWORD.search(os.fspath(url)) is not None


def open_filesystem(url: PathLike) -> tuple[FileSystem, str]:
    """The Arrow file system that a URL means, and the path in it.

    Credentials are found where the file system's own tools look for them: the environment, `~/.aws`, a login of
    huggingface-hub. The rest of the URL is taken literally, except for `file://`: `%20` is three characters.
    """
    from pyarrow import fs

    text = os.fspath(url)
    scheme = scheme_of(text)
    local = local_path(text)
    if local is not None:
        return fs.LocalFileSystem(), str(local)
    if scheme not in _ARROW_SCHEMES or "::" in text:
        return _open_fsspec(text)
    path, query = cut(text)
    root, _, key = path.partition("://")[2].partition("/")
    if scheme in ("gs", "gcs") and "retry_limit_seconds=" not in query:
        query += f"{'&' if query else '?'}retry_limit_seconds={_RETRY_SECONDS}"
    try:
        filesystem, base = answered(text, lambda: fs.FileSystem.from_uri(f"{scheme}://{root}{query}"))
    except TimeoutError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{shown(text)!r} cannot be opened: {error}") from error
    return filesystem, f"{base.rstrip('/')}/{key}".rstrip("/")


def _open_fsspec(url: str) -> tuple[FileSystem, str]:
    from pyarrow import fs

    try:
        import fsspec.core  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{shown(url)!r} needs fsspec, which is not installed; install it with: pip install 'penstock[cloud]' "
            "(for hf://: pip install 'penstock[hf]')"
        ) from error
    try:
        filesystem, path = answered(url, lambda: fsspec.core.url_to_fs(url, **_web_options(url)))
    except ImportError as error:
        raise ConfigError(
            f"{shown(url)!r} needs a package that is not installed: {error}; for https://, install it with: "
            "pip install 'penstock[cloud]'"
        ) from error
    except (ValueError, TypeError) as error:
        known = ", ".join(f"{scheme}://" for scheme in ("s3", "gs", "abfs", "hdfs", "hf", "https", "file"))
        raise ConfigError(f"{shown(url)!r} cannot be opened: {error}; such as {known} can") from error
    except OSError as error:  # some connect already here
        if repr(shown(url)) in str(error):
            raise
        kind = TimeoutError if isinstance(error, TimeoutError) else ConnectionError
        raise kind(f"{shown(url)!r} cannot be reached: {_without(url, str(error))}") from error
    filesystem.invalidate_cache()  # or a long-lived process would never see what has changed
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path


def _web_options(url: str) -> dict[str, Any]:
    """Options that let fsspec wait for a web server, but not for ever; the time for a whole file is not limited."""
    schemes = {part.partition("://")[0].lower() for part in url.split("::")}
    if not schemes & {*_WEB}:
        return {}
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
    options = {"client_kwargs": {"timeout": timeout}}
    return options if "::" not in url else dict.fromkeys(schemes & {*_WEB}, options)


def answered(url: str, ask: Callable[[], Answer], seconds: float | None = None) -> Answer:
    """The answer of a file system; after `seconds` (`ANSWER_SECONDS`) a TimeoutError, and the request is abandoned.

    Clients written in C++ have no deadlines, and cannot be interrupted.
    """
    results: queue.SimpleQueue[tuple[Answer | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((ask(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asks
            results.put((None, error))

    threading.Thread(target=work, name="penstock-request", daemon=True).start()
    allowed = ANSWER_SECONDS if seconds is None else seconds
    try:
        answer, error = results.get(timeout=allowed)
    except queue.Empty:
        raise TimeoutError(
            f"{shown(url)!r}: no answer within {allowed:g} s; check the network, the address and the credentials"
        ) from None
    if error is not None:
        raise error
    return cast(Answer, answer)


def look(filesystem: FileSystem, path: str, url: str) -> FileInfo:
    """Kind, size and time of what is at a path. What a web server answers with an error is one, unless it has no such
    file; Arrow would take all of them for missing files."""
    if scheme_of(url) not in _WEB or "::" in url:
        with naming_url(url):
            return answered(url, lambda: filesystem.get_file_info(path))
    from pyarrow.fs import FileInfo, FileType

    found = web_info(filesystem, path, url)
    if found is None:
        return FileInfo(path, FileType.NotFound)
    return FileInfo(path, FileType.File, size=found.get("size"))


def web_info(filesystem: FileSystem, path: str, url: str) -> dict[str, Any] | None:
    """Facts of a file on a web server; None if it has no such file. Any other answer, and none, is an error."""
    try:
        return cast(dict[str, Any], answered(url, lambda: filesystem.handler.fs.info(path)))
    except FileNotFoundError as error:
        cause = error.__cause__
        status = getattr(cause, "status", None)
        if status in (404, 410):
            return None
        if status in (401, 403, 407):
            raise PermissionError(f"{shown(url)!r} may not be read: the server answered {status}") from None
        if status is not None:
            raise OSError(f"{shown(url)!r} cannot be read: the server answered {status}; try again later") from None
        if cause is None:
            return None
        if isinstance(cause, TimeoutError):
            raise TimeoutError(f"{shown(url)!r}: the server did not answer within {ANSWER_SECONDS:g} s") from None
        raise ConnectionError(f"{shown(url)!r} cannot be reached: {_without(url, str(cause))}") from None


def _without(url: str, text: str) -> str:
    """A message of another package, without the secrets of a URL in it."""
    return text.replace(url, shown(url))


def kind_of(info: FileInfo) -> str:
    return str(info.type.name)


def select(filesystem: FileSystem, path: str, url: str, *, recursive: bool) -> list[FileInfo]:
    from pyarrow.fs import FileSelector

    with naming_url(url):
        answered(url, lambda: filesystem.get_file_info(path))  # the list of a large bucket takes many answers
        found = answered(
            url, lambda: filesystem.get_file_info(FileSelector(path, recursive=recursive)), _LISTING_SECONDS
        )
    return sorted(found, key=lambda info: info.path.split("/"))


def files_below(filesystem: FileSystem, path: str, url: str) -> list[str]:
    """Every file below a directory that is not hidden."""
    inside = len(path.rstrip("/")) + 1
    found = [info.path for info in select(filesystem, path, url, recursive=True) if kind_of(info) == "File"]
    return [file for file in found if not any(part[:1] == "." for part in file[inside:].split("/"))]


def files_matching(filesystem: FileSystem, path: str, url: str) -> list[str]:
    if not re.search(r"[*\[]", path):
        raise FileNotFoundError(f"no such file or directory: {shown(url)!r}")
    parts = path.split("/")
    fixed = next(number for number, part in enumerate(parts) if re.search(r"[*\[]", part))
    above = "/".join(parts[:fixed])
    try:
        files = files_below(filesystem, above, url)
    except FileNotFoundError:
        files = []
    found = [file for file in files if matches_parts(file.split("/"), parts)]
    if not found:
        raise FileNotFoundError(f"no file matches {shown(url)!r}")
    return found


def matches_parts(parts: list[str], pattern: list[str]) -> bool:
    """True if the parts of a path match those of a glob; `**` stands for any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(matches_parts(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and matches_parts(parts[1:], pattern[1:])


@contextlib.contextmanager
def naming_url(url: str) -> Iterator[None]:
    """Gives what a file system raises the name of the URL, which the error itself often lacks."""
    try:
        yield
    except PenstockError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no such file or directory: {shown(url)!r}") from error
    except PermissionError as error:
        if repr(shown(url)) in str(error):
            raise
        raise PermissionError(f"{shown(url)!r} may not be read: {_without(url, str(error))}") from error
    except Exception as error:  # the file systems of other packages raise what they like
        if isinstance(error, OSError) and repr(shown(url)) in str(error):
            raise
        said = _without(url, str(error)) or type(error).__name__
        raise OSError(f"{shown(url)!r} cannot be read: {said}") from error


def is_access_error(error: BaseException) -> bool:
    """True if a file could not be reached, by the system or over the network; False if what was read is wrong."""
    return isinstance(error, OSError) and (
        error.errno is not None
        or isinstance(error, (ConnectionError, TimeoutError, PermissionError, FileNotFoundError))
    )


def scheme_of(url: str) -> str:
    found = _SCHEME.match(url)
    if found is None:
        raise ConfigError(f"{url!r} is no URL; expected scheme://..., such as 's3://bucket/data.csv'")
    return found.group().lower()


def local_path(url: str) -> Path | None:
    """The path of a `file://` URL; None for other schemes."""
    if scheme_of(url) != "file":
        return None
    host, path = url.partition("://")[2].partition("/")[::2]
    if host not in ("", "localhost"):
        raise ConfigError(f"{url!r} is on the host {host!r}; expected file:///path, with three slashes")
    from urllib.request import url2pathname  # here: it imports half of the network modules

    return Path(url2pathname("/" + path))


def cut(url: str) -> tuple[str, str]:
    """The path, and what follows it: a query, or the file that a chained URL looks into."""
    path = re.split(r"\?|::", url, maxsplit=1)[0]
    return path, url[len(path) :]


_SQUEEZED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]")
"""`s3:/bucket`: what `Path` makes of a URL. At least two letters: one is a drive on Windows."""


def require_local(path: PathLike, what: str) -> Path:
    """The local path, `~` expanded; a URL is a ConfigError that names the argument.

    `file:///path` is the local path. A URL that went through `Path` is recognised too, so a directory whose name ends
    in a colon is to be written as `./name:/...`.
    """
    text = os.fspath(path)
    if is_remote(text):
        local = local_path(text)
        if local is not None:
            return local
        raise ConfigError(_refusal(shown(text), what))
    if (squeezed := _SQUEEZED.match(text)) is not None:
        if squeezed[1].lower() == "file":
            return require_local(f"file:///{text[squeezed.end() :].lstrip('/')}", what)
        raise ConfigError(_refusal(shown(f"{squeezed[1]}://{text[squeezed.end() :]}"), what))
    return _expanded(text)


def local_or_none(path: PathLike) -> Path | None:
    """The local path, also of `file:///path`; None for other URLs."""
    text = os.fspath(path)
    return local_path(text) if is_remote(text) else _expanded(text)


def _expanded(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # `~name` without such a user is a name like any other
        return Path(text)


def _refusal(url: str, what: str) -> str:
    return (
        f"{url!r} is a URL, and {what} must be a local path; pass a path on this machine, and copy what is written "
        "there with the tools of the storage"
    )


OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "azure", "adl")
"""Schemes of object stores, which `open_bucket` reads and writes."""


def is_object_url(path: PathLike) -> bool:
    """True for a URL into an object store: `s3://`, `gs://`, `az://` and their other names."""
    text = os.fspath(path)
    return "::" not in text and text.partition("://")[0].lower() in OBJECT_SCHEMES and "://" in text


def output_place(path: PathLike, what: str) -> Path | str:
    """The local path, or the URL of an object store, at which something is to be written; others are a ConfigError.

    A URL that went through `Path`, which makes one slash of two, is restored.
    """
    text = os.fspath(path)
    scheme, colon, rest = text.partition(":/")
    if colon and scheme.lower() in OBJECT_SCHEMES and "::" not in text:
        return f"{scheme}://{rest.lstrip('/')}"
    if is_remote(text) and local_or_none(text) is None:
        raise ConfigError(
            f"{shown(text)!r} is a URL that cannot be written to: {what} must be a path on this machine or a URL of an "
            "object store (s3://, gs://, az://); write there, and copy it with the tools of the storage"
        )
    return require_local(path, what)


def beside(place: Path | str, prefix: str = "", suffix: str = "") -> Path | str:
    """The place with a longer name: `.out.jsonl.lock` for `out.jsonl`. The query of a URL stays behind it."""
    if isinstance(place, Path):
        return place.with_name(f"{prefix}{place.name}{suffix}")
    path, query = cut(place)
    above, slash, name = path.rstrip("/").rpartition("/")
    return f"{above}{slash}{prefix}{name}{suffix}{query}"


def name_of(place: PathLike) -> str:
    """The last part of a path or URL, without a query."""
    text = os.fspath(place)
    if is_object_url(text):
        return cut(text)[0].rstrip("/").rpartition("/")[2]
    return Path(text if local_or_none(text) is not None else text.partition("?")[0]).name


def shown_place(place: Path | str) -> str:
    """A path or URL for messages and states: without a query, which may hold credentials, and without a password."""
    return str(place) if isinstance(place, Path) else shown(cut(place)[0].rstrip("/"))
