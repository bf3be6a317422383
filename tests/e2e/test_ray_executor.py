"""Tasks on a Ray cluster: results, errors with their fields, crashes and lost nodes, and checks before work starts.

The functions without `test_` are drivers: they run in the namespace of the cluster, as programs of their own.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.engines import ray_executor
from penstock.engines.executor import Outcome, Task
from penstock.engines.node_checks import versions_here
from penstock.engines.ray_executor import RayExecutor
from penstock.errors import ConfigError, DataError, StageError
from penstock.pipeline.cores import available_cores

pytestmark = pytest.mark.timeout(600)  # waiting for the cluster counts

NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]


class Small:
    """Work of tests: what a task does is its kind."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.loaded = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.loaded += 1

    def __call__(self, task: Task) -> dict[str, Any]:
        self.pids.append(os.getpid())
        return getattr(self, task.kind)(**task.arguments)

    def double(self, number: int) -> dict[str, Any]:
        facts = {"in": str(Path.cwd()), "cores": available_cores()}
        return {"doubled": 2 * number, "pid": os.getpid(), "loaded": self.loaded, "calls": len(self.pids), **facts}

    def fail(self, how: str) -> dict[str, Any]:
        try:
            {}["text"]
        except KeyError as error:
            if how == "stage":
                raise StageError("no such key", stage="Tokenize", file="a.jsonl", row=3, offset=40) from error
            if how == "data":
                raise DataError("a bad row", file="a.jsonl", row=3, data={"text": "x"}) from error
        if how == "own":
            raise Strange("left", right="right")
        if how == "exit":
            raise SystemExit(4)
        raise ValueError(how)

    def crash(self, how: str) -> dict[str, Any]:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV if how == "segfault" else signal.SIGKILL)
        time.sleep(60)
        return {}

    def hold(self, place: str) -> dict[str, Any]:
        Path(place).write_text(str(os.getpid()))
        while not Path(place + ".go").exists():
            time.sleep(0.02)
        return {"held": place}

    def warn(self, text: str) -> dict[str, Any]:
        logging.getLogger("penstock.corpus").warning("%s", text)
        logging.getLogger("penstock.corpus").debug("not for the driver")
        return {}


class Strange(Exception):  # noqa: N818
    """An exception that pickles, and cannot be made again."""

    def __init__(self, left: str, *, right: str) -> None:
        super().__init__(left)
        self.right = right


def finish(executor: RayExecutor, *tasks: Task) -> dict[str, Outcome]:
    """Outcomes of tasks, by name."""
    for task in tasks:
        executor.submit(task)
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(tasks):
        for outcome in executor.wait(60):
            assert outcome.task.name not in outcomes
            outcomes[outcome.task.name] = outcome
    return outcomes


