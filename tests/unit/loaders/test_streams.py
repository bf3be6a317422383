"""Streaming: every row once an epoch, the same batches on any number of ranks, from any position on."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_worker import LoopbackWorker

from penstock.batching.collate import BatchLayout
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.synchronization import merge_states
from penstock.errors import ConfigError, DataError, PenstockError, ResumeError, StageError
from penstock.files.states import with_checksum
from penstock.loaders.source import Sampling
from penstock.loaders.streamed import processes, windows
from penstock.loaders.streamed.reader import StreamOptions, StreamPosition, StreamReader, StreamStep
from penstock.loaders.streamed.windows import StreamCursor, WindowStart
from penstock.memory import MemoryBudget
from penstock.pipeline import array_worker
from penstock.transforms.tokenization import ByteTokenizer

RECIPE = Recipe(tokenizer=ByteTokenizer())
EOS = ByteTokenizer().special.eos
LENGTH = 24
SAMPLING = ("packing", "length", "truncation")
KIND = ["thread"]


@pytest.fixture(params=["thread", "process"], autouse=True, scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests over threads and over processes, whose pipes and memory a loopback stands for."""
    KIND.append(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_worker, "ArrayWorker", LoopbackWorker)
        patch.setattr(processes, "ArrayWorker", LoopbackWorker)
        yield
    KIND.pop()


def reader_of(
    paths: Any,
    rank: Rank | None = None,
    *,
    recipe: Recipe | None = RECIPE,
    form: BatchLayout | None = None,
    **given: Any,
) -> StreamReader:
    """A reader with windows so small that there are many of them in little data."""
    own = ("streams", "shuffle_window", "window_bytes", "on_error", "quarantine", "steps_per_epoch", "workers")
    options = {"streams": 8, "shuffle_window": 5, "workers": 2, "worker_type": KIND[-1]}
    options |= {key: given.pop(key) for key in own if key in given}
    given = {"length": LENGTH, "global_batch": 4} | given
    packed = given.get("packing", "concat") is not None
    form = form or BatchLayout(length=given["length"], packed=packed)
    sampling = Sampling(**{"packing": "concat", **{name: given.pop(name) for name in SAMPLING if name in given}})
    return StreamReader(recipe, paths, sampling, form, rank=rank, options=StreamOptions(**options), **given)


def written(folder: Path, files: Sequence[Sequence[str]]) -> list[Path]:
    paths = []
    for number, texts in enumerate(files):
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts), "utf-8")
    return paths


def steps_from(reader: StreamReader, position: StreamPosition, most: int = 10_000) -> list[StreamStep]:
    """The rest of an epoch."""
    found: list[StreamStep] = []
    while len(found) < most and (step := reader.next(position)) is not None:
        found.append(step)
        position = step.position
    return found


def texts_in(steps: Sequence[StreamStep]) -> Counter[str]:
    """The documents in some batches, which must be whole, or follow one another as pieces."""
    pieces: dict[tuple[str, int], bytes] = {}
    for step in steps:
        ids, seen = step.arrays["input_ids"], step.metadata
        bounds = np.flatnonzero(np.diff(seen["sample"], prepend=-1)).tolist()
        for begin, end in pairwise([*bounds, len(seen["sample"])]):
            row, at = ids[seen["sample"][begin]], 0
            starts = np.flatnonzero(step.arrays["position_ids"][seen["sample"][begin]] == 0).tolist()
            for part, (at, stop) in zip(range(begin, end), pairwise([*starts, len(row)])):
                key = (seen["sources"][seen["source"][part]], int(max(seen["offset"][part], seen["row"][part])))
                pieces[key] = pieces.get(key, b"") + bytes(token for token in row[at:stop].tolist() if token < 256)
    return Counter(piece.decode() for piece in pieces.values())


def same(one: StreamStep, other: StreamStep) -> bool:
    arrays = all(np.array_equal(one.arrays[key], other.arrays[key]) for key in one.arrays)
    return arrays and one.arrays.keys() == other.arrays.keys() and str(one.metadata) == str(other.metadata)


