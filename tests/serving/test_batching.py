"""Queued requests: which share a run, which are refused, which are dropped; on a real server and on the scheduler alone."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from recinfer.errors import ConfigError, DeadlineError, InputError, OverloadedError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine import dispatcher
from recinfer.serving.engine.memory_budget import UNCOUNTED
from recinfer.serving.engine.registry import RunCost
from recinfer.serving.engine.request import Request
from recinfer.serving.engine.scheduler import Entry, Scheduler
from recinfer.serving.server.grpc_methods import handler
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import BatchConfig
from tests.serving.conftest import make_request
from tests.waiting import until

LONG = 120.0


class Runs:
    """A runner that records which requests share a run. Long runs wait for the test; 13 samples are an error."""

    def __init__(self, *, short: bool = False, most: int = 1 << 30) -> None:
        self.batches: list[list[Entry]] = []
        self.threads: list[int] = []
        self.gate = threading.Event()
        self._short, self._most = short, most
        if short:
            self.gate.set()

    def can_start(self) -> bool:
        return True

    def may_share(self, entry: Entry, samples: int) -> bool:
        return samples <= self._most

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        return 0.0 if self._short else math.inf

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        self.batches.append(list(entries))
        self.threads.append(threads)
        assert self.gate.wait(LONG)
        for entry in entries:
            entry.request.reply(InputError("bad") if entry.samples == 13 else str(entry.samples).encode())

    @property
    def samples(self) -> list[list[int]]:
        return [[entry.samples for entry in batch] for batch in self.batches]


class Turn:
    """A thread that takes requests: submits, and ends its turn."""

    def __init__(self, runs: Runs, threads: int = 1, **config: int) -> None:
        self.runs = runs
        self.scheduler = Scheduler(BatchConfig(**config), threads)

    def submit(self, samples: int = 1, key: Hashable = "a", deadline: float = math.inf) -> queue.SimpleQueue[Any]:
        """Submit one request; returns the queue that gets its answer."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.scheduler.queue.admit(deadline)
        self.scheduler.submit(self.runs, Entry(Request("Predict", b"", deadline, answers.put), key, samples))
        return answers

    def end(self) -> None:
        self.scheduler.run_ready()

    def busy(self) -> queue.SimpleQueue[Any]:
        """A run that has begun and waits to be let go."""
        answers = self.submit()
        self.end()
        until(lambda: len(self.runs.batches) > 0)
        return answers

    def finish(self, *answers: queue.SimpleQueue[Any]) -> list[Any]:
        """Let runs go, and wait for the answers."""
        self.runs.gate.set()
        found = [each.get(timeout=LONG) for each in answers]
        until(lambda: (self.scheduler.state.waiting, self.scheduler.state.running) == (0, 0))
        self.scheduler.close()
        return found


def own_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scheduler's clock, ``[0]``, which the test sets."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("recinfer.serving.engine.scheduler.time", clock)
    monkeypatch.setattr("recinfer.serving.engine.scheduler.time", clock)
    return now


def test_requests_of_one_turn_share_a_run_on_their_thread():
    turn = Turn(Runs(short=True))
    answers = [turn.submit(n) for n in (1, 2, 3)]
    assert turn.scheduler.has_new and not turn.runs.batches
    turn.end()
    assert turn.runs.samples == [[1, 2, 3]]
    assert not turn.scheduler.has_new
    assert turn.finish(*answers) == [b"1", b"2", b"3"]


def test_a_turn_that_does_not_end_is_due_at_a_number_of_requests_or_samples():
    turn = Turn(Runs(short=True), max_batch=8)
    answers = [turn.submit(3), turn.submit(4)]
    assert not turn.scheduler.is_due
    answers.append(turn.submit(1))
    assert turn.scheduler.is_due
    turn.end()
    assert not turn.scheduler.is_due
    answers += [Turn.submit(turn) for _ in range(8)]
    assert turn.scheduler.is_due
    turn.end()
    assert turn.runs.samples == [[3, 4, 1], [1] * 8]
    turn.finish(*answers)


def test_queued_requests_share_a_run_up_to_max_batch():
    turn = Turn(Runs(), max_batch=8)
    answers = [turn.busy(), *(turn.submit(n) for n in (3, 3, 3, 50, 1))]
    turn.end()
    turn.finish(*answers)
    assert turn.runs.samples == [[1], [3, 3], [3], [50], [1]]


def test_runner_decides_which_requests_share_a_run():
    turn = Turn(Runs(short=True, most=4))
    answers = [turn.submit(2) for _ in range(3)]
    turn.end()
    turn.finish(*answers)
    assert turn.runs.samples == [[2, 2], [2]]


