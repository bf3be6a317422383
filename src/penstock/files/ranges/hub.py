"""Files of the Hugging Face Hub, read by ranges, at the commit that a revision means when it is listed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from penstock._optional import require
from penstock.errors import ChangedFileError, DataError
from penstock.files.filesystems import ANSWER_SECONDS, matches_parts
from penstock.files.hub import naming_repository, parse_url
from penstock.files.listing import FoundFiles
from penstock.files.ranges.catalog import chosen_names
from penstock.files.ranges.remote_file import RemoteFile

_MAGIC = re.compile(r"[*?\[]")


def find_hub_files(url: str, suffixes: Sequence[str]) -> FoundFiles | None:
    """The files that a `hf://` URL means; None where the Hub is not to be asked (HF_HUB_OFFLINE)."""
    place = parse_url(url)
    with naming_repository(place.name, place.kind, place.revision):
        from huggingface_hub import HfApi, constants, errors

        if constants.HF_HUB_OFFLINE:
            return None
        api, kind = HfApi(endpoint=constants.ENDPOINT), place.kind
        commit = api.repo_info(place.name, revision=place.revision, repo_type=kind).sha
        parts = place.path.split("/") if place.path else []
        fixed = list(takewhile(lambda part: not _MAGIC.search(part), parts))
        above = "/".join(fixed if len(fixed) < len(parts) else fixed[:-1])
        try:
            listed = api.list_repo_tree(place.name, above or None, recursive=True, revision=commit, repo_type=kind)
            found = {one.path: one for one in listed if hasattr(one, "size") and _is_shown(one.path)}
        except errors.EntryNotFoundError:
            found = {}
    if place.path in found:
        chosen, base = [place.path], fixed[:-1]
    elif len(fixed) < len(parts):
        chosen, base = [path for path in found if matches_parts(path.split("/"), parts)], fixed
        if not chosen:
            raise FileNotFoundError(f"no file matches {url!r}")
    else:
        inside, base = [path for path in found if path.split("/")[: len(parts)] == parts], parts
        if not inside:
            raise FileNotFoundError(f"no such file or directory: {url!r}")
        chosen = chosen_names(inside, suffixes, url)
    chosen.sort(key=lambda path: path.split("/"))
    root = f"hf://{place.kind}s/{place.name}@{commit}"
    files = [RemoteFile(root, path, found[path].size, _mark(found[path])) for path in chosen]
    return FoundFiles(files, (place.name, *base), [(place.name, *path.split("/")[:-1]) for path in chosen])


def read_hub(file: RemoteFile, start: int, stop: int) -> bytes:
    """A range of a file. The Hub's own client makes the request, and makes it again where that may help."""
    from huggingface_hub import errors, hf_hub_url

    client: Any = require("huggingface_hub.utils", "hf")
    place = parse_url(file.url)
    url = hf_hub_url(place.name, place.path, repo_type=place.kind, revision=place.revision)
    headers = {**client.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    try:
        answer = client.http_backoff("GET", url, headers=headers, follow_redirects=True, timeout=ANSWER_SECONDS)
        client.hf_raise_for_status(answer)
    except errors.EntryNotFoundError:
        raise ChangedFileError("it was deleted", file=str(file)) from None
    except Exception as error:  # its client raises what its own client raises
        raise ConnectionError(f"{str(file)!r} cannot be read: {error}") from error
    if answer.status_code == 206:
        return bytes(answer.content)
    if len(answer.content) != file.size:
        raise DataError(f"the Hub sent {len(answer.content)} bytes, and {file.size} were listed", file=str(file))
    return bytes(answer.content[start:stop])


def _mark(found: Any) -> str | None:
    """Hash of the content: of a large file SHA-256, of others that of git."""
    large = getattr(found, "lfs", None)
    mark = getattr(large, "sha256", None) or getattr(found, "blob_id", None)
    return str(mark) if mark is not None else None


def _is_shown(path: str) -> bool:
    return not any(part.startswith(".") for part in path.split("/"))
