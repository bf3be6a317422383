"""kill -9, where it hurts: in the middle of training, and in the middle of preparing what a loader needs."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _scripts import open_loader, train_small
from _scripts.processes import Program, programs, wait_for_end, wait_until, write_chats

from penstock.loaders.adapters import RepeatLoader
from penstock.store import open_store
from token_stores import make_masks, make_store

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL"), pytest.mark.timeout(600)]

KILLS = 10
STEPS = 500
LONGEST, REACH = 18, 24
"""A run is killed after at most so many steps, give or take; it never takes more than REACH beyond."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores of random tokens; of one it is known which are to be learned."""
    home, draw = tmp_path_factory.mktemp("kills"), np.random.default_rng(3)
    for name, count in (("text", 130), ("chat", 70)):
        lengths = draw.integers(2, train_small.LENGTH + 1, count)
        rows = [draw.integers(0, train_small.VOCABULARY, length).tolist() for length in lengths]
        make_store(home / name, rows, make_masks(rows) if name == "chat" else None, shard_bytes=1000)
    return home


def has_lines(path: Path, count: int) -> bool:
    return path.exists() and path.read_bytes().count(b"\n") >= count


def history(folder: Path, number: int) -> list[dict[str, Any]]:
    """What a run was fed, without the line it was killed in."""
    lines = (folder / f"{number}.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_training_run_killed_ten_times_ends_with_the_weights_of_one_that_was_not(home: Path, tmp_path: Path) -> None:
    import torch

    draw = random.Random(7)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with programs(whole) as undisturbed, programs(killed) as started:
        alone = undisturbed.start("train_small", home=home, out=whole, number=0, steps=STEPS, most=None)
        # Programs are started ahead, so that one can import torch while another trains.
        ready: deque[tuple[Program, int]] = deque()
        for number in range(KILLS + 1):
            while len(ready) < 2 and number + len(ready) <= KILLS:
                ahead, lines = number + len(ready), draw.randint(train_small.SAVE_EVERY + 1, LONGEST)
                most = lines + REACH if ahead < KILLS else None
                facts = {"home": home, "out": killed, "number": ahead, "steps": STEPS, "most": most}
                ready.append((started.start("train_small", **facts), lines))
            if number == 0:
                alone.process.say("go")
            program, lines = ready.popleft()
            program.process.say("go")
            if number < KILLS:
                written = killed / f"{number}.jsonl"
                wait_until(partial(has_lines, written, lines), [program], "should be training")
                time.sleep(draw.random() * 0.01)
                assert program.returncode is None, "it was not killed, it ended"
                program.kill()
        wait_for_end([program, alone])
    runs = [history(killed, number) for number in range(KILLS + 1)]
    starts = [run[0]["step"] for run in runs]
    assert starts == sorted(set(starts)), "every run went on from a later checkpoint than the one before"
    survived = [line for run, (start, end) in zip(runs, pairwise([*starts, STEPS])) for line in run[: end - start]]
    wanted = history(whole, 0)
    assert [line["fed"] for line in survived] == [line["fed"] for line in wanted]
    assert survived == wanted, "the same loss, to the last bit, at every step"
    with train_small.make_loader(home, backend="numpy") as loader:
        assert [line["fed"] for line in wanted] == [
            train_small.fed(batch) for batch, _ in zip(RepeatLoader(loader), wanted)
        ]
    assert loader.epoch > 1, "there were no ends of epochs to be lost at"
    repeated = sum(len(run) for run in runs) - STEPS
    assert repeated > 0, "no run was killed behind a checkpoint"
    one, other = (torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (whole, killed))
    assert one["loader"] == other["loader"]
    for name, weights in one["model"].items():
        assert torch.equal(weights, other["model"][name])
    for name in ("means", "squares"):
        assert all(map(torch.equal, one["optimizer"][name], other["optimizer"][name]))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 200)


@pytest.fixture(scope="module")
def wanted(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plan, the rows and the store of a loader that nobody disturbed."""
    return look(chats, tmp_path_factory.mktemp("undisturbed"))


def look(chats: Path, cache: Path) -> dict[str, Any]:
    with open_loader.make_loader(chats, cache) as loader:
        (store,) = loader.sources[0].inputs.table.stores
        rows = [batch.metadata["row"].tolist() for batch in loader]
    assert [path.name for path in (cache / "stores").iterdir()] == [store.path.name], "something was left beside it"
    with open_store(store.path, verify="full") as again:
        shards = [(shard.name, shard.rows, shard.index_checksum) for shard in again.manifest.shards]
        content = [{name: np.array(value).tolist() for name, value in again[i].items()} for i in range(len(again))]
    return {"plan": loader.plan.fingerprint, "rows": rows, "shards": shards, "content": content}


def start(of: Any, name: str, chats: Path, folder: Path, hold: int | None = None) -> Program:
    program: Program = of.start("open_loader", source=chats, cache=folder / "cache", out=folder, name=name, hold=hold)
    return program


@pytest.mark.parametrize("hold", [0, 1, 6])
def test_a_loader_goes_on_preparing_where_a_killed_one_stopped(
    hold: int, chats: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    with programs(tmp_path) as started:
        first = start(started, "first", chats, tmp_path, hold)
        wait_until((tmp_path / "first.holds").exists, [first], "should be preparing")
        first.kill()
        second = start(started, "second", chats, tmp_path)
        wait_for_end([second])
    facts = json.loads((tmp_path / "second.json").read_text())
    assert facts["notes"] == ["resumed" if hold else "made"]
    assert facts["rows"] == wanted["rows"]
    assert look(chats, tmp_path / "cache") == wanted


def test_of_those_who_wait_for_a_store_one_takes_over_when_its_maker_is_killed(
    chats: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    with programs(tmp_path) as started:
        first = start(started, "first", chats, tmp_path, 4)
        wait_until((tmp_path / "first.holds").exists, [first], "should be preparing")
        others = [start(started, name, chats, tmp_path) for name in ("second", "third")]
        for name in ("second", "third"):
            wait_until((tmp_path / f"{name}.waits").exists, [first, *others], "should be waiting")
        first.kill()
        wait_for_end(others)
    facts = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("second", "third")]
    assert sorted(each["notes"] for each in facts) == [["found"], ["resumed"]]
    assert [(each["plan"], each["rows"]) for each in facts] == [(wanted["plan"], wanted["rows"])] * 2
    assert look(chats, tmp_path / "cache") == wanted
