"""Templates by name and version, and in files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock
from penstock.errors import ConfigError, SchemaError
from penstock.templates import (
    BaseTemplate,
    ColumnFormat,
    FewShot,
    JinjaTemplate,
    KeyValueTemplate,
    MarkdownTemplate,
    SentenceTemplate,
    TextTemplateEngine,
    as_table,
)
from penstock.templates.base_template import identity

AGE = SentenceTemplate("ages", "{Name}[ is {Age}].", columns={"Age": ColumnFormat(unit="years")})


@pytest.fixture
def df() -> pd.DataFrame:
    return pd.DataFrame({"Name": ["Ann", "Bob"], "Age": [22.0, None]})


def test_a_registered_template_converts_data(df: pd.DataFrame) -> None:
    engine = TextTemplateEngine()
    engine.register_template(AGE)
    assert engine.convert_data(data=df, template_name="ages") == ["Ann is 22 years.", "Bob."]
    assert engine.convert_table(df, "ages").equals(pa.array(["Ann is 22 years.", "Bob."]))
    assert engine.convert_data(df, "ages", version="1") == engine.convert_data(df.to_dict("records"), "ages")


def test_the_styles_are_there_from_the_start(df: pd.DataFrame) -> None:
    engine = TextTemplateEngine()
    assert engine.list_templates() == ["json", "key_value", "list", "markdown", "natural"]
    assert engine.convert_data(df, "key_value") == ["Name: Ann | Age: 22", "Name: Bob"]
    assert engine.convert_data(df, "list")[0] == "- Name: Ann\n- Age: 22"


def test_the_latest_version_is_meant_unless_one_is_named() -> None:
    engine = TextTemplateEngine(SentenceTemplate("t", f"{{a}} {v}", version=v) for v in ("9", "10", "1.2", "1.10"))
    assert engine.versions("t") == ["1.2", "1.10", "9", "10"]
    assert engine.convert_data([{"a": 1}], "t") == ["1 10"]
    assert engine.convert_data([{"a": 1}], "t", version="1.2") == ["1 1.2"]
    with pytest.raises(ConfigError, match=r"'t'.*version"):
        engine.get_template("t", "2")
    with pytest.raises(ConfigError, match=r"'ntural'.*'natural'"):
        engine.get_template("ntural")


def test_the_same_template_may_be_registered_twice_another_only_to_replace_it() -> None:
    engine = TextTemplateEngine([AGE])
    engine.register_template(SentenceTemplate("ages", AGE.text, columns=AGE.formats))
    other = SentenceTemplate("ages", "{Name}")
    with pytest.raises(ConfigError, match=r"'ages'.*replace=True"):
        engine.register_template(other)
    assert engine.get_template("ages") == AGE
    engine.register_template(other, replace=True)
    assert engine.get_template("ages") is other
    with pytest.raises(ConfigError, match="SentenceTemplate"):
        engine.register_template("{Name}")  # type: ignore[arg-type]


def test_columns_are_checked_before_anything_is_said(df: pd.DataFrame) -> None:
    engine = TextTemplateEngine([AGE])
    engine.validate(df, "ages")
    engine.validate(["Age", "Name"], "ages")
    for data in (
        df.rename(columns={"Age": "age"}),
        ["Name", "age"],
        pa.schema({"Name": pa.string(), "age": pa.int8()}),
    ):
        with pytest.raises(SchemaError, match=r"'Age'.*'age'"):
            engine.validate(data, "ages")


def test_fingerprints_are_equal_where_the_texts_are() -> None:
    renamed = SentenceTemplate("other", AGE.text, version="7", columns=AGE.formats)
    assert renamed.fingerprint == AGE.fingerprint
    assert renamed != AGE
    others = [
        SentenceTemplate("ages", AGE.text),
        SentenceTemplate("ages", AGE.text + "!", columns=AGE.formats),
        KeyValueTemplate(),
        KeyValueTemplate(between=", "),
        KeyValueTemplate(only=["a"]),
        KeyValueTemplate(exclude=["a"]),
        KeyValueTemplate(columns={"a": ColumnFormat(missing="say")}),
        MarkdownTemplate(),
        MarkdownTemplate(layout="list"),
    ]
    prints = [template.fingerprint for template in (AGE, *others)]
    assert len(set(prints)) == len(prints)
    assert all(json.dumps(template.describe()) for template in others)


@pytest.mark.parametrize("name", ["templates.yaml", "templates.json"])
def test_templates_travel_through_a_file(tmp_path: Path, df: pd.DataFrame, name: str) -> None:
    engine = TextTemplateEngine(
        [
            AGE,
            SentenceTemplate("ages", "{Name}: {Age}", version="2"),
            KeyValueTemplate("short", between=", ", columns={"Age": ColumnFormat(categories={22: "ä"}, unseen="keep")}),
            MarkdownTemplate("md", layout="list", only=["Name"]),
            JinjaTemplate("jinja", "{{ Name }}"),
        ]
    )
    engine.save_templates(tmp_path / name)
    other = TextTemplateEngine()
    assert other.load_templates(tmp_path / name) == ["ages", "ages", "jinja", "md", "short"]
    for template in ("ages", "jinja", "md", "short", "natural"):
        assert other.versions(template) == engine.versions(template)
        assert other.get_template(template) == engine.get_template(template)
        assert other.convert_data(df, template) == engine.convert_data(df, template)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("templates: [{kind: sentnce, name: a, text: b}]", "template 0.*'sentence'"),
        ("templates: [{kind: sentence, name: a, txt: b}]", "template 0.*'txt'.*'text'"),
        ("templates: [{kind: sentence, name: a}]", "template 0.*'a'.*'sentence'.*'text'"),
        ("templates: [{kind: sentence, name: a, text: '{b'}]", r"template 0.*'a'.*character 0\b"),
        ("templates: [{name: a}]", "template 0.*'kind: sentence'"),
        ("templates: {a: 1}", "'templates'"),
        ("templtes: []", r"'templates'.*\['templtes'\]"),
        ("templates: [", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml.*" + message):
        TextTemplateEngine().load_templates(tmp_path / "bad.yaml")


def test_a_written_version_may_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("templates:\n  - {kind: list, name: a, version: 2}\n")
    engine = TextTemplateEngine()
    engine.load_templates(tmp_path / "t.yaml")
    assert engine.versions("a") == ["2"]


class Shout(BaseTemplate):
    """A template as somebody else would write it."""

    name = "shout"

    def __init__(self, column: str) -> None:
        self.column = column

    def columns(self, available: Sequence[str]) -> tuple[str, ...]:
        return (self.column,)

    def rules(self) -> dict[str, Any]:
        return {"column": self.column}

    def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
        return pc.utf8_upper(pc.cast(table[self.column], pa.string())).combine_chunks()


def test_a_template_of_ones_own_needs_three_methods(tmp_path: Path, df: pd.DataFrame) -> None:
    engine = TextTemplateEngine([Shout("Name")])
    assert engine.convert_data(df, "shout") == ["ANN", "BOB"]
    assert Shout("Name").render_row(df.iloc[1]) == "BOB"
    assert Shout("Name") == Shout("Name") != Shout("Age")
    assert Shout("Name").render(as_table(df)).type == pa.string()
    with pytest.raises(SchemaError, match=r"'shout'.*'Name'"):
        Shout("Nam").render(as_table(df))
    with pytest.raises(ConfigError, match="'shout'"):
        engine.save_templates(tmp_path / "t.yaml")


def own(word: str, *, upper: bool = False, kind: str = "x") -> BaseTemplate:
    """Templates of one class name, each with code of its own."""

    class Own(Shout):
        mark = kind

        def rules(self) -> dict[str, Any]:
            return {}

        if upper:

            def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
                return pa.array([word.upper()] * table.num_rows)

        else:

            def render_slice(self, table: pa.Table, first_row: int) -> pa.Array:
                return pa.array([word] * table.num_rows)

    return Own("Name")


def test_templates_of_ones_own_differ_where_their_code_does() -> None:
    prints = [
        template.fingerprint
        for template in (own("a"), own("b"), own("a", upper=True), own("a", kind="y"), Shout("Name"), Shout("Age"))
    ]
    assert len(set(prints)) == len(prints)
    assert own("a").fingerprint == own("a").fingerprint
    examples = {"Name": ["a", "b"], "y": [0, 1]}
    assert FewShot(own("a"), examples, "y", 1).fingerprint != FewShot(own("a", kind="y"), examples, "y", 1).fingerprint


def test_fingerprints_are_the_same_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "own_templates.py").write_text(OWN)
    found = {
        subprocess.run(
            [sys.executable, "-c", "import own_templates"],
            env={
                **os.environ,
                "PYTHONPATH": f"{tmp_path}:{Path(penstock.__file__).parents[1]}",
                "PYTHONHASHSEED": seed,
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert all(len(line) == 32 for line in found.pop().split())


OWN = """
import pyarrow as pa
from penstock.templates import BaseTemplate, KeyValueTemplate

