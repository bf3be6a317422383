"""Loaders over logs of messages, which may have no end, and pipelines of brokers in YAML files."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from tests.brokers import Broker, KafkaBroker, as_json, read_all
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import DataError
from penstock.loaders import ConversationDataLoader, PretrainDataLoader, Recipe, StreamOptions, prepare
from penstock.sources import IteratorSource

TEXTS = [{"text": f"message number {i} " + "word " * (i % 7)} for i in range(200)]
CHATS = [
    {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"answer {i} " * 3}]}
    for i in range(40)
]


def ids(batches: Any) -> list[Any]:
    return [np.asarray(batch["input_ids"]).tolist() for batch in batches]


def pretrain(source: Any, **options: Any) -> PretrainDataLoader:
    options = {"streaming": True, "batch_size": 2, "backend": "numpy", "prefetch": 0} | options
    return PretrainDataLoader(source, "byte", 64, **options)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_log_without_an_end_feeds_a_loader_that_resumes_exactly(broker: Broker, shuffle: bool) -> None:
    url = broker.new()
    broker.put(url, as_json(TEXTS))
    options = {"shuffle": shuffle, "streaming": StreamOptions(shuffle_window=16)}

    def source() -> Any:
        return broker.source(url, until=None, max_wait_seconds=0.02)

    with pretrain(source(), **options) as loader:
        wanted, states = [], []
        for batch in islice(loader, 12):
            wanted.append(batch)
            states.append(orjson.loads(orjson.dumps(loader.state_dict())))
    for number in (0, 5, 10):
        with pretrain(source(), **options) as again:
            again.load_state_dict(states[number])
            assert ids(islice(again, 11 - number)) == ids(wanted[number + 1 :])


def test_a_batch_comes_as_soon_as_its_messages_are_there(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, as_json(TEXTS[:20]))
    with pretrain(broker.source(url, until=None, max_wait_seconds=0.02), shuffle=False) as loader:
        batches = iter(loader)
        next(batches)
        threading.Thread(target=broker.put, args=(url, as_json(TEXTS[20:]))).start()
        assert len([*islice(batches, 10)]) == 10


def test_a_loader_that_waits_for_messages_can_be_closed(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, as_json(TEXTS[:20]))
    loader = pretrain(broker.source(url, until=None, max_wait_seconds=0.02), shuffle=False, prefetch=2)
    next(iter(loader))
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-prefetch")]


def test_a_log_with_an_end_has_epochs_and_can_be_prepared(broker: Broker, tmp_path: Path) -> None:
    url = broker.new()
    broker.put(url, as_json(TEXTS))
    with pretrain(url, shuffle=False) as loader:
        first, second = ids(loader), ids(loader)
    assert first == second
    prepare(url, tmp_path / "a.store", Recipe(tokenizer="byte"))
    with pretrain(tmp_path / "a.store", shuffle=False, streaming=False) as loader:
        assert (
            sorted(row for batch in ids(loader) for row in batch)[:20]
            == sorted(row for batch in first for row in batch)[:20]
        )


def test_chats_are_read_from_messages_with_all_their_fields(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, as_json(CHATS))
    options: dict[str, Any] = {"batch_size": 2, "backend": "numpy", "streaming": True, "shuffle": False}
    live = broker.source(url, until=None, max_wait_seconds=0.02)
    with (
        ConversationDataLoader(live, "byte", template="plain", **options) as loader,
        ConversationDataLoader(IteratorSource(CHATS), "byte", template="plain", **options) as plain,
    ):
        assert ids(islice(loader, 10)) == ids(islice(plain, 10))


def test_partitions_are_streams_of_their_own(kafka_broker: KafkaBroker) -> None:
    url = kafka_broker.new()
    for partition in range(4):
        kafka_broker.put(url, as_json(TEXTS[partition::4]), partition=partition)
    with pretrain(url, streaming=StreamOptions(shuffle_window=8)) as loader:
        batches = [*loader]
    places = set()
    for facts in (batch.metadata for batch in batches):
        places |= {(facts["sources"][file], int(row)) for file, row in zip(facts["source"], facts["row"])}
    assert sorted(row for _, row in places) == sorted([*range(50)] * 4)
    assert {name.rpartition(" ")[2] for name, _ in places} == {*"0123"}


def test_a_poison_message_of_a_stream_is_named_or_left_out(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, [*as_json(TEXTS[:50]), b"poison", *as_json(TEXTS[50:])])
    with pretrain(url, shuffle=False) as loader, pytest.raises(DataError, match="partition 0, offset"):
        ids(loader)
    with pretrain(url, shuffle=False, streaming=StreamOptions(on_error="skip")) as loader:
        kept = ids(loader)
    with pretrain(IteratorSource(TEXTS), shuffle=False) as plain:
        assert kept == ids(plain)


@pytest.mark.parametrize("short", [True, False])
def test_commands_and_pipeline_files_name_logs_by_url(broker: Broker, tmp_path: Path, short: bool) -> None:
    url, out = broker.new(), broker.new()
    broker.put(url, as_json(TEXTS))
    kind = "nats" if url.startswith("nats") else "redis_stream"
    given = ["prepare", url, "--out", str(tmp_path / "a.store"), "--tokenizer", "byte", "--quiet"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    file = tmp_path / "run.yaml"
    tree: dict[str, Any] = {"source": url, "sink": out}
    if not short:
        tree = {
            "source": {"type": kind, "url": url, "metadata": ["partition"]},
            "sink": {"path": out, "column": "text"},
        }
        tree["transforms"] = [{"filter": "partition == 0"}]
    file.write_text(yaml.safe_dump(tree | {"checkpoint": str(tmp_path / "state")}))
    done = CliRunner().invoke(app, ["run", str(file), "--quiet"])
    assert done.exit_code == 0, done.output
    found = read_all(broker.source(out, format="json" if short else "text"))
    assert found == TEXTS
