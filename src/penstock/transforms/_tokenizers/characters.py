"""Which characters the fast tokenizer is proven to treat as the reference does, and which rows have others.

Nothing is taken for granted beyond ASCII. A block of 256 characters is compared in all its contexts when a row first
has one of them, or soon after: so many with each call that it takes no longer than the reference would with the rows.
What was found is kept on disk for the next time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.files.caching import DiskCache, default_cache_directory
from penstock.transforms._tokenizers.contexts import Contexts
from penstock.transforms._tokenizers.ragged import Flags, Ints
from penstock.transforms.text import Utf8

__all__ = ["Characters"]

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
        rows = np.zeros(len(data.bounds) - 1, np.bool_)
        rows[np.searchsorted(data.bounds, at[wrong], "right") - 1] = True
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
