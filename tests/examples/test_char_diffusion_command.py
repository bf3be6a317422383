"""The command line in this process, on a real queue: what it prints, and that errors are a paragraph."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("torch")

from char_diffusion import main

from penstock.config import Setting
from penstock.fsqueue import DataProviderBase

ROWS, LENGTH, LETTERS = 4, 12, "abcdefgh"


class Runs(DataProviderBase):
    """Rows of one letter, some of them hidden."""

    changes: dict[str, Any] = {}  # noqa: RUF012 - a test's own

    def build_meta(self) -> dict[str, Any]:
        schema = [
            {"name": name, "dtype": "int64", "shape": [self.block_size], "role": role}
            for name, role in (("x", "input"), ("y", "target"))
        ]
        meta = {"training_type": "MLM", "vocab_size": len(LETTERS) + 1, "mask_token_id": len(LETTERS)}
        return meta | {"ignore_index": -1, "chars": LETTERS, "batch_schema": schema} | self.changes

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        whole = np.repeat(rng.integers(len(LETTERS), size=(self.batch_size, 1)), self.block_size, axis=1)
        hidden = rng.random(whole.shape) < 0.4
        return {"x": np.where(hidden, len(LETTERS), whole), "y": np.where(hidden, whole, -1)}


class Stepped(Runs):
    """With a setting of its own."""

    settings: ClassVar[dict[str, Setting]] = {"levels": Setting(list[Any]), "other": Setting(int, 7)}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config, and the queue it speaks of."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train_runs.py"
    path.write_text(
        f"dataset, batch_size, block_size = 'runs', {ROWS}, {LENGTH}\n"
        "max_iters, eval_interval, eval_iters, log_interval, device = 100, 50, 5, 10, 'cpu'\n"
        "n_layer, n_head, n_embd, learning_rate, warmup_iters = 1, 2, 16, 1e-2, 5\n"
        "out_dir = 'out'\n"
    )
    return path


def prepare(batches: int = 110, **changes: Any) -> None:
    values = {"dataset": "runs", "batch_size": ROWS, "block_size": LENGTH, "backlog_files": 1000}
    provider = Runs(values)
    provider.changes = changes
    provider.run(max_batches=batches)


def test_a_run_says_how_it_went_and_shows_what_it_fills_in(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare()
    assert main([str(config)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^train +10/100  loss \d\.\d{4}  accuracy .*lr .*tokens/s  \d+% waiting for data$", said, re.M)
    assert re.search(r"^val +100/100  loss", said, re.M)
    right = float(re.search(r"loss on val: .*; (.*)% of masked tokens right", said).group(1))  # type: ignore[union-attr]
    assert right > 90
    assert "11.1%" in said
    given, filled, was = re.search(r"^given   (.*)\nfilled  (.*)\ntarget  (.*)$", said, re.M).groups()  # type: ignore[union-attr]
    assert len(set(was)) == 1
    assert set(given) == {was[0], "▁"}
    assert sum(map(str.__eq__, filled, was)) > LENGTH // 2
    assert sorted(each.name for each in Path("out").iterdir()) == ["best.pt", "curve.html", "last.pt", "log.jsonl"]


def test_the_same_command_continues_and_resume_false_starts_anew_and_says_so(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare()
    assert main([str(config), "--max_iters=20"]) == 0
    assert "new run" in capsys.readouterr().out
    assert main([str(config), "--max_iters=40", "--learning_rate=0.02"]) == 0
    said = capsys.readouterr().out
    assert "step 20" in said
    assert "learning_rate" in said
    assert "max_iters" in said
    assert main([str(config), "--max_iters=20", "--resume=False"]) == 0
    assert "resume=False" in capsys.readouterr().out


def test_a_queue_that_ends_too_soon_ends_the_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(32)
    assert main([str(config)]) == 0
    assert "step 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "meta", "said"),
    [
        (
            ["--data_root=d d", "--max_iters=9"],
            None,
            r"Queue directory not found: .*run `python prepare\.py \S+/train_runs\.py '--data_root=d d'` first",
        ),
        (["--batch_sise=3"], {}, r"--batch_sise=3: unknown setting.*batch_size"),
        (["--batch_size=3"], {}, r"batch_size was 4, is 3; train with .*`penstock queue purge data/runs/queue`"),
        (["--seed=5", "--batches_per_file=2"], {}, r"queue was made .*: seed was 0, is 5; batches_per_file was 8, is"),
        (["--block_size=8"], {}, r"block_size was 12, is 8"),
        ([], {"training_type": "GAN"}, r"training_type='GAN'; this trainer knows MLM"),
        ([], {"vocab_size": None}, r"needs vocab_size"),
        (["--device=tpu"], {}, r"--device=tpu: .*auto, cpu"),
        (["--out_dir=s3://bucket/out"], {}, r"\bout_dir\b"),
        (["--n_head=3"], {}, r"n_embd = 16 is no multiple of n_head = 3"),
    ],
)
def test_mistakes_are_a_paragraph_without_a_traceback(
    arguments: list[str],
    meta: dict[str, Any] | None,
    said: str,
    config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if meta is not None:
        prepare(8, **meta)
    assert main([str(config), *arguments]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("train.py: ")
    assert complaint.count("\n") == 1
    assert re.search(said, complaint)
    assert not Path("out/last.pt").exists()


def test_settings_that_the_provider_declares_have_to_be_those_of_the_queue(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the provider is not at hand; but there its defaults are not known, and not compared."""
    values = {"dataset": "runs", "batch_size": ROWS, "block_size": LENGTH, "backlog_files": 1000}
    Stepped(values | {"levels": [(1, 2), {"a": 0.5}]}).run(max_batches=8)
    short = ["--max_iters=2", "--eval_iters=0"]
    assert main([str(config), *short]) == 0
    with config.open("a") as file:
        file.write("levels = [(1, 2), {'a': 0.5}]\n")
    assert main([str(config), *short]) == 0
    assert main([str(config), *short, "--levels=[(1, 3), {'a': 0.5}]"]) == 1
    assert "levels[0]" in capsys.readouterr().err


