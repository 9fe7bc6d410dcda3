"""Requests that go to the shards and back on gRPC's threads: the same answers, and the loop's help where something is unusual."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.errors import DeadlineError, RecinferError, UnavailableError
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.byte_path import DIRECT_BYTES
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.parallel_parts import SideBySide
from recinfer.serving.server.server import Server
from recinfer.serving.shards.fan import Fan
from recinfer.serving.shards.fanout import Fanout
from recinfer.serving.shards.quick import QuickFan
from recinfer.serving.shards.server import ShardServer
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, until, write_shards
from tests.serving.remote.models import KINDS
from tests.serving.remote.test_direct import (
    NUM_DENSE,
    make_archive,
    make_request,
    requests,
    served,
    service_of,
    straight,
)

Alone = tuple[InferenceService, Fanout, list[ShardServer]]


def later(
    service: InferenceService,
    call: str,
    data: bytes,
    seconds: float = 60.0,
    *,
    beside: bool = False,
    parts: SideBySide | None = None,
) -> tuple[Any, str]:
    """What is told, and the name of the thread that told it; "no" where it has to be asked in the ordinary way."""
    asked = service.away.begin(call, data)
    assert asked is not None
    told: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()

    def aside(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="beside").start() if beside else work()

    def tell(found: Any, cost: float) -> None:
        assert (cost > 0) == (call == "Predict" and not isinstance(found, Exception))
        told.put((found, threading.current_thread().name))

    if not service.away.answer_later(asked, time.monotonic() + seconds, tell, aside, parts):
        return "no", ""
    found = told.get(timeout=90)
    assert told.empty()
    return found


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are asked in turns: no figure is young enough to prefer one."""
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)


@contextmanager
def replicated(archive: Path, folder: Path, **settings: Any) -> Iterator[Alone]:
    """A ranker's service, and two replicas of all ranks."""
    with ExitStack() as stack:
        servers = [stack.enter_context(shard(archive, (0, 1, 2), f"127.0.0.{number}")) for number in (1, 2)]
        targets = {rank: [server.target for server in servers] for rank in range(3)}
        fanout = stack.enter_context(asking(write_shards(folder / "s.json", targets, **settings)))
        yield service_of(archive, fanout), fanout, servers


