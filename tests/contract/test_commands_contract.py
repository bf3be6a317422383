"""What every command promises: JSON, only results on standard output, no unwanted escape codes, exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from penstock.batching.backends import BACKENDS
from penstock.chat.templates import BUILT_IN
from penstock.cli.competitions.addition import TYPES
from penstock.cli.completion import light_commands, table
from penstock.cli.console import ExitCode, report_errors
from penstock.cli.main import app
from penstock.corpus.convert import FORMATS
from penstock.corpus.quality.filters import FILTERS
from penstock.datasets import make_titanic
from penstock.fsqueue import QueueSink
from penstock.fsqueue.publisher import Limits

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"
SAMPLE = "examples/sample"
TOKENIZER = ["--tokenizer", f"{SAMPLE}/tokenizer"]
CHATS, LOADER = f"{SAMPLE}/chats.jsonl", f"{SAMPLE}/chats.yaml"
WITHOUT_JSON: dict[str, str] = {}
"""Commands without `--json`, and why."""
STREAMS = {"lint", "show"}
"""Commands whose `--json` is JSON Lines."""
CASES: dict[str, list[str]] = {
    "bench": [LOADER, "--steps", "3"],
    "cache": ["cache-of-machines"],
    "competitions add": ["titanic", "--name", "ship", "--registry", "registry"],
    "competitions discover": ["--registry", "registry"],
    "competitions list": ["--registry", "registry"],
    "competitions remove": ["boat", "--registry", "registry"],
    "competitions search": ["--type", "binary", "--registry", "registry"],
    "competitions show": ["titanic", "--rows", "2", "--registry", "registry"],
    "convert": ["chats.store", "chats.mds", "--to", "mds", "--overwrite"],
    "info": ["chats.store", "--verify"],
    "join": ["chats.store"],
    "lint": [CHATS, *TOKENIZER, "--template", "chatml", "--max-length", "95"],
    "plan": [LOADER],
    "plugins": [],
    "prepare": [f"{SAMPLE}/documents.jsonl", *TOKENIZER, "--out", "documents.store"],
    "probe-isolation": [LOADER, "--model", "model"],
    "queue doctor": ["queue", "--wait-seconds", "0"],
    "queue purge": ["purged", "--yes", "--force"],
    "queue status": ["queue", "--seconds", "0"],
    "report": ["chats.store", "--out", "page.html"],
    "run": ["pipeline.yaml"],
    "serve": [LOADER, "--port", "0"],
    "show": ["chats.store", "--row", "1"],
    "trace": [LOADER, "--row", "3"],
    "ui": ["chats.store", "--port", "0"],
    "verify-resume": [LOADER, "--steps", "4", "--stops", "1", "--worlds", "1"],
    "versions": ["chats.store"],
}
FINDINGS = {"lint"}
"""Commands that find something in these cases."""
SLOW = ("probe-isolation", "serve", "ui")


def leaves() -> dict[str, Any]:
    """All commands, by their words."""

    def below(group: Any, words: str) -> dict[str, Any]:
        context, found = typer.Context(root), {}
        for name in group.list_commands(context):
            each, path = group.get_command(context, name), f"{words} {name}".strip()
            found |= below(each, path) if hasattr(each, "list_commands") else {path: each}
        return found

    root: Any = get_command(app)
    return below(root, "")


def make_queue(path: Path) -> None:
    with QueueSink(path, batches_per_file=2, meta={"training_type": "CLM"}, limits=Limits(100)) as sink:
        for number in range(4):
            sink.consume(pa.record_batch({"x": [[number, number]]}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with something for each command."""
    here = tmp_path_factory.mktemp("place")
    shutil.copytree(ROOT / SAMPLE, here / SAMPLE)
    make_titanic(here / "titanic", rows=60, test_rows=20)
    make_queue(here / "queue")
    make_queue(here / "purged")
    (here / "cache-of-machines").mkdir()
    (here / "pipeline.yaml").write_text(f"source: {SAMPLE}/documents.jsonl\nsink: out.parquet\n")
    before = Path.cwd()
    os.chdir(here)
    try:
        chats = ["prepare", CHATS, *TOKENIZER, "--template", "chatml", "--out", "chats.store", "--quiet"]
        added = [
            ["competitions", "add", "titanic", "--name", name, "--registry", "registry"] for name in ("titanic", "boat")
        ]
        for words in (chats, *added):
            result = CliRunner().invoke(app, words, catch_exceptions=False)
            assert result.exit_code == 0, result.output
    finally:
        os.chdir(before)
    return here