def test_a_start_anew_says_where_the_queue_continues(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare()
    assert main([str(config), "--max_iters=20"]) == 0
    assert "the queue continues" not in capsys.readouterr().out
    assert main([str(config), "--max_iters=30"]) == 0
    assert "the queue continues" not in capsys.readouterr().out
    assert main([str(config), "--max_iters=20", "--resume=False"]) == 0
    said = capsys.readouterr().out
    assert "'train'" in said
    assert re.search(r"`penstock queue purge data/runs/queue`.*prepare\.py", said)
    shutil.rmtree("out")
    assert main([str(config), "--max_iters=20"]) == 0
    assert "batch 50" in capsys.readouterr().out


def test_a_finished_run_that_is_started_again_says_so_and_shows_its_samples(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(48)
    assert main([str(config), "--max_iters=40"]) == 0
    first = capsys.readouterr().out
    before = Path("out/last.pt").read_bytes()
    assert main([str(config), "--max_iters=40"]) == 0
    again = capsys.readouterr().out
    assert re.search(r"max_iters=40", again)
    assert "resuming at" not in again
    ending = first[first.index("loss on train:") :]
    assert "given   " in ending
    assert again.endswith(ending)
    assert Path("out/last.pt").read_bytes() == before


def test_an_end_between_two_lines_of_the_log_is_summed_up_with_the_steps_of_the_figures(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(64)
    assert main([str(config)]) == 0
    said = capsys.readouterr().out
    assert "step 64" in said
    assert re.search(r"loss on train: \S+ at step 60, \S+ at step 10$", said, re.M)
    assert re.search(r"loss on val: \S+ at step 50;", said)


def test_a_file_that_cannot_be_read_stops_the_run_or_is_skipped_and_counted(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(40)
    broken = sorted(Path("data/runs/queue/train").glob("*.arrow"))[1]
    broken.write_bytes(broken.read_bytes()[:-10])
    assert main([str(config), "--max_iters=32", "--on_error=ignore"]) == 1
    assert re.search(r"--on_error=ignore: .*'raise'.*'skip'", capsys.readouterr().err)
    assert main([str(config), "--max_iters=32"]) == 1
    assert "on_error" in capsys.readouterr().err
    assert main([str(config), "--max_iters=32", "--on_error=skip"]) == 0
    said = capsys.readouterr().out
    assert "8 batches" in said
    assert "step 32" in said


def test_debug_shows_the_traceback_too(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", str(config)]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("Traceback")
    assert "QueueNotFoundError" in complaint
    assert re.search(r"^train\.py: Queue directory not found", complaint, re.M)


def test_no_arguments_or_help_say_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert re.search(r"\busage: .*train\.py", capsys.readouterr().err)
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert "torchrun" in help_text
    assert re.search(r"^  max_iters +2000  steps of training$", help_text, re.M)
