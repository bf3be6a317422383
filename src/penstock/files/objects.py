"""Object stores by URL: S3, Google Cloud Storage and Azure, read by ranges and written whole or not at all.

    bucket, key = open_bucket("s3://corpora/en/part-0.jsonl")
    found = bucket.info(key)
    head = bucket.read(key, 0, 4096, etag=found.etag)

Requests that are throttled, cut off or not answered are made again with growing pauses, for `RETRY_SECONDS` at most;
then an error names the object. The clients are those of obstore, which work outside of the interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast
from urllib.parse import parse_qsl, unquote

from penstock._forks import check_clients
from penstock._optional import require
from penstock.errors import ChangedFileError, ConfigError, DataError
from penstock.files import filesystems
from penstock.files.filesystems import cut, is_object_url, scheme_of, shown
from penstock.files.listing import PathLike
from penstock.files.object_clients import aws_profile, check_endpoint, missing_credentials, raise_for_panic, said

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RETRY_SECONDS = 60.0
"""Longest time in which one request is tried again."""
WARN_SECONDS = 3.0
"""Time after which the log says that a request is tried again."""
PART_BYTES = 8 << 20
"""Size of the parts of an upload, and of the requests for a long range. S3 takes parts of 5 MiB and more."""
LEAST_PART_BYTES = 5 << 20
"""S3 refuses smaller parts, but for the last."""
_COPIED_BYTES = 1 << 20
_COPIED_BY_SERVER = 5 << 30
"""Longest object that S3 copies in one request."""
_TOGETHER_BYTES = 1 << 16
"""Ranges that are less apart than this are one request."""
_MOST_RETRIES = 30
_LONGEST_PART_BYTES = 64 << 20
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_STATUS = re.compile(r"status code: (\d{3})")
_LATER = ("408", "425", "429")
_OPTIONS = {"endpoint_override": "endpoint", "access_key": "access_key_id", "secret_key": "secret_access_key"}
"""Options in the query of a URL that Arrow's file systems call otherwise."""
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "GCS_", "STORAGE_EMULATOR_HOST", "HTTP_PROXY", "HTTPS_PROXY", "HOME")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Facts of an object."""

    key: str
    size: int
    etag: str | None
    """Changes with the content. With it, `Bucket.read` refuses an object that was replaced."""
    modified_ns: int
    version: str | None = None

    @property
    def written(self) -> ObjectVersion:
        """For `Bucket.write(replaced=...)`."""
        return ObjectVersion(self.etag, self.version)


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Version that a conditional write refers to: the ETag, and the number that Google Cloud Storage has for it."""

    etag: str | None
    version: str | None = None


class ChangedObjectError(ChangedFileError):
    """An object that was replaced or deleted while it was read, or after it was listed."""


class ObjectExistsError(FileExistsError):
    """An object that another writer has written, where that was to be refused."""


def open_bucket(url: PathLike, *, retry_seconds: float | None = None) -> tuple[Bucket, str]:
    """The bucket that a URL leads into, and the key in it (empty for the bucket itself).

    Credentials and addresses come from the environment (`AWS_...`, `GOOGLE_...`, `AZURE_...`), from `~/.aws`, from the
    machine's own identity, or from the query of the URL (`?region=eu-west-1&endpoint=http://...`). Clients are shared
    by all users in a process. `retry_seconds` is for those who can do without the answer: by default `RETRY_SECONDS`.
    """
    text = os.fspath(url)
    if not is_object_url(text):
        known = ", ".join(f"{scheme}://" for scheme in ("s3", "gs", "az"))
        raise ConfigError(f"{shown(text)!r} is no URL of an object store; expected {known}")
    path, query = cut(text)
    root, _, key = path.partition("://")[2].partition("/")
    if ":" in root and "@" not in root:
        raise ConfigError(
            f"{scheme_of(text)}:// is followed by a user and half of a password, or by a bucket with a colon in its "
            "name, which there is none of; in a URL, write / in a password as %2F, and ? as %3F"
        )
    if {"", ".", ".."} & {*key.strip("/").split("/")[:-1]} or key.strip("/").rpartition("/")[2] in (".", ".."):
        raise ConfigError(f"{shown(text)!r}: a key has no empty part, '.' or '..' between its slashes; leave them out")
    bucket = _bucket(scheme_of(text), root, query.removeprefix("?"), _environment_mark(), retry_seconds)
    return bucket, key.strip("/")


def _environment_mark() -> int:
    """Number that changes with what a client takes from the environment; the values themselves are not kept."""
    facts = [(name, value) for name, value in os.environ.items() if name.upper().startswith(_ENVIRONMENT)]
    return hash((os.getpid(), *sorted(facts)))


