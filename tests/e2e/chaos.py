"""Chaos: kill -9 on pipelines, stores, queues, loaders and rollouts, again and again, and a count of the harm to rows.

    make chaos                          1,000 kills over all subjects
    make chaos SUBJECT=queue KILLS=100

It runs the programs that the tests run, for as long as it takes to kill them that often. One line for each subject says
how many rows were missing, doubled or changed; if any, the exit code is 1, and the folder of that run is kept.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "_scripts"), str(HERE.parent), str(HERE.parents[1])]

import test_checkpoint  # noqa: E402
import test_kills  # noqa: E402
import test_queue_chaos  # noqa: E402
from _scripts import resume_loader, train_small  # noqa: E402
from _scripts.processes import KILLED, Program, Programs, programs, wait_for_end, write_chats  # noqa: E402
from _scripts.queue_batches import PER_FILE, make_provider  # noqa: E402

from penstock.fsqueue import Queue  # noqa: E402
from penstock.fsqueue.layout import Lanes  # noqa: E402
from token_stores import make_store  # noqa: E402

A_RUN = 12
"""Kills of one run, at most."""
OUTPUTS = [*test_checkpoint.OUTPUTS, "out.delta"]


@dataclass
class Count:
    """Kills of a subject, and the harm they did."""

    kills: int = 0
    runs: int = 0
    rows: int = 0
    missing: int = 0
    doubled: int = 0
    changed: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))

    @property
    def harm(self) -> int:
        return self.missing + self.doubled + self.changed

    def compare(self, found: Iterable[Any], wanted: Iterable[Any]) -> None:
        """Count rows, which come in order."""
        found, wanted = ([json.dumps(row) for row in rows] for rows in (found, wanted))
        there, due = Counter(found), Counter(wanted)
        missing, doubled = (due - there).total(), (there - due).total()
        self.rows += len(wanted)
        self.missing += missing
        self.doubled += sum((there - due)[row] for row in there if row in due)
        self.changed += sum((there - due)[row] for row in there if row not in due)
        if not missing and not doubled:
            self.changed += sum(one != other for one, other in zip(found, wanted))


class Executioner:
    """Starts a program again and again and kills it at random moments, sooner if it often comes to its end before."""

    def __init__(self) -> None:
        self._seconds = 1.0

    def kill(self, start: Callable[[], Program], kills: int, draw: random.Random) -> int:
        """Up to the end of the program; the number of kills."""
        for done in range(kills):
            program, until = start(), time.monotonic() + draw.random() * self._seconds
            while program.returncode is None and time.monotonic() < until:
                time.sleep(0.002)
            program.kill()
            assert program.returncode in (0, KILLED), program.complaints.read_text()
            self._seconds *= 1.1 if program.returncode == KILLED else 0.7
            if program.returncode == 0:
                return done
        wait_for_end([start()])
        return kills


class EngineChaos:
    """Pipelines with a checkpoint and a quarantine, into every kind of output."""

    def __init__(self, home: Path) -> None:
        rows = ({"n": i, "text": f"row {i} " * 5} for i in range(test_checkpoint.ROWS))
        (home / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.home, self.executioner = home, Executioner()

    def run(self, folder: Path, started: Programs, kills: int, draw: random.Random) -> Count:
        out, kept, rows = folder / draw.choice(OUTPUTS), folder / "kept", range(test_checkpoint.ROWS)

        def start() -> Program:
            return started.start("checkpoint_job", source=self.home / "in.jsonl", out=out, kept=kept)

        count = Count(self.executioner.kill(start, kills, draw), 1)
        count.compare(test_checkpoint.read_back(out), [i for i in rows if i % 32 != 7 and i % 500 != 499])
        bad = (json.loads(line)["data"]["n"] for line in (kept / "bad.jsonl").read_text().splitlines())
        count.compare(bad, [i for i in rows if i % 32 != 7 and i % 500 == 499])
        return count


class StoreChaos:
    """Stores that a loader prepares of raw chats."""

    def __init__(self, home: Path) -> None:
        self.chats = write_chats(home / "chats.jsonl", 1500)
        self.wanted = test_kills.look(self.chats, home / "undisturbed")
        self.executioner = Executioner()

    def run(self, folder: Path, started: Programs, kills: int, draw: random.Random) -> Count:
        def start() -> Program:
            facts = {"source": self.chats, "cache": folder / "cache", "out": folder, "name": "one", "hold": None}
            return started.start("open_loader", **facts)

        count = Count(self.executioner.kill(start, kills, draw), 1)
        found = test_kills.look(self.chats, folder / "cache")
        count.compare(found["content"], self.wanted["content"])
        count.changed += sum(found[name] != self.wanted[name] for name in ("plan", "rows", "shards"))
        return count


class QueueChaos:
    """Providers and consumers of a queue; any of them may die at any moment."""

    def __init__(self, home: Path) -> None:
        pass

    def run(self, folder: Path, started: Programs, kills: int, draw: random.Random) -> Count:
        queue = folder / "queue"
        made = Queue.create(queue, make_provider(queue).description())
        crowd = test_queue_chaos.Crowd(started, queue, folder, draw)
        done = 0
        while done < kills:
            time.sleep(draw.random() * 0.25)
            crowd.strike()
            crowd.wake()
            done = sum(number for blow, number in crowd.blows.items() if blow.startswith("kill"))
        lanes = Lanes(made.split("train").lanes, made.description.lanes)
        end = (max(lane.number for lane in lanes.all()) + 2) * PER_FILE + 1
        done += len(crowd.living)
        crowd.finish(end)
        delivered, _ = test_queue_chaos.read_logs(folder)
        delivered += test_queue_chaos.drained(queue)
        # A batch may come again, but then its file says that a lease on it ran out; Judge has compared every batch.
        count = Count(done, 1)
        count.compare(sorted({k for k, _ in delivered}), range(end))
        count.doubled += sum(number - 1 for number in Counter(delivered).values())
        return count


class LoaderChaos:
    """Loaders that resume: of a mixture, of packed documents, of a stream."""

    STEPS = 600

    def __init__(self, home: Path) -> None:
        self.home, draw = home, random.Random(3)
        for name, rows in (("text", 130), ("chat", 70)):
            lengths = (draw.randint(2, train_small.LENGTH) for _ in range(rows))
            make_store(home / name, [[draw.randrange(train_small.VOCABULARY) for _ in range(n)] for n in lengths])
        self.wanted = {kind: resume_loader.read(home, kind, self.STEPS) for kind in ("mixed", "packed", "streamed")}
        self.executioner = Executioner()

    def run(self, folder: Path, started: Programs, kills: int, draw: random.Random) -> Count:
        kind = draw.choice(sorted(self.wanted))

        def start() -> Program:
            facts = {"home": self.home, "kind": kind, "saved": folder / "saved.json", "steps": self.STEPS}
            return started.start("resume_loader", **facts)

        count = Count(self.executioner.kill(start, kills, draw), 1)
        count.compare(json.loads((folder / "saved.json").read_text())["seen"], self.wanted[kind])
        return count


class RolloutChaos:
    """A queue of rollouts, with inference engines and a trainer that die and come back."""

    ENGINES, MOST = 2, 400

    def __init__(self, home: Path) -> None:
        pass

    def run(self, folder: Path, started: Programs, kills: int, draw: random.Random) -> Count:
        queue, log, saved = folder / "queue", folder / "accepted.log", folder / "saved.json"
        lives = 0

        def engine(most: int = self.MOST, *, last: bool = False) -> Program:
            nonlocal lives
            lives += 1
            facts = {"queue": queue, "log": log, "life": lives, "most": most, "last": last}
            return started.start("rollout_engine", **facts, seed=draw.getrandbits(30))

        def trainer() -> Program:
            facts = {"queue": queue, "saved": saved, "ended": folder / "ended"}
            return started.start("rollout_trainer", **facts, seed=draw.getrandbits(30))

        living = [engine() for _ in range(self.ENGINES)] + [trainer()]
        done = 0
        while done < kills:
            time.sleep(draw.random() * 0.3)
            place = draw.randrange(len(living))
            living[place].kill()
            assert living[place].returncode in (0, KILLED), living[place].complaints.read_text()
            done += living[place].returncode == KILLED
            living[place] = engine() if place < self.ENGINES else trainer()
        for program in living[: self.ENGINES]:
            program.kill()
        done += self.ENGINES
        wait_for_end([engine(3, last=True), living[-1]])
        seen = json.loads(saved.read_text())["seen"]
        names = [name for name, _ in seen]
        accepted = {f"{line}.{part}" for line in log.read_text().splitlines() for part in (0, 1)}
        count = Count(done, 1, len(names))
        count.missing = len(accepted - set(names))
        count.doubled = len(names) - len(set(names))
        count.changed = sum(ids[:3] != [1, 2, int(name.split(".")[1])] for name, ids in seen)
        # What was appended and not yet written down as accepted may be there; never half of a group.
        groups = Counter(name.rpartition(".")[0] for name in set(names))
        count.missing += sum(size != 2 for size in groups.values())
        return count


SUBJECTS: dict[str, Any] = {
    "engine": EngineChaos,
    "store": StoreChaos,
    "queue": QueueChaos,
    "loaders": LoaderChaos,
    "rollouts": RolloutChaos,
}


def chaos(subject: str, kills: int, seed: int) -> Count:
    """Runs of a subject until so many kills are done."""
    home, draw, total = Path(tempfile.mkdtemp(prefix=f"chaos-{subject}-")), random.Random(seed), Count()
    made = SUBJECTS[subject](home)
    while total.kills < kills:
        folder = home / f"run-{total.runs}"
        folder.mkdir()
        with programs(folder / "said") as started:
            count = made.run(folder, started, min(A_RUN, kills - total.kills), draw)
        total += count
        if count.harm:
            print(f"{subject}: {count} in {folder}, which is kept (seed {seed})", flush=True)
        else:
            shutil.rmtree(folder)
    if not total.harm:
        shutil.rmtree(home)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill programs of penstock, and count what that does to rows.")
    parser.add_argument("--subject", choices=["all", *SUBJECTS], default="all")
    parser.add_argument("--kills", type=int, default=1000, help="in all subjects together")
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    vars(sys.modules["__main__"]).pop("__file__", None)  # or every program that is started would import all of this
    subjects = list(SUBJECTS) if given.subject == "all" else [given.subject]
    total = Count()
    print(f"{'subject':<10}" + "".join(f"{name:>10}" for name in (*vars(total), "seconds")), flush=True)
    for number, subject in enumerate(subjects):
        begun, left = time.monotonic(), len(subjects) - number
        count = chaos(subject, -(-(given.kills - total.kills) // left), given.seed)
        total += count
        figures = [*vars(count).values(), round(time.monotonic() - begun)]
        print(f"{subject:<10}" + "".join(f"{figure:>10}" for figure in figures), flush=True)
    print(f"{'all':<10}" + "".join(f"{figure:>10}" for figure in vars(total).values()))
    return 1 if total.harm else 0


if __name__ == "__main__":
    sys.exit(main())
