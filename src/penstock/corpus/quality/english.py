"""English words by rule: punctuation split off, contractions in two, abbreviations and addresses whole.

The rules are those of the tokenizer most filter pipelines use for English (spaCy's, without a model), as far as they
can be told in a page: a stretch without whitespace loses punctuation at its front, then at its end, and the middle is
cut at hyphens, slashes and the like between letters - unless it is an exception or an address. On web text one
stretch in twenty thousand comes out otherwise, in source code one in a thousand: punctuation that happens to look like
an emoticon is left in two.
"""

# ruff: noqa: RUF001, SIM905
from __future__ import annotations

import functools
import re

from penstock.corpus.quality.characters import (
    CURRENCY,
    CURRENCY_SIGNS,
    ICON,
    LETTER,
    LOWER,
    MARK,
    PUNCTUATION,
    QUOTE,
    SENTENCE_END,
    UPPER,
    characters,
)

__all__ = ["LONGEST_EXCEPTION", "count_sentences", "exceptions", "split_english"]

UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa "
    "mbar mb MB kb KB gb GB tb TB T G M K %"
).split()
"""Split off after a digit."""

_ABBREVIATIONS = """
Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. e.g. Feb. Fla.
Ga. Gen. Gov. I.E. I.e. i.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs.
Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa.
Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. p.m. v.s. vs. ä. ö. ü.
"""
_UNTITLED = r"""
and/or w/o C++ 'em em 'll ll 're 's 'S ‘s ‘S 'd 'nuff nuff 'bout '' ' — <space> \t \n \")
"""
_EMOTICONS = r"""
:) :)) :))) :( :(( :((( :() :* :/ :0 :1 :3 :> :D :O :P :X :] :o :o) :p :x :| :} :-) :-)) :-))) :-( :-(( :-((( :-* :-/
:-0 :-3 :-> :-D :-O :-P :-X :-] :-o :-p :-x :-| :-} :'( :') :'-( :'-) ;) ;-) ;-D ;D ;_; =( =) =/ =3 =D =[ =] =| (-8 (-:
(-; (: (; (= (o: )-: ): [-: [: [= ]= 8) 8-) 8-D 8D <3 <33 <333 </3 <.< >.< >.> >:( >:o ><(((*> @_@ ^_^ ^__^ ^___^ -_-
-__- ._. (*_*) (-_-) (._.) (>_<) (^_^) (¬_¬) (ಠ_ಠ) ಠ_ಠ ಠ︵ಠ 0.0 0.o 0_0 0_o o.0 o.O o.o o_0 o_O o_o O.O O.o O_O
O_o V.V V_V v.v v_v XD XDD xD xDD ¯\(ツ)/¯
"""
_CLIPPED = "doin goin havin lovin nothin nuthin somethin ol"
_CAPITALISED_TOO = "'cause 'cos 'coz 'cuz ma'am o'clock"
_PRONOUNS = {
    "i": "m m-a ll ll-ve d d-ve ve",
    "you": "ll ll-ve d d-ve ve re",
    "he": "ll ll-ve d d-ve s",
    "she": "ll ll-ve d d-ve s",
    "it": "ll ll-ve d d-ve s",
    "we": "ll ll-ve d d-ve ve re",
    "they": "ll ll-ve d d-ve ve re",
}
_WH = "s ll ll-ve re ve d d-ve"
_ENDINGS = {
    **_PRONOUNS,
    **dict.fromkeys("who what when where why how there".split(), _WH),
    **dict.fromkeys("that this".split(), "s ll ll-ve d d-ve"),
    **dict.fromkeys("these those".split(), "ll ll-ve re ve d d-ve"),
    **dict.fromkeys("could might must should would not".split(), "ve"),
}
_NEGATED = "ca could do does did had may might must need ought sha should wo would"
_NEGATED_ONLY = "ai are is was were have has dare"
_WHOLE = "ill its hell shell shed were well whore".split()
_OTHERS = {"cannot": 3, "gonna": 3, "gotta": 3, "let's": 3, "c'mon": 3}


