"""Object stores: ranges, conditions, whole uploads, answers that are cut off, and errors that name the object."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.servers import SECRET_KEY, Proxy, S3Server, environment_of

from penstock.errors import ConfigError
from penstock.files import objects
from penstock.files.filesystems import is_object_url, shown
from penstock.files.objects import ChangedObjectError, ObjectExistsError, open_bucket
from penstock.sources import open_source


def test_urls_of_object_stores_are_known_by_their_scheme() -> None:
    assert all(map(is_object_url, ("s3://b/k", "gs://b", "az://c/k", "abfss://c@a.dfs.core.windows.net/k")))
    assert not any(map(is_object_url, ("/s3/b", "s3:/b", "https://x/y", "zip://a::s3://b/c", "hf://datasets/x")))
    with pytest.raises(ConfigError, match="name of a bucket"):
        open_bucket("s3:///key")
    with pytest.raises(ConfigError, match="expected s3://"):
        open_bucket("https://x/y")
    for url in ("s3://b/a//k", "s3://b/a/../k", "s3://b/./k", "s3://b/a/.."):
        with pytest.raises(ConfigError, match=f"{url}.*between its slashes"):
            open_bucket(url)


def test_objects_are_written_read_by_ranges_listed_and_deleted(s3_url: str) -> None:
    bucket, prefix = open_bucket(s3_url)
    data = bytes(range(256)) * 64
    for name in ("b", "a/x", "a/y"):
        bucket.write(f"{prefix}/{name}", data)
    assert bytes(bucket.read(f"{prefix}/b")) == data
    assert bytes(bucket.read(f"{prefix}/b", 10, 20)) == data[10:20]
    assert bytes(bucket.read(f"{prefix}/b", len(data) - 3)) == data[-3:]
    assert bytes(bucket.read(f"{prefix}/b", 7, 7)) == b""
    ranges = [(0, 5), (9, 9), (5000, 5010), (16000, 16384)]
    assert [bytes(part) for part in bucket.read_ranges(f"{prefix}/b", ranges)] == [data[a:b] for a, b in ranges]
    assert [info.key for info in bucket.objects(prefix)] == [f"{prefix}/{name}" for name in ("a/x", "a/y", "b")]
    folders, found = bucket.list_folder(prefix)
    assert folders == ["a"]
    assert [info.size for info in found] == [len(data)]
    bucket.delete(f"{prefix}/b")
    bucket.delete(f"{prefix}/b")
    assert bucket.info(f"{prefix}/b") is None
    with pytest.raises(FileNotFoundError, match=f"no such object: '{s3_url}/b'"):
        bucket.read(f"{prefix}/b")


def test_an_object_that_changed_is_refused(s3_url: str) -> None:
    bucket, key = open_bucket(f"{s3_url}/k")
    bucket.write(key, b"first")
    before = bucket.info(key)
    assert before is not None
    bucket.write(key, b"other")
    with pytest.raises(ChangedObjectError, match="replaced by another object"):
        bucket.read(key, 0, 3, etag=before.etag)
    with pytest.raises(ChangedObjectError, match="replaced by another object"):
        bucket.read_ranges(key, [(0, 3)], etag=before.etag)
    bucket.delete(key)
    with pytest.raises(ChangedObjectError, match="deleted"):
        bucket.read(key, 0, 3, etag=before.etag)


def test_conditional_writes_see_other_writers(s3_url: str) -> None:
    bucket, key = open_bucket(f"{s3_url}/lock")
    tag = bucket.write(key, b"1", create=True)
    with pytest.raises(ObjectExistsError, match="another writer"):
        bucket.write(key, b"2", create=True)
    bucket.write(key, b"2", replaced=tag)
    with pytest.raises(ObjectExistsError, match="another writer"):
        bucket.write(key, b"3", replaced=tag)
    assert bytes(bucket.read(key)) == b"2"


@pytest.mark.parametrize("size", [0, 10, 9 << 20, 20 << 20])
def test_an_upload_appears_whole_or_not_at_all(s3_url: str, size: int) -> None:
    bucket, key = open_bucket(f"{s3_url}/up")
    data = bytes(bytearray(range(251)) * (size // 251 + 1))[:size]
    given_up = bucket.writer(key)
    given_up.write(data)
    given_up.abort()
    assert bucket.info(key) is None
    with bucket.writer(key) as writer:
        for start in range(0, size, 1 << 20):
            writer.write(data[start : start + (1 << 20)])
        assert bucket.info(key) is None
    assert bytes(bucket.read(key)) == data


def test_answers_that_are_cut_off_are_asked_for_again(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(bytearray(range(251)) * 4000)
    bucket, key = open_bucket(f"{s3_url}/k")
    bucket.write(key, data)
    with Proxy(s3.port, reset_after=len(data) // 2) as proxy:
        proxy.resets = 3
        for name, value in environment_of(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        slow, key = open_bucket(f"{s3_url}/k")
        assert bytes(slow.read(key)) == data
        assert proxy.resets_done == 3
        proxy.resets, proxy.resets_done = 2, 0
        upload = bucket.url_of(f"{key}2")
        with open_bucket(upload)[0].writer(f"{key}2") as writer:
            for _ in range(12):
                writer.write(data)
        assert bytes(bucket.read(f"{key}2")) == data * 12


def test_a_server_that_is_down_for_a_moment_is_waited_for() -> None:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        bucket, key = open_bucket(f"{server.url}/k")
        bucket.write(key, b"water")
        server.kill()
        timer = threading.Timer(0.5, server.start)
        timer.start()
        assert bytes(bucket.read(key)) == b"water"
        timer.join()  # it may answer before it counts as started
        server.kill()
        patch.setattr(objects, "RETRY_SECONDS", 0.3)
        with pytest.raises(ConnectionError, match=r"'s3://pen/k': no whole answer within 0.3 s"):
            bucket.read(key)


def test_wrong_credentials_and_missing_buckets_are_named_without_the_secret(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(FileNotFoundError, match="no such bucket: 's3://absent'"):
        open_bucket("s3://absent/k")[0].read("k")
    with pytest.raises(FileNotFoundError, match="no such bucket: 's3://absent'"):
        list(open_bucket("s3://absent/k")[0].objects("k"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET_KEY}-wrong")
    started = time.monotonic()
    bucket, key = open_bucket(f"{s3_url}/k")
    with pytest.raises(PermissionError, match="with these credentials: SignatureDoesNotMatch") as caught:
        bucket.read(key)
    assert time.monotonic() - started < objects.RETRY_SECONDS
    assert SECRET_KEY not in str(caught.value) + caplog.text + repr(bucket)


@pytest.mark.parametrize("login", ["key:a/s3cr3t", "key:s3cr3t/a", "key:s3cr3t?a"])
def test_a_secret_with_a_slash_in_it_is_neither_sent_nor_shown(login: str) -> None:
    url = f"s3://{login}@pen/x.jsonl"
    with pytest.raises(ConfigError, match="%2F") as caught:
        open_source(url)
    assert "s3cr3t" not in str(caught.value) + shown(url)


def test_credentials_come_from_profiles_and_urls_too(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket, key = open_bucket(f"{s3_url}/k")
    bucket.write(key, b"water")
    settings = s3.environment
    for name in settings:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[work]\naws_access_key_id={settings['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={SECRET_KEY}\n"
    )
    (tmp_path / "config").write_text(f"[profile work]\nregion=us-east-1\nendpoint_url={s3.endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    bucket, key = open_bucket(f"{s3_url}/k")
    assert bytes(bucket.read(key)) == b"water"
    monkeypatch.setenv("AWS_PROFILE", "other")
    login = f"{settings['AWS_ACCESS_KEY_ID']}:{SECRET_KEY}@"
    host = f"endpoint_override=127.0.0.1:{s3.port}&scheme=http&region=us-east-1"
    bucket, key = open_bucket(f"{s3_url.replace('s3://', f's3://{login}')}/k?{host}")
    assert bytes(bucket.read(key)) == b"water"
    assert SECRET_KEY not in repr(bucket) + bucket.url_of(key)


def test_memory_that_is_used_again_after_a_write_does_not_change_an_upload(s3_url: str) -> None:
    bucket, key = open_bucket(f"{s3_url}/k")
    memory = bytearray(1 << 20)
    with bucket.writer(key, 5 << 20) as writer:
        for number in range(16):
            memory[:] = bytes([number]) * len(memory)
            writer.write(memory)
        memory[:] = b"x" * len(memory)
    data = bytes(bucket.read(key))
    assert [set(data[at : at + len(memory)]) for at in range(0, len(data), len(memory))] == [{n} for n in range(16)]


def test_objects_behind_a_missing_one_are_deleted_where_the_store_says_that_it_is_missing(tmp_path: Path) -> None:
    from obstore.store import LocalStore

    bucket = objects.Bucket("file://", LocalStore(tmp_path))
    names = [f"{number:02d}" for number in range(40)]  # more than are deleted at a time
    for name in names:
        bucket.write(name, b"1")
    bucket.delete("missing", *names)
    assert list(bucket.objects()) == []
    bucket.delete("missing")


FORK = """
import os, signal, sys
from penstock.files.objects import open_bucket
bucket, key = open_bucket(sys.argv[1])
bucket.write(key, b"1")
if not os.fork():
    signal.alarm(20)
    for again in (bucket, open_bucket(sys.argv[1])[0]):
        try:
            again.read(key)
        except ConnectionError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_its_requests_would_not_be_answered(s3_url: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, f"{s3_url}/k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("was forked after object stores had been used") == 2
    assert "multiprocessing_context='spawn'" in done.stdout


def test_an_upload_whose_last_answer_got_lost_is_there(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    class Deaf:
        """Upload whose last request is answered to nobody; asked again, the store knows no such upload."""

        def __init__(self, upload: Any, *, done: bool) -> None:
            self._upload, self._done = upload, done

        def close(self) -> None:
            if self._done:
                self._upload.close()
            raise GenericError("status code: 404, NoSuchUpload")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._upload, name)

    bucket, key = open_bucket(f"{s3_url}/k")
    for done in (False, True):
        writer = bucket.writer(key)
        writer.write(bytes(9 << 20))
        writer._upload = Deaf(writer._upload, done=done)
        if done:
            writer.commit()
        else:
            with pytest.raises(FileNotFoundError):
                writer.commit()
            writer.abort()
        info = bucket.info(key)
        assert (info is not None and info.size == 9 << 20) == done


def test_a_full_store_is_named_at_once(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import GenericError

    def full(*_: Any, **__: Any) -> None:
        raise GenericError("Server returned non-2xx status code: 507 Insufficient Storage: <Code>StorageFull</Code>")

    monkeypatch.setattr(obstore, "put", full)
    bucket, key = open_bucket(f"{s3_url}/k")
    with pytest.raises(OSError, match=r"/k' cannot be written: the store is full \(StorageFull\)"):
        bucket.write(key, b"1")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:36977", "http://127.0.0.1:36978x", "http://", "ftp://host"])
def test_an_endpoint_that_is_no_address_is_named_with_its_variable(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"AWS_ENDPOINT_URL is '{endpoint}', expected an address such as http://"):
        open_bucket("s3://pen/x")
    with pytest.raises(ConfigError, match=r"endpoint is 'http://127.0.0.1:1x', expected an address"):
        open_bucket("s3://pen/x?endpoint=http://127.0.0.1:1x")


def test_a_panic_of_the_client_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    panic = type("PanicException", (BaseException,), {})

    def fail(*_: Any, **__: Any) -> Any:
        raise panic("InvalidPort")

    monkeypatch.setattr(obstore, "head", fail)
    monkeypatch.setattr(obstore, "list", fail)
    bucket, _ = open_bucket("s3://pen/x?endpoint=http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"'s3://pen/x' cannot be used: the client failed \(InvalidPort\)"):
        bucket.info("x")
    with pytest.raises(ConfigError, match="the client failed"):
        list(bucket.objects("x"))


def test_the_cause_is_named_and_a_long_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects, "WARN_SECONDS", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening
        for name, value in environment_of(f"http://127.0.0.1:{closed.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        bucket, key = open_bucket("s3://pen/x", retry_seconds=0.7)
        with pytest.raises(ConnectionError, match=r"'s3://pen/x': no whole answer within 0.7 s: connection refused"):
            bucket.info(key)
    logged = [line for line in caplog.messages if "asking again for up to 0.7 s" in line]
    assert len(logged) == 1
    assert logged[0].startswith("s3://pen/x: connection refused")


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("s3://pen/x?endpoint=http://127.0.0.1:1", "AWS_ACCESS_KEY_ID"),
        ("gs://pen/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://pen/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_the_variables_of_missing_credentials_are_named(
    url: str, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import obstore

    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    def refuse(*_: Any, **__: Any) -> Any:
        raise obstore.exceptions.PermissionDeniedError("no token")

    monkeypatch.setattr(obstore, "head", refuse)
    with pytest.raises((PermissionError, ConfigError), match=f"there are no credentials: set {variable}"):
        open_bucket(url)[0].info("x")
