"""Several sources in one stream: weights in every form, ends, repeats, and edits while it runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import MixedDataLoader, PretrainDataLoader, Schedule
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from token_stores import make_masks, make_rows, make_store

SIZES = {"a": 40, "b": 13, "c": 7}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mixed")
    for number, (name, count) in enumerate(SIZES.items()):
        rows = [[token + 1000 * number for token in row] for row in make_rows(count, 9, seed=number)]
        make_store(home / name, rows, shard_bytes=200)
        make_store(home / f"{name}-chat", rows, make_masks(rows))
    return home


def make(home: Path, names: str = "abc", weights: Any = None, **more: Any) -> MixedDataLoader:
    options = {"chunk_size": 9, "packing": None, "batch_size": 4, "backend": "numpy", "prefetch": 0} | more
    return MixedDataLoader({name: home / name for name in names}, weights, **options)  # type: ignore[arg-type]


def drawn(batches: list[Any]) -> Counter[str]:
    """Samples of each source; rows are samples here."""
    return Counter(batch.metadata["sources"][source] for batch in batches for source in batch.metadata["source"])


def used(batches: list[Any]) -> dict[str, list[int]]:
    """The rows of each source, in the order they came."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        for source, row in zip(batch.metadata["source"], batch.metadata["row"].tolist()):
            found.setdefault(batch.metadata["sources"][source], []).append(row)
    return found


def some(loader: DataLoader, count: int) -> list[Any]:
    return [loader.get_batch() for _ in range(count)]


# Weights


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 5, "b": 3, "c": 2},
        {"c": 0.2, "a": 0.5, "b": 0.3},
        [5, 3, 2],
        (0.5, 0.3, 0.2),
        np.array([0.5, 0.3, 0.2]),
        Schedule.constant({"a": 5, "b": 3, "c": 2}),
    ],
    ids=repr,
)
def test_weights_may_be_given_in_any_form(home: Path, weights: Any) -> None:
    loader = make(home, weights=weights, stopping_strategy="never", batch_size=10)
    for batch in some(loader, 5):
        assert drawn([batch]) == {"a": 5, "b": 3, "c": 2}


def test_without_weights_sources_count_by_their_tokens(home: Path) -> None:
    loader = make(home, stopping_strategy="never", packing="concat", batch_size=50)
    tokens = {source.name: source.inputs.table.tokens for source in loader.sources}
    batch = loader.get_batch()
    first = np.unique(batch.metadata["sample"], return_index=True)[1]
    counts = np.bincount(batch.metadata["source"][first], minlength=3)
    wanted = np.array([tokens[name] for name in "abc"]) / sum(tokens.values()) * 50
    assert (abs(counts - wanted) <= 1).all()


def test_a_temperature_makes_shares_more_even(home: Path) -> None:
    shares = []
    for temperature in (1.0, 2.0, 1000.0):
        counts = drawn(some(make(home, stopping_strategy="never", temperature=temperature, batch_size=30), 10))
        shares.append([counts[name] / 300 for name in "abc"])
    assert shares[0][0] > shares[1][0] > shares[2][0]
    assert shares[0][2] < shares[1][2] < shares[2][2]
    assert all(abs(share - 1 / 3) < 0.01 for share in shares[2])


def test_a_schedule_changes_the_mixture_at_its_steps(home: Path) -> None:
    weights = Schedule.of([(0, {"a": 1, "b": 0, "c": 0}), (3, {"a": 0, "b": 1, "c": 1})])
    batches = some(make(home, weights=weights, stopping_strategy="never"), 8)
    assert drawn(batches[:3]) == {"a": 12}
    assert drawn(batches[3:]) == {"b": 10, "c": 10}


def test_a_source_of_weight_zero_is_left_out(home: Path) -> None:
    assert set(drawn(some(make(home, weights=[1, 0, 1], stopping_strategy="never"), 10))) == {"a", "c"}


def test_sources_are_used_in_an_order_of_their_own_whatever_the_weights(home: Path) -> None:
    one = used(some(make(home, weights=[1, 1, 1], stopping_strategy="never"), 20))
    other = used(some(make(home, weights=[3, 1, 2], stopping_strategy="never"), 20))
    for name in "abc":
        shorter = min(len(one[name]), len(other[name]))
        assert one[name][:shorter] == other[name][:shorter]


# Where an epoch ends


def test_an_epoch_ends_when_the_first_source_ends(home: Path) -> None:
    batches = list(make(home, weights=[1, 1, 1], batch_size=3))
    assert len(batches) == SIZES["c"]
    assert sorted(used(batches)["c"]) == list(range(7))


