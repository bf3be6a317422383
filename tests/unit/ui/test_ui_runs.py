from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from ui_cases import HOSTILE, client, make_store, shown, write_lines, write_run

from penstock import Pipeline, PretrainDataLoader
from penstock.errors import DataError
from penstock.transforms import Lower
from penstock.ui.runs import RunFile

PIPELINE = [
    {
        "penstock_pipeline_rows_in_total": 100.0 * number,
        "penstock_pipeline_rows_out_total": 90.0 * number,
        "penstock_pipeline_budget_used_bytes": 1 << 20,
        "penstock_pipeline_budget_limit_bytes": 1 << 22,
        'penstock_stage_rows_in_total{stage="Lower(\'text\')",kind="transform"}': 100.0 * number,
        'penstock_stage_utilisation_ratio{stage="Lower(\'text\')",kind="transform"}': 0.83,
        'penstock_pipeline_rows_dropped_total{reason="too \\"short\\""}': 10.0,
    }
    for number in range(1, 6)
]


def dead_pid() -> int:
    """Number of a process that has ended."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_run_is_running_while_its_process_lives_and_killed_when_it_does_not(tmp_path: Path) -> None:
    assert RunFile(str(write_run(tmp_path / "a", "pipeline", PIPELINE))).look().state() == "running"
    assert RunFile(str(write_run(tmp_path / "b", "pipeline", PIPELINE, pid=dead_pid()))).look().state() == "killed"


def test_a_number_that_another_process_has_now_is_a_killed_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", "pipeline", PIPELINE, started=1_000_000.0)
    assert RunFile(str(path)).look().state() == "killed"


@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
def test_a_run_that_ended_in_order_says_how(tmp_path: Path, end: str) -> None:
    path = write_run(tmp_path / "a", "loader", [{}], end={"seconds": 2.0, "end": end, "error": "disk <full>"}, pid=1)
    assert RunFile(str(path)).look().state() == end
    text = shown(client(path), "/t/0")
    assert f">{end}</span>" in text
    assert "disk &lt;full&gt;" in text


def test_a_run_of_another_machine_that_is_silent_is_not_called_killed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", "pipeline", PIPELINE, host="elsewhere", pid=dead_pid())
    assert RunFile(str(path)).look().state() == "running"
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    old = [row | {"time": row["time"] - 500} if "time" in row else row for row in rows]
    assert RunFile(str(write_lines(path, old))).look().state() == "silent"


def test_what_is_added_is_read_and_a_torn_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", "pipeline", PIPELINE[:2])
    run = RunFile(str(path))
    assert len(run.look().readings) == 2
    line = orjson.dumps({"seconds": 3.0, "time": 1.0, "metrics": PIPELINE[2]}) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:30])
        assert len(run.look().readings) == 2
        file.write(line[30:])
        record = run.look()
    assert len(record.readings) == 3
    assert record.rate("penstock_pipeline_rows_in_total") == pytest.approx(100.0)
    assert record.skipped_lines == 0


def test_a_second_header_is_a_resumed_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", "pipeline", PIPELINE, end={"seconds": 5.0, "end": "failed"})
    again = write_run(tmp_path / "b", "pipeline", PIPELINE)
    path.write_bytes(path.read_bytes() + again.read_bytes())
    record = RunFile(str(path)).look()
    assert (record.parts, record.state(), len(record.readings)) == (2, "running", 10)


def test_a_file_that_is_begun_anew_is_read_anew_and_a_removed_one_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.metrics.jsonl", "pipeline", PIPELINE)
    made = client(path)
    assert "500" in shown(made, "/t/0")
    write_run(path, "loader", [{"penstock_loader_step": 7.0}])
    assert "next step" in shown(made, "/t/0/live")
    path.unlink()
    assert "was removed while it was shown" in shown(made, "/t/0/live", 404)
    assert "was removed while it was shown" in shown(made, "/")


def test_a_run_may_be_opened_before_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "coming.metrics.jsonl"
    made = client(path)
    assert "has not begun" in shown(made, "/t/0")
    write_run(path, "pipeline", PIPELINE)
    assert ">running</span>" in shown(made, "/t/0/live")


def test_a_file_of_any_length_is_read_in_bounded_memory(tmp_path: Path) -> None:
    readings = [{f'penstock_pipeline_rows_in_total{{pad="{"x" * 2000}"}}': 1.0, "n": float(n)} for n in range(6000)]
    path = write_run(tmp_path / "a", "pipeline", readings)
    assert path.stat().st_size > 8 << 20
    record = RunFile(str(path)).look()
    assert record.kind == "pipeline"
    assert len(record.readings) <= 1200
    numbers = [reading.metrics["n"] for reading in record.readings]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 5999
    assert numbers[0] < 100


def test_the_page_of_a_pipeline_has_rates_stages_budget_and_the_bottleneck(tmp_path: Path) -> None:
    text = shown(client(write_run(tmp_path / "a", "pipeline", PIPELINE)), "/t/0")
    for said in (
        "the source is the bottleneck",
        "100 a second",
        "Lower(&#x27;text&#x27;)",
        "83%",
        "of 4.0 MiB, 25%",
        "too &quot;short&quot;",
    ):
        assert said in text, said


def test_the_page_of_a_loader_has_data_wait_tokens_and_mixture(tmp_path: Path) -> None:
    reading = {"penstock_loader_data_wait_ratio": 0.034, "penstock_loader_tokens_per_second": 12345.0}
    reading |= {'penstock_loader_source_ratio{source="web"}': 0.75, "penstock_loader_step": 9.0}
    text = shown(client(write_run(tmp_path / "a", "loader", [reading, reading])), "/t/0")
    for said in ("3.4%", "12,345", "web: 75%", "next step"):
        assert said in text, said


def test_the_page_of_rollouts_has_staleness_groups_and_rewards(tmp_path: Path) -> None:
    reading = {"penstock_rollouts_staleness_mean": 1.5, "penstock_rollouts_staleness_max": 4.0}
    reading |= {"penstock_rollouts_group_completion_ratio": 0.96, "penstock_rollouts_reward_sum": 30.0}
    for edge, count in (("-9.0", 0.0), ("-1.0", 0.0), ("0.0", 10.0), ("1.0", 50.0), ("10.0", 60.0), ("+Inf", 60.0)):
        reading[f'penstock_rollouts_reward_bucket{{le="{edge}"}}'] = count
    text = shown(client(write_run(tmp_path / "a", "rollouts", [reading])), "/t/0")
    for said in ("versions; at most 4", "96.0%", "Rewards: 60 rollouts used, mean 0.5", "Rewards of the rollouts used"):
        assert said in text, said
    assert "rewards, -1 to 0: 10" in text
    assert ">-5<" not in text  # an axis without the edges that no reward reached


def test_the_page_of_a_queue_member_has_backlog_and_members(tmp_path: Path) -> None:
    reading = {'penstock_queue_ready_batches{split="train"}': 77.0, 'penstock_queue_leased_files{split="train"}': 3.0}
    reading |= {'penstock_queue_members{role="consumer",state="alive"}': 2.0}
    text = shown(client(write_run(tmp_path / "a", "queue", [reading, reading])), "/t/0")
    for said in ("77", "consumer alive", "train"):
        assert said in text, said


def test_a_file_of_nonsense_does_no_harm(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "a.metrics.jsonl",
        HOSTILE,
        [{HOSTILE: 1.0, 'penstock_stage_x{stage="': 2.0, "penstock_loader_step": float(1 << 60)}],
        name=HOSTILE,
        pid="no number",
        started="never",
        labels={HOSTILE: HOSTILE},
    )
    with path.open("ab") as file:
        file.write(b'null\n[1]\n{"metrics": 3}\n{"metrics": {"a": "b", "c": true}}\n\xff\n\0\0\0\n{"end": 5}\n')
    text = shown(client(path), "/t/0")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert RunFile(str(path)).look().skipped_lines == 4


def test_a_metrics_file_that_is_missing_after_it_was_seen_is_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", "loader", [{}])
    run = RunFile(str(path))
    run.look()
    path.unlink()
    with pytest.raises(DataError, match="removed"):
        run.look()


def test_files_that_pipelines_and_loaders_write_are_shown(tmp_path: Path) -> None:
    rows = [{"text": f"row {number} " * 20} for number in range(50)]
    pipeline, loader = tmp_path / "p.metrics.jsonl", tmp_path / "l.metrics.jsonl"
    Pipeline(rows, [Lower("text")], tmp_path / "out.jsonl").run(metrics=str(pipeline))
    store = make_store(tmp_path / "s", [row["text"] for row in rows])
    with PretrainDataLoader(store, chunk_size=64, batch_size=4, backend="numpy", metrics=str(loader)) as batches:
        steps = sum(1 for _ in batches)
    made = client(pipeline, loader)
    text = shown(made, "/t/0")
    for said in (">finished</span>", "Lower(&#x27;text&#x27;)", "<dt>rows out</dt><dd>50", "Busy share"):
        assert said in text, said
    text = shown(made, "/t/1")
    for said in (f"<dt>next step</dt><dd>{steps}<", "<dt>data wait</dt>", "<dt>padding</dt>"):
        assert said in text, said
