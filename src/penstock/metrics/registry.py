"""Registry of metrics: every name that penstock exports, with its kind, unit, labels and meaning.

A new metric is a line here and a line in `docs/metrics.md`; a test compares both with what is exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge", "histogram"]
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Instrument:
    """Metric: a counter only grows during a run, a gauge goes up and down, a histogram has `_bucket`, `_sum`, `_count`.

    A ratio is between 0 and 1.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()


def instrument_of(name: str) -> Instrument | None:
    """Instrument of a name, or of a part of a histogram; None for a name that is not penstock's."""
    found = INSTRUMENTS.get(name)
    for part in _HISTOGRAM_PARTS:
        if found is None and name.endswith(part):
            whole = INSTRUMENTS.get(name.removesuffix(part))
            found = whole if whole is not None and whole.kind == "histogram" else None
    return found


_STAGE = ("stage", "kind")
_TABLE: list[tuple[Any, ...]] = [
    # Pipelines
    ("penstock_pipeline_seconds", "gauge", "seconds", "time since the run began"),
    ("penstock_pipeline_rows_in_total", "counter", "rows", "rows read"),
    ("penstock_pipeline_rows_out_total", "counter", "rows", "rows that the sink or the consumer got"),
    (
        "penstock_pipeline_rows_done_total",
        "counter",
        "rows",
        "rows read whose results have come out, a resume included",
    ),
    ("penstock_pipeline_bytes_in_total", "counter", "bytes", "bytes read, as the source counts them"),
    ("penstock_pipeline_file_bytes_done_total", "counter", "bytes", "bytes of input files whose rows have come out"),
    ("penstock_pipeline_rows_dropped_total", "counter", "rows", "rows left out on purpose", ("reason",)),
    ("penstock_pipeline_rows_changed_total", "counter", "rows", "rows kept with a changed value", ("reason",)),
    ("penstock_pipeline_tokens_dropped_total", "counter", "tokens", "tokens that are in no row", ("reason",)),
    ("penstock_pipeline_rows_quarantined_total", "counter", "rows", "bad rows set aside", ("reason",)),
    ("penstock_pipeline_rows_skipped_total", "counter", "rows", "bad rows left out", ("reason",)),
    ("penstock_pipeline_budget_used_bytes", "gauge", "bytes", "memory charged to the budget"),
    ("penstock_pipeline_budget_limit_bytes", "gauge", "bytes", "memory budget, lower while the machine is short of it"),
    ("penstock_pipeline_budget_peak_bytes", "gauge", "bytes", "the most that was charged to the budget at once"),
    ("penstock_pipeline_buffer_batches", "gauge", "batches", "batches in a buffer between threads", ("buffer",)),
    ("penstock_pipeline_buffer_bytes", "gauge", "bytes", "bytes in a buffer between threads", ("buffer",)),
    ("penstock_pipeline_workers", "gauge", "threads", "workers in use"),
    ("penstock_pipeline_batch_bytes", "gauge", "bytes", "size of a batch that the tuner aims at"),
    ("penstock_pipeline_latency_seconds", "gauge", "seconds", "time of a batch from source to sink", ("quantile",)),
    # Stages of a pipeline
    ("penstock_stage_batches_total", "counter", "batches", "batches that went through", _STAGE),
    ("penstock_stage_rows_in_total", "counter", "rows", "rows that went in", _STAGE),
    ("penstock_stage_rows_out_total", "counter", "rows", "rows that came out", _STAGE),
    ("penstock_stage_bytes_in_total", "counter", "bytes", "bytes that went in", _STAGE),
    ("penstock_stage_bytes_out_total", "counter", "bytes", "bytes that came out", _STAGE),
    ("penstock_stage_busy_seconds_total", "counter", "seconds", "time in the stage, over all threads", _STAGE),
    ("penstock_stage_cpu_seconds_total", "counter", "seconds", "processor time in the stage", _STAGE),
    ("penstock_stage_wait_input_seconds_total", "counter", "seconds", "time without input", _STAGE),
    ("penstock_stage_wait_room_seconds_total", "counter", "seconds", "time waited for memory or room", _STAGE),
    ("penstock_stage_utilisation_ratio", "gauge", "ratio", "share of the time that its threads are busy", _STAGE),
    ("penstock_stage_threads", "gauge", "threads", "threads that may be in the stage", _STAGE),
    ("penstock_stage_memory_bytes", "gauge", "bytes", "memory that the stage holds between batches", _STAGE),
    ("penstock_stage_latency_seconds", "gauge", "seconds", "time of a batch in the stage", (*_STAGE, "quantile")),
    # Loaders
    ("penstock_loader_seconds", "gauge", "seconds", "time since the first batch was requested"),
    ("penstock_loader_step", "gauge", "steps", "number of the next step"),
    ("penstock_loader_epoch", "gauge", "epochs", "epoch of the next step"),
    ("penstock_loader_steps_total", "counter", "steps", "batches delivered by this process"),
    ("penstock_loader_samples_total", "counter", "samples", "samples delivered"),
    ("penstock_loader_tokens_total", "counter", "tokens", "tokens delivered, without padding"),
    ("penstock_loader_places_total", "counter", "tokens", "tokens delivered, with padding"),
    ("penstock_loader_tokens_per_second", "gauge", "tokens per second", "tokens delivered lately, without padding"),
    ("penstock_loader_steps_per_second", "gauge", "steps per second", "batches delivered lately"),
    ("penstock_loader_data_wait_seconds_total", "counter", "seconds", "time that the trainer waited for batches"),
    ("penstock_loader_train_seconds_total", "counter", "seconds", "time between a batch and the next request"),
    ("penstock_loader_data_wait_ratio", "gauge", "ratio", "share of the time lately that the trainer waited"),
    ("penstock_loader_padding_ratio", "gauge", "ratio", "share of the delivered places that is padding"),
    ("penstock_loader_source_samples_total", "counter", "samples", "samples delivered by source", ("source",)),
    ("penstock_loader_source_ratio", "gauge", "ratio", "realised mixture: share of the samples by source", ("source",)),
    ("penstock_loader_truncated_tokens_total", "counter", "tokens", "tokens cut off samples that were too long"),
    ("penstock_loader_prefetched_batches", "gauge", "batches", "batches that are ready"),
    ("penstock_loader_budget_used_bytes", "gauge", "bytes", "memory charged to the loader's budget"),
    ("penstock_loader_budget_limit_bytes", "gauge", "bytes", "memory budget of the loader"),
    ("penstock_loader_budget_peak_bytes", "gauge", "bytes", "the most that was charged to it at once"),
    # Queues
    ("penstock_queue_ready_files", "gauge", "files", "backlog: files ready for a consumer", ("split",)),
    ("penstock_queue_ready_batches", "gauge", "batches", "backlog: batches ready for a consumer", ("split",)),
    ("penstock_queue_ready_bytes", "gauge", "bytes", "backlog: bytes of ready files", ("split",)),
    ("penstock_queue_leased_files", "gauge", "files", "files that consumers have claimed", ("split",)),
    ("penstock_queue_leased_batches", "gauge", "batches", "batches that consumers have claimed", ("split",)),
    ("penstock_queue_aside_files", "gauge", "files", "unreadable files that were set aside", ("split",)),
    ("penstock_queue_returned_files", "gauge", "files", "files whose consumer died", ("split",)),
    ("penstock_queue_oldest_seconds", "gauge", "seconds", "age of the oldest ready file", ("split",)),
    ("penstock_queue_published_batches_total", "counter", "batches", "batches made by all providers", ("split",)),
    ("penstock_queue_delivered_batches_total", "counter", "batches", "batches that left the queue", ("split",)),
    ("penstock_queue_members", "gauge", "members", "providers and consumers", ("role", "state")),
    ("penstock_queue_member_batches_total", "counter", "batches", "batches of this member", ("split",)),
    ("penstock_queue_member_wait_seconds_total", "counter", "seconds", "time this consumer waited", ("split",)),
    ("penstock_queue_member_redelivered_batches_total", "counter", "batches", "batches delivered again", ("split",)),
    ("penstock_queue_member_lost_files_total", "counter", "files", "files lost to an expired lease", ("split",)),
    ("penstock_queue_member_skipped_batches_total", "counter", "batches", "batches of unreadable files", ("split",)),
    ("penstock_queue_member_bytes_total", "counter", "bytes", "bytes that this provider has published"),
    ("penstock_queue_member_paused", "gauge", "boolean", "1 while this provider pauses because the backlog is full"),
    # Rollouts
    ("penstock_rollouts_waiting", "gauge", "rollouts", "rollouts that wait in the buffer"),
    ("penstock_rollouts_capacity", "gauge", "rollouts", "rollouts or appends that may wait"),
    ("penstock_rollouts_appends_total", "counter", "appends", "appends so far"),
    ("penstock_rollouts_appended_total", "counter", "rollouts", "rollouts appended to the buffer"),
    ("penstock_rollouts_used_total", "counter", "rollouts", "rollouts in delivered rollout batches"),
    ("penstock_rollouts_dropped_total", "counter", "rollouts", "rollouts that were not used", ("reason",)),
    ("penstock_rollouts_policy_version", "gauge", "versions", "version of the policy that is trained"),
    ("penstock_rollouts_staleness_mean", "gauge", "versions", "versions behind the policy, of the last rollout batch"),
    ("penstock_rollouts_staleness_max", "gauge", "versions", "versions behind the policy, of the last rollout batch"),
    ("penstock_rollouts_groups", "gauge", "groups", "groups in the last rollout batch"),
    ("penstock_rollouts_incomplete", "gauge", "rollouts", "rollouts that wait for the rest of their group"),
    ("penstock_rollouts_group_completion_ratio", "gauge", "ratio", "share of rollouts whose group was complete"),
    ("penstock_rollouts_reward", "histogram", "reward", "rewards of the rollouts used"),
    # Feed servers
    ("penstock_feed_clients", "gauge", "clients", "streams that are open"),
    ("penstock_feed_requests_total", "counter", "requests", "requests answered"),
    ("penstock_feed_messages_total", "counter", "messages", "messages sent, of batches and answers"),
    ("penstock_feed_bytes_total", "counter", "bytes", "bytes of messages sent"),
    ("penstock_feed_budget_used_bytes", "gauge", "bytes", "memory charged to the server's budget"),
    ("penstock_feed_budget_limit_bytes", "gauge", "bytes", "memory budget of the server"),
]

INSTRUMENTS: dict[str, Instrument] = {row[0]: Instrument(*row) for row in _TABLE}
"""Every metric of penstock, by name."""
