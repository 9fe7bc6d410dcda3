"""The computed latency of fan-outs against known results on queues and maxima."""

from __future__ import annotations

import math

import numpy as np
import pytest

from recinfer.sizing.fanout import agreement, carried, fanned, hedged, latencies, waits
from tests.sizing.simulated import QueueDriver
from tests.sizing.test_capacity import measured


def test_the_recursion_equals_a_loop() -> None:
    random = np.random.default_rng(1)
    arrival_s, service_s = np.cumsum(random.exponential(1.0, 500)), random.exponential(0.9, 500)
    expected, free = [], 0.0
    for at, service in zip(arrival_s, service_s):
        begin = max(at, free)
        expected.append(begin - at)
        free = begin + service
    assert np.allclose(waits(arrival_s, service_s), expected)


def test_shards_must_each_keep_a_higher_quantile() -> None:
    draws = np.random.default_rng(0).exponential(1.0, 200_000)
    both = fanned(draws, 16)
    assert np.quantile(both, 0.99) == pytest.approx(np.quantile(draws, 0.99 ** (1 / 16)), rel=0.05)
    direct = np.random.default_rng(2).exponential(1.0, (100_000, 16)).max(1)
    assert np.quantile(both, 0.5) == pytest.approx(np.quantile(direct, 0.5), rel=0.02)


def test_a_hedged_request_takes_the_faster_answer() -> None:
    first, second = np.array([1.0, 5.0, 9.0]), np.array([1.0, 1.0, 20.0])
    assert hedged(first, second, 3.0).tolist() == [1.0, 4.0, 9.0]


def test_the_queue_on_paper_gives_what_such_a_server_gives() -> None:
    service_s, p99_s = 1e-3, 20e-3
    found = measured(QueueDriver(service_s, 1e-3), p99_s)
    paper = agreement(found)
    assert paper.agrees, paper
    # An M/M/1 queue's p99 at a rate, and the millisecond on the way.
    expected = math.log(100) / (1 / service_s - 500.0) + 1e-3
    assert np.quantile(latencies(500.0, found), 0.99) == pytest.approx(expected, rel=0.2)


def test_more_shards_are_slower_and_hedging_helps() -> None:
    found = measured(QueueDriver(1e-3, 1e-3), 20e-3)
    one, many = (np.quantile(carried(found, shards=n, qps=400.0), 0.99) for n in (1, 64))
    assert many > 1.3 * one
    assert np.quantile(carried(found, shards=64, qps=400.0, hedge_after_s=float(one)), 0.99) < many


def test_disagreement_of_model_and_measurement_is_reported() -> None:
    found = measured(QueueDriver(1e-3, 1e-3), 20e-3)
    object.__setattr__(found, "service_s", tuple(5 * each for each in found.service_s))
    assert not agreement(found).agrees
