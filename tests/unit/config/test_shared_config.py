from __future__ import annotations

import enum
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Setting, SharedConfig, load_shared_config
from penstock.config.settings import freeze, thaw
from penstock.errors import ConfigError

Write = Callable[..., Path]

BASIC = 'dataset = "tiny"\nbatch_size = 4\nblock_size = 8\n'


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "config/train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_a_file_of_assignments_becomes_a_frozen_value(write: Write) -> None:
    path = write(BASIC + "n = batch_size * 2\nstages = [{'until': 10, 'p': [0.1, 0.2]}]\n")
    config = load_shared_config(path)
    assert config.batch_size == config["batch_size"] == config.get("batch_size") == 4
    assert dict(config) == {
        "dataset": "tiny",
        "batch_size": 4,
        "block_size": 8,
        "n": 8,
        "stages": ({"until": 10, "p": (0.1, 0.2)},),
    }
    assert (config.path, len(config), "n" in config, "m" in config) == (path, 5, True, False)
    assert config.get("m", 3) == 3
    with pytest.raises(AttributeError, match=r"config\.replace.*batch_size="):
        config.batch_size = 5
    with pytest.raises(AttributeError):
        del config.batch_size
    with pytest.raises(TypeError, match="read-only"):
        config.stages[0]["until"] = 11
    for change in ("clear", "popitem"):
        with pytest.raises(TypeError, match="read-only"):
            getattr(config.stages[0], change)()
    with pytest.raises(TypeError, match="read-only"):
        config.stages[0].update(until=11)
    assert config.stages[0]["until"] == 10


def test_what_is_no_plain_value_is_no_setting_and_asking_for_it_says_why(write: Write) -> None:
    text = "import math\nfrom typing import Any\n_hidden = 1\nclass K: pass\ndef f(): pass\n"
    config = load_shared_config(write(text + "k = [1, {'a': K()}]\nx = math.pi\n"))
    assert list(config) == ["x"]
    with pytest.raises(AttributeError, match="'f'"):
        config.f  # noqa: B018
    with pytest.raises(KeyError, match=r"k\[1\].*'a'"):
        config["k"]
    assert config.left_out["math"] == "is a module"
    assert config.left_out["K"] == "is a class"
    assert "_hidden" not in config.left_out


def test_a_missing_name_is_named_with_the_nearest_one() -> None:
    config = SharedConfig(batch_size=4)
    with pytest.raises(AttributeError, match=r"'batch_sise'.*'batch_size'"):
        config.batch_sise  # noqa: B018
    with pytest.raises(KeyError, match="'zzz'"):
        config["zzz"]


def test_configs_are_equal_if_their_settings_are_wherever_they_come_from(write: Write) -> None:
    config = load_shared_config(write("a = [1, 2]\nb = {'c': {3}}\n"))
    assert config == SharedConfig(a=(1, 2), b={"c": {3}}) == {"a": [1, 2], "b": {"c": {3}}}
    assert config != SharedConfig(a=(1, 2))
    assert config != {"a": object()}
    assert config != 3
    assert config.replace(a=5) == {"a": 5, "b": {"c": {3}}}
    assert config.replace(a=5).path == config.path
    assert repr(SharedConfig(a=[1], b="x")) == "SharedConfig(a=(1,), b='x')"
    assert config.to_dict() == {"a": [1, 2], "b": {"c": [3]}}


def test_enums_become_what_they_stand_for() -> None:
    class Size(enum.IntEnum):
        SMALL = 3

    class Mode(str, enum.Enum):  # noqa: UP042 - the other kind of text
        FAST = "fast"

    config = SharedConfig(a=Size.SMALL, b=Mode.FAST)
    assert dict(config) == {"a": 3, "b": "fast"}
    assert [type(value) for value in config.values()] == [int, str]


def test_numpy_numbers_become_numbers_and_arrays_are_refused() -> None:
    config = SharedConfig(a=np.int64(3), b=np.float32(0.5), c=np.bool_(True), d=np.float64(2.0))
    assert [type(value) for value in config.values()] == [int, float, bool, float]
    with pytest.raises(ConfigError, match=r"numpy\.ndarray"):
        SharedConfig(x=np.zeros(3))


def test_names_a_config_has_for_itself_are_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"train\.py"):
        load_shared_config(write("keys = 1\npath = 'x'\n"))
    with pytest.raises(ConfigError, match="'a b'"):
        SharedConfig({"a b": 1, "_c": 2})


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_thawing_gives_back_what_was_frozen_and_json_can_hold_it(value: Any) -> None:
    frozen = freeze(value)
    assert thaw(frozen) == value
    assert freeze(thaw(frozen)) == frozen
    assert json.loads(json.dumps(thaw(frozen))) == value


def test_the_namespace_of_a_file_is_fresh_and_nobody_elses_is_touched(write: Write) -> None:
    before, path, modules = dict(globals()), list(sys.path), set(sys.modules)
    config = load_shared_config(write("name = __name__\nfile = __file__\nseen = 'BASIC' in globals()\n"))
    assert (config.name, Path(config.file).name, config.seen) == ("train", "train.py", False)
    assert load_shared_config(write("seen = 'file' in globals()\n")) == {"seen": False}
    assert {name for name in globals() if name != "@py_assert1"} >= before.keys()
    assert sys.path == path
    assert "train" not in set(sys.modules) - modules


