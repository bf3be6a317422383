"""Feed service: dead, hung, wrong and foreign servers; tokens and TLS; what clients share; the command."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.flight as flight
import pytest
import yaml

from penstock.batching.options import Shard
from penstock.cli.serve import read_tls
from penstock.distributed.sharding import Balanced, Strided
from penstock.errors import ConfigError, ResumeError
from penstock.feed import FeedServer, RemoteLoader, TLSFiles, protocol
from penstock.feed import connection as connections
from penstock.feed.batch_groups import FeedPosition
from penstock.feed.job import block_steps
from penstock.feed.protocol import BATCH_COLUMNS, MalformedMessageError, decode, encode, ending, schema_of
from penstock.feed.server import is_loopback
from penstock.loaders.loader_file import load_config
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.preference import PreferenceDataLoader
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.loaders.rollout import RolloutDataLoader
from penstock.memory import MemoryBudget
from token_stores import make_preferences, make_rows, make_store

LENGTH = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("service") / "text", make_rows(60, LENGTH, shortest=4))


def local(store: Path, **more: Any) -> PretrainDataLoader:
    return PretrainDataLoader(store, None, LENGTH, **{"batch_size": 4, "backend": "numpy", **more})


@contextmanager
def served(store: Path, *, options: dict[str, Any] | None = None, **more: Any) -> Iterator[FeedServer]:
    with local(store, **(options or {})) as loader, FeedServer(loader, **more) as server:
        yield server


def remote(address: Any, **more: Any) -> RemoteLoader:
    return RemoteLoader(address, **{"backend": "numpy", "retry_seconds": 0.3, **more})


def address_of(client: RemoteLoader) -> str:
    return client._engine._connection.address  # type: ignore[attr-defined, no-any-return]


def ids(batches: Any) -> list[list[int]]:
    return [batch.input_ids.ravel().tolist() for batch in batches]


# -- servers that are not there, or not what they should be -----------------------------------------------------------


def test_an_address_without_a_server_is_named_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"{address}.*penstock serve"):
            remote(address, retry_seconds=0.1)


@pytest.mark.parametrize(
    "given", ["localhost:8815", "http://a:1", "grpc://a", "grpc://a:x", "grpc://a:65536", "grpc://a:0", [], [3]]
)
def test_what_is_no_address_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="grpc://host:8815"):
        remote(given)


@pytest.mark.parametrize(
    "wrong",
    [{name: value} for name in ("deadline_seconds", "retry_seconds") for value in ("3", None, float("nan"), -1, True)]
    + [{"deadline_seconds": 0}, {"deadline_seconds": float("inf")}],
)
def test_what_is_no_time_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected deadline_seconds above 0"):
        remote("grpc://127.0.0.1:1", **wrong)


def test_a_server_that_is_killed_is_replaced_by_the_next_one(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        loader, first, second = map(stack.enter_context, (local(store), served(store), served(store)))
        client = stack.enter_context(remote([first.address, second.address]))
        batches = iter(client)
        found = ids(next(batches) for _ in range(3))
        first.close()
        assert found + ids(batches) + ids(client) == ids(loader) + ids(loader)
        assert address_of(client) == second.address
    assert first.address in caplog.text


def test_a_server_that_comes_back_at_its_address_goes_on(store: Path) -> None:
    with local(store) as loader, served(store) as first, remote(first.address, retry_seconds=30) as client:
        found = ids(client)
        first.close()
        with ExitStack() as again:
            back = threading.Timer(0.3, lambda: again.enter_context(served(store, port=first.port)))
            back.start()
            found += ids(client)
            back.join()
        assert found == ids(loader) + ids(loader)


def test_a_server_that_hangs_is_found_within_the_deadline(store: Path, penstock_server: Callable[..., Any]) -> None:
    process, address = penstock_server(store)
    with ExitStack() as stack:
        second, loader = stack.enter_context(served(store)), stack.enter_context(local(store))
        client = stack.enter_context(remote([address, second.address], deadline_seconds=0.5))
        assert address_of(client) == address
        os.kill(process.pid, signal.SIGSTOP)
        try:
            assert ids(client) == ids(loader)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert address_of(client) == second.address


def test_a_server_with_another_config_is_refused_by_name(store: Path) -> None:
    with served(store) as first, remote(first.address) as client:
        assert ids(client)
        first.close()
        with served(store, options={"seed": 5}, port=first.port), pytest.raises(ConfigError, match=r"seed is .*5.*was"):
            next(iter(client))


def test_another_padding_token_is_another_config_too(store: Path) -> None:
    with served(store) as first, served(store, options={"pad_id": 7}) as second, remote(first.address) as client:
        client._engine._connection.addresses[:] = [second.address]  # type: ignore[attr-defined]
        client._engine.close()
        with pytest.raises(ConfigError, match="pad_id is 7 there and was 0"):
            next(iter(client))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (None, Strided(), "sharding is strided there and was contiguous"),
        (Balanced(), Balanced(equal_size=False), r"sharding is balanced\(equal_size=False\) there and was balanced"),
        (Balanced(np.sqrt), Balanced(np.square), "cost=.*square.* there and was .*sqrt"),
    ],
)
def test_another_sharding_is_another_config_too(store: Path, first: Any, second: Any, told: str) -> None:
    with served(store, options={"sharding": first}) as one, remote(one.address, rank=0, world_size=2) as client:
        assert client.get_batch()
        one.close()
        with (
            served(store, options={"sharding": second}, port=one.port),
            pytest.raises(ConfigError, match=told),
        ):
            ids(client)


@pytest.mark.parametrize("option", [{"kl": True}, {"completion": "all"}])
def test_options_of_preferences_are_another_config_too(tmp_path: Path, option: dict[str, Any]) -> None:
    rows = [{"prompt": "a b", "completion": f"{n}", "label": bool(n % 2)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def preferences(**more: Any) -> PreferenceDataLoader:
        given = {"batch_size": 4, "backend": "numpy", "cache_dir": tmp_path, "progress": False, **more}
        return PreferenceDataLoader(tmp_path / "rows.jsonl", "byte", 64, "plain", **given)

    with preferences() as loader, FeedServer(loader) as one, remote(one.address) as client:
        assert client.get_batch()
        one.close()
        told = f"{next(iter(option))} is .* there and was"
        with (
            preferences(**option) as other,
            FeedServer(other, port=one.port),
            pytest.raises(ConfigError, match=told),
        ):
            ids(client)


def test_a_replica_with_another_config_is_passed_over(store: Path) -> None:
    with ExitStack() as stack:
        loader, first, other, third = (
            stack.enter_context(each) for each in (local(store), served(store), served(store), served(store))
        )
        client = stack.enter_context(remote([first.address, other.address, third.address]))
        found = ids(client)
        other.close()
        stack.enter_context(served(store, options={"seed": 5}, port=other.port))
        first.close()
        assert found + ids(client) == ids(loader) + ids(loader)
        assert address_of(client) == third.address


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"options": {"seed": 5}}, r"seed is \[5\] there and \[0\] here"),
        ({"options": {"batch_size": 2}}, "batch_size is 2 there and 4 here"),
        ({"options": {"sharding": Strided()}}, "sharding is strided there and contiguous here"),
        ({"options": {"fields": ["input_ids"]}}, "fields is"),
        ({"defaults": {"tp": 2}}, "tp is 2 there and None here"),
        ({"defaults": {"backend": "torch"}}, None),
    ],
)
def test_replicas_that_differ_are_refused_before_the_first_batch(
    store: Path, more: dict[str, Any], told: str | None
) -> None:
    with socket.socket() as gone, served(store) as first, served(store, **more) as second:
        gone.bind(("127.0.0.1", 0))
        nowhere = f"grpc://127.0.0.1:{gone.getsockname()[1]}"
        addresses = [first.address, nowhere, second.address]
        if told is None:  # the client decides it
            remote(addresses).close()
            return
        with pytest.raises(ConfigError, match=told) as refused:
            remote(addresses)
        assert f"{second.address} serves another config than {first.address}" in str(refused.value)
        place = {"rank": 0, "world_size": 2, "batch_size": 4}
        if "batch_size" in told or "tp" in told:
            remote(addresses, **place).close()  # decided by the client
        else:
            with pytest.raises(ConfigError, match=told.partition(" ")[0]):
                remote(addresses, **place)


def test_edits_of_replicas_are_compared(store: Path) -> None:
    with local(store) as edited, served(store) as first:
        edited.edit(edited.plan.skip(2, 4))
        with FeedServer(edited) as second, pytest.raises(ConfigError, match=r"edits is .* there and .* here"):
            remote([first.address, second.address])


def test_slices_of_the_config_need_the_place_of_the_client(store: Path) -> None:
    with served(store, defaults={"cp": 2, "context": "zigzag"}) as server:
        with pytest.raises(ConfigError, match=r"context='zigzag' for cp=2.*rank= and world_size= say nothing of cp"):
            remote(server.address, rank=0, world_size=2)
        for place in ({"cp": 2}, {"shard": Shard(rank=1, dp=1, cp=2)}, {"context": None}):
            given = {"rank": 1, "world_size": 2} if "shard" not in place else {}
            with remote(server.address, **given, **place) as client:
                slices = client.get_batch().metadata.get("context")
                assert (slices is None) == ("context" in place)


def test_a_client_of_another_protocol_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(store) as server:
        monkeypatch.setattr(connections, "PROTOCOL", 99)
        with pytest.raises(ConfigError, match=r"speaks protocol 1 .*99.*same release"):
            remote(server.address)


class Foreign(flight.FlightServerBase):  # type: ignore[misc]
    """A server that answers by a function of its own."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.answer = answer

    def do_get(self, context: Any, ticket: Any) -> Any:
        return self.answer(json.loads(ticket.ticket))


