"""`penstock prepare --cache` and `penstock cache` as a person types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.files.cache import DiskCache

Call = Callable[..., Any]


def test_a_store_that_another_machine_prepared_is_fetched_and_the_cache_is_shown_and_cleared(
    tmp_path: Path, penstock: Call
) -> None:
    texts, shared = tmp_path / "texts.jsonl", str(tmp_path / "shared")
    texts.write_text('{"text": "some words"}\n' * 20)

    def prepared(name: str) -> Any:
        arguments = ("--tokenizer", "byte", "--out", str(tmp_path / name), "--cache", shared, "--json")
        return json.loads(penstock("prepare", str(texts), *arguments).stdout)

    made = [prepared(name) for name in ("one.store", "two.store")]
    assert [each["made"] for each in made] == [True, False]
    assert made[0]["store"]["tokens"] == made[1]["store"]["tokens"] > 0
    facts = json.loads(penstock("cache", shared, "--json").stdout)
    assert (facts["stores"], facts["tables"]) == (1, 0)
    assert facts["bytes"] == DiskCache(shared).size() > 0
    assert json.loads(penstock("cache", shared, "--clear", "--older-than-days", "1", "--json").stdout)["deleted"] == 0
    assert "deleted" in penstock("cache", shared, "--clear").stdout
    assert json.loads(penstock("cache", shared, "--json").stdout)["bytes"] == 0
