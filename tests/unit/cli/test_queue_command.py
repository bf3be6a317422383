"""`penstock queue` as a person types it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import penstock.cli.queue as command
from penstock.cli.main import app
from penstock.fsqueue import QueueSink, QueueSource
from penstock.fsqueue.members import QueueMember, QueueOptions
from penstock.fsqueue.publisher import Limits
from penstock.fsqueue.queue import Queue

Call = Callable[..., Any]


@pytest.fixture
def queue(here: Path) -> Path:
    """The queue of a dataset: ten batches in five files."""
    path = here / "data" / "digits" / "queue"
    meta = {"training_type": "CLM", "vocab_size": 10}
    with QueueSink(path, batches_per_file=2, meta=meta, limits=Limits(100)) as sink:
        for i in range(10):
            sink.consume(pa.record_batch({"x": [[i, i]], "text": [f"batch {i}"]}))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a terminal."""
    monkeypatch.setattr(command, "_can_ask", lambda: True)


def damaged(queue: Path) -> Path:
    [file] = queue.glob("train/000000000003-*")
    file.write_bytes(file.read_bytes()[:-50])
    return file


def member(queue: Path, lease_seconds: float = 0.2) -> QueueMember:
    options = QueueOptions(lease_seconds=lease_seconds)
    return QueueMember(Queue.open(queue), "c", {"role": "consumer"}, options).join()


# -- status ----------------------------------------------------------------------------------------------------------


def test_status_shows_what_waits_and_who_is_to_blame(queue: Path, penstock: Call) -> None:
    result = penstock("queue", "status", str(queue), "--seconds", "0.01")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(
        re.fullmatch(r"train +5 +10 +\S+ \S+ +\S+ s +0 +10 +0\.0 +0\.0 +ends after 10 batches", x) for x in lines
    )
    assert any(line.split() == ["training_type", "CLM"] for line in lines)
    assert any(line.split() == ["vocab_size", "10"] for line in lines)
    assert any("x: list<int64>" in line for line in lines)
    assert result.stdout.splitlines()[-1] == "no member is at work; 5 files are ready for a trainer"
    assert result.stdout.count("member") == 1


def test_status_shows_members_and_cursors(queue: Path, penstock: Call) -> None:
    with QueueSource(queue, order="strict") as source:
        for _ in range(3):
            source.next_batch(10)
        result = penstock("queue", "status", str(queue), "--seconds", "0.01")
        assert re.search(r"c[0-9a-f]{12} +consumer 0 of 1 +\S+ +\d+ +\d{4}-\S+ \S+ +\d+ +30 s +alive", result.stdout)
        assert re.search(r"train +0 of 1 +2 +2", result.stdout)


def test_status_takes_a_dataset_or_a_config(queue: Path, here: Path, penstock: Call) -> None:
    (here / "train.py").write_text("dataset = 'digits'\nbatch_size = 1\nblock_size = 2\n")
    for place in ("data/digits", "train.py", str(queue)):
        result = penstock("queue", "status", place, "--json", "--seconds", "0")
        assert result.exit_code == 0, result.stderr
        assert Path(json.loads(result.stdout)["path"]).resolve() == queue.resolve()


def test_status_as_json_holds_everything(queue: Path, penstock: Call) -> None:
    facts = json.loads(penstock("queue", "status", str(queue), "--json", "--seconds", "0.01").stdout)
    [train] = facts["splits"]
    assert (train["ready_files"], train["ready_batches"], train["end"], train["published_per_second"]) == (5, 10, 10, 0)
    assert facts["fingerprint"] == Queue.open(queue).fingerprint
    assert facts["meta"]["vocab_size"] == 10
    assert facts["seconds"] > 0