def test_a_config_builds_on_its_neighbour_and_an_edit_of_that_is_seen(write: Write, tmp_path: Path) -> None:
    write(BASIC + "dropout = 0.1\n", "config/base.py")
    for line in ("from config.base import *", "from base import *"):
        path = write(f"{line}\nbatch_size = 16\n")
        write(BASIC + "dropout = 0.1\n", "config/base.py")
        assert load_shared_config(path) == {"dataset": "tiny", "batch_size": 16, "block_size": 8, "dropout": 0.1}
        write(BASIC + "dropout = 0.2\n", "config/base.py")
        assert load_shared_config(path).dropout == 0.2
    assert not {"config", "config.base", "base"} & sys.modules.keys()
    assert not list(tmp_path.rglob("__pycache__"))


def test_what_lies_below_the_directory_but_was_not_found_in_it_stays_imported(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("value = 5\n", "env/lib/installed_there.py")
    monkeypatch.syspath_prepend(str(tmp_path / "env/lib"))
    assert load_shared_config(write("from installed_there import value\n", "top.py")).value == 5
    assert sys.modules.pop("installed_there").value == 5


def test_a_config_may_load_another(write: Write) -> None:
    write("a = 1\n", "config/inner.py")
    text = "from pathlib import Path as _P\nfrom penstock.config import load_shared_config\n"
    text += "b = load_shared_config(_P(__file__).with_name('inner.py')).a + 1\n"
    assert load_shared_config(write(text)) == {"b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = c\n", r"line 2\b.*'c'"),
        ("a = 1\n\nb = = 2\n", r"train\.py, line 3: SyntaxError: .*: b = = 2"),
        ("def f():\n    return 1 / 0\nx = f()\n", r"train\.py, line 2: ZeroDivisionError"),
        ("import json\njson.loads('{')\n", r"train\.py.*line 2\b"),
        ("import ast\nast.literal_eval('(')\n", r"train\.py, line 2: SyntaxError"),
        ("import sys\nsys.exit(3)\n", r"train\.py.*line 2\b"),
        ("import not_there_at_all\n", r"line 1\b.*'not_there_at_all'"),
        ("from broken import x\n", r"broken\.py.*line 2\b"),
        ("from unreadable import x\n", r"unreadable\.py, line 1: SyntaxError"),
    ],
)
def test_an_error_of_the_file_is_shown_with_its_place(write: Write, text: str, message: str) -> None:
    write("a = 1\nraise ValueError('no')\n", "config/broken.py")
    write("a = ]\n", "config/unreadable.py")
    with pytest.raises(ConfigError, match=message) as caught:
        load_shared_config(write(text))
    assert caught.value.__cause__ is not None


