"""A job has the output of a local run, byte for byte: rows, order, quarantine, counts, shards, errors."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests import job_cases
from tests.job_runs import Ended, differences, files_in, job, run

from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.engines.executor import InProcess, Outcome
from penstock.errors import SchemaError
from penstock.sinks import JsonlSink
from penstock.sources import CsvSource, ParquetSource
from penstock.transforms import ByteTokenizer


def by_stage(ended: Ended) -> dict[bytes, list[bytes]]:
    """Quarantined rows of each stage, in order, taken out of the files."""
    lines = ended.files.pop("bad.jsonl", b"").splitlines()
    return {
        stage: [line for line in lines if stage in line]
        for stage in {line.split(b'"stage":')[1].split(b',"reason"')[0] for line in lines}
    }


def check_case(seed: int, base: Path) -> None:
    """One random pipeline by both engines."""
    rng = random.Random(seed)
    (base / "in").mkdir(parents=True)
    source = rng.choice(job_cases.INPUTS)(rng, base / "in")
    steps = rng.sample(list(job_cases.STEPS), rng.choice([0, 1, 1, 2, 3]))
    sink = job_cases.sink_of(rng, rng.choice(job_cases.SINKS))
    config: dict[str, Any] = {"on_error": rng.choice(["raise", "skip", "quarantine", "quarantine"])}
    if config["on_error"] != "raise" and rng.random() < 0.2:
        config["max_failures"] = rng.choice([0, 2, 10])
    engine = job(rng.choice([50, 300, 1500, 100_000]), partitions=rng.choice([None, 1, 3]))

    def make(out: Path) -> Any:
        return source(), [job_cases.STEPS[step]() for step in steps], sink(out)

    local = run(make, base, config=config)
    other = run(make, base, engine=engine, config=config)
    if local.error and other.error and SchemaError.__name__ in (local.error[0], other.error[0]):
        return  # the sink refuses the columns: a task at its first rows, a local run maybe after bad ones
    if {*steps} & (job_cases.KEYED | job_cases.ORDERED):
        # Rows that are rejected after stages that need order have no numbers, so they are in order stage by stage.
        if local.error is not None and other.error is not None:
            local.error, other.error = (local.error[0],), (other.error[0],)
            local.files.pop("bad.jsonl", None)
            other.files.pop("bad.jsonl", None)
        assert by_stage(local) == by_stage(other)
    assert not differences(local, other), f"{seed}: {steps}, {config}, {source}"


@settings(max_examples=40)
@example(3552025)
@given(st.integers(0, 1 << 32))
def test_a_job_has_the_output_of_a_local_run(seed: int) -> None:
    base = Path(tempfile.mkdtemp(prefix="penstock-job-"))
    try:
        check_case(seed, base)
    finally:
        shutil.rmtree(base)


def test_a_damaged_file_has_the_counts_of_a_local_run(tmp_path: Path) -> None:
    pq.write_table(job_cases.table_of(random.Random(4), 90), tmp_path / "in.parquet", row_group_size=50)
    job_cases.damage(tmp_path / "in.parquet")

    def make(out: Path) -> Any:
        return ParquetSource(tmp_path / "in.parquet"), [], JsonlSink(out / "made.jsonl")

    local = run(make, tmp_path, config={"on_error": "quarantine"})
    assert len(local.files["bad.jsonl"].splitlines()) == 1
    assert local.counts["rows_in"] == local.counts["rows_out"] + 1
    assert not differences(local, run(make, tmp_path, engine=job(300), config={"on_error": "quarantine"}))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_file_whose_header_cannot_be_read_is_left_out_as_by_a_local_run(tmp_path: Path, ending: str) -> None:
    for number, header in enumerate(["a,b", "a,a", "a,b"]):
        data = f"{header}\n1,2\n3,4\n".encode()
        (tmp_path / f"in-{number}.csv{ending}").write_bytes(gzip.compress(data) if ending else data)

    def make(out: Path) -> Any:
        return CsvSource(sorted(tmp_path.glob("in-*"))), [], JsonlSink(out / "made.jsonl")

    for policy in ("raise", "skip", "quarantine"):
        local = run(make, tmp_path, config={"on_error": policy})
        assert local.counts.get("rows_out") == (None if policy == "raise" else 4)
        assert not differences(local, run(make, tmp_path, engine=job(5), config={"on_error": policy}))


_NAMES = ["anna", "bert", "carl", "dora", "emil", "frida", "gero"]


class LastFirst(InProcess):
    """Executor whose tasks end in the opposite order."""

    slots = room = 99

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        self._waiting.rotate(1)
        return super().wait(timeout_seconds)


def test_files_of_a_prepared_store_do_not_depend_on_the_order_in_which_tasks_end(tmp_path: Path) -> None:
    good = "the story of a road and a river that have been with us: " + " ".join(
        f"{a}{b}" for a in _NAMES for b in _NAMES
    )
    texts = [*["x " * 60] * 5, *["one two", good] * 9]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = []
    for engine in (None, job(200), job(200, LastFirst)):
        out = tmp_path / str(len(made)) / "a.store"
        recipe = Recipe(tokenizer=ByteTokenizer(), filters=["gopher"], dedup=["exact"])
        prepare(str(tmp_path / "in.jsonl"), out, recipe, engine=engine)
        made.append(files_in(out.parent))
    assert len(json.loads(made[0]["a.store/losses.json"])["rows"]) == 3
    assert made[1] == made[0]
    assert made[2] == made[0]
