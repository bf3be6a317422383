"""`penstock`: its help imports no command, and a closed pipe is no error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import cli
from penstock.cli.console import report_errors
from penstock.cli.main import COMMANDS, GROUPS

Cli = Callable[..., Any]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_arrays_nor_any_command(option: str) -> None:
    code = f"import sys; from penstock.cli.main import app; app(['{option}'], standalone_mode=False)\n"
    code += "print([m for m in sys.modules if m in ('numpy', 'pyarrow', 'rich') or m.startswith('penstock.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "['penstock._syntax', 'penstock._lazy', 'penstock.cli', 'penstock.cli.main']"


def test_every_command_is_listed_with_a_summary_that_fits_its_line(penstock: Cli) -> None:
    shared = {"__init__", "advice", "console", "main", "options", "pipeline_file"}
    folder = Path(str(cli.__file__)).parent
    modules = {file.stem for file in folder.glob("*.py")} - shared | {"competitions"}
    assert {module.replace("_", "-") for module in modules} == set(COMMANDS)
    shown = penstock("--help").stdout
    for name, summary in COMMANDS.items():
        assert f"  {name} " in shown
        assert summary in shown
        assert f"Usage: penstock {name} " in penstock(name, "--help").stdout


def test_help_is_grouped_and_as_wide_as_the_terminal(penstock: Cli) -> None:
    shown = penstock("-h").stdout
    assert shown == penstock("--help").stdout
    assert re.findall(r"^(\w.*):$", shown, re.MULTILINE) == ["Options", *GROUPS]
    wide, narrow = (
        subprocess.run(
            [sys.executable, "-m", "penstock", "queue", "-h"],
            env=os.environ | {"COLUMNS": columns},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for columns in ("140", "60")
    )
    assert wide.split() == narrow.split()  # nothing is cut
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    for group in ("queue", "competitions"):
        assert "..." not in penstock(group, "-h").stdout.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock pr", ["prepare", "probe-isolation"]),
        ("penstock lint --exp", ["--explain"]),
        ("penstock queue do", ["doctor"]),
        ("penstock queue doctor --rep", ["--repair"]),
        ("penstock prepare --filter gopher,c", ["gopher,c4"]),
        ("penstock prepare a.jsonl --engine r", ["ray"]),
        ("penstock lint --chat-template chat", ["chatml"]),
        ("penstock convert a b --to m", ["megatron", "mds"]),
        ("penstock plan --set backend=t", ["backend=torch"]),
        ("penstock competitions show a --split v", ["val"]),
        ("penstock prepare --split ", []),  # file names
        ("penstock run ", []),
    ],
)
def test_the_shell_completes_commands_options_and_values(words: str, expected: list[str]) -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-X", "importtime", "-m", "penstock"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True)
    assert done.stdout.split() == expected
    assert not re.search(r" (numpy|pyarrow|rich|penstock\.cli\.options)\n", done.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_completion_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code = (
        "import sys; from penstock.cli.main import app; app(['--show-completion', sys.argv[1]], prog_name='penstock')"
    )
    done = subprocess.run([sys.executable, "-c", code, shell], capture_output=True, text=True, check=True)
    assert f"_PENSTOCK_COMPLETE=complete_{shell}" in done.stdout


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
