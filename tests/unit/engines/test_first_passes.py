"""Types, fits and columns of functions found by tasks: the same output as a local run, and what `explain` says."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.job_cases import Every
from typer.testing import CliRunner

import penstock
from penstock import Pipeline, PipelineConfig
from penstock.cli.main import app
from penstock.engines.driver import JobOptions
from penstock.engines.executor import InProcess, Outcome
from penstock.engines.run import JobEngine, RayEngine
from penstock.errors import ConfigError, FailureBudgetError, PenstockError, ResumeError, StageError, UnfinishedJobError
from penstock.pipeline.stages import Transform
from penstock.sources import CsvSource, JsonlSource
from penstock.transforms import ExactDedup, Filter, Map, MinMaxScaler, OneHotEncoder, OrdinalEncoder, StandardScaler

SPLITS = JobEngine(options=JobOptions(split_bytes=120, partitions=3))


def longer(row: dict[str, Any]) -> dict[str, Any]:
    if row["kind"] == "bad":
        raise ValueError("bad")
    return {**row, "size": len(row["kind"] or "") + 0.1}


class Mean(Transform):
    """A transform of a user: it is fitted, and cannot be fitted in parts."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def fit(self, batches: Any) -> None:
        values = [value for batch in batches for value in batch["x"].to_pylist() if value is not None]
        self.mean = sum(values) / max(1, len(values))

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.mean is not None
        return batch.append_column("mean", pa.array([self.mean] * batch.num_rows, pa.float64()))

    def __repr__(self) -> str:
        return "Mean()"


STEPS: dict[str, Any] = {
    "scale": lambda: StandardScaler(["x", "n"]),
    "range": lambda: MinMaxScaler("n"),
    "one hot": lambda: OneHotEncoder("kind", unknown="ignore"),
    "ordinal": lambda: OrdinalEncoder("kind", unknown=-1),
    "function": lambda: Map(longer),
    "filter": lambda: Filter("n is None or n < 80"),
    "dedup": lambda: ExactDedup("n"),
    "mean": Mean,
    "every": Every,
}
FITTED = ("scale", "range", "one hot", "ordinal", "mean")
plans = st.lists(st.sampled_from(list(STEPS)), max_size=5, unique=True).filter(lambda names: _makes_sense(names))


def _makes_sense(names: list[str]) -> bool:
    """An encoder takes its column away; after a deduplication the error of a function that learns names a row more."""
    before = names[: names.index("function")] if "function" in names else []
    return not ({"one hot", "ordinal"} <= set(names) or {"one hot", "ordinal", "dedup"} & set(before))


