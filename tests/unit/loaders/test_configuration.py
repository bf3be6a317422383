from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from penstock.distributed.sharding import Strided
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.loader_file import load_config
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.memory import MemoryBudget
from penstock.order.schedules import Schedule
from penstock.sinks import StoreSink

ALONE: dict[str, Any] = {"rank": 0, "world_size": 1, "backend": "numpy"}


def write_store(path: Path, lengths: Sequence[int], *, mask: bool = False) -> Path:
    rng = np.random.default_rng(0)
    columns = {"input_ids": pa.array([rng.integers(1, 99, n).tolist() for n in lengths], pa.list_(pa.uint16()))}
    if mask:
        columns["loss_mask"] = pa.array([[i % 2 == 1 for i in range(n)] for n in lengths], pa.list_(pa.bool_()))
    sink = StoreSink(path)
    sink.consume(pa.RecordBatch.from_pydict(columns))
    sink.flush()
    return path


def write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def ids(loader: DataLoader, steps: int = 6) -> list[list[list[int]]]:
    with loader:
        return [loader.get_batch().input_ids.tolist() for _ in range(steps)]


def test_a_file_makes_the_loader_that_its_keywords_make(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [9, 4, 12, 7] * 8)
    keywords = {"chunk_size": 16, "packing": "best_fit", "batch_size": 3, "seed": 5, "drop_last": True}
    file = write(tmp_path / "c.yaml", {"loader": "pretrain", "path": str(store), **keywords})
    loader = load_config(file).open(**ALONE)
    assert type(loader) is PretrainDataLoader
    assert ids(loader) == ids(PretrainDataLoader(store, **keywords, **ALONE))  # type: ignore[arg-type]


def test_json_is_read_as_yaml_is(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [9, 4, 12, 7])
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"loader": "pretrain", "path": [str(store)], "chunk_size": 8, "batch_size": 1}))
    assert load_config(file).open(**ALONE).batch_size == 1


def test_a_mixture_has_sources_of_its_own_kind_and_a_schedule(tmp_path: Path) -> None:
    web, chat = write_store(tmp_path / "w", [9, 4] * 20), write_store(tmp_path / "c", [8, 6] * 20, mask=True)
    tree = {
        "loader": "mixed",
        "sources": {"web": str(web), "chat": {"loader": "conversation", "path": str(chat)}},
        "weights": {
            "interpolation": "linear",
            "points": [
                {"step": 0, "weights": {"web": 0.9, "chat": 0.1}},
                {"step": 4, "weights": {"web": 0.5, "chat": 0.5}},
            ],
        },
        "chunk_size": 16,
        "packing": "first_fit",
        "batch_size": 4,
    }
    loader = load_config(write(tmp_path / "c.yaml", tree)).open(**ALONE)
    assert type(loader) is MixedDataLoader
    assert loader.plan.schedule == Schedule.of(
        [(0, {"web": 0.9, "chat": 0.1}), (4, {"web": 0.5, "chat": 0.5})], "linear"
    )
    # What the source does not say is as in the mixture.
    assert [feed.order.describe()["strategy"] for feed in loader.plan.sources] == ["first_fit", "first_fit"]
    tree["weights"] = tree["weights"]["points"]  # type: ignore[index]
    held = load_config(write(tmp_path / "c.yaml", tree)).open(**ALONE).plan.schedule
    assert held is not None
    assert held.parts[0].interpolation == "constant"


def test_edits_are_made_in_their_order(tmp_path: Path) -> None:
    a, b = write_store(tmp_path / "a", [8] * 40), write_store(tmp_path / "b", [8] * 40)
    tree = {
        "loader": "mixed",
        "sources": {"a": str(a), "b": str(b)},
        "weights": {"a": 1, "b": 1},
        "chunk_size": 8,
        "batch_size": 2,
        "edits": [{"skip": [3, 5]}, {"ban": {"a": [1, 2]}, "step": 2}, {"reweight": {"a": 0.2, "b": 0.8}, "step": 6}],
    }
    loader = load_config(write(tmp_path / "c.yaml", tree)).open(**ALONE)
    plain = MixedDataLoader({"a": a, "b": b}, {"a": 1, "b": 1}, chunk_size=8, batch_size=2, **ALONE)
    wanted = plain.plan.skip(3, 5).ban({"a": [1, 2]}, step=2).reweight(6, {"a": 0.2, "b": 0.8})
    assert loader.plan.edits == wanted.edits
    plain.edit(wanted)
    assert ids(loader, 12) == ids(plain, 12)


