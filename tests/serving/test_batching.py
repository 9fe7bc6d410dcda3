"""The queue in front of the runs: what merges, what is refused, what is not run; on a real server and on its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from recinfer.errors import ConfigError, DeadlineError, InputError, OverloadedError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.byte_path import Direct
from recinfer.serving.engine.scheduler import BatchConfig, Batcher
from recinfer.serving.server.grpc_methods import handler
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from tests.serving.asked import turns
from tests.serving.conftest import make_request


@dataclass(eq=False)
class Work:
    """A request of ``samples`` samples; large ``bytes`` make it run in a thread."""

    lane: Any = "a"
    samples: int = 1
    bytes: int = 1 << 20


class Runs:
    """Records what runs together; each run waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[Work]] = []
        self.gate = threading.Event()

    def __call__(self, works: Sequence[Work]) -> list[Any]:
        self.batches.append(list(works))
        assert self.gate.wait(120)
        return [InputError("bad") if work.samples == 13 else work for work in works]


def drive(scenario: Callable[[Batcher, Runs], Any], threads: int = 1, **config: int) -> Runs:
    runs = Runs()

    async def main() -> None:
        with ThreadPoolExecutor(threads) as pool:
            batcher = Batcher(runs, pool, threads, BatchConfig(**config))
            try:
                await asyncio.wait_for(scenario(batcher, runs), 120)
            finally:
                runs.gate.set()
            assert (batcher.state.waiting, batcher.state.running) == (0, 0)

    asyncio.run(main())
    return runs


def own_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the batcher takes for the time, ``[0]``: it goes on when the test says so."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time)
    monkeypatch.setattr("recinfer.serving.engine.scheduler.time", clock)
    monkeypatch.setattr("recinfer.serving.engine.queue_budget.time", clock)
    return now


async def busy(batcher: Batcher, work: Work | None = None) -> asyncio.Task[Any]:
    task = asyncio.create_task(batcher.submit(work or Work()))
    while not batcher.state.running:
        await asyncio.sleep(0.001)
    return task


def test_what_waits_runs_together_up_to_max_batch():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = [asyncio.create_task(batcher.submit(Work(samples=n))) for n in (3, 3, 3, 50, 1)]
        await turns()
        runs.gate.set()
        await asyncio.gather(first, *waiting)

    runs = drive(scenario, max_batch=8)
    assert [[w.samples for w in batch] for batch in runs.batches] == [[1], [3, 3], [3], [50], [1]]


def test_lanes_take_turns():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = [asyncio.create_task(batcher.submit(Work("a", 4))) for _ in range(4)]
        await turns()
        waiting += [asyncio.create_task(batcher.submit(Work("b", 4))) for _ in range(2)]
        await turns()
        runs.gate.set()
        await asyncio.gather(first, *waiting)

    runs = drive(scenario, max_batch=8)
    assert [batch[0].lane for batch in runs.batches[1:]] == ["a", "b", "a"]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = [asyncio.create_task(batcher.submit(Work())) for _ in range(3)]
        await turns()
        with pytest.raises(OverloadedError, match="3 requests waiting") as caught:
            await batcher.submit(Work())
        assert 0 < caught.value.retry_after < 60
        with pytest.raises(OverloadedError):
            batcher.room.admit(1)
        assert batcher.state.refused == 2
        runs.gate.set()
        await asyncio.gather(first, *waiting)
        await batcher.submit(Work())

    drive(scenario, max_queue=3)


def test_those_refused_in_the_same_moment_are_told_the_same(monkeypatch: pytest.MonkeyPatch):
    now = own_clock(monkeypatch)

    async def scenario(batcher: Batcher, runs: Runs) -> None:
        assert batcher.room.refused(now[0] - 1) is None  # nobody waits
        first = await busy(batcher)
        waiting = [asyncio.create_task(batcher.submit(Work())) for _ in range(2)]
        await turns()
        assert batcher.room.refused(now[0] + 60) is None
        late = batcher.room.refused(now[0])
        assert late is not None and str(late).startswith("the server has 2 requests waiting, more than its deadline")
        waiting.append(asyncio.create_task(batcher.submit(Work())))
        await turns()
        full = batcher.room.refused(now[0])  # another reason
        assert full is not None and str(full).startswith("the server has 3 requests waiting, its limit; try again in ")
        assert 0 < full.retry_after < 60
        assert batcher.room.refused(now[0] + 60) is full
        now[0] += 0.1
        later = batcher.room.refused(now[0] + 60)
        assert later is not full and str(later) == str(full)
        assert batcher.state.refused == 4
        runs.gate.set()
        await asyncio.gather(first, *waiting)

    drive(scenario, max_queue=3)


