"""Every example in the documentation runs as it is printed.

The blocks of a page run one after the other in one process, in a directory that holds the sample and nothing else:

    ```python             runs; a comment `# prints: ...` stands for a line of the output, at least its beginning
    ```python no-run      is only compiled
    ```python file=a.py   is written to that file, for the blocks after it
    ```yaml               is a pipeline: checked with `penstock run --dry-run`, after the Python blocks
    ```yaml no-run        is only read
    ```console            is a session: what stands behind `$ ` is run, and what is below is what it prints, `...` for
                          anything; `$ echo $?` has the exit code of the command before, which is 0 otherwise
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.forked_programs import run_script
from typer.testing import CliRunner

from penstock import PipelineConfig, sinks, sources, transforms
from penstock.cli.main import app

pytestmark = pytest.mark.timeout(600)  # on a cold cache, kernels are compiled first
ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]*))?\)")
SAMPLE = Path("examples") / "sample"
MEASURED = re.compile(r"(?<=^time )\s.*|[\d.,]+ M tokens/s|[\d.,]+ [KMG]iB(?=  of a budget)")
MACHINE_PATH = re.compile(r"/(work|root|home|tmp|Users)/")


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    code: str
    line: int
    """Of its first line of code, counted from 1."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1] or "", match[2].strip(), match[3], text.count("\n", 0, match.start(3)) + 1)
        for match in FENCE.finditer(text)
    ]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def copy_sample(where: Path) -> None:
    shutil.copytree(ROOT / SAMPLE, where / SAMPLE)


def run_python(page: Path, where: Path) -> str:
    """What the Python blocks print, as one script whose line numbers are those of the page."""
    copy_sample(where)
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.language == "python" and block.mark.startswith("file="):
            file = where / block.mark.removeprefix("file=")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.code, encoding="utf-8")
        elif block.language == "python" and not block.mark:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    script = where / f"{page.stem}_page.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not any(lines):
        return ""
    code, printed = run_script(script, said=where / "said", directory=where, timeout=300)
    assert code == 0, printed
    return printed


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    said = run_python(page, tmp_path)
    printed = iter(said.splitlines())
    for block in blocks(page):
        for promised in re.findall(r"^\s*# prints: (.*)$", block.code, re.MULTILINE):
            assert any(line.startswith(promised) for line in printed), f"{promised!r} not in:\n{said}"


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_that_is_only_shown_can_be_compiled(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            assert block.mark in ("", "no-run") or block.mark.startswith("file="), f"unknown mark {block.mark!r}"
            compile(block.code, f"{page}:{block.line}", "exec")


@pytest.mark.parametrize("page", pages_with("yaml"), ids=name_of)
def test_the_yaml_of_a_page_describes_pipelines(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_python(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", sys.modules.copy())  # what a page calls its modules is its own affair
    for number, block in enumerate(blocks(page)):
        if block.language != "yaml":
            continue
        assert isinstance(yaml.safe_load(block.code), dict | list)
        if block.mark == "no-run":
            continue
        file = tmp_path / f"pipeline-{number}.yaml"
        file.write_text(block.code, encoding="utf-8")
        done = CliRunner().invoke(app, ["run", file.name, "--dry-run"], catch_exceptions=False)
        assert done.exit_code == 0, f"{page}:{block.line}: {done.stderr}"


def sessions(page: Path) -> list[tuple[str, list[str], int]]:
    """The commands of a page, what each is said to print, and its line."""
    found: list[tuple[str, list[str], int]] = []
    for block in blocks(page):
        if block.language != "console":
            continue
        assert block.code.startswith("$ "), f"{page}:{block.line}: a session begins with a command"
        for number, line in enumerate(block.code.splitlines(), block.line):
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), [], number))
            else:
                found[-1][1].append(line)
    return found


