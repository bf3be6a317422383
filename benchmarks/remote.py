"""Data that lives elsewhere: feeds and scans from a bucket, databases and logs, with peers, in one run.

    python benchmarks/remote.py                          # all four, each with its defaults
    python benchmarks/remote.py --only scan,sql
    python benchmarks/remote.py --only feed -- --repeat 3 --tokens 64e6

`feed` `scan` `sql` and `logs` are `benchmarks/remote_<name>.py`; what follows `--` is passed on to them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PARTS = ("feed", "scan", "sql", "logs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("rest", nargs="*", help="arguments of the parts, after --")
    given = parser.parse_args()
    failed = 0
    for name in given.only.split(","):
        if name not in PARTS:
            parser.error(f"{name!r} is none of {', '.join(PARTS)}")
        print(f"== {name}", flush=True)
        failed |= subprocess.run(
            [sys.executable, Path(__file__).with_name(f"remote_{name}.py"), *given.rest]
        ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
