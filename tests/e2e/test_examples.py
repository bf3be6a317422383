"""Every example runs as it is, in a process of its own, and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.forked_programs import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"

# The arguments that keep it short, and what it has to print.
PRINTS: dict[str, tuple[list[str], list[str | re.Pattern[str]]]] = {
    "checkpoint.py": (
        ["--rows", "2000"],
        ["killed", "output visible: False", "from a checkpoint: True", "every row exactly once, in order: True"],
    ),
    "demo.py": (
        ["--documents", "800", "--steps", "42", "--worlds", "2", "1"],
        [
            "supervised",
            "packing",
            "data wait",
            "killed",
            "finished",
            "byte-identical",
            "every step from 0 to 41 was trained on, and on nothing else: True",
        ],
    ),
    "encode_tabular.py": ([], ["categories: {'class': ['first', 'third']}", "dropped: {'age: out of range': 1}"]),
    "iterate_and_resume.py": ([], ["stopped after row 320", "every row once, in order: True"]),
    "mixing.py": (
        [],
        ["step 10: weight 0.50", "never further off than one sample: True", "sources of the next step: {'reports'}"],
    ),
    "own_source_and_sink.py": ([], ["6000 throws", "the source keeps the contract and resumes exactly"]),
    "pipeline_demo.py": (
        ["--rows", "3000"],
        ["rows in", "3,000", "quarantined", "reading JSON Lines: invalid JSON", "bottleneck", "in order: True"],
    ),
    "pretrain.py": (
        [],
        ["12 batches an epoch", "not learned from the one before it: True", "composed anew in the next epoch: True"],
    ),
    "processes.py": ([], ["2 other processes worked on them", "in order: True"]),
    "quarantine.py": (
        [],
        [
            "by default: StageError: Map(parse_price) failed at /in.jsonl, row 20",
            "98 of 100 rows written",
            "row 20, byte 560",
            "row 60, byte 1723",
        ],
    ),
    "grpo_tiny.py": (["--iterations", "25"], ["the reward rose from", ": True"]),
    "queue_labels.py": (
        [],
        [
            "a batch is a dict of x, attention_mask, label, weight",
            "made without a queue: True",
            "counting gives as well: 100%",
            "files left in the split that was read: []",
        ],
    ),
    "row_batch_expression.py": ([], ["the same rows each way: True", "10 orders are 13 pieces"]),
    "sft.py": (
        [],
        ["no mask, no padding: True", "learned from: 179 tokens", "gives and the gate lets pass.<|im_end|>"],
    ),
    "titanic_mlx.py": (
        ["--epochs", "3"],
        [
            "epoch 3 of 3: loss",
            re.compile(r"validation accuracy 0\.\d+, 0\.(0[89]|[1-9]\d)\d above that of the majority class"),
            "submission.csv and titanic.html written",
        ],
    ),
}


def test_every_example_is_tested_and_short() -> None:
    files = {path.name: path for path in EXAMPLES.glob("*.py")}
    assert set(files) == set(PRINTS)
    long = {name: lines for name, path in files.items() if (lines := len(path.read_text().splitlines())) >= 60}
    assert not long


# Those that train a model.
NEED_TORCH = {"demo.py", "grpo_tiny.py"}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs_and_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    arguments, promised = PRINTS[name]
    empty, said = tmp_path / "empty", tmp_path / "said"
    empty.mkdir()
    code, printed = run_script(
        EXAMPLES / name, *arguments, said=said, directory=empty, timeout=600, TMPDIR=str(empty), OMP_NUM_THREADS="1"
    )
    assert code == 0, printed
    patterns = [re.compile(re.escape(each)) if isinstance(each, str) else each for each in promised]
    assert not [pattern.pattern for pattern in patterns if not pattern.search(printed)], printed
    left = [path.name for path in empty.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own
    assert not left, "it left something behind"
