"""Kernels are compiled when first called, and need numba only then."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True).stdout


def test_filters_and_dedups_are_made_without_numba_and_say_how_to_install_it_when_used() -> None:
    out = run("""
        import sys
        sys.modules["numba"] = None
        import pyarrow as pa
        from penstock.transforms import ExactDedup, GopherQuality, MinHashDedup
        batch = pa.record_batch({"text": ["one", "two", "one"]})
        for stage in (GopherQuality(), ExactDedup(), MinHashDedup()):
            try:
                stage.transform(batch)
            except ModuleNotFoundError as error:
                print(error.name, "pip install 'penstock[fast]'" in str(error))
    """)
    assert out == "numba True\n" * 3


def test_importing_filters_and_dedups_loads_no_numba() -> None:
    assert run("import sys, penstock.transforms.filtering; print('numba' in sys.modules)") == "False\n"