class Own(BaseTemplate):
    words = {"a", "b", "c"}
    def __init__(self): self.name = "own"
    def columns(self, available): return tuple(n for n in available if n in {"x", "y", "z"})
    def rules(self): return {}
    def render_slice(self, table, first_row): return pa.array([", ".join(sorted(self.words))] * len(table))

print(Own().fingerprint, KeyValueTemplate().fingerprint)
"""


def test_every_template_converts_rows_and_tables(df: pd.DataFrame) -> None:
    for template in (AGE, KeyValueTemplate(), Shout("Name"), FewShot(AGE, df, [0, 1], count=1)):
        texts = template.convert_batch(df)
        assert texts == template.convert_table(df).to_pylist() == [template.convert_row(df.iloc[row]) for row in (0, 1)]
    assert KeyValueTemplate().convert_batch([{"x": 1}, {"x": "a"}], mixed="text") == ["x: 1", "x: a"]


def test_names_and_versions_are_texts() -> None:
    with pytest.raises(ConfigError, match="template"):
        SentenceTemplate("", "{a}")
    for version in (1.5, True, ""):
        with pytest.raises(ConfigError, match=rf"version.*{version!r}"):
            SentenceTemplate("a", "{a}", version=version)  # type: ignore[arg-type]
    assert SentenceTemplate("a", "{a}", version=2) == SentenceTemplate("a", "{a}", version="2")
    engine = TextTemplateEngine([KeyValueTemplate("a", version=1), KeyValueTemplate("a", version=2, between="; ")])
    assert engine.get_template("a", 1).version == "1"
    assert engine.convert_data([{"x": 1, "y": 2}], "a", version=2) == ["x: 1; y: 2"]


def test_a_template_that_calls_another_function_has_another_fingerprint() -> None:
    prints = []
    for text in ("a", "b", "a"):
        scope: dict[str, Any] = {"__name__": "users", "BaseTemplate": BaseTemplate}
        code = f"def said(): return {text!r}\nclass Own(BaseTemplate):\n  def convert_row(self, row): return said()\n"
        exec(code, scope)
        prints.append(identity(scope["Own"]))
    assert prints[0] == prints[2] != prints[1]
