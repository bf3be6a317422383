"""Control groups of Linux: the groups of this process, innermost first, and their files."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def groups_v2(proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Our cgroup v2 and its parents, innermost first."""
    for line in lines(proc / "self" / "cgroup"):
        if line.startswith("0::"):
            # Next to v1 controllers, the unified hierarchy is mounted one level down.
            root = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
            return _ancestry(root, line[3:])
    return []


def groups_v1(controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Our cgroup v1 of a controller and its parents, innermost first."""
    for line in lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return _ancestry(cgroup / controller, path)
    return []


def lines(path: Path) -> list[str]:
    """Lines of a file; none if it cannot be read."""
    try:
        return content(path).decode("ascii", "replace").splitlines()
    except OSError:
        return []


def content(path: Path) -> bytes:
    """Content of a small file. A file object would give up the interpreter lock ten times, and wait for it again."""
    file = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
    finally:
        os.close(file)


def _ancestry(root: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part]
    # `..` means: outside of what this namespace can see. A container often sees its own group as the root.
    if ".." in parts:
        parts = []
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
