"""Fan-outs to the shards: the same answers, hedged requests, retries, and errors that name the cause."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.errors import DeadlineError, InputError, OverloadedError, RecinferError, UnavailableError
from recinfer.inference.bags import bags_of
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine import dispatcher
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.request import CallName
from recinfer.serving.server import shard_server
from recinfer.serving.server.server import Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.fan_out_request import FanOutRequest
from recinfer.serving.shards.replica import Replica
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.shards.transport import rankers_thread
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.paths import BytePath
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, write_shards
from tests.serving.remote.models import KINDS
from tests.serving.remote.test_direct import (
    NUM_DENSE,
    make_archive,
    make_request,
    ordinary,
    requests,
    served,
    service_of,
    straight,
)
from tests.waiting import until

Alone = tuple[InferenceService, FanOut, list[ShardServer]]


def later(service: InferenceService, call: CallName, data: bytes, seconds: float = 60.0) -> tuple[Any, str]:
    """The answer, and the name of the thread that gave it."""
    told: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
    assert BytePath(service).begin(
        call, data, lambda found: told.put((found, threading.current_thread().name)), seconds
    )
    found = told.get(timeout=90)
    assert told.empty()
    return found


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas get requests in turn: no measured latency is recent enough to prefer one."""
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)


def cut(replica: Replica) -> None:
    """End a replica's connection for lookups."""
    connection = replica._connection
    assert connection is not None
    connection.thread.call(connection.end, "it was cut")


@contextmanager
def replicated(archive: Path, folder: Path, **settings: Any) -> Iterator[Alone]:
    """A ranker's service, and two replicas of all ranks."""
    with ExitStack() as stack:
        servers = [stack.enter_context(shard(archive, (0, 1, 2), f"127.0.0.{number}")) for number in (1, 2)]
        targets = {rank: [server.target for server in servers] for rank in range(3)}
        fan_out = stack.enter_context(asking(write_shards(folder / "s.json", targets, **settings)))
        yield service_of(archive, fan_out), fan_out, servers


