from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import xxhash

import penstock.files.checksums as module
from penstock.files.checksums import fingerprint_files, hash_file

OLD = 1_000_000_000


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which files were read."""
    names: list[str] = []
    real = module.hash_file

    def watched(path: Path) -> str:
        names.append(Path(path).name)
        return real(path)

    monkeypatch.setattr(module, "hash_file", watched)
    return names


def aged(path: Path, data: bytes, when: int = OLD) -> Path:
    path.write_bytes(data)
    os.utime(path, (when, when))
    return path


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_500_000])
def test_the_hash_is_that_of_all_bytes(tmp_path: Path, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "a").write_bytes(data[:size])
    assert hash_file(tmp_path / "a") == xxhash.xxh3_128_hexdigest(data[:size])


def test_fingerprints_come_in_order_and_know_content_not_place(tmp_path: Path) -> None:
    for name, data in (("b", b"same"), ("a", b"same"), ("c", b"other")):
        (tmp_path / name).write_bytes(data)
    one, two, three = fingerprint_files([tmp_path / "b", tmp_path / "a", tmp_path / "c"])
    assert [one.name, two.name, three.name] == ["b", "a", "c"]
    assert one.xxh3 == two.xxh3 != three.xxh3
    assert (one.size, three.size) == (4, 5)


def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "memo" / "hashes.json"
    files = [aged(tmp_path / name, name.encode()) for name in ("a", "b")]
    first = fingerprint_files(files, memo=memo)
    assert fingerprint_files(files, memo=memo) == first
    assert hashed == ["a", "b"]
    assert fingerprint_files(files) == first
    assert hashed == ["a", "b", "a", "b"]


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_changed_is_read_again(tmp_path: Path, hashed: list[str], change: str) -> None:
    memo, file = tmp_path / "memo.json", aged(tmp_path / "a", b"one")
    fingerprint_files([file], memo=memo)
    match change:
        case "size":
            aged(file, b"four")
        case "time":
            aged(file, b"two", OLD + 1)
        case "inode":
            aged(tmp_path / "new", b"two").replace(file)
    assert fingerprint_files([file], memo=memo)[0].xxh3 == xxhash.xxh3_128_hexdigest(file.read_bytes())
    assert hashed == ["a", "a"]


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, hashed: list[str]) -> None:
    memo, file = tmp_path / "memo.json", tmp_path / "a"
    file.write_bytes(b"one")
    stamp = file.stat()
    fingerprint_files([file], memo=memo)
    file.write_bytes(b"two")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # within the same tick of the clock
    assert fingerprint_files([file], memo=memo)[0].xxh3 == xxhash.xxh3_128_hexdigest(b"two")
    assert hashed == ["a", "a"]


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"x": 3}'])
def test_a_damaged_memo_is_made_anew(tmp_path: Path, hashed: list[str], content: str) -> None:
    memo, file = tmp_path / "memo.json", aged(tmp_path / "a", b"one")
    memo.write_text(content)
    fingerprint_files([file], memo=memo)
    fingerprint_files([file], memo=memo)
    assert hashed == ["a"]
    assert str(file.resolve()) in json.loads(memo.read_text())


def test_the_memo_keeps_what_others_added_and_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_REMEMBERED", 3)
    memo = tmp_path / "memo.json"
    for number, name in enumerate(("a", "b", "c", "d", "b")):
        fingerprint_files([aged(tmp_path / name, b"x", OLD + number)], memo=memo)
    assert [Path(place).name for place in json.loads(memo.read_text())] == ["c", "d", "b"]


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint_files([tmp_path / "none"])


def test_a_file_whose_time_was_set_back_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.files.checksums.is_settled", lambda stat: True)
    path, memo = tmp_path / "a", tmp_path / "memo.json"
    path.write_bytes(b"one")
    before = path.stat()
    first = fingerprint_files([path], memo=memo)
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint_files([path], memo=memo) != first
