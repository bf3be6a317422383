"""The example plugin, used as any plugin is; and plugins that do not work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from penstock import ConversationDataLoader, Pipeline, PretrainDataLoader, plugins
from penstock.chat.templates import load_template
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError, DataError, PluginError, SchemaError
from penstock.loaders import StreamOptions
from penstock.sinks import MemorySink, open_sink
from penstock.sources import open_source
from penstock.store import open_store
from penstock.transforms.tokenization import ByteTokenizer

INI = "[first]\nname = one\n\n[second]\nname = two\ncolour = 100% red\n"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.ini"
    path.write_text(INI)
    return path


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds an installed package with entry points that do not work; only its metadata exists."""
    folder = tmp_path / "site"
    info = folder / "broken_package-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[penstock.transforms]\n"
        "gone = broken_package_gone:Thing\n"
        "number = math:pi\n"
        "lower = json:dumps\n"
        "shout = json:dumps\n"
    )
    plugins._points.cache_clear()
    yield folder
    plugins._points.cache_clear()


def cli(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def test_the_example_plugin_is_installed() -> None:
    found = {(plugin.group, plugin.name): plugin for plugin in plugins.installed()}
    shout = found["transforms", "shout"]
    assert (shout.package, shout.version) == ("penstock-example-plugin", "0.1.0")
    assert shout.target == "penstock_example_plugin:Shout"
    assert {("sources", "ini_sections"), ("sinks", "ini_sections"), ("formats", "ini")} <= set(found)


def test_a_plugin_is_used_by_name_from_yaml(settings: Path) -> None:
    (settings.parent / "p.yaml").write_text(
        "source: {type: ini_sections, path: settings.ini}\n"
        "transforms: [{shout: {column: name, marks: 2}}]\n"
        "sink: {type: ini_sections, path: loud.ini}\n"
    )
    done = cli("run", "p.yaml", cwd=settings.parent)
    assert done.returncode == 0, done.stderr
    assert (settings.parent / "loud.ini").read_text() == (
        "[first]\nname = ONE!!\n\n[second]\nname = TWO!!\ncolour = 100% red\n\n"
    )


def test_arguments_of_a_plugin_are_checked_too(settings: Path) -> None:
    (settings.parent / "p.yaml").write_text("source: settings.ini\ntransforms: [{shout: {colum: name}}]\nsink: a.ini\n")
    done = cli("run", "p.yaml", cwd=settings.parent)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "penstock: p.yaml: transforms[0].shout: unknown argument 'colum'; did you mean 'column'?"
    )


def test_a_format_is_opened_by_its_suffix_and_by_its_name(settings: Path) -> None:
    sink = MemorySink()
    Pipeline(open_source(settings), [plugins.find("transforms", "shout")("name")], sink).run()
    assert sink.rows() == [
        {"section": "first", "name": "ONE!", "colour": None},
        {"section": "second", "name": "TWO!", "colour": "100% red"},
    ]
    (settings.parent / "p.yaml").write_text(
        "source: {type: ini, path: settings.ini}\nsink: {type: ini, path: out.ini}\n"
    )
    done = cli("run", "p.yaml", cwd=settings.parent)
    assert done.returncode == 0, done.stderr
    assert (settings.parent / "out.ini").read_text().strip() == INI.strip()


def test_a_format_writes_by_its_suffix(settings: Path, tmp_path: Path) -> None:
    Pipeline(open_source(settings), [], open_sink(tmp_path / "copy.ini")).run()
    assert (tmp_path / "copy.ini").read_text().strip() == INI.strip()


def test_the_example_source_resumes_exactly(settings: Path) -> None:
    source = open_source(settings)
    assert source.next_batch(1).to_pylist()[0]["section"] == "first"  # type: ignore[union-attr]
    again = open_source(settings)
    again.load_state_dict(source.state_dict())  # type: ignore[attr-defined]
    assert again.next_batch(5).to_pylist()[0]["section"] == "second"  # type: ignore[union-attr]


