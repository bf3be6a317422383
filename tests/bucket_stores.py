"""Stores in a bucket for tests: uploaded from disk, with checksums of their pieces or as other tools do it."""

from __future__ import annotations

from pathlib import Path

from penstock.files.objects import open_bucket
from penstock.store.home import BucketHome
from penstock.store.manifest import read_manifest, version_numbers
from penstock.store.piece_sums import write_sums


def upload_store(path: Path, url: str, *, sums: bool = True) -> str:
    """The store at a path, at a URL; the manifest comes last."""
    bucket, prefix = open_bucket(url)
    for version in version_numbers(path) if sums else ():
        for entry in read_manifest(path, version).shards:
            write_sums(BucketHome(url), entry, path / entry.file, path / entry.index_file)
    files = [file for folder in ("shards", "versions") for file in sorted((path / folder).iterdir())]
    for file in [*files, path / "manifest.json"]:
        bucket.write(f"{prefix}/{file.relative_to(path)}", file.read_bytes())
    return url
