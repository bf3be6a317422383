"""YAML files of pipelines, loaders and assignments."""

from __future__ import annotations

from fuzz.target_jsonl import FOLDER
from penstock.files.documents import read_document, set_value
from penstock.loaders.loader_file import load_config


def run(data: bytes) -> None:
    path = FOLDER / "config.yaml"
    path.write_bytes(data)
    tree = read_document(path, such_as="source: x")
    set_value(tree, "source.a=" + data[:200].decode("utf-8", "replace"), known=["source"])
    load_config(path)