def write_rows(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(rng.choice([1, 3])):
        lines = []
        for _ in range(rng.choice([1, 20, 60])):
            row: dict[str, Any] = {"x": rng.choice([None, rng.gauss(1e6, 1), 1, 1e-9]), "n": rng.randrange(99)}
            row["kind"] = rng.choice(["a", "bb", "ccc", None] + (["bad"] if rng.random() < 0.1 else []))
            lines.append(json.dumps(row))
            if rng.random() < 0.05:
                lines.append(rng.choice(["", "{bad", '{"x": "\\ud800", "other": 1}']))
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


def outcome(folder: Path, names: list[str], on_error: Any, engine: Any, out: Path) -> Any:
    """Output, quarantine and counts of a run, or its error."""
    steps = {name: STEPS[name]() for name in names}
    out.mkdir()
    config = PipelineConfig(on_error=on_error, quarantine=out / "bad.jsonl" if on_error == "quarantine" else None)
    pipeline = Pipeline(JsonlSource(folder), list(steps.values()), out / "made.jsonl", config)
    try:
        report = pipeline.run(engine=engine, fit=[steps[name] for name in names if name in FITTED])
    except PenstockError as error:
        return type(error), str(error)
    files = {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}
    return files, report.rows_in, report.rows_out, report.dropped, report.quarantined, report.skipped


@settings(max_examples=25, deadline=None)
@given(names=plans, seed=st.integers(0, 999), on_error=st.sampled_from(["raise", "skip", "quarantine"]))
def test_a_job_that_fits_and_finds_types_has_the_output_of_a_local_run(
    names: list[str], seed: int, on_error: Any
) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "in"
        folder.mkdir()
        write_rows(folder, seed)
        local = outcome(folder, names, on_error, None, Path(home) / "local")
        job = outcome(folder, names, on_error, SPLITS, Path(home) / "job")
        assert job == local


class Watched(InProcess):
    """An executor that notes the tasks it runs, and fails at one of them."""

    def __init__(self, ran: list[str], fail_at: str | None = None) -> None:
        super().__init__()
        self._ran, self._fail_at = ran, fail_at

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        if self._waiting and self._waiting[0].name == self._fail_at:
            raise KeyboardInterrupt
        self._ran += [task.name for task in list(self._waiting)[:1]]
        return super().wait(timeout_seconds)


def watched(ran: list[str], fail_at: str | None = None) -> JobEngine:
    return JobEngine(executor=lambda: Watched(ran, fail_at), options=SPLITS.options)


@pytest.mark.parametrize("limit", [{"max_failures": 3}, {"max_failure_ratio": 0.05}, {"max_failures": 99}])
@pytest.mark.parametrize(
    "names",
    [
        ("function", "scale"),
        ("scale", "function", "range"),
        ("function", "dedup", "range"),
        ("function", "every", "range"),
        ("function", "mean"),
    ],
)
def test_too_many_bad_rows_of_a_pass_end_a_job_as_they_end_a_local_run(
    tmp_path: Path, names: tuple[str, ...], limit: dict[str, Any]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        rows = [{"x": n / 7, "n": n % 11, "kind": "bad" if n % 9 == 4 else "a"} for n in range(30)]
        (folder / f"{number}.jsonl").write_text("\n".join([*map(json.dumps, rows), "{bad"]))
    found = []
    for number, engine in enumerate((None, JobEngine(options=JobOptions(split_bytes=900, partitions=2)))):
        steps = {name: STEPS[name]() for name in names}
        out = tmp_path / f"out {number}"
        out.mkdir()
        config = PipelineConfig(on_error="quarantine", quarantine=out / "bad.jsonl", **limit)
        pipeline = Pipeline(JsonlSource(folder), list(steps.values()), out / "made.jsonl", config)
        try:
            made: Any = pipeline.run(engine=engine, fit=[steps[name] for name in names if name in FITTED]).rows_out
        except FailureBudgetError as error:
            made = str(error)
        found.append((made, {path.name: path.read_bytes() for path in out.iterdir()}))
    assert found[0] == found[1]
    assert isinstance(found[0][0], str) == (limit != {"max_failures": 99})


@pytest.mark.parametrize("fail_at", ["types-000002", "fit-1-000001", "map-0-000000", "map-0-000003"])
def test_a_driver_that_is_stopped_goes_on_with_what_was_found(tmp_path: Path, fail_at: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [{"x": n / 7, "kind": "ab"[n % 2], "n": n} for n in range(30)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(engine: Any, checkpoint: Path | None) -> bytes:
        scaler = StandardScaler("size")
        pipeline = Pipeline(JsonlSource(folder), [Map(longer), scaler, Map(longer)], tmp_path / "out.jsonl")
        pipeline.run(checkpoint, engine=engine, fit=[scaler])
        return (tmp_path / "out.jsonl").read_bytes()

    local, first, second = run(None, None), [], []  # type: ignore[var-annotated]
    (tmp_path / "out.jsonl").unlink()
    with pytest.raises(KeyboardInterrupt):
        run(watched(first, fail_at), tmp_path / "job")
    assert run(watched(second), tmp_path / "job") == local
    assert not set(first) & set(second)
    assert {name.partition("-")[0] for name in first + second} == {"types", "fit", "map"}


def test_a_job_does_not_go_on_with_other_transforms_to_fit(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1.5, "n": 1}\n' * 30)

    def run(engine: Any, *fitted: int) -> None:
        steps = [StandardScaler("x"), StandardScaler("n").fit(pa.record_batch({"n": [1, 2]}))]
        pipeline = Pipeline(JsonlSource(tmp_path / "rows.jsonl"), steps, tmp_path / "out.parquet")
        pipeline.run(tmp_path / "job", engine=engine, fit=[steps[position] for position in fitted])

    with pytest.raises(KeyboardInterrupt):
        run(watched([], "map-0-000001"), 0)
    with pytest.raises(ResumeError, match="other transforms to fit"):
        run(watched([]), 0, 1)


def test_the_driver_reads_no_rows_but_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n" + "1,x\n" * 50)
    (tmp_path / "more.csv").write_text("a,b\n" + "1.5,y\n" * 50)
    monkeypatch.setattr(CsvSource, "_scan", lambda self, blocks: pytest.fail("all rows were read on the driver"))
    scaler = StandardScaler("a")
    Pipeline(CsvSource(tmp_path / "*.csv"), [scaler], tmp_path / "out.parquet").run(engine=SPLITS, fit=[scaler])
    assert scaler.mean == {"a": 1.25}


def test_explain_says_where_types_are_found_and_transforms_fitted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1, "n": 1, "kind": "a"}\n' * 30)
    before, mean, after, last = StandardScaler("x"), Mean(), MinMaxScaler("n"), OrdinalEncoder("kind")
    steps = [before, mean, ExactDedup("x"), after, Every(), last]
    pipeline = Pipeline(JsonlSource(tmp_path / "rows.jsonl"), steps, tmp_path / "out.jsonl")
    lines = pipeline.explain(SPLITS, fit=[last, after, mean, before]).splitlines()
    why = "in a local pass over all rows: Mean() has no partial_fit, merge, to_dict and from_dict"
    assert lines[1:] == [
        "each split   types of the columns, of all rows; schema= saves this pass",
        f"driver       fit of StandardScaler('x'), {why}",
        f"driver       fit of Mean(), {why}",
        "each split   StandardScaler('x'), Mean(), keys of ExactDedup('x')",
        "by key       ExactDedup('x'): keys are partitioned, the first row of each stays",
        "each split   fit of MinMaxScaler('n', range=(0, 1)): statistics of the splits are merged",
        "each split   MinMaxScaler('n', range=(0, 1))",
        "one place    fit of OrdinalEncoder('kind', unknown='error'), in a pass over all rows",
        "one place    Every(2), OrdinalEncoder('kind', unknown='error'): needs the rows in order",
        f"one place    {pipeline.sink!r}",
    ]


def test_fit_names_transforms_of_the_pipeline_that_can_be_fitted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    keep = Filter("x > 0")
    pipeline = Pipeline(JsonlSource(tmp_path / "rows.jsonl"), [keep], tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"StandardScaler.*not among the transforms"):
        pipeline.run(fit=[StandardScaler("x")])
    with pytest.raises(ConfigError, match=r"Filter.*no method fit"):
        pipeline.run(fit=[keep])


def test_a_yaml_file_with_fits_runs_on_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RayEngine, "job_engine", lambda self: SPLITS)
    Path("rows.jsonl").write_text("\n".join(json.dumps({"x": n / 7, "kind": "ab"[n % 2]}) for n in range(40)))
    Path("p.yaml").write_text(
        "source: rows.jsonl\n"
        "transforms:\n"
        "  - standard_scaler: {columns: [x], fit: true}\n"
        "  - ordinal_encoder: {columns: [kind], fit: true}\n"
        "sink: out.jsonl\n"
    )
    runner = CliRunner()
    assert runner.invoke(app, ["run", "p.yaml", "--quiet"]).exit_code == 0
    local = Path("out.jsonl").read_bytes()
    monkeypatch.setattr(JsonlSource, "_scan", lambda self, blocks: pytest.fail("all rows were read on the driver"))
    planned = runner.invoke(app, ["run", "p.yaml", "--dry-run", "--engine", "ray"])
    assert "each split   types of the columns" in planned.output
    assert "each split   fit of StandardScaler('x'): statistics of the splits are merged" in planned.output
    Path("out.jsonl").unlink()
    assert runner.invoke(app, ["run", "p.yaml", "--quiet", "--engine", "ray"]).exit_code == 0
    assert Path("out.jsonl").read_bytes() == local


def test_shares_find_types_together(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"n": n / 2, f"c{n}": n}) for n in range(30)))

    def run(share: tuple[int, int] | None) -> None:
        engine = JobEngine(options=SPLITS.options, share=share)
        Pipeline(JsonlSource(tmp_path / "rows.jsonl"), [], tmp_path / "out.jsonl").run(tmp_path / "job", engine=engine)

    for number in range(3):
        with pytest.raises(UnfinishedJobError):
            run((number, 3))
    run(None)
    job = (tmp_path / "out.jsonl").read_bytes()
    Pipeline(JsonlSource(tmp_path / "rows.jsonl"), [], tmp_path / "local.jsonl").run()
    assert job == (tmp_path / "local.jsonl").read_bytes()


