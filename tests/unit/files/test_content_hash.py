"""Content hashes of functions and objects: the same for the same content, in every process."""

from __future__ import annotations

import enum
import functools
import importlib
import itertools
import math
import os
import re
import subprocess
import sys
import threading
import types
from collections import Counter, OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.files.content_hash import UnnamedError, content_hash
from penstock.transforms import Filter, Lower, Map


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Locked:
    def __init__(self, value: Any) -> None:
        self.lock, self.value = threading.Lock(), value


class Kept:
    """An object that is pickled without its cache."""

    def __init__(self, value: Any) -> None:
        self.value, self.cache = value, {id(self): 1}

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}


def adding(number: int) -> Any:
    return lambda x: x + number


def made(body: str) -> Any:
    names: dict[str, Any] = {"__name__": "users"}
    exec(body, names)
    return names["f"]


def module(body: str) -> types.ModuleType:
    found = types.ModuleType("users_module")
    exec(body, found.__dict__)
    return found


def using(found: types.ModuleType) -> Any:
    names: dict[str, Any] = {"__name__": "users", "helpers": found}
    exec("def f(x): return helpers.clean(x)", names)
    return names["f"]


CLEAN = "import math\nrule = {}\ndef clean(x): return inner(x)\ndef inner(x): return {}"
# Each line: things that are all different, made again for every call.
DIFFERENT: list[Any] = [
    lambda: (1, 1.0, "1", True, None, b"1", 1j, Ellipsis),
    lambda: ([1, 2], [2, 1], (1, 2), [[1], 2], [1, [2]], {1: 2}, {2: 1}, {1, 2}, {1}, frozenset({3}), range(2)),
    lambda: ({"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2), Counter("aab")),
    lambda: (Colour.RED, Colour.BLUE, "red"),
    lambda: (Path("a"), Path("b"), Decimal("1.0"), Decimal("1.00"), datetime(2020, 1, 1, tzinfo=UTC)),
    lambda: (re.compile("a"), re.compile("b"), re.compile("a", re.IGNORECASE)),
    lambda: (math.sin, math.cos, np.sin, len, str.lower, str.upper, "a".join, "b".join, pc.utf8_lower),
    lambda: (np.arange(3), np.arange(4), np.arange(3.0), np.arange(3).reshape(3, 1), np.array(["a", None], object)),
    lambda: (np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]"), np.dtype("i4"), np.float32(1)),
    lambda: (pa.array([1, 2]), pa.array([1, 3]), pa.array([1, 2], pa.int8()), pa.chunked_array([[1, 2]])),
    lambda: (pa.int8(), pa.int16(), pa.schema([("a", pa.int8())]), pa.field("a", pa.int8()), pa.scalar(1)),
    lambda: (pc.field("a") > 1, pc.field("a") > 2, pa.array([str(i) for i in range(5000)])),
    lambda: (adding(1), adding(2), lambda x: x + 1, lambda x: x - 1, lambda y, x=3: x, lambda y, x=4: x),
    lambda: (functools.partial(pow, 2), functools.partial(pow, 3), functools.partial(pow, exp=2)),
    lambda: (Slotted(1), Slotted(2), Locked(1), Locked(2), Kept(1), Kept(2), Slotted, Locked),
    lambda: (made("k = 1\ndef f(x): return k"), made("k = 2\ndef f(x): return k")),
    lambda: (made("def g(x): return 1\ndef f(x): return [g(y) for y in x]"),
             made("def g(x): return 2\ndef f(x): return [g(y) for y in x]")),
    lambda: tuple(using(module(CLEAN.format(rule, line))) for rule, line in ((1, "rule"), (2, "rule"), (1, "x"))),
    lambda: (Lower("text"), Lower("body"), Map(adding(1)), Map(adding(2)), Filter("x > 1"), Filter("x > 2")),
    lambda: (itertools.chain, itertools.islice, iter([1, 2]), iter([1, 3])),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_different_content_has_another_hash_and_the_same_content_the_same(number: int) -> None:
    first, again = ([content_hash(value) for value in DIFFERENT[number]()] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(first)


def test_another_process_gives_the_same_hashes() -> None:
    code = (
        "import json, re, users\nimport numpy as np\nfrom penstock.files.content_hash import content_hash\n"
        "from penstock.transforms import Map\n"
        "words = {'a', 'b', 'c', 'd', 'e', ('f', 'g')}\n"
        "class Stage:\n"
        "    def __init__(self): self.words, self.rule, self.table = words, re.compile('a'), np.arange(9)\n"
        "    def __call__(self, row): return [users.f(x) for x in row if x in {'a', 'b', 'c'}]\n"
        "print(content_hash(Stage()), content_hash(Map(Stage())), content_hash(lambda x: x in words))\n"
    )
    helper = "import types, sys\nusers = types.ModuleType('users')\nusers.f = len\nsys.modules['users'] = users\n"
    found = {
        subprocess.run(
            [sys.executable, "-c", helper + code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_what_has_no_content_is_refused_with_its_name() -> None:
    for opaque in ((x for x in [1]), threading.Event(), sys.stdout):
        with pytest.raises(UnnamedError, match="it refers to <"):
            content_hash(lambda x, opaque=opaque: opaque)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnnamedError, match="too many to follow"):
        content_hash(deep)


def test_values_that_refer_to_themselves_have_a_hash() -> None:
    around: list[Any] = [1]
    around.append(around)
    assert content_hash(around) != content_hash([1, [1]])

    def calls_itself(x: int) -> Any:
        return calls_itself(x - 1) if x else calls_itself

    assert content_hash(calls_itself)


@pytest.mark.parametrize(("folder", "counts"), [("site-packages", False), ("dist-packages", False), ("mine", True)])
def test_packages_of_the_system_count_by_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, counts: bool
) -> None:
    """A virtual environment may see packages that are installed outside of it."""
    (tmp_path / folder).mkdir()
    name = f"package_in_{folder.replace('-', '_')}"
    (tmp_path / folder / f"{name}.py").write_text("VALUE = 1\ndef f():\n    return VALUE\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    package = importlib.import_module(name)
    before = content_hash(package.f)
    package.VALUE = 2
    assert (content_hash(package.f) != before) == counts
    del sys.modules[name]