@pytest.mark.parametrize("kind", KINDS)
def test_it_answers_as_the_loop_does(tmp_path: Path, kind: str):
    with served(make_archive(tmp_path, kind), tmp_path) as service:
        for request in requests():
            data = codec.encode_lookup_request(request)
            found, thread = later(service, "Lookup", data)
            assert found == straight(service, "Lookup", data)
            assert thread.startswith("recinfer-asks-")
            dense = torch.arange(request.stride() * NUM_DENSE, dtype=torch.float32).reshape(-1, NUM_DENSE)
            data = codec.encode_predict_request(dense, request)
            if service.away.begin("Predict", data) is None:  # it lacks features
                continue
            expected = straight(service, "Predict", data)
            for beside in (False, True):
                found, thread = later(service, "Predict", data, beside=beside)
                assert found == expected
                assert (thread == "beside") == beside
        fanout = service.registry.get().predictor.lookups._fanout
        assert fanout.calls["sent"] > 0 and set(fanout.calls) == {"sent"}
        assert all(replica.outstanding == 0 for replica in fanout.pool.everyone())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_dense_run_side_by_side_are_the_whole_to_the_bit(tmp_path: Path, kind: str):
    three = SideBySide(3)
    with served(make_archive(tmp_path, kind), tmp_path) as service:
        for batch, longest in ((64, 2), (127, 1), (128, 4), (200, 1), (501, 2)):
            dense = torch.randn(batch, NUM_DENSE, generator=torch.Generator().manual_seed(batch))
            data = codec.encode_predict_request(dense, make_request(batch, batch, longest=longest))
            asked = service.away.begin("Predict", data)
            assert asked is not None and asked.request.parts(3) == min(3, batch // 64)
            expected = straight(service, "Predict", data)
            assert expected is not None
            for beside in (False, True):
                assert later(service, "Predict", data, beside=beside, parts=three)[0] == expected
    three.close()


def large(batch: int = 400) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """A prediction whose dense part is not run where small ones are without a look at how long it takes."""
    request = torch.ones(batch, NUM_DENSE), make_request(batch, 3)
    assert 32 << 10 < len(codec.encode_predict_request(*request)) < DIRECT_BYTES
    return request


@contextmanager
def ranking(service: InferenceService) -> Iterator[tuple[Server, InferenceClient]]:
    """A ranker's server, and a client that never tries again."""
    predictor = service.registry.get().predictor
    with (
        Server({"pooled": predictor}, threads=2, shards=predictor.lookups._fanout) as server,
        InferenceClient(server.target, retries=0, timeout=60) as client,
    ):
        yield server, client


def test_a_large_prediction_is_handed_over_until_it_is_known_to_be_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive = make_archive(tmp_path, "table_wise")
    expected = load(archive).predict(*large())["output"]
    with served(archive, tmp_path) as service, ranking(service) as (server, client):
        away, threads = server.service.away, []
        finish = away._finish

        def seen(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return finish(*given)

        monkeypatch.setattr(away, "_finish", seen)
        assert server.scheduler is not None
        stages = service.registry.get().predictor.stages
        before = {name: state.count for name, state in stages.state().items()}
        for number in range(1, 6):
            torch.testing.assert_close(client.predict(*large())["output"], expected)
            until(lambda: not server.scheduler.state.running)
            state = server.scheduler.state
            assert (state.runs, state.requests, state.samples) == (number, number, 400 * number)
        if len(threads) == 5:  # none waited to see whether others come
            assert threads[0].startswith("recinfer-request") and threads[-1].startswith("recinfer-asks-")
            counts = {name: state.count - before[name] for name, state in stages.state().items()}
            assert counts["lookup"] == counts["dense"] == 5
        monkeypatch.setattr(server.scheduler, "is_known_short", lambda *_: False)
        threads.clear()
        for _ in range(3):
            torch.testing.assert_close(client.predict(*large())["output"], expected)
        assert all(name.startswith("recinfer-request") for name in threads)
        assert server.stats.requests() == {("Predict", "OK"): 8}
        assert server.stats.batch.state().count == 8


def test_a_dense_run_that_fails_is_answered_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with served(make_archive(tmp_path, "table_wise"), tmp_path) as service, ranking(service) as (server, client):
        predictor = service.registry.get().predictor
        for _ in range(2):
            expected = client.predict(*large())["output"]

        def fails(*_: Any) -> Any:
            raise RuntimeError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(type(predictor.state._engine), "arrays", fails)
            # Only this way's run: the ordinary way has its own, and answers.
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
        fanout = stack.enter_context(asking(write_shards(tmp_path / "s.json", targets)))
        server, client = stack.enter_context(ranking(service_of(archive, fanout)))
        client.predict(*large())
        (lost,) = fanout.pool.replicas(1)
        assert lost.quick is not None
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
            lost.quick.close()
            caller.join(60)
        (found,) = given
        assert isinstance(found, UnavailableError) and "rank 1 has no living replica" in str(found)
        assert server.scheduler is not None
        until(lambda: not server.scheduler.state.running)
        assert server.scheduler.state.requests == 2
        assert server.stats.requests() == {("Predict", "OK"): 1, ("Predict", "UNAVAILABLE"): 1}
        assert all(replica.outstanding == 0 for replica in fanout.pool.everyone())


def test_nobody_there_is_the_ordinary_ways_affair(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        fanout = service.registry.get().predictor.lookups._fanout
        fanout.pool.replicas(0)[0].up = False
        before = dict(fanout.calls)  # of the golden requests
        assert later(service, "Lookup", codec.encode_lookup_request(make_request(3)))[0] == "no"
        assert fanout.calls == before


def test_a_replica_whose_connection_is_lost_is_replaced_by_the_other(tmp_path: Path, turns: None):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path, hedge=False) as (service, fanout, _):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        lost = fanout.pool.replicas(0)[0]
        assert lost.quick is not None
        lost.quick.close()
        found = [later(service, "Lookup", data) for _ in range(6)]
        assert [answer for answer, _ in found] == [expected] * 6
        assert any(thread == "recinfer-serving" for _, thread in found), "the loop asked the other one"
        assert fanout.calls["failed"] >= 1 and fanout.calls["retried"] >= 1
        assert all(replica.outstanding == 0 for replica in fanout.pool.everyone())


@pytest.mark.parametrize("allowed", [False, True])
def test_a_rank_that_is_lost_on_the_way_is_an_error_or_flagged(tmp_path: Path, allowed: bool):
    archive = make_archive(tmp_path, "row_wise")
    if allowed:
        archive = allowing_default_rows(archive, tmp_path / "allowing.rqa")
    with served(archive, tmp_path) as service:
        fanout = service.registry.get().predictor.lookups._fanout
        (lost,) = fanout.pool.replicas(0)
        assert lost.quick is not None
        lost.quick.close()
        found, thread = later(service, "Lookup", codec.encode_lookup_request(make_request(3)))
        assert thread == "recinfer-serving"
        if allowed:
            assert list(pb.LookupResponse.FromString(found).missing_ranks) == [0]
            assert fanout.default_rows[0] == 1
        else:
            assert isinstance(found, UnavailableError) and "rank 0 has no living replica" in str(found)


def test_a_call_that_cannot_be_made_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        fanout = service.registry.get().predictor.lookups._fanout
        lost = fanout.pool.replicas(2)[0].quick
        monkeypatch.setattr(lost, "_ways", ())
        monkeypatch.setattr(lost, "_metadata", (("no header", 3),))
        found, _ = later(service, "Lookup", codec.encode_lookup_request(make_request(3)))
        assert isinstance(found, RecinferError) and "it cannot be asked" in str(found)
        until(lambda: all(replica.outstanding == 0 for replica in fanout.pool.everyone()))


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


def test_a_slow_replica_is_hedged_by_the_loop(tmp_path: Path, turns: None):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path) as (service, fanout, servers):
        data = codec.encode_lookup_request(make_request(3))
        expected = straight(service, "Lookup", data)
        with held(servers[0]) as (asked, go_on):
            found = []
            while not asked.is_set():  # they take turns
                found.append(later(service, "Lookup", data))
            assert [answer for answer, _ in found] == [expected] * len(found)
            assert found[-1][1] == "recinfer-serving"
            assert fanout.calls["hedge_won"] >= 1
            go_on.set()
        until(lambda: all(replica.outstanding == 0 for replica in fanout.pool.everyone()))
        assert later(service, "Lookup", data)[0] == expected


def test_without_hedges_a_slow_replica_is_waited_for_until_the_deadline(tmp_path: Path):
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path, hedge=False) as (service, fanout, servers):
        data = codec.encode_lookup_request(make_request(3))
        with held(servers[0]) as (one, _), held(servers[1]) as (two, _):
            for seconds in (
                0.5,
                2.0,
                8.0,
            ):  # the shards have to hear of it before its deadline: where that is late, once more
                found, _ = later(service, "Lookup", data, seconds)
                assert isinstance(found, DeadlineError) and "before rank 0, 1, 2 had answered" in str(found)
                if one.is_set() or two.is_set():
                    break
            assert one.is_set() or two.is_set()
        until(lambda: all(replica.outstanding == 0 for replica in fanout.pool.everyone()))


