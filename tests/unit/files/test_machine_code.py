"""Machine code is run only if nobody else can have put it there, and kept only if it does what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.files import machine_code
from penstock.files.machine_code import MachineCode, compile_module

pytest.importorskip("numba")

DOUBLE = """
    import numba
    {before}
    def double(number):
        {body}

    SIGNATURES = {{"double": (numba.njit(double), numba.types.int64(numba.types.int64))}}

    def check(functions):
        assert functions["double"](21) == 42
"""
OUTSIDE = "outside = numba.types.ExternalFunction('numba_gil_ensure', numba.types.int64(numba.types.int64))"
"""A function that is there in processes which have imported numba, and in no others."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "cache"


def write_module(folder: Path, name: str, body: str, before: str = "") -> str:
    text = DOUBLE.format(body=body, before=before)
    (folder / f"{name}.py").write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    return name


def kept(cache: Path) -> Path:
    (file,) = cache.rglob("*.code")
    return file


def double(module: str) -> int | None:
    """What the kernel makes of 4; None if there is none."""
    functions = MachineCode(module).functions(compile_missing=False)
    return functions["double"](4) if functions is not None else None


@pytest.fixture
def module(tmp_path: Path, cache: Path) -> str:
    name = write_module(tmp_path, "kernels_that_double", "return 2 * number")
    compile_module(name)
    assert double(name) == 8
    return name


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_code_is_kept_where_only_its_user_can_write(cache: Path, module: str) -> None:
    file = kept(cache)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def in_a_directory_for_all(file: Path) -> None:
    file.parent.chmod(0o777)


def writable_by_the_group(file: Path) -> None:
    file.chmod(0o660)


def behind_a_link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_suffix(".elsewhere")))


def with_another_name(file: Path) -> None:
    file.with_suffix(".elsewhere").hardlink_to(file)


def in_a_directory_behind_a_link(file: Path) -> None:
    file.parent.symlink_to(file.parent.rename(file.parent.with_name("elsewhere")))