def run_all(folder: str) -> dict[str, Any]:
    """Everything that leaves the cluster as it is, in one driver: a connection takes seconds."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.name} {record.levelname} {record.getMessage()}")
    logging.getLogger("penstock").addHandler(handler)
    import ray

    ray.init("auto")
    os.chdir(folder)
    marker = Path(folder, "marker")
    marker.write_text("abc")
    faults = refused(folder)
    executor = RayExecutor("auto")
    slots = executor.slots
    executor.start(Small(), {"marker": [str(marker), "abc"], "files": [["marker", 3]]})
    done = finish(executor, *(Task(f"double-{n}", "double", {"number": n}) for n in range(60)))
    results = [done[f"double-{n}"].result for n in range(60)]
    nodes = sorted({outcome.node for outcome in done.values()})
    kinds = ("stage", "data", "own", "exit", "plain")
    errors = finish(executor, *(Task(how, "fail", {"how": how}) for how in kinds))
    crashes = finish(executor, *(Task(how, "crash", {"how": how}) for how in ("exit", "segfault", "kill")))

    held = [Task(f"held-{n}", "hold", {"place": f"{folder}/held-{n}"}) for n in range(8)]
    for task in held:
        executor.submit(task)
    while executor.snapshot()["running"] < slots:
        executor.wait(0.1)
    snapshot = executor.snapshot()
    executor.cancel(held[-1])
    for task in held:
        Path(task.arguments["place"] + ".go").touch()
    ended: list[str] = []
    while len(ended) < 7:
        ended += [outcome.task.name for outcome in executor.wait(60)]
    rest = executor.wait(0)
    finish(executor, *(Task(f"warn-{n}", "warn", {"text": "a strange row"}) for n in range(20)))
    executor.close()
    executor.close()
    return {
        "folder": folder,
        "connected": ray.is_initialized(),
        "faults": faults,
        "slots": slots,
        "results": results,
        "nodes": nodes,
        "errors": {name: shown(outcome) for name, outcome in errors.items()},
        "crashes": {name: [o.crash, o.node_lost, o.node, o.error is None] for name, o in crashes.items()},
        "snapshot": snapshot,
        "ended": sorted(ended),
        "rest": len(rest),
        "lines": lines,
    }


def refused(folder: str) -> dict[str, str]:
    """Errors of jobs that a cluster is not ready for, by the name of the fault."""
    import ray

    marker = f"{folder}/marker"
    Path(folder, "only_here.py").write_text("def work(task):\n    return {}\n")
    sys.path.append(folder)  # after Ray was told the path of this process
    only_here = importlib.import_module("only_here")
    jobs: dict[str, tuple[RayExecutor, Any, dict[str, Any]]] = {
        "marker": (RayExecutor(), len, {"marker": [marker, "abd"]}),
        "file": (RayExecutor(), len, {"files": [[marker, 4]]}),
        "work": (RayExecutor(), only_here.work, {}),
        "pickle": (RayExecutor(), functools.partial(len, threading.Lock()), {}),
        "address": (RayExecutor("127.0.0.1:1"), len, {}),
        "version": (RayExecutor(), len, {}),
    }
    errors = {}
    for name, (executor, work, checks) in jobs.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "version":
                patch.setattr(ray_executor, "versions_here", lambda: {**versions_here(), "pyarrow": "1.0"})
            with pytest.raises(ConfigError) as caught:
                executor.start(work, checks)
        executor.close()
        errors[name] = str(caught.value)
        assert ray.is_initialized()
    return errors


def shown(outcome: Outcome) -> list[Any]:
    error = outcome.error
    assert error is not None
    fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
    cause = repr(error.__cause__) if error.__cause__ is not None else None
    return [type(error).__name__, str(error), fields, cause, "\n".join(error.__notes__)]


@pytest.fixture(scope="module")
def ran(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ray_cluster.run(run_all, tmp_path_factory.mktemp("ray"))


def test_tasks_give_results_and_unpickle_the_work_once_a_process(ran: Any) -> None:
    assert [result["doubled"] for result in ran["results"]] == [2 * n for n in range(60)]
    assert ran["slots"] == 6
    assert {*ran["nodes"]} <= {*NODES}
    assert {result["cores"] for result in ran["results"]} == {1}, "one CPU of the machine is theirs"
    assert {result["in"] for result in ran["results"]} == {ran["folder"]}, "relative paths are the driver's"
    assert {result["loaded"] for result in ran["results"]} == {1}
    by_process: dict[int, list[int]] = {}
    for result in ran["results"]:
        by_process.setdefault(result["pid"], []).append(result["calls"])
    assert all(sorted(calls) == [*range(1, len(calls) + 1)] for calls in by_process.values())


def test_errors_of_tasks_arrive_with_their_fields(ran: Any) -> None:
    kind, text, fields, cause, note = ran["errors"]["stage"]
    assert (kind, cause) == ("StageError", "KeyError('text')")
    assert fields == {"reason": "no such key", "stage": "Tokenize", "file": "a.jsonl", "row": 3, "offset": 40}
    assert text == "Tokenize failed at a.jsonl, row 3, byte 40: no such key"
    assert "in stage on 127.0.0." in note
    assert "Traceback" in note
    kind, text, fields, cause, _ = ran["errors"]["data"]
    assert (kind, fields["row"], fields["data"], cause) == ("DataError", 3, {"text": "x"}, "KeyError('text')")
    assert ran["errors"]["plain"][:2] == ["ValueError", "plain"]


def test_errors_that_cannot_be_made_again_arrive_as_text(ran: Any) -> None:
    assert ran["errors"]["own"][:3] == ["RemoteError", "Strange: left", {"kind": "Strange"}]
    assert ran["errors"]["exit"][:2] == ["RemoteError", "the function called sys.exit(4)"]


@pytest.mark.parametrize("how", ["exit", "segfault", "kill"])
def test_a_dead_process_is_a_crash_of_its_task_and_of_no_other(ran: Any, how: str) -> None:
    crash, node_lost, _, no_error = ran["crashes"][how]
    assert crash.startswith("the worker process died")
    assert (node_lost, no_error) == (False, True)


def test_a_snapshot_tells_where_tasks_run(ran: Any) -> None:
    snapshot = ran["snapshot"]
    assert (snapshot["nodes"], snapshot["slots"], snapshot["running"], snapshot["waiting"]) == (3, 6, 6, 2)
    assert {node: len(tasks) for node, tasks in snapshot["by_node"].items()} == dict.fromkeys(NODES, 2)


def test_a_cancelled_task_has_no_outcome(ran: Any) -> None:
    assert ran["ended"] == [f"held-{n}" for n in range(7)]
    assert ran["rest"] == 0


def test_log_lines_come_once_with_their_node_and_repeats_are_counted(ran: Any) -> None:
    lines = [line for line in ran["lines"] if "strange row" in line]
    assert len(lines) == 2
    assert lines[0].startswith("penstock.corpus WARNING [127.0.0.")
    assert lines[0].endswith("] a strange row")
    assert lines[1].startswith("penstock.corpus WARNING 19 more times, on ")
    assert not any("not for the driver" in line for line in ran["lines"])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("marker", "A path is not shared: {folder}/marker holds something else on {nodes}. To mend it: "),
        ("file", "An input file is not shared: {folder}/marker has not 4 bytes on {nodes}. To mend it: "),
        (
            "work",
            "The functions of the pipeline cannot be loaded: ModuleNotFoundError: No module named 'only_here' on "
            "{nodes}. To mend it: ",
        ),
        ("version", "Other versions than here: pyarrow {pyarrow} instead of 1.0 on {nodes}. To mend it: "),
    ],
)
def test_a_cluster_that_is_not_ready_is_one_error_that_lists_its_nodes(ran: Any, fault: str, text: str) -> None:
    nodes = r"127\.0\.0\.\d, 127\.0\.0\.\d, 127\.0\.0\.\d"
    words = {"folder": ran["folder"], "nodes": "NODES", "pyarrow": versions_here()["pyarrow"]}
    assert re.search(re.escape(text.format(**words)).replace("NODES", nodes), ran["faults"][fault])


def test_a_job_that_cannot_be_sent_is_refused_and_so_is_another_cluster(ran: Any) -> None:
    assert ran["faults"]["pickle"].startswith("the pipeline cannot be sent to other processes: it holds a _thread.lock")
    assert "is connected to the Ray cluster at 127.0.0.1:6379" in ran["faults"]["address"]
    assert ran["connected"], "a connection of the caller's own stays open"


def lose_a_node(folder: str) -> dict[str, Any]:
    """Tasks held on all nodes; one node is killed meanwhile, and a new one joins."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "__version__", "2.1.0")
        with pytest.raises(ConfigError) as caught:
            assert RayExecutor("auto").slots
    executor = RayExecutor("auto", head_seconds=60)
    marker = Path(folder, "marker")
    marker.write_text("abc")
    executor.start(Small(), {"marker": [str(marker), "abc"]})
    tasks = [Task(f"held-{n}", "hold", {"place": f"{folder}/held-{n}"}) for n in range(6)]
    for task in tasks:
        executor.submit(task)
    while executor.snapshot()["running"] < 6:
        executor.wait(0.1)
    by_node = executor.snapshot()["by_node"]
    killed = int(Path(folder, by_node["127.0.0.2"][0]).read_text())
    os.kill(killed, signal.SIGKILL)
    first: list[Outcome] = []
    while not first:
        first = executor.wait(60)
    Path(folder, "held").touch()
    outcomes = {}
    while len(outcomes) < 2:
        outcomes |= {outcome.task.name: outcome for outcome in executor.wait(60)}
    marker.unlink()
    Path(folder, "lost").touch()
    while executor.slots < 6:
        executor.wait(0.1)
    late: dict[str, Outcome] = {}
    for n in range(3):  # one more than the old nodes have room for
        executor.submit(Task(f"late-{n}", "hold", {"place": f"{folder}/late-{n}"}))
    while not any(outcome.error for outcome in late.values()):
        late |= {outcome.task.name: outcome for outcome in executor.wait(60)}
    executor.close()
    return {
        "version": str(caught.value),
        "by_node": by_node,
        "first": [[o.task.name, o.crash, o.node, o.node_lost] for o in first],
        "killed": killed,
        "lost": {name: [o.crash, o.node, o.node_lost] for name, o in outcomes.items()},
        "late": [str(o.error) for o in late.values() if o.error],
    }


