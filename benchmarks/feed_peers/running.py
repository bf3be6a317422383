"""Runner for the cases of `feed.py`, each in a separate process, with an interpreter that has its package."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from feed_peers import Case

_SCRIPT = Path(__file__).resolve().parents[1] / "feed.py"


@dataclass(slots=True)
class Runs:
    """Case with its interpreter and its runs so far, or the problem that prevents them."""

    case: Case
    python: str = sys.executable
    version: str = ""
    runs: list[Any] = field(default_factory=list)
    problem: str = ""

    def facts(self, name: str) -> list[Any]:
        return [run.facts[name] for run in self.runs]

    def middle(self, name: str) -> float:
        return float(median(self.facts(name)))

    @property
    def peak_mb(self) -> float:
        return float(median(run.peak_bytes for run in self.runs)) / 1e6

    @property
    def others(self) -> float:
        return float(median(run.others_cores for run in self.runs))


class Runner:
    """Runs cases, each with the first interpreter that has its package."""

    def __init__(self, options: argparse.Namespace) -> None:
        from corpus import DATA

        self.data, self.repeat, self.only = DATA, options.repeat, options.only.split(",") if options.only else []
        self.named = dict(given.split("=", 1) for given in options.python if "=" in given)
        project = _SCRIPT.parents[1]
        found = [*project.glob(".venv*/bin/python"), *DATA.glob("*/bin/python")]
        given = [given for given in options.python if "=" not in given]
        self.pythons = list(dict.fromkeys([*given, sys.executable, *map(str, sorted(found))]))
        self._versions: dict[tuple[str, str], str] = {}

    def choose(self, cases: Iterable[Case]) -> list[Runs]:
        """Selected cases; a peer that is not installed gets a problem instead of runs."""
        chosen = []
        for case in cases:
            if self.only and not any(case.name.startswith(name) for name in self.only):
                continue
            pythons = [self.named[case.peer]] if case.peer in self.named else self.pythons
            if case.kind in ("own", "reference"):
                pythons = [sys.executable]
            there = [(python, self._version(python, case.package)) for python in pythons]
            python, version = next(((p, v) for p, v in there if v), ("", ""))
            problem = "" if python else f"{case.package} is not installed (looked in {', '.join(pythons)})"
            chosen.append(Runs(case, python, version, problem=problem))
        return chosen

    def run(self, runs: Runs, what: str, arguments: Any, note: str = "", timeout: float = 900) -> None:
        """Run a case once more; a failure ends its runs."""
        from measure import CaseError

        if runs.problem:
            return
        try:
            runs.runs.append(self.measured(runs.python, what, arguments, timeout))
            print(f"  {runs.case.name:28} {note}{_short(runs.runs[-1].facts)}", flush=True)
        except CaseError as error:
            runs.problem = f"failed: {error}"
            print(f"  {runs.case.name:28} {runs.problem}", flush=True)

    def measured(self, python: str, what: str, arguments: Any, timeout: float = 900) -> Any:
        from measure import measure
        from speed import QUIET

        quiet = {**QUIET, "TOKENIZERS_PARALLELISM": "true", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        command: list[str | Path] = [python, _SCRIPT, "--case", what, json.dumps(arguments)]
        return measure(command, env=quiet, timeout=timeout)

    def _version(self, python: str, package: str) -> str:
        if (python, package) not in self._versions:
            code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
            try:
                asked = subprocess.run([python, "-c", code, package], capture_output=True, text=True, timeout=60)
                version = asked.stdout.strip()
            except OSError:
                version = ""
            self._versions[python, package] = version
        return self._versions[python, package]


def _short(facts: dict[str, Any]) -> str:
    if "tokens_per_second" in facts:
        return f"{median(facts['tokens_per_second']) / 1e6:9.1f} M tokens/s"
    return f"{facts['seconds']:9.3f} s"
