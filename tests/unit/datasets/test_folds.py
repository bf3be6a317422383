"""Folds: every row validated once, nothing on both sides, and the same division wherever it is made."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.datasets.base import DatasetSpec
from penstock.datasets.folds import FoldKind, Folds
from penstock.errors import ConfigError, DataError, SchemaError

quickly = settings(max_examples=80, deadline=None)
seeds = st.integers(0, 2**32 - 1)
counts = st.integers(2, 6)


def spec(kind: str = "multiclass", **options: Any) -> DatasetSpec:
    return DatasetSpec("made-up", "nowhere", kind, **{"target_column": "y", **options})  # type: ignore[arg-type]


def table(seed: int, rows: int = 60, *, classes: int = 3, groups: int = 15, times: int = 20) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "y": rng.integers(0, classes, rows),
            "value": rng.normal(size=rows),
            "group": [f"g{number}" for number in np.r_[np.arange(groups), rng.integers(0, groups, rows - groups)]],
            "time": np.r_[np.arange(times), rng.integers(0, times, rows - times)],
        }
    )


def every_row_once(folds: Folds, data: Any, about: DatasetSpec) -> np.ndarray[Any, Any]:
    """The folds of all rows, having checked that split and assign say the same and that no row is on both sides."""
    assigned = folds.assign(data, about)
    for number in range(folds.count):
        fold = folds.split(data, about, number)
        assert fold.val.tolist() == np.flatnonzero(assigned == number).tolist()
        assert sorted([*fold.train, *fold.val]) == list(range(len(data)))
    return assigned


@given(seed=seeds, count=counts, rows=st.integers(20, 90))
@quickly
def test_plain_folds_have_every_row_once_and_sizes_within_one(seed: int, count: int, rows: int) -> None:
    assigned = every_row_once(Folds(count, kind="plain", seed=seed), table(seed, rows), spec())
    sizes = np.bincount(assigned, minlength=count)
    assert sizes.max() - sizes.min() <= 1


@given(seed=seeds, count=counts, rows=st.integers(20, 90), classes=st.integers(1, 8))
@quickly
def test_stratified_folds_have_every_class_within_one_of_even(seed: int, count: int, rows: int, classes: int) -> None:
    data = table(seed, rows, classes=classes)
    assigned = every_row_once(Folds(count, seed=seed), data, spec())
    labels = np.asarray(data["y"])
    for label in np.unique(labels):
        there = np.bincount(assigned[labels == label], minlength=count)
        assert there.max() - there.min() <= 1
    sizes = np.bincount(assigned, minlength=count)
    assert sizes.max() - sizes.min() <= 1


@given(seed=seeds, count=counts, kind=st.sampled_from(["grouped", "stratified_grouped"]))
@quickly
def test_no_group_is_in_two_folds(seed: int, count: int, kind: FoldKind) -> None:
    data = table(seed)
    assigned = every_row_once(Folds(count, kind=kind, seed=seed), data, spec(group_column="group"))
    pairs = set(zip(data["group"].to_pylist(), assigned.tolist()))
    assert len(pairs) == len(set(data["group"].to_pylist()))
    assert set(assigned.tolist()) == set(range(count))


@given(seed=seeds, count=counts)
@quickly
def test_groups_of_one_row_are_divided_as_evenly_as_rows(seed: int, count: int) -> None:
    data = table(seed, 60, groups=60)
    assigned = Folds(count, kind="grouped", seed=seed).assign(data, spec(group_column="group"))
    sizes = np.bincount(assigned, minlength=count)
    assert sizes.max() - sizes.min() <= 1
    labels = np.asarray(data["y"])
    assigned = Folds(count, kind="stratified_grouped", seed=seed).assign(data, spec(group_column="group"))
    for label in np.unique(labels):
        there = np.bincount(assigned[labels == label], minlength=count)
        assert there.max() - there.min() <= 1


@given(seed=seeds)
@quickly
def test_stratified_groups_are_more_even_in_classes_than_groups_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(60), 4)
    data = pa.table({"y": (group % 2) ^ (rng.random(240) < 0.1), "group": group})
    about = spec("binary", group_column="group")

    def unevenness(kind: FoldKind) -> float:
        assigned = Folds(5, kind=kind).assign(data, about)
        return float(np.ptp([np.asarray(data["y"])[assigned == number].mean() for number in range(5)]))

    assert unevenness("stratified_grouped") <= max(unevenness("grouped"), 0.1)


@given(seed=seeds, count=st.integers(2, 5), gap=st.integers(0, 2), times=st.integers(12, 40))
@quickly
def test_in_time_validation_is_later_than_training_and_equal_times_stay_together(
    seed: int, count: int, gap: int, times: int
) -> None:
    data = table(seed, times=times)
    about, time = spec(time_column="time"), np.asarray(data["time"])
    folds = Folds(count, gap=gap)
    assigned = folds.assign(data, about)
    assert {(when, fold) for when, fold in zip(time.tolist(), assigned.tolist())}.__len__() == len(set(time.tolist()))
    assert set(assigned.tolist()) == {-1, *range(count)}
    before = 0
    for number in range(count):
        first = time[assigned == number].min()
        if len(set(time[time < first].tolist())) <= gap:
            with pytest.raises(ConfigError, match=rf"gap=.*{gap}"):
                folds.split(data, about, number)
            continue
        train, val = folds.split(data, about, number)
        assert time[train].max() < time[val].min()
        between = {when for when in time.tolist() if time[train].max() < when < time[val].min()}
        assert len(between) == gap
        assert val.tolist() == np.flatnonzero(assigned == number).tolist()
        assert len(train) > before  # the window grows
        before = len(train)
        assert time[assigned > number].min(initial=99) > time[val].max()


@given(seed=seeds, count=st.integers(2, 4))
@quickly
def test_in_time_no_group_is_on_both_sides(seed: int, count: int) -> None:
    data = table(seed, rows=200, groups=120)
    about, group = spec(time_column="time", group_column="group"), np.asarray(data["group"])
    for number in range(count):
        timed = Folds(count).split(data, spec(time_column="time"), number)
        fold = Folds(count).split(data, about, number)
        assert fold.val.tolist() == timed.val.tolist()
        validated = set(group[fold.val].tolist())
        assert fold.train.tolist() == [row for row in timed.train.tolist() if group[row] not in validated]
    everywhere = pa.table({"y": [0] * 8, "time": range(8), "group": [1] * 8})
    with pytest.raises(ConfigError, match=r"\bgroup\b.*'group'"):
        Folds(2).split(everywhere, about, 0)


def test_parts_in_time_have_about_as_many_rows() -> None:
    data = pa.table({"y": [0] * 600, "time": np.arange(600)})
    assert np.bincount(Folds(5).assign(data, spec(time_column="time")) + 1).tolist() == [100] * 6


def test_times_may_be_dates_texts_of_dates_or_timestamps() -> None:
    days = pd.date_range("2024-01-01", periods=24, freq="D")
    numbers = pa.table({"y": [0] * 24, "time": np.arange(24)})
    expected = Folds(3).assign(numbers, spec(time_column="time")).tolist()
    for times in (pa.array(days), pa.array(days).cast(pa.date32()), pa.array(days.strftime("%Y-%m-%d").tolist())):
        data = pa.table({"y": [0] * 24, "time": times})
        assert Folds(3).assign(data, spec(time_column="time")).tolist() == expected
    with pytest.raises(DataError, match="'time'"):
        Folds(3).assign(numbers.set_column(1, "time", pa.array(["1 May"] * 24)), spec(time_column="time"))


@given(seed=seeds)
@quickly
def test_rows_that_are_equal_where_it_counts_are_kept_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = pa.table({"y": rng.integers(0, 2, 80), "a": rng.integers(0, 6, 80), "b": rng.choice(["x", None], 80)})
    assigned = every_row_once(Folds(3, keep_together=("a", "b"), seed=seed), data, spec("binary"))
    pairs = set(zip(data["a"].to_pylist(), data["b"].to_pylist(), assigned.tolist()))
    assert len(pairs) == len(set(zip(data["a"].to_pylist(), data["b"].to_pylist())))


@given(seed=seeds)
@quickly
def test_groups_that_share_copies_are_kept_together_as_a_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    group, copy = rng.integers(0, 90, 60), rng.integers(0, 90, 60)
    data = pa.table({"y": [0.0] * 60, "group": group, "copy": copy})
    folds = Folds(2, kind="grouped", by="group", keep_together=("copy",))
    assigned = every_row_once(folds, data, spec("regression"))
    for column in (group, copy):
        assert all(len(set(assigned[column == value])) == 1 for value in np.unique(column))


@given(seed=seeds, bins=st.integers(2, 6))
@quickly
def test_numbers_are_stratified_by_stretches_of_equal_size(seed: int, bins: int) -> None:
    data = table(seed)
    about = spec("regression", target_column="value")
    assigned = every_row_once(Folds(4, kind="stratified", bins=bins, seed=seed), data, about)
    stretch = np.argsort(np.argsort(np.asarray(data["value"]))) * bins // 60
    for number in range(bins):
        there = np.bincount(assigned[stretch == number], minlength=4)
        assert there.max() - there.min() <= 1


def test_several_labels_are_stratified_by_their_combination() -> None:
    data = pa.table({"a": [0, 0, 1, 1] * 10, "b": [0, 1, 0, 1] * 10})
    assigned = Folds(5).assign(data, spec("multilabel", target_column=["a", "b"]))
    both = np.asarray(data["a"]) * 2 + np.asarray(data["b"])
    assert all(np.bincount(assigned[both == number]).tolist() == [2] * 5 for number in range(4))


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        (spec("regression"), "plain"),
        (spec("regression", group_column="group"), "grouped"),
        (spec("binary"), "stratified"),
        (spec("ordinal"), "stratified"),
        (spec("binary", group_column="group"), "stratified_grouped"),
        (spec("binary", group_column="group", time_column="time"), "time"),
        (spec("binary", target_column=None), "plain"),
    ],
)
def test_auto_goes_by_the_spec(about: DatasetSpec, kind: FoldKind) -> None:
    assert Folds().kind_for(about) == kind
    assert Folds(kind="plain").kind_for(about) == "plain"


KINDS: list[FoldKind] = ["plain", "stratified", "grouped", "stratified_grouped", "time"]


def test_folds_are_the_same_in_another_process_and_for_pandas() -> None:
    about = spec(group_column="group", time_column="time")

    def divided(data: Any) -> list[list[int]]:
        return [Folds(4, kind=kind, seed=7).assign(data, about).tolist() for kind in KINDS]

    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_folds import *; "
        "about = spec(group_column='group', time_column='time'); "
        "print([Folds(4, kind=kind, seed=7).assign(table(5), about).tolist() for kind in KINDS])"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert told.strip() == str(divided(table(5)))
    assert divided(table(5).to_pandas()) == divided(table(5))


def test_folds_stay_what_they_were_in_the_first_release() -> None:
    rows = np.arange(24)
    data = pa.table({"y": rows * rows % 5, "group": rows * 7 % 11, "time": rows * 5 % 13})
    about = spec(group_column="group", time_column="time")
    found = {kind: "".join(str(n) for n in Folds(3, kind=kind).assign(data, about) + 1) for kind in KINDS}
    assert found == {
        "plain": "322131313321212121231332",
        "stratified": "121313323322121212131233",
        "grouped": "212131231332121312313321",
        "stratified_grouped": "212323132312123231323121",
        "time": "013023120131201302312013",
    }


@pytest.mark.parametrize("kind", ["plain", "stratified", "grouped"])
def test_another_seed_gives_other_folds(kind: FoldKind) -> None:
    data, about = table(5, groups=40), spec(group_column="group")
    assert (Folds(4, kind=kind, seed=0).assign(data, about) != Folds(4, kind=kind, seed=1).assign(data, about)).any()


def test_classes_with_fewer_rows_than_folds_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Folds(5).assign(pa.table({"y": [0] * 20 + [1, 1]}), spec("binary"))
        Folds(5).assign(pa.table({"y": [0] * 20 + [1] * 2}), spec("binary"))
    assert re.search(r"\b2 classes.*\b5 folds", caplog.text)
    assert len(caplog.records) == 1  # once, whoever asks


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"count": 1}, r"\bcount\b"),
        ({"count": True}, r"\bcount\b"),
        ({"kind": "stratifed"}, "'stratified'"),
        ({"kind": "plain", "gap": 1}, r"gap=1.*kind='time'"),
        ({"gap": -1}, r"\bgap\b"),
        ({"kind": "time", "keep_together": ["a"]}, "kind='time'"),
        ({"bins": 1}, r"\bbins\b"),
        ({"by": "group"}, "by='group'"),
    ],
)
def test_folds_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Folds(**options)


@pytest.mark.parametrize(
    ("folds", "about", "problem"),
    [
        (Folds(100), spec(), r"\b60\b.*\b100\b"),
        (Folds(20, kind="grouped"), spec(group_column="group"), "'group'"),
        (Folds(20, kind="time"), spec(time_column="time"), r"\b21\b.*\b20\b"),
        (Folds(3, keep_together="group"), spec(time_column="time"), "kind='time'"),  # type: ignore[arg-type]
        (Folds(3, gap=1), spec(), r"gap=1.*'stratified'"),
        (Folds(3, kind="grouped"), spec(), r"by=\.\.\."),
        (Folds(3, kind="time"), spec(), r"by=\.\.\."),
        (Folds(3, kind="stratified"), spec(target_column=None), "target_column"),
        (Folds(3, kind="grouped", by="grop"), spec(), "'group'"),
    ],
)
def test_data_that_cannot_be_divided_says_why(folds: Folds, about: DatasetSpec, problem: str) -> None:
    with pytest.raises((ConfigError, SchemaError), match=problem):
        folds.assign(table(1), about)


@pytest.mark.parametrize("option", ["group_column", "time_column"])
def test_a_row_without_its_group_or_time_is_refused(option: str) -> None:
    data = pa.table({"y": [0, 1] * 5, "it": [1, 2, None, 4, 5, 6, 7, 8, 9, 10]})
    with pytest.raises(DataError, match=r"row 2\b"):
        Folds(2).assign(data, spec("binary", **{option: "it"}))


@pytest.mark.parametrize("fold", [-1, 5, True, 1.0])
def test_a_fold_that_is_not_there_is_refused(fold: Any) -> None:
    with pytest.raises(ConfigError, match=r"\bfold\b"):
        Folds(5).split(table(1), spec(), fold)
