"""A text that the pattern does not find is in the form NFC already."""

from __future__ import annotations

import itertools
import random
import unicodedata

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tokenizers import normalizers

from penstock.arrays.text import flags
from penstock.tokenizers.normal_form import MADE_ASCII, changed_by_nfc, made_by_nfc

EVERY = [chr(point) for point in itertools.chain(range(0xD800), range(0xE000, 0x110000))]


def found(texts: list[str]) -> list[bool]:
    """For each text, whether the pattern finds it."""
    return flags(pc.match_substring_regex(pa.array(texts), pattern=changed_by_nfc())).tolist()


def test_characters_that_are_not_found_stay_in_any_order() -> None:
    kept = [character for character, unsure in zip(EVERY, found(EVERY)) if not unsure]
    assert len(kept) > 100_000
    nfc = normalizers.NFC()
    for seed in range(4):
        random.Random(seed).shuffle(kept)
        text = "".join(kept)
        assert unicodedata.normalize("NFC", text) == text
        assert nfc.normalize_str(text) == text


def test_characters_that_combine_with_one_before_them_are_found() -> None:
    composed = [text for text in EVERY if len(unicodedata.normalize("NFD", text)) > 1]
    apart = [unicodedata.normalize("NFD", text) for text in composed]
    assert all(found(apart))
    assert all(found([text[-1] for text in apart]))


@pytest.mark.parametrize("text", ["", "plain", "naïve café", "Größe", "日本語", "한국어", "Привет", "🎉", "\ue000"])
def test_usual_text_is_not_found(text: str) -> None:
    assert found([text]) == [False]


@pytest.mark.parametrize("text", ["e\u0301", "\u212b", "\u1112\u1161", "क\u093c", "\u0378", "\U000e0100", "\U000f0000"])
def test_marks_and_characters_with_another_form_are_found(text: str) -> None:
    assert found([f"a {text} b"]) == [True]


def test_nfc_makes_three_characters_of_ascii_of_others() -> None:
    made = {letter for each in EVERY if not each.isascii() for letter in unicodedata.normalize("NFC", each)}
    assert {letter for letter in made if letter.isascii()} == set(MADE_ASCII)
    assert [made_by_nfc(text) for text in ("<|im_start|>", "OK", "é", "e\u0301", "각", "")] == [
        *(False, True, True, False, True, False),
    ]
