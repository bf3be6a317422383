from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from penstock import Pipeline
from penstock.errors import ConfigError, DataError, StalledError
from penstock.files import remote
from penstock.files.cache import lock_of
from penstock.files.listing import list_files
from penstock.files.locks import FileLock
from penstock.files.remote import (
    RemotePath,
    clear_copies,
    fetch,
    fetch_files,
    has_password,
    is_remote,
    open_filesystem,
    path_of,
    shown,
)
from penstock.sinks import MemorySink
from penstock.sources import open_source


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's file system in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def put(memory: Any, **files: str) -> None:
    for name, text in files.items():
        memory.pipe(f"/data/{name.replace('__', '/').replace('_csv', '.csv')}", text.encode())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/a.csv", True),
        ("memory://a", True),
        ("zip://a.csv::s3://bucket/a.zip", True),
        ("file:///a", True),
        ("C://a.csv", False),
        ("/a/b.csv", False),
        ("a:b/c", False),
        ("", False),
    ],
)
def test_a_url_is_told_by_its_scheme(text: str, expected: bool) -> None:
    assert is_remote(text) is expected


def test_a_remote_path_is_used_as_a_path_is(memory: Any) -> None:
    put(memory, train_csv="a\n1\n", sub__x_csv="x")
    place = RemotePath("memory://data")
    train = place / "train.csv"
    assert str(train) == "memory://data/train.csv"
    assert (train.name, train.suffix, train.parent) == ("train.csv", ".csv", place)
    assert train.exists()
    assert train.is_file()
    assert place.is_dir()
    assert not (place / "none.csv").exists()
    assert train.read_bytes() == b"a\n1\n"
    with train.open() as file:
        file.seek(2)
        assert file.read() == b"1\n"
    assert [path.name for path in place.iterdir()] == ["sub", "train.csv"]
    assert place / "sub" / "x.csv" == RemotePath("memory://data/sub/x.csv")


def test_a_query_and_a_chain_stay_behind_the_path() -> None:
    place = RemotePath("s3://bucket/titanic?region=eu-west-1")
    assert str(place / "train.csv") == "s3://bucket/titanic/train.csv?region=eu-west-1"
    assert (place / "train.csv").name == "train.csv"
    assert (place / "train.csv").parent == place
    assert str(RemotePath("zip://a::memory://b.zip") / "c.csv") == "zip://a/c.csv::memory://b.zip"
    assert RemotePath("s3://bucket").parent == RemotePath("s3://bucket")


def test_a_password_is_not_shown() -> None:
    place = RemotePath("s3://key:secret@bucket/a")
    assert repr(place) == "RemotePath('s3://key:***@bucket/a')"
    assert str(place) == "s3://key:secret@bucket/a"
    with pytest.raises(ConfigError) as error:
        open_filesystem("nope://key:secret@bucket/a")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://key:secret@bucket/a?region=eu", "s3://key:***@bucket/a?region=eu"),
        ("https://host/a?X-Amz-Signature=ab%3D&x=1&api_key=c", "https://host/a?X-Amz-Signature=***&x=1&api_key=***"),
        ("s3://key:a/b+c@bucket/x@1", "s3://key:***@bucket/x@1"),
        ("s3://key:a@b@bucket/x@1", "s3://key:***@bucket/x@1"),
        ("redis://:1/2@host:6379/0", "redis://:***@host:6379/0"),
        ("https://ghp_1@host/a@b", "https://***@host/a@b"),
        ("zip://a::https://me:x@host:80/b", "zip://a::https://me:***@host:80/b"),
        ("s3://user@bucket/a?region=eu-west-1", None),
        ("http://host:8080/a@b", None),
        ("redis://[::1]:6379/0?name=a@b", None),
        ("abfss://container@account.dfs.core.windows.net/a", None),
        ("data/a?token=1", None),
    ],
)
def test_what_must_not_be_written_down_is_told(url: str, expected: str | None) -> None:
    assert has_password(url) is (expected is not None)
    if expected is not None:
        assert shown(url) == expected


def test_what_is_no_url_is_refused_as_a_remote_path() -> None:
    with pytest.raises(ConfigError, match=r"'data/a\.csv'"):
        RemotePath("data/a.csv")


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    file = tmp_path / "with space.csv"
    file.write_text("a\n1\n")
    assert path_of(file.as_uri()) == file
    assert path_of(str(file)) == file
    assert path_of("s3://bucket/a") == RemotePath("s3://bucket/a")
    assert fetch(file.as_uri()) == file
    assert list_files(file.as_uri()) == [file]
    assert list_files(tmp_path.as_uri(), (".csv",)) == [file]
    filesystem, path = open_filesystem(file.as_uri())
    assert filesystem.open_input_file(path).read() == b"a\n1\n"
    with pytest.raises(ConfigError, match="file:///path,"):
        path_of("file://data/a.csv")


