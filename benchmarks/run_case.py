"""Measured process of the speed suite: one run of one engine and one version of the job.

python benchmarks/run_case.py ENGINE vector|row INPUT OUTPUT FACTS
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engines import ENGINES
from facts import report_facts


def main(name: str, version: str, source: str, output: str, facts: str) -> None:
    engine = next(engine for engine in ENGINES if engine.name == name)
    work = engine.prepare(version, Path(source), Path(output))
    start = time.perf_counter()
    work()
    report_facts(facts, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