@functools.lru_cache(maxsize=64)
def _bucket(scheme: str, root: str, query: str, mark: int, retry_seconds: float | None) -> Bucket:
    require("obstore", "cloud")
    login, _, name = root.rpartition("@") if scheme in ("s3", "s3a", "gs", "gcs") else ("", "", root)
    if not name:
        raise ConfigError(f"{scheme}:// needs the name of a bucket, such as {scheme}://bucket/key")
    options = {_OPTIONS.get(key, key): value for key, value in parse_qsl(query)}
    if login == "anonymous":
        options["skip_signature"] = "true"
    elif login:
        user, _, password = login.partition(":")
        options |= {"access_key_id": unquote(user), "secret_access_key": unquote(password)}
    try:
        # `Bucket` asks again itself, also if a body is cut off.
        store = _client(scheme, name, options, retries=0, patience=retry_seconds or RETRY_SECONDS)
    except ConfigError as error:
        raise ConfigError(f"{scheme}://{name} cannot be opened: {error}") from None
    except Exception as error:  # noqa: BLE001 - obstore's errors have no common base here
        raise ConfigError(
            f"{scheme}://{name} cannot be opened: {said(error)}; check the options in the URL and the environment"
            f"{missing_credentials(scheme, options)}"
        ) from None
    patience = retry_seconds or RETRY_SECONDS
    patient = functools.partial(_client, scheme, name, options, retries=_MOST_RETRIES, patience=patience)
    return Bucket(f"{scheme}://{name}", store, patient, retry_seconds)