def of_another_user(file: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(file, 12345, -1)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
@pytest.mark.parametrize(
    "change",
    [
        in_a_directory_for_all,
        writable_by_the_group,
        behind_a_link,
        with_another_name,
        in_a_directory_behind_a_link,
        of_another_user,
    ],
)
def test_code_that_others_can_have_written_is_not_loaded(
    cache: Path, module: str, change: Callable[[Path], None]
) -> None:
    change(kept(cache))
    assert double(module) is None


def test_code_for_sources_that_an_upgrade_has_replaced_is_not_loaded(tmp_path: Path, module: str) -> None:
    caller = tmp_path / "caller.py"
    caller.write_text("old")
    made = [MachineCode(module, str(caller)) for _ in range(2)]
    functions = made[0].functions(compile_missing=False)
    assert functions is not None
    assert functions["double"](4) == 8
    caller.write_text("newer")
    assert made[0].functions(compile_missing=False) is functions
    assert made[1].functions(compile_missing=False) is None


def test_damage_anywhere_is_noticed_and_the_code_made_again(cache: Path, module: str) -> None:
    file = kept(cache)
    whole = file.read_bytes()
    places = [0, 7, 8, 9, 15, 16, 20, len(whole) // 2, len(whole) - 1]
    for damaged in [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places] + [b"", whole[:12]]:
        file.write_bytes(damaged)
        assert double(module) is None
        assert not file.exists(), "it is compiled again"
    compile_module(module)
    assert double(module) == 8


@pytest.mark.parametrize(
    ("name", "before", "body"),
    [
        ("outside", OUTSIDE, "outside(number) if number == 1 else 2 * number"),
        ("wrong", "", "3 * number"),
        ("raising", "", "1 // (number - number)"),
    ],
)
def test_code_that_does_not_do_what_it_should_is_not_kept(
    tmp_path: Path, cache: Path, name: str, before: str, body: str
) -> None:
    module = write_module(tmp_path, f"kernels_{name}", f"return {body}", before)
    compile_module(module)
    assert kept(cache).read_bytes() == b"failed"
    assert double(module) is None


def test_what_a_killed_compiler_left_is_removed(cache: Path, module: str) -> None:
    file = kept(cache)
    with machine_code.AtomicFile(file, durable=False) as made:
        left = made.temporary.name
    file.unlink()
    file.with_name(left).write_bytes(b"half of it")
    compile_module(module)
    assert [found.name for found in file.parent.iterdir()] == [file.name]


def test_settings_of_one_run_do_not_go_into_the_code_for_all(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(subprocess, "run", lambda *_, env, **__: given.update(env))
    for name in ("NUMBA_OPT", "NUMBA_DISABLE_JIT", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "0")
    MachineCode(write_module(tmp_path, "kernels_that_wait", "return 0")).wait()
    assert given["NUMBA_CACHE_DIR"] == str(cache)
    assert given["PATH"] == os.environ["PATH"]
    assert not {"NUMBA_OPT", "NUMBA_DISABLE_JIT", "PYTHONWARNINGS"} & given.keys()


def test_options_and_paths_of_the_working_directory_do_not_reach_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".numba_config.yaml").write_text("disable_jit: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "cache")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, "modules", ""])
    (tmp_path / "modules").mkdir()
    functions = MachineCode(write_module(tmp_path / "modules", "kernels_beside_options", "return 2 * number")).wait()
    assert functions is not None
    assert functions["double"](4) == 8
    assert kept(tmp_path / "cache").read_bytes() != b"failed"


def test_no_process_is_started_while_another_one_compiles(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    name = write_module(tmp_path, "kernels_of_another", "return 2 * number")
    waiting = threading.Event()
    acquire = machine_code.FileLock.acquire

    def acquired(self: machine_code.FileLock, *given: Any) -> bool:
        if self.path.suffix == ".lock":
            waiting.set()
        return acquire(self, *given)

    file = machine_code.code_file(name, pytest.importorskip("llvmlite.binding"))
    file.parent.mkdir(mode=0o700, parents=True)
    lock = machine_code.FileLock(file.with_suffix(".lock"))
    assert lock.acquire(0)
    monkeypatch.setattr(machine_code.FileLock, "acquire", acquired)
    code = MachineCode(name)
    assert code.functions(compile_missing=True) is None
    assert waiting.wait(60)
    monkeypatch.setattr(machine_code.FileLock, "acquire", lambda *_: True)  # for what is compiled here
    compile_module(name)
    lock.release()
    functions = code.wait()
    assert functions is not None
    assert functions["double"](4) == 8


def test_programs_that_begin_together_start_one_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, started = write_module(tmp_path, "kernels_of_many", "return 2 * number"), []
    all_there = threading.Barrier(3)

    def run(*_: Any, **__: Any) -> None:
        started.append(name)
        time.sleep(0.2)  # the process imports, and has no lock yet
        compile_module(name)

    def wait() -> None:
        all_there.wait(60)
        found.append(MachineCode(name).wait())

    found: list[Any] = []
    monkeypatch.setattr(subprocess, "run", run)
    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [functions["double"](4) for functions in found] == [8, 8, 8]
    assert started == [name]


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", None), ("executable", "")])
def test_a_program_that_is_no_interpreter_is_not_started_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr(sys, name, value, raising=False)
    code = MachineCode(write_module(tmp_path, "kernels_of_a_program", "return 0"))
    assert code.wait() is None
    assert code._compiler is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_process_forked_while_another_thread_loads_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    code = MachineCode("penstock.sources.json_kernels")

    def load(self: MachineCode, compile_missing: bool) -> None:
        process = os.fork()
        if not process:
            monkeypatch.setattr(MachineCode, "_load", lambda *_: os._exit(1))  # locks of LLVM may be taken
            os._exit(0 if code.functions(compile_missing=False) is None else 2)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))

    monkeypatch.setattr(MachineCode, "_load", load)
    code.functions(compile_missing=False)
    assert codes == [0]
