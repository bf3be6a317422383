from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ResumeError
from penstock.files.compression import ByteReader, DamagedStreamError, open_input, open_output

CODECS = [".gz", ".zst", ".bz2", ".lz4", ".xz"]
REFERENCE: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: squeezed(data, "zstd"),
    ".lz4": lambda data: squeezed(data, "lz4"),
}
TEXT = b"".join(b"line %d, and some more of it\n" % i for i in range(20_000))


def squeezed(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def read_all(path: Path, offset: int = 0, step: int = 70_000) -> bytes:
    reader = open_input(path, offset)
    try:
        parts, scratch = [], memoryview(bytearray(step))
        while got := reader.readinto(scratch):
            parts.append(bytes(scratch[:got]))
        return b"".join(parts)
    finally:
        reader.close()


@pytest.mark.parametrize("codec", ["", *CODECS])
@pytest.mark.parametrize("offset", [0, 1, 100_000, len(TEXT)])
def test_a_file_is_read_from_any_offset_whatever_its_codec(tmp_path: Path, codec: str, offset: int) -> None:
    path = tmp_path / f"a.txt{codec}"
    path.write_bytes(REFERENCE[codec](TEXT) if codec else TEXT)
    assert read_all(path, offset) == TEXT[offset:]


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_an_offset_behind_the_end_of_the_file_is_an_error_that_says_how_long_it_is(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.txt{codec}"
    path.write_bytes(REFERENCE[codec](b"0123456789") if codec else b"0123456789")
    with pytest.raises(ResumeError, match=r"byte 11\b"):
        open_input(path, 11)


@pytest.mark.parametrize("codec", CODECS)
def test_several_compressed_streams_one_behind_the_other_are_one_file(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.txt{codec}"
    compress = REFERENCE[codec]
    path.write_bytes(compress(TEXT[:1000]) + compress(b"") + compress(TEXT[1000:]))
    assert read_all(path) == TEXT
    assert read_all(path, 1500) == TEXT[1500:]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_compressed_file_cut_short_is_damaged(tmp_path: Path, codec: str, kept: float) -> None:
    path = tmp_path / f"a.txt{codec}"
    whole = REFERENCE[codec](TEXT)
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(DamagedStreamError):
        read_all(path)


@pytest.mark.parametrize("codec", CODECS)
def test_everything_before_the_damage_is_read_however_much_is_asked_for(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.txt{codec}"
    noise = np.random.default_rng(0).bytes(300_000)
    whole = REFERENCE[codec](noise)
    path.write_bytes(whole[: len(whole) * 3 // 4])
    results = []
    for step in (1 << 20, 100_000, 777):
        reader, parts, scratch = open_input(path), [], memoryview(bytearray(step))
        with contextlib.suppress(DamagedStreamError):
            while got := reader.readinto(scratch):
                parts.append(bytes(scratch[:got]))
        with pytest.raises(DamagedStreamError):
            reader.readinto(scratch)
        reader.close()
        results.append(b"".join(parts))
    assert results[0] == results[1] == results[2]
    assert noise.startswith(results[0])
    if codec == ".gz":  # the others work in blocks, and lose the one that was cut
        assert results[0] == zlib.decompressobj(31).decompress(path.read_bytes())


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_not_compressed_although_its_name_says_so_is_damaged(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.txt{codec}"
    path.write_bytes(b"just some text\n" * 10)
    with pytest.raises(DamagedStreamError):
        read_all(path)
    with pytest.raises(DamagedStreamError):
        open_input(path, 5)


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_no_bytes_at_all_are_an_empty_file(tmp_path: Path, codec: str) -> None:
    path = tmp_path / f"a.txt{codec}"
    path.touch()
    assert read_all(path) == b""


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=2000), max_size=5))
def test_what_is_written_compressed_is_read_back_by_the_reference_too(
    tmp_path: Path, codec: str, pieces: list[bytes]
) -> None:
    path = tmp_path / f"a.bin{codec}"
    with path.open("wb") as file:
        stream = open_output(file, codec)
        for piece in pieces:
            stream.write(piece)
        stream.close()
        assert not file.closed
    assert read_all(path) == b"".join(pieces)
    reference = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}.get(codec)
    if reference is not None:
        assert reference(path.read_bytes()) == b"".join(pieces)


@pytest.mark.parametrize("codec", [".gz", ".zst", ".bz2", ".xz"])
def test_a_higher_level_compresses_better(tmp_path: Path, codec: str) -> None:
    words = np.random.default_rng(0).integers(0, 3000, 200_000)
    data = " ".join(f"word{word}" for word in words).encode()
    sizes = []
    for level in (1, 9):
        path = tmp_path / f"{level}{codec}"
        with path.open("wb") as file:
            stream = open_output(file, codec, level)
            for start in range(0, len(data), 100_000):
                stream.write(data[start : start + 100_000])
            stream.close()
        assert read_all(path) == data
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0]


def test_a_long_stream_with_a_level_is_written_in_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    data = bytes(9 << 20)
    with path.open("wb") as file:
        stream = open_output(file, ".zst", 3)
        for start in range(0, len(data), 1 << 20):
            stream.write(memoryview(data)[start : start + (1 << 20)])
        stream.close()
    assert read_all(path) == data
    assert path.read_bytes().count(b"\x28\xb5\x2f\xfd") == 3


def test_an_unknown_codec_or_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'\.rar'"):
        open_output(io.BytesIO(), ".rar")
    with pytest.raises(ConfigError, match=r"\.lz4.*\b3\b"):
        open_output(io.BytesIO(), ".lz4", 3)
    with pytest.raises(ConfigError, match="compression_level"):
        open_output(io.BytesIO(), ".gz", 10)


def test_no_codec_is_the_file_itself() -> None:
    buffer = io.BytesIO()
    assert open_output(buffer, "") is buffer


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        open_input(tmp_path / "missing.txt")


def read_out(reader: ByteReader) -> None:
    while reader.readinto(bytearray(1 << 16)):
        pass


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".lz4"])
def test_a_file_that_is_emptied_while_it_is_read_is_damaged_and_does_not_hang(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"big{suffix}"
    with open(path, "wb") as file, open_output(file, suffix) as out:
        out.write(os.urandom(2 << 20))
    reader = open_input(path)
    reader.readinto(bytearray(100))
    os.truncate(path, 0)
    with pytest.raises(DamagedStreamError):
        read_out(reader)
    reader.close()


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".lz4", ".bz2", ".xz"])
@pytest.mark.parametrize("level", [None, 1])
def test_content_that_was_changed_is_noticed_by_every_codec(tmp_path: Path, suffix: str, level: int | None) -> None:
    path = tmp_path / f"noise{suffix}"
    if suffix == ".lz4" and level is not None:
        pytest.skip("lz4 has no levels")
    with open(path, "wb") as file, open_output(file, suffix, level) as out:
        out.write(os.urandom(5000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # noise is stored as it is, so that nothing but a checksum can tell
    path.write_bytes(data)
    reader = open_input(path)
    with pytest.raises(DamagedStreamError):
        read_out(reader)
    reader.close()


@pytest.mark.parametrize("codec", [".bz2", ".xz"])
def test_whatever_follows_the_last_stream_is_damage_unless_it_is_zeros(codec: str, tmp_path: Path) -> None:
    path, one = tmp_path / f"a{codec}", REFERENCE[codec](b"content")
    for behind, expected in ((b"\0" * 512, b"content"), (b"\0" * 4 + one, b"contentcontent"), (b"", b"content")):
        path.write_bytes(one + behind)
        assert read_all(path) == expected
    path.write_bytes(one + b"garbage")
    with pytest.raises(DamagedStreamError, match="garbage"):
        read_all(path)