@pytest.fixture
def call(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(place)
    return lambda *words: CliRunner().invoke(app, list(words), prog_name="penstock")


def test_every_command_has_a_case_here_and_prints_json() -> None:
    found = leaves()
    assert set(CASES) | set(WITHOUT_JSON) == set(found)
    lacking = [path for path, each in found.items() if not any("--json" in option.opts for option in each.params)]
    assert lacking == list(WITHOUT_JSON)


@pytest.mark.parametrize("path", [path for path in CASES if path not in SLOW])
def test_json_is_all_that_standard_output_gets(path: str, call: Callable[..., Any]) -> None:
    result = call(*path.split(), *CASES[path], "--json")
    assert result.exit_code == (ExitCode.FINDINGS if path in FINDINGS else ExitCode.OK), result.output
    documents = [json.loads(text) for text in (result.stdout.splitlines() if path in STREAMS else [result.stdout])]
    assert documents
    assert all(isinstance(each, list if path == "plugins" else dict) for each in documents)
    page = PAGE.read_text(encoding="utf-8")
    section = page[page.index("## JSON") :]
    keys = documents[0][0] if path == "plugins" else documents[0]
    [row] = re.findall(rf"^\| `{path}` \| (.*) \|$", section, re.MULTILINE)
    assert not [key for key in keys if f"`{key}`" not in row], "keys that the page does not list"


def test_probe_isolation_prints_json(call: Callable[..., Any], place: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=1100, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(place / "model")
    result = call("probe-isolation", *CASES["probe-isolation"], "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ways"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process can handle")
@pytest.mark.parametrize("path", ["serve", "ui"])
def test_a_server_prints_one_line_of_json_and_ends_with_0(path: str, place: Path) -> None:
    command = [sys.executable, "-m", "penstock", path, *CASES[path], "--json"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = json.loads(server.stdout.readline())
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=120)
    assert first["address"]
    assert (rest, server.returncode) == ("", 0)


# -- escape codes ----------------------------------------------------------------------------------------------------

DRIVER = """
import json, sys
from penstock.cli.main import app
for words in json.loads(sys.argv[1]):
    try:
        app(words, prog_name="penstock")
    except SystemExit:
        pass
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pty")
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}], ids=str)
def test_on_a_terminal_escape_codes_appear_only_where_they_are_wanted(place: Path, environment: dict[str, str]) -> None:
    import pty

    quick = [path for path in CASES if path not in (*SLOW, "queue purge", "competitions remove")]
    words = [[*path.split(), *CASES[path]] for path in quick] + [["show", "nothing"], ["--help"], ["plan"]]
    # Progress would only appear after a second: here it is drawn at once.
    code = "import penstock.observe.display as d; import penstock.observe.work as w; w.LIVE_SECONDS = 0.0\n" + DRIVER
    plain = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    }
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, json.dumps(words)]
    process = subprocess.Popen(
        command, cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, env=plain | {"TERM": "xterm"} | environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # Linux reports the end of a pty this way
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(60) == 0
    assert b"row length" in shown
    assert (b"\x1b" in shown) == (not environment)


@pytest.mark.parametrize("path", [path for path in CASES if path not in (*SLOW, "queue purge", "competitions remove")])
def test_piped_output_has_no_escape_codes(path: str, call: Callable[..., Any]) -> None:
    result = call(*path.split(), *CASES[path])
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output
    assert result.exit_code == (ExitCode.FINDINGS if path in FINDINGS else ExitCode.OK), result.output


# -- exit codes ------------------------------------------------------------------------------------------------------


def test_the_page_lists_all_exit_codes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| ", page[page.index("## Exit codes") :], re.MULTILINE)
    assert [int(code) for code in listed] == sorted(ExitCode)


@pytest.mark.parametrize("path", CASES)
def test_a_wrong_command_line_ends_with_2_and_prints_no_result(path: str, call: Callable[..., Any]) -> None:
    result = call(*path.split(), *CASES[path], "--no-such-option")
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert "--no-such-option" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "nothing.yaml"],
        ["info", "nothing.store"],
        ["lint", "nothing.jsonl", *TOKENIZER],
        ["queue", "status", "nothing"],
        ["run", "nothing.yaml"],
        ["competitions", "show", "nothing", "--registry", "registry"],
    ],
    ids=" ".join,
)
def test_an_error_ends_with_1_and_prints_no_result(words: list[str], call: Callable[..., Any]) -> None:
    result = call(*words, "--json")
    assert (result.exit_code, result.stdout) == (ExitCode.ERROR, "")
    assert result.stderr.startswith("penstock: ")


def test_damage_that_a_check_finds_ends_with_3(call: Callable[..., Any], place: Path, tmp_path: Path) -> None:
    store, queue = tmp_path / "a.store", tmp_path / "queue"
    shutil.copytree(place / "chats.store", store)
    shutil.copytree(place / "queue", queue)
    for file in (next(store.rglob("*.arrow")), next(queue.glob("train/*.arrow"))):
        file.chmod(0o644)
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
    found = call("info", str(store), "--verify", "--json")
    assert (found.exit_code, json.loads(found.stdout)["verified"]) == (ExitCode.FINDINGS, False)
    found = call("queue", "doctor", str(queue), "--wait-seconds", "0", "--json")
    assert (found.exit_code, json.loads(found.stdout)["sound"]) == (ExitCode.FINDINGS, False)


def test_an_interrupted_command_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, report_errors(debug=False, stopped="stopped; run it again"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "penstock: stopped; run it again\n"


# -- completion ------------------------------------------------------------------------------------------------------


def test_the_table_for_completion_is_that_of_the_commands() -> None:
    written = Path(table.__file__).read_text(encoding="utf-8")
    assert written == light_commands.table_source(), "run: python -m penstock.cli.completion"


def test_completed_values_are_those_that_options_take() -> None:
    values = {flag: list(given) for flag, given in light_commands.VALUES.items()}
    assert values["--filter"] == list(FILTERS)
    assert values["--template"] == sorted(BUILT_IN)
    assert sorted(values["--to"]) == sorted(FORMATS)
    assert values["--type"] == TYPES.split(", ")
    assert values["--set"] == [f"backend={name}" for name in sorted(BACKENDS)]
    flags = {flag for _, _, options in table.TABLE.values() for each in options for flag in each[0]}
    assert set(values) <= flags


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 penstock --show-completion bash)"
        complete -p penstock
        COMP_WORDS=(penstock convert --to me); COMP_CWORD=3; _penstock_completion penstock
        echo "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["complete -o default -F _penstock_completion penstock", "megatron"]
