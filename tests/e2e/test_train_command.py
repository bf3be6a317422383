"""`train.py` in processes of its own: killed with SIGKILL and gone on with, alone and on two ranks of torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _scripts.processes import Program, wait_for_end, wait_until
from tests.forked_programs import ForkedProgram
from tests.servers import free_ports

from penstock.fsqueue import DataProviderBase
from penstock.fsqueue.prepare_command import main as prepare

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
ROWS, LENGTH, LETTERS, STEPS = 4, 16, 9, 40
CONFIG = f"""
dataset, batch_size, block_size, seed = 'counting', {ROWS}, {LENGTH}, 3
n_layer, n_head, n_embd, learning_rate, warmup_iters = 2, 2, 32, 1e-2, 5
max_iters, eval_interval, eval_iters, log_interval, checkpoint_interval = {STEPS}, 10, 2, 1, 7
device, out_dir, dropout = 'cpu', 'out', 0.1
"""
# As train.py, but every rank leaves its weights behind, which only the first one saves.
RANK = """
import os, sys, torch
from char_diffusion import main
from char_diffusion.trainer import Trainer
run = Trainer.run
def run_and_keep(self):
    whole = run(self)
    torch.save(self.model.state_dict(), f"weights-{os.environ['RANK']}.pt")
    return whole
Trainer.run = run_and_keep
sys.exit(main())
"""


class Counting(DataProviderBase):
    """Rows that count up from anywhere, some of it hidden."""

    def build_meta(self) -> dict[str, Any]:
        schema = [
            {"name": name, "dtype": "int64", "shape": [self.block_size], "role": role}
            for name, role in (("x", "input"), ("y", "target"))
        ]
        meta = {"training_type": "MLM", "vocab_size": LETTERS + 1, "mask_token_id": LETTERS, "ignore_index": -1}
        return meta | {"batch_schema": schema}

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        whole = (rng.integers(LETTERS, size=(self.batch_size, 1)) + np.arange(self.block_size)) % LETTERS
        hidden = rng.random(whole.shape) < rng.uniform(0.1, 0.6)
        return {"x": np.where(hidden, LETTERS, whole), "y": np.where(hidden, whole, -1)}


VALUES = {"dataset": "counting", "batch_size": ROWS, "block_size": LENGTH, "seed": 3, "backlog_files": 1000}


def known() -> dict[str, str]:
    """The environment without a rank, on one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


class Place:
    """A directory to train in, with a queue of its own, and the programs that were started there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[Program] = []

    def start(self, script: Path, **environment: str) -> Program:
        process = ForkedProgram(
            script, "config.py", said=self.complaints(), environment=known() | environment, directory=self.path
        )
        self.started.append(Program(process, process.said))
        return self.started[-1]

    def launch(self) -> Program:
        """Two ranks of torchrun."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [*launcher, str(ROOT / "train.py"), "config.py"]
        with self.complaints().open("w") as said:
            process = subprocess.Popen(command, cwd=self.path, env=known(), stdout=said, stderr=said, text=True)
        self.started.append(Program(process, self.complaints()))
        return self.started[-1]

    def complaints(self) -> Path:
        return self.path / f"{len(self.started)}.err"

    def train(self) -> Program:
        return self.start(ROOT / "train.py")

    def ranks(self, world: int = 2) -> list[Program]:
        script = self.path / "rank.py"
        script.write_text(RANK)
        facts = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        return [self.start(script, RANK=str(r), LOCAL_RANK=str(r), **facts) for r in range(world)]

    def train_here(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        """In this process, which has torch already; on one thread as the others, since sums depend on it."""
        import torch
        from char_diffusion import main

        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        torch.set_num_threads(1)
        try:
            with monkeypatch.context() as here:
                here.chdir(self.path)
                assert main(list(arguments or ["config.py"])) == 0
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)

    def steps(self) -> int:
        log = self.path / "out" / "log.jsonl"
        return log.read_bytes().count(b'"train"') if log.exists() else 0

    def has_steps(self, count: int) -> bool:
        return self.steps() >= count

    def saved(self) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = torch.load(self.path / "out" / "last.pt", weights_only=True)
        return found

    def said(self) -> str:
        return self.started[-1].complaints.read_text()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared")
    (path / "config.py").write_text(CONFIG)
    Counting(VALUES, data_dir=path / "data" / "counting").run(max_batches=2 * STEPS + 16)
    return path


