"""Verification of the fast tokenizer against the reference.

Rows are compared in a sample, short ones whole, long ones at both ends (`compared_rows`, `first_difference`).
Characters are compared in texts made for the purpose (`Characters`): nothing beyond ASCII is taken for granted. A block
of 256 characters is compared in all contexts when a row first has one of them, as many blocks per call as take no
longer than the reference would need for the rows. Results are kept on disk for the next run.
"""

from __future__ import annotations

import functools
import itertools
import logging
import platform
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock._forks import renewed
from penstock._optional import package_version
from penstock.arrays.ragged import Flags, Ints, Ragged
from penstock.arrays.text import Utf8, arrow_of, flags, text_array, utf8
from penstock.files.cache import DiskCache, default_cache_directory
from penstock.tokenizers.base import FastModel, Reference

VERSION = 1
"""Goes up when the texts change: characters are then compared again."""

FEW = "a{0}A '{0}e {0}!\n一{0}1\n"
ALL = "A{0}a 1{0}1!{0}!\t  {0}a\n{0}{0}{0}{0}\n{0}\r\n/{0}/\u0301{0}\u0301\n一{0}一 {0}"
SYLLABLES = "\u1100{0}\u11a8가{0}\n{0}\u1161\n"
PLAIN = "a{0}b {0} {0}1{0}{0}A{0}"
ONE_IN, TOGETHER = 16, 32
EAST_ASIAN = (range(0x3000, 0x3400), range(0xFE00, 0x10000))
ASCII = "aAbe1!/' \t\r\n"

_ENDS, _BEGINNINGS = range(0x80, 0xC0), range(0xC2, 0xF5)
BYTE_PAIRS = [
    bytes(pair)
    for pair in itertools.chain(
        itertools.product(_ENDS, _BEGINNINGS),
        itertools.product(ASCII.encode(), _BEGINNINGS),
        itertools.product(_ENDS, ASCII.encode()),
    )
]
"""The last byte of one character and the first of the next, for all neighbours in these texts.

In a vocabulary of single bytes and these pairs, two characters share a token exactly if they were not split apart."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Test texts for one kind of tokenizer."""

    normalised: bool = False
    """The tokenizer normalises text to a Unicode form."""
    trapped: bool = False
    """Rows with some of the characters always go to the reference, so each character has a text of its own."""

    @property
    def together(self) -> int:
        """Number of characters that may share a text."""
        return 1 if self.trapped else TOGETHER

    def text(self, point: int) -> str:
        """A character in its contexts; texts of several characters may be joined."""
        character = chr(point)
        if self.trapped:
            return PLAIN.format(character)
        text = FEW.format(character)
        if _is_unsure(point):
            text += ALL.format(character)
        if self.normalised:
            text += "".join(f"a{part}b" for part in _compositions(character))
            if unicodedata.category(character) in ("Mn", "Mc", "Me", "Cn"):
                text += "".join(f"a{other}{character}a{character}{other}" for other in _neighbours(character)) + "\n"
            if 0x1100 <= point < 0x1200:
                text += SYLLABLES.format(character)
        return text

    def bare(self, points: Iterable[int]) -> list[str]:
        """Texts of one character alone, for those that are tested in all contexts."""
        return [chr(point) for point in points if self.trapped or _is_unsure(point)]

    def can_show(self, point: int) -> bool:
        """True if these texts show everything about a character.

        For a character that Python's tables lack, its combinations are unknown; ideographs, Kana and forms of other
        width combine with nothing.
        """
        kind = unicodedata.category(chr(point))
        if self.normalised and kind == "Cn" and not any(point in block for block in EAST_ASIAN):
            return False
        return kind != "Cs" and not _is_unused(point)


def ascii_pairs(length: int = 512) -> list[str]:
    """Every pair of ASCII characters, in texts of about this length."""
    whole = "".join(
        chr(first) + "".join(chr(first) + chr(second) for second in range(first + 1, 128)) for first in range(128)
    )
    return [whole[start : start + length + 1] for start in range(0, len(whole), length)]


def _is_unused(point: int) -> bool:
    """True in planes without characters, or with private ones only."""
    return point >= 0x40000 and point >> 12 != 0xE0


def _is_unsure(point: int) -> bool:
    return point % ONE_IN == 0 or unicodedata.category(chr(point)) in ("Mn", "Mc", "Me", "Cn", "Cf")


