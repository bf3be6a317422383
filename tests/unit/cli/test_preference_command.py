"""prepare, show, lint and the verbs of a loader with preferences, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

TOKENIZER = str(Path(__file__).parents[3] / "examples" / "sample" / "tokenizer")
WRITTEN = ("--tokenizer", TOKENIZER, "--template", "chatml")
PAIRS = [{"prompt": f"Is {n} open?", "chosen": "Yes, it is.", "rejected": "No."} for n in range(5)]
LABELLED = [{"prompt": f"Is {n} open?", "completion": "No.", "label": n % 2 == 0} for n in range(5)]


def penstock(*words: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    made = {"pairs": tmp_path / "pairs.jsonl", "labels": tmp_path / "labels.jsonl"}
    for name, rows in {"pairs": PAIRS, "labels": LABELLED}.items():
        made[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.mark.parametrize("name", ["pairs", "labels"])
def test_preferences_are_refused_until_it_is_said_what_they_are_for(files: dict[str, Path], name: str) -> None:
    out = files[name].with_suffix(".store")
    for verb, more in {"prepare": ("--out", out), "lint": (), "show": ()}.items():
        said = penstock(verb, files[name], *WRITTEN, *more, code=1)
        assert "--preference" in said, verb
        assert "no violation" not in said
    assert not out.exists()
    assert "5 rows" in penstock("lint", files[name], *WRITTEN, "--preference")
    assert "5 rows" in penstock("lint", files[name], *WRITTEN, "--no-preference")
    assert "supervised" in penstock("prepare", files[name], *WRITTEN, "--out", out, "--no-preference")


def test_a_store_of_pairs_is_shown_side_by_side(files: dict[str, Path]) -> None:
    store = files["pairs"].with_suffix(".store")
    penstock("prepare", files["pairs"], *WRITTEN, "--out", store, "--preference", "--quiet")
    said = penstock("show", store, "--row", "3")
    assert "row 3, chosen" in said
    assert "[[Yes, it is.<|im_end|>]]" in said
    assert "row 3, rejected" in said
    assert "[[No.<|im_end|>]]" in said
    assert said.replace("pairs.store", "pairs.jsonl") == penstock(
        "show", files["pairs"], "--row", "3", *WRITTEN, "--preference"
    )
    step = penstock("show", store, "--step", "0", "--set", "batch_size=2", "--set", "shuffle=false")
    places = [step.index(f"row {at}: data row {row}, {side}") for side, at, row in
              [("chosen", 0, 0), ("chosen", 1, 1), ("rejected", 2, 0), ("rejected", 3, 1)]]  # fmt: skip
    assert places == sorted(places)
    assert "the same, byte for byte" in penstock("verify-resume", store, "--steps", "4", "--set", "batch_size=4")
    assert "chosen" in penstock("plan", store, code=1)


def test_a_store_of_labelled_answers_is_shown_with_its_labels(files: dict[str, Path]) -> None:
    store = files["labels"].with_suffix(".store")
    penstock(
        "prepare", files["labels"], *WRITTEN, "--out", store, "--preference", "--quiet", "--max-prompt-length", "9"
    )
    assert "row 1" in penstock("show", store, "--row", "1")
    assert "row 2" in penstock("show", store, "--row", "2")
    assert "steps" in penstock("plan", store)


def test_lint_names_pairs_that_are_no_pairs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [PAIRS[0], PAIRS[1] | {"rejected": ""}, PAIRS[2] | {"chosen": "Yes. " * 400}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = penstock("lint", file, *WRITTEN, "--preference", "--max-length", "100", code=3)
    assert "row 1" in said
    assert "row 2" in said
    assert "3 rows, 2 violations" in said