def _client(scheme: str, name: str, given: Mapping[str, str], *, retries: int, patience: float) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    options: dict[str, Any] = dict(given)
    allow_http = options.pop("scheme", "") == "http"
    endpoint = options.get("endpoint")
    if endpoint and "://" not in endpoint:
        options["endpoint"] = endpoint = f"{'http' if allow_http else 'https'}://{endpoint}"
    ways: dict[str, Any] = {
        "client_options": {
            "timeout": f"{min(filesystems.ANSWER_SECONDS, 3 * patience):g}s",
            "connect_timeout": f"{min(5.0, patience):g}s",
            "pool_idle_timeout": "30s",
        },
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=patience)},
    }
    if scheme in ("gs", "gcs"):
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            check_endpoint("STORAGE_EMULATOR_HOST", emulator)
            options = {"base_url": emulator, "skip_signature": "true"} | options
            ways["client_options"]["allow_http"] = True
        return GCSStore(name, **options, **ways)
    if scheme in ("az", "azure", "adl", "abfs", "abfss"):
        container, _, account = name.partition("@")
        if account:
            options.setdefault("account_name", account.partition(".")[0])
        return AzureStore(container, **options, **ways)
    environment = aws_profile() | {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    endpoint_name = "endpoint"
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if not endpoint and (endpoint := environment.get(variable)):
            endpoint_name = variable
    if endpoint:
        check_endpoint(endpoint_name, endpoint)
        options["endpoint"] = endpoint
    if allow_http or (endpoint or "").startswith("http://"):
        ways["client_options"]["allow_http"] = True
    for option, variable in (
        ("access_key_id", "AWS_ACCESS_KEY_ID"),
        ("secret_access_key", "AWS_SECRET_ACCESS_KEY"),
        ("session_token", "AWS_SESSION_TOKEN"),
        ("region", "AWS_REGION"),
        ("region", "AWS_DEFAULT_REGION"),
    ):
        if option not in options and (value := environment.get(variable)):
            options[option] = value
    return S3Store(name, **options, **ways)


class Bucket:
    """The objects of one bucket. Safe to use from many threads; every method waits for its answer without the GIL."""

    def __init__(
        self, url: str, store: Any, patient: Callable[[], Any] | None = None, retry_seconds: float | None = None
    ) -> None:
        self.url, self._store, self._retry_seconds = url, store, retry_seconds
        self._make_patient, self._patient_store = patient, None
        self._quiet_until = 0.0

    @property
    def options(self) -> dict[str, str]:
        """Options by which other clients reach the bucket, credentials among them: not for messages or states."""
        options = {str(name): str(value) for name, value in self._store.config.items() if name != "bucket"}
        if str((self._store.client_options or {}).get("allow_http")).lower() == "true":
            options["allow_http"] = "true"
        return options

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def info(self, key: str) -> ObjectInfo | None:
        """Facts of an object; None if there is none."""
        import obstore

        try:
            return _info(self._ask(key, lambda: obstore.head(self._store, key)))
        except FileNotFoundError:
            return None

    def objects(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        """The objects below a prefix, which ends at a `/`, sorted by key; those behind the key `after`."""
        import obstore

        check_clients()
        until, pause = time.monotonic() + (self._retry_seconds or RETRY_SECONDS), _FIRST_PAUSE
        while True:
            try:
                for page in obstore.list(self._store, prefix or None, offset=after):
                    for found in sorted(page, key=lambda one: one["path"]):
                        after = found["path"]
                        yield _info(found)
                    until, pause = time.monotonic() + (self._retry_seconds or RETRY_SECONDS), _FIRST_PAUSE
                return
            except Exception as error:  # noqa: BLE001 - raised again unless asking again helps
                pause = self._wait(prefix, error, until, pause)
            except BaseException as error:
                raise_for_panic(error, shown(self.url_of(prefix)))
                raise

    def list_folder(self, prefix: str = "") -> tuple[list[str], list[ObjectInfo]]:
        """Names directly below a prefix: folders, and objects."""
        import obstore

        found = self._ask(prefix, lambda: obstore.list_with_delimiter(self._store, prefix or None))
        folders = sorted(folder.rstrip("/").rpartition("/")[2] for folder in found["common_prefixes"])
        objects = sorted(map(_info, found["objects"]), key=lambda one: one.key)
        return folders, [one for one in objects if one.key.rstrip("/") != prefix.rstrip("/")]  # marks of empty folders

    def read(self, key: str, start: int = 0, stop: int | None = None, *, etag: str | None = None) -> Any:
        """Bytes from `start` to `stop`, as a buffer; fewer at the end of the object. One request.

        With the `etag` of an `ObjectInfo`, an object that is another one now is a `ChangedObjectError`.
        """
        import obstore

        if stop is not None and stop <= start:
            return b""
        options: Any = {} if etag is None else {"if_match": etag}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        return self._ask(key, lambda: obstore.get(self._store, key, options=options).bytes(), pinned=etag is not None)

    def read_ranges(
        self,
        key: str,
        ranges: Sequence[tuple[int, int]],
        *,
        etag: str | None = None,
        together_bytes: int = _TOGETHER_BYTES,
    ) -> list[Any]:
        """Several ranges, with requests at the same time. Whole, or an error.

        Those that are less than `together_bytes` apart are one request, with what lies between them.
        """
        import obstore

        wanted = [(start, stop) for start, stop in ranges if stop > start]
        starts, ends = [start for start, _ in wanted], [stop for _, stop in wanted]

        def ask() -> list[Any]:
            return list(obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=together_bytes))

        found = iter(self._ask(key, ask, pinned=etag is not None) if wanted else [])
        buffers = [next(found) if stop > start else b"" for start, stop in ranges]
        if etag is not None and wanted:
            self._check(key, etag)  # afterwards: what was read before is of that object then
        for (start, stop), buffer in zip(ranges, buffers):
            if len(buffer) != max(0, stop - start):
                raise DataError(f"ends before byte {stop}", file=self.url_of(key))
        return buffers

    def write(
        self, key: str, data: Any, *, create: bool = False, replaced: ObjectVersion | None = None
    ) -> ObjectVersion:
        """Write an object in one step. `create` refuses to replace one, `replaced` any but that version.

        The refusal is an `ObjectExistsError`. A request whose answer got lost is made again, so that the refusal may be
        caused by the writer itself: who relies on it looks at what is there.
        """
        import obstore

        mode: Any = "create" if create else "overwrite"
        if replaced is not None:
            facts = {"e_tag": replaced.etag, "version": replaced.version}
            mode = {name: fact for name, fact in facts.items() if fact is not None}
        result = self._ask(key, lambda: obstore.put(self._store, key, data, mode=mode, use_multipart=False))
        return ObjectVersion(result["e_tag"], result.get("version"))

    def writer(self, key: str, part_bytes: int = PART_BYTES) -> ObjectWriter:
        """Upload in parts; the object appears with `commit()`. It may have 10,000 parts."""
        return ObjectWriter(self, key, part_bytes)

    def upload(self, key: str, file: BinaryIO, part_bytes: int = PART_BYTES) -> None:
        """An object with what a file has from its position on. It appears whole."""
        with self.writer(key, part_bytes) as writer:
            while data := file.read(_COPIED_BYTES):
                writer.write(data)

    def download(self, key: str, file: BinaryIO, *, etag: str | None = None) -> None:
        """Write the bytes of an object into a file, a part at a time."""
        start, found = 0, self.info(key)
        if found is None:
            raise FileNotFoundError(f"no such object: {shown(self.url_of(key))!r}")
        while start < found.size:
            data = self.read(key, start, min(found.size, start + PART_BYTES), etag=etag or found.etag)
            file.write(data)
            start += len(data)

    def copy(self, key: str, target: str) -> None:
        """Copy within the bucket: by the server, or through this machine what is too long for that."""
        import obstore

        found = self.info(key)
        if found is not None and found.size > _COPIED_BY_SERVER:
            with self.writer(target, 8 * PART_BYTES) as writer:
                self.download(key, cast(BinaryIO, writer), etag=found.etag)
            return
        self._ask(key, lambda: obstore.copy(self._store, key, target))

    def delete(self, key: str, *more: str) -> None:
        """Delete objects; nothing happens if there are none."""
        import obstore

        keys: Any = [key, *more] if more else key
        try:
            self._ask(key, lambda: obstore.delete(self._store, keys))
        except FileNotFoundError:  # S3 does not say so; others do, and leave those behind it
            for each in (key, *more) if more else ():
                self.delete(each)

    @property
    def patient(self) -> Any:
        """Client that makes requests again by itself: uploads in parts are its business."""
        if self._patient_store is None:
            self._patient_store = self._make_patient() if self._make_patient is not None else self._store
        return self._patient_store

    def _check(self, key: str, etag: str) -> None:
        found = self.info(key)
        if found is None or found.etag != etag:
            raise _changed(self.url_of(key), gone=found is None)

    def _ask(self, key: str, ask: Callable[[], Answer], *, pinned: bool = False) -> Answer:
        """The answer to a request, which is made again where that may help."""
        check_clients()
        until, pause = time.monotonic() + (self._retry_seconds or RETRY_SECONDS), _FIRST_PAUSE
        while True:
            try:
                return ask()
            except Exception as error:  # noqa: BLE001 - raised again unless asking again helps
                pause = self._wait(key, error, until, pause, pinned=pinned)
            except BaseException as error:
                raise_for_panic(error, shown(self.url_of(key)))
                raise

    def _wait(self, key: str, error: Exception, until: float, pause: float, *, pinned: bool = False) -> float:
        """Wait before a request is made again, and return the next pause; raise where it is of no use, or too late."""
        self._raise_for(key, error, pinned=pinned)
        where = shown(self.url_of(key))
        # While the interpreter ends, nobody waits for the answer, and the threads that ask would hold it up.
        if time.monotonic() + pause > until or not threading.main_thread().is_alive():
            absent = missing_credentials(scheme_of(self.url), self.options)
            raise ConnectionError(
                f"{where!r}: no whole answer within {self._retry_seconds or RETRY_SECONDS:g} s: {said(error)}; check "
                f"the network and the address, or try again later{absent}"
            ) from None
        now, limit = time.monotonic(), self._retry_seconds or RETRY_SECONDS
        # A program that waits a minute looks like a hung one; many threads wait at once, and one line is enough.
        if now - (until - limit) >= WARN_SECONDS and now >= self._quiet_until:
            self._quiet_until = now + limit
            log.warning("%s: %s; asking again for up to %g s", where, said(error), limit)
        else:
            log.debug("%s: %s; asking again", where, said(error))
        time.sleep(pause * (0.5 + random.random()))
        return min(2 * pause, _LONGEST_PAUSE)

    def _raise_for(self, key: str, error: Exception, *, pinned: bool = False) -> None:
        """Raise what asking again cannot mend, in penstock's words."""
        from obstore import exceptions as known

        where = shown(self.url_of(key))
        status = found[1] if (found := _STATUS.search(str(error))) else None
        if isinstance(error, FileNotFoundError) or status == "404":
            if pinned:
                raise _changed(where, gone=True) from None
            what = f"no such bucket: {self.url!r}" if "NoSuchBucket" in str(error) else f"no such object: {where!r}"
            raise FileNotFoundError(what) from None
        if isinstance(error, (known.AlreadyExistsError, FileExistsError)) or (
            isinstance(error, known.PreconditionError) and not pinned
        ):
            raise ObjectExistsError(f"{where!r} was written by another writer meanwhile") from None
        if isinstance(error, known.PreconditionError):
            raise _changed(where, gone=False) from None
        denied = (known.PermissionDeniedError, known.UnauthenticatedError, PermissionError)
        if isinstance(error, denied) or status in ("401", "403"):  # lists raise a GenericError
            absent = missing_credentials(scheme_of(self.url), self.options)
            raise PermissionError(
                f"{where!r} may not be used with these credentials: {said(error)}; check the keys of the environment"
                f"{absent}"
            ) from None
        if not isinstance(error, known.BaseError):
            raise error
        if status == "507":
            raise OSError(f"{where!r} cannot be written: the store is full ({said(error)}); make room there") from None
        permanent = status is not None and status[0] in "34" and status not in _LATER
        if (
            permanent
            or "builder error" in str(error)
            or isinstance(error, (known.NotSupportedError, NotImplementedError))
        ):
            raise ConnectionError(f"{where!r} cannot be used: {said(error)}") from None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a Bucket cannot be pickled; pass its URL, and call open_bucket there")

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"


class ObjectWriter:
    """An upload that becomes an object with `commit()`, whole, and nothing before; `abort()` leaves nothing.

    A file for whoever writes to it. Holds three parts in memory, two of them on their way: `held_bytes()`.
    A part that is not taken is sent again. As a context manager it commits on success.
    """

    _MOST_ON_THE_WAY = 2

    def __init__(self, bucket: Bucket, key: str, part_bytes: int = PART_BYTES) -> None:
        self._bucket, self.key, self._part_bytes = bucket, key, max(LEAST_PART_BYTES, part_bytes)
        self._upload: Any = None
        self._waiting = bytearray()
        """What may still become an object in one request."""
        self._written = 0
        self._before: ObjectInfo | None = None
        self.closed = self.discarding = False

    @property
    def name(self) -> str:
        return shown(self._bucket.url_of(self.key))

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        return

    def held_bytes(self) -> int:
        if self._upload is None:
            return len(self._waiting)
        return (1 + self._MOST_ON_THE_WAY) * self._part_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.closed:
            raise ValueError(f"{self.name!r} is closed")
        if self.discarding:
            return len(view)
        self._written += len(view)
        if self._upload is None and len(self._waiting) + len(view) < self._part_bytes:
            self._waiting += view
            return len(view)
        if self._upload is None:
            self._open()
        for start in range(0, len(view), _COPIED_BYTES):
            # A copy: the client reads it after `write` has returned, when the caller may use its memory again.
            self._send(bytes(view[start : start + _COPIED_BYTES]))
        return len(view)

    def _open(self) -> None:
        import obstore

        self._before = self._bucket.info(self.key)
        self._upload = obstore.open_writer(
            self._bucket.patient, self.key, buffer_size=self._part_bytes, max_concurrency=self._MOST_ON_THE_WAY
        )
        waiting, self._waiting = self._waiting, bytearray()
        self._send(bytes(waiting))

    def _send(self, data: bytes) -> None:
        with self._naming():
            self._upload.write(data)

    def commit(self) -> None:
        """Make the object visible."""
        if self.closed:
            return
        if self._upload is None:
            self._bucket.write(self.key, bytes(self._waiting))
        else:
            try:
                with self._naming():
                    self._upload.close()
            except (OSError, FileNotFoundError):
                if not self._appeared():
                    raise
        self.closed = True
        self._waiting.clear()

    def _appeared(self) -> bool:
        """True if the object is there although its upload ended with an error: the answer to the last request got
        lost, and the store knows no such upload when it is asked again."""
        try:
            found = self._bucket.info(self.key)
        except OSError:
            return False
        return (
            found is not None
            and found.size == self._written
            and (self._before is None or found.etag != self._before.etag)
        )

    def abort(self) -> None:
        """Give the upload up; after `commit()`, do nothing."""
        if self._upload is not None and not self.closed:
            with contextlib.suppress(Exception):
                self._upload.__exit__(ValueError, ValueError(), None)
        self._upload, self.closed = None, True
        self._waiting.clear()

    close = abort

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again under the object's name
            self._bucket._raise_for(self.key, error)
            raise ConnectionError(f"{self.name!r} cannot be written: {said(error)}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


def _info(found: Mapping[str, Any]) -> ObjectInfo:
    modified = found["last_modified"]
    return ObjectInfo(
        found["path"], found["size"], found.get("e_tag"), int(modified.timestamp() * 1e9), found.get("version")
    )


def _changed(url: str, *, gone: bool) -> ChangedObjectError:
    what = "it was deleted" if gone else "it was replaced by another object"
    return ChangedObjectError(what, file=shown(url))


def part_bytes_within(budget_bytes: int) -> int:
    """Size of the parts of an upload, of which three are in memory: less than a fifth of a budget, if S3 takes such."""
    return min(_LONGEST_PART_BYTES, max(LEAST_PART_BYTES, budget_bytes // 16))


def bucket_has(url: PathLike) -> bool:
    """True if there is an object at a URL, or any below it."""
    bucket, key = open_bucket(url)
    return bucket.info(key) is not None or next(bucket.objects(f"{key}/"), None) is not None
