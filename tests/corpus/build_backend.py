"""Build backend that only returns the metadata of a source distribution: the `PKG-INFO` at its root.

pip requires the metadata from the backend of a package before it downloads the archive, and a real backend may need
compilers. `fetch.py` substitutes this one, so that a download runs no code of the package.
"""

from __future__ import annotations

from email.parser import BytesParser
from pathlib import Path
from typing import Any


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """The name of the `.dist-info` folder that was made. pip calls this in the root of the unpacked archive."""
    said = Path("PKG-INFO").read_bytes()
    headers = BytesParser().parsebytes(said, headersonly=True)
    folder = f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    place = Path(metadata_directory, folder)
    place.mkdir()
    (place / "METADATA").write_bytes(said)
    return folder


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    raise NotImplementedError("this backend is for downloads; nothing is built")