def samples_of(step: StreamStep) -> list[list[int]]:
    """The tokens of each sample that is no blank."""
    ids, mask = step.arrays["input_ids"], step.arrays["attention_mask"]
    filled = np.unique(step.metadata["sample"]).tolist()
    return [ids[row][mask[row] == 1].tolist() for row in filled]


INPUTS = st.lists(st.lists(st.text("abcdef", min_size=1, max_size=14), max_size=30), min_size=1, max_size=4).map(
    lambda files: [["first"], *([f"{n}.{i}:{text}" for i, text in enumerate(texts)] for n, texts in enumerate(files))]
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=INPUTS,
    long_row=st.booleans(),
    packing=st.sampled_from(["concat", "best_fit", "first_fit", None]),
    global_batch=st.sampled_from([1, 2, 3, 4, 8, 12]),
    streams=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    window=st.sampled_from([1, 3, 16]),
    world=st.integers(1, 8),
    stop=st.floats(0, 1),
)
def test_any_number_of_ranks_stopped_anywhere_delivers_what_one_process_does(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[str]],
    long_row: bool,
    packing: str | None,
    global_batch: int,
    streams: int,
    seed: int,
    shuffle: bool,
    window: int,
    world: int,
    stop: float,
) -> None:
    while global_batch % world:
        world -= 1
    if long_row:
        files = [[*files[0], "long:" + "z" * 4500], *files[1:]]
    paths = written(tmp_path_factory.mktemp("input"), files)
    length = 5_000 if long_row and packing != "concat" else LENGTH
    given: dict[str, Any] = {
        "packing": packing,
        "length": length,
        "global_batch": global_batch,
        "streams": streams,
        "seed": seed,
        "shuffle": shuffle,
        "shuffle_window": window,
    }
    alone = reader_of(paths, **given)
    whole = steps_from(alone, alone.start())
    assert texts_in(whole) == Counter(text for texts in files for text in texts)
    # Ranks up to a step, then one process from their states, then ranks again from its state.
    cut = int(stop * len(whole))
    ranks = [reader_of(paths, Rank(rank, world), steps_per_epoch=len(whole) + 1, **given) for rank in range(world)]
    first = [steps_from(reader, reader.start(), cut) for reader in ranks]
    for n in range(cut):
        assert [sample for steps in first for sample in samples_of(steps[n])] == samples_of(whole[n])
    ends = [steps[-1].position if steps else reader.start() for steps, reader in zip(first, ranks)]
    states = [json.loads(json.dumps(reader.to_state(end))) for reader, end in zip(ranks, ends)]
    merged = merge_states(states, streams=ranks[0].catalog.streams if cut else None)
    assert len(json.dumps(merged)) < 4096  # less than the long row
    resumed = reader_of(paths, **given)
    after = steps_from(resumed, resumed.from_state(merged), 2)
    assert len(after) == min(2, len(whole) - cut)
    assert all(same(one, other) for one, other in zip(whole[cut:], after))
    # And ranks again, the second time from the state of one of them alone: the rest is found by reading again.
    state = resumed.to_state(after[-1].position) if after else merged
    for _ in range(2):
        positions = [reader.from_state(state) for reader in ranks]
        rests = [steps_from(reader, at, len(whole) - at.step) for reader, at in zip(ranks, positions)]
        for n, step in enumerate(whole[positions[0].step :]):
            assert [sample for steps in rests for sample in samples_of(steps[n])] == samples_of(step)
        state = ranks[-1].to_state(rests[-1][len(rests[-1]) // 2].position) if rests[-1] else state
    for reader in [alone, resumed, *ranks]:
        reader.close()


@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_resuming_at_every_step_of_two_epochs_is_exact(tmp_path: Path, packing: str | None) -> None:
    draw = random.Random(3)
    paths = written(tmp_path, [[f"{n}-{i}" + "y" * draw.randrange(19) for i in range(36)] for n in range(3)])
    reader = reader_of(paths, packing=packing)
    whole, states = [], []
    position = reader.start()
    for _ in range(2):
        while True:
            states.append(json.loads(json.dumps(reader.to_state(position))))
            step = reader.next(position)
            if step is None:
                break
            whole.append(step)
            position = step.position
        # Asked again at the end, it is still the end.
        assert reader.next(position) is None
        position = reader.next_epoch(position)
    reader.close()
    one, two = [[s for s in whole if s.metadata["epoch"] == epoch] for epoch in (0, 1)]
    assert texts_in(one) == texts_in(two)
    assert not all(same(a, b) for a, b in zip(one, two))
    for state in states:
        resumed = reader_of(paths, packing=packing)
        position = resumed.from_state(state)
        found = steps_from(resumed, position, 3)
        if len(found) < 3 and state["epoch"] == 0:
            behind = found[-1].position if found else position
            found += steps_from(resumed, resumed.next_epoch(behind), 3 - len(found))
        resumed.close()
        assert found or state["epoch_step"] == len(two)
        assert all(same(a, b) for a, b in zip(whole[state["step"] :], found))


def test_a_state_may_be_saved_and_loaded_many_times_in_one_run(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i}" + "y" * (i % 17) for i in range(200)]])
    reader = reader_of(paths)
    whole = steps_from(reader, reader.start())
    position, found = reader.start(), []
    while True:
        resumed = reader_of(paths, workers=1)
        position = resumed.from_state(json.loads(json.dumps(resumed.to_state(position))))
        steps = steps_from(resumed, position, 3)
        resumed.close()
        if not steps:
            break
        found += steps
        position = steps[-1].position
    reader.close()
    assert len(found) == len(whole)
    assert all(same(a, b) for a, b in zip(found, whole))


def test_threads_and_memory_change_nothing(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i}" + "y" * (i % 17) for i in range(300)]])
    runs = []
    for threads, budget in ((1, 1), (4, 1 << 30)):
        reader = reader_of(paths, workers=threads, budget=MemoryBudget(budget))
        runs.append(steps_from(reader, reader.start()))
        reader.close()
        assert reader._budget.used == 0
    assert len(runs[0]) == len(runs[1])
    assert all(same(a, b) for a, b in zip(*runs))


def test_a_position_is_a_place_to_go_back_to(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i}" + "y" * (i % 17) for i in range(100)]])
    reader = reader_of(paths)
    whole = steps_from(reader, reader.start())
    again = reader.next(whole[3].position)
    assert again is not None
    assert same(again, whole[4])
    reader.close()


def test_rows_that_make_no_whole_sample_are_carried_over_many_windows(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i:03}" for i in range(200)]])
    reader = reader_of(paths, length=100, shuffle_window=3, streams=1, global_batch=1)
    whole = steps_from(reader, reader.start())
    assert [step.arrays["attention_mask"].sum() for step in whole] == [100] * 8  # 200 rows of three digits and EOS
    for step in whole[:-1]:
        resumed = reader_of(paths, length=100, shuffle_window=3, streams=1, global_batch=1)
        position = resumed.from_state(resumed.to_state(step.position))
        found = resumed.next(position)
        assert found is not None
        assert same(found, whole[step.position.step])
        resumed.close()
    reader.close()


def test_windows_end_where_their_bytes_are_enough(tmp_path: Path) -> None:
    paths = written(tmp_path, [["x" * 500 + f"{i}" for i in range(100)]])
    budget = MemoryBudget()
    reader = reader_of(paths, shuffle_window=10_000, window_bytes=2000, streams=1, global_batch=1, budget=budget)
    steps = steps_from(reader, reader.start())
    assert texts_in(steps) == Counter("x" * 500 + f"{i}" for i in range(100))
    assert budget.peak < (20_000 if KIND[-1] == "thread" else 40_000)  # batches in shared memory count too
    reader.close()


def test_documents_are_masked_at_their_beginning_and_positions_start_again(tmp_path: Path) -> None:
    paths = written(tmp_path, [["abc", "de"]])
    reader = reader_of(paths, shuffle=False, length=8, global_batch=1)
    (step,) = steps_from(reader, reader.start())
    reader.close()
    assert step.arrays["input_ids"].tolist() == [[*b"abc", EOS, *b"de", EOS, 0]]
    assert step.arrays["labels"].tolist() == [[-100, *b"bc", EOS, -100, *b"e", EOS, -100]]
    assert step.arrays["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert step.metadata["offset"].tolist() == [0, paths[0].read_bytes().index(b"\n") + 1]


def test_batches_by_token_budget_hold_rows_of_about_one_length(tmp_path: Path) -> None:
    texts = [f"{i}" + "y" * (i * 7 % 31) for i in range(200)]
    form = BatchLayout(split=True)
    reader = reader_of(
        written(tmp_path, [texts]), form=form, packing=None, length=None, max_tokens=120, global_batch=2, streams=2
    )
    steps = steps_from(reader, reader.start())
    reader.close()
    assert texts_in(steps) == Counter(texts)
    # Two samples, each of at most max_tokens, share the arrays of a global batch.
    assert all(np.prod(step.arrays["input_ids"].shape) <= 2 * 120 + 120 for step in steps)
    assert len(steps) < 60


def test_metadata_may_be_changed_before_the_fields_are_read(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i:04d}" + "w" * (i % 11) for i in range(40)]])
    with (
        reader_of(paths, packing="best_fit", length=64) as reader,
        reader_of(paths, packing="best_fit", length=64) as other,
    ):
        plain, changed = reader.next(reader.start()), other.next(other.start())
    assert plain is not None
    assert changed is not None
    changed.metadata["sample"] += 100  # numbers of the whole run, say
    assert all(np.array_equal(changed.arrays[key], value) for key, value in plain.arrays.items())


def test_padding_free_batches_lie_end_to_end(tmp_path: Path) -> None:
    texts = [f"{i}" + "y" * (i % 9) for i in range(50)]
    form = BatchLayout(padding_free=True, packed=True)
    reader = reader_of(written(tmp_path, [texts]), form=form, packing="best_fit")
    steps = steps_from(reader, reader.start())
    reader.close()
    assert all(step.arrays["input_ids"].shape[0] == 1 for step in steps)
    assert sum(step.arrays["input_ids"].size for step in steps) == sum(len(text) + 1 for text in texts)
    documents = sum(len(step.arrays["cu_seqlens"]) - 1 for step in steps)
    assert documents == len(texts)


def test_rows_that_filters_leave_out_are_counted_once() -> None:
    paths = Path(__file__).parents[3] / "examples" / "sample" / "documents.jsonl"
    recipe = Recipe(tokenizer=ByteTokenizer(), filters=["gopher", "c4"])
    reader = reader_of(paths, recipe=recipe, length=512)
    steps = steps_from(reader, reader.start())
    assert reader.counts.dropped == {"gopher-quality: too few words": 1, "gopher-quality: too few stop words": 1}
    assert reader.counts.rows == 64
    assert texts_in(steps).total() == 62
    # A process that only finds its place again counts nothing of what was read before.
    resumed = reader_of(paths, recipe=recipe, length=512)
    assert (
        steps_from(resumed, resumed.from_state(with_checksum(resumed.to_state(steps[-1].position) | {"streams": {}})))
        == []
    )
    assert resumed.counts.rows == 0
    reader.close()
    resumed.close()


# -- formats ---------------------------------------------------------------------------------------------------------

TEXTS = [f"{i} " + "w" * (i % 13) for i in range(150)]


def _jsonl_gz(folder: Path) -> Path:
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(data))
    return folder / "a.jsonl.gz"


def _lines(folder: Path) -> Path:
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(TEXTS).encode())
    return folder / "a.txt"


def _json(folder: Path) -> Path:
    (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1), "utf-8")
    return folder / "a.json"


