"""Which characters the fast tokenizer is proven to treat as the reference does, and which rows have others.

Nothing is taken for granted beyond ASCII. A block of 256 characters is compared in all its contexts when a row first
has one of them, or soon after: so many with each call that it takes no longer than the reference would with the rows.
What was found is kept on disk for the next time.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Flags, Ints
from penstock.arrays.text import Utf8
from penstock.files.cache import DiskCache, default_cache_directory

__all__ = ["BYTE_PAIRS", "VERSION", "Characters", "Contexts", "ascii_pairs"]


VERSION = 1
"""Raised when the texts change: what was proven with others is proven anew."""

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
"""The last byte of one character and the first of the next, as far as they meet in these texts.

In a vocabulary of single bytes and these pairs, two characters share a token exactly if they were not split apart."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The texts for one kind of tokenizer."""

    normalised: bool = False
    """Whether it brings text to a Unicode form."""
    trapped: bool = False
    """Whether rows with some of the characters go to the reference in any case: then each has a text of its own."""

    @property
    def together(self) -> int:
        """How many characters may share a text."""
        return 1 if self.trapped else TOGETHER

    def text(self, point: int) -> str:
        """A character in its contexts; texts of several characters may be put end to end."""
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
        """Texts of one character alone, for those that are put into all contexts."""
        return [chr(point) for point in points if self.trapped or _is_unsure(point)]

    def can_show(self, point: int) -> bool:
        """Whether these texts show all there is to a character.

        Of one that Python's tables do not have, nobody here knows what it combines with; between ideographs, Kana and
        forms of other width there is nothing to combine with.
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
    """In the planes that have no characters, or only private ones: not worth the time."""
    return point >= 0x40000 and point >> 12 != 0xE0


def _is_unsure(point: int) -> bool:
    return point % ONE_IN == 0 or unicodedata.category(chr(point)) in ("Mn", "Mc", "Me", "Cn", "Cf")


def _compositions(character: str) -> Iterator[str]:
    """What a character decomposes to, and what it and its neighbours compose to."""
    apart = unicodedata.normalize("NFD", character)
    if apart != character:
        yield apart
    yield from _composed_of().get(character, ())


def _neighbours(mark: str) -> list[str]:
    """Marks of the combining classes next to that of a mark, and of the first and the last: with them it changes places
    or not. All are of Unicode 3.2, which every table has."""
    classes = _classes()
    own = unicodedata.combining(mark)
    if not own:
        return [classes[min(classes)], classes[max(classes)]]
    before = max((number for number in classes if number < own), default=min(classes))
    behind = min((number for number in classes if number > own), default=max(classes))
    chosen = {min(classes), before, behind, max(classes), own} & classes.keys()
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
"""Pages of ideographs and syllables. The rest of one is compared after so many characters were looked at one by one,
since those of a whole page that is proven need no look."""
AT_ONCE, BYTES_EACH = 8, 1 << 14
"""Blocks to compare with one call: some, and one for so much text; of one the reference makes about as much work."""
FIRST_LEAD, SPARSE, PIECE = 0xC2, 32, 1 << 20
CACHE_BYTES = 16 << 20

Bytes: TypeAlias = npt.NDArray[np.uint8]
Different: TypeAlias = Callable[[list[str]], list[str]]
"""Those of some texts for which fast and reference give other ids."""


class Characters:
    """The characters that were compared. `different` compares texts, `key` names what is compared, for the disk."""

    def __init__(self, different: Different, key: Callable[[], str], contexts: Contexts) -> None:
        self._different, self._key, self._contexts = different, key, contexts
        self._proving = threading.Lock()
        self._proven = np.zeros(POINTS, np.bool_)
        self._proven[:128] = self._proven[SURROGATES] = True
        self._tested = np.zeros(POINTS // BLOCK, np.bool_)
        self._cache: DiskCache | None = None
        self._kept = self._looked_at = 0
        self._tabulate()

    def outside(self, data: Utf8) -> Flags | None:
        """The rows that have characters on which the two differ; None if there are none."""
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
        """Whether a character was compared and found to be treated alike."""
        return bool(self._proven[point])

    def _suspects(self, text: Bytes) -> Ints:
        """Where characters begin that may not be proven.

        Usual text has few: comparing arrays of bytes takes a hundredth of the time of looking at each character.
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
            if self._tested.sum() > self._kept * 5 // 4:
                self._keep()

    def _rest_of_a_page(self) -> list[int]:
        """Blocks of a large script that were not compared, of the first page of which some were."""
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
        """What is not proven, by the first two bytes of characters, and the runs of first bytes that have some."""
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
            log.info("what is known of characters cannot be read: %s", error)
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
        """On disk, each time that a quarter more is known: a proof that is lost is only made again."""
        assert self._cache is not None
        blocks = np.flatnonzero(self._tested)
        bits = np.packbits(self._proven.reshape(-1, BLOCK)[blocks], axis=1)
        rows = np.hstack([blocks.astype("<u2").view(np.uint8).reshape(-1, 2), bits])
        self._kept = len(blocks)
        try:
            self._cache.put(self._key(), rows.tobytes())
        except OSError as error:
            log.info("what is known of characters cannot be kept for the next run: %s", error)


def _places(text: Bytes, leads: list[tuple[int, int]]) -> Ints:
    """Where characters begin: all beyond ASCII, if they are few, or else those with first bytes in these runs."""
    whole = text.size // 8 * 8
    # Eight bytes at a time: most of a text in Latin letters has nothing to look at.
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
    """The characters that begin at these places, none of them ASCII."""
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
