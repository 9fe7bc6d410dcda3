"""The simulated queue beside the real batcher on an event loop whose time is simulated too, and its bounds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recinfer.serving.batcher as real
from recinfer.serving.batcher import BatchConfig, Batcher
from recinfer.sizing.clock import Clock, Cpu, Thread
from recinfer.sizing.queue import Queue, Work

BASE_S, EACH_S = 80e-6, 10e-6  # of a run, and of each of its requests


class _NoWait(selectors.SelectSelector):
    """Time moves on at once instead of being waited for."""

    loop: Any = None

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self.loop.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass(eq=False)
class _Work:
    lane: str = "Lookup"
    samples: int = 1
    bytes: int = 100


def real_times(
    arrivals: Sequence[float], config: BatchConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, int]:
    """Seconds that each request took, and how many runs there were."""
    selector = _NoWait()
    loop = _Loop(selector)
    selector.loop = loop
    spent = [0.0]
    clock = SimpleNamespace(monotonic=lambda: loop.now, thread_time=lambda: spent[0])
    monkeypatch.setattr(real, "time", clock)

    def run(works: Sequence[Any]) -> list[str]:
        seconds = BASE_S + EACH_S * len(works)
        loop.now += seconds
        spent[0] += seconds
        return ["done"] * len(works)

    took = np.full(len(arrivals), np.nan)

    async def main() -> int:
        batcher = Batcher(run, ThreadPoolExecutor(1), 1, config)

        async def one(i: int) -> None:
            await batcher.submit(_Work())
            took[i] = loop.now - arrivals[i]

        tasks = []
        for i, at in enumerate(arrivals):
            while loop.now < at:
                await asyncio.sleep(at - loop.now)
            tasks.append(loop.create_task(one(i)))
        await asyncio.gather(*tasks)
        return batcher.state.runs

    try:
        return took, loop.run_until_complete(main())
    finally:
        loop.close()


def simulated_times(arrivals: Sequence[float], config: BatchConfig) -> tuple[np.ndarray, int]:
    clock = Clock()
    cpu = Cpu(clock, 1)
    loop = Thread(cpu)
    queue = Queue(clock, cpu, loop, config, lambda works: BASE_S + EACH_S * len(works))
    took = np.full(len(arrivals), np.nan)

    def over(work: Work) -> None:
        took[work.tag] = clock.now - arrivals[work.tag]

    for i, at in enumerate(arrivals):
        clock.at(at, loop.submit, 0.0, 0.0, queue.submit, Work(1, 100, over, i))
    clock.run()
    return took, queue.runs


@pytest.mark.parametrize("rate", [200.0, 1000.0, 2500.0, 5000.0])
@pytest.mark.parametrize("config", [BatchConfig(), BatchConfig(max_delay_us=0), BatchConfig(max_batch=4)])
def test_as_the_real_batcher(rate: float, config: BatchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = np.cumsum(np.random.default_rng(int(rate)).exponential(1 / rate, 3000)).tolist()
    real_took, real_runs = real_times(arrivals, config, monkeypatch)
    took, runs = simulated_times(arrivals, config)
    assert runs == pytest.approx(real_runs, rel=0.05)
    assert took.mean() == pytest.approx(real_took.mean(), rel=0.05)
    assert np.quantile(took, 0.99) == pytest.approx(np.quantile(real_took, 0.99), rel=0.1)


def test_a_full_queue_refuses_at_once_and_answers_the_rest() -> None:
    clock = Clock()
    cpu = Cpu(clock, 1)
    loop = Thread(cpu)
    queue = Queue(clock, cpu, loop, BatchConfig(max_queue=5, max_batch=1, max_delay_us=0), lambda works: 0.01)
    refused: list[str] = []
    answered: list[Work] = []
    works = [
        Work(1, 100_000, lambda w: refused.append(w.refused) if w.refused else answered.append(w), i) for i in range(20)
    ]
    loop.submit(0.0, 0.0, queue.submit, works[0])
    for work in works[1:]:  # while that runs
        clock.at(0.001, loop.submit, 0.0, 0.0, queue.submit, work)
    clock.run()
    assert refused == ["full"] * len(refused)
    assert len(refused) + len(answered) == 20
    assert len(answered) == 6  # one runs, five wait
    assert queue.refused == len(refused)


def test_who_could_not_be_answered_in_time_is_refused() -> None:
    clock = Clock()
    cpu = Cpu(clock, 1)
    loop = Thread(cpu)
    queue = Queue(clock, cpu, loop, BatchConfig(max_batch=1, max_delay_us=0), lambda works: 0.01)
    said: list[str] = []
    for i in range(40):
        work = Work(1, 100_000, lambda w: said.append(w.refused), i, deadline=0.1 + i * 1e-4)
        clock.at(i * 1e-4, loop.submit, 0.0, 0.0, queue.submit, work)
    clock.run()
    assert len(said) == 40
    assert set(said) <= {"", "late", "expired"}
    assert 5 <= said.count("") <= 11
