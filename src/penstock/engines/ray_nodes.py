"""Nodes of a Ray cluster, read by a thread: a head that is gone must not block the driver of a job."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

_NODES_SECONDS = 2.0
_STOP_SECONDS = 5.0


class NodeTable:
    """Nodes as they were a moment ago, and the tasks they have room for."""

    def __init__(self, cpus_per_task: float, memory_bytes: int | None) -> None:
        self._cpus, self._memory = cpus_per_task, memory_bytes
        self._ray: Any = None
        self._nodes: dict[str, dict[str, Any]] = {}
        """All that were ever seen, by id, so that those that left have names too."""
        self.slots = 0
        """Tasks that the nodes have room for at once."""
        self._read_at = 0.0
        self._outside, self._home = False, ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, ray: Any) -> None:
        """Read the table now, and again every few seconds."""
        self._ray = ray
        self._outside = bool(ray.util.client.ray.is_connected())
        self._home = "" if self._outside else ray.get_runtime_context().get_node_id()
        self._read()
        self._thread = threading.Thread(target=self._watch, name="penstock-ray-nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. One that waits for a head that is gone is left behind."""
        self._stopped.set()
        if self._thread is not None and self.silent_seconds() < _STOP_SECONDS:
            self._thread.join(_STOP_SECONDS)

    def silent_seconds(self) -> float:
        """Time since the head answered last."""
        return time.monotonic() - self._read_at - _NODES_SECONDS

    @property
    def is_home_alive(self) -> bool:
        """False if the node of this process has left the cluster, which then hears nothing more from it."""
        return self._home not in self._nodes or bool(self._nodes[self._home]["Alive"])

    @property
    def wanted(self) -> str:
        """Size of a task, in words."""
        memory = f" and {self._memory / 2**30:.2g} GiB of memory" if self._memory else ""
        return f"{self._cpus:g} CPUs{memory}"

    def described(self) -> str:
        """Sizes of the nodes that have CPUs, in words; empty without any."""
        said = []
        for node in self.alive():
            sizes = self._nodes[node]["Resources"]
            if sizes.get("CPU"):
                said.append(f"{self.name(node)} has {sizes['CPU']:g} and {sizes.get('memory', 0) / 2**30:.2g} GiB")
        return ", ".join(said[:5])

    def alive(self) -> list[str]:
        return [key for key, node in self._nodes.items() if node["Alive"]]

    def name(self, key: str) -> str:
        """Name of a node: the one it was given, or its address."""
        node = self._nodes.get(key)
        if node is None:
            return f"node {key[:8]}"
        name, address = node.get("NodeName") or "", node["NodeManagerAddress"]
        return str(address) if name in ("", address) else f"{name} ({address})"

    def answers(self, key: str) -> bool:
        """True if the process that manages the node accepts connections; from outside of a cluster Ray has to know."""
        node = self._nodes.get(key)
        if node is None or self._outside:
            return node is None or bool(node["Alive"])
        with contextlib.suppress(OSError):
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), 1.0).close()
            return True
        return False

    def _room(self, node: dict[str, Any]) -> int:
        sizes = node["Resources"]
        tasks = sizes.get("CPU", 0.0) / self._cpus
        return int(min(tasks, sizes.get("memory", 0.0) / self._memory) if self._memory else tasks)

    def _read(self) -> None:
        self._nodes = {**self._nodes, **{node["NodeID"]: node for node in self._ray.nodes()}}
        self.slots = sum(self._room(node) for node in self._nodes.values() if node["Alive"])
        self._read_at = time.monotonic()

    def _watch(self) -> None:
        while not self._stopped.wait(_NODES_SECONDS):
            with contextlib.suppress(Exception):  # no answer: silent_seconds tells
                self._read()