def test_the_queue_is_bounded_in_bytes_too():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = asyncio.create_task(batcher.submit(Work()))
        await turns()
        with pytest.raises(OverloadedError):
            await batcher.submit(Work())
        runs.gate.set()
        await asyncio.gather(first, waiting)

    drive(scenario, max_queue_bytes=3 << 19)


def test_a_request_past_its_deadline_is_not_run(monkeypatch: pytest.MonkeyPatch):
    late, now = Work(samples=7), own_clock(monkeypatch)

    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = asyncio.create_task(batcher.submit(late, now[0] + 0.02))
        await turns()
        now[0] += 0.05
        runs.gate.set()
        await first
        with pytest.raises(DeadlineError, match="while the request waited"):
            await waiting
        with pytest.raises(DeadlineError, match="when the request arrived"):
            await batcher.submit(late, now[0] - 1)
        assert batcher.state.expired == 2

    assert all(late not in batch for batch in drive(scenario).batches)


def test_a_request_that_would_be_late_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    now = own_clock(monkeypatch)

    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        now[0] += 0.3  # what a request takes, as far as the batcher knows then: a fifth of it
        runs.gate.set()
        await first
        runs.gate.clear()
        waiting = [await busy(batcher), *(asyncio.create_task(batcher.submit(Work())) for _ in range(4))]
        await turns()
        with pytest.raises(OverloadedError, match="4 requests waiting, more than its deadline allows"):
            await batcher.submit(Work(), now[0] + 0.05)
        waiting.append(asyncio.create_task(batcher.submit(Work(), now[0] + 20)))
        await turns()
        runs.gate.set()
        await asyncio.gather(*waiting)

    drive(scenario)


def test_merged_runs_stay_short():
    class Burning(Runs):
        def __call__(self, works: Sequence[Work]) -> list[Any]:
            end = time.thread_time() + 0.02 * len(works)
            while time.thread_time() < end:
                pass
            return super().__call__(works)

    runs = Burning()
    runs.gate.set()

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            batcher = Batcher(runs, pool, 1, BatchConfig(max_delay_us=0))
            for _ in range(3):
                await asyncio.gather(*(batcher.submit(Work()) for _ in range(8)))

    asyncio.run(main())
    assert max(len(batch) for batch in runs.batches[3:]) < 8  # 160 ms, once that is known


def test_who_goes_away_frees_the_place():
    gone = Work(samples=7)

    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        waiting = asyncio.create_task(batcher.submit(gone))
        await turns()
        waiting.cancel()
        await turns()
        assert batcher.state.waiting == 0
        runs.gate.set()
        await first

    assert all(gone not in batch for batch in drive(scenario, max_queue=1).batches)


def test_an_error_is_its_requests_own():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        first = await busy(batcher)
        works = [Work(samples=n) for n in (1, 13, 2)]
        waiting = [asyncio.create_task(batcher.submit(work)) for work in works]
        await turns()
        runs.gate.set()
        answers = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [answers[1], answers[3]] == [works[0], works[2]]
        assert isinstance(answers[2], InputError)

    assert len(drive(scenario).batches) == 2