def test_a_request_that_is_over_is_not_held_until_its_hedge_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.shards.fan._FIRST_HEDGE_S", 3600.0)
    with replicated(make_archive(tmp_path, "row_wise"), tmp_path) as (service, fanout, _):
        data = codec.encode_lookup_request(make_request(3))
        before = len(fanout.lookout._due)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                assert later(service, "Lookup", data)[0] == straight(service, "Lookup", data)
            assert len(fanout.lookout._due) > before
            until(lambda: not any(isinstance(each, QuickFan | Fan) for each in gc.get_objects()))
        finally:
            gc.enable()


def test_what_is_late_is_looked_for_in_order_with_one_timer(tmp_path: Path):
    with served(make_archive(tmp_path, "row_wise"), tmp_path) as service:
        lookout = service.registry.get().predictor.lookups._fanout.lookout
        seen: list[tuple[float, float]] = []
        busy, go_on, over = threading.Event(), threading.Event(), threading.Event()

        def keep() -> None:
            busy.set()
            go_on.wait(60)

        lookout.tell(time.monotonic(), keep)  # its thread waits until it has all of them
        assert busy.wait(60)
        now = time.monotonic()
        for after in (0.3, 0.1, 0.2, 0.0, 0.4):
            lookout.tell(now + after, lambda after=after: seen.append((after, time.monotonic() - now)))
        lookout.tell(now + 0.5, over.set)
        go_on.set()
        assert over.wait(60)
        assert [after for after, _ in seen] == [0.0, 0.1, 0.2, 0.3, 0.4]
        assert all(spent >= after for after, spent in seen)  # of one clock: none comes before its time
