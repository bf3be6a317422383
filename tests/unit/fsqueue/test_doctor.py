from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pytest
from queues import Maker, consumer, fill, numbers, provider, take

from penstock.errors import QueueNotFoundError
from penstock.fsqueue import Queue
from penstock.fsqueue.batch_file import Encoder
from penstock.fsqueue.doctor import Diagnosis, Finding, examine

LEASE = 0.2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four files of four batches."""
    return fill(tmp_path / "q", 16)


def the_only(diagnosis: Diagnosis) -> Finding:
    [finding] = diagnosis.findings
    return finding


def everything(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def file_of(path: Path, number: int) -> Path:
    [file] = path.glob(f"train/{number:012d}-*")
    return file


def abandon(reader: Any) -> None:
    """Let a consumer die: it beats no more, and gives nothing back."""
    reader._member._heartbeat.stop()
    reader._release.detach()


@pytest.fixture
def dead_consumer(path: Path) -> str:
    reader = consumer(path, lease_seconds=LEASE)
    take(reader, 1)
    abandon(reader)
    return str(reader._member.id)


def test_a_sound_queue_has_no_findings_and_is_left_as_it_is(path: Path) -> None:
    before = everything(path)
    diagnosis = examine(path, repair=True)
    assert (diagnosis.findings, diagnosis.sound) == ([], True)
    assert (diagnosis.files, diagnosis.batches) == (4, 16)
    assert diagnosis.bytes == sum(len(data) for name, data in before.items() if name.endswith(".arrow"))
    assert everything(path) == before


def test_a_queue_that_is_in_use_has_no_findings(path: Path) -> None:
    with consumer(path, lease_seconds=LEASE) as reader:
        take(reader, 5)
        diagnosis = examine(path, repair=True)
        assert diagnosis.findings == []
        assert take(reader, 3) == [5, 6, 7]
        assert reader.counts().lost == 0


def test_where_there_is_no_queue_there_is_nothing_to_examine(tmp_path: Path) -> None:
    with pytest.raises(QueueNotFoundError):
        examine(tmp_path / "q")
    with pytest.raises(QueueNotFoundError, match=r"queue\.json"):
        examine(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:-5], "is damaged"),
        (lambda data: data.replace(b'"vocab_size": 65', b'"vocab_size": 66'), "was changed by hand"),
        (lambda data: data.replace(b'"version": 1', b'"version": 99'), "version 99"),
    ],
)
def test_metadata_that_cannot_be_trusted_is_an_error(path: Path, change: Any, said: str) -> None:
    file = path / "queue.json"
    file.write_bytes(change(file.read_bytes()))
    diagnosis = examine(path, repair=True)
    finding = the_only(diagnosis)
    assert finding.severity == "error"
    assert said in finding.what
    assert str(path) in finding.remedy
    assert not diagnosis.sound


# -- files -----------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def swap_number(file: Path) -> None:
    file.rename(file.with_name(file.name.replace("000000000001", "000000000009")))


def other_fingerprint(file: Path) -> None:
    replace_by(file, pa.record_batch({"x": [1]}), fingerprint="0" * 32)


def other_schema(file: Path) -> None:
    replace_by(file, pa.record_batch({"x": [1]}), fingerprint=Queue.open(file.parent.parent).fingerprint)


def replace_by(file: Path, batch: pa.RecordBatch, fingerprint: str) -> None:
    made = Encoder(fingerprint=fingerprint, split="train").encode([batch], 1)
    file.unlink()
    (file.parent / made.file.name).write_bytes(made.data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "checksum"),
        (cut, "checksum"),
        (empty, "empty"),
        (swap_number, "it was renamed"),
        (other_fingerprint, "metadata"),
        (other_schema, "batch_schema"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_put_aside_if_asked(path: Path, damage: Any, said: str) -> None:
    damage(file_of(path, 1))
    finding = the_only(examine(path))
    assert finding.severity == "error"
    assert said in finding.what
    assert Path(finding.where).is_file()
    assert finding.repaired is None
    diagnosis = examine(path, repair=True)
    finding = the_only(Diagnosis(path, [each for each in diagnosis.findings if each.severity == "error"]))
    assert finding.repaired is not None
    assert ".bad" in finding.repaired
    assert diagnosis.sound
    assert not Path(finding.where).exists()
    again = the_only(examine(path))
    assert again.severity == "note"
    assert again.severity == "note"
    with consumer(path) as reader:
        assert len(list(reader)) == 12


def test_a_damaged_file_that_a_living_consumer_has_is_left_to_it(path: Path) -> None:
    with consumer(path, lease_seconds=LEASE) as reader:
        take(reader, 1)
        flip(next(path.glob("train/*.by-*")))
        diagnosis = examine(path, repair=True)
    assert the_only(diagnosis).repaired is None
    assert not diagnosis.sound


def test_a_batch_whose_insides_are_broken_is_found(path: Path) -> None:
    queue = Queue.open(path)
    no_text = pa.array([b"\xff"]).buffers()
    broken = pa.Array.from_buffers(pa.string(), 1, no_text)
    file = file_of(path, 1)
    replace_by(file, pa.RecordBatch.from_arrays([broken], ["x"]), queue.fingerprint)
    finding = the_only(examine(path))
    assert "batch 0" in finding.what


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "train", "train/lanes", "train/cursors", "members"])
def test_files_of_other_programs_are_named_and_never_deleted(path: Path, where: str) -> None:
    stranger = path / where / "notes.txt"
    stranger.write_text("mine")
    diagnosis = examine(path, repair=True)
    finding = the_only(diagnosis)
    assert (finding.severity, finding.where, finding.repaired) == ("warning", str(stranger), None)
    assert stranger.read_text() == "mine"
    assert not diagnosis.sound


def test_a_number_that_is_there_twice_is_an_error(path: Path) -> None:
    file = file_of(path, 2)
    shutil.copy(file, file.with_name(f"{file.name}.by-c0000"))
    found = [finding for finding in examine(path, wait_seconds=0.05).findings if finding.severity == "error"]
    [finding] = found
    assert re.search(r"file 2.*2 times", finding.what)
    assert str(file) in finding.where


def test_a_lane_that_would_make_a_file_again_is_moved_on(path: Path) -> None:
    [lane] = [each for each in (path / "train" / "lanes").iterdir() if each.name == f"{66:012d}"]
    lane.rename(lane.with_name(f"{2:012d}"))
    finding = the_only(examine(path))
    assert "file 2" in finding.what
    assert examine(path, repair=True).sound
    assert examine(path).findings == []
    assert lane.exists()


def test_a_missing_lane_and_one_that_is_there_twice_are_errors(path: Path) -> None:
    lanes = path / "train" / "lanes"
    (lanes / f"{5:012d}").unlink()
    (lanes / f"{70:012d}").touch()  # lane 6 has made file 6 already, it says, and has still to make it
    found = examine(path).findings
    assert [finding.severity for finding in found] == ["error", "error"]
    assert re.search(r"1 of.*64 lanes", found[0].what)
    assert re.search(r"1 lanes.*6", found[1].what)


def test_two_ends_are_an_error(path: Path) -> None:
    (path / "train" / "lanes" / "end-99").touch()
    assert re.search(r"2 ends.*16", the_only(examine(path)).what)


def test_lanes_that_are_gone_cannot_be_repaired(path: Path) -> None:
    shutil.rmtree(path / "train" / "lanes")
    diagnosis = examine(path, repair=True)
    assert the_only(diagnosis).where == str(path / "train" / "lanes")
    assert not diagnosis.sound


# -- the dead --------------------------------------------------------------------------------------------------------


def test_what_a_dead_consumer_holds_is_found_and_given_back(path: Path, dead_consumer: str) -> None:
    found = examine(path)
    assert {finding.severity for finding in found.findings} == {"warning"}
    assert [dead_consumer in finding.where for finding in found.findings] == [True, True]
    assert "4 batches" in found.findings[0].what
    assert not found.sound
    mended = examine(path, repair=True)
    assert [finding.repaired for finding in mended.findings] == ["released", "released"]
    assert mended.sound
    assert examine(path).findings == []
    assert [file.returns for file in Queue.open(path).split("train").files()] == [1, 0, 0, 0]
    assert list((path / "members").iterdir()) == []


def test_whoever_is_watched_for_less_than_its_lease_is_in_doubt_and_not_touched(path: Path) -> None:
    reader = consumer(path, lease_seconds=30.0)
    take(reader, 1)
    abandon(reader)
    before = everything(path)
    told: list[tuple[float, int]] = []
    diagnosis = examine(path, repair=True, wait_seconds=0.05, on_wait=lambda *given: told.append(given))
    assert "watched" in the_only(diagnosis).what
    assert told == [(0.05, 1)]
    assert everything(path) == before
    reader._member.leave()


def test_a_claim_of_somebody_who_is_not_listed_is_given_back(path: Path) -> None:
    file = file_of(path, 1)
    file.rename(file.with_name(f"{file.name}.by-c0123"))
    assert not examine(path, wait_seconds=0.1).sound
    assert examine(path, wait_seconds=0.1, repair=True).sound
    assert numbers(path) == [0, 1, 2, 3]
    assert not list(path.glob("train/*.by-*"))


def test_what_a_dead_provider_was_at_is_found_and_given_back(tmp_path: Path) -> None:
    maker = Maker(tmp_path / "q", lease_seconds=LEASE)
    maker.member.join()
    number = maker.reserve()
    (tmp_path / "q" / "train" / f".{number:012d}~{maker.member.id}.tmp").write_bytes(b"half")
    maker.member._heartbeat.stop()
    found = [finding.what for finding in examine(tmp_path / "q").findings]
    assert len(found) == 3
    assert "file 0" in " ".join(found)
    mended = examine(tmp_path / "q", repair=True)
    assert mended.sound
    assert examine(tmp_path / "q").findings == []
    assert not list((tmp_path / "q" / "train").glob(".*.tmp"))


# -- strict order ----------------------------------------------------------------------------------------------------


def test_cursors_of_two_worlds_are_a_warning(path: Path) -> None:
    for name in ("r0of2~read4~done4", "r1of2~read4~done4", "r0of3~read0~done0"):
        (path / "train" / "cursors" / name).touch()
    finding = the_only(examine(path))
    assert (finding.severity, "2 and 3 ranks" in finding.what) == ("warning", True)


def test_a_rank_without_a_cursor_and_files_that_are_done_with_are_noted(path: Path) -> None:
    (path / "train" / "cursors" / "r1of2~read9~done9").touch()
    diagnosis = examine(path)
    assert "no cursor of ranks [0] of 2" in the_only(diagnosis).what
    assert diagnosis.sound
    (path / "train" / "cursors" / "r0of2~read9~done8").touch()
    assert re.search(r"\b2 files.*\b0\b", the_only(examine(path)).what)


# -- the file system -------------------------------------------------------------------------------------------------


def test_a_file_system_that_cannot_rename_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(old: Any, new: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(old))

    monkeypatch.setattr(os, "rename", refuse)
    finding = the_only(examine(path))
    assert finding.severity == "error"
    assert "Read-only file system" in finding.what


def test_a_file_system_on_which_listings_lag_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir
    before = listdir(path)
    monkeypatch.setattr(os, "listdir", lambda place=".": list(before) if Path(place) == path else listdir(place))
    said = [finding.what for finding in examine(path).findings]
    assert "not listed" in said[0]
    assert sorted(listdir(path)) == sorted(before)


def test_a_full_disk_is_a_warning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 20))
    assert "1.0 MiB" in the_only(examine(path)).what


def test_a_network_file_system_is_told_what_it_has_to_provide(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = SimpleNamespace(mountpoint=str(path.parent), fstype="nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])
    diagnosis = examine(path)
    assert diagnosis.file_system == "nfs4"
    assert "atomic" in the_only(diagnosis).what
    assert diagnosis.sound


def test_a_diagnosis_is_plain_values_with_errors_first(path: Path) -> None:
    flip(file_of(path, 3))
    (path / "notes.txt").touch()
    facts = orjson.loads(orjson.dumps(examine(path).to_dict()))
    assert [finding["severity"] for finding in facts["findings"]] == ["error", "warning"]
    assert facts["sound"] is False
    assert facts["files"] == 3


def test_every_split_is_examined(tmp_path: Path) -> None:
    provider(tmp_path / "q", split_proportions={"train": 1.0, "val": 1.0}).run(max_batches=4)
    [val] = (tmp_path / "q" / "val").glob("*.arrow")
    flip(val)
    assert the_only(examine(tmp_path / "q")).where == str(val)