def test_an_epoch_ends_when_the_last_source_ends(home: Path) -> None:
    loader = make(home, weights=[1, 1, 1], batch_size=3, stopping_strategy="all_exhausted")
    batches = list(loader)
    assert len(batches) == SIZES["a"] == loader.plan.steps_in(0)
    counts = {name: Counter(rows) for name, rows in used(batches).items()}
    assert set(counts["a"].values()) == {1}
    assert set(counts["c"].values()) == {5, 6}, "what is short comes again, evenly"


@pytest.mark.parametrize("size", [1, 4, 7, 60])
@pytest.mark.parametrize("packing", [None, "best_fit"])
def test_each_source_is_used_exactly_once_when_asked_to(home: Path, size: int, packing: Any) -> None:
    loader = make(
        home, weights=[1, 1, 1], batch_size=size, packing=packing, stopping_strategy="all_exhausted_without_replacement"
    )
    for _ in range(2):
        count = len(loader)
        batches = list(loader)
        assert len(batches) == count
        for name, rows in used(batches).items():
            assert Counter(rows) == dict.fromkeys(range(SIZES[name]), 1)


def test_a_mixture_without_an_end_goes_on(home: Path) -> None:
    loader = make(home, weights=[1, 1, 1], stopping_strategy="never")
    batches = [batch for batch, _ in zip(loader, range(200))]
    assert len(batches) == 200
    assert loader.epoch == 0
    with pytest.raises(TypeError, match="stopping_strategy='never'"):
        len(loader)


def test_no_source_is_used_more_often_than_it_may_be(home: Path) -> None:
    loader = make(home, weights=[1, 1, 1], stopping_strategy="never", max_epochs={"b": 2, "c": 1})
    counts = {name: Counter(rows) for name, rows in used(some(loader, 60)).items()}
    assert set(counts["b"].values()) == {2}
    assert set(counts["c"].values()) == {1}
    assert counts["a"].total() == 60 * 4 - 2 * 13 - 7


def test_when_every_source_was_used_as_often_as_it_may_be_there_is_nothing_more(home: Path) -> None:
    loader = make(home, weights=[1, 1, 1], stopping_strategy="never", max_epochs=2)
    batches = list(loader)
    for name, rows in used(batches).items():
        assert Counter(rows) == dict.fromkeys(range(SIZES[name]), 2)
    assert list(loader) == []
    with pytest.raises(EOFError, match="max_epochs"):
        loader.get_batch()
    state = loader.state_dict()
    fresh = make(home, weights=[1, 1, 1], stopping_strategy="never", max_epochs=2)
    fresh.load_state_dict(state)
    assert list(fresh) == []


# Edits while it runs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(data=st.data(), packing=st.sampled_from([None, "concat", "best_fit"]))
def test_a_reweighted_run_loses_and_repeats_nothing(home: Path, data: st.DataObject, packing: Any) -> None:
    options: dict[str, Any] = {"weights": [2, 1, 1], "packing": packing, "stopping_strategy": "never"}
    plain = used(some(make(home, **options), 40))
    loader = make(home, **options)
    batches = some(loader, data.draw(st.integers(0, 12)))
    weights = dict(zip("abc", data.draw(st.sampled_from([[1, 4, 2], [0, 1, 0], [1, 1, 9], [0.3, 0.3, 0.4]]))))
    loader.edit(loader.plan.reweight(loader.step + data.draw(st.integers(0, 5)), weights))
    batches += some(loader, data.draw(st.integers(0, 8)))
    fresh = make(home, **options)
    fresh.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    batches += some(fresh, 10)
    assert [batch.metadata["step"] for batch in batches] == list(range(len(batches)))
    for name, rows in used(batches).items():
        shorter = min(len(rows), len(plain.get(name, [])))
        assert rows[:shorter] == plain.get(name, [])[:shorter]


def test_an_edited_mixture_is_the_same_on_every_rank(home: Path) -> None:
    def run(rank: int, world: int) -> list[Any]:
        loader = make(
            home, weights=[1, 1, 1], batch_size=6 // world, rank=rank, world_size=world, stopping_strategy="never"
        )
        batches = some(loader, 5)
        loader.edit(loader.plan.reweight(7, {"a": 0, "b": 1, "c": 2}).skip(9, 11).ban({"b": [1, 2]}, step=6))
        return batches + some(loader, 10)

    alone, *ranks = run(0, 1), run(0, 2), run(1, 2)
    for whole, *shares in zip(alone, *ranks):
        assert [row for share in shares for row in share.metadata["row"]] == whole.metadata["row"].tolist()
        assert {share.metadata["step"] for share in shares} == {whole.metadata["step"]}
        assert {share.num_items_in_batch for share in shares} == {whole.num_items_in_batch}


# Sources that are loaders


