from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from ui_cases import client, make_store, shown, states, write_lines, write_run

from penstock.errors import ConfigError
from penstock.fsqueue import Queue
from penstock.loaders.loader_file import load_config
from penstock.ui.targets import find_targets


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    """A queue with some batches."""
    from penstock.fsqueue import DataProviderBase

    class Small(DataProviderBase):
        def build_meta(self) -> dict[str, object]:
            return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [3], "role": "input"}]}

        def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, object]:
            return {"x": np.zeros((self.batch_size, 3), np.int64)}

    path = tmp_path / "data" / "queue"
    facts = {
        "dataset": "small",
        "batch_size": 2,
        "block_size": 3,
        "batches_per_file": 2,
        "split_proportions": {"train": 1.0},
    }
    Small(facts, queue_dir=path).run(max_batches=6)
    return path


@pytest.fixture
def loader(tmp_path: Path) -> Path:
    for name in ("web", "chat"):
        make_store(tmp_path / f"{name}.store", [f"{name} {number} " + "word " * (number % 9) for number in range(80)])
    path = tmp_path / "train.yaml"
    sources = {name: str(tmp_path / f"{name}.store") for name in ("web", "chat")}
    facts = {"loader": "mixed", "sources": sources, "weights": {"web": 0.5, "chat": 0.5}, "chunk_size": 64}
    facts |= {"packing": "best_fit", "truncation": "split", "batch_size": 4, "seed": 3, "edits": [{"skip": [2, 3]}]}
    path.write_text(yaml.safe_dump(facts))
    return path


def test_the_overview_names_every_target_and_its_state(tmp_path: Path, queue: Path, loader: Path) -> None:
    rows = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    run = write_run(tmp_path / "r.metrics.jsonl", "loader", [{"penstock_loader_data_wait_ratio": 0.25}] * 2)
    made = client(tmp_path / "web.store", rows, loader, run, queue)
    for path in ("/", "/live"):
        text = shown(made, path)
        for said in ("80 rows", "1 file", "train.yaml", "data wait 25.0%", "6 batches ready", "no member is at work"):
            assert said in text, said
        assert re.findall(r'href="(/t/\d)"', text) == [f"/t/{number}" for number in range(5)]


def test_a_step_shows_the_rows_of_the_plan_and_links_to_them(tmp_path: Path, loader: Path) -> None:
    made = client(loader, tmp_path / "web.store")
    with load_config(loader).open(rank=0, world_size=1, backend="numpy") as opened:
        for number in (0, 1, 5):
            text = shown(made, f"/t/0/step/{number}")
            rows = opened.plan.step(number).rows
            assert len(re.findall('class="entry"', text)) == len(rows)
            for source, row in rows:
                assert f">{source} row {row}</span>" in text
                address = f"/t/1/row/0-0-{row}" if source == "web" else f"source=chat&amp;row={row}"
                assert address in text
        assert "skipped by an edit" in shown(made, "/t/0/step/2")
        assert "too far" in shown(made, f"/t/0/step/{10**12}", 404)
        steps = opened.plan.steps_in(0)
    assert made.get("/t/0/step?step=1%2C204").headers["location"] == "/t/0/step/1204"
    until = time.monotonic() + 60
    while f"<dd>{steps}<" not in shown(made, "/t/0/live") and time.monotonic() < until:
        time.sleep(0.01)
    assert f"<dd>{steps}<" in shown(made, "/t/0")


def test_a_row_is_traced_to_its_steps_also_from_the_store(tmp_path: Path, loader: Path) -> None:
    made = client(loader, tmp_path / "web.store")
    with load_config(loader).open(rank=0, world_size=1, backend="numpy") as opened:
        uses = opened.plan.trace("web", 17, epochs=2)
    for path in ("/t/0/trace?source=web&row=17&epochs=2", "/t/0/trace?store=1&row=17&epochs=2"):
        text = shown(made, path)
        assert re.findall(r"/t/0/step/(\d+)\"", text) == [str(use.step) for use in uses]
        assert text.count("not delivered") == sum(use.skipped for use in uses)
    assert "/t/0/trace?store=1&amp;row=17" in shown(made, "/t/1/row/0-0-17")
    assert "does not exist" in shown(made, "/t/0/trace?source=web&row=5000", 404)
    assert "unknown source" in shown(made, "/t/0/trace?source=wbe&row=5", 404)
    assert "which row" in shown(made, "/t/0/trace?source=web", 404)


def test_a_loader_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("loader: pretrain\npath: missing.store\nchunk: 3\n")
    assert "chunk" in shown(client(path), "/t/0", 404)
    path.write_text("loader: pretrain\npath: missing.store\nstreaming: true\n")
    assert "a stream has no plan" in shown(client(path), "/t/0", 404)


def test_a_queue_shows_backlog_leases_and_who_is_alive(queue: Path) -> None:
    made = client(queue.parent)
    text = shown(made, "/t/0")
    assert "6" in text
    assert "no member is at work" in text
    Queue.open(queue)
    (queue / "members" / "c123456789ab~l30~b3~d4").write_text('{"role": "consumer", "host": "h", "pid": 7}')
    text = shown(made, "/t/0/live")
    assert "c123456789ab" in text
    assert ">alive</span>" in text
    shutil.rmtree(queue)
    assert "not found" in shown(made, "/t/0/live", 404)


def test_looking_changes_no_byte_and_no_time(tmp_path: Path, queue: Path, loader: Path) -> None:
    shutil.rmtree(queue / "members")  # as git does
    rows = write_lines(tmp_path / "a.jsonl", [{"text": "x"}] * 90)
    run = write_run(tmp_path / "r.metrics.jsonl", "pipeline", [{}] * 3)
    before = states(tmp_path)
    made = client(tmp_path / "web.store", rows, loader, run, queue)
    for path in ("/", "/live", "/t/0", "/t/0?q=word", "/t/0?min=9", "/t/0/row/0-0-3", "/t/1", "/t/1?row=70", "/t/2"):
        shown(made, path)
    for path in ("/t/2/step/1", "/t/2/trace?source=web&row=3", "/t/3", "/t/3/live", "/t/4", "/t/4/live"):
        shown(made, path)
    assert states(tmp_path) == before


def test_targets_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("x = 1")
    for place, reason in (
        (tmp_path / "missing.jsonl", "does not exist"),
        (tmp_path / "config.py", "is code"),
        ("postgresql://host/db?table=t", "database"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_targets([str(place)])
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    (tmp_path / "x.weird").write_text("?")
    assert "no source reads" in shown(client(tmp_path / "x.weird"), "/t/0", 404)
    assert "no source reads" in shown(client(tmp_path / "x.weird"), "/")


def test_a_page_that_fails_is_a_page_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client(write_lines(tmp_path / "a.jsonl", [{"text": "x"}]))
    with monkeypatch.context() as patched:
        patched.setattr("penstock.ui.file_rows.FileRows.page", lambda *_: 1 / 0)
        assert "ZeroDivisionError" in shown(made, "/t/0", 500)
    assert "row 0" in shown(made, "/t/0")


def test_a_loader_file_at_a_url_is_one_with_options_behind_its_name() -> None:
    (target,) = find_targets(["s3://bucket/train.yaml?region=eu&secret_access_key=s3cr3t"])
    assert target.kind == "loader"
    assert "s3cr3t" not in target.shown + target.name
