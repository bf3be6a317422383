"""`penstock`: its help imports no command, and a closed pipe is no error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import cli
from penstock.cli.console import report_errors
from penstock.cli.main import COMMANDS

Cli = Callable[..., Any]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_arrays_nor_any_command(option: str) -> None:
    code = f"import sys; from penstock.cli.main import app; app(['{option}'], standalone_mode=False)\n"
    code += "print([m for m in sys.modules if m in ('numpy', 'pyarrow', 'rich') or m.startswith('penstock.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "['penstock._lazy', 'penstock.cli', 'penstock.cli.main']"


def test_every_command_is_listed_with_a_summary_that_fits_its_line(penstock: Cli) -> None:
    shared = {"__init__", "advice", "console", "main", "options", "pipeline_file"}
    modules = {file.stem for file in Path(str(cli.__file__)).parent.glob("*.py")} - shared
    assert {module.replace("_", "-") for module in modules} == set(COMMANDS)
    shown = penstock("--help").stdout
    for name, summary in COMMANDS.items():
        assert f"  {name} " in shown
        assert summary in shown
        assert f"Usage: penstock {name} " in penstock(name, "--help").stdout


def test_an_unknown_command_names_the_nearest_one(penstock: Cli) -> None:
    result = penstock("prepar")
    assert result.exit_code == 2
    assert "'prepare'" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows report no closed reader")
@pytest.mark.parametrize("command", [["plugins"], ["plugins", "--json"], ["--help"]])
def test_output_into_a_closed_pipe_ends_without_a_message(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "penstock", *command], stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows report no closed reader")
def test_a_broken_pipe_other_than_standard_output_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), report_errors(debug=False):
        raise BrokenPipeError(32, "Broken pipe")
    assert "Broken pipe" in capfd.readouterr().err
