"""Checks of nodes: one error for all of them, which names the nodes and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.engines.node_checks import NodeFault, error_of, faults_here, versions_here


def kinds(checks: dict[str, object], **versions: str) -> list[tuple[str, str]]:
    return [(fault.kind, fault.detail) for fault in faults_here(checks, {**versions_here(), **versions})]


def test_a_node_like_the_driver_has_no_fault(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.write_text("abc")
    assert kinds({"marker": [str(marker), "abc"], "files": [[str(marker), 3], [str(tmp_path / "x"), None]]}) == []
    assert kinds({"marker": [marker.as_uri(), "abc"], "files": [[marker.as_uri(), 3]]}) == []


def test_other_files_than_the_drivers_are_faults(tmp_path: Path) -> None:
    marker, absent = str(tmp_path / "marker"), str(tmp_path / "absent")
    Path(marker).write_text("abc")
    assert kinds({"marker": [marker, "abd"]}) == [("marker", f"{marker} holds something else")]
    assert kinds({"marker": [absent, "abc"]}) == [("marker", f"{absent} does not exist")]
    assert kinds({"files": [[marker, 4], [absent, 4]]}) == [
        ("file", f"{marker} has not 4 bytes"),
        ("file", f"{absent} does not exist"),
    ]
    assert kinds({"files": [[str(tmp_path), 4]]})[0][1].startswith(f"{tmp_path} cannot be read: ")


def test_other_versions_are_one_fault() -> None:
    here = versions_here()
    assert kinds({}, penstock="9.9", numpy="1.0") == [
        ("version", f"penstock {here['penstock']} instead of 9.9, numpy {here['numpy']} instead of 1.0")
    ]
    assert here["Python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_bucket_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    ((kind, detail),) = kinds({"marker": ["s3://penstock-absent/job/marker", "abc"]})
    assert kind == "extra"
    assert "pip install 'penstock[cloud]'" in detail


def test_an_error_lists_nodes_by_fault_and_says_what_to_do() -> None:
    shared = NodeFault("marker", "/job/marker does not exist")
    faults = [(f"10.0.0.{n}", shared) for n in range(8)] + [("gpu-1 (10.0.1.1)", NodeFault("absent", "no penstock"))]
    error = error_of(faults, versions_here())
    first, second, third = str(error).splitlines()
    assert first == "the cluster is not ready for this job."
    assert second == (
        "A path is not shared: /job/marker does not exist on 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 "
        "more nodes. To mend it: all nodes need the same job directory: put it on a file system that every node mounts "
        "at this path, or into a bucket (s3://...)."
    )
    assert "no penstock on gpu-1 (10.0.1.1). To mend it: install it there (pip install 'penstock[ray]==" in third


@pytest.mark.parametrize("kind", ["absent", "version", "extra", "marker", "file", "work", "silent"])
def test_every_fault_has_a_remedy(kind: str) -> None:
    text = str(error_of([("a", NodeFault(kind, "a fault"))], versions_here()))
    assert "a fault on a. To mend it: " in text
    assert "{" not in text.replace("{'pip'", "").replace("{'working_dir'", "").replace("{'py_modules'", "")
