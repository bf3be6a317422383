"""Loaders in real processes of torch.distributed, killed with SIGKILL and gone on with on other numbers of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _scripts.processes import KILLED, Program, programs, wait_for_end, wait_until, write_chats
from _scripts.read_ranks import (
    EPOCHS,
    GLOBAL_BATCH,
    KINDS,
    LENGTH,
    PLANNED,
    SAVE_EVERY,
    batches_of,
    make_loader,
    record,
)
from tests.servers import free_ports

from token_stores import make_rows, make_store

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

Records = dict[str, list[dict[str, Any]]]


class Attempt(NamedTuple):
    world: int
    prefetch: int | None
    cache: str
    """Ranks that find it empty all prepare the chats at once."""


ATTEMPTS = [Attempt(2, 2, "first"), Attempt(4, 0, "second"), Attempt(1, None, "second"), Attempt(2, 1, "second")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranks")
    make_store(home / "text0", make_rows(170, LENGTH), shard_bytes=2000)
    make_store(home / "text1", make_rows(60, LENGTH, seed=1), shard_bytes=2000)
    write_chats(home / "chats.jsonl", 130)
    return home


@pytest.fixture(scope="module")
def alone(home: Path) -> tuple[Records, dict[str, str]]:
    """What one process reads that never stops, and the names of its plans."""
    records: Records = {}
    plans: dict[str, str] = {}
    for kind in KINDS:
        options = {"rank": 0, "world_size": 1, "batch_size": GLOBAL_BATCH, "prefetch": 0}
        with make_loader(kind, home, home / "alone", backend="numpy", **options) as loader:
            if kind in PLANNED:
                plans[kind] = loader.plan.fingerprint
            records[kind] = [record(kind, batch) for batch in batches_of(loader)]
    return records, plans


@pytest.fixture(scope="module")
def attempts(home: Path, alone: tuple[Records, dict[str, str]]) -> list[Path]:
    """The folders of four runs, of which all but the last were killed; each went on where the one before had saved."""
    draw, turn = random.Random(20), 0
    folders = []
    for number, attempt in enumerate(ATTEMPTS):
        out = home / f"attempt-{number}"
        out.mkdir()
        last = attempt is ATTEMPTS[-1]
        turn = turn // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY + draw.randrange(1, 2 * SAVE_EVERY)
        # In the middle of a turn, in the middle of a line; once in the middle of the save behind the end of an epoch.
        death: list[Any] | None = [draw.randrange(attempt.world), turn, draw.choice(KINDS[1:])]
        if number == 2:
            death = [0, alone[0]["concat"][-1]["step"] // EPOCHS + 1 + SAVE_EVERY, "saving"]
        death = None if last else death
        with programs(out) as started:
            facts = {"home": home, "cache": home / attempt.cache, "out": out, "world": attempt.world}
            facts |= {"port": free_ports(1)[0], "prefetch": attempt.prefetch, "death": death}
            ranks = [started.start("read_ranks", rank=rank, **facts) for rank in range(attempt.world)]
            if death is None:
                wait_for_end(ranks)
            else:
                wait_until_killed(ranks, death[0])
        folders.append(out)
    return folders


def wait_until_killed(ranks: list[Program], victim: int) -> None:
    """The victim is gone; the others, which wait for it or have noticed, are killed as well."""
    wait_until(lambda: ranks[victim].returncode == KILLED, [ranks[victim]], "should have been killed", ends=True)
    for rank in ranks:
        rank.kill()


def opened(folder: Path) -> list[dict[str, Any]]:
    """What each rank found when it began."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.opened.json"))]


def written(folder: Path) -> list[Records]:
    """What each rank read, without the line it was killed in."""
    found = []
    for path in sorted(folder.glob("[0-9].jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found.append({kind: [line for line in lines if line["kind"] == kind] for kind in KINDS})
    return found


def share(whole: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What a rank should have of a global batch; the first ranks take the odd samples of a short one."""
    samples = whole["samples"]
    low, high = (-(-len(samples) * place // world) for place in (rank, rank + 1))
    return {**whole, "samples": samples[low:high]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_surviving_batches_of_all_ranks_are_those_of_one_process_that_never_stopped(
    kind: str, alone: tuple[Records, dict[str, str]], attempts: list[Path]
) -> None:
    wanted = alone[0][kind]
    starts = [opened(folder)[0]["starts"][kind] for folder in attempts]
    survived: list[dict[str, Any]] = []
    for folder, start, end in zip(attempts, starts, [*starts[1:], len(wanted)], strict=True):
        ranks = [rank[kind][: end - start] for rank in written(folder)]
        assert {len(rank) for rank in ranks} == {end - start}, "a rank had not read what was saved as read"
        for parts in zip(*ranks):
            assert len({json.dumps({**part, "samples": None}) for part in parts}) == 1
            survived.append({**parts[0], "samples": [sample for part in parts for sample in part["samples"]]})
    assert survived == wanted
    assert survived[-1]["epoch"] == EPOCHS - 1


@pytest.mark.parametrize("kind", PLANNED)
def test_what_was_read_behind_the_last_save_is_read_again_the_same(
    kind: str, alone: tuple[Records, dict[str, str]], attempts: list[Path]
) -> None:
    starts = [opened(folder)[0]["starts"][kind] for folder in attempts]
    again = 0
    for folder, attempt, start, following in zip(attempts, ATTEMPTS, starts, [*starts[1:], None], strict=True):
        for rank, found in enumerate(written(folder)):
            for number, line in enumerate(found[kind], start):
                assert line == share(alone[0][kind][number], rank, attempt.world), (folder.name, rank, number)
                again += following is not None and number >= following
    assert again, "no run was killed behind a save"


def test_a_rank_is_known_from_torch_and_every_rank_has_as_many_batches(
    alone: tuple[Records, dict[str, str]], attempts: list[Path]
) -> None:
    lengths = {kind: [sum(line["epoch"] == epoch for line in alone[0][kind]) for epoch in (0, 1)] for kind in PLANNED}
    for folder, attempt in zip(attempts, ATTEMPTS, strict=True):
        ranks = opened(folder)
        assert [rank["rank"] for rank in ranks] == [f"rank {rank} of {attempt.world}" for rank in range(attempt.world)]
        assert [rank["lengths"] for rank in ranks] == [lengths] * attempt.world
        assert len({json.dumps(rank["starts"]) for rank in ranks}) == 1
    counts = [{kind: len(lines) for kind, lines in rank.items()} for rank in written(attempts[-1])]
    assert counts[0] == counts[1]
    assert lengths["concat"][0] in [opened(folder)[0]["starts"]["concat"] for folder in attempts], "no end of an epoch"
    turns = [opened(folder)[0]["turn"] for folder in attempts]
    assert turns == sorted(set(turns)), "every run went on from a later save than the one before"


def test_of_ranks_that_start_at_once_one_prepares_and_all_get_the_same_store(
    home: Path, alone: tuple[Records, dict[str, str]], attempts: list[Path]
) -> None:
    for number, (folder, attempt) in enumerate(zip(attempts, ATTEMPTS, strict=True)):
        ranks = opened(folder)
        assert [rank["plans"] for rank in ranks] == [alone[1]] * attempt.world
        makers = [made for rank in ranks for made in rank["made"]]
        # The first attempts find no store: one rank makes it. The others know it without opening the input.
        assert sorted(makers) == ([False] * (attempt.world - 1) + [True] if number < 2 else [])
        assert len({rank["store"] for rank in ranks}) == 1
        stores = home / attempt.cache / "stores"
        assert [str(path) for path in stores.iterdir()] == [ranks[0]["store"]], "something was left beside the store"