@functools.cache
def exceptions() -> dict[str, tuple[int, ...]]:
    """Stretches that the rules below would split wrongly, and the lengths of the words they are."""
    found: dict[str, tuple[int, ...]] = {f"{letter}.": (2,) for letter in "abcdefghijklmnopqrstuvwxyz"}
    for clipped in _CLIPPED.split():
        found |= {word: (len(word),) for word in (clipped, clipped + "'")}
    found |= {word: (len(word),) for word in _CAPITALISED_TOO.split()}
    found |= {word: (at, len(word) - at) for word, at in _OTHERS.items()}
    found |= {f"{hour}{half}": (len(str(hour)), len(half)) for hour in range(1, 13) for half in ("am", "pm")}
    found |= {f"{hour}{half}": (len(str(hour)), len(half)) for hour in range(1, 13) for half in ("a.m.", "p.m.")}
    for word, endings in _ENDINGS.items():
        for ending in endings.split():
            parts = ending.split("-")
            with_mark = ["'" + part if part != "a" else part for part in parts]
            found[word + "".join(with_mark)] = (len(word), *map(len, with_mark))
            found[word + "".join(parts)] = (len(word), *map(len, parts))
    for verb in (_NEGATED + " " + _NEGATED_ONLY).split():
        for negation, tail in (("n't", "'ve"), ("nt", "ve")):
            found[verb + negation] = (len(verb), len(negation))
            if verb in _NEGATED.split():
                found[verb + negation + tail] = (len(verb), len(negation), len(tail))
    capitalised = {_capitalised(word): cut for word, cut in found.items() if word[-1] != "."}
    found |= capitalised
    found |= {word: (len(word),) for word in (_ABBREVIATIONS + _UNTITLED + _EMOTICONS).split()}
    found |= {f"°{scale}.": (1, 1, 1) for scale in "CFKcfk"}
    found["y'all"], found["yall"] = (2, 3), (1, 3)
    found |= {word.replace("'", "’"): cut for word, cut in found.items() if "'" in word}
    return {word: cut for word, cut in found.items() if word.lower() not in _WHOLE}


def _capitalised(word: str) -> str:
    at = 1 if word[0] == "'" else 0
    return word[:at] + word[at : at + 1].upper() + word[at + 1 :]


LONGEST_EXCEPTION = 20
"""In bytes: longer stretches need not be looked up."""

_HOST = r"(?:[A-Za-z0-9\x80-\U0010ffff](?:[A-Za-z0-9_\-\x80-\U0010ffff]{0,62}[A-Za-z0-9\x80-\U0010ffff])?\.)+"
ADDRESS = re.compile(
    r"(?:[A-Za-z0-9_+\-.]{2,}://)?(?:\S+@)?"
    rf"(?:[0-9]{{1,3}}(?:\.[0-9]{{1,3}}){{3}}|{_HOST}[a-z\x80-\U0010ffff]{{2,63}})"
    r"(?::[0-9]{2,5})?(?:[/?#]\S*)?\Z"
)
"""A web or mail address: not cut inside."""


def split_english(text: str) -> list[str]:
    """The words of a text."""
    return [word for stretch in text.split() for word in split_stretch(stretch)]


def split_stretch(stretch: str) -> tuple[str, ...]:
    """The words of a stretch without whitespace."""
    return _split_short(stretch) if len(stretch) <= 64 else _split(stretch)


@functools.lru_cache(1 << 16)
def _split_short(stretch: str) -> tuple[str, ...]:
    return _split(stretch)


def _split(stretch: str) -> tuple[str, ...]:
    special = exceptions()
    start, stop = 0, len(stretch)
    front: list[str] = []
    while start < stop and stretch[start:stop] not in special and (length := _prefix(stretch, start)):
        front.append(stretch[start : start + length])
        start += length
    back: list[str] = []
    while start < stop and stretch[start:stop] not in special and (length := _suffix(stretch, start, stop)):
        back.append(stretch[stop - length : stop])
        stop -= length
    return (*front, *_middle(stretch[start:stop]), *reversed(back))


