"""Content hashes of values: another one for another result, the same one in every process."""

from __future__ import annotations

import collections
import functools
import operator
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.files import content_hash as content_module
from penstock.files.content_hash import UnnamedError, content_hash
from penstock.tokenizers.python import PythonReference

Point = collections.namedtuple("Point", "n")


class Words(list[str]): ...


class Table(dict[str, int]): ...


def closing_over(value: Any) -> Callable[[Any], Any]:
    return lambda row: (row, value)


def code(text: str, **names: Any) -> Any:
    """The last thing that a module of the user defines."""
    scope: dict[str, Any] = {"__name__": "mine"} | names
    exec(text, scope)
    return list(scope.values())[-1]


VALUES: dict[str, Callable[[int], Any]] = {
    "namedtuple": lambda n: Point(n),
    "list of its own class": lambda n: Words([str(n)]),
    "dict of its own class": lambda n: Table(a=n),
    "deque": lambda n: collections.deque([n]),
    "default": lambda n: collections.defaultdict([int, list][n]),
    "getter": lambda n: operator.itemgetter(str(n)),
    "random numbers": lambda n: random.Random(n),
    "array of objects": lambda n: np.array([str(n), None], object),
    "middle of a long Arrow array": lambda n: pa.array([*range(50), n, *range(50)]),
    "Arrow table": lambda n: pa.table({"a": [n]}),
    "Arrow expression": lambda n: pc.field("a").isin(pa.array([*range(50), -n, *range(50)])),
    "method of a dict": lambda n: {"a": n}.get,
    "nested lists": lambda n: [[[1], [2, 3]], [[1], [2], 3]][n],
    "cached function": lambda n: functools.lru_cache(code(f"def f(row): return {n}")),
    "part of a function": lambda n: functools.partial(code(f"def f(row): return {n}"), 1),
    "attribute of a class": lambda n: code(f"class C:\n  words = frozenset({{'{n}'}})\n  def f(self): ..."),
    "pattern of a class": lambda n: code(f"import re\nclass C:\n  pattern = re.compile('{n}')"),
    "attribute of a function": lambda n: code(f"def f(row): return f.n\nf.n = {n}\ng = f"),
    "slots": lambda n: code(f"class C:\n  __slots__ = ('a',)\n  def __call__(self): return {n}")(),
}


@pytest.mark.parametrize("name", VALUES)
def test_another_value_has_another_name_and_an_equal_one_the_same(name: str) -> None:
    make = VALUES[name]
    names = [content_hash(closing_over(make(number))) for number in (0, 1, 0)]
    assert names[0] == names[2] != names[1]


USES = {
    "module": "import helpers_of_mine\ndef f(row): return helpers_of_mine.clean(row)",
    "import inside": "def f(row):\n  import helpers_of_mine as h\n  return h.clean(row)",
    "name from a module inside": "def f(row):\n  from helpers_of_mine import clean\n  return clean(row)",
    "module in a closure": "def g():\n  import helpers_of_mine as h\n  return lambda row: h.clean(row)\nf = g()",
}


@pytest.mark.parametrize("use", USES)
def test_functions_of_a_module_of_the_user_count_by_their_code(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for result in ("row", "None", "row"):
        module = ModuleType("helpers_of_mine")
        exec(f"def clean(row): return {result}\nunused = object()", vars(module))
        monkeypatch.setitem(sys.modules, "helpers_of_mine", module)
        names.append(content_hash(code(USES[use])))
    assert names[0] == names[2] != names[1]


def test_modules_that_refer_to_each_other_have_a_name() -> None:
    inner, outer = ModuleType("inner_of_mine"), ModuleType("outer_of_mine")
    vars(inner)["outer"], vars(outer)["inner"] = outer, inner
    assert content_hash(code("def f(row): return outer.inner.outer.inner", outer=outer))


def test_functions_of_a_script_count_by_their_code_whatever_program_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a worker process the program is a file of penstock, and the function came with its code.
    program = ModuleType("__main__")
    program.__file__ = content_module.__file__
    monkeypatch.setitem(sys.modules, "__main__", program)
    content_module._installed.cache_clear()
    try:
        names = [content_hash(code(f"def f(row): return {number}", __name__="__main__")) for number in (0, 1)]
    finally:
        content_module._installed.cache_clear()
    assert names[0] != names[1]


def test_what_no_text_stands_for_is_refused() -> None:
    with pytest.raises(UnnamedError, match="no text stands for"):
        content_hash(closing_over(each for each in "ab"))


def test_names_are_those_of_every_process(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text(
        "import re\nfrom penstock.files.content_hash import content_hash\n"
        "WORDS = {'a', 'b', ('c', 'd')}\nclass C:\n  def __init__(self): self.words, self.p = WORDS, re.compile('a')\n"
        "  def __call__(self, row): return row['a'] in {'x', 'y', 'z'} or row in WORDS\n"
        "print(content_hash(C()))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, str(script)], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, check=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def test_tokenizers_with_another_pattern_in_their_class_have_another_fingerprint() -> None:
    text = "import re\nclass T:\n  p = re.compile('{}')\n  def encode(self, text): return [len(self.p.split(text))]"
    made = [PythonReference(code(text.format(letter))()).fingerprint() for letter in ("zebra", "giraffe", "zebra")]
    assert made[0] == made[2] != made[1]
