"""Parts of the executor on Ray that need no cluster: addresses, the table of nodes, log lines, errors as bytes."""

from __future__ import annotations

import contextlib
import logging
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines import ray_executor, ray_nodes
from penstock.engines.executor import Task
from penstock.engines.ray_connection import connect
from penstock.engines.ray_executor import LogLines, RayExecutor
from penstock.engines.ray_worker import pickled_error, unpickled_error
from penstock.errors import ConfigError, StageError, StalledError
from penstock.pipeline.processes import RemoteError


def node(key: str, cpus: float, *, alive: bool = True, gib: float = 8, name: str = "") -> dict[str, Any]:
    sizes = {"CPU": cpus, "memory": gib * 2**30} if cpus else {"memory": gib * 2**30}
    address = f"10.0.0.{key}"
    return {"NodeID": key, "Alive": alive, "NodeManagerAddress": address, "NodeName": name, "Resources": sizes}


class Head:
    """Ray as far as the table of nodes knows it."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self._nodes, self.gone = nodes, threading.Event()
        self.stuck = threading.Event()
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "1")
        self.util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)))

    def nodes(self) -> list[dict[str, Any]]:
        if self.gone.is_set():
            self.stuck.wait()
        return [*self._nodes]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_nodes, "_NODES_SECONDS", 0.01)


@pytest.fixture
def no_connection() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized()
    yield
    assert not ray.is_initialized()


def test_slots_are_tasks_that_fit_a_node() -> None:
    table = ray_nodes.NodeTable(2, 3 * 2**30)
    table.start(Head(node("1", 9), node("2", 64, gib=10), node("3", 0), node("4", 8, alive=False)))
    try:
        assert table.slots == 2 + 3
        assert table.alive() == ["1", "2", "3"]
        assert table.described() == "10.0.0.1 has 9 and 8 GiB, 10.0.0.2 has 64 and 10 GiB"
        assert table.wanted == "2 CPUs and 3 GiB of memory"
    finally:
        table.stop()


def test_nodes_are_named_by_their_names_and_addresses() -> None:
    table = ray_nodes.NodeTable(1, None)
    table.start(Head(node("1", 1), node("2", 1, name="gpu-2"), node("3", 1, name="10.0.0.3")))
    table.stop()
    assert [table.name(key) for key in ("1", "2", "3")] == ["10.0.0.1", "gpu-2 (10.0.0.2)", "10.0.0.3"]
    assert table.name("abcdef0123456789") == "node abcdef01"


def test_a_head_that_is_gone_stops_the_job_and_blocks_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(node("1", 1))
    executor = RayExecutor("10.0.0.1:6379", head_seconds=0.05)
    monkeypatch.setattr(executor, "_pump", lambda: None)
    monkeypatch.setattr(executor, "_ask_board", lambda: None)
    executor._ray = head
    executor._table.start(head)
    executor._waiting.append(Task("a", "map"))
    try:
        assert executor.wait(0) == []
        head.gone.set()
        with pytest.raises(StalledError, match=r"head node .* has not answered for \d+ s.* run the same command"):
            executor.wait(60)
    finally:
        head.stuck.set()
        executor.close()


def test_a_driver_whose_node_has_left_the_cluster_stops(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(node("1", 1, alive=False), node("2", 1))
    executor = RayExecutor("10.0.0.1:6379")
    executor._ray = head
    executor._table.start(head)
    executor._waiting.append(Task("a", "map"))
    with pytest.raises(StalledError, match="the node on which this process runs has left the Ray cluster"):
        executor.wait(60)
    executor.close()


def test_a_cluster_without_room_for_a_task_is_an_error(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "_NO_ROOM_SECONDS", 0.01)
    head = Head(node("1", 4))
    executor = RayExecutor("10.0.0.1:6379", cpus_per_task=8)
    monkeypatch.setattr(executor, "_pump", lambda: None)
    monkeypatch.setattr(executor, "_ask_board", lambda: None)
    executor._ray = head
    executor._table.start(head)
    executor._waiting.append(Task("a", "map"))
    try:
        with pytest.raises(ConfigError, match=r"no node .* \(8 CPUs\) .* 10.0.0.1 has 4 and 8 GiB; ask for less"):
            executor.wait(60)
    finally:
        executor.close()


@pytest.mark.parametrize("address", ["head", "http://head:6379", "head:99999", "ray://head", ""])
def test_an_address_that_is_none_is_refused(no_connection: None, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    named = repr(address) if address else r"'http://head:8265' \(of RAY_ADDRESS\)"
    with pytest.raises(ConfigError, match=f"{named} is no address of a Ray cluster; expected 'host:port'"):
        connect(address, None, 1.0)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_unreachable_address_is_an_error_at_once(no_connection: None, scheme: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    executor = RayExecutor(f"{scheme}127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at '{scheme}127.0.0.1:{port}' .*ray start --head"):
        executor.start(len, {})
    executor.close()


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [(b"HTTP/1.1 400 Bad Request", "another kind of server is there"), (b"", "it closes the"), (None, "timed out")],
)
def test_a_server_of_another_kind_is_an_error_at_once(no_connection: None, greeting: bytes | None, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def answer() -> None:
            connection = listener.accept()[0]
            held.append(connection)
            if greeting is not None:
                with contextlib.suppress(OSError):  # the client may have understood, and left
                    connection.sendall(greeting)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match=rf"no Ray cluster answers at .* \(.*{reason}.*\); start one there"):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", None, 0.2 if greeting is None else 60)
        thread.join()
        held[0].close()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[ray\]'"):
        RayExecutor("127.0.0.1:6379").start(len, {})


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="cpus_per_task must be positive, got 0"):
        RayExecutor(cpus_per_task=0)
    with pytest.raises(ConfigError, match="memory_bytes must be positive, got -1"):
        RayExecutor(memory_bytes=-1)
    with pytest.raises(ConfigError, match="max_in_flight must be at least 1, got 0"):
        RayExecutor(max_in_flight=0)


def test_a_line_is_logged_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines()
    for number in range(1_000):
        lines.add("penstock.corpus", logging.WARNING, "a strange row", f"10.0.0.{number % 3}", 2)
    lines.add("penstock.corpus", logging.ERROR, "a strange file", "10.0.0.1")
    assert [record.getMessage() for record in caplog.records] == [
        "[10.0.0.0] a strange row",
        "[10.0.0.1] a strange file",
    ]
    assert lines.repeated() == {"a strange row": 1_999}
    caplog.clear()
    lines.sum_up()
    assert [record.getMessage() for record in caplog.records] == ["1,999 more times, on 3 nodes: a strange row"]


def test_lines_beyond_the_most_are_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.ray_executor._MOST_LINES", 2)
    lines = LogLines()
    for number in range(5):
        lines.add("penstock.corpus", logging.WARNING, f"line {number}", "10.0.0.1")
    lines.sum_up()
    assert [record.getMessage() for record in caplog.records] == [
        "[10.0.0.1] line 0",
        "[10.0.0.1] line 1",
        "3 more log lines of tasks were not shown",
    ]


def test_an_error_comes_back_with_its_causes_and_its_traceback() -> None:
    try:
        try:
            raise KeyError("text")
        except KeyError as cause:
            raise StageError("no such key", stage="Tokenize", file="a.jsonl", row=3) from cause
    except StageError as error:
        arrived = unpickled_error(pickled_error(error, "in map-0 on 10.0.0.1"))
    assert isinstance(arrived, StageError)
    assert (arrived.stage, arrived.file, arrived.row) == ("Tokenize", "a.jsonl", 3)
    assert repr(arrived.__cause__) == "KeyError('text')"
    assert arrived.__notes__[0].startswith("in map-0 on 10.0.0.1:\nTraceback")


def test_an_error_with_a_long_row_comes_back_as_text() -> None:
    arrived = unpickled_error(pickled_error(ValueError("x" * 3_000_000), "in map-0"))
    assert isinstance(arrived, RemoteError)
    assert arrived.kind == "ValueError"
    assert len(str(arrived)) < 1_100_000


def test_an_error_of_a_class_that_is_not_here_is_an_error() -> None:
    payload = pickle.dumps(([ValueError("x")], "note")).replace(b"ValueError", b"NotHereErr")
    assert "cannot be loaded here" in str(unpickled_error(payload))
