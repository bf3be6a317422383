from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.fsqueue.prepare_command import find_provider, load_provider

Write = Callable[..., Path]

HEAD = "from penstock.fsqueue import DataProviderBase\n"
BODY = "    def build_meta(self): return {}\n    def sample_batch(self, split, rng): return {}\n"


def provider(name: str, base: str = "DataProviderBase") -> str:
    return f"class {name}({base}):\n{BODY}"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "data/tiny/prepare_streaming.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_the_only_subclass_defined_there_is_found(write: Write, tmp_path: Path) -> None:
    before = list(sys.path)
    write(HEAD + provider("Tiny"))
    found = find_provider("tiny", tmp_path / "data")
    assert found.__name__ == "Tiny"
    assert sys.modules[found.__module__].Tiny is found
    assert sys.path == before
    assert "prepare_streaming" not in sys.modules


def test_an_edit_is_seen_at_once(write: Write, tmp_path: Path) -> None:
    for name in ("Aaa", "Bbb"):
        write(HEAD + f"from .names import NAME\n{provider(name)}")
        write(f"NAME = {name * 3!r}\n", "data/tiny/names.py")
        found = find_provider("tiny", tmp_path / "data")
        assert found.__name__ == name


def test_two_datasets_do_not_get_into_each_others_way(write: Write, tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = HEAD + f"from .parts import NAME\n{provider('Tiny')}    name = NAME\n"
        write(
            text + "    def late(self):\n        from .lately import NAME\n        return NAME\n",
            f"data/{name}/prepare_streaming.py",
        )
        write(f"NAME = {name!r}\n", f"data/{name}/parts.py")
        write(f"NAME = 'late {name}'\n", f"data/{name}/lately.py")
    first, second = (find_provider(name, tmp_path / "data") for name in ("one", "two"))
    assert (first.name, second.name) == ("one", "two")  # type: ignore[attr-defined]
    assert (first.late(first), second.late(second)) == ("late one", "late two")  # type: ignore[attr-defined]


def test_imported_classes_and_abstract_ones_do_not_count(write: Write, tmp_path: Path) -> None:
    write(HEAD + provider("Helper"), "data/tiny/other.py")
    text = "from .other import Helper\nclass Common(DataProviderBase):\n    def build_meta(self): return {}\n"
    text += "class Mine(Common):\n    def sample_batch(self, split, rng): return {}\nAlias = Mine\n"
    write(HEAD + text)
    assert find_provider("tiny", tmp_path / "data").__name__ == "Mine"


def test_the_symbol_provider_decides_wherever_its_class_comes_from(write: Write, tmp_path: Path) -> None:
    write(HEAD + provider("Helper"), "data/tiny/other.py")
    write(HEAD + provider("A") + provider("B") + "Provider = B\n")
    assert find_provider("tiny", tmp_path / "data").__name__ == "B"
    write(HEAD + provider("A") + "from .other import Helper as Provider\n")
    assert find_provider("tiny", tmp_path / "data").__name__ == "Helper"
    write(HEAD + provider("A") + provider("Provider", "A"))
    assert find_provider("tiny", tmp_path / "data").__name__ == "Provider"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            provider("A") + provider("B", "A"),
            "DataProviderBase",
        ),
        ("x = 1\n", r"prepare_streaming\.py.*DataProviderBase"),
        (
            "from .other import Helper\n",
            "DataProviderBase",
        ),
        (provider("A") + "Provider = 3\n", "DataProviderBase"),
        ("class Provider: pass\n", "DataProviderBase"),
        ("Provider = DataProviderBase\n", "DataProviderBase"),
        ("class A(DataProviderBase): pass\n", r"build_meta.*sample_batch"),
        ("class Provider(DataProviderBase): pass\n", r"build_meta.*sample_batch"),
        ("\nx = y\n", r"prepare_streaming\.py.*'y'"),
        ("def f(:\n", r"prepare_streaming\.py.*line 2\b"),
        ("raise SystemExit(2)\n", r"prepare_streaming\.py.*line 2\b"),
        ("import nowhere_at_all\n", r"line 2\b.*'nowhere_at_all'"),
        (
            "from other import Helper\n",
            r"line 2\b.*ModuleNotFoundError",
        ),
        ("from .broken import x\n", r"broken\.py, line 1: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(write: Write, tmp_path: Path, text: str, message: str) -> None:
    write(HEAD + provider("Helper"), "data/tiny/other.py")
    write("1 / 0\n", "data/tiny/broken.py")
    write(HEAD + text)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message) as caught:
        find_provider("tiny", tmp_path / "data")
    if ", line" in message:
        assert caught.value.__cause__ is not None
        assert not [name for name in set(sys.modules) - before if name.startswith("penstock_dataset_")]


def test_a_dataset_that_is_not_there_is_refused_with_those_that_are(write: Write, tmp_path: Path) -> None:
    root = tmp_path / "data"
    with pytest.raises(ConfigError, match=r"'.*data'.*data_root"):
        find_provider("tiny", root)
    root.mkdir()
    with pytest.raises(ConfigError, match="'tiny'"):
        find_provider("tiny", root)
    write(HEAD, "data/chars/prepare_streaming.py")
    write(HEAD, "data/words/prepare_streaming.py")
    (root / "empty").mkdir()
    with pytest.raises(ConfigError, match="'tiny'"):
        find_provider("tiny", root)
    with pytest.raises(ConfigError, match=r"'charz'.*'chars'"):
        find_provider("charz", root)
    with pytest.raises(ConfigError, match=r"'empty'.*prepare_streaming\.py"):
        find_provider("empty", root)
    (root / "empty/prepare_streming.py").touch()
    with pytest.raises(ConfigError, match=r"'prepare_streming\.py'"):
        find_provider("empty", root)
    for bad in ("..", "", "a/b", "../data/chars"):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            find_provider(bad, root)


def test_a_file_can_be_loaded_by_its_path(write: Write) -> None:
    assert load_provider(write(HEAD + provider("Tiny"), "elsewhere/my_provider.py")).__name__ == "Tiny"


def test_a_provider_that_is_run_directly_says_how_it_is_run(tmp_path: Path) -> None:
    text = "from penstock.fsqueue import DataProviderBase\nfrom .masking import mask\n"
    path = tmp_path / "letters" / "prepare_streaming.py"
    path.parent.mkdir()
    path.write_text(text)
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "python prepare.py" in ran.stderr
    assert "'letters'" in ran.stderr
    assert "Traceback" not in ran.stderr
    path.write_text("from penstock.fsqueue import DataProviderBase\nif __name__ == '__main__':\n    print('mine')\n")
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert ran.stdout == "mine\n", "a file that is meant to be run is run"
