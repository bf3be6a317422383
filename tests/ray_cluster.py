"""A Ray cluster for tests: three simulated nodes in a network namespace that has nothing but loopback.

Ray listens on all interfaces, so its processes never see one but `lo`. Drivers run in the namespace as programs of
their own: `cluster.run(function, *arguments)`. All test processes of a run share one cluster; each takes it for itself
while a driver runs or a node is killed, and finds all nodes alive. A keeper process holds the namespace and the nodes.
It ends with the last connection to it, however that test process ended, and the nodes end with the keeper.

`python tests/ray_cluster.py COMMAND ...` runs a command beside a cluster of its own, to try things by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

NODES = 3
CPUS = 2
"""Of each node."""
STORE_BYTES = 80 << 20
"""Object store of each node; 75 MiB is the least that Ray takes."""
ADDRESS = "127.0.0.1:6379"
"""The same in every namespace; `RAY_ADDRESS` of drivers."""
START_SECONDS = 120.0
DRIVER_SECONDS = 300.0
"""For drivers that hang; a busy machine takes ten times as long as a free one."""
_ROOT = Path(__file__).resolve().parents[1]
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip")


class DriverError(AssertionError):
    """A driver that failed or hung, with what it wrote."""


def why_not() -> str | None:
    """Reason why this machine cannot run a cluster; None if it can. In CI a reason is an error."""
    reason = _find_reason()
    if reason and os.environ.get("CI"):
        raise RuntimeError(f"{reason}; CI skips no test of clusters")
    return reason


def _find_reason() -> str | None:
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if absent := [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]:
        return f"no {', '.join(absent)} on the PATH (packages util-linux and iproute2)"
    probe = subprocess.run([*_unshare(), "ip", "link", "set", "lo", "up"], capture_output=True, env=_environment())
    if probe.returncode:
        return f"no network namespace to be had: {probe.stderr.decode(errors='replace').strip()}"
    return None


class RayCluster:
    """Client of a keeper; the first with the same folder starts it. Without a folder the cluster is its own."""

    def __init__(self, shared: Path | None = None, *, nodes: int = NODES) -> None:
        self._shared, self._nodes = shared, nodes
        self._socket: socket.socket | None = None
        self._depth = 0
        self._lock = threading.RLock()
        self.folder = Path()
        self.keeper_pid = 0

    def start(self) -> Self:
        """Connect to the keeper, or start it, and return when all nodes are up."""
        if self._shared is None:
            self._connect(self._launch())
            return self
        with (self._shared / "ray.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            at = self._shared / "ray.folder"
            if at.exists() and self._connects(Path(at.read_text())):
                return self
            folder = self._launch()
            self._connect(folder)
            at.write_text(str(folder))
        return self

    def stop(self) -> None:
        """Let go. The last client waits until the cluster is gone."""
        if self._socket is not None:
            with contextlib.suppress(OSError, EOFError):
                self._ask(do="leave")
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- drivers -------------------------------------------------------------------------------------------------------

    def run(
        self, target: Callable[..., Any] | str | Path, *arguments: Any, timeout_seconds: float = DRIVER_SECONDS
    ) -> Any:
        """Result of a driver: `Driver.result` of `popen`."""
        with self.popen(target, *arguments) as driver:
            return driver.result(timeout_seconds)

    def popen(self, target: Callable[..., Any] | str | Path, *arguments: Any, **environment: str) -> Driver:
        """A driver that runs beside the test.

        A function at the top level of any file, whose arguments and result are JSON; a `Path` of a Python script; or
        the name of a program. It finds the cluster by `RAY_ADDRESS`, and dies with the thread that started it.
        """
        here = [sys.executable, str(Path(__file__).resolve())]
        if callable(target):
            file = inspect.getsourcefile(target)
            assert file is not None
            assert "." not in target.__qualname__, f"{target.__qualname__} is not at the top level of its file"
            values = [json.dumps(argument, default=str) for argument in arguments]
            command = [*here, "--function", file, target.__qualname__, *values]
        elif isinstance(target, Path):
            command = [sys.executable, str(target), *map(str, arguments)]
        else:
            command = [target, *map(str, arguments)]
        return Driver(self, command, environment)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The cluster for this process alone, with all nodes alive at the start."""
        self.take()
        try:
            yield
        finally:
            self.free()

    def take(self) -> None:
        with self._lock:
            if not self._depth:
                self._ask(do="take")
            self._depth += 1

    def free(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth and self._socket is not None:
                self._ask(do="free")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[int]:
        """Numbers of the nodes that are alive; 0 is the head, which drivers are attached to."""
        return list(self._ask(do="nodes")["nodes"])

    def kill_node(self, number: int) -> None:
        """SIGKILL of all processes of a node. Node 0 is the head: without it there is no cluster."""
        self._require_alone("kill_node")
        self._ask(do="kill", node=number)

    def add_node(self) -> int:
        """Number of a new node, the lowest that is not alive."""
        self._require_alone("add_node")
        return int(self._ask(do="add")["node"])

    def _require_alone(self, name: str) -> None:
        if not self._depth:
            raise RuntimeError(f"{name} would disturb others: call it within `with cluster.alone():` or of a driver")

    # -- the keeper ----------------------------------------------------------------------------------------------------

    def command(self, *command: str) -> list[str]:
        """Command line that runs a command in the namespace, and ends it with the thread that starts it."""
        enter = [f"--net=/proc/{self.keeper_pid}/ns/net"]
        if os.getuid():
            enter = ["--preserve-credentials", f"--user=/proc/{self.keeper_pid}/ns/user", *enter]
        # One that died before the signal was set has left its child to another parent.
        check = ["sh", "-c", '[ "$PPID" = "$1" ] && shift && exec "$@"', "sh", str(os.getpid())]
        return ["nsenter", *enter, "--", "setpriv", "--pdeathsig", "KILL", "--", *check, *command]

    def environment(self) -> dict[str, str]:
        return {**_environment(), "RAY_ADDRESS": ADDRESS, "RAY_AUTH_TOKEN": (self.folder / "token").read_text()}

    def _launch(self) -> Path:
        # Sockets have paths of at most 107 bytes, of which Ray takes 60: no place for a long TMPDIR.
        folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp" if os.access("/tmp", os.W_OK) else None))
        script = 'ip link set lo up && { setsid "$@" & }'
        command = [*_unshare(), "sh", "-c", script, "sh", sys.executable, __file__, "--keeper", str(folder)]
        command.append(str(self._nodes))
        (folder / "token").write_text(os.urandom(24).hex())
        with (folder / "log").open("ab") as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), check=True)
        return folder

    def _connects(self, folder: Path) -> bool:
        if not (folder / "socket").exists():
            return False
        with contextlib.suppress(OSError, EOFError):
            self._connect(folder)
            return True
        return False

    def _connect(self, folder: Path) -> None:
        until = time.monotonic() + START_SECONDS / 2  # it listens before it starts nodes
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(START_SECONDS)
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(str(folder / "socket"))
                break
            if time.monotonic() > until or not folder.exists():
                connection.close()
                said = _tail(folder / "log")
                shutil.rmtree(folder, ignore_errors=True)
                raise RuntimeError(f"the keeper of the Ray cluster did not start:\n{said}")
            time.sleep(0.02)
        self._socket, self.folder = connection, folder
        try:
            self.keeper_pid = self._ask(do="hello")["pid"]
        except BaseException:
            connection.close()
            self._socket = None
            raise
        connection.settimeout(None)

    def _ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            if self._socket is None:
                raise RuntimeError("the cluster is not started, or stopped")
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                if not (more := self._socket.recv(1 << 16)):
                    raise EOFError("the keeper of the Ray cluster is gone")
                line += more
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


