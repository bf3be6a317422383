from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from penstock import plugins
from penstock.datasets.base import KaggleDataset
from penstock.datasets.discovery import competition_of, discover, load_class, name_of
from penstock.errors import ConfigError

CLASS = """
from penstock.datasets.base import KaggleDataset

class {name}(KaggleDataset):
    def _load_data(self):
        self._data = [{{"x": 1}}, {{"x": 2}}]
    def _validate_data(self): ...
    def __getitem__(self, index):
        return self._data[index]
"""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("_penstock_discovered_"):
            del sys.modules[name]


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))
    return path


def names(*paths: Path) -> list[str]:
    return sorted(discover(*paths, installed=False).found)


def test_files_are_chosen_by_the_convention(tmp_path: Path) -> None:
    write(tmp_path, "house_prices_dataset.py", CLASS.format(name="HousePricesDataset"))
    write(tmp_path, "deep/down/bikes_dataset.py", CLASS.format(name="BikesDataset"))
    write(tmp_path, "datasets/ships.py", CLASS.format(name="ShipsDataset"))
    write(tmp_path, "more/datasets/trains.py", CLASS.format(name="TrainsDataset"))
    for name in ("other.py", "datasets/_private.py", "datasets/__init__.py", ".hidden/a_dataset.py", "dataset.py"):
        write(tmp_path, name, "raise SystemError('this must not run')")
    write(tmp_path, "venv/lib/site-packages/datasets/x.py", "raise SystemError('this must not run')")
    write(tmp_path, "env/pyvenv.cfg", "")
    write(tmp_path, "env/x_dataset.py", "raise SystemError('this must not run')")
    found = discover(tmp_path, installed=False)
    assert found.errors == {}
    assert sorted(found.found) == ["bikes", "house-prices", "ships", "trains"]
    assert names(tmp_path / "datasets") == ["ships"]


def test_a_file_that_is_named_is_loaded_whatever_it_is_called(tmp_path: Path) -> None:
    file = write(tmp_path, "other.py", CLASS.format(name="ShipsDataset"))
    assert names(file) == ["ships"]
    with pytest.raises(FileNotFoundError, match=r"\bgone\b"):
        discover(tmp_path / "gone")


def test_classes_are_chosen_by_the_convention(tmp_path: Path) -> None:
    code = CLASS.format(name="ShipsDataset") + dedent(
        """
        class Ships2(ShipsDataset): ...
        class NoDataset: ...
        class AbstractDataset(KaggleDataset): ...
        class NamedDataset(ShipsDataset):
            competition = "titanic-2"
        class FurtherNamedDataset(NamedDataset): ...
        AliasDataset = ShipsDataset
        """
    )
    write(tmp_path, "a_dataset.py", code)
    found = discover(tmp_path, installed=False)
    assert {name: kind.__name__ for name, kind in found.found.items()} == {
        "ships": "ShipsDataset",
        "titanic-2": "NamedDataset",
        "further-named": "FurtherNamedDataset",
    }
    assert found.errors == {}


@pytest.mark.parametrize(
    ("name", "competition"),
    [
        ("HousePricesDataset", "house-prices"),
        ("TitanicDataset", "titanic"),
        ("M5ForecastingDataset", "m5-forecasting"),
        ("NLPGettingStartedDataset", "nlp-getting-started"),
        ("Snake_CaseDataset", "snake-case"),
    ],
)
def test_a_competition_is_called_as_its_class_is(name: str, competition: str) -> None:
    assert competition_of(type(name, (KaggleDataset,), {})) == competition


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def f(:\n", SyntaxError),
        ("import a_module_that_is_not_there\n", ModuleNotFoundError),
        ("raise RuntimeError('boom')\n", RuntimeError),
        ("import sys; sys.exit(3)\n", SystemExit),
        ("class E(BaseException): ...\nraise E()\n", BaseException),
        ("\0", (SyntaxError, ValueError)),
        ("# -*- coding: nonsense -*-\n", SyntaxError),
    ],
    ids=["syntax", "import", "exception", "exit", "base exception", "null", "encoding"],
)
def test_an_error_in_one_module_never_hides_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, error: type[BaseException]
) -> None:
    write(tmp_path, "a_dataset.py", CLASS.format(name="ADataset"))
    bad = write(tmp_path, "b_dataset.py", code)
    write(tmp_path, "c_dataset.py", CLASS.format(name="CDataset"))
    with caplog.at_level(logging.WARNING, logger="penstock"):
        found = discover(tmp_path, installed=False)
    assert sorted(found.found) == ["a", "c"]
    assert list(found.errors) == [str(bad)]
    assert isinstance(found.errors[str(bad)], error)
    [record] = caplog.records
    assert str(bad) in record.getMessage()
    assert record.exc_info is not None
    assert not [name for name in sys.modules if name.startswith("_penstock_discovered_b_dataset")]