class Deadly(InProcess):
    """An executor whose workers die with one split."""

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        if self._waiting and self._waiting[0].name.endswith("-000001"):
            return [Outcome(self._waiting.popleft(), crash="killed")]
        return super().wait(timeout_seconds)


def test_a_split_that_kills_its_workers_in_a_first_pass_is_left_out_if_asked(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"x": float(n)}) for n in range(60)))

    def run(on_crash: str) -> StandardScaler:
        scaler = StandardScaler("x")
        options = JobOptions(split_bytes=120, on_crash=on_crash)
        pipeline = Pipeline(JsonlSource(tmp_path / "rows.jsonl"), [scaler], tmp_path / "out.jsonl")
        pipeline.run(engine=JobEngine(executor=Deadly, options=options), fit=[scaler])
        return scaler

    with pytest.raises(StageError, match=r"rows\.jsonl, from byte"):
        run("raise")
    learned = run("skip").learned("x").count
    assert learned == len((tmp_path / "out.jsonl").read_text().splitlines()) < 60


def test_no_transform_of_penstock_needs_one_place() -> None:
    for _, name, _ in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if name.split(".")[1] in ("transforms", "corpus", "chat", "templates"):
            importlib.import_module(name)
    found, waiting = [], [Transform]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        found += [kind for kind in kinds if kind.__module__.startswith("penstock.")]
    assert {"Decontaminate", "Tokenize", "FormatChat", "MinHashDedup"} <= {kind.__name__ for kind in found}
    ordered = [kind for kind in found if hasattr(kind, "state_dict") or hasattr(kind, "finish")]
    assert [kind.__name__ for kind in ordered if not hasattr(kind, "row_keys")] == []


def test_columns_of_functions_are_learned_before_a_fit_of_rows_with_a_schema(tmp_path: Path) -> None:
    """Splits whose rows are all dropped have the columns of the others; a split learns no types of its own."""
    for number, start in enumerate((50, 0)):
        rows = [{"n": n, "x": float(n)} for n in range(start, start + 10)]
        (tmp_path / f"in-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    schema, made = pa.schema([("n", pa.int64()), ("x", pa.float64())]), []
    for engine in (None, JobEngine(options=JobOptions(split_bytes=1000))):
        source, scaler = JsonlSource(sorted(tmp_path.glob("in-*.jsonl")), schema=schema), MinMaxScaler("x")
        steps = [Filter("n < 50"), Map(lambda row: {**row, "twice": 2 * row["n"]}), scaler, ExactDedup("n")]
        out = tmp_path / f"{len(made)}.jsonl"
        Pipeline(source, steps, out).run(fit=[scaler], engine=engine)
        made.append(out.read_bytes())
    assert made[0].count(b"twice") == 10
    assert made[1] == made[0]
