"""Wrong knobs are refused when the config is made."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import ConfigError, PipelineConfig
from penstock.pipeline.config import available_cores


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be a positive number, 'auto' or 'process', got 0"),
        ({"workers": True}, "workers must be a positive number"),
        ({"workers": "threads"}, "got 'threads'"),
        ({"max_workers": -1}, "max_workers must be a positive number, got -1"),
        ({"batch_rows": 0}, "batch_rows must be a positive number or 'auto', got 0"),
        ({"on_error": "ignore"}, "on_error must be 'raise', 'skip' or 'quarantine', got 'ignore'"),
        ({"max_failures": -1}, "max_failures cannot be negative"),
        ({"max_failure_ratio": 1.5}, "max_failure_ratio must lie between 0 and 1, got 1.5"),
        ({"stall_seconds": 0}, "stall_seconds must be positive or None, got 0"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds cannot be negative"),
    ],
)
def test_a_wrong_knob_is_named_with_what_was_expected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**options)


def test_the_worker_limit_is_what_was_asked_for_or_the_cores_there_are() -> None:
    assert PipelineConfig(workers=7).worker_limit == 7
    assert PipelineConfig(max_workers=3).worker_limit == 3
    assert PipelineConfig(workers="process", max_workers=2).worker_limit == 2
    assert PipelineConfig().worker_limit == available_cores() >= 1
