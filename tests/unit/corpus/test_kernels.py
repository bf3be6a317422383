"""Kernels are compiled when first called, and need numba only then."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.corpus.dedup.key_table import KeyTable
from penstock.corpus.dedup.stages import MinHashDedup
from penstock.corpus.kernels import plain_function
from penstock.corpus.quality.filters import quality_filters

ENTRIES = {
    "quality.words": ["split_rows"],
    "quality.gopher": ["gopher_quality", "gopher_repetition"],
    "quality.c4": ["c4_lines", "row_sentences"],
    "quality.fineweb": ["fineweb_quality"],
    "dedup.key_table": ["_add_rows"],
    "dedup.minhash": ["row_minima"],
}
words = st.sampled_from(
    ["the", "don't", "U.S.", "http://a.org/x", "...", "…", "漢字", "😀", "é", "[1]", "{", "JavaScript"]
)
texts = st.lists(words | st.text(max_size=5) | st.sampled_from(["\n", "\n\n", " ", "•"]), max_size=30).map(" ".join)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True).stdout


def test_exact_deduplication_needs_no_numba_and_the_others_say_how_to_install_it_when_used() -> None:
    out = run("""
        import sys
        sys.modules["numba"] = None
        import pyarrow as pa
        from penstock.transforms import ExactDedup, GopherQuality, MinHashDedup
        batch = pa.record_batch({"text": ["one", "two", "one"]})
        for stage in (GopherQuality(), ExactDedup(), MinHashDedup()):
            try:
                print(stage.transform(batch).num_rows)
            except ModuleNotFoundError as error:
                print(error.name, "pip install 'penstock[fast]'" in str(error))
    """)
    assert out == "numba True\n2\nnumba True\n"


def test_importing_filters_and_dedups_loads_no_numba() -> None:
    assert run("import sys, penstock.transforms.filtering; print('numba' in sys.modules)") == "False\n"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every entry runs compiled and as plain Python, on copies of its arguments, and has to agree."""
    compared: set[str] = set()

    def doubled(name: str, entry: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            copies = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
            expected = entry.dispatcher()(*args) if hasattr(entry, "dispatcher") else entry(*args)
            found = plain_function(entry)(*copies)
            for one, other in zip(_listed(expected), _listed(found), strict=True):
                np.testing.assert_array_equal(one, other)
            for one, other in zip(args, copies, strict=True):
                np.testing.assert_array_equal(one, other) if isinstance(one, np.ndarray) else None
            compared.add(name)
            return expected

        return call

    for module, names in ENTRIES.items():
        home = importlib.import_module(f"penstock.corpus.{module}")
        for name in names:
            monkeypatch.setattr(home, name, doubled(name, getattr(home, name)))
    return compared


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(texts, min_size=1, max_size=4))
def test_plain_python_and_machine_code_give_the_same_filters(both: set[str], rows: list[str]) -> None:
    batch = pa.record_batch({"text": [*rows, " ".join(rows)]})
    for stage in quality_filters("gopher,c4,fineweb"):
        stage.transform(batch)
    assert both == {name for module, names in ENTRIES.items() if module.startswith("quality") for name in names}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(texts, min_size=1, max_size=6))
def test_plain_python_and_machine_code_give_the_same_duplicates(both: set[str], rows: list[str]) -> None:
    MinHashDedup().transform(pa.record_batch({"text": [*rows, *rows]}))
    keys = np.array([[[max(hash(row) & 0xFFFF, 1) << 47], [len(row) + 1 << 47]] for row in rows], np.uint64)
    table = KeyTable(1)
    table.grow_for(keys.size)
    table.add_rows(keys, None)
    assert both == {name for module, names in ENTRIES.items() if module.startswith("dedup") for name in names}


def test_a_few_rows_are_filtered_without_loading_numba(tmp_path: Path) -> None:
    out = run(f"""
        import os, sys
        os.environ["NUMBA_CACHE_DIR"] = {str(tmp_path)!r}
        import pyarrow as pa
        from penstock.transforms import ExactDedup, GopherQuality
        few = pa.record_batch({{"text": ["one two", "one two", "the end"]}})
        made = [stage.transform(few).num_rows for stage in (GopherQuality(min_words=3), ExactDedup())]
        print(made, "numba" in sys.modules, os.listdir({str(tmp_path)!r}))
    """)
    assert out == "[0, 2] False []\n"


def test_machine_code_is_found_by_another_installation(tmp_path: Path) -> None:
    """The cache is named by the content of the sources: paths and times of files do not matter."""
    package = Path(str(importlib.import_module("penstock").__file__)).parent
    code = """
        import logging, numpy as np
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        from penstock.corpus.dedup import key_table
        table, keys = key_table.KeyTable(1), np.arange(1, 40_001, dtype=np.uint64).reshape(-1, 2, 1) << np.uint64(40)
        table.grow_for(keys.size)
        table.add_rows(keys, None)
        print(sum(key_table._add_rows.stats.cache_hits.values()))
    """
    results = []
    for place in ("one", "two"):
        shutil.copytree(package, tmp_path / place / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path / place)}
        command = [sys.executable, "-c", dedent(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        results.append((done.stdout.split(), "numba compiles" in done.stderr))
    assert results == [(["0"], True), (["1"], False)]
