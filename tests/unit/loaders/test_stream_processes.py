"""Streams made by processes: equal to those made by threads, whatever is killed, and nothing is left behind."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from loopback_worker import LoopbackWorker
from tests.waits import wait_for

from penstock.batching.collate import BatchLayout
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.errors import ChangedFileError, ConfigError, DataError, StageError
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.source import Sampling
from penstock.loaders.streamed import processes, workers
from penstock.loaders.streamed.processes import Demand, ProcessCount
from penstock.loaders.streamed.reader import StreamOptions, StreamPosition, StreamReader, StreamStep
from penstock.loaders.streamed.sampled_windows import ThreadWindows
from penstock.loaders.streamed.steps import StepMaker
from penstock.loaders.streamed.windows import OpenSplit, StreamCursor
from penstock.loaders.streamed.workers import WorkerChoice, choose_workers
from penstock.memory import MemoryBudget
from penstock.pipeline.array_worker import Answer, WorkerDiedError
from penstock.transforms.tokenization import ByteTokenizer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="memory is shared on POSIX only")
LENGTH = 24


class Picky(ByteTokenizer):
    """Ends its process at a text with `dies`, and refuses a process that is not as a worker should be."""

    def encode(self, *given: Any, **more: Any) -> Any:
        if not IN_WORKER:
            return super().encode(*given, **more)
        assert "torch" not in sys.modules
        assert pa.cpu_count() == 1
        if any("dies" in str(text) for text in given[0].to_pylist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(*given, **more)


class Locked(ByteTokenizer):
    """Cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


IN_WORKER = "array_server" in sys.argv[0]


def reader_of(paths: Any, kind: str, tokenizer: Any = None, rank: Rank | None = None, **options: Any) -> StreamReader:
    chosen = {"streams": 8, "shuffle_window": 16, "workers": 2, "worker_type": kind} | options
    return StreamReader(
        Recipe(tokenizer=tokenizer or ByteTokenizer()),
        paths,
        Sampling(packing="concat", length=LENGTH),
        BatchLayout(length=LENGTH, packed=True),
        global_batch=4,
        rank=rank,
        options=StreamOptions(**chosen),
    )


def steps_from(reader: StreamReader, position: StreamPosition, most: int = 10_000) -> list[StreamStep]:
    found: list[StreamStep] = []
    while len(found) < most and (step := reader.next(position)) is not None:
        found.append(step)
        position = step.position
    return found


def same(one: StreamStep, other: StreamStep) -> bool:
    if list(one.arrays) != list(other.arrays) or str(one.metadata) != str(other.metadata):
        return False
    pairs = [(np.asarray(value), np.asarray(other.arrays[name])) for name, value in one.arrays.items()]
    return one.tokens == other.tokens and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    draw, paths = random.Random(2), []
    for number in range(3):
        paths.append(tmp_path / f"{number}.jsonl")
        rows = [{"text": f"{number}-{i} " + "w" * draw.randrange(40)} for i in range(120)]
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return paths


@pytest.fixture
def whole(corpus: list[Path]) -> list[StreamStep]:
    """Two epochs made by threads."""
    with reader_of(corpus, "thread") as reader:
        first = steps_from(reader, reader.start())
        return first + steps_from(reader, reader.next_epoch(first[-1].position))