def waits_of(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When it began to wait for more requests than it had."""
    waits: list[float] = []
    real = batcher._wait_for_more

    def waited(now: float) -> None:
        waits.append(now)
        real(now)

    monkeypatch.setattr(batcher, "_wait_for_more", waited)
    return waits


def test_a_request_alone_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        runs.gate.set()
        waits = waits_of(batcher, monkeypatch)
        await batcher.submit(Work(bytes=10))
        assert not waits

    drive(scenario, max_delay_us=2_000_000)


def test_requests_that_come_alone_hardly_ever_wait(monkeypatch: pytest.MonkeyPatch):
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        runs.gate.set()
        waits = waits_of(batcher, monkeypatch)
        for _ in range(240):
            await batcher.submit(Work(bytes=10))
        assert len(waits) == 4  # probes: after 8 requests, 16, 32 and 64 more

    assert all(len(batch) == 1 for batch in drive(scenario, max_delay_us=50_000).batches)


def test_requests_that_come_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "recinfer.serving.engine.scheduler._GAP_S", 0.02
    )  # together also where the machine holds a caller up

    async def scenario(batcher: Batcher, runs: Runs) -> None:
        runs.gate.set()

        async def caller() -> None:
            for _ in range(100):
                await asyncio.sleep(0.0005)  # as long as gRPC takes to hand one over
                await batcher.submit(Work(bytes=10))

        await asyncio.gather(*(caller() for _ in range(8)))

    runs = drive(scenario, max_delay_us=20_000)
    assert sum(len(batch) for batch in runs.batches) == 800
    assert max(len(batch) for batch in runs.batches) == 8
    assert len(runs.batches) < 400


def test_a_run_that_nobody_measured_says_nothing_of_how_long_one_takes():
    with ThreadPoolExecutor(1) as pool:
        batcher = Batcher(list, pool, 1)
    batcher.goes_away("a")(256, 0.0)
    assert not batcher.is_known_short("a", 256, 2)
    batcher.goes_away("a")(256, 1e-3)
    assert batcher.is_known_short("a", 256, 2)
    assert not batcher.is_known_short("b", 256, 2)
    batcher.goes_away("a")(256, 0.0)  # an error, say
    batcher.goes_away("a")(0, 5.0)  # it did not come about
    assert batcher.is_known_short("a", 256, 1)
    assert (batcher.state.runs, batcher.state.samples, batcher.state.running) == (3, 3 * 256, 0)


def test_without_a_delay_nothing_waits():
    async def scenario(batcher: Batcher, runs: Runs) -> None:
        runs.gate.set()
        for _ in range(20):
            assert len(await asyncio.gather(*(batcher.submit(Work(bytes=10)) for _ in range(2)))) == 2

    drive(scenario, max_delay_us=0)


def test_bounds_are_checked():
    with pytest.raises(ConfigError, match="max_batch: got 0"):
        BatchConfig(max_batch=0)
    assert BatchConfig(max_delay_us=0).max_delay_us == 0


def hold(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first run of the real predictor waits; returns (set when it has begun, set to let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    real = type(predictor).lookup_steps

    def lookup(self: Predictor, kjt: Any) -> Any:
        begun.set()
        assert go_on.wait(120)
        return real(self, kjt)

    monkeypatch.setattr(type(predictor), "lookup_steps", lookup)
    monkeypatch.setattr(Direct, "lookup", lambda *_: None)  # small ones would pass by the queue
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
        until(lambda: server.batcher.state.waiting == 2)
        with pytest.raises(grpc.RpcError) as caught:
            lookup(small, timeout=60)
        assert server.batcher.state.waiting == 2 and not go_on.is_set()  # at once: nothing has moved meanwhile
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert int(trailing["grpc-retry-pushback-ms"]) > 0
        assert b"google.rpc.RetryInfo" in trailing["grpc-status-details-bin"]
        waiting.pop().cancel()  # a client that goes away frees its place
        until(lambda: server.batcher.state.waiting == 1)
        waiting.append(lookup.future(small, timeout=90))
        go_on.set()
        expected = predictor.lookup(make_request(1, 2)[1]).pooled.values()
        assert running.result()
        for answer in waiting:
            assert torch.equal(codec.decode_lookup_response(answer.result())[0].values(), expected)


def test_a_caller_that_is_gone_is_no_error_of_ours(predictor: Predictor):
    class Gone:
        """A call whose client has gone: gRPC cannot send it a status."""

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


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


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
        assert server.batcher.state.requests == 200
        until(lambda: sum(server.stats.requests().values()) == 200)  # a refusal is counted once it is sent
        assert server.stats.requests()["Predict", "INVALID_ARGUMENT"] == 20