def _compositions(character: str) -> Iterator[str]:
    """Decomposition of a character, and compositions with its neighbours."""
    apart = unicodedata.normalize("NFD", character)
    if apart != character:
        yield apart
    yield from _composed_of().get(character, ())


def _neighbours(mark: str) -> list[str]:
    """Marks of the neighbouring combining classes, and of the first and the last: normalisation may reorder them.

    All are of Unicode 3.2, which every table has.
    """
    classes = _classes()
    own = unicodedata.combining(mark)
    if not own:
        return [classes[min(classes)], classes[max(classes)]]
    before = max((number for number in classes if number < own), default=min(classes))
    after = min((number for number in classes if number > own), default=max(classes))
    chosen = {min(classes), before, after, max(classes), own} & classes.keys()
    return [classes[number] for number in sorted(chosen)]


@functools.cache
def _classes() -> dict[int, str]:
    """The first mark of each combining class."""
    found: dict[int, str] = {}
    for point in itertools.chain(range(0x300, 0x3100), range(0x1D000, 0x1D200)):
        number = unicodedata.ucd_3_2_0.combining(chr(point))
        if number and number == unicodedata.combining(chr(point)):
            found.setdefault(number, chr(point))
    return found


@functools.cache
def _composed_of() -> dict[str, list[str]]:
    """The pairs that combine to one character, by each of the two."""
    found: dict[str, list[str]] = {}
    # Syllables of Hangul combine by rule; ideographs do not combine.
    for point in itertools.chain(range(0xC0, 0x3400), range(0xA000, 0xAC00), range(0xF900, 0x20000)):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            pair = "".join(chr(int(part, 16)) for part in parts)
            for part in pair:
                found.setdefault(part, []).append(pair)
    return found


log = logging.getLogger("penstock.transforms.tokenization")

