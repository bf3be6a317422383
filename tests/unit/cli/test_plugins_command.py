from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Cli = Callable[..., Any]


def test_built_in_stages_and_plugins_are_listed_with_what_they_do_and_take(penstock: Cli) -> None:
    result = penstock("plugins")
    assert result.exit_code == 0
    groups = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert groups == ["sources", "transforms", "sinks", "formats"]
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]

    def below(line: str) -> list[str]:
        return lines[lines.index(line) + 1 :][:2]

    words = "count_words Add a column with the number of words, `len(text.split())`, as int64."
    assert below(words)[0] == "column, into='words'"
    assert below("shout Text in capitals, with exclamation marks.") == [
        "column, marks=1",
        "penstock-example-plugin 0.1.0, penstock_example_plugin:Shout",
    ]
    assert "ini Files that end in .ini: source and sink." in lines
    assert not [line for line in lines if line.endswith("et al.")]  # no sentence is cut


def test_json_lists_the_same_for_machines(penstock: Cli) -> None:
    entries = json.loads(penstock("plugins", "--json").stdout)
    assert {
        "group": "formats",
        "name": "ini",
        "package": "penstock-example-plugin",
        "version": "0.1.0",
        "target": "penstock_example_plugin:INI",
        "summary": "Files that end in .ini: source and sink.",
        "arguments": [],
        "problem": None,
    } in entries
    assert {entry["group"] for entry in entries} == {"sources", "transforms", "sinks", "formats"}
    own = [entry for entry in entries if entry["package"] == "penstock"]
    assert all(entry["summary"] and entry["arguments"] for entry in own)
    assert {entry["version"] for entry in own} == {version("penstock")}
    assert "penstock.sources.jsonl:JsonlSource" in {entry["target"] for entry in own}