class Driver:
    """A program in the namespace of a cluster, which it holds for itself until `close`."""

    def __init__(self, cluster: RayCluster, command: list[str], environment: dict[str, str]) -> None:
        self._cluster, self._name = cluster, " ".join(command[-3:])
        self._files = Path(tempfile.mkdtemp(prefix="driver-", dir=cluster.folder))
        cluster.take()
        try:
            with (self._files / "out").open("wb") as out, (self._files / "err").open("wb") as err:
                self.process = subprocess.Popen(
                    cluster.command(*command),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env={**cluster.environment(), "PENSTOCK_TEST_RESULT": str(self._files / "result"), **environment},
                    start_new_session=True,
                )
        except BaseException:
            cluster.free()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return (self._files / "out").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._files / "err").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL of the driver and of the processes it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, timeout_seconds: float = DRIVER_SECONDS) -> Any:
        """What the function returned, or what the program printed. `DriverError` if it fails or takes too long."""
        try:
            code = self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._error(f"did not end within {timeout_seconds:g} s") from None
        if code:
            raise self._error(f"ended with {code}")
        result = self._files / "result"
        return json.loads(result.read_bytes()) if result.exists() else self.stdout

    def _error(self, what: str) -> DriverError:
        text = "\n".join(f"{name}:\n{_tail(self._files / name)}" for name in ("out", "err"))
        return DriverError(f"driver {self._name} {what}\n{text}")

    def close(self) -> None:
        """End it if it runs, and let others have the cluster."""
        self.kill()
        shutil.rmtree(self._files, ignore_errors=True)
        self._cluster.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def _search_path() -> str:
    """`ip` is in /sbin, which users who are not root may lack."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _unshare() -> list[str]:
    return ["unshare", *(["--map-root-user"] if os.getuid() else []), "--net", "--"]


def _environment() -> dict[str, str]:
    places = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COV_CORE_"))},
        "PATH": _search_path(),
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        # A killed node is found in seconds: connections to it are refused. One that is only slow has ten seconds.
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
        # Other work on the machine may fill its memory; that is no reason to kill a task.
        "RAY_memory_monitor_refresh_ms": "0",
        # Other tests keep all cores busy, and workers of Ray, which are nice to others, would wait for minutes.
        "RAY_worker_niceness": "0",
    }


# -- the keeper process ------------------------------------------------------------------------------------------------


class Keeper:
    """Process that holds the namespace and the nodes. One thread: the nodes die with the thread that forks them."""

    def __init__(self, folder: Path, nodes: int = NODES) -> None:
        self.folder, self.wanted = folder, nodes
        self.nodes: dict[int, int] = {}
        """Process of each node's `ray start --block`, by its number."""
        self.clients: dict[socket.socket, bytes] = {}
        self.holder: socket.socket | None = None
        self.waiting: deque[socket.socket] = deque()
        self.starts = 0
        self.failure = ""

    def serve(self) -> None:
        """Answer clients until the last is gone. The first must come within a moment."""
        import select

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.folder / "socket"))
            listener.listen(64)
            os.environ["RAY_AUTH_TOKEN"] = (self.folder / "token").read_text()
            last = None
            try:
                self._start()
                while True:
                    readable, _, _ = select.select([listener, *self.clients], [], [], 30.0)
                    if not readable and not self.clients:
                        break
                    for one in readable:
                        if one is listener:
                            self.clients[listener.accept()[0]] = b""
                        elif not self._read(one):
                            last = self._drop(one)
                    if last is not None and not self.clients:
                        break
                    last = None
            finally:
                for number in [*self.nodes]:
                    self._kill(number)
                shutil.rmtree(self.folder, ignore_errors=True)
                if last is not None:
                    last.close()

    def _read(self, client: socket.socket) -> bool:
        """Whether the client is still there."""
        with contextlib.suppress(ConnectionError):
            if data := client.recv(1 << 16):
                lines = (self.clients[client] + data).split(b"\n")
                self.clients[client] = lines.pop()
                return all(self._answer(client, json.loads(line)) for line in lines)
        return False

    def _answer(self, client: socket.socket, request: dict[str, Any]) -> bool:
        answer: dict[str, Any] | None = {}
        try:
            match request["do"]:
                case "hello":
                    answer = {"error": self.failure} if self.failure else {"pid": os.getpid()}
                case "take":
                    self.waiting.append(client)
                    answer = None
                    self._hand_over()
                case "free":
                    self._free(client)
                case "nodes":
                    self._reap()
                    answer = {"nodes": sorted(self.nodes)}
                case "kill":
                    self._kill(request["node"])
                case "add":
                    answer = {"node": self._add()}
                case "leave":
                    return False
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if answer is not None:
            client.sendall(json.dumps(answer).encode() + b"\n")
        return True

    def _drop(self, client: socket.socket) -> socket.socket | None:
        """Forget a client; the last one is left open, to be closed when everything is gone."""
        del self.clients[client]
        if client in self.waiting:
            self.waiting.remove(client)
        self._free(client)
        if not self.clients:
            return client
        client.close()
        return None

    def _free(self, client: socket.socket) -> None:
        if self.holder is client:
            self.holder = None
            self._hand_over()

    def _hand_over(self) -> None:
        while self.holder is None and self.waiting:
            client = self.waiting.popleft()
            answer = {}
            try:
                self._heal()
                self.holder = client
            except RuntimeError as error:
                answer = {"error": str(error)}
            with contextlib.suppress(ConnectionError):  # seen when it is read from
                client.sendall(json.dumps(answer).encode() + b"\n")

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            self._heal()
        except RuntimeError as error:
            self.failure = str(error)

    def _heal(self) -> None:
        """Start what is not alive; all anew if the head is not."""
        self._reap()
        for number in [*self.nodes]:
            if number >= self.wanted or 0 not in self.nodes:
                self._kill(number)
        started = {}
        for number in range(self.wanted):
            if number not in self.nodes:
                started[number] = self._fork(number)
                if number == 0:
                    self._await_port()
        for number, log in started.items():
            self._await(number, log)

    def _add(self) -> int:
        self._reap()
        number = next(number for number in range(len(self.nodes) + 1) if number not in self.nodes)
        self._await(number, self._fork(number))
        return number

    def _fork(self, number: int) -> Path:
        """Log of a node that is being started. A fork, since importing Ray is most of the work of `ray start`."""
        from importlib.metadata import entry_points

        (ray,) = entry_points(group="console_scripts", name="ray")
        main = ray.load()
        self.starts += 1
        home = self.folder / f"{number}-{self.starts}"
        home.mkdir()
        log = home / "log"
        ip = f"127.0.0.{number + 1}"
        where = ["--head", f"--port={ADDRESS.rpartition(':')[2]}", "--include-dashboard=false", "--no-monitor"]
        sys.argv = [
            *("ray", "start", "--block", *(where if number == 0 else [f"--address={ADDRESS}"])),
            *(f"--node-ip-address={ip}", f"--temp-dir={home}", f"--num-cpus={CPUS}"),
            *(f"--object-store-memory={STORE_BYTES}", "--dashboard-agent-listen-port=0"),
            *("--disable-usage-stats", "--include-log-monitor=false", "--log-style=record"),
            "--resources=" + json.dumps({f"node{number}": 100}),
        ]
        parent = os.getpid()
        if pid := os.fork():
            self.nodes[number] = pid
            return log
        try:
            _die_with(parent)
            _prctl(_CHILD_SUBREAPER, 1)  # a worker whose raylet died is still found below the node
            os.setsid()
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.closerange(3, 1 << 16)
            _advance_ids(self.starts)
            main()
        finally:
            os._exit(1)

    def _await_port(self) -> None:
        until = time.monotonic() + START_SECONDS
        host, _, port = ADDRESS.partition(":")
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            self._reap()
            if 0 not in self.nodes or time.monotonic() > until:
                raise RuntimeError(f"the head did not start:\n{_tail(self.folder / f'0-{self.starts}' / 'log')}")
            time.sleep(0.02)

    def _await(self, number: int, log: Path) -> None:
        until = time.monotonic() + START_SECONDS
        while "Ray runtime started." not in _tail(log):
            self._reap()
            if number not in self.nodes or time.monotonic() > until:
                raise RuntimeError(f"node {number} did not start:\n{_tail(log)}")
            time.sleep(0.02)

    def _reap(self) -> None:
        """Forget nodes that have ended."""
        for number, pid in [*self.nodes.items()]:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            del self.nodes[number]

    def _kill(self, number: int) -> None:
        if number not in self.nodes:
            raise ValueError(f"node {number} is not alive; alive are {sorted(self.nodes)}")
        process = psutil.Process(self.nodes.pop(number))
        process.suspend()  # or it would end its children one by one, with time to say goodbye
        _kill_below(process)
        process.kill()
        os.waitpid(process.pid, 0)


