from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from queues import LENGTH, PAIR, PER_FILE, ROWS, Numbered, consumer, fill, given, ks, names, provider

from penstock.config import Setting
from penstock.errors import ConfigError, QueueNotFoundError, SchemaError, StaleQueueError
from penstock.fsqueue import DataProviderBase, ProviderProgress, Queue

GOOD = {"x": np.zeros((ROWS, LENGTH), np.int64), "y": np.zeros((ROWS, LENGTH), np.int64)}


def contents(path: Path, split: str = "train") -> dict[int, bytes]:
    """Every batch of a queue that has ended, by its number."""
    with consumer(path) as reader:
        return {int(x[0, 0]): x.tobytes() + y.tobytes() for x, y in reader.batches(split)}


def test_a_batch_is_the_same_whoever_makes_it(tmp_path: Path) -> None:
    alone = contents(fill(tmp_path / "alone", 30))
    assert list(alone) == list(range(30))
    shared = tmp_path / "shared"
    providers = [provider(shared, backlog_files=100) for _ in range(3)]
    threads = [threading.Thread(target=each.run, kwargs={"max_batches": 30}) for each in providers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(shared) == alone
    source = provider(tmp_path / "nowhere")
    for k in (29, 3, 3):
        batch = source.make_batch("train", k)
        assert batch["x"].tobytes() + batch["y"].tobytes() == alone[k]
    assert not (tmp_path / "nowhere").exists(), "making a batch writes nothing"


def test_seeds_splits_and_numbers_have_randomness_of_their_own(tmp_path: Path) -> None:
    def drawn(seed: int, split: str, k: int) -> bytes:
        source = provider(tmp_path / "q", seed=seed, split_proportions={"train": 1, "val": 1})
        return bytes(source.make_batch(split, k)["y"].tobytes())

    cases = [(seed, split, k) for seed in (0, 1) for split in ("train", "val") for k in (0, 1)]
    assert len({drawn(*case) for case in cases}) == len(cases)


def test_a_number_of_a_batch_may_be_one_of_numpy_and_not_below_zero(tmp_path: Path) -> None:
    source = provider(tmp_path / "q")
    batch, same = source.make_batch("train", 3), source.make_batch("train", np.int64(3))
    assert all(np.array_equal(batch[name], same[name]) for name in batch)
    assert type(source.batch_index) is int
    with pytest.raises(ConfigError, match=r"'train'.*\b0\b.*k=-1"):
        source.make_batch("train", -1)
    with pytest.raises(TypeError, match="float"):
        source.make_batch("train", 1.0)


def test_files_are_made_in_proportion(tmp_path: Path) -> None:
    source = provider(tmp_path / "q", split_proportions={"train": 0.7, "val": 0.2, "test": 0.1}, backlog_files=1000)
    made: list[ProviderProgress] = []
    counts: list[dict[str, int]] = []
    publish = source._publish

    def counting(publisher: Any, number: int) -> None:
        publish(publisher, number)
        split = publisher.split
        counts.append({**(counts[-1] if counts else dict.fromkeys(source.proportions, 0))})
        counts[-1][split] += 1
        if len(counts) == 100:
            source.stop()

    source._publish = counting
    made.append(source.run())
    assert made[0].files == {"train": 70, "val": 20, "test": 10}
    for total, count in enumerate(counts, start=1):
        for split, share in source.proportions.items():
            assert abs(count[split] - share * total) < 2


def test_a_split_with_no_share_is_not_made(tmp_path: Path) -> None:
    report = provider(tmp_path / "q", split_proportions={"train": 1.0, "val": 0.0}).run(max_batches=5)
    assert report.batches == {"train": 5}
    assert names(tmp_path / "q", "val") == []


def test_a_split_that_is_full_does_not_hold_up_the_others(tmp_path: Path) -> None:
    source = provider(tmp_path / "q", split_proportions={"train": 0.5, "val": 0.5}, backlog_files=3)

    def stop_when_resting(progress: ProviderProgress) -> None:
        if progress.waiting:
            source.stop()

    with consumer(Queue.create(tmp_path / "q", source.description()).path) as reader:
        thread = threading.Thread(target=source.run, kwargs={"on_progress": stop_when_resting})
        thread.start()
        assert ks(reader.get_batch("train") for _ in range(40)) == list(range(40))
        thread.join()
    assert len(names(tmp_path / "q", "val")) == 3


def test_max_batches_are_made_of_every_split_and_then_it_ends(tmp_path: Path) -> None:
    source = provider(tmp_path / "q", split_proportions={"train": 0.9, "val": 0.1})
    report = source.run(max_batches=6)
    assert report.batches == {"train": 6, "val": 6}
    assert report.files == {"train": 2, "val": 2}
    assert report.bytes == sum(
        (tmp_path / "q" / split / name).stat().st_size
        for split in ("train", "val")
        for name in names(tmp_path / "q", split)
    )
    assert list((tmp_path / "q" / "members").iterdir()) == []
    with consumer(tmp_path / "q") as reader:
        assert ks(reader.batches("val")) == list(range(6))
    assert provider(tmp_path / "q", split_proportions={"train": 0.9, "val": 0.1}).run(max_batches=6).files == {
        "train": 0,
        "val": 0,
    }


def test_it_waits_for_what_others_are_making_before_it_ends(tmp_path: Path) -> None:
    queue = Queue.create(tmp_path / "q", provider(tmp_path / "q").description())
    lane = queue.path / "train" / "lanes" / "000000000001"
    lane.rename(lane.with_name("000000000001.by-p0"))
    source = provider(tmp_path / "q", lease_seconds=0.2)
    report = source.run(max_batches=12)
    assert report.batches == {"train": 12}, "the other one was dead, so it was made here"


@pytest.mark.parametrize("max_batches", [-1, 0, 1.5, True, "8"])
def test_max_batches_is_a_positive_whole_number(max_batches: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_batches"):
        provider(tmp_path / "q").run(max_batches=max_batches)
    with pytest.raises(ConfigError, match="max_batches"):
        provider(tmp_path / "q", max_batches=-1)


def test_stop_ends_it_after_the_file_it_is_at(tmp_path: Path) -> None:
    source = provider(tmp_path / "q")
    sample = source.sample_batch

    def sampled(split: str, rng: np.random.Generator) -> Any:
        if source.batch_index == 5:
            source.stop()
        return sample(split, rng)

    source.sample_batch = sampled
    report = source.run()
    assert report.batches == {"train": 8}
    assert len(names(tmp_path / "q")) == 2
    assert list((tmp_path / "q" / "members").iterdir()) == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, ["'x' is missing", "'y' is missing"]),
        ({**GOOD, "z": np.zeros(ROWS)}, ["'z' is not in batch_schema"]),
        ({"x": GOOD["x"]}, ["'y' is missing"]),
        ({**GOOD, "x": GOOD["x"].astype(np.int32)}, ["'x' has dtype int32, expected int64"]),
        ({**GOOD, "x": GOOD["x"].astype(float)}, ["'x' has dtype float64, expected int64"]),
        ({**GOOD, "x": GOOD["x"].astype(object)}, ["'x' has dtype object, expected int64"]),
        ({**GOOD, "x": GOOD["x"] == 0}, ["'x' has dtype bool, expected int64"]),
        ({**GOOD, "x": GOOD["x"].astype("U1")}, ["'x' has dtype str32, expected int64"]),
        ({**GOOD, "x": np.zeros((ROWS, LENGTH + 1), np.int64)}, [f"'x' has shape [2, {LENGTH + 1}], expected [2, 3]"]),
        ({**GOOD, "x": np.zeros((ROWS + 1, LENGTH), np.int64)}, ["'x' has shape [3, 3], expected [2, 3]"]),
        ({**GOOD, "x": np.zeros(LENGTH, np.int64)}, ["'x' has shape [3], expected [2, 3]"]),
        ({**GOOD, "x": 5}, ["'x' has shape [], expected [2, 3]"]),
        ({**GOOD, "x": [np.arange(2), np.arange(3)]}, ["'x' has shape [2], expected [2, 3]", "dtype object"]),
        ({**GOOD, "x": None}, ["'x' has shape [], expected [2, 3]", "dtype object"]),
        (
            {"x": np.zeros(3), "z": 1},
            ["'y' is missing", "'z' is not", "'x' has shape [3], expected [2, 3]", "'x' has dtype float64"],
        ),
        (None, ["expected a dict of arrays named as in batch_schema, got NoneType"]),
        ((GOOD["x"], GOOD["y"]), ["got tuple"]),
    ],
)
def test_everything_that_is_not_as_batch_schema_says_is_named(batch: Any, words: list[str], tmp_path: Path) -> None:
    source = given(tmp_path / "q", lambda k, rng: batch if k == 1 else GOOD)
    with pytest.raises(SchemaError) as caught:
        source.run(max_batches=8)
    assert str(caught.value).startswith("Sampled.sample_batch('train'), batch 1: ")
    for word in words:
        assert word in str(caught.value)
    assert names(tmp_path / "q") == [], "nothing of the file is published"
    assert list((tmp_path / "q" / "members").iterdir()) == []
    assert not list((tmp_path / "q" / "train" / "lanes").glob("*.by-*")), "others may make it"


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ({"dtype": "int64", "shape": [None]}, [np.arange(2), np.arange(3.0)], "float64"),
        ({"dtype": "int64", "shape": [None]}, [np.zeros((2, 2), int), np.arange(3)], r"\bshape\b"),
        ({"dtype": "int64", "shape": [None]}, [np.arange(2)], r"\bshape\b"),
        ({"dtype": "string"}, np.arange(2), r"\bdtype\b.*string"),
        ({"dtype": "string"}, ["a"], r"\b1\b.*\b2\b"),
        ({"dtype": "string"}, ["a", 5], "5"),
        ({"dtype": "string"}, ["a", None], "null"),
        ({"dtype": "bool"}, np.zeros(2, np.uint8), r"\bdtype\b.*\bbool\b"),
    ],
)
def test_fields_that_are_not_numbers_are_checked_too(entry: Any, value: Any, words: str, tmp_path: Path) -> None:
    source = given(tmp_path / "q", lambda k, rng: {"field": value}, [{"name": "field", **entry}])
    with pytest.raises(SchemaError, match=words) as caught:
        source.run(max_batches=1)
    assert "'field'" in str(caught.value)


