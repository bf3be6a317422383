"""Files on web servers, read by ranges: each answer must be of the file that was listed.

A server that takes no ranges, or does not say how long its files are, is read by `fetch`, which copies.
"""

from __future__ import annotations

import email.utils
import functools
import logging
import os
import random
import re
import time
from typing import Any

from penstock.errors import ChangedFileError, DataError
from penstock.files import objects
from penstock.files.filesystems import answered, naming_url, open_filesystem, shown, web_info
from penstock.files.ranges.remote_file import RemoteFile

log = logging.getLogger(__name__)

_LATER = (408, 425, 429)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_TOTAL = re.compile(r"bytes \d+-\d+/(\d+)")


def find_web_file(url: str) -> RemoteFile | None:
    """The file at a URL; None if its server does not read ranges of it, or compresses it on the way."""
    filesystem, path = open_filesystem(url)
    found = web_info(filesystem, path, url)
    if found is None:
        raise FileNotFoundError(f"no such file or directory: {shown(url)!r}")
    size = found.get("size")
    if found.get("partial") is False or not isinstance(size, int) or not size or not _sends_ranges(url):
        return None
    time_of = email.utils.parsedate_to_datetime(found["Last-Modified"]) if "Last-Modified" in found else None
    modified = int(time_of.timestamp() * 1e9) if time_of is not None else 0
    return RemoteFile(url, "", size, _mark(found), modified)


def _sends_ranges(url: str) -> bool:
    """True if a server answers a request for the first byte with that byte. Many do without saying so."""
    from fsspec.asyn import sync  # type: ignore[import-untyped]

    web, path = _opened(url, os.getpid())
    with naming_url(url):
        status, _, data = answered(url, lambda: sync(web.loop, _get, web, path, 0, 1))
    return bool(status == 206 and len(data) == 1)


@functools.lru_cache(maxsize=64)
def _opened(url: str, process: int) -> tuple[Any, str]:
    filesystem, path = open_filesystem(url)
    return filesystem.handler.fs, path


def read_web(url: str, start: int, stop: int, size: int, mark: str | None) -> bytes:
    """A range of a file of that size and mark: its ETag, or the time of its last change."""
    import aiohttp
    from fsspec.asyn import sync

    web, path = _opened(url, os.getpid())
    until, pause = time.monotonic() + objects.RETRY_SECONDS, _FIRST_PAUSE
    while True:
        try:
            status, headers, data = sync(web.loop, _get, web, path, start, stop)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}".replace(url, shown(url))
        else:
            if status == 206:
                _check(url, headers, size, mark)
                if len(data) == stop - start:
                    return bytes(data)
                why = f"{len(data)} of {stop - start} bytes came"
            elif status in (404, 410):
                raise ChangedFileError("it was deleted", file=shown(url))
            elif status in (401, 403, 407):
                raise PermissionError(f"{shown(url)!r} may not be read: the server answered {status}")
            elif status == 416:
                raise ChangedFileError(f"it had {size} bytes and is shorter now", file=shown(url))
            elif status == 200:
                raise DataError(f"the server sent all of it instead of bytes {start} to {stop}", file=shown(url))
            elif status < 500 and status not in _LATER:
                raise ConnectionError(f"{shown(url)!r} cannot be read: the server answered {status}")
            else:
                why = f"the server answered {status}"
        if time.monotonic() + pause > until:
            raise ConnectionError(
                f"{shown(url)!r}: no whole answer within {objects.RETRY_SECONDS:g} s: {why}; check the network and the "
                "address, or try again later"
            ) from None
        log.debug("%s: %s; asking again", shown(url), why)
        time.sleep(pause * (0.5 + random.random()))
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _get(web: Any, path: str, start: int, stop: int) -> tuple[int, Any, bytes]:
    session = await web.set_session()
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    async with session.get(web.encode_url(path), headers=headers) as answer:
        if answer.status != 206:
            return answer.status, answer.headers, b""
        return answer.status, answer.headers, await answer.read()


def _check(url: str, headers: Any, size: int, mark: str | None) -> None:
    """Refuse an answer of another file than the one that was listed."""
    total = _TOTAL.fullmatch(headers.get("Content-Range", ""))
    if total is not None and int(total[1]) != size:
        raise ChangedFileError(f"it had {size} bytes and has {total[1]} now", file=shown(url))
    now = _mark(headers)
    if mark is not None and now is not None and now != mark:
        raise ChangedFileError("another file took its place", file=shown(url))


def _mark(headers: Any) -> str | None:
    found = headers.get("ETag") or headers.get("Last-Modified")
    return str(found) if found is not None else None