def test_a_flight_server_of_something_else_is_refused() -> None:
    def refuse(_: Any) -> Any:
        raise flight.FlightServerError("no such table")

    with Foreign(refuse) as server, pytest.raises(ConfigError, match=r"no server of a penstock feed.*no such table"):
        remote(f"grpc://127.0.0.1:{server.port}")


@pytest.mark.parametrize("damage", ["cut", "sizes", "notes", "empty"])
def test_a_damaged_answer_is_not_delivered_and_the_next_server_goes_on(store: Path, damage: str) -> None:
    with local(store) as loader, served(store) as good, ExitStack() as stack:
        service = good._service

        def answer(request: dict[str, Any]) -> Any:
            columns, make = service.answer(request)
            messages = list(make())
            if request["verb"] == "batches":
                batch, notes = messages[1]
                if damage == "cut":
                    messages = messages[:2]
                elif damage == "sizes":
                    told = json.loads(notes)
                    told["arrays"]["ids"][1][0] += 1
                    messages[1] = protocol.EncodedMessage(batch, json.dumps(told).encode())
                elif damage == "notes":
                    messages[1] = protocol.EncodedMessage(batch, notes[: len(notes) // 2])
                else:
                    messages = []
            if damage == "cut" and request["verb"] == "batches":
                return flight.GeneratorStream(schema_of(columns), iter(map(tuple, messages)))
            return flight.GeneratorStream(schema_of(columns), iter(map(tuple, [*messages, ending(columns)])))

        bad = stack.enter_context(Foreign(answer))
        wanted = ids(loader)
        with remote([f"grpc://127.0.0.1:{bad.port}", good.address]) as client:
            if damage == "empty":  # a complete answer without batches: as from a plan that has ended
                assert ids(client) == []
                return
            assert ids(client) == wanted


def test_messages_hold_arrays_of_numbers_only() -> None:
    message = encode({"type": "x"}, {"ids": np.arange(6, dtype=np.uint16).reshape(2, 3)}, BATCH_COLUMNS)
    _, arrays = decode(*message)
    assert arrays["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays["ids"].ctypes.data == message.batch.column(0).buffers()[2].address, "a view, not a copy"
    for table in ({"ids": ["O", [2, 3]]}, {"ids": ["<u2", [4]]}, {"ids": ["<u2", [-6]]}, {"nope": ["<u2", [6]]}, [1]):
        with pytest.raises(MalformedMessageError):
            decode(message.batch, json.dumps({"arrays": table}).encode())
    with pytest.raises(MalformedMessageError):
        decode(message.batch, b"")


# -- errors of the server at the client -------------------------------------------------------------------------------


def test_errors_of_the_server_are_raised_as_what_they_are(store: Path) -> None:
    with served(store) as server, served(store, options={"seed": 9}) as other, remote(server.address) as client:
        with remote(other.address) as second, pytest.raises(ResumeError, match="seed"):
            client.load_state_dict(second.state_dict())
        with pytest.raises(ResumeError, match="global batches"):
            client.load_state_dict(remote(server.address, batch_size=3).state_dict())
        with pytest.raises(IndexError):
            client.plan.step(-1)
        with pytest.raises(ResumeError, match="damaged"):
            next(client._engine.batches(FeedPosition(0, 0, '{"places": 3}')))


@pytest.mark.parametrize("option", [{"seed": 3}, {"chunk_size": 3}, {"padding_free": True}, {"sharding": None}])
def test_options_of_the_config_are_refused_at_the_client(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        remote("grpc://127.0.0.1:1", **option)


def test_fields_are_a_part_of_those_of_the_config(store: Path) -> None:
    with served(store, options={"fields": ["input_ids", "labels"]}) as server:
        with remote(server.address, fields=["input_ids"]) as client:
            batch = next(iter(client))
            assert batch.labels is None
        with pytest.raises(ConfigError, match="position_ids"):
            remote(server.address, fields=["input_ids", "position_ids"])


def test_metrics_of_a_rank_are_written_at_the_client(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "rank.metrics.jsonl"
    with served(store) as server, remote(server.address, metrics=str(path)) as client:
        count = len(list(client))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    readings = [line["metrics"] for line in lines if "metrics" in line]
    assert readings[-1]["penstock_loader_steps_total"] == count


def test_metrics_of_a_served_file_are_not_ignored_in_silence(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.dump({"loader": "pretrain", "path": str(store), "metrics": str(tmp_path / "run.jsonl")}))
    with FeedServer.of_config(load_config(path)):
        assert "pass --metrics" in caplog.text


def test_slices_of_preferences_are_refused_before_the_first_batch(tmp_path: Path) -> None:
    make_preferences(tmp_path / "pairs", 8, LENGTH)
    with (
        PreferenceDataLoader(tmp_path / "pairs", max_length=LENGTH, backend="numpy") as loader,
        FeedServer(loader) as server,
        pytest.raises(ConfigError, match="compared whole"),
    ):
        remote(server.address, rank=0, world_size=2, cp=2, context="zigzag")


def test_a_stream_is_refused_with_the_reason(store: Path) -> None:
    with local(store, streaming=True) as loader, pytest.raises(ConfigError, match="prepared data"):
        FeedServer(loader)


def test_what_has_no_plan_is_refused_with_the_way_to_do_it() -> None:
    rollouts = [{"prompt_ids": [1], "response_ids": [2, 3], "reward": 1.0, "group": 0}]
    with RolloutDataLoader(rollouts, batch_size=1, backend="numpy") as loader:
        with pytest.raises(ConfigError, match=r"RolloutDataLoader has no plan.*RolloutQueue"):
            FeedServer(loader)
        with pytest.raises(ConfigError, match="loaders of prepared data have one"):
            _ = loader.sources
    with pytest.raises(ConfigError, match="a loader of penstock, got None"):
        FeedServer(None)  # type: ignore[arg-type]


# -- what clients share -----------------------------------------------------------------------------------------------


def test_batches_that_several_clients_read_are_made_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    finish = PlanEngine._finish

    def counted(engine: PlanEngine, share: Any, *given: Any) -> Any:
        made.append(share.step.number)
        return finish(engine, share, *given)

    monkeypatch.setattr(PlanEngine, "_finish", counted)
    with served(store, options={"batch_size": 1}) as server, ExitStack() as stack:
        clients = [stack.enter_context(remote(server.address)) for _ in range(3)]
        loops = [iter(client) for client in clients]
        first = [ids([next(loop)]) for loop in loops]  # all are connected now
        before = len(made)
        together = [ids(batches) for batches in zip(*loops, strict=True)]
        assert all(batch == found[0] for found in together for batch in found)
        assert first[0] == first[1] == first[2]
        most = len(together) + 3 * 8  # what was made before all of them were connected is not shared
        assert len(made) - before <= most < 3 * len(together)


def test_clients_that_start_at_different_steps_come_to_share_blocks() -> None:
    ends = []
    for step in (0, 37, 41):
        reached = {step}
        while step < 200:
            step += block_steps(step)
            reached.add(step)
        ends.append(reached)
    assert {64, 128, 192} <= ends[0] & ends[1] & ends[2]
    assert block_steps(0) == 1


def test_a_client_that_does_not_read_delays_no_other_and_holds_little_memory(store: Path) -> None:
    budget = MemoryBudget("4 KiB")
    with local(store, batch_size=1) as loader, served(store, options={"batch_size": 1}, budget=budget) as server:
        wanted = ids(loader)
        with ExitStack() as stack:
            for _ in range(4):
                idle = stack.enter_context(remote(server.address))
                next(iter(idle))
            with remote(server.address) as client:
                assert ids(client) == wanted


def test_a_server_closes_while_a_client_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.feed.server._GRACE_SECONDS", 0.2)
    big = make_store(tmp_path / "big", [list(range(60_000))] * 400)  # more than the buffers of a connection
    with local(big, packing=None) as loader:
        server = FeedServer(loader)
        call = flight.FlightClient(server.address)
        with remote(server.address) as client:
            request = client._engine._request("batches", client.plan, position=client._position.facts)
            ticket = json.dumps({"protocol": protocol.PROTOCOL, **request}).encode()
            reader = call.do_get(flight.Ticket(ticket))
            server.close()
            reader.cancel()
        call.close()


# -- tokens and TLS ---------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_shown_nowhere(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(connections.TOKEN_VARIABLE, raising=False)
    caplog.set_level(logging.DEBUG)
    with served(store, token="correct horse") as server:
        for wrong in (None, "battery", "correct horses"):
            with pytest.raises(PermissionError, match=connections.TOKEN_VARIABLE) as refused:
                remote(server.address, token=wrong)
            assert "battery" not in str(refused.value)
        with remote(server.address, token="correct horse") as client:
            shown = [repr(client), repr(client._engine), repr(client._engine._connection), caplog.text]
            assert not [text for text in [*shown, json.dumps(client.state_dict())] if "correct" in text]
        monkeypatch.setenv(connections.TOKEN_VARIABLE, "correct horse")
        remote(server.address).close()
        remote(server.address, token="correct horse\n").close()  # as a file has it
        for wrong in (" \n", "h\u00f6rse", "correct\nhorse"):
            with pytest.raises(ConfigError, match="token=: expected a token of printable ASCII"):
                remote(server.address, token=wrong)
        with pytest.raises(ConfigError, match="expected a token as text, got bytes") as refused:
            remote(server.address, token=b"correct horse")
        assert "correct" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "localhost", "::1", "0.0.0.0", "10.0.0.1", "example.com"])
def test_this_machine_is_known_by_its_addresses(host: str) -> None:
    assert is_loopback(host) == (host in ("127.0.0.1", "127.0.0.3", "localhost", "::1"))


def test_other_machines_need_a_token(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    with local(store) as loader:
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0.*token"):
            FeedServer(loader, host="0.0.0.0")
        with pytest.raises(OSError, match="cannot serve at"), served(store) as server:
            FeedServer(loader, port=server.port)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a certificate of 127.0.0.1, its key, and a certificate of another machine."""
    home = tmp_path_factory.mktemp("tls")
    for name, place in (("own", "IP:127.0.0.1"), ("other", "DNS:elsewhere.test")):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={place}"]
        command += ["-keyout", str(home / f"{name}.key"), "-out", str(home / f"{name}.crt")]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not installed")
    return home


def files(tls: Path, name: str) -> TLSFiles:
    return TLSFiles((tls / f"{name}.crt").read_bytes(), (tls / f"{name}.key").read_bytes())


def test_tls_works_with_the_certificate_and_with_no_other(store: Path, tls: Path) -> None:
    with local(store) as loader, served(store, tls=files(tls, "own"), token="a") as server:
        assert server.address.startswith("grpc+tls://")
        with remote(server.address, tls_root_certs=tls / "own.crt", token="a") as client:
            assert ids(client) == ids(loader)
        with pytest.raises(ConnectionError, match="tls_root_certs"):
            remote(server.address, tls_root_certs=tls / "other.crt", token="a")
        with pytest.raises(ConfigError, match=r"own\.key.*expected certificates in PEM"):
            remote(server.address, tls_root_certs=tls / "own.key", token="a", retry_seconds=1000)
    with served(store) as plain, pytest.raises(ConnectionError, match=f"does not use TLS.*{plain.address}$"):
        remote(plain.address.replace("grpc", "grpc+tls"), tls_root_certs=tls / "own.crt", retry_seconds=1000)


def test_a_certificate_needs_its_own_key(store: Path, tls: Path) -> None:
    assert read_tls(tls / "own.crt", tls / "own.key") == files(tls, "own")
    for certificate, key in (("own.crt", "other.key"), ("own.key", "own.key")):
        with pytest.raises(ConfigError, match=f"--tls-key .*{key}: expected a certificate and its private key"):
            read_tls(tls / certificate, tls / key)
    wrong = TLSFiles((tls / "own.crt").read_bytes(), (tls / "other.key").read_bytes())
    with local(store) as loader, pytest.raises(OSError, match="its private key in PEM"):
        FeedServer(loader, tls=wrong)


def test_a_certificate_of_another_name_is_refused_at_once(
    store: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = r"another name.*127\.0\.0\.1 is not in peer certificate"
    with served(store, tls=files(tls, "other")) as server, pytest.raises(ConnectionError, match=told):
        remote(server.address, tls_root_certs=tls / "other.crt", retry_seconds=1000)
    assert not caplog.text


def test_a_server_with_tls_is_not_tried_for_long_without_it(
    store: Path, tls: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PROBE_SECONDS", 0.2)
    told = r"closed the connection at once.*its address is grpc\+tls://127\.0\.0\.1"
    with served(store, tls=files(tls, "own")) as server, pytest.raises(ConnectionError, match=told):
        remote(server.address.replace("+tls", ""), retry_seconds=1000)
    assert not caplog.text


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def penstock_server(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start `penstock serve` on a free port: the process, and its address."""
    running: list[subprocess.Popen[str]] = []

    def start(store: Path, *options: str, **config: Any) -> tuple[subprocess.Popen[str], str]:
        tree = {"loader": "pretrain", "path": str(store), "chunk_size": LENGTH, "batch_size": 4, **config}
        file = tmp_path / "feed.yaml"
        file.write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "penstock", "serve", str(file), "--port", "0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        return process, json.loads(line)["address"]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_the_command_serves_a_loader_file_until_it_is_told_to_stop(
    store: Path, penstock_server: Callable[..., Any]
) -> None:
    process, address = penstock_server(store, backend="numpy", world_size=2)
    with local(store, rank=1, world_size=2) as loader:
        with pytest.raises(ConfigError, match=r"planned for world_size=2, and this is rank 0 of 1"):
            remote(address)
        with RemoteLoader(address, rank=1, world_size=2, retry_seconds=0.3) as client:
            assert client.options.backend == "numpy", "as the file has it"
            found = ids(client)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert "stopped" in process.stderr.read()
            with pytest.raises(ConnectionError, match="penstock serve"):
                next(iter(client))
            # A state does not need the server, and the local loader goes on after what was delivered.
            assert found == ids(loader)
            assert client.state_dict() == loader.state_dict()


def test_a_remote_loader_works_in_spawned_processes_and_says_so_in_forked_ones(store: Path) -> None:
    with served(store) as server, remote(server.address) as client:
        copy = pickle.loads(pickle.dumps(client))  # noqa: S301 - as a spawned worker gets it
        assert ids(copy) == ids(client)
        with remote(server.address, backend="torch") as tensors:
            copy = pickle.loads(pickle.dumps(tensors))  # noqa: S301
            assert [ids.tolist() for ids in copy.get_batch().input_ids] == tensors[0].input_ids.tolist()
        engine = client._engine
        engine._connection._process = -1  # type: ignore[attr-defined]  # as after a fork
        with pytest.raises(ConfigError, match="forked"):
            next(iter(client))
        engine._connection._process = os.getpid()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "token"),
        (["--tls-cert", "a.crt"], "--tls-key"),
        (["--set", "streaming=true"], "prepare the data"),
        (["--token-file", "nowhere"], "nowhere"),
        (["--token-file", "empty"], "expected a token"),
        (["--token-file", "bytes"], "expected a token"),
        (["--budget", "much"], "much"),
        (["--replicas", "2"], "--engine ray"),
        (["--engine", "spark"], "unknown engine 'spark'"),
    ],
)
def test_bad_options_of_the_command_are_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], told: str
) -> None:
    from typer.testing import CliRunner

    from penstock.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(connections.TOKEN_VARIABLE, raising=False)
    Path("empty").write_text("\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    done = CliRunner().invoke(app, ["serve", str(store), "--port", "0", *options], prog_name="penstock")
    assert done.exit_code == 1
    assert told in done.output
