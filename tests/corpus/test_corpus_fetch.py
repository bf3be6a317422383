from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import fetch
import pytest

import corpus_files


def archive(place: Path, **files: str) -> Path:
    file = place / "p-1.tar.gz"
    with tarfile.open(file, "w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_j", ".jinja"))
            member.size = len(text)
            opened.addfile(member, io.BytesIO(text.encode()))
    return file


def part(calls: list[str], version: str = "1") -> fetch.Part:
    def download(part: fetch.Part, into: Path) -> Path:
        calls.append(part.stamp)
        return archive(into, p__models__a_j="A", p__models__b_j="B", p__code="C")

    return fetch.Part("templates/x", "p", version, "p/models/*.jinja", 2, download)


def test_only_the_files_that_are_wanted_are_kept_and_fetched_once(tmp_path: Path) -> None:
    calls: list[str] = []
    assert fetch.fetch(tmp_path, (part(calls),)) == {}
    kept = tmp_path / "templates" / "x"
    assert {file.name: file.read_text() for file in kept.glob("*")} == {
        "a.jinja": "A",
        "b.jinja": "B",
        ".package": "p 1",
    }
    fetch.fetch(tmp_path, (part(calls),))
    assert calls == ["p 1"]
    fetch.fetch(tmp_path, (part(calls, "2"),))
    assert (kept / ".package").read_text() == "p 2"
    assert [path.name for path in tmp_path.iterdir()] == ["templates"]


def test_what_cannot_be_fetched_is_noted_until_it_can(tmp_path: Path) -> None:
    few = dataclasses.replace(part([]), least=3)
    assert "matches 2 files" in fetch.fetch(tmp_path, (few,))["templates/x"]
    assert "matches 2 files" in json.loads((tmp_path / fetch.NOTE).read_text())["templates/x"]
    assert not (tmp_path / "templates" / "x").exists()
    assert fetch.fetch(tmp_path, (part([]),)) == {}
    assert not (tmp_path / fetch.NOTE).exists()


@pytest.mark.parametrize("ci", ["", "1"])
def test_without_npm_it_says_so_and_fails_in_ci(tmp_path: Path, ci: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PARTS", fetch.PARTS[1:])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(sys, "argv", ["fetch.py", str(tmp_path / "corpus"), "--stamp", str(tmp_path / "stamp")])
    assert fetch.main() == (1 if ci else 0)
    assert not (tmp_path / "stamp").exists()
    monkeypatch.setattr(corpus_files, "CORPUS", tmp_path / "corpus")
    expected = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(expected, match="npm"):
        corpus_files.tokenizer_dir("gpt2")


def test_a_source_distribution_tells_its_metadata_without_its_own_backend(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: a-b\nVersion: 1.2\n\nText")
    code = "import build_backend; print(build_backend.prepare_metadata_for_build_wheel('.'))"
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert done.stdout.strip() == "a_b-1.2.dist-info", done.stderr
    assert (tmp_path / "a_b-1.2.dist-info" / "METADATA").read_text().startswith("Metadata-Version")


def test_templates_and_tokenizers_are_there_by_name() -> None:
    found = corpus_files.templates()
    assert sum(name.startswith("llama.cpp/") for name in found) >= 60
    assert all(source.strip() for source in found.values())
    for name in corpus_files.TOKENIZERS:
        files = {file.name for file in corpus_files.tokenizer_dir(name).iterdir()}
        assert files == {"tokenizer.json", "tokenizer_config.json", ".package"}