def as_pattern(shown: list[str]) -> str:
    """What a page shows, as a pattern for what is printed: `...` is anything, alone on a line any number of lines."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in unmeasured(shown)]
    return "\n".join(r"(?s:.*)" if line == ".*" else line for line in lines)


def unmeasured(lines: list[str]) -> list[str]:
    """Without what differs from run to run, and without the widths of columns, which follow their numbers."""
    return "\n".join(" ".join(MEASURED.sub("#", line).split()) for line in lines).rstrip("\n").split("\n")


@pytest.mark.parametrize("page", pages_with("console"), ids=name_of)
def test_the_sessions_of_a_page_print_what_they_show(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_sample(tmp_path)
    monkeypatch.chdir(tmp_path)
    code = 0
    for command, shown, line in sessions(page):
        place = f"{name_of(page)}:{line}: {command}"
        if command == "echo $?":
            assert shown == [str(code)], place
            code = 0
            continue
        assert code == 0, f"the command before {place} ended with {code}, which is not shown"
        program, *words = shlex.split(command)
        assert program == "penstock", place
        done = CliRunner().invoke(app, words, catch_exceptions=False)  # one process for all: starting many takes long
        code = done.exit_code
        said = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
        assert len(said) == len(done.stderr.splitlines()), f"{place}\n{done.stderr}"
        said = [line for line in said if not line.startswith("penstock: numba compiles")]  # once on a machine
        printed = [*said, *done.stdout.splitlines()]
        assert re.fullmatch(as_pattern(shown), "\n".join(unmeasured(printed))), "\n".join([place, *printed])
    assert code == 0, f"{name_of(page)} does not show how the last command ended: {code}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_on_the_sample_are_shown_as_sessions_which_are_run(page: Path) -> None:
    assert not [block.line for block in blocks(page) if block.language == "sh" and SAMPLE.as_posix() in block.code]


def test_lines_of_a_session_are_compared_but_for_what_was_measured() -> None:
    def agree(shown: str, printed: str) -> bool:
        return bool(re.fullmatch(as_pattern(shown.split("\n")), "\n".join(unmeasured(printed.split("\n")))))

    assert agree("time   0.5 s  138 rows/s, 0.1 MB/s", "time      1:02  1,138 rows/s, 22.1 MB/s   \n")
    assert agree("peak memory  4.2 MiB  of a budget of 1.0 GiB", "peak memory  994.0 KiB  of a budget of 1.0 GiB")
    assert agree("bottleneck  Map(...", "bottleneck      Map(f) is the bottleneck")
    assert agree("a\n...\nz", "a\nb\nc\nz")
    assert not agree("a ...", "a b\nc")
    assert not agree("rows in 64", "rows in 63")
    assert not agree("rows in 64", "rows in 64\nrows out 60")
    assert not agree("store  22.9 KiB  docs.store", "store  21.9 KiB  docs.store")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere_and_no_path_is_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        there = (page.parent / target).resolve()
        assert there.exists(), f"{target} does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert not MACHINE_PATH.search(text)


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [
        path
        for page in (ROOT / "docs").rglob("*.md")
        if (path := page.relative_to(ROOT / "docs").as_posix()) != "README.md" and f"({path})" not in index
    ]
    assert not missing


def table(page: str) -> list[list[str]]:
    """The rows of all tables of a page, cell by cell."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


@pytest.mark.parametrize(("page", "package"), [("sources.md", sources), ("sinks.md", sinks)])
def test_the_table_of_stages_has_each_with_its_arguments_and_suffixes(page: str, package: ModuleType) -> None:
    documented = {row[0].strip("`"): row for row in table(page) if re.fullmatch(r"`\w+(Source|Sink)`", row[0])}
    assert set(documented) == {name for name in package.__all__ if name[0].isupper()}
    for name, row in documented.items():
        stage = getattr(package, name)
        arguments = list(inspect.signature(stage).parameters)
        if arguments[:1] in (["paths"], ["path"]):
            assert re.findall(r"`(\w+)(?:=[^`]*)?`", row[2]) == arguments[1:], name
        assert set(getattr(stage, "suffixes", ())) <= set(re.findall(r"`(\.\w+)`", row[1])), name


def test_the_table_of_knobs_has_every_field_of_the_config() -> None:
    fields = [field.name for field in dataclasses.fields(PipelineConfig)]
    assert [name for row in table("pipeline.md") if (name := row[0].strip("`")) in fields] == fields


def test_every_transform_is_documented() -> None:
    page = (ROOT / "docs" / "transforms.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [name for name in transforms.__all__ if name not in page]
    assert not [name for name in transforms.__all__ if name[0].isupper() and f"`{name}`" not in index]
