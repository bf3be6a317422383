from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Cli = Callable[..., Any]


def test_built_in_stages_and_plugins_are_listed_by_group(penstock: Cli) -> None:
    result = penstock("plugins")
    assert result.exit_code == 0
    groups = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert groups == ["sources", "transforms", "sinks", "formats"]
    words = [line.split() for line in result.stdout.splitlines()]
    release = version("penstock")
    assert ["jsonl", "penstock", release, "penstock.sources.jsonl:JsonlSource"] in words
    assert ["count_words", "penstock", release, "penstock.transforms.text:CountWords"] in words
    assert ["shout", "penstock-example-plugin", "0.1.0", "penstock_example_plugin:Shout"] in words


def test_json_lists_the_same_for_machines(penstock: Cli) -> None:
    entries = json.loads(penstock("plugins", "--json").stdout)
    assert {
        "group": "formats",
        "name": "ini",
        "package": "penstock-example-plugin",
        "version": "0.1.0",
        "target": "penstock_example_plugin:INI",
        "problem": None,
    } in entries
    assert {entry["group"] for entry in entries} == {"sources", "transforms", "sinks", "formats"}
