from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from penstock.fsqueue import DatasetConsumer, ProviderProgress
from penstock.fsqueue.prepare_command import ProgressLines, main, make_provider, summary

ROOT = Path(__file__).parents[3]

PROVIDER = """
import numpy as np
from penstock.config import Setting
from penstock.fsqueue import DataProviderBase

class Tiny(DataProviderBase):
    settings = {"high": Setting(float, 100, check=lambda high: high > 1, text="a number above 1")}

    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                                 {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"}]}

    def sample_batch(self, split, rng):
        x = rng.integers(int(self.config.high), size=(self.batch_size, self.block_size))
        return {"x": x, "y": x + 1}
"""
CONFIG = 'dataset = "tiny"\nbatch_size = 4\nblock_size = 8\nbatches_per_file = 2\nown = 3\n'

Sees = Callable[[], tuple[str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("data/tiny/prepare_streaming.py", PROVIDER), ("config/train.py", CONFIG)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sees(capsys: pytest.CaptureFixture[str]) -> Sees:
    return lambda: tuple(capsys.readouterr())  # type: ignore[return-value]


def test_the_queue_is_filled_and_can_be_read(place: Path, sees: Sees) -> None:
    assert main(["config/train.py", "--max_batches=5", "--batch_size=3", "--high=50"]) == 0
    _, said = sees()
    for words in (
        "dataset   tiny (data/tiny), made by Tiny",
        "queue     data/tiny/queue",
        "batches   3 rows of 8",
        "splits    train 90%, val 10%",
        "64 files or 1.0 GiB per split",
        "until     5 batches per split",
        "config/train.py: unknown settings, passed on to Tiny: own",
        "prepare.py: done: train 5, val 5 batches in 6 files",
    ):
        assert words in said
    assert said.count("passed on to") == 1
    with DatasetConsumer("data/tiny/queue", timeout_seconds=300) as consumer:
        x, y = consumer.get_batch("train")
    assert x.shape == (3, 8)
    assert (y == x + 1).all()
    assert x.max() < 50


def test_nothing_of_the_process_is_left_changed(place: Path) -> None:
    log = logging.getLogger("penstock")
    before = (
        list(sys.path),
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
        log.level,
        log.handlers[:],
    )
    assert main(["config/train.py", "--max_batches=1"]) == 0
    after = (list(sys.path), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), log.level, log.handlers)
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config/tarin.py"], "'config/train.py'"),
        (
            ["config/train.py", "--dataset=tinny"],
            "'tinny'",
        ),
        (["config/train.py", "--dataset=../tiny"], "--dataset"),
        (["config/train.py", "--data_root=nowhere"], "'nowhere'"),
        (["config/train.py", "--hihg=3"], "--hihg"),
        (["config/train.py", "--high=1"], "--high"),
        (["config/train.py", "--batch_size"], "'--batch_size'"),
        (["config/train.py", "-x"], "--name"),
        (["config/short.py"], "batch_size"),
        (["config/other.py"], "'x'"),
        (["config/train.py", "--dataset=file"], "prepare_streaming.py"),
        (["config/train.py", "--dataset=missing"], "'data/missing/input.txt'"),
        (["config/train.py", "--dataset=wrong"], "sample_batch('train')"),
    ],
)
def test_what_has_to_be_mended_is_said_without_a_traceback(
    place: Path, sees: Sees, arguments: list[str], message: str
) -> None:
    (place / "config/short.py").write_text("dataset = 'a/b'\nblock_size = 8\n")
    (place / "config/other.py").write_text(CONFIG + "high = 'x'\n")
    wrong = PROVIDER.replace("class Tiny", "class Wrong").replace(', "y": x + 1}', "}")
    missing = PROVIDER + "    def __init__(self, config, **options):\n"
    missing += "        super().__init__(config, **options)\n        open(self.data_dir / 'input.txt')\n"
    for name, text in (("file", "1 / 0\n"), ("missing", missing), ("wrong", wrong)):
        (place / "data" / name).mkdir()
        (place / "data" / name / "prepare_streaming.py").write_text(text)
    assert main(arguments) == 1
    out, said = sees()
    assert out == ""
    assert message in said
    assert "Traceback" not in said


def test_errors_of_the_providers_code_keep_their_traceback(place: Path) -> None:
    (place / "data/tiny/prepare_streaming.py").write_text(PROVIDER.replace("x = rng", "1 / 0; x = rng"))
    with pytest.raises(ZeroDivisionError):
        main(["config/train.py"])


def test_one_config_is_expected(sees: Sees) -> None:
    assert main([]) == 2
    assert re.search(r"(?s)\busage: .*prepare\.py", sees()[1])
    assert main(["a.py", "--batch_size", "8"]) == 2
    assert re.search(r"'a\.py'.*--name", sees()[1])


def test_help_lists_the_settings(sees: Sees) -> None:
    for flag in ("-h", "--help"):
        assert main(["config/train.py", flag]) == 0
        out, said = sees()
        assert said == ""
        assert out.startswith("usage: python prepare.py CONFIG.py [--name=value ...] [--debug]\n")
        assert "backlog_bytes" in out
        assert re.search(r"'train'.*'val'", out)
        assert "learning_rate" not in out


