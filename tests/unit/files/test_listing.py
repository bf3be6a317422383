from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.files.listing import list_files, split_suffix


def make(root: Path, *names: str) -> list[Path]:
    paths = [root / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return paths


def test_a_file_means_itself_whatever_its_suffix(tmp_path: Path) -> None:
    [path] = make(tmp_path, "notes.weird")
    assert list_files(path, (".jsonl",)) == [path]
    assert list_files(str(path)) == [path]


def test_a_directory_means_the_files_below_it_with_a_suffix_compressed_or_not_in_order_of_their_names(
    tmp_path: Path,
) -> None:
    make(tmp_path, "b.jsonl", "a/2.jsonl.gz", "a/1.JSONL", "a.jsonl", "c.csv", "B.jsonl", "README")
    found = list_files(tmp_path, (".jsonl",))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "B.jsonl",
        "a/1.JSONL",
        "a/2.jsonl.gz",
        "a.jsonl",
        "b.jsonl",
    ]


def test_hidden_files_and_directories_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", ".a.csv.tmp", ".b.csv", ".parts/c.csv", "d/.e/f.csv")
    assert list_files(tmp_path, (".csv",)) == [tmp_path / "a.csv"]


@pytest.mark.parametrize(("suffixes", "wanted"), [((), "no file in"), ((".csv", ".tsv"), "no .csv, .tsv file in")])
def test_a_directory_without_such_files_is_named(tmp_path: Path, suffixes: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(wanted)} directory .*; it holds: nothing$"):
        list_files(tmp_path, suffixes)


def test_a_hidden_directory_that_is_asked_for_by_name_is_read(tmp_path: Path) -> None:
    make(tmp_path, ".cache/a.csv")
    assert list_files(tmp_path / ".cache", (".csv",)) == [tmp_path / ".cache/a.csv"]


def test_links_are_followed_but_into_no_directory_twice(tmp_path: Path) -> None:
    make(tmp_path, "real/a.csv", "elsewhere/b.csv")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/c.csv").symlink_to(tmp_path / "real/a.csv")
    (tmp_path / "data/d").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/e").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data")
    found = list_files(tmp_path / "data", (".csv",))
    assert [str(path.relative_to(tmp_path / "data")) for path in found] == ["c.csv", "d/b.csv"]


def test_a_glob_means_the_files_that_match_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "x/part-2.csv", "x/part-1.csv", "x/other.txt", "y/part-3.csv", "z.csv/inside.csv")
    assert list_files(str(tmp_path / "*/part-*.csv")) == [
        tmp_path / "x/part-1.csv",
        tmp_path / "x/part-2.csv",
        tmp_path / "y/part-3.csv",
    ]
    assert list_files(str(tmp_path / "**/*.csv"))[-1] == tmp_path / "z.csv/inside.csv"
    monkeypatch.chdir(tmp_path)
    assert list_files("x/part-[12].csv") == [Path("x/part-1.csv"), Path("x/part-2.csv")]


def test_a_name_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    [path] = make(tmp_path, "part[1].csv")
    assert list_files(path) == [path]


def test_the_home_directory_can_be_abbreviated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, "a.csv")
    assert list_files("~/a.csv") == [tmp_path / "a.csv"]
    assert list_files("~/*.csv") == [tmp_path / "a.csv"]


def test_a_list_keeps_the_order_it_was_given_in(tmp_path: Path) -> None:
    make(tmp_path, "b.csv", "a.csv", "d/2.csv", "d/1.csv")
    found = list_files([tmp_path / "b.csv", tmp_path / "d", str(tmp_path / "a.csv")], (".csv",))
    assert [path.name for path in found] == ["b.csv", "1.csv", "2.csv", "a.csv"]


def test_nothing_found_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "b.parquet.gz", "README")
    with pytest.raises(FileNotFoundError, match=r"parquet\.gz"):
        list_files(tmp_path, (".jsonl",))
    with pytest.raises(FileNotFoundError, match=r"\*\.jsonl"):
        list_files(str(tmp_path / "*.jsonl"))
    with pytest.raises(FileNotFoundError, match="missing"):
        list_files(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"\bempty\b"):
        list_files([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"\bempty\b"):
        list_files(tmp_path / "empty")


def test_a_url_that_nothing_can_open_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'nope://bucket/a\.csv'"):
        list_files("nope://bucket/a.csv")


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that other users can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_directory_below_that_may_not_be_read_is_an_error(open_to_all: Path) -> None:
    make(open_to_all, "a.csv", "secret/b.csv")
    (open_to_all / "secret").chmod(0)
    script = (
        "import os, sys\n"
        "from penstock.files.listing import list_files\n"  # imported before the rights to read it are given up
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "try: list_files(sys.argv[1])\n"
        "except PermissionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, open_to_all], capture_output=True, text=True, check=True)
    (open_to_all / "secret").chmod(0o755)
    assert done.stdout == f"[Errno 13] Permission denied: '{open_to_all}/secret'\n"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("a/b.jsonl.gz", (".jsonl", ".gz")),
        ("b.JSONL", (".jsonl", "")),
        ("b.tar.csv", (".csv", "")),
        ("b.gz", ("", ".gz")),
        ("b", ("", "")),
        ("b.zst.gz", (".zst", ".gz")),
    ],
)
def test_a_suffix_is_the_format_and_the_compression(path: str, parts: tuple[str, str]) -> None:
    assert split_suffix(path) == parts
    assert split_suffix(Path(path)) == parts


@pytest.mark.skipif(os.name == "nt", reason="making links takes a privilege on Windows")
@pytest.mark.parametrize("how", ["directory", "below", "glob"])
def test_a_link_that_leads_nowhere_is_an_error_that_names_it(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "in" if how != "below" else tmp_path / "in" / "deeper"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").touch()
    (folder / ".b.jsonl").symlink_to("gone")
    asked = str(tmp_path / "in") if how != "glob" else str(folder / "*.jsonl")
    assert list_files(asked, [".jsonl"]) == [folder / "a.jsonl"], "hidden ones are left out, wherever they lead"
    (folder / "c.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(FileNotFoundError, match=r"c\.jsonl.*gone\.jsonl"):
        list_files(asked, [".jsonl"])
    (folder / "gone.jsonl").touch()
    assert len(list_files(asked, [".jsonl"])) == 3


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
def test_a_named_pipe_is_refused_before_anybody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(FileNotFoundError, match="named pipe"):
        list_files(tmp_path / "rows.jsonl")
