"""What a measured process says about itself before it ends. Standard library only: it runs inside every engine."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any


def report_facts(path: str | Path, **facts: Any) -> None:
    """Called by the case as its last act; adds the high-water mark of its own memory, which no polling can miss."""
    Path(path).write_text(json.dumps({**facts, "own_peak_bytes": own_peak_bytes()}))


def own_peak_bytes() -> int:
    """The most resident memory this process ever had."""
    try:
        # ru_maxrss would not do: on Linux it survives exec, so it starts from the size of the parent.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
