"""Facts that a measured process reports before it exits. Standard library only: it runs inside every engine."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any


def report_facts(path: str | Path, **facts: Any) -> None:
    """Write the facts, as the last call of a case; adds the peak memory of the process, which polling could miss."""
    Path(path).write_text(json.dumps({**facts, "own_peak_bytes": own_peak_bytes()}))


def own_peak_bytes() -> int:
    """Peak resident memory of this process."""
    try:
        # Not ru_maxrss: on Linux it survives exec, so it starts at the size of the parent.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
