"""What an examination of a queue has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["Diagnosis", "Finding"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    """"error": batches are lost, torn or doubled, or readers stop; "warning": it may come to that; "note": know it."""
    what: str
    where: str
    remedy: str
    repaired: str | None = None
    """What was done about it; None if nothing was."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a queue."""

    path: Path
    findings: Sequence[Finding]
    files: int = 0
    """How many were read, from the first byte to the last."""
    batches: int = 0
    bytes: int = 0
    file_system: str = ""

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, or what was wrong is mended."""
        return all(finding.severity == "note" or finding.repaired is not None for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "path": str(self.path), "sound": self.sound}