def test_arrays_may_lie_in_memory_as_they_like_if_their_bytes_are_in_order(tmp_path: Path) -> None:
    x = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    given(tmp_path / "q", lambda k, rng: {"x": x[::-1, ::-1], "y": np.asfortranarray(x)}).run(max_batches=1)
    with consumer(tmp_path / "q") as reader:
        assert [found.tolist() for found in reader.get_batch()] == [x[::-1, ::-1].tolist(), x.tolist()]
    with pytest.raises(SchemaError, match="'y'"):
        given(tmp_path / "other", lambda k, rng: {"x": x, "y": x.astype(">i8")}).run(max_batches=1)


def test_torch_tensors_are_taken_as_they_are(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    weights = torch.rand(ROWS, requires_grad=True)
    schema = [PAIR[0], {"name": "weight", "dtype": "float32"}]
    given(tmp_path / "q", lambda k, rng: {"x": x, "weight": weights}, schema).run(max_batches=1)
    with consumer(tmp_path / "q", backend="torch") as reader:
        batch = reader.get_batch()
    assert torch.equal(batch["x"], x)
    assert torch.equal(batch["weight"], weights.detach())


def test_an_error_of_the_provider_is_passed_on_and_the_number_given_back(tmp_path: Path) -> None:
    bad = {6}

    def sample(k: int, rng: np.random.Generator) -> Any:
        if k in bad:
            raise ZeroDivisionError("in my own code")
        return GOOD

    with pytest.raises(ZeroDivisionError, match="in my own code"):
        given(tmp_path / "q", sample).run(max_batches=12)
    assert len(names(tmp_path / "q")) == 1
    bad.clear()  # with other code it would be another provider
    given(tmp_path / "q", sample).run(max_batches=12)
    assert len(names(tmp_path / "q")) == 3


def test_a_queue_that_is_removed_under_a_provider_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "q"

    def sample(k: int, rng: np.random.Generator) -> Any:
        if k == 5:
            shutil.rmtree(path)
        return GOOD

    with pytest.raises(QueueNotFoundError, match=rf"{path}.*prepare\.py"):
        given(path, sample).run()
    assert not path.exists(), "and is not made half again"


def test_a_queue_that_is_removed_under_a_resting_provider_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "q"
    source = provider(path, backlog_files=1)
    source._choose = lambda publishers: (
        shutil.rmtree(path) if len(names(path)) else Numbered._choose(source, publishers)
    )
    with pytest.raises(QueueNotFoundError, match=str(tmp_path)):
        source.run()


def test_what_it_declares_to_read_is_part_of_what_the_files_depend_on(tmp_path: Path) -> None:
    class Masked(Numbered):
        settings = MappingProxyType({"mask_probability": Setting(float, 0.15)})

    source = provider(tmp_path / "q", Masked)
    assert source.description().settings["mask_probability"] == 0.15
    other = provider(tmp_path / "q", Masked, mask_probability=0.5)
    assert source.description().fingerprint != other.description().fingerprint
    assert (source.batch_size, source.block_size, source.seed, source.queue_dir) == (ROWS, LENGTH, 0, tmp_path / "q")
    with pytest.raises(ConfigError, match="batch_size"):
        provider(tmp_path / "q", batch_size=0)


def test_how_much_waits_is_no_part_of_it(tmp_path: Path) -> None:
    fill(tmp_path / "q", 4)
    provider(tmp_path / "q", backlog_files=7, backlog_bytes="1 MiB", compression="zstd").run(max_batches=8)
    with consumer(tmp_path / "q") as reader:
        assert ks(reader) == list(range(8)), "one queue may hold files with and without compression"


def test_progress_is_told_and_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.fsqueue.provider._PROGRESS_SECONDS", 0.0)
    told: list[ProviderProgress] = []
    report = provider(tmp_path / "q").run(max_batches=12, on_progress=told.append)
    assert [progress.batches["train"] for progress in told] == [4, 8, 12]
    assert report.files == {"train": 3}
    assert report.bytes == told[-1].bytes > told[0].bytes > 0


def test_a_provider_has_to_say_what_it_makes() -> None:
    with pytest.raises(TypeError, match="abstract"):
        DataProviderBase({"dataset": "small", "batch_size": 1, "block_size": 1})  # type: ignore[abstract]
    assert PER_FILE == 4


class Reading(Numbered):
    """Reads what it has not declared: when it is made, or too late."""

    late = False

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.noise = 0 if self.late else self.config["noise"]

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        if self.late:
            self.noise = self.config.noise
        return super().sample_batch(split, rng)


def test_files_depend_on_what_the_provider_reads_of_the_config_declared_or_not(tmp_path: Path) -> None:
    path = tmp_path / "q"
    provider(path, Reading, noise=1, unread=1).run(max_batches=4)
    provider(path, Reading, noise=1, unread=2).run(max_batches=8)
    with pytest.raises(StaleQueueError, match=r"\bnoise\b"):
        provider(path, Reading, noise=2).run(max_batches=12)
    with pytest.raises(StaleQueueError, match="block_size"):
        provider(path, Reading, noise=1, block_size=4).run(max_batches=12)


def test_what_is_first_read_while_sampling_is_refused(tmp_path: Path) -> None:
    late = provider(tmp_path / "q", type("Late", (Reading,), {"late": True}), noise=1)
    with pytest.raises(ConfigError, match=r"'noise'.*sample_batch"):
        late.run(max_batches=4)


@pytest.mark.parametrize(
    ("meta", "said"),
    [({"rate": float("nan")}, r"meta\.rate.*nan"), ({"itos": {0: "a"}}, r"\bitos\b")],
)
def test_metadata_that_json_would_change_is_refused(meta: dict[str, Any], said: str, tmp_path: Path) -> None:
    maker = given(tmp_path / "q", lambda k, rng: {})
    type(maker).meta = meta
    with pytest.raises(ConfigError, match=said):
        maker.run(max_batches=1)