@pytest.fixture
def places(prepared: Path, tmp_path: Path) -> Iterator[list[Place]]:
    made = [Place(Path(shutil.copytree(prepared, tmp_path / name))) for name in ("whole", "broken")]
    yield made
    for place in made:
        for program in place.started:
            program.close()


def assert_equal(one: Any, other: Any) -> None:
    import torch

    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        return
    assert type(one) is type(other)
    if isinstance(one, (dict, list, tuple)):
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_equal(one[key], other[key])
        return
    assert one == other


def assert_same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    for name in ("step", "world_size", "model", "optimizer", "random", "queue", "best_loss"):
        assert_equal(one[name], other[name])
    losses = [[(each["kind"], each["step"], each["loss"]) for each in run["records"]] for run in (one, other)]
    assert losses[0] == losses[1]


def test_a_run_killed_with_sigkill_ends_with_the_weights_of_one_that_was_not(
    places: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = places
    first = broken.train()
    wait_until(partial(broken.has_steps, 17), [first], "should be training")
    first.kill()
    killed_at, saved_at = broken.steps(), broken.saved()["step"]
    assert 14 <= saved_at < STEPS, "killed behind a checkpoint and before the end"
    second = broken.train()
    wait_until(partial(broken.has_steps, killed_at + 3), [second], "should go on")
    second.process.send_signal(signal.SIGTERM)
    wait_for_end([second])
    assert f"step {saved_at:,}" in broken.said()
    assert ("the same command resumes there" in broken.said()) is (broken.saved()["step"] < STEPS)
    broken.train_here(monkeypatch)
    whole.train_here(monkeypatch)
    assert_same_run(whole.saved(), broken.saved())
    curve = (broken.path / "out" / "curve.html").read_text()
    assert curve.startswith("<!DOCTYPE html>")
    assert "polyline" in curve


def test_the_dataset_of_the_documentation_can_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "queue.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python file=(\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert prepare(["config/train_tides.py", "--max_batches=120"]) == 0
    Place(tmp_path).train_here(
        monkeypatch, "config/train_tides.py", "--max_iters=120", "--learning_rate=5e-3", "--warmup_iters=5"
    )
    right, commonest = re.findall(r"([\d.]+)% (?:of next tokens right|always the commonest)", capsys.readouterr().out)
    assert float(right) > 4 * float(commonest)


@pytest.mark.slow
def test_two_ranks_stay_in_step_and_resume_exactly(places: list[Place]) -> None:
    import torch

    whole, broken = places
    unbroken = whole.launch()
    ranks = broken.ranks()
    wait_until(partial(broken.has_steps, 16), ranks, "should be training")
    for rank in ranks[::-1]:
        rank.kill()
    assert 14 <= broken.saved()["step"] < STEPS
    wait_for_end([*broken.ranks(), unbroken])
    assert not [each for each in (*whole.started, *broken.started) if "Warning" in each.complaints.read_text()]
    assert_same_run(whole.saved(), broken.saved())
    assert whole.saved()["queue"]["splits"]["train"] == {"position": 2 * STEPS}
    ends = [torch.load(broken.path / f"weights-{rank}.pt", weights_only=True) for rank in range(2)]
    assert_equal(dict(ends[0]), dict(ends[1]))
    assert_equal(dict(ends[0]), dict(broken.saved()["model"]))
    states = broken.saved()["random"]
    assert not torch.equal(states[0], states[1]), "every rank draws its own dropout"
