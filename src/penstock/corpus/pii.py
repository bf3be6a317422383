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

from penstock.arrays.text import flags
from penstock.transforms.columns import as_names, one_or_list
from penstock.transforms.counts import CountingTransform
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
    wanted: Callable[[str], int] = len
    """Number of characters to replace, from the start of the match; 0 if the match is no finding."""


class ScrubPII(CountingTransform):
    """Replace personal data and secrets in text columns. Rows stay; those changed are counted as `"pii: <kind>"`.

    Kinds, in this order: `key` (AWS, GitHub, OpenAI, Slack, Google, Stripe and Hugging Face keys, JSON web tokens,
    private key blocks, and strings of 32 characters or more as random as `min_entropy` bits per character), `email`,
    `ip` (IPv4 and IPv6; only addresses reachable from the internet unless `public_ips_only=False`), `phone` (with a
    country code, or in the North American form).

    What has no fixed form is found by likeness: version numbers in four parts look like IP addresses, and keys without
    a prefix differ from long identifiers by their entropy and by how much of them looks like words. Hexadecimal
    digests are left alone, and so are phone numbers that could be decimal numbers, such as +1.4155550123. Takes time in
    proportion to the text.
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
                raise ValueError(f"unknown kind {kind!r}; valid kinds: {', '.join(REPLACEMENTS)}")
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
            wanted = finder.wanted(found[0])
            return replacement + found[0][wanted:] if wanted else found[0]

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
            f"pii/2(columns={list(self.columns)}, replacements={chosen}, public_ips_only={self.public_ips_only}, "
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
    r"\bxox[abeprs]-[A-Za-z0-9-]{10,255}",
    r"\bAIza[0-9A-Za-z_-]{35}(?![\w-])",
    r"\bhf_[A-Za-z0-9]{30,64}\b",
    r"\b[sr]k_(?:live|test)_[A-Za-z0-9]{16,255}\b",
    # Begins only where a run of its characters does, and never gives one back: a run is looked at three times at most.
    r"(?<![\w-])eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]{8,}",
)
_KEY_HINT = (
    r"A(?:KIA|SIA|GPA|IDA|ROA|NPA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_|xox[abeprs]-|AIza|hf_|"
    r"[sr]k_(?:live|test)_|eyJ"
)
# Up to the next five dashes, which must be its end; or, cut off, as many lines as can only be of a key.
_BLOCK = (
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"
    r"(?:[^-]*+(?:-(?!----)[^-]*+)*+-----END [A-Z ]{0,20}PRIVATE KEY-----|"
    r"(?:(?:\s|\\[rn])++[A-Za-z0-9+/]{40,}+={0,2})*+(?:(?:\s|\\[rn])++[A-Za-z0-9+/]++={0,2}\s*+\Z)?)"
)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NOT_IN_NUMBER = r"(?<![\w.+\-/])"
_GAP = "[ .\u00a0\u202f\u2011-]"
# Groups end where their digits do, so there is one way to read a number, and none to go back to.
_PHONE = (
    rf"{_NOT_IN_NUMBER}\+[1-9][0-9]{{0,14}}+(?:{_GAP}?\([0-9]{{1,5}}\){_GAP}?[0-9]{{1,12}}+)?"
    rf"(?:{_GAP}[0-9]{{1,12}}+){{0,6}}(?!\w|[.:-]\d)"
)
_COUNTRIES = re.compile(
    "1|7|2(?:0|7|1[12368]|[2346][0-9]|5[0-8]|9[01789])|3(?:[0-469]|5[0-9]|7[0-8]|8[0-35-79])|4(?:[013-9]|2[013])|"
    "5(?:[1-8]|0[0-9]|9[0-9])|6(?:[0-6]|7[02-9]|8[0-35-9]|9[0-2])|8(?:[1246]|0[08]|5[02356]|7[08]|8[0-36])|"
    "9(?:[0-58]|6[0-8]|7[0-79]|9[2-68])"
)
"""The country codes in use."""


def _finders(public_ips_only: bool, min_entropy: float | None) -> list[Finder]:
    finders = [
        Finder("key", "PRIVATE KEY-----", re.compile(_BLOCK), _if(is_key_block)),
        Finder("key", _KEY_HINT, re.compile("|".join(_KEYS), re.ASCII)),
        Finder(
            "key", r"\bsk-[A-Za-z0-9_\-]{20}", re.compile(r"\bsk-[A-Za-z0-9_-]{20,255}", re.ASCII), _if(has_key_part)
        ),
    ]
    if min_entropy is not None:
        finders.append(
            Finder(
                "key",
                r"[A-Za-z0-9_+/\-]{32}",
                re.compile(r"(?<![\w+/.-])[A-Za-z0-9_+/-]{32,256}+={0,2}+(?![\w+/=-]|\.\w)", re.ASCII),
                _if(partial(is_random, min_entropy=min_entropy)),
            )
        )
    reachable = _if(partial(is_address, public_only=public_ips_only))
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
            r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]",
            re.compile(rf"(?<![\w.])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w]|\.\d)"),
            reachable,
        ),
        Finder(
            "ip",
            r":[0-9A-Fa-f]{1,4}:",
            re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{2,39}(?![\w:])"),
            reachable,
        ),
        Finder("phone", r"\+[1-9]", re.compile(_PHONE), phone_length),
        Finder(
            "phone",
            r"[0-9]{3}\)?[ .\-]?[0-9]{3}[ .\-][0-9]{4}",
            re.compile(
                rf"{_NOT_IN_NUMBER}(?:\+?1[ .-])?(?:\([2-9][0-9]{{2}}\) ?|[2-9][0-9]{{2}}[ .-])"
                r"[2-9][0-9]{2}[ .-][0-9]{4}(?!\w|[.-]\d)"
            ),
        ),
    ]


def _if(test: Callable[[str], bool]) -> Callable[[str], int]:
    return lambda found: len(found) if test(found) else 0


def is_key_block(text: str) -> bool:
    """True if a private key follows its first line, and not a text about private keys."""
    body = text.split("-----", 3)[2].replace("\\n", " ").replace("\\r", " ").split()
    return bool(body) and (len(body) < 4 or sum(map(len, body)) >= 16 * len(body))


def has_key_part(text: str) -> bool:
    """True if a part between dashes mixes 16 or more letters and digits, as no word does."""
    parts = re.findall(r"[A-Za-z0-9]{16,}", text[3:])
    return any(sum(map(str.isdigit, part)) >= 2 and not part.isdigit() for part in parts)


def is_random(text: str, *, min_entropy: float) -> bool:
    """True if a string looks like a key: upper case, lower case and digits, high entropy, no words.

    What looks like a word, four letters in a row with a vowel and no capital but the first, is rare in a key.
    """
    if min(sum(map(test, text)) for test in (str.isupper, str.islower, str.isdigit)) < 3:
        return False
    counts = Counter(text)
    entropy = -sum(n / len(text) * math.log2(n / len(text)) for n in counts.values())
    return entropy >= min_entropy and sum(map(len, _WORD.findall(text))) < 0.4 * len(text)


_WORD = re.compile(r"[A-Z]?(?=[a-z]*[aeiouy])[a-z]{3,}|[AEIOU][a-z]{3,}")


def is_address(text: str, *, public_only: bool) -> bool:
    """True for an IP address, and not for a time, a name with colons, or the address of a network card."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6:
        groups = text.split(":")
        if all(len(group) == 2 for group in groups):
            return False
        if sum(map(bool, groups)) < 3 or not any(character.isdigit() for character in text):
            return False
    plain = getattr(address, "ipv4_mapped", None) or address  # Python's answer for the mapped form changed with 3.13
    return bool(plain.is_global) or not public_only


def phone_length(text: str) -> int:
    """Length of the phone number in a plus sign and groups of digits: the most groups that form one, or 0."""
    ends = [found.end() for found in re.finditer(r"[0-9]+", text)]
    return next((end for end in reversed(ends) if is_phone(text[:end])), 0)


def is_phone(text: str) -> bool:
    """True for a number that can be dialled: a country code in use, and a length that is valid there."""
    if text.count("(") != text.count(")") or re.fullmatch(r"\+[0-9]+\.[0-9]+", text):
        return False  # the latter is a decimal number
    digits = re.sub("[^0-9]", "", text.replace("(0)", ""))
    country = _COUNTRIES.match(digits)
    if country is None or len(digits) > 15:
        return False
    code, number = country[0], digits[country.end() :]
    if code == "1":
        return bool(re.fullmatch("[2-9][0-9]{2}[2-9][0-9]{6}", number))
    if code == "7":
        return len(number) == 10 and number[0] != "0"
    # Only in Italy do numbers begin with a zero after the country code.
    return len(number) >= (7 if len(code) < 3 else 5) and (number[0] != "0" or code == "39")