def test_loaders_may_be_mixed_and_keep_their_own_position(home: Path) -> None:
    one, two = (PretrainDataLoader(home / name, chunk_size=9, packing=None, backend="numpy") for name in "ab")
    one.get_batch()
    for sources in ({"a": one, "b": two}, [one, two], {"a": one, "b": home / "b"}):
        loader = MixedDataLoader(sources, [1, 1], chunk_size=9, packing=None, batch_size=4, backend="numpy")
        wanted = make(home, "ab", [1, 1])
        if isinstance(sources, dict):
            assert [batch.input_ids.tolist() for batch in loader] == [batch.input_ids.tolist() for batch in wanted]
        else:
            assert loader.plan.names == ("source0", "source1")
    assert one.step == 1


def test_closing_a_mixture_leaves_the_loaders_it_was_given_alone(home: Path) -> None:
    one, two = (PretrainDataLoader(home / name, chunk_size=9, packing=None, backend="numpy") for name in "ab")
    MixedDataLoader([one, two], [1, 1], batch_size=4, backend="numpy").close()
    assert len(list(one)) == len(one)


def test_chats_and_text_learn_each_by_its_own_mask(home: Path) -> None:
    loader = MixedDataLoader(
        {"a": home / "a", "b": home / "b-chat"}, [1, 1], chunk_size=9, packing=None, batch_size=6, backend="numpy"
    )
    masks = make_masks([[0] * len(row) for row in make_rows(13, 9, seed=1)])
    batch = loader.get_batch()
    for place, (source, row) in enumerate(zip(batch.metadata["source"], batch.metadata["row"].tolist())):
        ids = batch.input_ids[place, : int(batch.attention_mask[place].sum())].tolist()
        mask = masks[row] if source else [True] * len(ids)
        wanted = [token if learn and number else IGNORE for number, (token, learn) in enumerate(zip(ids, mask))]
        assert batch.labels[place, : len(ids)].tolist() == wanted


def test_sources_of_another_form_are_refused(home: Path) -> None:
    one = PretrainDataLoader(home / "a", chunk_size=9, packing="concat", backend="numpy")
    two = PretrainDataLoader(home / "b", chunk_size=9, packing=None, backend="numpy")
    with pytest.raises(ConfigError, match=r"the same packing \(True in 'source0', False in 'source1'\)$"):
        MixedDataLoader([one, two], [1, 1], backend="numpy")


def test_a_mixture_of_mixtures_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="'x'"):
        MixedDataLoader({"x": make(home), "y": home / "a"}, backend="numpy")


# What cannot work


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1, "b": -1, "c": 1}, r"'b'.*step 0\b"),
        ({"a": 0, "b": 0, "c": 0}, r"step 0\b"),
        ([0, 0, 0], r"step 0\b"),
        ({"a": 1, "b": 1, "d": 1}, r"'d'.*'a'"),
        ({"a": 1, "b": 1}, "'c'"),
        ({}, "schedule"),
        ([1, 1], r"'a'.*'b'"),
        ([1, 1, "x"], r"'c'.*'x'"),
        ([1, 1, float("nan")], r"\bnan\b"),
        ([1, 1, float("inf")], r"\binf\b"),
        ([1, 1, True], r"'c'.*True"),
        (0.5, r"\b0\.5\b"),
        ("abc", "'abc'"),
        (Schedule.constant({"a": 1, "b": 1}), "'c'"),
        (Schedule.constant({"a": 1, "b": 1, "c": 1, "d": 1}), "'d'"),
    ],
)
def test_weights_that_cannot_be_are_refused(home: Path, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(home, weights=weights)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(5, {"a": 1, "b": 1})], r"step 5\b"),
        ([(0, {"a": 1, "b": 1}), (5, {"a": 1})], r"'b'.*step 5\b"),
        ([(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1}), (5, {"a": 1, "b": 1})], r"\b5\b.*\b9\b"),
        ([], "(?i)schedule"),
    ],
)
def test_a_schedule_with_a_gap_is_refused(points: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule.of(points)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_epochs": {"d": 1}}, r"max_epochs.*'d'"),
        ({"max_epochs": 0}, r"max_epochs.*'a'"),
        ({"max_epochs": True}, "max_epochs"),
        ({"max_epochs": 1.5}, "max_epochs"),
        ({"max_epochs": "two"}, "'two'"),
        ({"max_epochs": {"a": None}}, r"max_epochs.*'a'"),
        ({"stopping_strategy": "all_exausted"}, "'all_exhausted'"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": "hot"}, r"temperature.*'hot'"),
        ({"temperature": 2.0, "weights": [1, 1, 1]}, "weights"),
    ],
)
def test_options_that_cannot_be_are_refused(home: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(home, **more)


def test_a_temperature_and_a_schedule_are_refused_together(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature=2\.0"):
        make(home, weights=Schedule.constant({"a": 1, "b": 1, "c": 1}), temperature=2.0)


@pytest.mark.parametrize("sources", ["abc", 5, None, {}, []])
def test_sources_are_a_dict_or_a_list(sources: Any) -> None:
    with pytest.raises(ConfigError):
        MixedDataLoader(sources)
