from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from ui_cases import write_lines

from penstock.cli.main import app
from penstock.errors import ConfigError
from penstock.ui.guard import Access
from penstock.ui.server import listen


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that somebody listens on, the first that penstock ui tries."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        port = made.getsockname()[1]
        monkeypatch.setattr("penstock.ui.server.PORT", port)
        yield port


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", [{"text": "x"}])


@pytest.fixture
def ui(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, which ends as soon as it listens."""

    def serve(site: Any, listener: Any, *, started: Any) -> None:
        with closing(listener.socket):
            started(Access(listener.host, listener.port))

    monkeypatch.setattr("penstock.cli.ui.serve", serve)
    return lambda *arguments: CliRunner().invoke(app, ["ui", *map(str, arguments)])


def test_the_next_free_port_is_taken_and_named(taken: int, rows: Path, ui: Any) -> None:
    done = ui(rows)
    assert done.exit_code == 0, done.output
    assert f"port {taken} is taken, so this one listens on " in done.stderr
    assert f"http://127.0.0.1:{taken}/" not in done.stdout
    assert "/?token=" in done.stdout


def test_a_port_that_was_named_and_is_taken_is_an_error(taken: int, rows: Path, ui: Any) -> None:
    done = ui(rows, "--port", taken)
    assert done.exit_code == 1
    assert f"--port {taken} cannot be used" in done.stderr
    assert "leave it out" in done.stderr


def test_a_port_of_0_is_any_free_one(rows: Path, ui: Any) -> None:
    facts = json.loads(ui(rows, "--port", 0, "--json").stdout)
    assert facts["port"] > 0
    assert facts["address"].startswith(f"http://127.0.0.1:{facts['port']}/?token=")


def test_an_address_for_other_machines_is_warned_of(rows: Path, ui: Any) -> None:
    done = ui(rows, "--port", 0, "--host", "0.0.0.0")
    assert "is not encrypted" in done.stderr


def test_an_address_that_this_machine_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no such address"):
        listen("203.0.113.7", 0)


def test_a_missing_target_is_an_error(tmp_path: Path, ui: Any) -> None:
    done = ui(tmp_path / "missing.store")
    assert done.exit_code == 1
    assert "does not exist" in done.stderr


def test_every_server_has_secrets_of_its_own_that_no_repr_shows() -> None:
    one, other = Access("127.0.0.1", 1), Access("127.0.0.1", 1)
    assert len({one.token, one.session, other.token, other.session}) == 4
    assert one.token not in repr(one)
    assert one.session not in repr(one)