def _middle(stretch: str) -> list[str]:
    words: list[str] = []
    if stretch in exceptions():
        for length in exceptions()[stretch]:
            words.append(stretch[:length])
            stretch = stretch[length:]
        return words
    if not stretch or ADDRESS.match(stretch):
        return [stretch] if stretch else []
    done = at = 0
    while at < len(stretch):
        length = _infix(stretch, at)
        if length:
            words += [word for word in (stretch[done:at], stretch[at : at + length]) if word]
            done = at + length
        at += length or 1
    return words + ([stretch[done:]] if done < len(stretch) else [])


def _prefix(s: str, start: int) -> int:
    """How many characters are split off the front."""
    first, second = s[start], s[start + 1 : start + 2]
    if first == "." and second == ".":
        return _dots(s, start)
    if first in characters(MARK | QUOTE | ICON | CURRENCY) or first in "§%=—–":
        return 1
    if first == "+" and not (second and second in "0123456789"):
        return 1
    return next((len(sign) for sign in ("US$", "C$", "A$") if s.startswith(sign, start)), 0)


def _suffix(s: str, start: int, stop: int) -> int:
    """How many characters are split off the end."""
    last = s[stop - 1]
    before = s[stop - 2] if stop - 2 >= start else ""
    if last == "." and before == ".":
        return _dots_before(s, start, stop)
    if last == "…" and before == "…":
        return 2
    if last in characters(MARK | QUOTE | ICON) or last in "—–":
        return 1
    if last in "sS" and before and before in "'’":
        return 2
    if last == ".":
        return int(_splits_period(s, start, stop, before))
    if last == "+":
        return int(before != "" and before in "0123456789")
    for length in range(min(5, stop - start - 1), 0, -1):
        if s[stop - length - 1] in "0123456789" and s[stop - length : stop] in _AFTER_DIGITS:
            return length
    return 0


def _splits_period(s: str, start: int, stop: int, before: str) -> bool:
    if not before:
        return False
    if before in "0123456789%²-+|" or before in characters(LOWER | MARK | QUOTE):
        return True
    earlier = s[stop - 3] if stop - 3 >= start else ""
    if earlier == "°" and before in "FCK":
        return True
    capitals = characters(UPPER)
    return before in capitals and earlier in capitals


def _infix(s: str, at: int) -> int:
    """How many characters at this place stand between two words."""
    here, after = s[at], s[at + 1 : at + 2]
    if here == "." and after == ".":
        return _dots(s, at)
    if here == "…" or here in characters(ICON):
        return 1
    if at == 0 or not after:
        return 0
    before = s[at - 1]
    letters, quotes = characters(LETTER), characters(QUOTE)
    if here in "+-*^" and before in "0123456789" and after in "0123456789-":
        return 1
    if here == ".":
        lower, upper = characters(LOWER), characters(UPPER)
        return int((before in lower or before in quotes) and (after in upper or after in quotes))
    if here == ",":
        return int(before in letters and after in letters)
    if before not in letters and before not in "0123456789":
        return 0
    if here in ":<>=/":
        return int(after in letters)
    for length in range(1, _HYPHENS.get(here, 0) + 1):
        if s[at : at + length] == here * length and s[at + length : at + length + 1] in letters:
            return length
    return 0


_HYPHENS = {"-": 3, "–": 1, "—": 2, "~": 1}
"""How many of them in a row may join two words."""
_AFTER_DIGITS = frozenset([*UNITS, *CURRENCY_SIGNS, "US$", "C$", "A$"])


def _dots(s: str, at: int) -> int:
    stop = at
    while stop < len(s) and s[stop] == ".":
        stop += 1
    return stop - at


def _dots_before(s: str, start: int, stop: int) -> int:
    at = stop
    while at > start and s[at - 1] == ".":
        at -= 1
    return stop - at


def count_sentences(words: list[str]) -> int:
    """Sentences end after a word that is one terminal mark, where a word that is no punctuation follows."""
    ends, punctuation = characters(SENTENCE_END), characters(PUNCTUATION)
    sentences, ended = min(len(words), 1), False
    for word in words:
        if word in ends:
            ended = True
        elif ended and not all(character in punctuation for character in word):
            sentences += 1
            ended = False
    return sentences
