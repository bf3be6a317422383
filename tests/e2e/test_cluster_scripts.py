"""Launch scripts of `examples/cluster`: parsed, validated by Ray where it has a schema, and run with Slurm's programs
replaced by ones that note their arguments."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.servers import missing

SCRIPTS = Path(__file__).parents[2] / "examples" / "cluster"
SHELL = sorted([*SCRIPTS.glob("*.sh"), *SCRIPTS.glob("*.sbatch")])
PLAN = ["corpus/*.jsonl", "corpus.store", "model"]

NOTE = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["NOTES"], "a") as notes:
    notes.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
"""
ENDS = {
    "scontrol": 'print("one\\ntwo\\nthree")',
    "sbatch": 'print("4711;here")',
    "srun": "command = [a for a in sys.argv[1:]]\n"
    "while command[0].startswith('-'): command.pop(0)\n"
    "os.execvp(command[0], command)",
    "penstock": "import time\n"  # longer than the start of all nodes
    "while open(os.environ['NOTES']).read().count('[\"ray\", \"start\"') < int(os.environ.get('RAY_STARTS', 0)):\n"
    "    time.sleep(0.01)",
    "ray": "import signal\nif sys.argv[1] == 'start': signal.pause()",
}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that note how they are called come first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", *ENDS):
        (folder / name).write_text(NOTE.format(python=sys.executable) + ENDS.get(name, ""))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[one,two,three]")
    monkeypatch.setenv("SLURM_JOB_ID", "40123")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    return tmp_path / "notes"


def run(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / name), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60, check=False
    )


def calls(notes: Path, name: str) -> list[list[str]]:
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return [line[1:] for line in lines if line[0] == name]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_a_launch_script_is_a_shell_script_that_stops_at_errors_and_names_a_missing_argument(
    path: Path, notes: Path
) -> None:
    assert path.read_text().startswith("#!/bin/bash\n# ")
    assert "\nset -euo pipefail\n" in path.read_text()
    assert not subprocess.run(["bash", "-n", str(path)], capture_output=True, check=True).stderr
    if program := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
        assert not done.stdout
    without = run(path.name)
    assert without.returncode == 1
    assert re.search(r": 1: the \w+", without.stderr)
    assert not notes.exists()


def test_the_slurm_job_starts_ray_on_all_its_nodes_with_one_token_and_prepares_on_it(notes: Path) -> None:
    done = run("slurm_ray.sbatch", *PLAN, "--dedup", "exact", RAY_STARTS="2")
    assert done.returncode == 0, done.stderr
    *both, last = calls(notes, "srun")
    first, second = sorted(both)  # started side by side, too
    assert first[:3] == ["--nodes=1", "--ntasks=1", "--nodelist=one"]
    assert second[:3] == ["--nodes=2", "--ntasks=2", "--exclude=one"]
    assert last == ["rm", "-rf", "/tmp/ray-40123"]
    starts = [call for call in calls(notes, "ray") if call[0] == "start"]
    head, others = sorted(starts, key=lambda call: "--head" not in call)  # the two are started side by side
    assert {"--head", "--port=20123", "--block", "--num-cpus=8"} <= set(head)
    assert {"--address=one:20123", "--block", "--num-cpus=8"} <= set(others)
    (prepared,) = calls(notes, "penstock")
    assert prepared[:2] == ["prepare", PLAN[0]]
    assert prepared[2:] == ["--out", PLAN[1], "--tokenizer", PLAN[2], "--engine", "ray", "--dedup", "exact"]


def test_the_slurm_job_ends_if_the_head_of_ray_does_not_start(notes: Path) -> None:
    ray = notes.parent / "bin" / "ray"
    ray.write_text(NOTE.format(python=sys.executable) + "sys.exit(3)")
    done = run("slurm_ray.sbatch", *PLAN)
    assert done.returncode == 1
    assert "the head of the Ray cluster did not start on one" in done.stderr
    assert not calls(notes, "penstock")