def _csv(folder: Path) -> Path:
    (folder / "a.csv").write_text("n,text\n" + "".join(f'1,"{text}"\n' for text in TEXTS), "utf-8")
    return folder / "a.csv"


def _parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"text": TEXTS, "n": list(range(150))}), folder / "a.parquet", row_group_size=7)
    return folder / "a.parquet"


def _arrow(folder: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    return folder / "a.arrow"


def _arrow_stream(folder: Path) -> Path:
    table = pa.table({"text": TEXTS})
    with pa.ipc.new_stream(str(folder / "a.arrows"), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    return folder / "a.arrows"


def _store(folder: Path) -> Path:
    prepare(_jsonl_gz(folder), folder / "a.store", RECIPE)
    return folder / "a.store"


@pytest.mark.parametrize(
    "make",
    [_jsonl_gz, _lines, _json, _csv, _parquet, _arrow, _arrow_stream, _store],
    ids=lambda make: make.__name__.strip("_"),
)
def test_every_format_is_read_whole_and_resumed_exactly(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    recipe = None if path.suffix == ".store" else RECIPE
    reader = reader_of(path, recipe=recipe)
    whole = steps_from(reader, reader.start())
    assert texts_in(whole) == Counter(TEXTS)
    for step in whole[::4]:
        resumed = reader_of(path, recipe=recipe)
        found = steps_from(resumed, resumed.from_state(resumed.to_state(step.position)), 2)
        assert all(same(a, b) for a, b in zip(whole[step.position.step :], found))
        resumed.close()
    reader.close()


@pytest.mark.parametrize("make", [_lines, _parquet, _store], ids=lambda make: make.__name__.strip("_"))
def test_provenance_leads_back_to_the_row(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path)
    reader = reader_of(path, recipe=None if path.suffix == ".store" else RECIPE, packing=None, length=64)
    raw = path.read_bytes() if path.is_file() else b""
    for step in steps_from(reader, reader.start()):
        for sample, source, row, offset in zip(*(step.metadata[k] for k in ("sample", "source", "row", "offset"))):
            text = bytes(t for t in step.arrays["input_ids"][sample].tolist() if 0 < t < 256).decode()
            assert step.metadata["sources"][source] == str(path)
            if row >= 0:
                assert TEXTS[row] == text
            else:
                assert raw[offset:].split(b"\r\n")[0].decode() == text
    reader.close()


def test_chats_are_formatted_with_their_masks_whatever_the_types_of_other_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for i in range(40):
        content: Any = f"q{i}" if i % 3 else [{"type": "text", "text": f"q{i}"}]
        extra = {"note": i if i % 2 else "text"}
        answer = {"role": "assistant", "content": f"answer {i}"}
        rows.append({"messages": [{"role": "user", "content": content}, answer], **extra})
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    sample = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
    recipe = Recipe(tokenizer=sample, template="chatml")
    prepare(path, tmp_path / "a.store", recipe)
    runs = []
    for paths, how in ((path, recipe), (tmp_path / "a.store", None)):
        reader = reader_of(paths, recipe=how, packing=None, length=256)
        steps = steps_from(reader, reader.start())
        reader.close()
        ids = [row.tolist() for step in steps for row in step.arrays["input_ids"]]
        labels = [row.tolist() for step in steps for row in step.arrays["labels"]]
        runs.append(sorted(zip(ids, labels)))
    assert len(runs[0]) == 40
    assert runs[0] == runs[1]
    assert any(label != -100 for label in runs[0][0][1])
    assert runs[0][0][1].count(-100) > 5


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_bad_row_stops_the_run_and_says_where_it_is(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [["good", "fine"]])
    offset = path.stat().st_size
    path.write_text(path.read_text("utf-8") + "{broken\n", "utf-8")
    reader = reader_of(path)
    with pytest.raises(DataError, match=rf"0\.jsonl.*byte {offset}"):
        steps_from(reader, reader.start())
    reader.close()


def test_asked_again_after_an_error_nothing_is_passed_over(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [["x" * 30, "y" * 30, "z" * 30, "w" * 30]])
    path.write_text(path.read_text("utf-8") + '{"text": null}\n' + '{"text": "behind"}\n' * 9, "utf-8")
    reader = reader_of(path, shuffle=False, streams=1, global_batch=1, shuffle_window=3)
    position = reader.start()
    while (step := _next_or_error(reader, position)) is not None:
        position = step.position
    for _ in range(2):
        with pytest.raises(StageError, match="null"):
            reader.next(position)
    reader.close()


def _next_or_error(reader: StreamReader, position: StreamPosition) -> StreamStep | None:
    try:
        return reader.next(position)
    except StageError:
        return None


def test_a_row_that_a_transform_refuses_is_named_too(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [["good", "fine"]])
    offset = path.stat().st_size
    path.write_text(path.read_text("utf-8") + '{"text": null}\n', "utf-8")
    reader = reader_of(path)
    with pytest.raises(StageError, match=rf"0\.jsonl.*byte {offset}"):
        steps_from(reader, reader.start())
    reader.close()


LINES = st.one_of(
    st.text("abc", min_size=1, max_size=9).map(lambda text: json.dumps({"text": text})),
    st.integers(0, 9).map(lambda number: json.dumps({"text": "with more", "n": number})),
    st.sampled_from(
        ['{"text": null}', '{"text": ""}', '{"n": "a"}', '{"text": 7}', "{", '{"text": "other", "n": "a"}']
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.lists(st.lists(LINES, min_size=1, max_size=25), min_size=1, max_size=3), raising=st.booleans())
def test_rows_of_several_blocks_are_transformed_together_as_they_are_alone(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[str]], raising: bool
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    for number, lines in enumerate(files):
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    found = []
    for nbytes in (0, 1 << 20):
        quarantine = folder / f"bad-{nbytes}.jsonl"
        options: dict[str, Any] = {} if raising else {"on_error": "quarantine", "quarantine": quarantine}
        reader = reader_of(sorted(folder.glob("[0-9].jsonl")), streams=1, shuffle_window=16, global_batch=1, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(windows, "_TOGETHER_BYTES", nbytes)
            try:
                steps, error = steps_from(reader, reader.start()), ""
            except PenstockError as raised:
                steps, error = [], str(raised)
        reader.close()
        bad = quarantine.read_text() if quarantine.exists() else ""
        found.append((steps, error, bad, reader.counts.readings()))
    (alone, *others), (together, *same_others) = found
    assert len(alone) == len(together)
    assert all(same(one, other) for one, other in zip(alone, together))
    assert others == same_others


PLACES = {
    "column": lambda kinds: kinds,
    "list": lambda kinds: pa.FixedSizeListArray.from_arrays(kinds, 1),
    "struct": lambda kinds: pa.StructArray.from_arrays([kinds], ["kind"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_dictionaries_of_files_that_are_too_many_together_are_read_one_by_one(tmp_path: Path, place: str) -> None:
    paths, texts = [], []
    for number in range(3):
        values = pa.array([f"{number}-{value}" for value in range(100)])
        kinds = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), values)
        texts += (mine := [f"{number}:{row}" for row in range(100)])
        table = pa.table({"text": mine, "kind": PLACES[place](kinds)})
        paths.append(tmp_path / f"{number}.arrow")
        with pa.ipc.new_file(paths[-1], table.schema) as file:
            file.write_table(table)
    reader = reader_of(paths, streams=1, shuffle_window=4096, global_batch=1)
    steps = steps_from(reader, reader.start())
    reader.close()
    assert texts_in(steps) == Counter(texts)


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_bad_rows_are_left_out_counted_and_written_down(
    tmp_path: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path,) = written(tmp_path, [TEXTS])
    lines = path.read_bytes().splitlines(keepends=True)
    lines[10:10] = [b"{broken\n", b'{"text": null}\n']
    lines[100:100] = [b"\xff\n", b"\n"]
    path.write_bytes(b"".join(lines))
    place = tmp_path / "bad.jsonl" if on_error == "quarantine" else None
    reader = reader_of(path, on_error=on_error, quarantine=place)
    steps = steps_from(reader, reader.start())
    assert texts_in(steps) == Counter(TEXTS)
    assert sum(reader.counts.rejected.values()) == 3
    assert reader.counts.rows == len(TEXTS) + 1
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == len(reader.counts.rejected)
    assert all(line.startswith(f"{path}, byte ") for line in said)
    middle = steps[len(steps) // 2].position
    state = reader.to_state(middle)
    reader.close()
    resumed = reader_of(path, on_error=on_error, quarantine=place)
    rest = steps_from(resumed, resumed.from_state(state))
    resumed.close()
    assert all(same(a, b) for a, b in zip(steps[middle.step :], rest))
    if place is not None:
        written_down = [json.loads(line) for line in place.read_text("utf-8").splitlines()]
        assert {row["offset"] for row in written_down[:3]} == {row["offset"] for row in written_down}, (
            "rows of windows that were read again are the same rows"
        )
        assert all(row["file"] == str(path) for row in written_down)


def test_bad_rows_of_one_kind_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": 5}\n' * 3 + '{"text": "good"}\n' + '{"text": 6}\n' * 20)
    with reader_of(path, on_error="skip", shuffle_window=1000) as reader:
        steps_from(reader, reader.start())
        assert sum(reader.counts.rejected.values()) == 23
    assert len([record for record in caplog.records if "left out" in record.getMessage()]) == 1


def test_rows_set_aside_are_there_before_the_state_that_counts_on_them(tmp_path: Path) -> None:
    (path,) = written(tmp_path, [TEXTS])
    path.write_bytes(b"{broken\n" + path.read_bytes() + b"{broken too\n")
    place = tmp_path / "bad.jsonl"
    with reader_of(path, on_error="quarantine", quarantine=place) as reader:
        position, lines = reader.start(), []
        while (step := reader.next(position)) is not None:
            position = step.position
            lines.append(place.read_bytes().count(b"\n") if place.exists() else 0)
            assert lines[-1] == sum(reader.counts.rejected.values())
        reader.close()
        again = steps_from(reader, reader.start())  # which sets the same rows aside again
        assert place.read_bytes().count(b"\n") == 4
    assert lines[-1] == 2
    assert len(again) == len(lines)


def test_a_record_too_long_to_hold_is_named_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl.gz"
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    whole = gzip.compress(data)
    path.write_bytes(whole[: len(whole) // 2])
    reader = reader_of(path)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz"):
        steps_from(reader, reader.start())
    reader.close()
    reader = reader_of(path, on_error="skip")
    found = texts_in(steps_from(reader, reader.start()))
    reader.close()
    assert 0 < len(found) < len(TEXTS)
    assert found <= Counter(TEXTS)
    assert sum(reader.counts.rejected.values()) == 1
    (said,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert str(path) in said


def test_a_row_too_long_for_a_sample_is_an_error_or_counted(tmp_path: Path) -> None:
    paths = written(tmp_path, [["short", "l" * 50, "fine"]])
    reader = reader_of(paths, packing="best_fit")
    with pytest.raises(DataError, match=r"0\.jsonl"):
        steps_from(reader, reader.start())
    reader.close()
    reader = reader_of(paths, packing="best_fit", truncation="right")
    steps_from(reader, reader.start())
    reader.close()
    assert reader.counts.dropped_tokens == {"right": 27}


def test_what_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    paths = written(tmp_path, [["a"]])
    with pytest.raises(ConfigError, match="streaming=False"):
        reader_of(paths, recipe=Recipe(tokenizer=ByteTokenizer(), dedup=["exact"]))
    with pytest.raises(ConfigError, match="tokenizer"):
        steps_from(reader_of(paths, recipe=None), StreamPosition())
    with pytest.raises(ConfigError, match="length"):
        reader_of(paths, length=None, form=BatchLayout())
    with pytest.raises(ConfigError, match=r"\b8 ranks"):
        reader_of(paths, Rank(0, 8))
    with pytest.raises(ConfigError, match="on_error='quarantine'"):
        reader_of(paths, on_error="quarantine")
    with pytest.raises(TypeError, match="streaming=False"):
        reader_of(paths).steps_in(0)


def test_ranks_that_cannot_agree_on_the_end_are_told_at_once(tmp_path: Path) -> None:
    paths = written(tmp_path, [["a"]])
    reader = reader_of(paths, Rank(0, 2))
    with pytest.raises(ConfigError, match=r"init_process_group.*steps_per_epoch"):
        reader.next(reader.start())
    reader.close()


def test_a_state_that_belongs_elsewhere_is_refused(tmp_path: Path) -> None:
    paths = written(tmp_path, [TEXTS])
    reader = reader_of(paths)
    state = reader.to_state(steps_from(reader, reader.start(), 3)[-1].position)
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"version": 2}, {}, r"version 2\b"),
        ({"kind": "plan"}, {}, r"streaming=True.*\bkind\b"),
        ({}, {"global_batch": 8}, r"\b4\b.*\b8\b"),
        ({}, {"seed": 1}, state["plan"]),
        ({}, {"shuffle_window": 6}, state["plan"]),
        ({"streams": {"0": "?"}}, {}, r"'[?]'"),
        ({"streams": {"99": "."}}, {}, "streams"),
        ({"step": None}, {}, "damaged"),
    ]
    for change, options, message in changes:
        with pytest.raises(ResumeError, match=message):
            reader_of(paths, **options).from_state(with_checksum(state | change))
    paths[0].write_text(paths[0].read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(ResumeError, match=r"\bseed\b"):
        reader_of(paths).from_state(state)
    reader.close()


def test_a_file_that_changes_under_way_is_noticed(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i}" * 20 for i in range(2000)]])
    reader = reader_of(paths)
    (step,) = steps_from(reader, reader.start(), 1)
    with open(paths[0], "a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(PenstockError, match=r"0\.jsonl"):
        steps_from(reader, step.position)
    reader.close()


def test_input_without_rows_has_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"")
    reader = reader_of(path)
    assert reader.next(reader.start()) is None
    assert reader.next(reader.next_epoch(reader.start())) is None
    reader.close()
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl"):
        reader_of(path).next(StreamPosition())


# -- the shape of a run ----------------------------------------------------------------------------------------------


def test_batches_are_full_until_the_epoch_is_nearly_over(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{n}-{i}" + "y" * (i % 50) for i in range(1000)] for n in range(3)])
    reader = reader_of(paths, global_batch=8, streams=64, shuffle_window=64)
    sizes = [len(samples_of(step)) for step in steps_from(reader, reader.start())]
    reader.close()
    assert sizes == sorted(sizes, reverse=True), "slots end once and for all"
    assert sizes.count(8) > 0.8 * len(sizes)


@pytest.mark.parametrize("global_batch", [2, 3, 8])
def test_a_single_compressed_file_fills_whole_batches(tmp_path: Path, global_batch: int) -> None:
    reader = reader_of(_jsonl_gz(tmp_path), global_batch=global_batch, streams=64)
    sizes = [len(samples_of(step)) for step in steps_from(reader, reader.start())]
    reader.close()
    assert sizes[:-1] == [global_batch] * (len(sizes) - 1)


def test_shuffling_moves_rows_and_seeds_differ(tmp_path: Path) -> None:
    paths = written(tmp_path, [[f"{i:04}" for i in range(800)]])
    orders = []
    for seed, shuffle in ((0, True), (1, True), (0, False)):
        reader = reader_of(
            paths, packing=None, global_batch=1, streams=1, shuffle_window=256, seed=seed, shuffle=shuffle
        )
        rows = [samples_of(step)[0][:4] for step in steps_from(reader, reader.start())]
        orders.append([int(bytes(row)) for row in rows])
        reader.close()
    assert orders[2] == list(range(800))
    assert orders[0] != orders[1]
    assert np.abs(np.array(orders[0]) - np.arange(800)).mean() > 80


@given(st.lists(st.integers(0, 1 << 50), min_size=6, max_size=6))
def test_cursors_are_read_as_they_were_written(numbers: list[int]) -> None:
    cursor = StreamCursor(WindowStart(*numbers[:3]), numbers[3], numbers[4], numbers[5])
    assert StreamCursor.from_text(cursor.to_text()) == cursor


def test_the_state_of_many_streams_in_large_files_is_small(tmp_path: Path) -> None:
    reader = reader_of(written(tmp_path, [TEXTS]), global_batch=128, streams=64)
    far = StreamCursor(WindowStart(2000, 150 << 20, 9_999), 1, 32_767, 4095)
    position = StreamPosition(3, 10_000_000, 9_000_000, dict.fromkeys(range(128), far))
    assert len(json.dumps(reader.to_state(position))) < 4096