BLOCK, PAGE = 256, 4096
POINTS, SURROGATES = 0x110000, slice(0xD800, 0xE000)
LARGE_SCRIPTS, ENOUGH = range(0x3000 // PAGE, 0xE000 // PAGE), 1 << 17
"""Pages of ideographs and syllables. The rest of a page is compared after this many single lookups, because characters
of a fully proven page need none."""
AT_ONCE, BYTES_EACH = 8, 1 << 14
"""Blocks to compare in one call: a fixed number, and one per this many bytes, which cost the reference as much."""
FIRST_LEAD, SPARSE = 0xC2, 32
PIECE = 4 << 20
"""Bytes that are looked at together. After each call of NumPy a thread waits for the interpreter lock."""
CACHE_BYTES = 16 << 20
KEEP_SECONDS = 1.0
"""Interval at which new proofs are written to disk; sooner if a quarter more is known."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Different: TypeAlias = Callable[[list[str]], list[str]]
"""The texts for which fast and reference give different ids."""


class Characters:
    """Proven characters. `different` compares texts, `key` names the result on disk."""

    def __init__(self, different: Different, key: Callable[[], str], contexts: Contexts) -> None:
        self._different, self._key, self._contexts = different, key, contexts
        self._proving = renewed(threading.Lock())
        self._proven = np.zeros(POINTS, np.bool_)
        self._proven[:128] = self._proven[SURROGATES] = True
        self._tested = np.zeros(POINTS // BLOCK, np.bool_)
        self._cache: DiskCache | None = None
        self._kept = self._looked_at = 0
        self._kept_at = float("-inf")
        self._tabulate()

    def outside(self, data: Utf8) -> Flags | None:
        """The rows with characters that are not proven; None if there are none."""
        text = data.data
        if text.size < 2:
            return None
        at = self._suspects(text)
        if self._looked_at > ENOUGH:
            self._looked_at = 0
            if rest := self._rest_of_a_page():
                self._prove(rest)
        if not len(at):
            return None
        points = _code_points(text, at)
        unseen, counts = np.unique(points[~self._tested[points // BLOCK]] // BLOCK, return_counts=True)
        if len(unseen):
            often = unseen[np.argsort(-counts, kind="stable")]
            self._prove(often[: AT_ONCE + text.size // BYTES_EACH].tolist())
        wrong = ~self._proven[points]
        if not wrong.any():
            return None
        rows = np.zeros(len(data.offsets) - 1, np.bool_)
        rows[np.searchsorted(data.offsets, at[wrong], "right") - 1] = True
        return rows

    def is_proven(self, point: int) -> bool:
        """True if fast and reference are proven to treat the character alike."""
        return bool(self._proven[point])

    def _suspects(self, text: Bytes) -> Ints:
        """Positions of characters that may not be proven.

        Usual text has few: comparing arrays of bytes takes a hundredth of the time of decoding each character.
        """
        found: list[Ints] = []
        pairs = np.ndarray(text.size - 1, "<u2", text, strides=(1,))
        for start in range(0, text.size, PIECE):
            piece = text[start : start + PIECE]
            at = _places(piece, self._leads)
            self._looked_at += len(at)
            at = at[np.take(self._pairs, pairs[start:][at])]
            if len(at):
                found.append(at + start)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _prove(self, blocks: list[int]) -> None:
        with self._proving:
            if self._cache is None:
                self._cache = DiskCache(default_cache_directory() / "characters", CACHE_BYTES)
                self._recall()
            for block in blocks:
                if not self._tested[block]:
                    self._compare(block)
            self._tabulate()
            known, late = int(self._tested.sum()), time.monotonic() - self._kept_at > KEEP_SECONDS
            if known > self._kept and (late or known > self._kept * 5 // 4):
                self._keep()

    def _rest_of_a_page(self) -> list[int]:
        """Blocks that are not compared, of the first page of a large script that has compared ones."""
        pages = self._tested.reshape(-1, PAGE // BLOCK)
        begun = [page for page in LARGE_SCRIPTS if pages[page].any() and not pages[page].all()]
        return (np.flatnonzero(~pages[begun[0]]) + begun[0] * (PAGE // BLOCK)).tolist() if begun else []

    def _compare(self, block: int) -> None:
        contexts = self._contexts
        points = range(block * BLOCK, (block + 1) * BLOCK)
        shown = [point for point in points if contexts.can_show(point)]
        different = {ord(text) for text in self._different(contexts.bare(shown))}
        texts = {point: contexts.text(point) for point in shown}
        parts = [shown[start : start + contexts.together] for start in range(0, len(shown), contexts.together)]
        groups = {"".join(texts[point] for point in group): group for group in parts}
        for text in self._different(list(groups)):
            group = groups[text]
            guilty = set(self._different([texts[point] for point in group]))
            # All of them, if none is different alone.
            different |= {point for point in group if not guilty or texts[point] in guilty}
        self._proven[[point for point in shown if point not in different]] = True
        self._tested[block] = True

    def _tabulate(self) -> None:
        """Make the tables of unproven characters: by the first two bytes, and runs of first bytes."""
        doubted = ~self._proven
        pairs = np.zeros((256, 256), np.bool_)
        pairs[0xC0:0xE0, 0x80:0xC0] = doubted[:0x800].reshape(32, 64)
        pairs[0xE0:0xF0, 0x80:0xC0] = doubted[:0x10000].reshape(16, 64, 64).any(axis=2)
        planes = np.zeros(5 * 64, np.bool_)
        planes[: POINTS // PAGE] = doubted.reshape(-1, PAGE).any(axis=1)
        pairs[0xF0:0xF5, 0x80:0xC0] = planes.reshape(5, 64)
        pairs[0xE0, 0x80:0xA0] = pairs[0xF0, 0x80:0x90] = False  # no character begins so
        leads = np.flatnonzero(pairs.any(axis=1))
        leads = leads[leads >= FIRST_LEAD]
        runs = np.split(leads, np.flatnonzero(np.diff(leads) > 1) + 1) if len(leads) else []
        self._pairs: Flags = pairs.T.ravel()  # the first byte is the low one
        self._leads = [(int(run[0]), int(run[-1])) for run in runs]

    def _recall(self) -> None:
        assert self._cache is not None
        try:
            data = self._cache.get(self._key())
        except OSError as error:
            log.info("proven characters cannot be read from the cache: %s", error)
            return
        if data is None or len(data) % (2 + BLOCK // 8):
            return
        rows = np.frombuffer(data, np.uint8).reshape(-1, 2 + BLOCK // 8)
        blocks = np.ascontiguousarray(rows[:, :2]).view("<u2").ravel()
        if (blocks >= len(self._tested)).any():
            return
        self._proven.reshape(-1, BLOCK)[blocks] |= np.unpackbits(rows[:, 2:], axis=1).view(np.bool_)
        self._tested[blocks] = True
        self._kept = len(blocks)

    def _keep(self) -> None:
        """Write to disk what is known now; a lost proof is only made again."""
        assert self._cache is not None
        self._kept_at = time.monotonic()
        blocks = np.flatnonzero(self._tested)
        bits = np.packbits(self._proven.reshape(-1, BLOCK)[blocks], axis=1)
        rows = np.hstack([blocks.astype("<u2").view(np.uint8).reshape(-1, 2), bits])
        self._kept = len(blocks)
        try:
            self._cache.put(self._key(), rows.tobytes())
        except OSError as error:
            log.info("proven characters cannot be written to the cache: %s", error)


def _places(text: Bytes, leads: list[tuple[int, int]]) -> Ints:
    """First bytes of characters: all beyond ASCII if they are few, else those in these runs."""
    whole = text.size // 8 * 8
    # Eight bytes at a time: most words of a Latin text are ASCII.
    eights = text[:whole].view(np.uint64)
    words = np.flatnonzero(eights & np.uint64(0x8080808080808080) != 0)
    places: Ints
    if len(words) * SPARSE > text.size:
        mask = np.zeros(0, np.bool_)
        for first, last in leads:
            run = text - np.uint8(first) <= last - first
            mask = mask | run if len(mask) else run
        places = np.flatnonzero(mask)
        return places
    inside = np.flatnonzero(np.take(eights, words).view(np.uint8) >= FIRST_LEAD)
    places = np.take(words, inside >> 3) * 8 + (inside & 7)
    rest = np.flatnonzero(text[whole:] >= FIRST_LEAD)
    return np.concatenate([places, rest + whole]) if len(rest) else places


def _code_points(text: Bytes, at: Ints) -> npt.NDArray[np.int64]:
    """Code points of the characters at these positions, none of them ASCII."""
    first = text[at].astype(np.int64)
    points: npt.NDArray[Any] = first & 0x1F
    long = np.flatnonzero(first >= 0xE0)
    points[long] &= 0x0F
    points[np.flatnonzero(first >= 0xF0)] &= 0x07
    points = points << 6 | text[at + 1] & 0x3F
    points[long] = points[long] << 6 | text[at[long] + 2] & 0x3F
    longest = np.flatnonzero(first >= 0xF0)
    points[longest] = points[longest] << 6 | text[at[longest] + 3] & 0x3F
    return points


ROWS_ONE_IN, LONG_ONE_IN, PLACES = 2048, 64, 4
WHOLE_BYTES, STRETCH_BYTES = 1 << 20, 1 << 14
MIXING = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64)
ALL_WORDS = 1 << 64
LIBRARIES = ("gigatoken", "tokenizers", "tiktoken", "sentencepiece")

Encode: TypeAlias = Callable[[Utf8], Ragged]


def is_long(data: Utf8) -> Flags:
    """The rows that are too long to compare whole: the reference needs about a hundred bytes per token."""
    long: Flags = np.diff(data.offsets) > WHOLE_BYTES
    return long


def compared_rows(data: Utf8, one_in: int = ROWS_ONE_IN) -> Flags:
    """The rows to compare with the reference: a sample by length and a few bytes of each row."""
    lengths = np.diff(data.offsets).astype(np.int64)
    words = (lengths.view(np.uint64) + np.uint64(1)) * MIXING[-1]
    usable = np.flatnonzero(lengths >= 8)
    if len(usable):  # few calls: after each a thread waits for the interpreter lock
        starts = data.offsets[:-1][usable].astype(np.int64)
        places = starts[:, None] + (lengths[usable] - 8)[:, None] * np.arange(PLACES) // (PLACES - 1)
        there = np.ndarray(data.data.size - 7, "<u8", data.data, strides=(1,))[places]
        words[usable] += there @ MIXING
    words = (words ^ words >> np.uint64(32)) * MIXING[0]
    chosen: Flags = words < ALL_WORDS // one_in
    long = is_long(data)
    if long.any():
        chosen |= long & (words < ALL_WORDS // min(LONG_ONE_IN, one_in))
    return chosen


def first_difference(
    reference: Reference, texts: pa.Array, data: Utf8, rows: Ragged, chosen: Ints, *, parse_special: bool
) -> int | None:
    """The first of the chosen rows whose ids are not those of the reference.

    Of a long row, the reference encodes the two ends. Tokens near a cut may differ rightly, so a difference there is
    decided by the whole row.
    """
    long = is_long(data)[chosen]
    short = chosen[~long]
    expected = reference.ids(texts.take(arrow_of(short)).to_pylist(), parse_special=parse_special) if len(short) else ()
    wrong = [row for row, right in zip(short.tolist(), expected) if not np.array_equal(_ids(rows, row), right)]
    for row in chosen[long].tolist():
        text = data.data[data.offsets[row] : data.offsets[row + 1]].tobytes()
        if _ends_agree(reference, text, _ids(rows, row), parse_special):
            continue
        if not np.array_equal(_ids(rows, row), reference.ids([text.decode()], parse_special=parse_special)[0]):
            wrong.append(row)
    return min(wrong, default=None)


class CharacterComparison:
    """Comparison of short texts: those that fast and reference normalise or split differently.

    It uses a small tokenizer whose ids show every split, or else the tokenizer itself.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        encode: Encode,
        load: Callable[[FastModel, int], Encode],
        traps: str | None,
        parse_special: bool,
    ) -> None:
        self._whole, self._encode, self._load = reference, encode, load
        if traps is not None and self._reference is not reference:
            traps = None  # they are for added tokens, and the small tokenizer has none
        self.contexts = Contexts(normalised=reference.normalises, trapped=traps is not None)
        self._traps, self._parse_special = traps, parse_special

    def different(self, texts: list[str]) -> list[str]:
        """The texts for which fast and reference give different ids, unless such rows go to the reference anyway."""
        if not texts:
            return []
        column = text_array(texts, pa.large_string())
        made = self._fast(utf8(column))
        right = self._reference.ids(texts, parse_special=self._parse_special)
        wrong = [not np.array_equal(_ids(made, row), ids) for row, ids in enumerate(right)]
        if self._traps is not None:
            trapped = flags(pc.match_substring_regex(column, pattern=self._traps))
            wrong = (np.array(wrong) & ~trapped).tolist()
        return [text for text, differs in zip(texts, wrong) if differs]

    def key(self) -> str:
        """Key of everything that decides the result."""
        parts = [self._reference.fingerprint(), self.contexts, VERSION, self._traps, unicodedata.unidata_version]
        if self._reference is self._whole:
            parts.append(self._parse_special)
        return str(xxhash.xxh3_128_hexdigest(f"{parts} {_versions()}".encode()))

    @functools.cached_property
    def _reference(self) -> Reference:
        return self._whole.splitter()

    @functools.cached_property
    def _fast(self) -> Encode:
        small = self._reference
        if small is self._whole:
            return self._encode
        model = small.fast(parse_special=self._parse_special)
        if isinstance(model, str):
            raise RuntimeError(model)
        return self._load(model, small.vocab_size)