def test_keys_take_turns():
    turn = Turn(Runs(), max_batch=8)
    answers = [turn.busy(), *(turn.submit(4) for _ in range(4)), *(turn.submit(4, "b") for _ in range(2))]
    turn.end()
    turn.finish(*answers)
    assert [batch[0].key for batch in turn.runs.batches[1:]] == ["a", "b", "a"]


def test_short_run_overtakes_a_queued_long_one():
    turn = Turn(Runs())
    long = [turn.busy(), turn.submit(key="long")]
    turn.end()
    short = Runs(short=True)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    turn.scheduler.submit(short, Entry(Request("Predict", b"", math.inf, answers.put), "a", 2))
    turn.end()
    assert answers.get_nowait() == b"2"
    turn.finish(*long)


def test_single_request_may_use_all_threads():
    turn = Turn(Runs(short=True), threads=3)
    alone = turn.submit()
    turn.end()
    both = [turn.submit(), turn.submit(key="b")]
    turn.end()
    assert turn.runs.threads == [3, 1, 3]
    turn.finish(alone, *both)


def test_full_queue_refuses_at_once_with_a_time_to_retry():
    turn = Turn(Runs(), max_queue=3)
    answers = [turn.busy(), *(turn.submit() for _ in range(3))]
    with pytest.raises(OverloadedError, match="3 requests waiting, its limit") as caught:
        turn.submit()
    assert 0 < caught.value.retry_after < 60
    assert turn.scheduler.state.refused == 1
    turn.runs.gate.set()
    turn.end()
    turn.finish(*answers)


def test_requests_refused_together_get_the_same_error(monkeypatch: pytest.MonkeyPatch):
    now = own_clock(monkeypatch)
    turn = Turn(Runs(), max_queue=3)
    waiting = turn.scheduler.queue
    assert waiting.refused(now[0] - 1) is None  # nobody waits
    answers = [turn.busy(), turn.submit(), turn.submit()]
    assert waiting.refused(now[0] + 60) is None
    late = waiting.refused(now[0])
    assert late is not None and str(late).startswith("the server has 2 requests waiting, more than its deadline")
    answers.append(turn.submit())
    full = waiting.refused(now[0])  # another reason
    assert full is not None and str(full).startswith("the server has 3 requests waiting, its limit; try again in ")
    assert 0 < full.retry_after < 60
    assert waiting.refused(now[0] + 60) is full
    now[0] += 0.1
    later = waiting.refused(now[0] + 60)
    assert later is not full and str(later) == str(full)
    assert turn.scheduler.state.refused == 4
    turn.end()
    turn.finish(*answers)


def test_a_request_past_its_deadline_is_not_run(monkeypatch: pytest.MonkeyPatch):
    now = own_clock(monkeypatch)
    turn = Turn(Runs())
    first, late, fine = turn.busy(), turn.submit(7, deadline=now[0] + 0.02), turn.submit(2)
    turn.end()
    now[0] += 0.05
    found = turn.finish(first, late, fine)
    assert isinstance(found[1], DeadlineError) and "while the request waited" in str(found[1])
    assert turn.runs.samples == [[1], [2]]
    with pytest.raises(DeadlineError, match="when the request arrived"):
        turn.scheduler.check_deadline(now[0] - 1)
    assert turn.scheduler.state.expired == 2


def test_a_request_that_would_be_late_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    now = own_clock(monkeypatch)
    turn = Turn(Runs())
    turn.scheduler.queue.record_run(0.3, 1)
    answers = [turn.busy(), *(turn.submit() for _ in range(4))]
    with pytest.raises(OverloadedError, match="4 requests waiting, more than its deadline allows"):
        turn.submit(deadline=now[0] + 0.05)
    answers.append(turn.submit(deadline=now[0] + 20))
    turn.end()
    turn.finish(*answers)


def test_disconnected_caller_frees_its_place():
    turn = Turn(Runs(), max_queue=1)
    first, gone = turn.busy(), turn.submit(7)
    entry = next(iter(turn.scheduler._lanes.values()))[0]
    turn.end()
    turn.scheduler.forget(entry.request)
    assert turn.scheduler.state.waiting == 0
    turn.finish(first)
    assert turn.runs.samples == [[1]] and gone.empty()


def test_request_that_waits_for_a_thread_is_notified_once():
    turn, told = Turn(Runs()), []
    first = turn.busy()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = Request("Predict", b"", math.inf, answers.put, lambda: told.append(1))
    turn.scheduler.submit(turn.runs, Entry(request, "a", 1))
    assert not told
    turn.end()
    turn.end()
    assert told == [1]
    turn.finish(first, answers)


def test_error_reaches_only_its_request():
    turn = Turn(Runs(short=True))
    answers = [turn.submit(n) for n in (1, 13, 2)]
    turn.end()
    found = turn.finish(*answers)
    assert [found[0], found[2]] == [b"1", b"2"]
    assert isinstance(found[1], InputError)
    assert len(turn.runs.batches) == 1


