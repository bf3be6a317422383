"""Take personal data and secrets out of text: e-mail addresses, phone numbers, IP addresses, keys.

Arrow looks for rows that may hold something, on the whole column at once; only those become Python strings, where each
find is checked before it is replaced.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.transforms._counts import Counting
from penstock.transforms.columns import as_names, flags, one_or_list
from penstock.transforms.text import rewrite

__all__ = ["ScrubPII"]

REPLACEMENTS = {"email": "<EMAIL>", "phone": "<PHONE>", "ip": "<IP>", "key": "<KEY>"}


@dataclass(frozen=True, slots=True)
class Finder:
    """One form of what is looked for."""

    kind: str
    hint: str
    """RE2: every row with a find matches it, and few others do."""
    pattern: re.Pattern[str]
    valid: Callable[[str], bool] = bool


class ScrubPII(Counting):
    """Replace personal data and secrets in text columns. Rows stay; those changed are counted as `"pii: <kind>"`.

    Kinds, in this order: `key` (AWS, GitHub, OpenAI, Slack, Google, Stripe and Hugging Face keys, JSON web tokens,
    private key blocks, and strings of 32 characters or more as random as `min_entropy` bits per character), `email`,
    `ip` (IPv4 and IPv6; only addresses reachable from the internet unless `public_ips_only=False`), `phone` (with a
    country code, or in the North American form).

    What has no fixed form is found by likeness: version numbers in four parts look like IP addresses, and keys without
    a prefix are told from long identifiers by their entropy alone. Hexadecimal digests are left alone.
    """

    def __init__(
        self,
        columns: str | Iterable[str] = "text",
        *,
        kinds: Iterable[str] = ("key", "email", "ip", "phone"),
        replacements: Mapping[str, str] | None = None,
        public_ips_only: bool = True,
        min_entropy: float | None = 4.5,
    ) -> None:
        super().__init__()
        self.columns = as_names(columns)
        self.kinds = tuple(kind for kind in ("key", "email", "ip", "phone") if kind in set(kinds))
        for kind in {*kinds, *(replacements or ())}:
            if kind not in REPLACEMENTS:
                raise ValueError(f"no kind is called {kind!r}; there are {', '.join(REPLACEMENTS)}")
        if not self.kinds:
            raise ValueError(f"kinds must name at least one of {', '.join(REPLACEMENTS)}, got none")
        self.replacements = REPLACEMENTS | dict(replacements or {})
        self.public_ips_only, self.min_entropy = public_ips_only, min_entropy
        self._finders = [finder for finder in _finders(public_ips_only, min_entropy) if finder.kind in self.kinds]

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        changed: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}

        def scrub(text: pa.Array) -> pa.Array:
            for finder in self._finders:
                text, rows = self._replaced(text, finder)
                if rows is not None:
                    changed[finder.kind] = changed[finder.kind] | rows if finder.kind in changed else rows
            return text

        batch = rewrite(batch, self.columns, scrub)
        self.count_kept({f"pii: {kind}": int(np.count_nonzero(rows)) for kind, rows in changed.items()})
        return batch

    def _replaced(
        self, text: pa.Array, finder: Finder
    ) -> tuple[pa.Array, np.ndarray[tuple[int], np.dtype[np.bool_]] | None]:
        rows = flags(pc.match_substring_regex(text, pattern=finder.hint))
        if not rows.any():
            return text, None
        replacement = self.replacements[finder.kind]

        def replace(found: re.Match[str]) -> str:
            return replacement if finder.valid(found[0]) else found[0]

        before = text.filter(pa.array(rows)).to_pylist()
        after = [finder.pattern.sub(replace, row) for row in before]
        differs = np.array([old != new for old, new in zip(before, after)], np.bool_)
        if not differs.any():
            return text, None
        text = pc.replace_with_mask(text, pa.array(rows), pa.array(after, text.type))
        changed = rows.copy()
        changed[rows] = differs
        return text, changed

    def describe(self) -> str:
        """Name, version and every option: equal strings give equal text."""
        chosen = {kind: self.replacements[kind] for kind in self.kinds}
        return (
            f"pii/1(columns={list(self.columns)}, replacements={chosen}, public_ips_only={self.public_ips_only}, "
            f"min_entropy={self.min_entropy})"
        )

    @property
    def fingerprint(self) -> str:
        """A short hash of `describe()`, for content keys."""
        return xxhash.xxh3_128_hexdigest(self.describe().encode())

    def __repr__(self) -> str:
        return f"ScrubPII({one_or_list(self.columns)}, kinds={list(self.kinds)})"


_KEYS = (
    r"(?<![A-Z0-9])(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}(?![A-Z0-9])",
    r"\bgh[pousr]_[A-Za-z0-9]{36,255}\b",
    r"\bgithub_pat_[A-Za-z0-9_]{22,255}\b",
    r"\bsk-(?:proj-|ant-|or-)?[A-Za-z0-9_-]{20,255}",
    r"\bxox[abeprs]-[A-Za-z0-9-]{10,255}",
    r"\bAIza[0-9A-Za-z_-]{35}(?![\w-])",
    r"\bhf_[A-Za-z0-9]{30,64}\b",
    r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,255}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
)
_KEY_HINT = (
    r"A(?:KIA|SIA|GPA|IDA|ROA|NPA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_|sk-|xox[abeprs]-|AIza|hf_|"
    r"[sr]k_(?:live|test)_|eyJ"
)
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_NOT_IN_NUMBER = r"(?<![\w.+\-/])"


def _finders(public_ips_only: bool, min_entropy: float | None) -> list[Finder]:
    block = r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)"
    finders = [
        Finder("key", "PRIVATE KEY-----", re.compile(block, re.DOTALL)),
        Finder("key", _KEY_HINT, re.compile("|".join(_KEYS))),
    ]
    if min_entropy is not None:
        finders.append(
            Finder(
                "key",
                r"[A-Za-z0-9_+/\-]{32}",
                re.compile(r"(?<![\w+/=.-])[A-Za-z0-9_+/-]{32,256}={0,2}(?![\w+/=.-])"),
                partial(is_random, min_entropy=min_entropy),
            )
        )
    reachable = partial(is_address, public_only=public_ips_only)
    return [
        *finders,
        Finder(
            "email",
            "@",
            re.compile(
                r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w@]|-\w)"
            ),
        ),
        Finder(
            "ip",
            r"\d\.\d{1,3}\.\d{1,3}\.\d",
            re.compile(rf"(?<![\w.])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w]|\.\d)"),
            reachable,
        ),
        Finder(
            "ip",
            r":[0-9A-Fa-f]{1,4}:",
            re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{2,39}(?![\w:])"),
            reachable,
        ),
        Finder(
            "phone",
            r"\+[1-9]\d",
            re.compile(
                rf"{_NOT_IN_NUMBER}\+[1-9](?:\d{{7,14}}|"
                r"\d{0,2}[ .-](?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){0,3}[ .-]?\d{3,4})(?![\w]|[.-]\d)"
            ),
            lambda found: 8 <= sum(map(str.isdigit, found)) <= 15,
        ),
        Finder(
            "phone",
            r"\+[1-9] |\d{3}\)?[ .\-]\d{3}[ .\-]\d{4}",
            re.compile(
                rf"{_NOT_IN_NUMBER}(?:\+?1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[ .-]\d{{4}}(?![\w]|[.-]\d)"
            ),
        ),
    ]


def is_random(text: str, *, min_entropy: float) -> bool:
    """Whether a string is as mixed as a key: upper case, lower case and digits, and high entropy."""
    if min(sum(map(test, text)) for test in (str.isupper, str.islower, str.isdigit)) < 3:
        return False
    counts = Counter(text)
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())
    return entropy >= min_entropy


def is_address(text: str, *, public_only: bool) -> bool:
    """Whether this is an IP address (and not, say, a time or a name with colons)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6:
        groups = [group for group in text.split(":") if group]
        if len(groups) < 3 or not any(character.isdigit() for character in text):
            return False
    return address.is_global or not public_only
