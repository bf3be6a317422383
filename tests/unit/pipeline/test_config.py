"""Wrong knobs are refused when the config is made."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import ConfigError, PipelineConfig
from penstock.pipeline.cores import available_cores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, r"workers.*'auto'"),
        ({"workers": True}, "workers"),
        ({"workers": "threads"}, "'threads'"),
        ({"max_workers": -1}, "max_workers"),
        ({"batch_rows": 0}, r"batch_rows.*'auto'"),
        ({"on_error": "ignore"}, r"on_error.*'ignore'"),
        ({"max_failures": -1}, "max_failures"),
        ({"max_failure_ratio": 1.5}, "max_failure_ratio"),
        ({"stall_seconds": 0}, "stall_seconds"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds"),
    ],
)
def test_a_wrong_knob_is_named_with_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**options)


def test_the_worker_limit_is_what_was_asked_for_or_the_cores_there_are() -> None:
    assert PipelineConfig(workers=7).worker_limit == 7
    assert PipelineConfig(max_workers=3).worker_limit == 3
    assert PipelineConfig(workers="process", max_workers=2).worker_limit == 2
    assert PipelineConfig(workers="process") == PipelineConfig(worker_type="process")
    assert PipelineConfig(workers=3, worker_type="process").worker_limit == 3
    assert PipelineConfig().worker_limit == available_cores() >= 1