class PastComparison:
    """A comparison without a difference, kept on disk by everything that decides its result, library versions too."""

    def __init__(self, *facts: object) -> None:
        self._key = xxhash.xxh3_128_hexdigest(f"{facts} {VERSION} {_versions()}".encode())
        self._cache = DiskCache(default_cache_directory() / "characters", CACHE_BYTES)

    def is_known(self) -> bool:
        """True if the comparison was made before."""
        try:
            return self._cache.get(self._key) is not None
        except OSError as error:
            log.info("comparisons of tokenizers cannot be read from the cache: %s", error)
            return False

    def keep(self) -> None:
        """Note that the comparison was made and there was no difference."""
        try:
            self._cache.put(self._key, b"same")
        except OSError as error:
            log.info("comparisons of tokenizers cannot be written to the cache: %s", error)


@functools.cache
def _versions() -> list[str]:
    """Names and versions of the installed libraries, and what they run on.

    A cache may be in a home directory that machines of several kinds share.
    """
    versions = ((name, package_version(name)) for name in LIBRARIES)
    return [
        f"{sys.platform} {platform.machine()}",
        *(f"{name} {version}" for name, version in versions if version is not None),
    ]


def _ends_agree(reference: Reference, text: bytes, ids: Ints, parse_special: bool) -> bool:
    ends = [part.decode("utf-8", "ignore") for part in (text[:STRETCH_BYTES], text[-STRETCH_BYTES:])]
    head, tail = reference.ids(ends, parse_special=parse_special)
    sure_head, sure_tail = (len(part) * 3 // 4 for part in (head, tail))
    return np.array_equal(ids[:sure_head], head[:sure_head]) and np.array_equal(
        ids[max(len(ids) - sure_tail, 0) :], tail[len(tail) - sure_tail :]
    )


def _ids(rows: Ragged, row: int) -> Ints:
    return rows.values[rows.offsets[row] : rows.offsets[row + 1]]