def test_the_kind_of_a_providers_setting_holds_for_overrides(place: Path) -> None:
    (place / "config/train.py").write_text(CONFIG + "high = 100\nhalf = high / 2\n")
    provider = make_provider("config/train.py", ["--high=2.5"])
    assert (provider.config.high, provider.config.half) == (2.5, 1.25)


SIGNALLED = """
import os, signal
from pathlib import Path

class Signalled(Tiny):
    def sample_batch(self, split, rng):
        if self.batch_index in {at}:
            os.kill(os.getpid(), signal.{number})
        return super().sample_batch(split, rng)

Provider = Signalled
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_the_first_signal_lets_the_file_be_finished(
    place: Path, number: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "data/tiny/prepare_streaming.py").write_text(PROVIDER + SIGNALLED.format(at=(4,), number=number))
    assert main(["config/train.py", "--split_proportions={'train': 1}"]) == 0
    said = capfd.readouterr().err
    assert "stopping when this file is done; once more to stop at once" in said
    assert "done: " in said
    assert len(list(Path("data/tiny/queue/train").glob("*.arrow"))) == 3
    assert list(Path("data/tiny/queue/members").iterdir()) == []


def test_a_signal_before_the_first_file_is_not_lost(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    early = "import os, signal\nclass Early(Tiny):\n    def build_meta(self):\n"
    early += "        os.kill(os.getpid(), signal.SIGINT) if not self.queue_dir.exists() else None\n"
    early += "        return super().build_meta()\nProvider = Early\n"
    (place / "data/tiny/prepare_streaming.py").write_text(PROVIDER + early)
    assert main(["config/train.py", "--backlog_files=2"]) == 0
    assert "stopping when this file is done" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_the_second_signal_stops_at_once_and_leaves_no_claim(
    place: Path, number: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "data/tiny/prepare_streaming.py").write_text(PROVIDER + SIGNALLED.format(at=(4, 5), number=number))
    assert main(["config/train.py", "--split_proportions={'train': 1}"]) == code
    assert "stopped at once" in capfd.readouterr().err
    queue = Path("data/tiny/queue")
    assert len(list(queue.glob("train/*.arrow"))) == 2
    assert list(queue.glob("members/*")) == []
    assert not [path for path in queue.glob("train/lanes/*") if ".by-" in path.name]


def a_progress(seconds: float, batches: int, *, waiting: bool = False) -> ProviderProgress:
    return ProviderProgress(
        {"train": batches, "val": 2}, {"train": 9, "val": 1}, 2048, seconds, waiting, {"train": 3, "val": 0}
    )


def test_lines_of_a_log_come_every_few_seconds_and_rarely_while_it_waits() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressLines(console) as lines:
        for tenth in range(1, 1400):
            lines(a_progress(tenth / 10, min(tenth * 10, 1000), waiting=tenth > 100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    said = text.splitlines()
    assert said[0] == (
        "prepare.py: train 500, val 2 batches in 10 files, 2.0 KiB, 100.4 batches/s; backlog train 3, val 0 files"
    )
    assert said[1].endswith("backlog train 3, val 0 files")
    assert said[2].startswith("prepare.py: train 1,000, val 2 batches in 10 files, 2.0 KiB, 0.0 batches/s;")
    assert said[2].endswith("; waiting for the trainer to read")
    assert len(said) == 4


def test_a_terminal_has_one_line_that_is_gone_at_the_end() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with ProgressLines(console) as lines:
        lines(a_progress(1.0, 10))
        assert "train 10, val 2 batches" in console.file.getvalue()  # type: ignore[attr-defined]
    assert console.file.getvalue().endswith("\x1b[2K")  # type: ignore[attr-defined]


def test_the_summary_says_what_was_made() -> None:
    assert summary(a_progress(3.0, 18)) == "done: train 18, val 2 batches in 10 files, 2.0 KiB, in 3.0 s"
    assert summary(ProviderProgress()) == "done: 0 batches in 0 files, 0 B, in 0.0 s"


@pytest.mark.timeout(900)
def test_the_command_runs_as_printed_until_it_is_told_to_stop(place: Path) -> None:
    command = [sys.executable, str(ROOT / "prepare.py"), "config/train.py", "--backlog_files=3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as running:
        assert running.stderr is not None
        try:
            assert queue_appears(running)
            with DatasetConsumer("data/tiny/queue", timeout_seconds=300) as consumer:
                for _ in range(10):
                    x, y = consumer.get_batch("train")
                    assert (y == x + 1).all()
            running.send_signal(signal.SIGTERM)
            said = running.stderr.read()
            assert running.wait(300) == 0
        finally:
            running.kill()
    assert "queue     data/tiny/queue" in said
    assert "prepare.py" in said
    assert "Traceback" not in said


def queue_appears(running: subprocess.Popen[str]) -> bool:
    while not Path("data/tiny/queue/queue.json").exists():
        try:
            running.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        return False
    return True


def test_debug_shows_the_traceback_too(place: Path, sees: Sees) -> None:
    assert main(["--debug", "config/train.py", "--max_batches=1"]) == 0
    assert main(["config/train.py", "--high=1", "--debug"]) == 1
    _, said = sees()
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("prepare.py: config/train.py: --high=1")
