"""Calls that a client holds back from a full server."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from recinfer.errors import OverloadedError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client import retry
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.client.retry import Retries, Throttle
from recinfer.serving.wire.loop import run_on_loop
from tests.serving.conftest import make_request
from tests.serving.test_admission import held


class Played:
    """A throttle and a simulated server with their own clock: it answers ``takes`` calls per second, queues eight and refuses
    the others.
    """

    def __init__(self, takes: float) -> None:
        self.now, self.takes, self.waiting = 0.0, takes, 0.0
        self.throttle = Throttle(lambda: self.now, random.Random(1).random)

    def run(self, rate: float, seconds: float) -> tuple[int, int]:
        """``rate`` calls per second; returns how many were sent, and how many of them the server accepted."""
        sent = taken = 0
        for _ in range(int(rate * seconds)):
            self.now += 1 / rate
            self.waiting = max(0.0, self.waiting - self.takes / rate)
            if self.throttle.holds_back():
                continue
            has_room = bool(self.takes) and self.waiting < 8
            self.waiting += has_room
            sent, taken = sent + 1, taken + has_room
            self.throttle.record(refused=not has_room)
        return sent, taken


@pytest.mark.parametrize("takes", [200, 1_000])
@pytest.mark.parametrize("times", [2, 3, 10])
def test_client_sends_a_twentieth_more_than_the_server_accepts(takes: float, times: float):
    played = Played(takes)
    played.run(times * takes, 5)  # the throttle needs a second or two of measurements
    sent, taken = played.run(times * takes, 5)
    assert taken > 0.92 * 5 * takes
    assert sent < 1.1 * taken + 5 * 10


def test_no_call_is_held_back_that_the_server_would_accept():
    played = Played(1_000)
    assert played.run(900, 5) == (4_500, 4_500)


def test_few_calls_are_never_held_back():
    played = Played(0.0)
    assert played.run(8, 5) == (40, 0)


def test_client_notices_that_the_server_has_capacity_again():
    played = Played(100)
    played.run(3_000, 5)
    played.takes = 10_000
    played.run(3_000, 6)
    sent, taken = played.run(3_000, 1)
    assert sent == taken
    assert sent > 2_900


def test_full_server_gets_few_calls():
    played = Played(0.0)
    played.run(1_000, 5)
    sent, _ = played.run(1_000, 5)
    assert sent < 5 * 20


def test_counts_of_many_threads():
    counts = Throttle(lambda: 0.0)

    def hear() -> None:
        for _ in range(5_000):
            counts.record(refused=False)
            counts.record(refused=True)

    threads = [threading.Thread(target=hear) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counts._asked, counts._taken) == (40_000, 20_000)


def test_both_clients_hold_back_predictions_alone(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    dense, kjt = make_request(1, 2)
    monkeypatch.setattr(retry, "_MEMORY_S", 60.0)  # slow as the machine may be
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        target = server.server.target
        with InferenceClient(target, retries=0, timeout=60) as client:
            with pytest.raises(OverloadedError, match="2 requests waiting, its limit") as caught:
                client.predict(dense, kjt)
            assert caught.value.retry_after > 0
            words = Counter(words_of(lambda: client.predict(dense, kjt)) for _ in range(200))
            assert words["not sent"] > 100
            assert words["not sent"] + words["waiting"] == 200
            assert server.server.scheduler.state.refused == 1 + words["waiting"]
            assert client.get_model().version
            assert client.is_ready()
            assert client.lookup(kjt).pooled is not None

        async def ask() -> Counter[str]:
            async with AsyncInferenceClient(target, retries=0, timeout=60) as mine:
                found: Counter[str] = Counter()
                for _ in range(200):
                    try:
                        await mine.predict(dense, kjt)
                    except OverloadedError as error:
                        found["not sent" if "was not sent" in str(error) else "waiting"] += 1
                assert (await mine.get_model()).version
                return found

        assert run_on_loop(ask(), timeout=90)["not sent"] > 100
        with InferenceClient(target, retries=0, timeout=60, throttle=False) as client:
            before = server.server.scheduler.state.refused
            assert {words_of(lambda: client.predict(dense, kjt)) for _ in range(40)} == {"waiting"}
            assert server.server.scheduler.state.refused == before + 40
        del futures


def words_of(ask: Callable[[], object]) -> str:
    with pytest.raises(OverloadedError) as caught:
        ask()
    return "not sent" if "was not sent" in str(caught.value) else "waiting"


def test_held_back_calls_wait_as_refused_ones_do(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    dense, kjt = make_request(1, 2)
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        with InferenceClient(server.server.target, timeout=60) as client:
            predictions = client._throttles["Predict"]
            predictions._chance = lambda: 0.0
            for _ in range(1_000):
                predictions.record(refused=True)
            waits: list[float] = []
            ordinary = Retries.held_back

            def held_back(tries: Retries) -> float | None:
                wait = ordinary(tries)
                if wait is not None:
                    waits.append(wait)
                    predictions._asked = 0.0
                    server.go_on.set()  # now the queue has a place
                    for future in futures:
                        future.result()
                return wait

            monkeypatch.setattr(Retries, "held_back", held_back)
            assert client.predict(dense, kjt)["output"].shape[0] == 2
            assert server.server.scheduler.state.refused == 0
            assert len(waits) == 1
            assert 0.02 <= waits[0] <= 0.03
