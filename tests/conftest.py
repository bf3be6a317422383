"""Fixtures for all tests: caches and registries of the user stay untouched.

`HYPOTHESIS_PROFILE=fixed` draws the same examples in every run, so that results are reproducible: for deciding whether
a change may be merged. Without it every run draws new examples and may find new failures.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.ray_cluster import RayCluster, why_not
from tests.servers import NatsServer, PostgresServer, RedisServer, S3Server, Server, missing

# No deadlines: the first example may compile a kernel, and other work may share the machine.
settings.register_profile("default", deadline=None)
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Compiled modules are kept, also where the environment says otherwise: hundreds of tests start an interpreter, and each
# would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A job in the background of a script ignores Ctrl-C, and so would the programs that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
# Machine code stays from run to run: compiling all kernels takes half a minute.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "kernels"))
os.environ["XDG_DATA_HOME"] = f"{_CACHE.name}/data"
# Nothing is fetched from the Hub: a name that is no tokenizer must not go out.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, and keep them out of those that come: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _running(kind: type[Server]) -> Iterator[Server]:
    if reason := missing(*kind.packages):
        pytest.skip(reason)
    with kind() as server:
        yield server


# One of each for all tests of a process, each of which takes names of its own; a test that kills a server starts it.


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    yield from _running(S3Server)


@pytest.fixture
def s3_url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Prefix of a test's own in the bucket; clients find the server by the environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return f"{s3.url}/{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """With an open connection: the driver asks a server for all its types when a process opens the first."""
    from penstock.connections.sql import Database

    for server in _running(PostgresServer):
        with Database(server.url).connect():
            yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    yield from _running(RedisServer)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Server]:
    yield from _running(NatsServer)


@pytest.fixture(scope="session")
def kafka_broker() -> Any:
    """The mock broker of librdkafka: a real client and its protocol, but no server."""
    if reason := missing("confluent-kafka"):
        pytest.skip(reason)
    from tests.brokers import KafkaBroker

    return KafkaBroker()


@pytest.fixture(params=["nats", "redis"])
def broker(request: pytest.FixtureRequest) -> Any:
    """Each broker that keeps its messages: NATS and Redis."""
    from tests.brokers import NatsBroker, RedisBroker

    server = request.getfixturevalue(f"{request.param}_server")
    return NatsBroker(server.url) if request.param == "nats" else RedisBroker(server.url)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One for all processes of a run: the first that asks starts it, the last that leaves ends it."""
    if reason := missing("ray") or why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    with RayCluster(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) as cluster:
        yield cluster
