from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

Cli = Callable[..., Any]

PIPELINE = """
source: {type: jsonl, path: corpus.jsonl}
transforms:
  - lower: text
  - count_words: {column: text, into: words}
  - filter: words >= 5
sink: {type: parquet, path: out.parquet, compression_level: 1}
config: {workers: 2}
budget: 64 MiB
"""


@pytest.fixture
def pipeline(corpus: Path) -> str:
    (corpus.parent / "pipeline.yaml").write_text(PIPELINE)
    return "pipeline.yaml"


def jsonl(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_yaml_file_runs_from_end_to_end(penstock: Cli, pipeline: str) -> None:
    result = penstock("run", pipeline)
    assert result.exit_code == 0, result.output
    table = pq.read_table("out.parquet")
    assert table["words"].to_pylist() == list(range(5, 20))
    assert table["text"][0].as_py() == "word word word word word"
    shown = " ".join(result.stdout.split())
    assert "Filter(words >= 5)" in shown
    assert "64.0 MiB" in shown
    assert "bottleneck" in shown


def test_source_and_sink_go_by_suffix(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text("source: corpus.jsonl\nsink: out.csv\n")
    assert penstock("run", "p.yaml").exit_code == 0
    assert Path("out.csv").read_text().splitlines()[:2] == ['"id","text","age"', '0,"",0']


def test_a_source_by_suffix_takes_options(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text("source: {path: corpus.jsonl, columns: [age]}\nsink: out.jsonl\n")
    assert penstock("run", "p.yaml").exit_code == 0
    assert jsonl("out.jsonl")[1] == {"age": 10}


def test_functions_beside_the_yaml_file_are_found(penstock: Cli, corpus: Path, module: Callable[..., None]) -> None:
    module(
        "cli_functions",
        "import pyarrow.compute as pc\n"
        "def double(row):\n    return {**row, 'age': 2 * row['age']}\n"
        "def halve(batch):\n    return batch.slice(0, batch.num_rows // 2)\n"
        "def odd(row):\n    return row['id'] % 2 == 1\n"
        "def twice(row):\n    return [row, row]\n",
    )
    Path("p.yaml").write_text(
        "source: corpus.jsonl\n"
        "transforms:\n"
        "  - filter: cli_functions:odd\n"
        "  - map: cli_functions:double\n"
        "  - map: {function: cli_functions:halve, batch: true}\n"
        "  - flat_map: cli_functions:twice\n"
        "sink: out.jsonl\n"
    )
    result = penstock("run", "p.yaml")
    assert result.exit_code == 0, result.output
    assert [(row["id"], row["age"]) for row in jsonl("out.jsonl")] == [
        (i, 20 * i) for i in (1, 3, 5, 7, 9) for _ in range(2)
    ]


def test_functions_beside_the_yaml_file_run_in_processes(corpus: Path) -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/cli_in_a_process.py").write_text("def double(row):\n    return {**row, 'age': 2 * row['age']}\n")
    Path("elsewhere/p.yaml").write_text(
        "source: {type: jsonl, path: corpus.jsonl}\n"
        "transforms: [{map: cli_in_a_process:double}, {map: cli_in_a_process:double}]\n"
        "sink: out.jsonl\nconfig: {workers: process, max_workers: 1}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "elsewhere/p.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert jsonl("out.jsonl")[3]["age"] == 120


def test_a_module_beside_the_file_does_not_replace_one_of_python(
    penstock: Cli, corpus: Path, module: Callable[..., None]
) -> None:
    module("types", "raise RuntimeError('not this one')\n")
    module("cli_beside", "def same(row):\n    return row\n")
    Path("p.yaml").write_text("source: corpus.jsonl\ntransforms: [{map: cli_beside:same}]\nsink: out.jsonl\n")
    result = penstock("run", "p.yaml")
    assert result.exit_code == 0, result.output


def test_a_mapping_is_columns_where_the_step_takes_columns(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text(
        "source: corpus.jsonl\n"
        "transforms:\n"
        "  - rename: {text: names}\n"
        "  - rename: {names: title}\n"  # a column that is called as the parameter is
        "  - rename: {names: {id: key}}\n"  # the parameter
        "  - map: {total: age + key, one: 1}\n"
        "  - fill_nulls: {age: 0}\n"
        "  - cast: {age: float32}\n"
        "  - clip: {age: [0, 100]}\n"
        "sink: out.jsonl\n"
    )
    result = penstock("run", "p.yaml")
    assert result.exit_code == 0, result.output
    assert jsonl("out.jsonl")[2] == {"key": 2, "title": "Word Word", "age": 20.0, "total": 22, "one": 1}


def test_steps_without_arguments_and_steps_in_steps(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text(
        "source: corpus.jsonl\n"
        "transforms:\n"
        "  - drop_nulls\n"
        "  - augment: {transform: {drop_words: {column: text, probability: 0.5}}, copies: 2}\n"
        "sink: out.jsonl\n"
    )
    result = penstock("run", "p.yaml")
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in jsonl("out.jsonl")] == [i for i in range(20) for _ in range(3)]


def test_a_schema_is_a_mapping_of_columns_to_types(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text(
        "source: {type: jsonl, path: corpus.jsonl, schema: {id: int16, text: string, age: float64}}\n"
        "sink: out.parquet\n"
    )
    result = penstock("run", "p.yaml")
    assert result.exit_code == 0, result.output
    assert [str(kind) for kind in pq.read_schema("out.parquet").types] == ["int16", "string", "double"]


def test_an_encoder_with_fit_learns_in_a_first_pass(penstock: Cli, corpus: Path) -> None:
    Path("p.yaml").write_text(
        "source: corpus.jsonl\n"
        "transforms:\n"
        "  - filter: id >= 10\n"
        "  - min_max_scaler: {columns: [age], fit: true}\n"
        "  - standard_scaler: {columns: [id], fit: true}\n"
        "sink: out.jsonl\n"
    )
    result = penstock("run", "p.yaml", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["rows_in"], report["rows_out"], report["dropped"]) == (20, 10, {"Filter(id >= 10)": 10})
    rows = jsonl("out.jsonl")
    assert [rows[0]["age"], rows[-1]["age"]] == [0.0, 1.0]
    assert sum(row["id"] for row in rows) == pytest.approx(0)


def test_set_changes_values_adds_them_and_goes_into_lists(penstock: Cli, pipeline: str) -> None:
    result = penstock(
        "run",
        pipeline,
        *("--set", "transforms.2.filter=words >= 18"),
        *("--set", "sink=out.jsonl"),
        *("--set", "sink.compression_level=1"),
        *("--set", "config.max_failures=3"),
        "--json",
    )
    assert result.exit_code == 0, result.output
    assert [row["id"] for row in jsonl("out.jsonl")] == [18, 19]
    assert not Path("out.parquet").exists()


def test_dry_run_shows_the_pipeline_and_touches_nothing(penstock: Cli, pipeline: str, corpus: Path) -> None:
    before = sorted(corpus.parent.iterdir())
    result = penstock("run", pipeline, "--dry-run", "--checkpoint", "kept")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "JsonlSource('corpus.jsonl') -> Lower('text') -> CountWords('text', into='words') -> Filter(words >= 5) -> "
        "ParquetSink('out.parquet')  [budget 64.0 MiB]"
    )
    assert f"input       1 file, {corpus.stat().st_size / 1024:.1f} KiB" in lines
    assert "output      out.parquet" in lines
    assert "budget      64.0 MiB" in lines
    assert "checkpoint  kept" in lines
    assert sorted(corpus.parent.iterdir()) == before


def test_dry_run_speaks_json_too(penstock: Cli, pipeline: str, corpus: Path) -> None:
    facts = json.loads(penstock("run", pipeline, "--dry-run", "--json").stdout)
    assert (facts["files"], facts["file_bytes"]) == (1, corpus.stat().st_size)
    assert facts["budget_bytes"] == 64 << 20
    assert facts["config"]["workers"] == 2
    assert facts["resumes"] is False


def test_dry_run_does_not_read_rows(penstock: Cli, pipeline: str, corpus: Path) -> None:
    corpus.write_text("this is not JSON\n")
    assert penstock("run", pipeline, "--dry-run").exit_code == 0
    assert penstock("run", pipeline).exit_code == 1


def test_json_puts_one_object_on_stdout_and_nothing_else(pipeline: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", pipeline, "--json"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert (report["rows_in"], report["rows_out"], report["resumed"]) == (20, 15, False)
    assert report["pipeline"].startswith("JsonlSource('corpus.jsonl') -> ")
    assert [stage["kind"] for stage in report["stages"]] == ["source", "decode", *["transform"] * 3, "sink"]


def test_quiet_prints_nothing(penstock: Cli, pipeline: str) -> None:
    result = penstock("run", pipeline, "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_quarantined_rows_are_in_the_closing_table(penstock: Cli, pipeline: str, corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + "half a {\n")
    result = penstock("run", pipeline, "--set", "config.on_error=quarantine")
    assert result.exit_code == 0, result.output
    assert "quarantined" in result.stdout
    assert "reading JSON Lines" in result.stdout
    assert len(jsonl("out.parquet.quarantine.jsonl")) == 1


def test_a_complete_checkpoint_says_so(penstock: Cli, pipeline: str) -> None:
    assert penstock("run", pipeline, "--set", "checkpoint=kept").exit_code == 0
    again = penstock("run", pipeline, "--checkpoint", "kept")
    assert again.exit_code == 0
    assert "complete" in again.stderr
    assert "rows out" in again.stdout
    assert "resumed" in penstock("run", pipeline, "--checkpoint", "kept", "--dry-run").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nope.yaml"], "'nope.yaml'"),
        (
            ["run", "pipeline.yaml", "--set", "source.path=nope.jsonl"],
            "'nope.jsonl'",
        ),
        (
            ["run", "pipeline.yaml", "--set", "sink.path=nope/out.parquet"],
            "'nope'",
        ),
        (
            ["run", "pipeline.yaml", "--set", "transforms.0.lower=txt"],
            "'text'",
        ),
    ],
)
def test_an_error_is_a_line_on_stderr_and_exit_code_1(
    penstock: Cli, pipeline: str, arguments: list[str], message: str
) -> None:
    result = penstock(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_debug_shows_the_traceback(penstock: Cli, pipeline: str) -> None:
    result = penstock("run", pipeline, "--set", "transforms.0.lower=txt", "--debug")
    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["rn"], ["run"], ["run", "pipeline.yaml", "--sett", "a=b"], ["run", "pipeline.yaml", "--set", "a.b"]]
)
def test_a_wrong_command_line_is_exit_code_2(penstock: Cli, pipeline: str, arguments: list[str]) -> None:
    assert penstock(*arguments).exit_code == 2


def test_set_without_a_value_says_what_was_expected(penstock: Cli, pipeline: str) -> None:
    assert re.search(r"a\.b=value.*'config\.workers'", penstock("run", pipeline, "--set", "config.workers").stderr)


def test_version_and_help(penstock: Cli) -> None:
    from penstock import __version__

    assert penstock("--version").stdout == f"penstock {__version__}\n"
    shown = penstock("run", "--help").stdout
    assert "count_words" in shown
    assert "Paths are relative to the current" in shown


def test_ctrl_c_ends_with_130_and_leaves_no_partial_output(here: Path) -> None:
    stopped = interrupted(here)
    assert stopped.returncode == 130
    assert stopped.stderr.splitlines()[-1].startswith("penstock: stopped; ")
    assert "Traceback" not in stopped.stderr
    assert sorted(path.name for path in here.iterdir()) == ["cli_endless.py", "endless.yaml"]


def test_ctrl_c_with_a_checkpoint_keeps_what_was_done(here: Path) -> None:
    stopped = interrupted(here, "--checkpoint", "kept")
    assert stopped.returncode == 130
    assert re.match("penstock: stopped; .*kept$", stopped.stderr.splitlines()[-1])
    assert json.loads(Path("kept/checkpoint.json").read_text())["rows_out"] > 0


def interrupted(here: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A run that never ends by itself, and gets SIGINT as soon as a part of its output is on disk."""
    (here / "cli_endless.py").write_text(
        "import time\n"
        "def rows():\n"
        "    number = 0\n"
        "    while True:\n"
        "        time.sleep(0.0005)\n"
        "        yield {'number': number}\n"
        "        number += 1\n"
    )
    (here / "endless.yaml").write_text(
        "source: {type: iterator, items: cli_endless:rows}\nsink: out.jsonl\nconfig: {batch_rows: 50}\n"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "penstock", "run", "endless.yaml", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 60
        while not [*here.glob(".out.jsonl*.tmp"), *here.glob(".out.jsonl*/[!.]*")]:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no output appeared"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def test_the_example_pipeline_runs(penstock: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    target = tmp_path / "lines.parquet"
    assert penstock("run", "examples/pipeline.yaml", "--dry-run").exit_code == 0
    result = penstock("run", "examples/pipeline.yaml", "--set", f"sink.path={target}", "--json")
    assert result.exit_code == 0, result.output
    table = pq.read_table(target)
    assert table.column_names == ["line", "words", "chars", "long"]
    assert table.num_rows == json.loads(result.stdout)["rows_out"] > 1000
    assert (min(table["chars"].to_pylist()), max(table["chars"].to_pylist())) == (0.0, 1.0)