def test_status_is_watched_until_it_is_stopped(queue: Path, penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter([None, None, KeyboardInterrupt()])

    def sleep(seconds: float) -> None:
        stop = next(pauses)
        if stop is not None:
            raise stop

    monkeypatch.setattr("penstock.cli.queue.time.sleep", sleep)
    result = penstock("queue", "status", str(queue), "--watch", "--json")
    assert result.exit_code == 0
    assert [json.loads(line)["splits"][0]["ready_files"] for line in result.stdout.splitlines()] == [5, 5]


@pytest.mark.parametrize("verb", ["status", "purge", "doctor"])
def test_a_queue_that_is_not_there_is_said_on_stderr(here: Path, penstock: Call, verb: str) -> None:
    result = penstock("queue", verb, "data/none")
    assert result.exit_code == 1
    assert "data/none" in result.stderr
    assert result.stdout == ""


# -- purge -----------------------------------------------------------------------------------------------------------


def test_purge_says_what_will_go_and_asks(queue: Path, asked: None) -> None:
    result = CliRunner().invoke(app, ["queue", "purge", str(queue)], input="n\n")
    assert result.exit_code == 1
    assert re.search(r"5 batch files, \S+ \S+, 10 batches", result.stderr)
    assert queue.exists()
    result = CliRunner().invoke(app, ["queue", "purge", str(queue)], input="y\n")
    assert result.exit_code == 0
    assert "removed" in result.stdout
    assert not queue.exists()


def test_purge_does_not_ask_where_nobody_can_answer(queue: Path, penstock: Call) -> None:
    result = penstock("queue", "purge", str(queue))
    assert result.exit_code == 1
    assert "10 batches" in result.stderr
    assert "pass --yes" in result.stderr
    assert queue.exists()


def test_purge_counts_only_what_was_not_consumed(queue: Path, penstock: Call) -> None:
    with QueueSource(queue) as source:
        for _ in range(3):
            source.next_batch(10)
    facts = json.loads(penstock("queue", "purge", "data/digits", "--yes", "--json").stdout)
    assert (facts["files"], facts["batches"]) == (4, 7)
    assert facts["freed_bytes"] > 0
    assert not queue.exists()
    assert queue.parent.exists()
    assert list(queue.parent.iterdir()) == []


def test_purge_refuses_while_somebody_is_at_work_unless_forced(queue: Path, penstock: Call) -> None:
    alive = member(queue)
    result = penstock("queue", "purge", str(queue), "--yes")
    assert result.exit_code == 1
    assert str(alive.id) in result.stderr
    assert queue.exists()
    assert penstock("queue", "purge", str(queue), "--yes", "--force").exit_code == 0
    assert not queue.exists()
    alive.leave()


def test_purge_takes_the_dead_for_dead(queue: Path, penstock: Call) -> None:
    dead = member(queue)
    dead._heartbeat.stop()
    assert penstock("queue", "purge", str(queue), "--yes").exit_code == 0
    assert not queue.exists()


def test_a_damaged_queue_can_be_purged(queue: Path, penstock: Call) -> None:
    (queue / "queue.json").write_text("{")
    result = penstock("queue", "purge", str(queue), "--yes")
    assert result.exit_code == 0
    assert "5 batch files" in result.stdout
    assert "unknown number" in result.stdout
    assert not queue.exists()


@pytest.mark.parametrize("options", [[], ["--force"]])
def test_what_is_no_queue_is_never_touched(here: Path, penstock: Call, options: list[str]) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").write_text("all of it")
    result = penstock("queue", "purge", "thesis", "--yes", *options)
    assert result.exit_code == 1
    assert "thesis" in result.stderr
    assert (here / "thesis" / "chapter.tex").read_text() == "all of it"


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_a_sound_queue_is_told_so(queue: Path, penstock: Call) -> None:
    result = penstock("queue", "doctor", "data/digits")
    assert result.exit_code == 0
    assert re.search(r"5 files.*10 batches", result.stdout)
    assert "finding" not in result.stdout


def test_a_damaged_file_is_named_with_the_remedy_and_then_repaired(queue: Path, penstock: Call) -> None:
    file = damaged(queue)
    result = penstock("queue", "doctor", str(queue))
    assert result.exit_code == 3
    assert result.stdout.startswith("error: unreadable: ")
    assert str(file) in result.stdout
    assert "--repair" in result.stdout
    assert "1 finding, 0 repaired" in result.stdout
    result = penstock("queue", "doctor", str(queue), "--repair")
    assert result.exit_code == 0
    assert f"{file.name}.bad" in result.stdout
    assert "1 finding, 1 repaired" in result.stdout
    assert penstock("queue", "doctor", str(queue)).exit_code == 0


def test_doctor_as_json_is_one_object(queue: Path, penstock: Call) -> None:
    file = damaged(queue)
    result = penstock("queue", "doctor", str(queue), "--json")
    assert result.exit_code == 3
    facts = json.loads(result.stdout)
    assert facts["sound"] is False
    assert [(finding["severity"], finding["where"]) for finding in facts["findings"]] == [("error", str(file))]


def test_doctor_watches_members_and_gives_back_what_the_dead_had(queue: Path, penstock: Call) -> None:
    source = QueueSource(queue, lease_seconds=0.2)
    source.next_batch(10)
    assert source._input is not None
    source._input.member._heartbeat.stop()
    result = penstock("queue", "doctor", str(queue), "--repair")
    assert result.exit_code == 0
    assert re.search(r"1 member.*0\.2 s", result.stderr)
    assert "repaired: " in result.stdout
    assert not list(queue.glob("train/*.by-*"))


def test_the_group_lists_its_verbs(penstock: Call) -> None:
    result = penstock("queue", "--help")
    assert result.exit_code == 0
    for verb in ("status", "purge", "doctor"):
        assert verb in result.stdout