def test_the_example_plugin_names_what_is_wrong(settings: Path) -> None:
    settings.write_text("no section\n")
    with pytest.raises(DataError, match=r"settings\.ini"):
        open_source(settings).next_batch(1)
    shout = plugins.find("transforms", "shout")
    with pytest.raises(ValueError, match=r"\bmarks\b"):
        shout("name", marks=-1)
    settings.write_text(INI)
    batch = open_source(settings).next_batch(5)
    with pytest.raises(SchemaError, match=r"'nme'.*'section'"):
        shout("nme").transform(batch)


def test_an_unknown_plugin_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(PluginError, match=r"'shuot'.*'shout'"):
        plugins.find("transforms", "shuot")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gone",
            r"'gone'.*'broken_package_gone'",
        ),
        ("number", r"'number'.*penstock\.transforms"),
        ("shout", r"'shout'.*penstock\.transforms"),
    ],
)
def test_a_plugin_that_does_not_work_names_its_package(
    broken: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(broken))
    with pytest.raises(PluginError, match=message):
        plugins.find("transforms", name)


def test_a_plugin_that_does_not_work_is_named_by_the_command(broken: Path, settings: Path) -> None:
    (settings.parent / "p.yaml").write_text("source: settings.ini\ntransforms: [gone]\nsink: out.ini\n")
    done = cli("run", "p.yaml", path=broken, cwd=settings.parent)
    assert done.returncode == 1
    assert re.search(r"transforms\[0\].*'gone'", done.stderr)


def test_plugins_that_do_not_work_are_marked_in_the_list(broken: Path) -> None:
    done = cli("plugins", "--json", path=broken)
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    problems = {entry["name"]: entry["problem"] for entry in listed if entry["package"] == "broken-package"}
    assert "'broken_package_gone'" in problems["gone"]
    assert "expected a class or a function" in problems["number"]
    assert problems["lower"] == "hidden by the built-in 'lower'"
    assert "penstock-example-plugin" in problems["shout"]
    assert all(entry["problem"] is None for entry in listed if entry["package"] == "penstock")
    text = cli("plugins", path=broken).stdout
    assert "'gone'" in text


def test_a_format_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.formats]\nodd = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._points.cache_clear()
    try:
        with pytest.raises(PluginError, match=r"'odd'.*penstock\.plugins\.Format"):
            plugins.find("formats", "odd")
    finally:
        plugins._points.cache_clear()


# In loaders and in prepare

TOKENIZER = ByteTokenizer(("<bos>", "<eos>"))


def documents(path: Path, tmp_path: Path, **more: Any) -> list[str]:
    options: dict[str, Any] = {"packing": None, "backend": "numpy", "cache_dir": tmp_path / "cache", **more}
    with PretrainDataLoader(path, TOKENIZER, 4096, text_column="name", batch_size=1, **options) as loader:
        return sorted(TOKENIZER.decode(batch.input_ids[0]).removesuffix("<eos>") for batch in loader)


@pytest.mark.parametrize("streaming", [False, StreamOptions(worker_type="thread")], ids=["indexed", "stream"])
def test_a_format_and_a_transform_of_a_plugin_work_in_loaders(settings: Path, tmp_path: Path, streaming: Any) -> None:
    assert documents(settings, tmp_path, streaming=streaming) == ["one", "two"]
    loud = {"streaming": streaming, "transforms": [{"shout": {"column": "name", "marks": 2}}]}
    assert documents(settings, tmp_path, **loud) == ["ONE!!", "TWO!!"]


