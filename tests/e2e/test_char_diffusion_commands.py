"""The shipped dataset through both commands, as printed in the documentation but for a shorter run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
CONFIG = "config/train_char_diffusion.py"
SMALL = ["--block_size=32", "--stages=[]", "--mask_probability=0.15", "--n_layer=2", "--n_embd=64", "--max_iters=200"]
SHORT = ["--learning_rate=4e-3", "--eval_interval=100", "--eval_iters=5", "--backlog_files=100", "--max_batches=200"]


def run(command: str, *overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, command, CONFIG, *overrides],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},  # threads beside other tests spin for each other
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_after_a_short_run_hidden_characters_are_told_far_better_than_by_chance(tmp_path: Path) -> None:
    places = [f"--queue_dir={tmp_path / 'queue'}", f"--out_dir={tmp_path / 'out'}"]
    assert "train 200, val 200 batches" in run("prepare.py", *SMALL, *SHORT, *places)
    run("train.py", *SMALL, *SHORT, *places)
    lines = map(json.loads, (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines())
    first, *_, last = [line for line in lines if line["kind"] == "val"]
    assert last["step"] == 200
    assert first["accuracy"] < 1.2 * first["commonest"], "it could tell them before it was trained"
    assert last["accuracy"] > 2 * last["commonest"], f"always the commonest character: {last['commonest']:.0%}"
