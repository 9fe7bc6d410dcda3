"""predict_many: rows in order, each with its outputs or its own error, and few of them in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from recinfer.errors import InputError, RecinferError, UnavailableError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.bulk import batch_of
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient, ScoredRow
from recinfer.serving.server.server import Server
from tests.ports import free_port

COUNT = 100


def row(number: int) -> dict[str, Any]:
    ids = {"user": number % 10, "history": list(range(number % 4)), "item": [number % 7], "shop": []}
    return {**ids, "dense": [0.5, float(number), -1.0]}


def check(found: list[ScoredRow], predictor: Predictor, failed: dict[int, str]) -> None:
    assert [one.index for one in found] == list(range(COUNT))
    for one in found:
        if one.index in failed:
            assert one.outputs is None and failed[one.index] in str(one.error), one
            continue
        assert one.error is None and one.outputs is not None
        dense, features, _ = batch_of([row(one.index)])
        expected = predictor.predict(dense, features)["output"][0]
        np.testing.assert_allclose(np.asarray(one.outputs["output"]), expected.numpy(), rtol=1e-5, atol=1e-5)


def rows() -> list[Any]:
    wrong: dict[int, Any] = {
        7: row(7) | {"user": 10**6},
        8: row(8) | {"history": ["x"]},
        40: {key: value for key, value in row(40).items() if key != "item"},
        41: InputError("line 41: no JSON"),
        42: 5,
        99: row(99) | {"dense": [1.0]},
    }
    return [wrong.get(number, row(number)) for number in range(COUNT)]


FAILED = {7: "out of range", 8: "'history'", 40: "'item'", 41: "line 41", 42: "got a int", 99: "dense"}


@pytest.mark.parametrize(("concurrency", "batch_size"), [(1, 1), (3, 16), (4, 256)])
def test_rows_come_in_order_and_a_bad_one_costs_no_other(
    server: Server, predictor: Predictor, concurrency: int, batch_size: int
) -> None:
    with InferenceClient(server.target, timeout=60) as client:
        found = list(client.predict_many(rows(), concurrency=concurrency, batch_size=batch_size))
    check(found, predictor, FAILED)

    async def ask() -> list[ScoredRow]:
        async with AsyncInferenceClient(server.target, timeout=60) as mine:
            many = mine.predict_many(rows(), concurrency=concurrency, batch_size=batch_size)
            return [one async for one in many]

    check(asyncio.run(ask()), predictor, FAILED)


def test_rows_are_read_as_answers_are_taken(server: Server) -> None:
    taken = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal taken
        while True:
            taken += 1
            yield row(taken)

    with InferenceClient(server.target, timeout=60) as client:
        found = client.predict_many(endless(), concurrency=2, batch_size=10)
        for number in range(50):
            assert next(found).index == number
            assert taken <= number + 40
        found.close()  # type: ignore[attr-defined]
        assert client.is_ready(timeout=60)


def test_a_server_that_is_gone_is_the_error_of_each_row() -> None:
    with InferenceClient(f"127.0.0.1:{free_port()}", timeout=60, retries=0) as client:
        found = list(client.predict_many([row(0), row(1)]))
    assert [type(one.error) for one in found] == [UnavailableError] * 2
    assert all(isinstance(one.error, RecinferError) for one in found)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"batch_size": 0}])
def test_less_than_one_is_refused(wrong: dict[str, int]) -> None:
    with InferenceClient("127.0.0.1:1") as client, pytest.raises(InputError, match="expected 1 or more"):
        list(client.predict_many([row(0)], **wrong))


def test_weights_of_rows() -> None:
    dense, features, _ = batch_of([{"tags": ([3, 4], [0.5, 2.0])}, {"tags": [5, 6]}, {"tags": 7}, {"tags": (8, 3.0)}])
    assert dense is None
    assert features == {"tags": ([[3, 4], [5, 6], [7], [8]], [[0.5, 2.0], [1.0, 1.0], [1.0], [3.0]])}