def test_a_run_that_fails_answers_all_of_its_requests():
    class Broken(Runs):
        def run(self, entries: Sequence[Entry], threads: int) -> None:
            entries[0].request.reply(b"one")
            raise RuntimeError("a bug")

    turn = Turn(Broken(short=True))
    answers = [turn.submit(), turn.submit()]
    turn.end()
    found = turn.finish(*answers)
    assert found[0] == b"one" and isinstance(found[1], RuntimeError)


def test_the_cost_of_runs_is_by_their_samples():
    cost = RunCost()
    assert cost.expected(256) == 0.0
    cost.learn(1, 60e-6)
    assert cost.expected(1) == pytest.approx(60e-6)
    for _ in range(20):
        cost.learn(32, 200e-6)
    assert cost.expected(32) == pytest.approx(200e-6, rel=0.05)
    cost.learn(1, 60e-6)
    assert cost.expected(32) < 250e-6, "one sample alone says little of many"


def test_bounds_are_checked():
    with pytest.raises(ConfigError, match="max_batch: got 0"):
        BatchConfig(max_batch=0)
    assert BatchConfig().max_queue == 512


def hold(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first run of the real predictor waits; returns (set when it has begun, set to let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    real = type(predictor).lookup_steps

    def lookup(self: Predictor, kjt: Any) -> Any:
        begun.set()
        assert go_on.wait(120)
        return real(self, kjt)

    monkeypatch.setattr(type(predictor), "lookup_steps", lookup)
    monkeypatch.setattr(dispatcher, "lookup_now", lambda *_: None)  # small ones would bypass the queue
    return begun, go_on


def test_overload_on_the_wire(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    begun, go_on = hold(predictor, monkeypatch)
    big = codec.encode_lookup_request(make_request(0, 4000)[1])
    small = codec.encode_lookup_request(make_request(1, 2)[1])
    config = BatchConfig(max_queue=2)
    with (
        Server({"tiny": predictor}, threads=1, batching=config) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        lookup = channel.unary_unary(f"/{SERVICE_NAME}/Lookup")
        running = lookup.future(big, timeout=90)
        assert begun.wait(60)
        waiting = [lookup.future(small, timeout=90) for _ in range(2)]
        until(lambda: server.scheduler.state.waiting == 2)
        with pytest.raises(grpc.RpcError) as caught:
            lookup(small, timeout=60)
        assert server.scheduler.state.waiting == 2 and not go_on.is_set()  # at once: nothing has moved meanwhile
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert int(trailing["grpc-retry-pushback-ms"]) > 0
        assert b"google.rpc.RetryInfo" in trailing["grpc-status-details-bin"]
        waiting.pop().cancel()  # a client that goes away frees its place
        until(lambda: server.scheduler.state.waiting == 1)
        waiting.append(lookup.future(small, timeout=90))
        go_on.set()
        expected = predictor.lookup(make_request(1, 2)[1]).pooled.values()
        assert running.result()
        for answer in waiting:
            assert torch.equal(codec.decode_lookup_response(answer.result())[0].values(), expected)


def test_disconnected_caller_is_not_logged_as_an_error(predictor: Predictor):
    class Gone:
        """A call whose client has gone: gRPC cannot send it a status."""

        ticket = UNCOUNTED

        def time_remaining(self) -> float:
            return -1.0

        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("nobody there")

        def invocation_metadata(self) -> tuple[()]:
            return ()

    async def too_late(data: bytes) -> bytes:
        raise DeadlineError("the deadline had passed")

    server = Server({"tiny": predictor})
    with pytest.raises(asyncio.CancelledError):  # gRPC logs any other error with a traceback
        asyncio.run(handler("Lookup", too_late, server.observer)(b"", Gone()))
    assert server.stats.requests() == {("Lookup", "DEADLINE_EXCEEDED"): 1}


def test_concurrent_requests_share_runs_and_a_bad_one_fails_alone(predictor: Predictor):
    requests = [make_request(seed, 1 + seed % 7) for seed in range(200)]
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:

        def ask(at: int) -> None:
            dense, kjt = requests[at]
            if at % 10 == 3:
                with pytest.raises(InputError, match="sample 0, column 0 is nan"):
                    client.predict(torch.full_like(dense, float("nan")), kjt)
                return
            expected = predictor.predict(dense, kjt)["output"]
            torch.testing.assert_close(client.predict(dense, kjt)["output"], expected, rtol=0, atol=1e-6)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, range(200)))
        assert server.scheduler.state.requests == 200
        until(lambda: sum(server.stats.requests().values()) == 200)  # a refusal is counted once it is sent
        assert server.stats.requests()["Predict", "INVALID_ARGUMENT"] == 20
