"""Made-up Titanic files for examples, tests and measurements.

Columns, types, missing values and quoting are those of the real files; the people are invented, and survival depends on
the features, so that a model has something to learn. The same seed gives the same bytes.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local

Numbers = npt.NDArray[Any]


def make_titanic(directory: str | Path, *, rows: int = 891, test_rows: int = 418, seed: int = 0) -> Path:
    """Write train.csv, test.csv and sample_submission.csv of a made-up Titanic; returns their directory.

    About 62% do not survive; the true rule predicts four of five. An existing file with other content is an error.
    """
    train, test = titanic_table(rows, seed=seed), titanic_table(test_rows, seed=seed, first_id=rows + 1)
    women = pc.cast(pc.equal(test["Sex"], "female"), pa.int64())
    sample = pa.table({"PassengerId": test["PassengerId"], "Survived": women})
    return write_files(directory, train, known_categories(test, train).drop_columns("Survived"), sample, missing="")


def titanic_table(rows: int, *, seed: int = 0, first_id: int = 1) -> pa.Table:
    """Table of passengers in parties: a party shares surname, ticket, class and fare."""
    rng = generator(rows, seed, first_id)
    party, place, size = _parties(rng, rows)
    parties = int(party[-1]) + 1
    travel_class = rng.choice([1, 2, 3], parties, p=[0.24, 0.21, 0.55])
    klass, pair = travel_class[party], (rng.random(parties) < 0.6)[party]  # of two, a couple or a parent and a child

    child = ((place >= 2) | ((place == 1) & (size == 2) & ~pair)) & (size > 1)
    adults = np.where(size == 1, 1, np.where((size == 2) & ~pair, 1, 2))
    wed = ~child & (adults == 2)
    woman = np.where(wed, place == 1, rng.random(rows) < np.where(child, 0.5, 0.31))
    age = rng.normal(np.array([39.0, 31.0, 28.0])[klass - 1], 12.0).clip(15, 80).round()
    age = np.where(child, rng.integers(0, 17, rows), age + 0.5 * (rng.random(rows) < 0.03))
    age = np.where(age == 0, rng.choice([0.42, 0.67, 0.75, 0.83, 0.92], rows), age)
    siblings = np.where(child, size - adults - 1, wed.astype(np.int64))
    parents = np.where(child, adults, size - adults)

    middle, spread = np.array([46.0, 13.0, 7.6])[travel_class - 1], np.array([0.6, 0.25, 0.12])[travel_class - 1]
    pounds = middle * np.exp(spread * rng.standard_normal(parties)) * np.bincount(party) ** 0.75
    pounds[rng.random(parties) < 0.015] = 0.0
    fare = (np.round(pounds * 240) / 240).round(4)[party]  # whole pence, 240 to the pound
    port_draw = rng.random(parties)
    port = np.where(travel_class == 1, 1 + (port_draw > 0.4), np.where(port_draw < 0.13, 1, 2))
    port = np.where((travel_class == 3) & (port_draw > 0.85), 0, port)[
        party
    ]  # 0 Queenstown, 1 Cherbourg, 2 Southampton
    in_cabin = (rng.random(parties) < np.array([0.81, 0.09, 0.025])[travel_class - 1])[party]

    hope = np.where(woman, np.array([3.2, 2.3, 0.05])[klass - 1], np.array([-0.5, -1.7, -1.8])[klass - 1])
    hope = hope + np.where(~woman & (age < 14), 2.4, 0.0) - np.where(size > 4, 1.8, 0.0)
    hope = hope - 0.015 * (age - 30) + 0.4 * (port == 1) + 0.15 * np.log1p(fare) - 0.4
    survived = rng.random(rows) < 1 / (1 + np.exp(-1.7 * hope))
    survived[:2] = [True, False][:rows]  # of both there is one, however short the table

    columns = {
        "PassengerId": np.arange(first_id, first_id + rows),
        "Survived": survived.astype(np.int64),
        "Pclass": klass,
        "Name": _names(rng, party, woman, age, wed),
        "Sex": np.array(["male", "female"], object)[woman.astype(np.int64)],
        "Age": with_missing(age, rng.random(rows) > 0.2),
        "SibSp": siblings,
        "Parch": parents,
        "Ticket": _tickets(rng, travel_class)[party],
        "Fare": fare,
        "Cabin": with_missing(_cabins(rng, travel_class)[party], in_cabin),
        "Embarked": with_missing(np.array([*"QCS"], object)[port], rng.random(rows) > 0.002),
    }
    mixed = rng.permutation(rows)  # families do not stand together in the file
    return pa.table({n: pa.array((c if n == "PassengerId" else c[mixed]).tolist()) for n, c in columns.items()})


def generator(rows: int, seed: int, first_id: int) -> np.random.Generator:
    if rows < 1:
        raise ConfigError(f"rows must be positive, got {rows}")
    return np.random.default_rng([seed, first_id])


def with_missing(values: Numbers, present: Numbers) -> Numbers:
    """Values with None where not present; the first is always there, since a column needs a value."""
    kept = values.astype(object)
    kept[1:][~present[1:]] = None
    return kept


def _parties(rng: np.random.Generator, rows: int) -> tuple[Numbers, Numbers, Numbers]:
    """Party of each row, its place in the party, and the party's size (at most nine)."""
    starts = rng.random(rows) < 0.8
    starts[(np.flatnonzero(rng.random(rows) < 0.007)[:, None] + np.arange(1, 6)).clip(max=rows - 1)] = False
    starts[0] = True  # and now and then one of six or more
    position = np.arange(rows)
    since = position - np.maximum.accumulate(np.where(starts, position, 0))
    starts |= since % 9 == 0
    since = position - np.maximum.accumulate(np.where(starts, position, 0))
    party = np.cumsum(starts) - 1
    return party, since, np.bincount(party)[party]


