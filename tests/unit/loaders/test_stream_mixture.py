"""Mixtures of streams: exact weights, exact resume, the same batches on any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, ResumeError
from penstock.loaders import MixedDataLoader, PretrainDataLoader
from penstock.order.schedules import Schedule


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mixture")
    for name, rows in (("web", 600), ("code", 90), ("books", 200)):
        lines = (json.dumps({"text": f"{name} {row} {'words ' * (row % 7)}"}) for row in range(rows))
        (home / f"{name}.jsonl").write_text("\n".join(lines))
    return home


def stream(home: Path, name: str, **more: Any) -> PretrainDataLoader:
    return PretrainDataLoader(home / f"{name}.jsonl", "byte", 32, streaming=True, backend="numpy", **more)


def make(home: Path, *names: str, weights: Any = None, **more: Any) -> MixedDataLoader:
    names = names or ("web", "code", "books")
    given = {"batch_size": 8, "backend": "numpy", "seed": 3} | more
    shares = dict(zip(names, (0.6, 0.1, 0.3)))
    return MixedDataLoader({name: stream(home, name) for name in names}, weights or shares, **given)


def content(batch: Any) -> Any:
    facts = {name: batch.metadata[name] for name in ("step", "epoch", "source", "offset")}
    return [batch.input_ids.tolist(), *(np.asarray(value).tolist() for value in facts.values())]


def test_weights_are_exact_to_one_sample_at_every_step(home: Path) -> None:
    counts: Counter[int] = Counter()
    with make(home) as loader:
        for number, batch in enumerate(islice(loader, 60), 1):
            firsts = dict(zip(batch.metadata["sample"].tolist()[::-1], batch.metadata["source"].tolist()[::-1]))
            counts.update(firsts.values())
            assert counts.total() == 8 * number
            for source, share in enumerate((0.6, 0.1, 0.3)):
                assert abs(counts[source] - share * 8 * number) <= 1


def test_a_source_gives_the_samples_of_its_own_stream_in_their_order(home: Path) -> None:
    with make(home, "web", "code", weights={"web": 1, "code": 0}) as loader, stream(home, "web", seed=3) as alone:
        found = [row for batch in islice(loader, 20) for row in batch.input_ids.tolist()]
        assert found == alone.get_batch(160).input_ids.tolist()


def test_a_mixture_resumes_after_every_batch_also_when_sources_begin_again(home: Path) -> None:
    with make(home, stopping_strategy="all_exhausted") as loader:
        seen = []
        for batch in islice(loader, 70):
            seen.append((content(batch), json.dumps(loader.state_dict())))
    assert all(len(state) < 4096 for _, state in seen)
    for number in (0, 7, 33, 34, 35, 68):
        with make(home, stopping_strategy="all_exhausted") as loader:
            loader.load_state_dict(json.loads(seen[number][1]))
            assert json.dumps(loader.state_dict()) == seen[number][1]
            assert content(loader.get_batch()) == seen[number + 1][0]


def test_ranks_share_the_batches_of_one_and_take_over_each_others_states(home: Path) -> None:
    with make(home) as whole:
        wanted = [batch.input_ids.tolist() for batch in islice(whole, 9)]
    loaders = [make(home, batch_size=2, rank=rank, world_size=4) for rank in range(4)]
    found = [[loader.get_batch().input_ids.tolist() for _ in range(5)] for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    assert [list(chain(*rows)) for rows in zip(*found)] == wanted[:5]
    assert all(state == states[0] for state in states)
    with make(home) as one:
        one.load_state_dict(states[2])
        assert [one.get_batch().input_ids.tolist() for _ in range(4)] == wanted[5:]
    for loader in loaders:
        loader.close()


def test_an_epoch_ends_with_the_first_source_or_the_last_one(home: Path) -> None:
    with make(home, "code", "books", weights={"code": 0.5, "books": 0.5}) as loader, stream(home, "code") as alone:
        samples = sum(len(batch.input_ids) for batch in alone)
        assert len(list(loader)) == -(-2 * samples // 8)
        assert loader.epoch == 1
        assert next(iter(loader)).metadata["epoch"] == 1
    with (
        make(home, "code", "books", weights={"code": 0.5, "books": 0.5}, stopping_strategy="all_exhausted") as loader,
        stream(home, "books") as alone,
    ):
        samples = sum(len(batch.input_ids) for batch in alone)
        assert len(list(loader)) == -(-2 * samples // 8)


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted"])
def test_later_epochs_are_as_long_as_the_first_wherever_they_begin_in_a_source(home: Path, stopping: str) -> None:
    with make(home, "code", "books", weights={"code": 0.4, "books": 0.6}, stopping_strategy=stopping) as loader:
        lengths = [len(list(loader)) for _ in range(3)]
        state = loader.state_dict()
        following = [content(batch) for batch in loader]
    assert max(lengths) - min(lengths) <= 2, lengths
    with make(home, "code", "books", weights={"code": 0.4, "books": 0.6}, stopping_strategy=stopping) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert [content(batch) for batch in loader] == following


def test_batches_of_any_size_and_a_schedule(home: Path) -> None:
    with make(home) as loader, make(home) as other:
        found = [row for size in (3, 8, 5) for row in loader.get_batch(size).input_ids.tolist()]
        assert found == [row for _ in range(2) for row in other.get_batch().input_ids.tolist()]
    schedule = Schedule.of([(0, {"web": 1.0, "code": 0.0}), (10, {"web": 0.0, "code": 1.0})])
    with make(home, "web", "code", weights=schedule) as loader:
        drawn = [set(batch.metadata["source"].tolist()) for batch in islice(loader, 12)]
    assert drawn == [{0}] * 10 + [{1}] * 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_epochs": 2}, "max_epochs"),
        ({"stopping_strategy": "all_exhausted_without_replacement"}, "stopping_strategy"),
        ({"drop_last": True}, "drop_last"),
    ],
)
def test_what_needs_lengths_is_refused_by_name(home: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(home, **more)


def test_streams_need_weights_and_one_layout_and_no_prepared_source(home: Path) -> None:
    with pytest.raises(ConfigError, match="weights="):
        MixedDataLoader({"web": stream(home, "web"), "code": stream(home, "code")})
    with pytest.raises(ConfigError, match=r"'code' is no stream.*streaming=True"):
        MixedDataLoader({"web": stream(home, "web"), "code": home / "code.jsonl"}, [1, 1])
    with pytest.raises(ConfigError, match="tokenizer has no effect"):
        MixedDataLoader({"web": stream(home, "web")}, [1], tokenizer="byte")
    other = PretrainDataLoader(home / "code.jsonl", "byte", 16, streaming=True, backend="numpy")
    with pytest.raises(ConfigError, match=r"one layout; give both the same chunk_size.*\d in 'web', 16 in 'code'\)$"):
        MixedDataLoader({"web": stream(home, "web"), "code": other}, [1, 1], backend="numpy")


def test_a_state_of_other_streams_is_refused(home: Path) -> None:
    with make(home, "web", "code", weights=[1, 1]) as loader, make(home) as other:
        loader.get_batch()
        with pytest.raises(ResumeError, match="books"):
            other.load_state_dict(loader.state_dict())