def test_processes_make_the_batches_and_states_of_threads_and_survive_kills(
    corpus: list[Path], whole: list[StreamStep], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with reader_of(corpus, "thread") as threads, reader_of(corpus, "process") as reader:
        states = [json.dumps(threads.to_state(step.position)) for step in whole]
        position, kept, children = reader.start(), [], []
        for number, step in enumerate(whole):
            made = reader.next(position)
            if made is None:
                position = reader.next_epoch(position)
                made = reader.next(position)
            assert made is not None
            assert same(made, step)
            assert json.dumps(reader.to_state(made.position)) == states[number]
            kept.append(made)  # all of them: slots are not written again while someone looks into them
            position = made.position
            assembler = psutil.Process(reader._made_by.pid)  # type: ignore[union-attr]
            if number == 5:
                children = assembler.children()
                assert len(children) == 2
                children[0].kill()
            if number == 12:
                assembler.kill()
        assert all(same(a, b) for a, b in zip(kept, whole))
        assert "exit code -9" in caplog.text
        # Any state, in any order, also one of the past.
        for number in (len(whole) - 2, 3, 0, len(whole) // 2):
            found = reader.next(reader.from_state(json.loads(states[number])))
            if found is not None:
                assert same(found, whole[number + 1])
        pids = [process.pid for process in (assembler, *children)]
    assert reader._budget.used == 0
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert all(same(a, b) for a, b in zip(kept, whole)), "batches outlive their reader"


def test_a_state_of_processes_goes_on_in_threads_on_other_ranks_and_in_several_loops_at_once(
    corpus: list[Path], whole: list[StreamStep]
) -> None:
    epoch = [step for step in whole if step.metadata["epoch"] == 0]
    cut = len(epoch) // 2
    with reader_of(corpus, "process", workers=1) as alone:
        state = alone.to_state(steps_from(alone, alone.start(), cut)[-1].position)
        # Two ranks, one in threads and one in processes, beside the first reader.
        ranks = [
            reader_of(corpus, kind, rank=Rank(rank, 2), steps_per_epoch=len(epoch), workers=1)
            for rank, kind in enumerate(("thread", "process"))
        ]
        parts = [steps_from(reader, reader.from_state(state)) for reader in ranks]
        for reader in ranks:
            reader.close()
        rest = steps_from(alone, alone.from_state(state))
    assert [len(part) for part in parts] == [len(epoch) - cut] * 2
    for step, again, *shares in zip(epoch[cut:], rest, *parts):
        assert same(step, again)
        filled = [share.arrays["input_ids"][np.unique(share.metadata["sample"])] for share in shares]
        assert np.array_equal(np.concatenate(filled), step.arrays["input_ids"][np.unique(step.metadata["sample"])])


def test_rows_that_kill_processes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("fine", "dies", "fine")), "utf-8")
    with reader_of(path, "process", Picky()) as reader, pytest.raises(StageError) as caught:
        steps_from(reader, reader.start())
    assert "3 worker processes in a row died at this place (last exit code -9" in str(caught.value)
    assert (caught.value.file, caught.value.offset) == (str(path), path.read_text("utf-8").index('{"text": "dies"'))


def test_a_step_that_kills_processes_is_named(
    corpus: list[Path], whole: list[StreamStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(LoopbackWorker):
        def receive(self) -> Answer:
            raise WorkerDiedError("the worker process is gone")

    monkeypatch.setattr(processes, "ArrayWorker", Dead)
    with reader_of(corpus, "process", workers=1) as reader, pytest.raises(StageError, match="in step 5") as caught:
        reader.next(whole[4].position)
    assert caught.value.file in map(str, corpus)


def test_errors_and_bad_rows_of_processes_are_those_of_threads(tmp_path: Path) -> None:
    path, lines = tmp_path / "rows.jsonl", {}
    path.write_text('{"text": "fine"}\n{"text": 5}\nbroken\n{"text": "fine too"}\n', "utf-8")
    for kind in ("thread", "process"):
        with reader_of(path, kind, Picky(), workers=1) as reader:
            for _ in range(2):  # asked again, it fails again
                with pytest.raises(DataError) as caught:
                    reader.next(reader.start())
            lines[kind] = [str(caught.value), caught.value.file, caught.value.row, caught.value.offset]
        bad = tmp_path / f"{kind}.jsonl"
        with reader_of(path, kind, Picky(), workers=1, on_error="quarantine", quarantine=bad) as reader:
            steps = steps_from(reader, reader.start())
            lines[kind] += [reader.counts.rows, reader.counts.rejected, reader.counts.changed, len(steps)]
        lines[kind].append(bad.read_text("utf-8"))
    assert lines["process"] == lines["thread"]


def appended(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write('{"text": "more"}\n' * 40)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"w", b"v"))
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


def joined(path: Path) -> None:
    path.with_name("9.jsonl").write_text('{"text": "of a new file"}\n', "utf-8")


@pytest.mark.parametrize(
    ("change", "workers", "named"),
    [(appended, 1, "1.jsonl"), (replaced, 2, "1.jsonl"), (removed, 1, "1.jsonl"), (joined, 1, "9.jsonl")],
)
def test_a_process_that_starts_after_a_file_changed_reads_nothing(
    corpus: list[Path], monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], workers: int, named: str
) -> None:
    if workers == 1:
        monkeypatch.setattr(processes, "ArrayWorker", LoopbackWorker)
    with reader_of(corpus[0].parent, "process", workers=workers) as reader:
        position = steps_from(reader, reader.start(), 3)[-1].position
        change(corpus[1])
        reader._made_by._restart()  # type: ignore[union-attr]
        for _ in range(2):  # asked again, it fails again
            with pytest.raises(ChangedFileError, match=r"changed while it was read") as caught:
                reader.next(position)
            assert caught.value.file == str(corpus[1].with_name(named))


