from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fsqueue.layout import QueueFile, SplitDirectory, temporary_name

FILE = QueueFile(42, 8, "1f83d9abfb41bd6b")
whole = st.integers(0, 10**15)
ids = st.from_regex(r"[cp][0-9a-f]{12}", fullmatch=True)


@given(whole, whole, st.from_regex(r"[0-9a-f]{16}", fullmatch=True), whole, whole, st.none() | ids)
def test_a_name_says_everything_about_a_file(
    number: int, batches: int, checksum: str, start: int, returns: int, owner: str | None
) -> None:
    file = QueueFile(number, batches, checksum, start, returns, owner)
    assert QueueFile.parse(file.name) == file


def test_names_look_as_documented_and_sort_by_number() -> None:
    assert FILE.name == "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow"
    assert FILE.claimed("c3f09a2b7c41").name == "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow.by-c3f09a2b7c41"
    assert FILE.claimed("c1").released(3) == QueueFile(42, 8, FILE.checksum, start=3)
    assert FILE.claimed("c1").expired() == QueueFile(42, 8, FILE.checksum, returns=1)
    assert QueueFile(9, 8, FILE.checksum).name < QueueFile(10, 8, FILE.checksum).name


@pytest.mark.parametrize(
    "name",
    [
        "42-n8-s0-r0-1f83d9abfb41bd6b.arrow",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow.tmp",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow.bad",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6.arrow",
        "000000000042-n8-s0-r0-1F83D9ABFB41BD6B.arrow",
        ".000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow~",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow.by-",
        "000000000042-n8-s0-r0-1f83d9abfb41bd6b.arrow\n",
        "batch_42.pt",
        "lanes",
        "",
    ],
)
def test_other_names_are_nobody_s(name: str) -> None:
    assert QueueFile.parse(name) is None


def test_a_directory_tells_its_own_files_from_those_of_strangers(tmp_path: Path) -> None:
    directory = SplitDirectory(tmp_path)
    directory.lanes.mkdir()
    directory.cursors.mkdir()
    bad = QueueFile(7, 8, FILE.checksum)
    own = [FILE.name, QueueFile(41, 8, FILE.checksum).claimed("c1").name]
    for name in (*own, temporary_name("000000000043", "p1"), bad.name, "notes.txt", ".nfs0001"):
        (tmp_path / name).touch()
    directory.reject(bad)
    assert [file.name for file in directory.files()] == sorted(own)
    assert list(directory.temporaries()) == [(".000000000043~p1.tmp", "p1")]
    assert directory.rejected() == [bad]
    assert sorted(directory.unknown_names()) == [".nfs0001", "notes.txt"]


def test_of_two_who_rename_a_file_one_does(tmp_path: Path) -> None:
    directory = SplitDirectory(tmp_path)
    directory.at(FILE).touch()
    assert directory.move(FILE, FILE.claimed("c1"))
    assert not directory.move(FILE, FILE.claimed("c2"))
    assert directory.move(FILE, FILE.claimed("c1")), "a request that is repeated finds its own work done"
    assert directory.move(FILE.claimed("c1"), FILE.claimed("c1").expired())
    assert not directory.move(FILE.claimed("c1"), FILE.claimed("c1").expired()), "only one reaper releases it"