def test_an_edit_that_does_not_fit_the_data_says_where_it_stands(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [8] * 4)
    tree = {"loader": "pretrain", "path": str(store), "chunk_size": 8, "edits": [{"ban": [99]}]}
    with pytest.raises(ConfigError, match=r"c\.yaml.*\bedits\b"):
        load_config(write(tmp_path / "c.yaml", tree)).open(**ALONE)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        """
loader: mixed
sources: {a: 3, b: {path: x, chnk_size: 4}, c: {loader: mixed}}
weights: [{step: 5, weights: {a: 1, b: 1}}]
batch_sise: 4
shuffle: "yes"
seed: 1.5
sharding: stridet
epochs: 0
edits: [{skip: 4}, {forget: 3}, {ban: {a: x}}, {reweight: 3}, {skip: [1, 2], step: 1}]
"""
    )
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    said = str(raised.value)
    assert said.startswith(f"{file} has 14 problems")
    for line in (
        r"batch_sise: .*'batch_size'",
        "shuffle: .*'yes'",
        r"seed: .*1\.5",
        "sharding: .*'stridet'.*'strided'",
        r"epochs: .*\b0\b",
        r"edits\[0\]\.skip: ",
        r"edits\[1\]: .*skip, ban or reweight",
        r"edits\[2\]\.ban: .*'x'",
        r"edits\[3\]\.reweight: .*3",
        r"edits\[4\]: .*skip",
        r"sources\.a: .*3",
        r"sources\.b\.chnk_size: .*'chunk_size'",
        r"sources\.c\.loader: .*'mixed'",
        "weights: .*schedule",
    ):
        assert re.search(rf"\n  {line}", said)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'loader: pretrain'"),
        ("- a\n", "'loader: pretrain'"),
        ("path: a\n", "loader: "),
        ("loader: pretrian\npath: a\n", "'pretrian'"),
        ("loader: pretrain\n", "path: "),
        ("loader: mixed\nweights: {a: 1}\n", "sources: "),
        ("loader: pretrain\npath: 3\n", "path: "),
        ("loader: pretrain\npath: a\npath: b\n", "'path'"),
        ("loader: pretrain\npath: a\nchat_template: x\n", "chat_template: "),
        ("loader: pretrain\npath: a\ngroup: x\n", "group: "),
        ("loader: conversation\npath: a\nchat_template: 3\n", "chat_template"),
        (
            "loader: mixed\nsources: {a: x}\nweights: {points: [], interpolaton: 1}\n",
            "'interpolation'",
        ),
        ("loader: mixed\nsources: {a: x}\nweights: [{at: 1}]\n", "weights"),
    ],
)
def test_a_mistake_says_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(file)


def test_overrides_change_values_and_the_kind_of_loader(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [8] * 20, mask=True)
    file = write(tmp_path / "c.yaml", {"loader": "pretrain", "path": str(store)})
    changed = load_config(file, ["max_length=8", "loader=conversation", "sharding=strided", "epochs=3"])
    assert changed.epochs == 3
    loader = changed.open(**ALONE)
    assert type(loader) is ConversationDataLoader
    assert loader.options.sharding == Strided()
    with pytest.raises(ConfigError, match=r"--set.*'max_length'"):
        load_config(file, ["loader=conversation", "max_lenght=8"])
    with pytest.raises(ConfigError, match=r"a\.b=value.*'seed'"):
        load_config(file, ["seed"])


def test_a_store_is_a_description_too(tmp_path: Path) -> None:
    text, chat = write_store(tmp_path / "t", [8] * 4), write_store(tmp_path / "c", [8] * 4, mask=True)
    assert type(load_config(text).open(**ALONE)) is PretrainDataLoader
    assert (
        load_config(chat, ["max_length=9", "packing=best_fit"])
        .open(**ALONE)
        .plan.describe()["sources"][0]["order"]["max_length"]
        == 9
    )
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "nothing.yaml")


def test_a_file_for_other_ranks_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "s", [8] * 40)
    tree = {"loader": "pretrain", "path": str(store), "chunk_size": 8, "batch_size": 2, "world_size": 4}
    config = load_config(write(tmp_path / "c.yaml", tree))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"world_size=4.*rank 0\b"):
        config.open(backend="numpy")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = config.open(backend="numpy")
    assert (loader.rank.rank, loader.rank.world_size, loader.plan.global_batch) == (3, 4, 8)
    assert config.open(backend="numpy", rank=1).rank.rank == 1


def test_a_budget_is_written_as_text(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [8] * 4)
    tree = {"loader": "pretrain", "path": str(store), "chunk_size": 8, "budget": "64 MiB"}
    budget = load_config(write(tmp_path / "c.yaml", tree)).open(**ALONE).options.budget
    assert isinstance(budget, MemoryBudget)
    assert budget.capacity == 64 << 20


@pytest.mark.parametrize(
    "given", ["budget=-3", "fields=3", "cache_dir=3", "backend=numpi", "packing=best", "prefetch=-1"]
)
def test_a_value_that_the_loader_refuses_is_a_config_error(tmp_path: Path, given: str) -> None:
    store = write_store(tmp_path / "s", [8] * 4)
    file = write(tmp_path / "c.yaml", {"loader": "pretrain", "path": str(store), "chunk_size": 8})
    with pytest.raises(ConfigError):
        load_config(file, [given]).open(rank=0, world_size=1)


def test_a_file_has_the_options_of_raw_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "One"}\n{"text": null}\n{"text": 1\n')
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "loader.yaml").write_text(
        f"loader: pretrain\npath: ['{tmp_path / 'a.jsonl'}', '{tmp_path / 'b.jsonl'}']\ntokenizer: byte\n"
        f"backend: numpy\npacking: null\ncache_dir: '{tmp_path / 'cache'}'\n"
        "on_error: skip\nallow_empty: true\ncolumns: [text]\ntransforms: [drop_nulls, {lower: text}]\nadd_eos: false\n"
    )
    with load_config(tmp_path / "loader.yaml").open() as loader:
        (batch,) = loader
    assert batch.input_ids.tolist() == [list(b"one")]