def test_the_array_has_a_task_for_each_split_and_the_join_waits_for_all(notes: Path) -> None:
    done = run("slurm_array.sh", "16", *PLAN, "--dedup", "exact")
    assert done.stdout == "array job 4711, then join job 4711\n", done.stderr
    array, join = calls(notes, "sbatch")
    assert array == ["--parsable", "--array=1-16", str(SCRIPTS / "slurm_split.sbatch"), "16", *PLAN, "--dedup", "exact"]
    assert join[1:3] == ["--dependency=afterok:4711", "--kill-on-invalid-dep=yes"]
    for task in ("1", "16"):
        assert run("slurm_split.sbatch", *array[3:], SLURM_ARRAY_TASK_ID=task).returncode == 0
    assert run("slurm_join.sbatch", *join[4:]).returncode == 0
    *splits, joined = calls(notes, "penstock")
    assert [split[split.index("--split") + 1] for split in splits] == ["1/16", "16/16"]
    assert all(split[:2] == ["prepare", PLAN[0]] and split[-2:] == ["--dedup", "exact"] for split in splits)
    assert joined == ["join", "corpus.store"]
    assert "submit this with --array=1-16" in run("slurm_split.sbatch", *array[3:]).stderr


def test_torchrun_meets_at_the_first_node(notes: Path) -> None:
    assert run("slurm_torchrun.sbatch", "train.py", "--steps", "5", SLURM_GPUS_ON_NODE="8").returncode == 0
    (call,) = calls(notes, "torchrun")
    assert {"--nnodes=3", "--nproc-per-node=8", "--rdzv-endpoint=one:20123"} <= set(call)
    assert call[-3:] == ["train.py", "--steps", "5"]


def test_the_pods_of_the_indexed_job_take_each_split_once(notes: Path) -> None:
    job = load("kubernetes_splits.yaml")["spec"]
    assert job["completionMode"] == "Indexed"
    (container,) = job["template"]["spec"]["containers"]
    for index in (0, job["completions"] - 1):
        command = [*container["command"], *container["args"]]
        subprocess.run(command, env={**os.environ, "JOB_COMPLETION_INDEX": str(index)}, check=True, timeout=60)
    (joined,) = load("kubernetes_join.yaml")["spec"]["template"]["spec"]["containers"]
    subprocess.run(joined["command"], check=True, timeout=60)
    first, last, join = calls(notes, "penstock")
    assert first[-2:] == ["--split", "1/16"]
    assert last[-2:] == ["--split", "16/16"]
    assert join == ["join", first[first.index("--out") + 1]]
    assert joined["image"] == container["image"]


def test_ray_accepts_the_cluster_file_and_the_runtime_environments() -> None:
    if reason := missing("ray"):
        pytest.skip(reason)
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.runtime_env import RuntimeEnv

    cluster = load("ray_up.yaml")
    validate_config(prepare_config(cluster))
    assert all("--token" not in command for command in cluster["head_start_ray_commands"])
    job = load("kuberay_job.yaml")["spec"]
    for environment in (load("runtime_env.yaml"), yaml.safe_load(job["runtimeEnvYAML"])):
        RuntimeEnv(**{**environment, "working_dir": None})


def test_the_pods_of_the_ray_job_have_its_version_of_ray_and_no_task_runs_on_the_head() -> None:
    job = load("kuberay_job.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups}
    assert [image.startswith(f"rayproject/ray:{cluster['rayVersion']}-py3") for image in images] == [True]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert cluster["authOptions"] == {"mode": "token"}


def test_every_option_of_prepare_in_the_launch_files_is_one_that_it_has() -> None:
    from typer.main import get_command

    from penstock.cli.main import app

    group: Any = get_command(app)
    prepare = group.get_command(
        group.make_context("penstock", ["prepare", "--help"], resilient_parsing=True), "prepare"
    )
    known = {name for parameter in prepare.params for name in parameter.opts}
    used = set()
    for path in SCRIPTS.iterdir():
        if path.suffix in (".sh", ".sbatch", ".yaml"):
            text = re.sub(r"\\?\n *#? *", " ", path.read_text())
            for command in re.findall(r"penstock prepare [^\n]*?(?:--engine ray|--split \S+)", text):
                used |= {word for word in shlex.split(command.replace('"', "")) if word.startswith("--")}
    assert used >= {"--out", "--tokenizer", "--budget", "--engine", "--split"}
    assert used <= known


def load(name: str) -> Any:
    return yaml.safe_load((SCRIPTS / name).read_text())