@pytest.mark.parametrize("kind", KINDS)
def test_answers_come_on_the_shards_thread(tmp_path: Path, kind: str):
    with served(make_archive(tmp_path, kind), tmp_path) as service:
        for request in requests():
            data = codec.encode_lookup_request(request)
            found, thread = later(service, "Lookup", data)
            assert found == ordinary(service, "Lookup", data)
            assert thread == "recinfer-shards"
            dense = torch.arange(request.stride() * NUM_DENSE, dtype=torch.float32).reshape(-1, NUM_DENSE)
            data = codec.encode_predict_request(dense, request)
            if BytePath(service).split("Predict", data) is None:  # it lacks features
                continue
            assert later(service, "Predict", data)[0] == straight(service, "Predict", data)
        fan_out = service.registry.get().predictor.lookups._fan_out
        assert fan_out.calls["sent"] > 0 and set(fan_out.calls) == {"sent"}
        assert all(replica.outstanding == 0 for replica in fan_out.pool.everyone())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_dense_run_side_by_side_are_the_whole_to_the_bit(tmp_path: Path, kind: str):
    with served(make_archive(tmp_path, kind), tmp_path) as service:
        parts = BytePath(service, threads=3)
        for batch, longest in ((64, 2), (127, 1), (128, 4), (200, 1), (501, 2)):
            dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(batch))
            data = codec.encode_predict_request(dense, make_request(batch, batch, longest=longest))
            plain = parts.read(data)
            assert plain is not None and plain.parts(3) == min(3, batch // 64)
            expected = straight(service, "Predict", data)
            assert expected is not None and parts.remote("Predict", data) == expected
        parts.close()


def large(batch: int = 400) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """A prediction too large for its dense part to run on the shards' thread before its time has been measured."""
    request = torch.ones(batch, NUM_DENSE), make_request(batch, 3)
    assert 32 << 10 < len(codec.encode_predict_request(*request)) < 128 << 10
    return request


@contextmanager
def ranking(service: InferenceService) -> Iterator[tuple[Server, InferenceClient]]:
    """A ranker's server, and a client that never tries again."""
    predictor = service.registry.get().predictor
    with (
        Server({"pooled": predictor}, threads=2, shards=predictor.lookups._fan_out) as server,
        InferenceClient(server.target, retries=0, timeout=60) as client,
    ):
        yield server, client


def test_a_large_prediction_is_handed_over_until_it_is_known_to_be_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive = make_archive(tmp_path, "table_wise")
    expected = load(archive).predict(*large())["output"]
    threads: list[str] = []
    run = dispatcher._run_dense

    def seen(*given: Any, **how: Any) -> Any:
        threads.append(threading.current_thread().name)
        return run(*given, **how)

    monkeypatch.setattr(dispatcher, "_run_dense", seen)
    with served(archive, tmp_path) as service, ranking(service) as (server, client):
        stages = service.registry.get().predictor.stages
        before = {name: state.count for name, state in stages.state().items()}
        cost = server.service.registry.get().run_cost
        for number in range(1, 6):
            torch.testing.assert_close(client.predict(*large())["output"], expected)
            until(lambda: not server.scheduler.state.running)
            state = server.scheduler.state
            assert (state.runs, state.requests, state.samples) == (number, number, 400 * number)
            if number == 1:
                assert not any(name == "recinfer-shards" for name in threads), "nobody knew how long it takes"
                cost._seconds = 1e-6
        assert "recinfer-shards" in threads
        counts = {name: state.count - before[name] for name, state in stages.state().items()}
        assert counts["dense"] == 5
        cost._seconds = 60.0 * cost._samples
        threads.clear()
        torch.testing.assert_close(client.predict(*large())["output"], expected)
        assert all(name.startswith(("recinfer-work", "recinfer-part")) for name in threads)
        assert server.stats.requests() == {("Predict", "OK"): 6}
        assert server.stats.batch.state().count == 6


def test_a_dense_run_that_fails_is_answered_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with served(make_archive(tmp_path, "table_wise"), tmp_path) as service, ranking(service) as (server, client):
        predictor = service.registry.get().predictor
        for _ in range(2):
            expected = client.predict(*large())["output"]

        def fails(*_: Any) -> Any:
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(type(predictor.state._engine), "arrays", fails)
            # Only the byte path's run: the decoded path has its own, and answers.
            torch.testing.assert_close(client.predict(*large())["output"], expected)
            patch.setattr(type(predictor.state._engine), "__call__", fails)
            with pytest.raises(RecinferError):
                client.predict(*large())
        torch.testing.assert_close(client.predict(*large())["output"], expected)
        assert server.scheduler is not None
        until(lambda: not server.scheduler.state.running)
        assert server.scheduler.state.requests == 5
        assert server.stats.requests() == {("Predict", "OK"): 4, ("Predict", "INTERNAL"): 1}


def test_a_shard_that_dies_on_the_way_of_a_large_prediction_is_answered_and_counted_once(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    with ExitStack() as stack:
        one, other = (stack.enter_context(shard(archive, ranks)) for ranks in ((0,), (1, 2)))
        targets = {0: [one.target], 1: [other.target], 2: [other.target]}
        fan_out = stack.enter_context(asking(write_shards(tmp_path / "s.json", targets)))
        server, client = stack.enter_context(ranking(service_of(archive, fan_out)))
        client.predict(*large())
        (lost,) = fan_out.pool.replicas(1)
        given: list[Any] = []

        def ask() -> None:
            try:
                given.append(client.predict(*large()))
            except Exception as error:
                given.append(error)

        with held(other) as (asked, _):
            caller = threading.Thread(target=ask)
            caller.start()
            assert asked.wait(60)
            cut(lost)
            caller.join(60)
        (found,) = given
        assert isinstance(found, UnavailableError) and "rank 1 has no living replica" in str(found)
        assert server.scheduler is not None
        until(lambda: not server.scheduler.state.running)
        assert server.scheduler.state.requests == 2
        assert server.stats.requests() == {("Predict", "OK"): 1, ("Predict", "UNAVAILABLE"): 1}
        assert all(replica.outstanding == 0 for replica in fan_out.pool.everyone())


def test_rank_without_replica_fails_before_requests_to_other_ranks(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        fan_out = service.registry.get().predictor.lookups._fan_out
        fan_out.pool.replicas(0)[0].up = False
        before = dict(fan_out.calls)  # of the golden requests
        found, _ = later(service, "Lookup", codec.encode_lookup_request(make_request(3)))
        assert isinstance(found, UnavailableError) and "rank 0 has no living replica" in str(found)
        assert fan_out.calls == before


def test_a_replica_whose_connection_is_lost_is_replaced_by_the_other_and_connects_again(tmp_path: Path, turns: None):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path, hedge=False) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        with held(servers[0]) as (asked, _):
            found: queue.SimpleQueue[Any] = queue.SimpleQueue()
            while not asked.is_set():  # they take turns
                begin(service, data, found)
            cut(fan_out.pool.replicas(0)[0])
            begin(service, data, found)
            while not found.empty():
                assert found.get(timeout=90) == expected
        until(lambda: all(replica.up and not replica.outstanding for replica in fan_out.pool.everyone()))
        assert fan_out.calls["failed"] >= 1 and fan_out.calls["retried"] >= 1
        assert all(later(service, "Lookup", data)[0] == expected for _ in range(4))


def begin(service: InferenceService, data: bytes, found: queue.SimpleQueue[Any]) -> None:
    """Begin a lookup, and wait a moment for its answer, which a replica that is held does not give."""
    told = threading.Event()

    def tell(answer: Any) -> None:
        found.put(answer)
        told.set()

    assert BytePath(service).begin("Lookup", data, tell)
    told.wait(0.2)


@pytest.mark.parametrize("allowed", [False, True])
def test_rank_lost_during_a_request_is_an_error_or_flagged(tmp_path: Path, allowed: bool):
    archive = make_archive(tmp_path, "row_wise")
    if allowed:
        archive = allowing_default_rows(archive, tmp_path / "allowing.rqa")
    with served(archive, tmp_path) as service:
        fan_out = service.registry.get().predictor.lookups._fan_out
        (lost,) = fan_out.pool.replicas(0)
        lost._connection.is_open = False  # as in the moment before the loss is noticed
        found, thread = later(service, "Lookup", codec.encode_lookup_request(make_request(3)))
        assert thread == "recinfer-shards"
        if allowed:
            assert list(pb.LookupResponse.FromString(found).missing_ranks) == [0]
            assert fan_out.default_rows[0] == 1
        else:
            assert isinstance(found, UnavailableError) and "rank 0 has no living replica" in str(found)


def test_a_request_that_cannot_be_sent_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        fan_out = service.registry.get().predictor.lookups._fan_out
        monkeypatch.setattr(fan_out.pool.replicas(2)[0], "call", lambda *_: 1 / 0)
        found, _ = later(service, "Lookup", codec.encode_lookup_request(make_request(3)))
        assert isinstance(found, ZeroDivisionError)
        until(lambda: all(replica.outstanding == 0 for replica in fan_out.pool.everyone()))


def test_request_over_a_shards_limit_is_the_callers_error(tmp_path: Path):
    """A shard with a lower limit than the ranker's: the client gets an error that says what to do, and the shard stays up."""
    with shard(make_archive(tmp_path, "row_wise"), (0, 1, 2), limits=Limits(max_response_bytes=2_000)) as server:
        path = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        with asking(path) as fan_out, ranking(service_of(make_archive(tmp_path, "row_wise"), fan_out)) as (_, client):
            client.lookup(make_request(2))
            with pytest.raises(InputError, match=f"shard {server.target}: .*send fewer samples"):
                client.lookup(make_request(200))
            assert fan_out.pool.everyone()[0].up


def test_full_shard_is_reported_and_another_replica_gets_the_request(tmp_path: Path, turns: None):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path, hedge=False) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        servers[0]._running = shard_server._MAX_RUNNING
        while not fan_out.calls["failed"]:  # they take turns
            assert later(service, "Lookup", data)[0] == expected
        servers[1]._running = shard_server._MAX_RUNNING
        found, _ = later(service, "Lookup", data)
        assert isinstance(found, OverloadedError) and "too many requests under way" in str(found)
        assert all(server.status()["held"]["refused"] for server in servers)
        for server in servers:
            server._running = 0
        assert later(service, "Lookup", data)[0] == expected, "both are still up"


def test_long_requests_do_not_delay_others(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        threads: list[tuple[int, str]] = []
        find = ShardTables.find

        def seen(tables: ShardTables, data: bytes, limits: Limits) -> bytes:
            threads.append((len(data), threading.current_thread().name))
            return find(tables, data, limits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardTables, "find", seen)
            for samples in (1, 100, 5_000):
                data = codec.encode_lookup_request(make_request(samples, 1))
                assert later(service, "Lookup", data)[0] == straight(service, "Lookup", data)
        assert {length > 32 << 10 for length, _ in threads} == {False, True}
        for length, thread in threads:
            assert thread.startswith("recinfer-shard_" if length > 32 << 10 else "recinfer-shards"), length


def test_request_too_long_for_a_shard_is_the_callers_error(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    with shard(archive, (0, 1, 2), limits=Limits(max_message_bytes=4_000)) as server:
        path = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        with asking(path) as fan_out, ranking(service_of(archive, fan_out)) as (_, client):
            client.lookup(make_request(2))
            with pytest.raises(InputError, match="at most 4000 may come: send fewer samples"):
                client.lookup(make_request(2_000))
            assert fan_out.pool.everyone()[0].up


@pytest.mark.parametrize("shift", [0, 100_000], ids=["plain", "an id out of range"])
def test_a_full_queue_refuses_whatever_way_a_request_would_take(tmp_path: Path, shift: int):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        paths, request = BytePath(service), make_request(3, longest=1)
        for _ in range(paths.scheduler.config.max_queue):
            paths.scheduler.queue.enter()
        request.values()[:] += shift
        with pytest.raises(OverloadedError, match="512 requests waiting, its limit"):
            paths.begin("Lookup", codec.encode_lookup_request(request), lambda found: None)


def test_concurrent_requests_do_not_wait_for_each_other(tmp_path: Path):
    """More concurrent requests than connections; each is answered with its own rows."""
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        messages = [codec.encode_lookup_request(make_request(1 + number % 7, number)) for number in range(60)]
        expected = [straight(service, "Lookup", data) for data in messages]
        told: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        paths = BytePath(service)
        for number, data in enumerate(messages):
            assert paths.begin("Lookup", data, lambda found, number=number: told.put((number, found)))
        found = dict(told.get(timeout=90) for _ in messages)
        assert [found[number] for number in range(60)] == expected


def test_the_rows_of_an_order_of_keys_are_known_after_any_number_of_others(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        lookups = service.registry.get().predictor.lookups
        for number in range(600):
            lookups._limits[f"other {number}",] = np.zeros(1, np.uint64)
        bags = bags_of(make_request(2, 1))
        lookups.find([bags], None)
        assert lookups._limits[bags.keys] is not None and len(lookups._limits) < 600


def test_lookups_with_a_callback_give_what_those_that_wait_give(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        lookups = service.registry.get().predictor.lookups
        told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        bags = [bags_of(make_request(3, 1)), bags_of(make_request(5, 2))]
        lookups.begin(bags, None, time.monotonic() + 60.0, lambda *found: told.put(found))
        found, error = told.get(timeout=90)
        assert error is None and torch.equal(found.parts[0], lookups.find(bags, None).parts[0])
        wrong = make_request(3, 1, longest=1)
        wrong.values()[0] = 1_000
        lookups.begin([bags_of(wrong)], None, time.monotonic() + 60.0, lambda *found: told.put(found))
        found, error = told.get(timeout=90)
        assert found is None and isinstance(error, InputError)
        lookups._fan_out.pool.replicas(0)[0].up = False
        lookups.begin(bags, None, time.monotonic() + 60.0, lambda *found: told.put(found))
        found, error = told.get(timeout=90)
        assert found is None and isinstance(error, UnavailableError)


@contextmanager
def held(server: ShardServer) -> Iterator[tuple[threading.Event, threading.Event]]:
    """``server`` answers nothing until the second event; the first one is set once it was asked."""
    find, asked, go_on = server.tables.find, threading.Event(), threading.Event()

    def slow_find(data: bytes, limits: Limits) -> bytes:
        asked.set()
        assert go_on.wait(60)
        return find(data, limits)

    server.tables.find = slow_find  # type: ignore[method-assign]
    try:
        yield asked, go_on
    finally:
        go_on.set()
        server.tables.find = find  # type: ignore[method-assign]


def test_a_slow_replica_is_hedged(tmp_path: Path, turns: None):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        with held(servers[0]) as (asked, go_on):
            found = []
            while not asked.is_set():  # they take turns
                found.append(later(service, "Lookup", data))
            assert [answer for answer, _ in found] == [expected] * len(found)
            assert fan_out.calls["hedge_won"] >= 1
            go_on.set()
        until(lambda: all(replica.outstanding == 0 for replica in fan_out.pool.everyone()))
        assert later(service, "Lookup", data)[0] == expected


def test_without_hedges_a_slow_replica_is_waited_for_until_the_deadline(tmp_path: Path):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path, hedge=False) as (service, fan_out, servers):
        data = codec.encode_lookup_request(make_request(3))
        with held(servers[0]) as (one, _), held(servers[1]) as (two, _):
            for seconds in (
                0.5,
                2.0,
                8.0,
            ):  # the shards must receive it before its deadline: if they did not, try again
                found, _ = later(service, "Lookup", data, seconds)
                assert isinstance(found, DeadlineError) and "before rank 0, 1, 2 had answered" in str(found)
                if one.is_set() or two.is_set():
                    break
            assert one.is_set() or two.is_set()
        until(lambda: all(replica.outstanding == 0 for replica in fan_out.pool.everyone()))


def test_finished_request_is_freed_before_its_hedge_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.shards.fan_out_request._FIRST_HEDGE_S", 3600.0)
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path) as (service, _, _):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert later(service, "Lookup", data)[0] == expected
            until(lambda: not any(isinstance(each, FanOutRequest) for each in gc.get_objects()))
        finally:
            gc.enable()


def test_end_of_turn_work_runs_after_all_received_messages(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        fan_out = service.registry.get().predictor.lookups._fan_out
        seen: queue.SimpleQueue[str] = queue.SimpleQueue()

        def first() -> None:
            fan_out.at_end_of_turn(lambda: seen.put("end"))
            seen.put("first")

        def both() -> None:  # so that both are of one turn
            rankers_thread().call(first)
            rankers_thread().call(seen.put, "second")

        rankers_thread().call(both)
        assert [seen.get(timeout=60) for _ in range(3)] == ["first", "second", "end"]