def test_ctrl_c_is_no_error_of_a_module(tmp_path: Path) -> None:
    write(tmp_path, "a_dataset.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover(tmp_path, installed=False)


def test_a_file_is_loaded_once_whatever_leads_to_it(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "real/a_dataset.py",
        CLASS.format(name="ADataset") + f"with open({str(tmp_path / 'log')!r}, 'a') as log: log.write('x')\n",
    )
    (tmp_path / "link_dataset.py").symlink_to(file)
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "loop").symlink_to(tmp_path)
    first = discover(tmp_path, file, tmp_path / "real", installed=False)
    again = discover(tmp_path / "folder", installed=False)
    assert (list(first.found), first.errors) == (["a"], {})
    assert first.found["a"] is again.found["a"]
    assert (tmp_path / "log").read_text() == "x"


def test_a_file_that_has_changed_is_loaded_again(tmp_path: Path) -> None:
    file = write(tmp_path, "a_dataset.py", CLASS.format(name="ADataset"))
    stat = file.stat()
    assert names(tmp_path) == ["a"]
    write(tmp_path, "a_dataset.py", CLASS.format(name="BDataset"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert names(tmp_path) == ["b"]
    assert not list(tmp_path.rglob("*.pyc"))


def test_modules_have_private_names_and_hide_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "one/json_dataset.py", CLASS.format(name="OneDataset"))
    write(tmp_path, "two/json_dataset.py", CLASS.format(name="TwoDataset"))
    before = list(sys.path)
    found = discover(tmp_path, installed=False).found
    assert sorted(found) == ["one", "two"]
    assert found["one"].__module__ != found["two"].__module__
    assert "json_dataset" not in sys.modules
    assert sys.path == before


def test_a_class_that_is_imported_elsewhere_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "shared_ships_dataset.py", CLASS.format(name="ShipsDataset"))
    write(
        tmp_path,
        "users_dataset.py",
        "from shared_ships_dataset import ShipsDataset\nfrom penstock.datasets.base import KaggleDataset\n",
    )
    try:
        found = discover(tmp_path, installed=False)
        assert (list(found.found), found.errors) == (["ships"], {})
        module = sys.modules["shared_ships_dataset"]
        assert discover(tmp_path, installed=False).found["ships"] is module.ShipsDataset
    finally:
        sys.modules.pop("shared_ships_dataset", None)


def test_two_classes_for_one_competition_are_an_error_and_the_first_stays(tmp_path: Path) -> None:
    first = write(tmp_path, "a_dataset.py", CLASS.format(name="ShipsDataset"))
    second = write(tmp_path, "b_dataset.py", CLASS.format(name="ShipsDataset"))
    found = discover(tmp_path, installed=False)
    assert found.found["ships"].__module__.startswith("_penstock_discovered_a_dataset")
    assert str(first) in str(found.errors[str(second)])


def test_nothing_is_run_that_nobody_named(tmp_path: Path) -> None:
    for name in ("a_dataset.py", "datasets/b.py", "penstock_extra_dataset.py"):
        write(tmp_path, name, "open('ran', 'w').close()")
    code = "from penstock.datasets.discovery import discover; discover()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with entry points of datasets, some of which do not work."""
    site = tmp_path / "site"
    write(site, "my_competitions.py", CLASS.format(name="LakesDataset"))
    write(site, "my_exit.py", "import sys; sys.exit(1)")
    info = "my_competitions-1.0.dist-info"
    write(site, f"{info}/METADATA", "Metadata-Version: 2.1\nName: my-competitions\nVersion: 1.0\n")
    write(
        site,
        f"{info}/entry_points.txt",
        """\
        [penstock.datasets]
        exit = my_exit:ExitDataset
        gone = my_gone:GoneDataset
        lakes = my_competitions:LakesDataset
        number = math:floor
        """,
    )
    monkeypatch.syspath_prepend(str(site))
    plugins._points.cache_clear()
    yield site
    plugins._points.cache_clear()
    for name in ("my_competitions", "my_exit"):
        sys.modules.pop(name, None)


def test_datasets_of_plugins_are_found_and_those_that_do_not_work_hide_nothing(plugin_site: Path) -> None:
    found = discover()
    assert found.found["lakes"].__module__ == "my_competitions"
    errors = {place: error for place, error in found.errors.items() if "my-competitions" in place}
    assert sorted(errors) == [
        "math:floor (my-competitions)",
        "my_exit:ExitDataset (my-competitions)",
        "my_gone:GoneDataset (my-competitions)",
    ]
    assert isinstance(errors["my_exit:ExitDataset (my-competitions)"], SystemExit)


def test_penstocks_own_datasets_are_found_and_the_one_for_any_table_is_not() -> None:
    found = discover()
    assert {"titanic", "house-prices"} <= found.found.keys()
    assert "tabular" not in found.found
    assert not [place for place in found.errors if place.startswith("penstock.")]


def test_a_class_is_found_again_by_its_name(tmp_path: Path) -> None:
    file = write(tmp_path, "a_dataset.py", CLASS.format(name="ADataset"))
    found = discover(file, installed=False).found["a"]
    assert name_of(found) == f"{file}:ADataset"
    assert load_class(name_of(found)) is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "'nothing'"),
        ("no_such_module:X", "ModuleNotFoundError"),
        ("/no/such/file.py:X", "FileNotFoundError"),
        ("json:nothing", "AttributeError"),
        ("json:JSONDecoder", "KaggleDataset"),
        ("penstock.datasets.base:KaggleDataset", r"penstock\.datasets\.base"),
    ],
)
def test_a_name_that_leads_to_no_dataset_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_class(name)