def test_a_path_on_s3_is_taken_literally() -> None:
    filesystem, path = open_filesystem(
        "s3://bucket/a b/c%20d[1].csv?region=us-east-1&endpoint_override=localhost:1&scheme=http"
    )
    assert type(filesystem).__name__ == "S3FileSystem"
    assert path == "bucket/a b/c%20d[1].csv"


def test_a_file_is_fetched_once_and_again_when_it_has_changed(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, train_csv="a\n1\n")
    downloads: list[str] = []
    real = remote._download
    monkeypatch.setattr(remote, "_download", lambda *given: downloads.append(given[1]) or real(*given))
    first = fetch("memory://data/train.csv")
    assert first.name == "train.csv"
    assert first.read_text() == "a\n1\n"
    assert fetch(RemotePath("memory://data/train.csv")) == first
    assert fetch_files("memory://data") == [first]
    assert len(downloads) == 1
    put(memory, train_csv="a\n2\n")
    second = fetch("memory://data/train.csv")
    assert second != first
    assert (first.read_text(), second.read_text()) == ("a\n1\n", "a\n2\n")
    assert len(downloads) == 2


def test_a_copy_that_was_cut_is_fetched_again(memory: Any) -> None:
    put(memory, train_csv="a\n1\n")
    copy = fetch("memory://data/train.csv")
    copy.write_text("a")
    assert fetch("memory://data/train.csv").read_text() == "a\n1\n"


def test_copies_can_be_cleared(memory: Any, tmp_path: Path) -> None:
    put(memory, old_csv="12345", new_csv="123")
    old, new = fetch("memory://data/old.csv", tmp_path / "c"), fetch("memory://data/new.csv", tmp_path / "c")
    week = time.time() - 7 * 86_400
    os.utime(old, (week, week))
    assert clear_copies(older_than_days=6, cache_dir=tmp_path / "c") == 5
    assert not old.exists()
    assert new.read_text() == "123"
    with FileLock(lock_of(new)) as lock:
        assert lock.acquire()
        assert clear_copies(cache_dir=tmp_path / "c") == 0  # somebody is at it
    assert clear_copies(cache_dir=tmp_path / "c") == 3
    assert list((tmp_path / "c").iterdir()) == []
    assert clear_copies() == 0
    assert fetch("memory://data/old.csv", tmp_path / "c").read_text() == "12345"
    with pytest.raises(ConfigError, match="older_than_days"):
        clear_copies(-1)


