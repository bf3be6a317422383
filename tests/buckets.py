"""Objects of a bucket as a test wants to see them."""

from __future__ import annotations

from pathlib import Path

from penstock.files.objects import open_bucket


def names_in(url: str) -> list[str]:
    """Every object below a URL, hidden ones too."""
    bucket, prefix = open_bucket(url)
    return [info.key[len(prefix) + 1 :] for info in bucket.objects(prefix)]


def download(url: str, folder: Path) -> Path:
    """A copy of the objects below a URL, as other tools would make it."""
    bucket, prefix = open_bucket(url)
    for name in names_in(url):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(bucket.read(f"{prefix}/{name}")))
    return folder


def upload(folder: Path, url: str) -> None:
    """Put the files below a folder into a bucket, as other tools would."""
    bucket, prefix = open_bucket(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            bucket.write(f"{prefix}/{file.relative_to(folder).as_posix()}", file.read_bytes())