def _names(rng: np.random.Generator, party: Numbers, woman: Numbers, age: Numbers, wed: Numbers) -> Numbers:
    """`Surname, Title. Given names`, a wife under her husband's with her own in brackets, some with a nickname."""
    rows = len(party)
    syllables = [np.array(part.split(), object) for part in _SYLLABLES]
    surname = sum((part[rng.integers(0, len(part), party[-1] + 1)] for part in syllables), start=np.array("", object))
    men, women = np.array(_MEN.split(), object), np.array(_WOMEN.split(), object)
    his = men[rng.integers(0, len(men), rows)] + " " + men[rng.integers(0, len(men), rows)]
    hers = women[rng.integers(0, len(women), rows)] + " " + women[rng.integers(0, len(women), rows)]
    bride = wed | (woman & (age > 22) & (rng.random(rows) < 0.3))
    title = np.where(woman, np.where(bride, "Mrs", "Miss"), np.where(age < 14, "Master", "Mr")).astype(object)
    rare = ~woman & (age > 25) & (rng.random(rows) < 0.03)
    title = np.where(rare, np.array(["Dr", "Rev", "Col", "Major"], object)[rng.integers(0, 4, rows)], title)
    given = np.where(woman, np.where(bride, his + " (" + hers + ")", hers), his)
    nick = np.where(rng.random(rows) < 0.05, ' "' + women[rng.integers(0, len(women), rows)] + '"', "")
    families: Numbers = np.asarray(surname, object)[party] + ", " + title + ". "
    return np.asarray(families + given + np.where(woman & ~bride, nick, ""))


def _tickets(rng: np.random.Generator, travel_class: Numbers) -> Numbers:
    prefixes = np.array(["", "", "", "", "PC ", "A/5 ", "C.A. ", "STON/O2. ", "SC/PARIS "], object)
    number = rng.permutation(len(travel_class)) + 1000 * (14 + 100 * travel_class)
    prefix = prefixes[rng.integers(0, len(prefixes), len(travel_class))]
    return np.asarray(prefix + np.array(number.astype(str), object))


def _cabins(rng: np.random.Generator, travel_class: Numbers) -> Numbers:
    decks = np.array(["ABCDE", "DEFFF", "EFGGG"])[travel_class - 1]
    chosen = rng.integers(0, 5, len(travel_class)).tolist()
    letters = np.array([deck[place] for deck, place in zip(decks.tolist(), chosen, strict=True)], object)
    return np.asarray(letters + np.array(rng.integers(1, 130, len(travel_class)).astype(str), object))


def known_categories(test: pa.Table, train: pa.Table) -> pa.Table:
    """`test` with each category that `train` lacks replaced by the most frequent one; free text stays."""
    for number, name in enumerate(test.column_names):
        if pa.types.is_string(test.schema.field(name).type) and name not in ("Name", "Ticket", "Cabin"):
            counts = train[name].drop_null().value_counts().sort("descending", by="counts").field("values")
            strange = pc.and_(pc.is_valid(test[name]), pc.invert(pc.is_in(test[name], counts)))
            test = test.set_column(number, name, pc.if_else(strange, counts[0], test[name]))
    return test


def write_files(directory: str | Path, train: pa.Table, test: pa.Table, sample: pa.Table, *, missing: str) -> Path:
    folder = require_local(directory, "the directory of generated files")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train.csv": train, "test.csv": test, "sample_submission.csv": sample}
    texts = {folder / name: _text(table, missing).encode() for name, table in files.items()}
    for path, text in texts.items():
        if path.exists() and path.read_bytes() != text:
            raise ConfigError(f"{path} exists with other data; use another directory, or remove the file")
    for path, text in texts.items():
        write_atomic(path, text)
    return folder


def _text(table: pa.Table, missing: str) -> str:
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(table.column_names)
    columns: Sequence[list[str]] = [pc.fill_null(pc.cast(c, pa.string()), missing).to_pylist() for c in table.columns]
    writer.writerows(zip(*columns, strict=True))
    return target.getvalue()


_SYLLABLES = (
    "Al Bar Ber Car Cor Dal Dor El Far Gar Hal Har Jen Kar Lar Mar Nor Os Pal Ros San Tor Val Wes Win O'Dal Mac",
    "ber bin d den dor fi gar gen l lin man mer n nik o r ren ri s ter ti win",
    "berg by dal den ell er ford gate ham holm ic in ley man mark ov quist sen ski son stone ton ville wood worth",
)
_MEN = "Albin Anton Arvid Bertil Carl Edwin Emil Ernest Frank Fredrik George Gustaf Hans Harold Henry Hugo Ivan James "
_MEN += (
    "John Joseph Karl Lars Leon Louis Martin Michael Nils Olaf Oscar Patrick Peter Richard Samuel Thomas Victor William"
)
_WOMEN = "Ada Agnes Alice Amelia Anna Beatrice Bertha Bridget Clara Edith Elin Ellen Elsie Emma Esther Florence Hanna "
_WOMEN += "Helen Ida Jane Julia Kate Laura Lillian Lucy Mabel Margaret Maria Mary Mathilde Nora Olive Rosa Ruth Selma"
