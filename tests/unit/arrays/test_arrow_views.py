"""Views between NumPy and Arrow that do without pandas give what pyarrow itself gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.text import arrow_of, flags, numbers_of, text_array
from penstock.errors import SchemaError
from penstock.types.columns import to_column

KINDS = ["u1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "?"]


@given(st.lists(st.integers(0, 200), max_size=40), st.sampled_from(KINDS), st.integers(1, 3))
def test_numbers_become_the_array_that_pyarrow_makes(values: list[int], kind: str, step: int) -> None:
    given_values = (np.array(values) % 2 if kind == "?" else np.array(values)).astype(kind)[::step]
    made = arrow_of(given_values)
    made.validate(full=True)
    assert made.equals(pa.array(given_values))


@given(st.lists(st.integers(0, 200), max_size=40), st.sampled_from(KINDS[:-1]), st.integers(0, 5), st.integers(0, 40))
def test_a_slice_of_numbers_is_seen_as_numpy_sees_it(values: list[int], kind: str, start: int, length: int) -> None:
    part = pa.array(np.array(values).astype(kind)).slice(min(start, len(values)), length)
    seen = numbers_of(part)
    assert seen.dtype == np.dtype(kind)
    assert np.array_equal(seen, part.to_numpy())
    assert not len(seen) or not seen.flags.writeable, "writing to it would change the column"


@given(st.lists(st.sampled_from([True, False, None]), max_size=40), st.integers(0, 20), st.integers(0, 40))
def test_truth_values_are_seen_with_null_as_false(values: list[bool | None], start: int, length: int) -> None:
    part = pa.array(values, pa.bool_()).slice(min(start, len(values)), length)
    seen = flags(part)
    assert seen.dtype == np.bool_
    assert seen.tolist() == [value is True for value in part.to_pylist()]


@given(st.lists(st.text(), max_size=20))
def test_texts_become_the_array_that_pyarrow_makes(texts: list[str]) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    made = text_array(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


@pytest.mark.parametrize("words", [1, 100], ids=["short texts", "long texts"])
def test_a_store_of_text_is_made_without_pandas(words: int, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{"one two three " * words}"}}\n' * 100)
    program = (
        "import sys; from penstock.loaders import Recipe, prepare; from penstock.transforms import ByteTokenizer; "
        "print(prepare('a.jsonl', 'a.store', Recipe(tokenizer=ByteTokenizer())).manifest.rows, 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "False"]


NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-200, 200)
VALUES = st.lists(NUMBERS) | st.lists(st.floats()) | st.lists(st.text()) | st.lists(NUMBERS | st.none() | st.booleans())


@given(VALUES, st.sampled_from([pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float64(), pa.string()]))
def test_a_column_of_plain_values_is_the_one_that_pyarrow_makes(values: list[object], kind: pa.DataType) -> None:
    try:
        expected = pa.array(values, kind)
    except (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError):
        expected = None
    try:
        made = to_column(values, pa.field("value", kind))
    except SchemaError:
        return  # a fraction in a column of whole numbers is refused though pyarrow takes it
    assert expected is not None
    made.validate(full=True)
    assert made.type == kind
    assert made.nbytes == expected.nbytes or not values
    assert repr(made.to_pylist()) == repr(expected.to_pylist())
