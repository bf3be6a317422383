"""Rules of the house: sizes of packages, classes and signatures, names of modules and classes, first words of docs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

import penstock
from lazy_modules import LazyModule

ROOT = Path(penstock.__file__).parent
MOST_FILES = 25
MOST_PARAMETERS = 12
MOST_OPTIONS = 30
MOST_METHODS = 20
MOST_TOP_LEVEL_NAMES = 50
MOST_BYTES_OF_A_FILE = 1_000_000

GERUNDS = {
    *("balancing", "batching", "filtering", "formatting", "listing", "mixing", "packing", "sharding", "streaming"),
    *("lightning", "testing"),
}
"""Modules and packages that the field, another package or a design document names so."""
MANY_FIELDS: dict[str, str] = {
    "Parcel": "passed between stages of a run",
    "RolloutTable": "columns of rollouts that were read",
    "SplitStatus": "part of the status of a queue",
}
"""Dataclasses that penstock itself builds, with the reason why nobody writes their constructor."""
QUESTION_WORDS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"}
# What is not in order yet; a package stands for everything in it. The set only shrinks: an entry that is in order now
# fails the test.
NOT_YET: set[str] = {
    "parameters: rl/advantages/presets.py Preset",
    "parameters: rl/rollout.py Rollout",
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}


def crowded_packages() -> Iterator[str]:
    counted = Counter(str(Path(file).parent) for file in trees())
    yield from (f"files: {package}" for package, files in counted.items() if files > MOST_FILES)


def gerund_modules() -> Iterator[str]:
    for file in trees():
        if any(name.endswith("ing") and name not in GERUNDS for name in module_names(file)):
            yield f"gerund: {file}"


def module_names(file: str) -> list[str]:
    """Names of a module and of the packages it is in."""
    return list(Path(file).with_suffix("").parts)


def repeated_classes() -> Iterator[str]:
    places: dict[str, set[str]] = defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(file)
    yield from (f"class twice: {name}" for name, files in places.items() if len(files) > 1)


def top_level_names() -> Iterator[str]:
    if len(penstock.__all__) > MOST_TOP_LEVEL_NAMES:
        yield "names: penstock"


def long_signatures() -> Iterator[str]:
    for file, tree in trees().items():
        most = MOST_OPTIONS if file.startswith("cli/") else MOST_PARAMETERS
        for name, function, is_method in public_functions(tree):
            arguments = function.args
            named = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            if named - is_method > most:
                yield f"parameters: {file} {name}"
        for node in tree.body:
            public = isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in MANY_FIELDS
            if public and is_dataclass(node) and len(init_fields(node)) > MOST_PARAMETERS:
                yield f"parameters: {file} {node.name}"


def large_classes() -> Iterator[str]:
    for file, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                methods = {each.name for each in node.body if isinstance(each, Definition)}
                if sum(not name.startswith("_") for name in methods) > MOST_METHODS:
                    yield f"methods: {file} {node.name}"


def docstrings_that_ask() -> Iterator[str]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | Definition)
            if documented and (ast.get_docstring(node) or "-").split()[0] in QUESTION_WORDS:
                yield f"docstring: {file} {getattr(node, 'name', '')}".rstrip()


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Definition, bool]]:
    """(name, function, True for a method with self) of public functions, and of methods of public classes."""
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node, False
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, Definition) and (inner.name == "__init__" or not inner.name.startswith("_")):
                    static = "staticmethod" in map(ast.unparse, inner.decorator_list)
                    yield f"{node.name}.{inner.name}", inner, not static


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def init_fields(node: ast.ClassDef) -> list[str]:
    return [
        ast.unparse(each.target)
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(each.annotation)
        and "init=False" not in ast.unparse(each)
    ]


RULES = [
    crowded_packages,
    gerund_modules,
    repeated_classes,
    top_level_names,
    long_signatures,
    large_classes,
    docstrings_that_ask,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_in_order(rule: object) -> None:
    assert callable(rule)
    assert not {problem for problem in rule() if not any(excuses(entry, problem) for entry in NOT_YET)}


def excuses(entry: str, problem: str) -> bool:
    return problem == entry or problem.startswith((f"{entry}/", f"{entry}.py"))


def test_what_is_in_order_is_no_longer_excused() -> None:
    found = {problem for rule in RULES for problem in rule()}
    mended = {entry for entry in NOT_YET if not any(excuses(entry, problem) for problem in found)}
    assert not mended, "take these out of NOT_YET"
    modules = {name for file in trees() for name in module_names(file)}
    assert not GERUNDS - modules, "take these out of GERUNDS"
    classes = {node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)}
    assert not MANY_FIELDS.keys() - classes, "take these out of MANY_FIELDS"


def test_no_large_file_is_tracked() -> None:
    top = ROOT.parents[1]
    if not (top / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=top, capture_output=True)
    if listed.returncode:
        pytest.skip(listed.stderr.decode())
    files = [top / name for name in listed.stdout.decode().split("\0") if name]
    assert Path(__file__) in files
    assert not [file for file in files if file.is_file() and file.stat().st_size > MOST_BYTES_OF_A_FILE]


def test_the_forge_tests_every_version_that_the_package_names() -> None:
    top = ROOT.parents[1]
    project = tomllib.loads((top / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    jobs = yaml.safe_load((top / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == named
    commands = {step.get("run") for job in jobs.values() for step in job["steps"]}
    assert {"make lint", "make test", "python -m build"} <= commands
    citation = yaml.safe_load((top / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_a_lazy_module_of_the_tests_is_not_imported_by_those_who_collect_them() -> None:
    module = LazyModule("this")  # it prints when it is imported
    assert not hasattr(module, "_mock_name")
    assert not hasattr(module, "__wrapped__")
    assert "this" not in sys.modules
