"""Writes `input.txt`, the text that the shipped dataset is made of: a small grammar and a fixed seed, nothing else.

    python data/char_diffusion/make_input.py

Every paragraph is about one person of a valley with a mill: the name decides the trade and the pronoun, nouns and verbs
agree in number, sums are right. So a hidden character can be told from those around it, some of them far away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

CHARACTERS = 240_000
SEED = 20_250_607

T = TypeVar("T")


class Person(NamedTuple):
    name: str
    trade: str
    trades: str
    he: str
    his: str


class Noun(NamedTuple):
    one: str
    many: str


class Verb(NamedTuple):
    does: str
    do: str
    did: str


MEN = "Anton/miller Bruno/smith Karl/baker Oskar/mason Pavel/shepherd Viktor/joiner Jonas/ferryman/ferrymen"
WOMEN = "Clara/teacher Edith/weaver Greta/gardener Hanna/doctor Ida/beekeeper Ruth/potter Louise/forewoman/forewomen"


def words(line: str) -> list[str]:
    return line.split()


def people(line: str, he: str, his: str) -> list[Person]:
    """Name and trade, and the plural of the trade if it is not made with an s."""
    parts = [word.split("/") for word in words(line)]
    return [Person(name, trade, (*plural, trade + "s")[0], he, his) for name, trade, *plural in parts]


def nouns(line: str) -> list[Noun]:
    """`cow goose/geese`: the plural stands behind the stroke, or has an s."""
    return [Noun(one, many or one + "s") for one, _, many in (word.partition("/") for word in words(line))]


def verbs(line: str) -> list[Verb]:
    return [Verb(*word.split("/")) for word in words(line)]


PEOPLE = people(MEN, "he", "his") + people(WOMEN, "she", "her")
THINGS = nouns(
    "basket barrel bucket candle chair door gate hammer kettle lamp ladder letter plough pump rope saddle table"
)
THINGS += nouns("wagon wheel window knife/knives shelf/shelves brush/brushes")
ANIMALS = nouns("cow dog duck goat hen horse owl pigeon swallow trout/trout goose/geese fox/foxes mouse/mice")
WORKS = verbs("mends/mend/mended paints/paint/painted sells/sell/sold carries/carry/carried finds/find/found")
MOVES = verbs("sleeps/sleep/slept waits/wait/waited hides/hide/hid rests/rest/rested stands/stand/stood")
LOOKS = words("big broken fine green grey heavy new old red small")
TEMPERS = words("clever hungry lazy proud quiet shy tired wild young")
PLACES = ["by the river", "at the market", "in the yard", "behind the barn", "behind the church", "behind the hedge"]
PLACES += ["under the bridge", "under the oak", "under the roof"]
STUFF = [("sack", "flour"), ("jar", "honey"), ("bag", "salt"), ("bottle", "oil"), ("crate", "apples"), ("bale", "hay")]
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = words("zero one two three four five six seven eight nine ten eleven twelve")
WEATHER = [
    ("it rained", "the river rose", "the gate was opened"),
    ("it snowed", "the pond froze", "the wheel was stopped"),
    ("the sun shone", "the grass grew", "the hay was cut"),
    ("the wind blew", "the leaves fell", "the doors were shut"),
    ("it was foggy", "the ferry stayed ashore", "the bell was rung"),
]


class Chance(random.Random):
    """Draws from `random()` alone, whose numbers are the same in every version of Python."""

    def one(self, things: Sequence[T]) -> T:
        return things[int(self.random() * len(things))]

    def two(self, things: Sequence[T]) -> tuple[T, T]:
        first, step = int(self.random() * len(things)), 1 + int(self.random() * (len(things) - 1))
        return things[first], things[(first + step) % len(things)]

    def number(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))


def another(chance: Chance, person: Person) -> Person:
    return chance.one([other for other in PEOPLE if other != person])


def deed(chance: Chance, person: Person) -> str:
    day, verb, kind, noun = chance.one(DAYS), chance.one(WORKS), chance.one(LOOKS), chance.one(THINGS)
    return f"On {day} {person.name} the {person.trade} {verb.did} the {kind} {noun.one} {chance.one(PLACES)}."


def trade(chance: Chance, person: Person) -> str:
    count, (vessel, stuff), other = chance.number(2, 12), chance.one(STUFF), another(chance, person)
    price = chance.number(11, 99)
    sold = f"{NUMBERS[count]} {vessel}s of {stuff}"
    return f"{person.he.title()} sold {sold} to {other.name} the {other.trade} for ${price}."


def animals(chance: Chance, person: Person) -> str:
    (first, second), (verb, other) = chance.two(ANIMALS), chance.two(MOVES)
    place, kind = chance.one(PLACES), chance.one(TEMPERS)
    if chance.random() < 0.5:
        return f"{person.his.title()} {first.many} {verb.do} {place}, but the {kind} {second.one} {other.does}."
    return f"{person.his.title()} {first.one} {verb.does} {place}, but the {kind} {second.many} {other.do}."


def question(chance: Chance, person: Person) -> str:
    noun, place, other = chance.one(THINGS), chance.one(PLACES), another(chance, person)
    if chance.random() < 0.5:
        return f'"Where are the {noun.many}?" asked {other.name}. "They are {place}!" said {person.name}.'
    return f'"Where is the {noun.one}?" asked {other.name}. "It is {place}!" said {person.name}.'


def weather(chance: Chance, person: Person) -> str:
    happened, after, then = chance.one(WEATHER)
    hour, quarter = chance.number(5, 11), chance.one(["00", "15", "30", "45"])
    return f"At {hour}:{quarter} {happened}; {after}, and {then}."


def sum_up(chance: Chance, person: Person) -> str:
    first, second, noun = chance.number(1, 6), chance.number(1, 6), chance.one(ANIMALS)
    counted = noun.one if first == 1 else noun.many
    total = f"{NUMBERS[first + second]} {noun.many}"
    return f"{person.he.title()} counted {NUMBERS[first]} {counted} and {NUMBERS[second]} more: {total}."


def custom(chance: Chance, person: Person) -> str:
    verb, (noun, other) = chance.one(WORKS), chance.two(THINGS)
    if chance.random() < 0.5:
        return f"The {person.trade} {verb.does} {noun.many}, and {person.he} {chance.one(WORKS).does} {other.many} too."
    return f"The {person.trades} {verb.do} {noun.many}, and they {chance.one(WORKS).do} {other.many} too."


SENTENCES: list[Callable[[Chance, Person], str]] = [trade, animals, question, weather, sum_up, custom]


def make_text(characters: int = CHARACTERS, seed: int = SEED) -> str:
    """Paragraphs, each on a line of its own, until there are so many characters; the last one is whole."""
    chance, paragraphs, length = Chance(seed), [], 0
    while length < characters:
        person = chance.one(PEOPLE)
        sentences = [deed(chance, person)]
        sentences += [chance.one(SENTENCES)(chance, person) for _ in range(chance.number(2, 5))]
        paragraphs.append(" ".join(sentences) + "\n")
        length += len(paragraphs[-1])
    return "".join(paragraphs)


if __name__ == "__main__":
    (Path(__file__).parent / "input.txt").write_bytes(make_text().encode("utf-8"))
