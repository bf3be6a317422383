"""Checks of the nodes of a cluster, before work starts: the same packages, and the same files at the same paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import is_remote, shown
from penstock.files.remote import path_of

ABSENT, VERSION, EXTRA, MARKER, FILE, WORK, SILENT = "absent", "version", "extra", "marker", "file", "work", "silent"
_MOST_NODES = 5
"""Nodes that a message names."""
_REMEDIES = {
    ABSENT: "install it there (pip install 'penstock[ray]=={penstock}'), or let Ray do it: "
    "runtime_env={{'pip': ['penstock[ray]=={penstock}']}}",
    VERSION: "output is the same bytes on all nodes only with the same versions: install those of this process "
    "there ({all}), or let Ray do it: runtime_env={{'pip': [...]}}",
    EXTRA: "install what is missing on these nodes, or let Ray do it: runtime_env={{'pip': [...]}}",
    MARKER: "all nodes need the same job directory: put it on a file system that every node mounts at this path, or "
    "into a bucket (s3://...)",
    FILE: "all nodes read the same input: put it on a file system that every node mounts at this path, or into a "
    "bucket (s3://...)",
    WORK: "modules that the functions of the pipeline import must be on all nodes: install them, or let Ray bring "
    "them: runtime_env={{'working_dir': '.'}} or {{'py_modules': [...]}}",
    SILENT: "look at the node (`ray status`, its raylet.out), or remove it from the cluster",
}


@dataclass(frozen=True, slots=True)
class NodeFault:
    """Something that a node lacks."""

    kind: str
    detail: str


def versions_here() -> dict[str, str]:
    """Versions that must be the same on all nodes."""
    return output_versions() | {"ray": importlib.metadata.version("ray")}


def output_versions() -> dict[str, str]:
    """Versions that the bytes of an output may depend on. Patch releases of Python do not matter."""
    found = {"penstock": sys.modules["penstock"].__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    return found | {package: importlib.metadata.version(package) for package in ("pyarrow", "numpy")}


def whole_paths(checks: Mapping[str, Any]) -> dict[str, Any]:
    """Checks without relative paths, which nodes would look for in another directory."""
    marker, files = checks.get("marker"), checks.get("files", ())
    return {
        "marker": [_whole(marker[0]), marker[1]] if marker else None,
        "files": [[_whole(path), size] for path, size in files],
    }


def _whole(path: str) -> str:
    return path if is_remote(path) else str(Path(path).expanduser().absolute())


def faults_here(checks: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[NodeFault]:
    """Everything in which this node differs from the driver's.

    `checks` has a `marker`, the path of a file and the text that the driver wrote into it, and `files`, paths of input
    with their sizes.
    """
    mine = versions_here()
    if differ := [f"{name} {mine[name]} instead of {there}" for name, there in versions.items() if mine[name] != there]:
        yield NodeFault(VERSION, ", ".join(differ))
    if checks.get("marker"):
        path, expected = checks["marker"]
        yield from _faults_of(MARKER, path, lambda: _read(path) == expected, "holds something else")
    for path, size in checks.get("files", ()):
        if size is not None:
            yield from _faults_of(FILE, path, lambda: _size(path) == size, f"has not {size:,} bytes")  # noqa: B023


def _faults_of(kind: str, path: str, is_same: Any, otherwise: str) -> Iterator[NodeFault]:
    try:
        if not is_same():
            yield NodeFault(kind, f"{shown(path)} {otherwise}")
    except ModuleNotFoundError as error:
        yield NodeFault(EXTRA, str(error))
    except FileNotFoundError:
        yield NodeFault(kind, f"{shown(path)} does not exist")
    except Exception as error:  # noqa: BLE001 - whatever it is, the node cannot read it
        yield NodeFault(kind, f"{shown(path)} cannot be read: {error}")


def _read(path: str) -> str:
    return path_of(path).read_bytes().decode(errors="replace")


def _size(path: str) -> int:
    with (place := path_of(path)).open(*() if hasattr(place, "url") else ("rb",)) as file:
        return int(file.seek(0, os.SEEK_END))


def fault_of_import(error: BaseException) -> NodeFault:
    """Fault of a node that cannot load the functions of a pipeline."""
    return NodeFault(WORK, f"{type(error).__name__}: {error}")


def error_of(faults: Sequence[tuple[str, NodeFault]], versions: Mapping[str, str]) -> ConfigError:
    """One error for the faults of all nodes: each kind with its nodes and the remedy."""
    words = {**versions, "all": ", ".join(f"{name} {version}" for name, version in versions.items())}
    kinds: dict[str, dict[str, list[str]]] = {}
    for node, fault in faults:
        kinds.setdefault(fault.kind, {}).setdefault(fault.detail, []).append(node)
    parts = []
    for kind, details in kinds.items():
        said = "; ".join(f"{detail} on {_listed(nodes)}" for detail, nodes in details.items())
        parts.append(f"{_BEGINNINGS[kind]}{said}. To mend it: {_REMEDIES[kind].format(**words)}.")
    return ConfigError("the cluster is not ready for this job.\n" + "\n".join(parts))


_BEGINNINGS = {
    ABSENT: "penstock cannot be imported: ",
    VERSION: "Other versions than here: ",
    EXTRA: "A package is missing: ",
    MARKER: "A path is not shared: ",
    FILE: "An input file is not shared: ",
    WORK: "The functions of the pipeline cannot be loaded: ",
    SILENT: "A node does not answer: ",
}


def _listed(nodes: Sequence[str]) -> str:
    more = len(nodes) - _MOST_NODES
    return ", ".join(nodes[:_MOST_NODES]) + (f" and {more:,} more nodes" if more > 0 else "")
