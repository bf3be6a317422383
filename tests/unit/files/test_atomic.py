from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.files.atomic import AtomicFile, remove_leftovers, sync_directory, write_atomic

pytestmark = pytest.mark.usefixtures("real_disk")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_visible_only_when_it_is_committed(tmp_path: Path) -> None:
    target = AtomicFile(tmp_path / "a.txt")
    target.file.write(b"all of it")
    assert not (tmp_path / "a.txt").exists()
    assert all(name.startswith(".") for name in names(tmp_path))
    target.commit()
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == b"all of it"


def test_committing_replaces_an_older_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    write_atomic(tmp_path / "a.txt", b"new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert names(tmp_path) == ["a.txt"]


def test_aborting_leaves_nothing_and_the_older_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    target = AtomicFile(tmp_path / "a.txt")
    target.file.write(b"half of")
    target.abort()
    target.abort()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_aborting_after_a_commit_does_nothing(tmp_path: Path) -> None:
    target = AtomicFile(tmp_path / "a.txt")
    target.commit()
    target.abort()
    assert names(tmp_path) == ["a.txt"]


def test_an_exception_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with AtomicFile(tmp_path / "a.txt") as target:
            target.file.write(b"half of")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == []


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    first, second = AtomicFile(tmp_path / "a.txt"), AtomicFile(tmp_path / "a.txt")
    first.file.write(b"first")
    second.file.write(b"second")
    first.commit()
    second.commit()
    assert (tmp_path / "a.txt").read_bytes() == b"second"


def test_after_discarding_writes_go_nowhere(tmp_path: Path) -> None:
    target = AtomicFile(tmp_path / "a.txt")
    target.discard()
    assert target.file.write(b"1234") == 4
    assert target.file.write(memoryview(b"12345")) == 5
    target.file.flush()
    assert target.temporary.stat().st_size == 0
    target.abort()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_under_the_name_of_the_target(tmp_path: Path) -> None:
    target = AtomicFile(tmp_path / "a.txt")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, target.file.fileno())
    os.close(full)
    with pytest.raises(OSError, match=r"a\.txt") as caught:
        target.file.write(b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    target.abort()
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    sync_directory(tmp_path)


def test_a_broken_disk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)


def killed_writer(path: Path) -> None:
    """Leave what a killed process leaves that was writing a file."""
    code = (
        "import os, sys; from penstock.files.atomic import AtomicFile; "
        "a = AtomicFile(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_leftovers_of_killed_writers_are_removed_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    killed_writer(tmp_path / "a.txt")
    killed_writer(tmp_path / "b.txt")
    assert len(names(tmp_path)) == 2
    live = AtomicFile(tmp_path / "a.txt")
    other_machine = (
        tmp_path / f".a.txt.{os.getpid()}-{'0000' if '-0000' not in live.temporary.name else '1111'}ffff.tmp"
    )
    other_machine.touch()
    precious = tmp_path / "precious"
    precious.touch()
    link = live.temporary.with_name(live.temporary.name[:-8] + "0000.tmp")
    link.symlink_to(precious)
    remove_leftovers(tmp_path / "a.txt")
    assert live.temporary.exists(), "a live writer's"
    assert other_machine.exists(), "its locks may not reach this machine"
    assert precious.exists()
    other_machine.unlink()
    link.unlink()
    live.commit()
    assert [name for name in names(tmp_path) if ".b.txt." not in name] == ["a.txt", "precious"]