def test_places_are_shown_as_the_file_was_given(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a = b\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.py.*line 1\b"):
        load_shared_config("config/train.py")


def test_a_file_that_is_not_there_is_refused_with_the_nearest_one(write: Write, tmp_path: Path) -> None:
    write(BASIC)
    with pytest.raises(ConfigError, match=r"'.*trian\.py'.*'.*train\.py'"):
        load_shared_config(tmp_path / "config/trian.py")
    with pytest.raises(ConfigError, match=r"'.*zzz\.py'"):
        load_shared_config(tmp_path / "nowhere/zzz.py")
    with pytest.raises(ConfigError, match=r"'.*train\.yaml'"):
        load_shared_config(tmp_path / "train.yaml")
    (tmp_path / "directory.py").mkdir()
    with pytest.raises(ConfigError, match=r"directory\.py"):
        load_shared_config(tmp_path / "directory.py")


def test_nothing_stays_imported_where_another_directory_of_that_name_can_be_imported_too(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "config").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    write(BASIC, "config/base.py")
    assert load_shared_config(write("from config.base import *\n")).dataset == "tiny"
    assert "config" not in sys.modules


def test_configs_are_looked_for_in_config_too_and_the_commands_are_none(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = write(BASIC).parent
    for name in ("prepare.py", "train.py", "config/base.py"):
        Path(name).write_text("")
    with pytest.raises(ConfigError) as refused:
        load_shared_config("nope.py")
    assert re.search(r"'nope\.py'.*base\.py", str(refused.value))
    (place / "train_tides.py").write_text("")
    with pytest.raises(ConfigError, match=r"'train_tides\.py'.*'config/train_tides\.py'"):
        load_shared_config("train_tides.py")
    Path("prepare.py").unlink()
    with pytest.raises(ConfigError, match=r"'train\.py'"):  # alone it may well be a config
        load_shared_config("trian.py")


def test_future_annotations_hold_for_the_whole_file(write: Write) -> None:
    assert load_shared_config(write("from __future__ import annotations\na: Unknown = 3\n")).a == 3
    with pytest.raises(ConfigError, match="NameError"):
        load_shared_config(write("a: Unknown = 3\n"))


def overridden(write: Write, text: str, *overrides: str, **settings: Setting) -> SharedConfig:
    return load_shared_config(write(text), overrides, settings=settings)


def test_overrides_win_and_what_follows_from_them_follows(write: Write) -> None:
    text = "max_iters = 5000\nlr_decay_iters = max_iters\nif True:\n    half = max_iters // 2\n"
    config = overridden(write, text, "--max_iters=60")
    assert dict(config) == {"max_iters": 60, "lr_decay_iters": 60, "half": 30}
    text = "a = 1\na = 2\na += 3\nb = a\n"
    assert overridden(write, text, "--a=7") == {"a": 7, "b": 7}
    assert overridden(write, "a = [1]\na.append(2)\n", "--a=[5]") == {"a": [5, 2]}
    assert overridden(write, "out_dir = 'out'\nlogs = out_dir + '/logs'\n", "--out_dir=here")["logs"] == "here/logs"
    assert overridden(write, "a = 1\nn = a\ndel a\n", "--a=3") == {"n": 3}


@pytest.mark.parametrize(
    ("in_file", "text", "expected"),
    [
        ("1", "8", 8),
        ("1", "1e3", 1000),
        ("1", "1_000", 1000),
        ("1", "-3", -3),
        ("0.5", "1", 1.0),
        ("0.5", "1e-3", 1e-3),
        ("True", "false", False),
        ("True", "off", False),
        ("False", "Yes", True),
        ("False", "1", True),
        ("'a'", "b", "b"),
        ("'a'", "'b'", "b"),
        ("'a'", "8", "8"),
        ("'a'", "", ""),
        ("'a'", "x=y", "x=y"),
        ("[1]", "[2, 3]", (2, 3)),
        ("(1,)", "2,3", (2, 3)),
        ("{'a': 1}", "{'b': 2}", {"b": 2}),
        ("{1}", "{2}", {2}),
        ("None", "8", 8),
        ("None", "text", "text"),
        ("__import__('pathlib').Path('a')", "b", Path("b")),
    ],
)
def test_an_override_is_of_the_kind_of_the_value_in_the_file(
    write: Write, in_file: str, text: str, expected: Any
) -> None:
    config = overridden(write, f"own = {in_file}\n", f"--own={text}")
    assert config.own == expected
    assert type(config.own) in (type(expected), frozenset, freeze({}).__class__)


@pytest.mark.parametrize(
    ("in_file", "text", "message"),
    [
        ("1", "0.5", "whole number.*own = 1"),
        ("1", "1e-3", "whole number"),
        ("1", "true", "whole number"),
        ("1", "inf", "whole number"),
        ("0.5", "much", "number"),
        ("True", "maybe", "true or false"),
        ("True", "2", "true or false"),
        ("[1]", "5", "list"),
        ("{'a': 1}", "[1]", "mapping"),
    ],
)
def test_an_override_of_another_kind_is_refused(write: Write, in_file: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--own={text}: .*{message}".replace("[1]", r"\[1\]")):
        overridden(write, f"own = {in_file}\nnever = own\n", f"--own={text}")


def test_a_known_setting_decides_the_kind_and_need_not_be_in_the_file(write: Write) -> None:
    config = overridden(write, "learning_rate = 1\n", "--learning_rate=0.5", "--max-iters=60", "--min_lr=none")
    assert dict(config) == {"learning_rate": 0.5, "max_iters": 60, "min_lr": None}
    config = overridden(write, "mask = 1\n", "--mask=0.5", "--noise=0.25", mask=Setting(float), noise=Setting(float))
    assert dict(config) == {"mask": 0.5, "noise": 0.25}
    assert overridden(write, "", "--compression=zstd", "--backlog_bytes=2 MiB") == {
        "compression": "zstd",
        "backlog_bytes": "2 MiB",
    }


def test_all_problems_with_overrides_are_said_at_once(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(
            write,
            BASIC + "x = batch_size + 1\n",
            "--batch_size=many",
            "--blok_size=3",
            "--resume",
            "-x=1",
            "--x=1",
            "--x=2",
        )
    lines = str(caught.value).splitlines()[1:]
    expected = [
        "'--resume'.*--resume=value",
        ".*--name=value.*'-x=1'",
        "--x.*'1'.*'2'",
        "--batch_size=many",
        "--blok_size=3.*'block_size'",
    ]
    for line, facts in zip(lines, expected, strict=True):
        assert re.match(f"  {facts}", line)


@given(st.text(max_size=12))
def test_no_text_of_an_override_breaks_anything_but_by_a_config_error(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "c.py"
        path.write_text("a = 1\nb = 0.5\nc = 'x'\nd = [1]\ne = None\nf = True\n")
        for name in "abcdef":
            try:
                value = load_shared_config(path, [f"--{name}={text}"])[name]
            except ConfigError:
                assert name != "c"
            else:
                assert name != "a" or type(value) is int
                assert name != "b" or type(value) is float
                assert name != "f" or type(value) is bool