def _advance_ids(steps: int) -> None:
    """Ray's generator of ids is copied by a fork: without this, nodes would have one id, and be one to the cluster."""
    import ray

    for _ in range(1000 * steps):
        ray.NodeID.from_random()


def _supervise(folder: Path, nodes: int) -> None:
    """Run a keeper; should it be killed, end what it leaves: agents of Ray outlive their raylet."""
    _prctl(_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    if not (keeper := os.fork()):
        try:
            _die_with(parent)
            Keeper(folder, nodes).serve()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(keeper, 0)
    _kill_below(psutil.Process())
    shutil.rmtree(folder, ignore_errors=True)


def _kill_below(process: psutil.Process) -> None:
    """SIGKILL of all its descendants."""
    while children := [one for one in process.children(recursive=True) if _is_running(one)]:
        for one in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(0.01)


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36


def _die_with(parent: int) -> None:
    _prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


# -- programs ----------------------------------------------------------------------------------------------------------


def _call(file: str, name: str, *arguments: str) -> None:
    """Run a function of a file as that of a main program: Ray sends what it defines by value."""
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    sys.path.insert(0, str(Path(file).parent))
    exec(compile(Path(file).read_bytes(), file, "exec"), module.__dict__)
    result = getattr(module, name)(*map(json.loads, arguments))
    Path(os.environ["PENSTOCK_TEST_RESULT"]).write_text(json.dumps(result))


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--keeper", folder, nodes]:
            _supervise(Path(folder), int(nodes))
        case ["--function", file, name, *rest]:
            _call(file, name, *rest)
        case [_, *_]:
            with RayCluster() as cluster:
                print(f"Ray cluster of {NODES} nodes at {ADDRESS}, logs in {cluster.folder}", file=sys.stderr)
                return subprocess.run(cluster.command(*arguments), env=cluster.environment(), check=False).returncode
        case _:
            print("usage: python tests/ray_cluster.py COMMAND ...", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
