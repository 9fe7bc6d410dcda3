"""One archive through several protocols: the same numbers for random requests of every form, and the same errors.

tests/torchserve sends the same requests through TorchServe's protocols. ``--congruence N``: that many requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError, NotFoundError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.requests import BAD, TOLERANCE, Asked, kjt_of, nth_request, with_context_repeated
from tests.serving.test_open_inference import Admission, InferenceServerException, jagged, triton_grpc, triton_http
from tests.serving.test_sequences import predictors

__all__ = ["predictors"]


@dataclass(frozen=True)
class Doors:
    """The protocols of one server, and the predictor that it serves."""

    predictor: Predictor
    model: str
    ours: InferenceClient
    triton: tuple[Admission, Admission]


@pytest.fixture(scope="module")
def doors(predictor: Predictor, predictors: dict[str, Predictor]) -> Iterator[dict[str, Doors]]:
    """Model name -> its protocols."""
    models = {"tiny": predictor, **predictors}
    with ExitStack() as stack:
        server = stack.enter_context(Server(models, http_port=0))
        triton = Admission(triton_grpc, server.target), Admission(triton_http, f"127.0.0.1:{server.http_port}")
        for door in triton:
            stack.callback(door.close)
        yield {
            name: Doors(own, name, stack.enter_context(InferenceClient(server.target, model=name, timeout=60)), triton)
            for name, own in models.items()
        }


def same(got: Any, expected: Tensor) -> None:
    found = got if isinstance(got, Tensor) else torch.from_numpy(np.array(got))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def check_predict(doors: Doors, asked: Asked) -> None:
    assert asked.dense is not None
    expected = doors.predictor.predict(asked.dense, asked.features, asked.context)
    whole = with_context_repeated(asked)
    ours = doors.ours.predict(asked.dense, asked.features, context=asked.context)
    assert ours.keys() == expected.keys()
    same(ours["output"], expected["output"])
    for door in doors.triton:  # the protocol has no context
        answer = door.infer({"dense": asked.dense.numpy(), **jagged(whole)})
        same(answer.as_numpy("output"), expected["output"])
    if asked.context is not None:
        same(doors.predictor.predict(asked.dense, whole)["output"], expected["output"])


def check_lookup(doors: Doors, kjt: KeyedJaggedTensor) -> None:
    expected = doors.predictor.lookup(kjt)
    answers = [door.infer(jagged(kjt), parameters={"method": "lookup"}, model=doors.model) for door in doors.triton]
    ours = doors.ours.lookup(kjt)
    assert ours.keys() == expected.keys()
    for name in expected.keys():  # noqa: SIM118 - a LookupResult is no dict
        if name in expected.sequences:
            sequence, mine = expected.sequences[name], ours.sequences[name]
            assert mine.lengths().tolist() == sequence.lengths().tolist()
            same(mine.values(), sequence.values())
            for answer in answers:
                same(answer.as_numpy(f"{name}.embedding"), sequence.values())
                assert answer.as_numpy(f"{name}.embedding.lengths").tolist() == sequence.lengths().tolist()
            continue
        same(ours[name], expected[name])
        for answer in answers:
            same(answer.as_numpy(f"{name}.embedding"), expected[name])


def test_random_requests_through_every_protocol(doors: dict[str, Doors], request: pytest.FixtureRequest):
    for number in range(request.config.getoption("--congruence")):
        asked = nth_request(number)
        if asked.dense is None:
            check_lookup(doors[asked.model], asked.features)
        else:
            check_predict(doors[asked.model], asked)


@pytest.mark.parametrize("case", list(BAD))
def test_errors_mean_the_same(doors: dict[str, Doors], case: str):
    kind, how = BAD[case]
    here, model, version = doors["tiny"], how.get("model", "tiny"), how.get("version", "")
    kjt = kjt_of(how["ids"])
    dense = torch.tensor(how["dense"]) if "dense" in how else None
    with (
        InferenceClient(here.ours.target, model=model, version=version, timeout=60) as ours,
        pytest.raises(kind) as caught,
    ):
        if dense is None:
            ours.lookup(kjt)
        else:
            ours.predict(dense, kjt)
    assert type(caught.value) is kind
    arrays = jagged(kjt) if dense is None else {"dense": dense.numpy(), **jagged(kjt)}
    expected = {InputError: ("StatusCode.INVALID_ARGUMENT", "400"), NotFoundError: ("StatusCode.NOT_FOUND", "404")}
    for door, status in zip(here.triton, expected[kind]):
        method = {"method": "lookup" if dense is None else "predict"}
        with pytest.raises(InferenceServerException) as refused:
            door.infer(arrays, parameters=method, model=model, model_version=version)
        assert refused.value.status() == status
        if not case.startswith("another"):
            assert refused.value.message() == str(caught.value)
    if not case.startswith(("another", "nothing", "dense too wide")):
        with pytest.raises(kind) as inside:
            if dense is None:
                here.predictor.lookup(kjt)
            else:
                here.predictor.predict(dense, kjt)
        assert str(inside.value) == str(caught.value)