def test_a_process_that_starts_after_the_chat_template_changed_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ArrayWorker", LoopbackWorker)
    path, template = tmp_path / "chats.jsonl", tmp_path / "chat.jinja"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text((json.dumps(row) + "\n") * 200, "utf-8")
    text = "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    template.write_text(text, "utf-8")
    recipe = Recipe(tokenizer=ByteTokenizer(), template=str(template), chat={"include_eot": False})
    sampling, layout = Sampling(packing="concat", length=LENGTH), BatchLayout(length=LENGTH, packed=True)
    options = StreamOptions(streams=8, shuffle_window=16, workers=1, worker_type="process")
    with StreamReader(recipe, path, sampling, layout, global_batch=4, options=options) as reader:
        position = steps_from(reader, reader.start(), 3)[-1].position
        template.write_text(text.replace(": ", "> "), "utf-8")
        reader._made_by._restart()  # type: ignore[union-attr]
        with pytest.raises(ChangedFileError, match="another chat template") as caught:
            reader.next(position)
    assert caught.value.file == str(template)


def test_what_cannot_be_sent_to_a_process_is_an_error_if_processes_were_asked_for(corpus: list[Path]) -> None:
    with reader_of(corpus, "process", Locked()) as reader, pytest.raises(ConfigError, match="worker_type='process'"):
        reader.next(reader.start())


@pytest.mark.parametrize("workers", [1, 2])
def test_input_that_cannot_be_opened_is_the_error_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "gone.jsonl").write_text('{"text": "a"}\n', "utf-8")
    for name in ("empty.jsonl", "gone.jsonl"):
        told = []
        for kind in ("thread", "process"):
            with reader_of(name, kind, workers=workers) as reader:
                monkeypatch.chdir("/")
                with pytest.raises((DataError, FileNotFoundError)) as caught:
                    reader.next(reader.start())
            monkeypatch.chdir(tmp_path)
            told.append((type(caught.value), str(caught.value)))
        assert told[0] == told[1]


