"""Fixtures for all tests: caches and registries of the user stay untouched.

`HYPOTHESIS_PROFILE=fixed` draws the same examples in every run, so that results are reproducible: for deciding whether
a change may be merged. They are half as many as a test asks for: the same ones in every run find nothing new. Without
it every run draws new examples, all of them, and may find new failures.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tests.ray_cluster import RayCluster, why_not
from tests.servers import NatsServer, PostgresServer, RedisServer, S3Server, Server, missing

# No deadlines: the first example may compile a kernel, and other work may share the machine.
settings.register_profile("default", deadline=None)
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
if os.environ.get("HYPOTHESIS_PROFILE") == "fixed" and hasattr(providers, "_get_local_constants"):
    # Hypothesis parses all modules of ours that are imported by then and draws their constants too: which modules these
    # are depends on the tests that this process has run before, and so would the examples.
    providers._get_local_constants = Constants

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

_FSYNC = os.fsync
_HAS_TORCH = importlib.util.find_spec("torch") is not None


def _checked(handle: Any) -> None:
    os.fstat(handle if isinstance(handle, int) else handle.fileno())


# Thousands of small files are written, and none of them has to survive a power cut. The programs that tests start, and
# tests with the fixture `real_disk`, wait for the disk.
os.fsync = _checked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HYPOTHESIS_PROFILE") != "fixed":
        return
    for test in {item.function for item in items if isinstance(item, pytest.Function)}:  # one for all its parameters
        asked: settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
        if is_hypothesis_test(test) and asked is not None:  # a state machine has none
            fewer = min(asked.max_examples, max(10, asked.max_examples // 2))
            test._hypothesis_internal_use_settings = settings(asked, max_examples=fewer)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip the tests of torch where it is not installed: it is the backend of loaders that name none."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name == "torch" and not _HAS_TORCH:
            pytest.skip("torch is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, and keep them out of those that come: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def _test_paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t", numbered=False)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, _test_paths: Path) -> Path:
    """A directory of the test's own, with a number from a counter: pytest's lists those of all tests to find one."""
    path = _test_paths / f"{re.sub(r'[^0-9A-Za-z_]', '_', request.node.name)[:26]}{next(_NUMBERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def real_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test flushes to the disk are flushed."""
    monkeypatch.setattr(os, "fsync", _FSYNC)


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
