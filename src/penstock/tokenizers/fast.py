"""Fast path: gigatoken where it gives the ids of the reference, checked before the first row and during the run.

Rows with characters that gigatoken is not proven to treat like the reference go to the reference (`verification.py`).
Any other difference turns the fast path off if none of its ids were delivered yet, and ends the run otherwise. The word
cache of gigatoken only grows, so a backend is dropped and loaded again when the process has grown by its limit.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock._forks import renewed
from penstock.arrays.ragged import Flags, Ints, Ragged, spliced
from penstock.arrays.text import Utf8, arrow_of, flags, text_array, utf8
from penstock.memory.pressure import resident_bytes
from penstock.pipeline.chain import BrokenStageError
from penstock.pipeline.cores import available_cores
from penstock.tokenizers.base import FastModel, Reference, narrowest, reference_ids
from penstock.tokenizers.verification import (
    CharacterComparison,
    Characters,
    PastComparison,
    ascii_pairs,
    compared_rows,
    first_difference,
    is_long,
)

log = logging.getLogger("penstock.transforms.tokenization")

_forked = False
"""True in a process that was forked from one that had this module."""


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)

FIRST_ROWS, FIRST_BYTES, FIRST_LONG_ROWS = 64, 1 << 16, 2
FEW_ROWS, FEW_BYTES = 2000, 1 << 18
CACHE_BYTES, CACHE_LEAST_TEXT = 512 << 20, 8 << 20
PIECE_BYTES = 2 << 20

PROBES = (
    "",
    " ",
    "hello world",
    "  two  spaces  and a tab\tand three   ",
    "line\nline\r\n\r\n  indented\n\n\n",
    "it's we'll I'VE they'd DON'T 's 'S",
    "1 22 333 4444 55555 3.14 1,000,000 0x1F",
    "!? ... --- ((a)) [b]{c} a_b a-b @home #1 $5 100% a/b\\c",
    "camelCase HTMLParser snake_case",
    "naïve café e\u0301 ﬁ Å ẞ İi ǅ",
    "日本語テキスト、漢字かな交じり 한국어 中文",
    "Привет мир שלום مرحبا नमस्ते",
    "🎉👩‍👩‍👧‍👦🇩🇪 ❤️ \U0001f3fd",
    "nul\0 bell\x07 del\x7f esc\x1b \u200b\u200d\ufeff \u3000\u00a0\u2028x\u0085",
    "▁a ▁ ▁▁b",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\ue000\U000f0000\uffff",
)


class Refused(Exception):  # noqa: N818 - never leaves this package
    """The fast path cannot be used; the message is the reason."""


class FastPath:
    """The fast form of one tokenizer in one parsing mode; raises `Refused` for good once it is not exact.

    With `alone=False`, copies in other processes may have delivered ids already.
    """

    def __init__(
        self, reference: Reference, *, parse_special: bool, wanted: bool | None = True, alone: bool = True
    ) -> None:
        self._reference, self._parse_special, self._wanted = reference, parse_special, wanted
        self._setup, self._verdict = renewed(threading.Lock()), renewed(threading.Lock())
        self._backend: FastBackend | None = None
        self._traps: str | None = None
        self._characters: Characters | None = None
        self._reference_rows = 0
        self._refusal: str | None = None
        self._delivered, self._wrong = not alone, ""
        self._unseen_rows, self._unseen_long = FIRST_ROWS, FIRST_LONG_ROWS
        self._cache_bytes = CACHE_BYTES

    @property
    def refusal(self) -> str | None:
        """Reason why it is not used; None while it is, or before it was loaded."""
        return self._refusal

    @property
    def reference_rows(self) -> int:
        """Number of rows that went to the reference because of their characters."""
        return self._reference_rows

    def fit(self, nbytes: int) -> None:
        """Limit the growth of the cache to `nbytes`, and load what the first call needs."""
        self._cache_bytes = nbytes
        if self._backend is not None:
            self._backend.allowed = nbytes
        try:
            self._ready()
        except Refused:
            return  # it is in the log; the reference is used

    def encode(self, texts: pa.Array) -> Ragged:
        """The ids of a text column without nulls. Call `deliver` before using them."""
        backend = self._ready()
        data = utf8(texts)
        other = self._for_reference(texts, data)
        if other is not None and other.any():
            marked = reference_ids(self._reference, texts.filter(arrow_of(other)), parse_special=self._parse_special)
            return spliced(other, marked, self._checked(backend, texts.filter(arrow_of(~other))))
        return self._checked(backend, texts, data)

    def deliver(self) -> None:
        """Confirm the ids that `encode` returned; raises if another thread has found a difference meanwhile."""
        with self._verdict:
            self._stop_if_over()
            self._delivered = True

    def _checked(self, backend: FastBackend, texts: pa.Array, data: Utf8 | None = None) -> Ragged:
        data = utf8(texts) if data is None else data
        chosen = compared_rows(data)
        if self._unseen_rows > 0 or self._unseen_long > 0:
            chosen = chosen | self._first_rows(data)
        rows, difference = self._compared(backend, texts, data, np.flatnonzero(chosen))
        if difference is not None:
            self._found(difference)
        return rows

    def _found(self, difference: str) -> NoReturn:
        with self._verdict:
            if self._delivered and not self._wrong:
                self._wrong = difference
                log.error("%s: gigatoken was wrong: %s", self._reference.name, difference)
            self._stop_if_over()
            self._refuse(difference)  # before any other thread delivers

    def _compared(self, backend: FastBackend, texts: pa.Array, data: Utf8, chosen: Ints) -> tuple[Ragged, str | None]:
        """The rows, and the first difference to the reference."""
        try:
            rows = backend.encode(data)
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is not an Exception
            self._refuse(f"it failed: {_first_line(error)}")
        if len(rows.offsets) != len(texts) + 1:
            return rows, f"it returned {len(rows.offsets) - 1} rows for {len(texts)}"
        if not len(chosen):
            return rows, None
        row = first_difference(self._reference, texts, data, rows, chosen, parse_special=self._parse_special)
        if row is None:
            return rows, None
        return rows, f"it gives other ids than the reference for the text {texts[row].as_py()[:200]!r:.200}"

    def _first_rows(self, data: Utf8) -> Flags:
        first = min(self._unseen_rows, int(np.searchsorted(data.offsets, FIRST_BYTES, "right")))
        long = is_long(data)
        early: Flags = (np.arange(len(long)) < max(first, self._unseen_rows > 0)) & ~long
        early[np.flatnonzero(long)[: max(self._unseen_long, 0)]] = True
        self._unseen_rows -= int((early & ~long).sum())
        self._unseen_long -= int((early & long).sum())
        return early

    def _ready(self) -> FastBackend:
        self._stop_if_over()
        if self._backend is not None:
            return self._backend
        with self._setup:
            if self._backend is None and self._refusal is None:
                self._load()
        return self._ready()

    def _load(self) -> None:
        if not self._wanted:
            self._refuse("fast=False was given", logging.INFO if self._wanted is False else logging.DEBUG)
        model = self._reference.fast(parse_special=self._parse_special)
        if isinstance(model, str):
            self._refuse(model)
        self._traps = model.traps
        try:
            backend = FastBackend(model, self._cache_bytes, self._reference.vocab_size)
        except BaseException as error:  # noqa: BLE001 - a model that it cannot load is for the reference
            self._refuse(f"it does not support this model: {_first_line(error)}")
        probes = [*PROBES, *self._reference.probes()]  # and pairs, which `VERSION` of the comparison stands for
        compared = PastComparison(self._reference.fingerprint(), self._parse_special, model.traps, probes)
        if not compared.is_known():
            self._compare_probes(backend, text_array([*probes, *ascii_pairs()]))
            compared.keep()
        cache_bytes = self._cache_bytes  # not `self`: the tables are freed with this object, not by the collector
        characters = CharacterComparison(
            self._reference,
            encode=backend.encode,
            load=lambda small, size: FastBackend(small, cache_bytes, size).encode,
            traps=model.traps,
            parse_special=self._parse_special,
        )
        self._characters = Characters(characters.different, characters.key, characters.contexts)
        self._backend = backend
        log.info("%s: tokenizing with gigatoken, checked against the reference", self._reference.name)

    def _compare_probes(self, backend: FastBackend, probes: pa.Array) -> None:
        other = self._trapped(probes)
        if other is not None:
            probes = probes.filter(arrow_of(~other))
        _, difference = self._compared(backend, probes, utf8(probes), np.arange(len(probes)))
        if difference is not None:
            self._refuse(difference)

    def _refuse(self, reason: str, level: int = logging.WARNING) -> NoReturn:
        if self._refusal is None:
            self._refusal = reason
            log.log(
                level,
                "%s: tokenizing with the slower reference; gigatoken is not used: %s",
                self._reference.name,
                reason,
            )
        raise Refused(self._refusal)

    def _stop_if_over(self) -> None:
        if self._wrong:
            # Not a bad row: an engine that skips bad rows must stop here.
            raise BrokenStageError(
                f"gigatoken, the fast tokenizer, gave wrong ids with {self._reference.name}: {self._wrong}; rows "
                "delivered before may be wrong too: delete the output of this run, do not resume it, and run again "
                "with load_tokenizer(..., fast=False) or Tokenize(..., fast=False)"
            )
        if self._refusal is not None:
            raise Refused(self._refusal)

    def _for_reference(self, texts: pa.Array, data: Utf8) -> Flags | None:
        """The rows on which the two are not proven to agree."""
        trapped = self._trapped(texts)
        if trapped is not None and not trapped.any():
            trapped = None  # usually: then no row is copied
        assert self._characters is not None
        try:
            outside = self._characters.outside(data if trapped is None else utf8(texts.filter(arrow_of(~trapped))))
        except BaseException as error:  # noqa: BLE001 - a panic in Rust is not an Exception
            self._refuse(f"it failed: {_first_line(error)}")
        if outside is None:
            return trapped
        if trapped is None:
            trapped = np.zeros(len(texts), np.bool_)
        trapped[np.flatnonzero(~trapped)[outside]] = True
        if not self._reference_rows:
            row = texts[int(np.flatnonzero(trapped)[0])].as_py()
            log.info(
                "%s: rows with characters that gigatoken is not proven to treat as the reference does, such as %.80r, "
                "take the slower reference",
                self._reference.name,
                row,
            )
        self._reference_rows += int(outside.sum())
        return trapped

    def _trapped(self, texts: pa.Array) -> Flags | None:
        return None if self._traps is None else flags(pc.match_substring_regex(texts, pattern=self._traps))


class FastBackend:
    """A gigatoken backend for all threads.

    Each call takes one of its encoders, which have word caches of their own, so threads never wait for a lock; there
    are as many encoders as cores. A thread beyond that, or beyond what the caches may take, waits for its turn. A piece
    below `PIECE_BYTES` is encoded by the calling thread, a longer row by the threads of gigatoken.
    """

    def __init__(self, model: FastModel, allowed: int, vocab_size: int) -> None:
        import awkward  # type: ignore[import-untyped,unused-ignore]

        self.allowed = allowed
        self._awkward = awkward
        self._load = model.load
        self._dtype, self._vocab_size = narrowest(vocab_size).to_pandas_dtype(), vocab_size
        cache_bytes = 700 * vocab_size  # of one encoder, as measured with 8 and 128 thousand
        self._turns = threading.BoundedSemaphore(max(1, min(available_cores(), allowed // 2 // cache_bytes)))
        self._loading = renewed(threading.Lock())
        self._backend: Any = self._load()
        # Loading time grows with the vocabulary, and with it the text between two loads.
        self._least_text = max(CACHE_LEAST_TEXT, 500 * vocab_size)
        self._text_bytes = 0
        self._resident = resident_bytes()

    def encode(self, data: Utf8) -> Ragged:
        with self._turns:
            rows = Ragged.joined([self._encode(piece) for piece in _pieces(data)])
        self._look_at_memory(len(data.data))
        return rows

    def _encode(self, data: Utf8) -> Ragged:
        made = self._loaded().encode_batch(self._given(data), parallel=_parallel()).layout
        bounds = np.asarray(made.offsets.data, np.int64)
        # Narrow at once: joining the pieces then moves half of the bytes.
        ids = np.asarray(made.content.data)[bounds[0] : bounds[-1]]
        if len(ids) and ids.max() >= self._vocab_size:  # narrowed, it could be another id
            raise ValueError(f"it gave the id {ids.max()}, beyond a vocabulary of {self._vocab_size}")
        ids = ids.astype(self._dtype, copy=False)
        return Ragged(ids, bounds - bounds[0])

    def _given(self, data: Utf8) -> Any:
        """The rows in the cheaper form: an awkward array is a view, but takes a tenth of a millisecond."""
        if len(data.offsets) <= FEW_ROWS and len(data.data) <= FEW_BYTES:
            whole = data.data.tobytes()
            return [whole[start:stop] for start, stop in itertools.pairwise(data.offsets.tolist())]
        return text_view(self._awkward, data)

    def _loaded(self) -> Any:
        backend = self._backend
        if backend is None:
            with self._loading:
                backend = self._backend
                if backend is None:
                    backend = self._backend = self._load()
        return backend

    def _look_at_memory(self, text_bytes: int) -> None:
        """Drop the backend if the process has grown; the next thread that needs it loads it again."""
        self._text_bytes += text_bytes
        now = resident_bytes()
        # Compared with the minimum: what another thread still uses is freed later.
        self._resident = min(self._resident, now)
        if now - self._resident > self.allowed and self._text_bytes > self._least_text:
            self._backend = None
            self._text_bytes, self._resident = 0, resident_bytes()


def text_view(ak: Any, data: Utf8) -> Any:
    """The rows as an awkward array of strings."""
    made = ak.Array(
        ak.contents.ListOffsetArray(
            ak.index.Index64(data.offsets.astype(np.int64, copy=False)),
            ak.contents.NumpyArray(data.data, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
    )
    made.__class__ = _text_view_class(ak)
    return made


@functools.cache
def _text_view_class(ak: Any) -> type:
    class TextView(ak.Array):  # type: ignore[misc]
        """Array of strings that gives its buffers itself.

        gigatoken takes them by three functions of awkward, which make about two thousand calls of Python with the
        interpreter lock held. An array may do the work of such a function by `__awkward_function__`.
        """

        def __awkward_function__(self, function: Any, arrays: Any, args: Any, kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs:
                match function.__name__:
                    case "without_parameters":
                        return self
                    case "flatten":
                        return self.layout.content.data
                    case "num":
                        return np.diff(self.layout.offsets.data)
            self.__class__ = ak.Array  # another version of gigatoken
            return function(*args, **kwargs)

    return TextView


def _pieces(data: Utf8) -> Iterator[Utf8]:
    """Rows in pieces below `PIECE_BYTES`; a longer row is a piece of its own."""
    if len(data.data) < PIECE_BYTES:
        yield data
        return
    offsets, start = data.offsets, 0
    while start < len(offsets) - 1:
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + PIECE_BYTES, "left")) - 1)
        yield Utf8(data.data[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start])
        start = stop


def _parallel() -> bool:
    """False in a forked process, which has none of the threads of gigatoken: there one lock serves all threads."""
    if multiprocessing.parent_process() is None:
        return not _forked
    return multiprocessing.get_start_method(allow_none=True) == "spawn"


def _first_line(error: BaseException) -> str:
    """The first line of an error; an interrupt is raised again."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return next(iter(str(error).splitlines()), type(error).__name__)