def test_streams_go_on_with_threads_if_processes_are_not_possible_and_say_so(
    corpus: list[Path], whole: list[StreamStep], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_THREAD_SECONDS", 0.0)
    with reader_of(corpus, "thread", Locked()) as reader:
        reader.workers = WorkerChoice("auto", 1, "a test")
        found = steps_from(reader, reader.start())
    assert all(same(a, b) for a, b in zip(found, whole))
    (told,) = [record.message for record in caplog.records if record.name.startswith("penstock.loaders")]
    assert "goes on with threads" in told


def test_streams_that_last_move_to_processes_without_a_difference(
    corpus: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_THREAD_SECONDS", 0.0)
    with reader_of(corpus, "thread") as threads, reader_of(corpus, "thread") as reader:
        reader.workers = WorkerChoice("auto", 1, "a test")
        one, other = threads.start(), reader.start()
        moved_at = None
        deadline = time.monotonic() + 60
        while moved_at is None or one.step < moved_at + 40:
            assert time.monotonic() < deadline
            step, made = threads.next(one), reader.next(other)
            if step is None or made is None:
                assert step is made
                one, other = threads.next_epoch(one), reader.next_epoch(other)
                continue
            assert same(made, step)
            one, other = step.position, made.position
            if moved_at is None and reader._made_by.elsewhere:  # type: ignore[union-attr]
                moved_at = one.step


@pytest.mark.parametrize("deaths", [2, 3])
def test_processes_that_die_before_they_take_over_are_replaced_twice(
    corpus: list[Path],
    whole: list[StreamStep],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    deaths: int,
) -> None:
    died: list[LoopbackWorker] = []

    class Mortal(LoopbackWorker):
        def receive(self) -> Answer:
            if len(died) < deaths:
                died.append(self)
                raise WorkerDiedError("the worker process is gone")
            return super().receive()

    monkeypatch.setattr(processes, "ArrayWorker", Mortal)
    monkeypatch.setattr(workers, "_THREAD_SECONDS", 0.0)
    with reader_of(corpus, "thread") as reader:
        reader.workers = WorkerChoice("auto", 1, "a test")
        found = steps_from(reader, reader.start())
        assert reader.elsewhere == (deaths < 3)
    assert all(same(one, other) for one, other in zip(found, whole))
    assert len(set(map(id, died))) == deaths
    assert [worker._service for worker in died] == [None] * deaths, "their resources are free"
    assert sum("goes on with threads" in record.message for record in caplog.records) == (deaths == 3)


def test_a_rank_whose_data_ends_first_delivers_what_it_has_before_it_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ArrayWorker", LoopbackWorker)  # ten steps are at hand at once
    path, together = tmp_path / "rows.jsonl", threading.Barrier(2, timeout=20)
    rows = [{"text": "w" * 200}] * 60 + [{"text": "few", "not read": "p" * 197}] * 60
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    def train(rank: int) -> list[int]:
        options = StreamOptions(
            streams=2,
            shuffle_window=8,
            worker_type=("thread", "process")[rank],  # type: ignore[arg-type]
            rendezvous=tmp_path / "meet",
            timeout_seconds=10,
        )
        loader = PretrainDataLoader(
            path, ByteTokenizer(), 24, streaming=options, batch_size=1, shuffle=False, rank=rank, world_size=2
        )
        found = []
        with loader:
            for batch in loader:
                found.append(batch.num_tokens)
                together.wait()  # as a collective of the step
        return found

    with ThreadPoolExecutor(2) as pool:
        longer, shorter = pool.map(train, range(2))
    assert len(longer) == len(shorter) > 100
    assert shorter[-1] == 0 < longer[-1], "the data of rank 1 ended before that of rank 0"


@pytest.mark.parametrize("jump", ["other epoch", "far ahead", "same epoch again", "loaded state"])
def test_a_jump_while_processes_start_makes_no_steps_between(
    corpus: list[Path], whole: list[StreamStep], monkeypatch: pytest.MonkeyPatch, jump: str
) -> None:
    monkeypatch.setattr(processes, "ArrayWorker", LoopbackWorker)
    with reader_of(corpus, "thread") as threads, reader_of(corpus, "thread") as reader:
        steps = processes.ProcessSteps(reader.spec, reader._budget, ProcessCount(1, 1))
        grows = workers.ThreadsThenProcesses(
            StepMaker(threads.spec, ThreadWindows(threads.spec.filler, threads._budget, 1), threads._budget),
            lambda: steps,
            after_seconds=1.0,
            clock=iter([0.0, *[2.0] * 10]).__next__,
        )
        reader._made_by = grows
        position = steps_from(reader, reader.start(), 1)[-1].position
        steps.expect(position)  # ten steps are made, and nobody takes them
        grows._remote = steps
        last = whole[-1].metadata["epoch"]
        far = next(step for step in whole if step.metadata["step"] == 40)
        target = {
            "other epoch": lambda: reader.start(last, position.step),
            "far ahead": lambda: far.position,
            "same epoch again": lambda: reader.start(0, position.step + 2),
            "loaded state": lambda: reader.from_state(threads.to_state(whole[2].position)),
        }[jump]()
        received: list[Any] = []
        receive = steps._receive
        monkeypatch.setattr(steps, "_receive", lambda: received.append(None) or receive())
        made = reader.next(target)
        assert grows.elsewhere
        assert len(received) == 1
        expected = threads.next(target)
        assert made is not None
        assert expected is not None
        assert same(made, expected)


def test_a_stream_goes_on_with_the_processes_it_has_if_no_more_can_start(
    corpus: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with reader_of(corpus, "thread") as threads:
        windows = processes.ProcessWindows(threads.spec, MemoryBudget(), ProcessCount(1, 4))

        def refuse(*given: Any, **more: Any) -> None:
            raise BlockingIOError(11, "no process left")

        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "penstock"):
            patch.setattr(subprocess, "Popen", refuse)
            windows.grow()
            windows.grow()
        assert [windows.count, windows._workers.starting] == [1, 0]
        assert len([record for record in caplog.records if "no more processes" in record.message]) == 1
        windows.close()


def test_the_next_epoch_is_begun_before_the_trainer_asks_for_it(
    corpus: list[Path], whole: list[StreamStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = []

    class Watched(LoopbackWorker):
        def send(self, requests: Iterable[tuple[int, bytes]], *, supersede: bool = False) -> None:
            jumps.append(supersede)
            super().send(requests, supersede=supersede)

    monkeypatch.setattr(processes, "ArrayWorker", Watched)
    with reader_of(corpus, "process", workers=1) as reader:
        first = steps_from(reader, reader.start())
        end = reader.next_epoch(first[-1].position)
        found = first + steps_from(reader, end)
        again = steps_from(reader, reader.start())  # back to the first epoch
    assert [sum(jumps), len(found)] == [2, len(whole)]
    assert all(same(one, other) for one, other in zip(found + again, [*whole, *whole]))


def test_the_choice_of_workers_says_why() -> None:
    few, many = choose_workers(StreamOptions(), 2, 1), choose_workers(StreamOptions(), 64, 8)
    assert (few.worker_type, few.count) == ("thread", None)
    assert "2 cores" in str(few)
    assert (many.worker_type, many.processes) == ("auto", ProcessCount(4, 6))
    assert str(many).startswith("threads at first, then 4 to 6 processes (there are 8 cores")
    assert choose_workers(StreamOptions(), 64, 1).processes == ProcessCount(4, 8)
    assert choose_workers(StreamOptions(), 64, 1, memory=1 << 40).processes == ProcessCount(4, 62)
    assert choose_workers(StreamOptions(), 64, 1, memory=1 << 20).processes == ProcessCount(4, 4)
    given = choose_workers(StreamOptions(workers=3, worker_type="process"), 64, 1)
    assert given.processes == ProcessCount(3, 3)
    assert str(given).startswith("3 processes")
    assert choose_workers(StreamOptions(), 64, 32).worker_type == "thread"
    assert choose_workers(StreamOptions(workers="process"), 2, 1) == WorkerChoice(
        "process", 1, "worker_type='process'", 1
    )
    assert str(choose_workers(StreamOptions(workers=3, worker_type="thread"), 64, 1)).startswith("3 threads")
    for wrong in ({"workers": 0}, {"workers": "fork"}, {"worker_type": "fork"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            StreamOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="contradict"):
        StreamOptions(workers="thread", worker_type="process")


def test_more_processes_start_if_the_trainer_waits_and_assembling_is_not_the_limit() -> None:
    now, worked, waited, asked = 0.0, 0.0, 0.0, []
    demand = Demand(lambda: now, lambda: worked)

    def passes(*, waits: float, assembles: float, intervals: int = 6) -> int:
        nonlocal now, worked, waited
        asked.clear()
        for _ in range(10 * intervals):
            now, worked, waited = now + 0.11, worked + 0.11 * assembles, waited + 0.11 * waits
            asked.append(demand.wants_more(waited))
        return sum(asked)

    assert passes(waits=0.05, assembles=0.5) == 0
    assert passes(waits=0.9, assembles=0.95) == 0
    assert passes(waits=0.9, assembles=0.5, intervals=1) == 0  # one slow second is no reason
    assert passes(waits=0.0, assembles=0.1) == 0
    assert passes(waits=0.9, assembles=0.5) in (2, 3)
    waited = 0.0  # another trainer asks
    assert passes(waits=0.5, assembles=0.1) in (2, 3)


class Eager:
    """Demand for more processes at every step."""

    def wants_more(self, waited: float) -> bool:
        return True


def test_processes_that_join_later_change_nothing(
    corpus: list[Path], whole: list[StreamStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader_of(corpus, "thread") as threads:
        spec = threads.spec
        service = processes.StepService(spec, ProcessCount(1, 3))
        service._demand = Eager()  # type: ignore[assignment]
        position, counts = StreamPosition(), []
        found: list[StreamStep] = []
        while len(found) < len(whole):
            service.answer(pickle.dumps(position))
            maker = service._opened()
            windows = service._windows
            assert windows is not None
            if len(found) in (4, 8):
                wait_for(lambda added=windows._workers: not added.starting)
            made = maker.make(position)
            windows.grow()
            counts.append(windows.count)
            position = made.following if made.has_data else threads.next_epoch(position)
            if made.has_data:
                assert made.compact is not None
                found.append(StreamStep(made.compact, made.metadata, made.following, made.tokens))
        assert (counts[0], max(counts)) == (1, 3)
        service.close()
    assert all(same(one, other) for one, other in zip(found, whole))


def test_a_process_closes_the_files_of_streams_that_go_to_one_that_joins(corpus: list[Path]) -> None:
    def opened(pid: int | None) -> int:
        return sum(file.path.endswith(".jsonl") for file in psutil.Process(pid).open_files())

    with reader_of(corpus, "thread", streams=16) as threads:
        windows = processes.ProcessWindows(threads.spec, MemoryBudget(), ProcessCount(1, 2))
        sequences = threads.spec.sequences(0)

        def read() -> None:
            for sequence in sequences[:4]:
                windows.submit(sequence, StreamCursor(), OpenSplit(), None).result().release()

        try:
            read()
            assert opened(windows._workers._workers[0].pid) == 4
            windows.grow()
            wait_for(lambda: not windows._workers.starting)
            read()
            assert [opened(worker.pid) for worker in windows._workers._workers] == [2, 2]
        finally:
            windows.close()


LOOP = """
import sys
from pathlib import Path
import psutil
from penstock.loaders import PretrainDataLoader, StreamOptions
from penstock.pipeline.array_worker import Answer, WorkerDiedError
from penstock.transforms.tokenization import ByteTokenizer

loader = PretrainDataLoader(
    sys.argv[1],
    ByteTokenizer(),
    24,
    batch_size=4,
    backend="numpy",
    streaming=StreamOptions(workers=int(sys.argv[2]), worker_type="process"),
)
with loader:
    for number, batch in enumerate(batch for _ in range(1_000_000) for batch in loader):
        if number == 3:
            print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
            sys.stdin.readline()
"""


@pytest.mark.parametrize(("end", "workers", "processes"), [(signal.SIGKILL, 2, 3), (signal.SIGINT, 1, 1)])
def test_the_end_of_the_trainer_ends_its_processes_and_leaves_no_memory(
    corpus: list[Path], end: int, workers: int, processes: int
) -> None:
    pytest.importorskip("torch")  # of the program
    trainer = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(corpus[0]), str(workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == processes
    mapped = [Path(memory.path) for pid in (trainer.pid, *pids) for memory in psutil.Process(pid).memory_maps()]
    if end == signal.SIGKILL:
        trainer.kill()
    else:
        trainer.stdin.write("\n")  # amid the loop
        trainer.stdin.flush()
        os.killpg(trainer.pid, end)  # as a terminal does
    _, complaints = trainer.communicate()  # until the last process with this pipe is gone
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    if end == signal.SIGKILL:
        assert not complaints
    else:
        assert complaints.rstrip().endswith("KeyboardInterrupt")
        assert complaints.count("Traceback") == 1
    assert not [path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()]


def test_a_loader_shows_its_workers_and_batches_know_their_tokens(corpus: list[Path]) -> None:
    options = StreamOptions(streams=8, workers=1, worker_type="process")
    with PretrainDataLoader(corpus, ByteTokenizer(), LENGTH, streaming=options, batch_size=4) as loader:
        assert "1 process (worker_type='process')" in repr(loader)
        batch = next(iter(loader))
        batch.attention_mask.fill_(0)  # tokens are not counted here
        assert batch.num_tokens == 4 * LENGTH