def test_a_stream_of_a_format_of_a_plugin_resumes_exactly(tmp_path: Path) -> None:
    for number in range(3):
        rows = "".join(f"[s{number}{row}]\nname = {number}{row}\n" for row in range(5))
        (tmp_path / f"{number}.ini").write_text(rows)
    more: dict[str, Any] = {"packing": None, "backend": "numpy", "text_column": "name", "batch_size": 2, "prefetch": 0}

    def loader() -> PretrainDataLoader:
        return PretrainDataLoader(tmp_path, TOKENIZER, streaming=StreamOptions(worker_type="thread"), **more)

    with loader() as whole:
        batches = [batch.input_ids.tolist() for batch in whole]
    with loader() as first:
        iterator = iter(first)
        begun = [next(iterator).input_ids.tolist() for _ in range(3)]
        state = first.state_dict()
    with loader() as second:
        second.load_state_dict(state)
        assert begun + [batch.input_ids.tolist() for batch in second] == batches


class NextBatchOnly:
    """The least that a source can be."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        rows = min(self._left, max_rows, 3)
        self._left -= rows
        return pa.record_batch({"text": [f"row {self._left + row}" for row in range(rows)]}) if rows else None


def test_a_source_with_next_batch_alone_can_be_prepared(tmp_path: Path) -> None:
    recipe = Recipe(tokenizer=TOKENIZER, transforms=[{"lower": "text"}])
    prepared = prepare(cast(Any, NextBatchOnly(10)), tmp_path / "a.store", recipe)
    assert prepared.manifest.rows == 10
    assert prepared.manifest.key is None, "its content has no name"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package that adds a filter and chat templates."""
    folder = tmp_path / "added"
    info = folder / "adding_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adding-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[penstock.filters]\nno-two = adding_package:NoTwo\n"
        "[penstock.templates]\nshort = adding_package:SHORT\nfrom-file = adding_package:from_file\nnothing = math:pi\n"
    )
    (folder / "short.jinja").write_text(SHORT)
    (folder / "adding_package.py").write_text(
        "from pathlib import Path\n"
        "from penstock.transforms import Filter\n"
        f"SHORT = {SHORT!r}\n"
        "def NoTwo(column):\n    return Filter(f\"{column} != 'two'\")\n"
        "def from_file():\n    return Path(__file__).with_name('short.jinja')\n"
    )
    monkeypatch.syspath_prepend(folder)
    plugins._points.cache_clear()
    yield folder
    plugins._points.cache_clear()


SHORT = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %} {% endfor %}"
)


def test_filters_of_plugins_work_in_loaders_and_in_prepare(added: Path, settings: Path, tmp_path: Path) -> None:
    assert documents(settings, tmp_path, filters=["no-two"]) == ["one"]
    assert documents(settings, tmp_path, filters=["no-two", "shout"]) == ["ONE!"], "a transform that takes the column"
    store = tmp_path / "a.store"
    words = ["prepare", str(settings), "--tokenizer", "byte", "--out", str(store), "--column", "name"]
    run = cli(*words, "--filter", "no-two", "-q", path=added)
    assert run.returncode == 0, run.stderr
    with open_store(store) as opened:
        assert len(opened) == 1
    with pytest.raises(ConfigError, match=r"no-too.*did you mean 'no-two'"):
        documents(settings, tmp_path, filters=["no-too"])


@pytest.mark.parametrize("name", ["short", "from-file"])
def test_chat_templates_of_plugins_work_in_loaders(added: Path, name: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"prompt": "q", "completion": "a"}\n')
    options: dict[str, Any] = {"backend": "numpy", "cache_dir": tmp_path / "cache", "chat_template": name}
    with ConversationDataLoader(path, TOKENIZER, **options) as loader:
        (batch,) = loader
    assert TOKENIZER.decode(batch.input_ids[0]) == "<bos>user: q assistant: a<eos> "


def test_a_template_of_a_plugin_that_is_none_is_refused(added: Path) -> None:
    with pytest.raises(PluginError, match=r"nothing.*adding-package.*Jinja text"):
        load_template("nothing", None)
    with pytest.raises(ConfigError, match=r"shart.*did you mean 'short'"):
        load_template("shart", None)
