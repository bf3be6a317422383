"""Benchmarks of the pipeline: speed compared with peers, memory against the budget, overhead per batch.

python benchmarks/pipeline.py [--mb 520] [--repeat 3] [--only penstock,polars] [--suite speed,memory,overhead]
                              [--non-ascii 0.15] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from engines import ENGINES
from memory import run_memory
from overhead import run_overhead
from speed import run_speed

from corpus import make_corpus

SUITES = ("speed", "memory", "overhead")


def main() -> None:
    arguments = _arguments()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": _machine()}
    print(report["command"])
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    if {"speed", "memory"} & set(arguments.suite):
        corpus = make_corpus(arguments.mb, arguments.non_ascii)
        report["corpus"] = {"bytes": corpus.bytes, "rows": corpus.rows, "non_ascii": arguments.non_ascii}
        if "speed" in arguments.suite:
            if not arguments.only or "penstock" in arguments.only:
                # Once on a machine, and no part of any figure; the budget of the suite is too small to compile in.
                compiling = "from penstock.sources.plain_json import KERNELS; KERNELS.wait()"
                subprocess.run([sys.executable, "-c", compiling], check=True)
            report["speed"] = run_speed(corpus, arguments.repeat, arguments.only)
        if "memory" in arguments.suite:
            report["memory"] = run_memory(corpus)
    if "overhead" in arguments.suite:
        report["overhead"] = run_overhead()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed, memory and overhead of the penstock engine.")
    parser.add_argument("--mb", type=float, default=520, help="size of the corpus in millions of bytes (520)")
    parser.add_argument("--non-ascii", type=float, default=0.15, help="share of documents that are not ASCII (0.15)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case of the speed suite (3)")
    parser.add_argument("--only", type=_names, default=[], help="engines of the speed suite, with commas")
    parser.add_argument("--suite", type=_names, default=list(SUITES), help="suites, with commas (all three)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    arguments = parser.parse_args()
    _check_names(parser, arguments.only, [engine.name for engine in ENGINES])
    _check_names(parser, arguments.suite, SUITES)
    return arguments


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _check_names(parser: argparse.ArgumentParser, given: list[str], known: list[str] | tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(known)}")


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": round(psutil.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
