"""Run targets under atheris: `python -m fuzz [NAME ...]`, each for FUZZ_SECONDS (600)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fuzz.harness import CORPUS, TARGETS


def main(names: list[str]) -> int:
    if len(names) == 2 and names[0] == "--one":
        return fuzz(names[1])
    failed = [name for name in names or TARGETS if subprocess.call([sys.executable, "-m", "fuzz", "--one", name])]
    print(f"findings in: {', '.join(failed)}" if failed else "no findings")
    return len(failed)


def fuzz(name: str) -> int:
    import atheris

    with atheris.instrument_imports(include=["penstock", "fuzz"]):
        from fuzz.harness import check, target

        module = target(name)
    found = Path(".fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    seconds = os.environ.get("FUZZ_SECONDS", "600")
    limits = [
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=20",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    places = [f"-artifact_prefix=.fuzz/{name}-", str(found), str(CORPUS / name)]
    atheris.Setup([name, *limits, *places], lambda data: check(module, data))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