@pytest.mark.parametrize("moment", ["before its folder is listed", "before it is locked", "before it is deleted"])
def test_a_copy_that_another_process_clears_at_the_same_time_is_no_error(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    put(memory, train_csv="12345")
    copy = fetch("memory://data/train.csv", tmp_path / "c")
    scan, is_file, acquire = os.scandir, Path.is_file, FileLock.acquire

    def clear() -> None:
        copy.unlink()
        copy.parent.rmdir()
        copy.parent.parent.rmdir()

    def scan_later(path: Any = ".") -> Any:
        if Path(path) == copy.parent:
            clear()
        return scan(path)

    def is_file_before(path: Path) -> bool:
        found = is_file(path)
        if path == copy:
            clear()
        return found

    def acquire_later(lock: FileLock) -> bool:
        copy.unlink()
        return acquire(lock)

    with monkeypatch.context() as patch:
        if moment == "before its folder is listed":
            patch.setattr(os, "scandir", scan_later)
        elif moment == "before it is locked":
            patch.setattr(Path, "is_file", is_file_before)
        else:
            patch.setattr(FileLock, "acquire", acquire_later)
        assert clear_copies(cache_dir=tmp_path / "c") == 0
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A directory, and the URL at which a web server has it."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    folder = tmp_path / "web"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_directory_of_a_web_server_holds_the_usual_files(web: tuple[Path, str]) -> None:
    folder, url = web
    (folder / "t" / "sub").mkdir(parents=True)
    for name in ("train.csv", "test.csv.gz", "other.csv"):
        (folder / "t" / name).write_bytes(b"1")
    for place in (RemotePath(f"{url}/t"), RemotePath(f"{url}/t/")):
        assert place.exists()
        assert place.is_dir()
        assert not place.is_file()
        assert not place.can_be_listed
        assert [path.name for path in place.iterdir()] == ["test.csv.gz", "train.csv"]
    assert list(RemotePath(f"{url}/v1.0").iterdir()) == []
    assert (RemotePath(f"{url}/t") / "other.csv").is_file()
    assert not (RemotePath(f"{url}/t") / "gone.csv").exists()
    assert fetch(f"{url}/t/train.csv").read_bytes() == b"1"


def test_a_web_server_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(OSError, match=r"'http://127\.0\.0\.1:9/t/gender_submission\.csv'"):
        list(RemotePath("http://127.0.0.1:9/t").iterdir())


def test_a_cache_of_ones_own_is_used(memory: Any, tmp_path: Path) -> None:
    put(memory, train_csv="a\n1\n")
    assert fetch("memory://data/train.csv", tmp_path / "own").is_relative_to(tmp_path / "own")
    assert RemotePath("memory://data/train.csv").fetch(tmp_path / "own").read_text() == "a\n1\n"


def test_what_a_killed_download_left_is_removed(memory: Any, tmp_path: Path) -> None:
    put(memory, train_csv="a\n1\n")
    copy = fetch("memory://data/train.csv")
    copy.unlink()
    stray = copy.with_name(".train.csv.1-abcd.tmp")
    stray.write_text("a")
    assert fetch("memory://data/train.csv") == copy
    assert not stray.exists()


def test_a_file_that_changes_while_it_is_read_is_read_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, train_csv="a\n1\n")
    real, left = remote._download, [1]

    def download(*given: Any) -> int:
        size = real(*given)
        if left:
            left.pop()
            put(memory, train_csv="a\n2\n")
        return size

    monkeypatch.setattr(remote, "_download", download)
    assert fetch("memory://data/train.csv").read_text() == "a\n2\n"

    def never_at_rest(*given: Any) -> int:
        put(memory, train_csv=f"{time.time_ns()}")
        return real(*given)

    monkeypatch.setattr(remote, "_download", never_at_rest)
    put(memory, train_csv="a\n3\n")
    with pytest.raises(DataError, match=r"train\.csv.*\b3\b"):
        fetch("memory://data/train.csv")


def test_a_download_that_ends_early_is_an_error_and_leaves_nothing(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, train_csv="a\n1\n")

    def short(filesystem: Any, path: str, url: str, copy: Any) -> int:
        return int(copy.write(b"a"))

    monkeypatch.setattr(remote, "_download", short)
    with pytest.raises(DataError, match=r"memory://data/train\.csv:"):
        fetch("memory://data/train.csv", tmp_path / "own")
    assert not [file for file in (tmp_path / "own").rglob("*") if file.is_file()]


def test_a_download_of_another_is_waited_for(memory: Any, tmp_path: Path) -> None:
    put(memory, train_csv="a\n1\n")
    copy = fetch("memory://data/train.csv", tmp_path)
    copy.unlink()
    with FileLock(lock_of(copy)) as lock:
        assert lock.acquire()
        with pytest.raises(StalledError, match="wait_seconds="):
            fetch("memory://data/train.csv", tmp_path, wait_seconds=0)
    assert fetch("memory://data/train.csv", tmp_path, wait_seconds=0) == copy


def test_directories_and_globs_are_as_for_local_files(memory: Any) -> None:
    put(memory, b_csv="b", a_csv="a", **{"sub__c_csv": "c", ".d": "d", "notes.txt": "n", ".hid__e_csv": "e"})

    def names(url: str, suffixes: tuple[str, ...] = ()) -> list[str]:
        return [file.name for file in list_files(url, suffixes)]

    assert names("memory://data", (".csv",)) == ["a.csv", "b.csv", "c.csv"]
    assert names("memory://data") == ["a.csv", "b.csv", "notes.txt", "c.csv"]
    assert names("memory://data/*.csv") == ["a.csv", "b.csv"]
    assert names("memory://data/**/*.csv") == ["a.csv", "b.csv", "c.csv"]
    assert names("memory://data/[b-z]*") == ["b.csv", "notes.txt"]
    assert names("memory://data/notes.txt", (".csv",)) == ["notes.txt"]


