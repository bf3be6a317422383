"""Hashes of the kernels are those of xxhash, whatever the texts and however they lie in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.corpus.dedup import stages
from penstock.corpus.dedup.kernel_calls import KERNELS, hash_texts
from penstock.corpus.dedup.stages import fingerprints
from penstock.errors import DataError
from penstock.files.machine_code import Functions, MachineCode

# The rule of XXH3 changes at these lengths: it is another one for longer texts.
EDGES = (0, 1, 3, 4, 8, 9, 16, 17, 32, 64, 96, 128, 129, 160, 192, 240, 241, 256, 1024, 1025, 1088, 2048, 2049)
sizes = st.sampled_from(EDGES).flatmap(lambda size: st.integers(max(0, size - 1), size + 1)) | st.integers(0, 5000)


@given(st.lists(sizes, max_size=12), st.integers(0, 1 << 30), st.integers(0, 70))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_hash_of_a_text_is_that_of_xxhash(compiled: Functions, lengths: list[int], seed: int, shift: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, shift + sum(lengths), np.uint8)[shift:]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    wanted = [xxhash.xxh3_128_intdigest(data[begin:end].tobytes()) for begin, end in pairwise(offsets.tolist())]
    words = hash_texts(compiled, data, offsets)
    assert [int(high) << 64 | int(low) for high, low in words] == wanted


def test_all_lengths_have_the_hash_of_xxhash(compiled: Functions) -> None:
    offsets = np.concatenate([[0], np.cumsum(np.arange(3000))])
    data = np.random.default_rng(1).integers(0, 256, offsets[-1], np.uint8)
    digests = [xxhash.xxh3_128_digest(data.data[begin:end]) for begin, end in pairwise(offsets.tolist())]
    assert hash_texts(compiled, data, offsets).astype(">u8").tobytes() == b"".join(digests)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_columns_have_the_same_keys_with_machine_code_and_without(
    compiled: Functions, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    texts = ["", None, "a", "é" * 9, "some words " * 40, "x" * 5000, "", "a"]
    array = pa.array([None if text is None else text.encode() for text in texts], pa.binary()).cast(kind)
    assert KERNELS.loaded is compiled
    with_code = [fingerprints(part).tolist() for part in (array, array[2:7], array[:0])]
    monkeypatch.setattr(stages, "KERNELS", MachineCode("penstock.nothing"))
    assert with_code == [fingerprints(part).tolist() for part in (array, array[2:7], array[:0])]


@pytest.mark.parametrize("has_code", [True, False])
def test_a_damaged_column_is_refused_with_machine_code_and_without(
    compiled: Functions, monkeypatch: pytest.MonkeyPatch, has_code: bool
) -> None:
    if not has_code:
        monkeypatch.setattr(stages, "KERNELS", MachineCode("penstock.nothing"))
    offsets = pa.py_buffer(np.array([0, 4, 2, 10], np.int32))
    with pytest.raises(DataError, match="offsets"):
        fingerprints(pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"0123456789")]))


@pytest.mark.parametrize("offsets", [[0, 4, 2, 10], [0, 4, 11], [1, 10], [0, 12, 10], [-1, 10], [0, 4]])
def test_offsets_that_lead_out_of_the_column_are_refused(compiled: Functions, offsets: list[int]) -> None:
    with pytest.raises(DataError, match="offsets"):
        hash_texts(compiled, np.zeros(10, np.uint8), np.array(offsets, np.int64))
