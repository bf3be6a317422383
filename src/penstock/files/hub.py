"""Files of the Hugging Face Hub, in the cache of `huggingface_hub`.

It keeps to HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Only files are fetched; nothing of a repository is run.
"""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "*.tiktoken"),
)
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?")
_FILES = (".json", ".model", ".tiktoken", ".jinja", ".txt")
_URL = re.compile(
    r"hf://(?:(?P<kind>datasets|spaces|models)/)?(?P<name>(?!datasets/|spaces/|models/)[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)


def is_repository_name(text: str) -> bool:
    """True for what may be a name on the Hub: `owner/name` or `name`, with a `@revision` or without."""
    found = _NAME.fullmatch(text)
    return found is not None and not found["name"].endswith(_FILES)


def fetch_tokenizer(text: str) -> Path:
    """Directory with the tokenizer files of a repository, `owner/name` or `owner/name@revision`."""
    found = _NAME.fullmatch(text)
    assert found is not None
    return fetch_repository(found["name"], TOKENIZER_FILES, revision=found["revision"])


@dataclass(frozen=True, slots=True)
class HubPath:
    """Parts of a `hf://` URL."""

    kind: str
    """`dataset`, `model` or `space`."""
    name: str
    revision: str | None
    path: str


def parse_url(url: str) -> HubPath:
    """The parts of `hf://datasets/owner/name@revision/path/*.parquet`."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ConfigError(f"{url!r} names no repository; expected hf://datasets/owner/name/path")
    kind = (found["kind"] or "models").removesuffix("s")
    return HubPath(kind, found["name"], found["revision"], (found["path"] or "").strip("/"))


def fetch_url(url: str) -> str:
    """Local path or glob of what a `hf://` URL means, in the cache of the Hub's client."""
    place = parse_url(url)
    path = place.path
    patterns = [path, f"{path}/*", path.replace("**/", "")] if path else None
    folder = fetch_repository(place.name, patterns, revision=place.revision, kind=place.kind)
    if glob.has_magic(path):
        return f"{glob.escape(str(folder))}/{path}"
    if not (folder / path).exists():
        raise FileNotFoundError(f"no such file or directory: {url!r}")
    return str(folder / path)


def fetch_repository(
    name: str, patterns: Sequence[str] | None, *, revision: str | None = None, kind: str = "model"
) -> Path:
    """Directory with the files of a repository that match; from the cache, where the Hub cannot be reached."""
    with naming_repository(name, kind, revision):
        import huggingface_hub

        patterns = None if patterns is None else list(patterns)
        return Path(huggingface_hub.snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=patterns))


@contextlib.contextmanager
def naming_repository(name: str, kind: str, revision: str | None) -> Iterator[None]:
    """Gives what the Hub's client raises the name of the repository, and what to do."""
    try:
        from huggingface_hub import constants, errors
    except ImportError as error:
        raise ConfigError(
            f"{name!r} needs huggingface_hub ({error}); install it with: pip install huggingface_hub"
        ) from error
    what = f"the {kind} {name!r} of the Hub"
    place = str(constants.ENDPOINT)
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError(f"{name!r} is no name on the Hub: {error}") from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{what} is gated: accept its terms at {place}/{name}, and log in with `hf auth login` or HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{place} has no repository {name!r}, or it is private; check the name, or log in with `hf auth login` or "
            "HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{what} has no revision {revision!r}; pass a branch, a tag or a commit") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set, and the cache does not have its files; unset it, or go online once"
        else:
            cause = error.__cause__ or error
            reason = (
                f"{place} cannot be reached ({type(cause).__name__}: {cause}), and the cache does not have its files; "
                "go online once, set HF_ENDPOINT to a mirror, or pass a directory with its files"
            )
        raise ConfigError(f"{what} cannot be fetched: {reason}") from error
    except OSError as error:
        raise ConfigError(f"{what} cannot be fetched from {place}: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith(("http", "requests")):  # the Hub's client lets those of its own pass
            raise
        raise ConnectionError(
            f"{what} cannot be fetched: {place} cannot be reached ({type(error).__name__}: {error}); check the "
            "network, or set HF_ENDPOINT to a mirror"
        ) from error