def test_nothing_found_is_an_error_that_names_the_url(memory: Any) -> None:
    put(memory, a_csv="a")
    with pytest.raises(FileNotFoundError, match="'memory://data'"):
        list_files("memory://data", (".parquet",))
    with pytest.raises(FileNotFoundError, match=r"'memory://data/\*\.json'"):
        list_files("memory://data/*.json")
    with pytest.raises(FileNotFoundError, match="'memory://gone'"):
        list_files("memory://gone")
    with pytest.raises(FileNotFoundError, match="'memory://data'"):
        fetch("memory://data")
    with pytest.raises(FileNotFoundError, match=r"'memory://data/b\.csv'"):
        fetch("memory://data/b.csv")
    with pytest.raises(FileNotFoundError, match=r"'memory://data/b\.csv'"):
        RemotePath("memory://data/b.csv").read_bytes()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nope://a/b", r"'nope://a/b'.*s3://,"),
        ("adl://a/b", "'adl://a/b'"),
        ("github://a", r"'github://a'.*'org'"),
    ],
)
def test_a_scheme_that_cannot_be_opened_is_an_error_that_says_why(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_filesystem(url)


def test_without_fsspec_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"'penstock\[cloud\]'"):
        open_filesystem("memory://a")


def test_a_failing_file_system_names_the_url(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put(memory, a_csv="a")

    def broken(path: str, **options: Any) -> Any:
        raise RuntimeError("the wire is cut")

    monkeypatch.setattr(type(memory), "info", lambda self, path, **options: broken(path))
    with pytest.raises(OSError, match=r"'memory://data/a\.csv'"):
        fetch("memory://data/a.csv")


def test_a_source_reads_a_url_and_goes_on_where_it_was(memory: Any) -> None:
    put(memory, a_csv="x,y\n1,2\n3,4\n", b_csv="x,y\n5,6\n")
    sink = MemorySink()
    Pipeline(open_source("memory://data/*.csv"), [], sink).run()
    assert sink.rows() == [{"x": 1, "y": 2}, {"x": 3, "y": 4}, {"x": 5, "y": 6}]
    source = open_source(RemotePath("memory://data"))
    source.next_batch(1)
    again = open_source("memory://data")
    again.load_state_dict(source.state_dict())  # type: ignore[attr-defined]
    assert again.next_batch(1).to_pylist() == [{"x": 3, "y": 4}]  # type: ignore[union-attr]


def test_a_file_in_an_archive_is_a_url_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("train.csv", "x\n1\n")
    url = f"zip://train.csv::{(tmp_path / 'all.zip').as_uri()}"
    assert fetch(url).read_text() == "x\n1\n"
    assert fetch(url).name == "train.csv"


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as reading one object takes."""

    content = b"x,y\n1,2\n"
    gets = 0

    def _head(self, size: int, status: int = 200, range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("ETag", '"abc"')
        if range:
            self.send_header("Content-Range", range)
        self.end_headers()

    def do_HEAD(self) -> None:
        found = self.path.split("?")[0] == "/bucket/my%20data/train.csv"
        self._head(len(self.content) if found else 0, 200 if found else 404)

    def do_GET(self) -> None:
        type(self).gets += 1
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = self.content[int(first) : int(last) + 1 if last else None]
        self._head(len(part), 206, f"bytes {first}-{int(first) + len(part) - 1}/{len(self.content)}")
        self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:
        return


def test_an_object_on_s3_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        query = f"?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{server.server_port}"
        place = RemotePath(f"s3://key:secret@bucket/my data{query}") / "train.csv"
        assert place.fetch().read_bytes() == _Bucket.content
        gets = _Bucket.gets
        assert place.fetch().read_bytes() == _Bucket.content
        assert _Bucket.gets == gets
        assert not list((tmp_path / "cache").rglob("*secret*"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_SCRIPT = """
import sys
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
import fsspec
class Slow(LocalFileSystem):
    protocol = "slow"
    @classmethod
    def _strip_protocol(cls, path):
        return str(path).removeprefix("slow://")
    def _open(self, path, mode="rb", **options):
        with open(sys.argv[3], "a") as log:
            log.write("opened\\n")
        return super()._open(path, mode, **options)
fsspec.register_implementation("slow", Slow)
from penstock.files.remote import fetch
print("ready", flush=True)
sys.stdin.readline()
print(fetch(sys.argv[1], sys.argv[2]))
"""


def test_of_many_processes_one_downloads(tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(b"x" * 3_000_000)
    log, script = tmp_path / "log", tmp_path / "script.py"
    script.write_text(_SCRIPT)
    url = f"slow://{tmp_path}/big.bin"
    command = [sys.executable, str(script), url, str(tmp_path / "cache"), str(log)]
    ours = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(4)]
    assert all(process.stdout.readline() == "ready\n" for process in ours)  # type: ignore[union-attr]
    for process in ours:
        process.stdin.write("go\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    told = {process.communicate()[0].strip() for process in ours}
    assert len(told) == 1
    assert Path(told.pop()).read_bytes() == b"x" * 3_000_000
    assert log.read_text() == "opened\n"