def await_file(path: Path, driver: Any) -> None:
    while not path.exists():
        assert driver.process.poll() is None, driver.stderr
        time.sleep(0.02)


def test_a_killed_process_is_a_crash_and_a_killed_node_is_not_blamed_on_its_tasks(
    ray_cluster: Any, tmp_path: Path
) -> None:
    with ray_cluster.popen(lose_a_node, tmp_path) as driver:
        await_file(tmp_path / "held", driver)
        ray_cluster.kill_node(2)
        await_file(tmp_path / "lost", driver)
        ray_cluster.add_node()
        result = driver.result()
    assert "has another version of Ray or Python than this process; install the same" in result["version"]
    assert "Ray: 2.1.0" in result["version"]
    ((name, crash, node, node_lost),) = result["first"]
    assert (name, node, node_lost) == (result["by_node"]["127.0.0.2"][0], "127.0.0.2", False)
    assert crash.startswith(f"the worker process died (process {result['killed']}): ")
    assert sorted(result["lost"]) == sorted(result["by_node"]["127.0.0.3"])
    assert {tuple(lost[1:]) for lost in result["lost"].values()} == {("127.0.0.3", True)}
    # A node that joins late is checked by its first task.
    assert all("A path is not shared: " in text and "on 127.0.0.3" in text for text in result["late"])
