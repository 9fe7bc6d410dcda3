"""One archive, several doors, the same numbers through each: random requests of every form, and errors of one meaning.

``pytest tests/serving/test_congruence.py --congruence 1000`` asks more. TorchServe's doors: tests/torchserve.
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

from recinfer.errors import InputError, NotFoundError, RecinferError
from recinfer.inference.predictor import Predictor
from recinfer.serving import codec
from recinfer.serving.client import InferenceClient, invoke
from recinfer.serving.proto import inference_pb2 as pb
from recinfer.serving.server import SERVICE_NAME, Server
from recinfer.serving.wire import bytes_field
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import ROWS, make_request
from tests.serving.test_open_inference import Door, InferenceServerException, jagged, triton_grpc, triton_http
from tests.serving.test_sequences import predictors

__all__ = ["predictors"]

TOLERANCE = {"rtol": 0, "atol": 1e-6}


@dataclass(frozen=True)
class Doors:
    """The doors of one server, and what stands behind them."""

    predictor: Predictor
    model: str
    ours: InferenceClient
    triton: tuple[Door, Door]


@pytest.fixture(scope="module")
def doors(predictor: Predictor, predictors: dict[str, Predictor]) -> Iterator[dict[str, Doors]]:
    """Model name -> its doors."""
    models = {"tiny": predictor, **predictors}
    with ExitStack() as stack:
        server = stack.enter_context(Server(models, http_port=0))
        triton = Door(triton_grpc, server.target), Door(triton_http, f"127.0.0.1:{server.http_port}")
        for door in triton:
            stack.callback(door.close)
        yield {
            name: Doors(own, name, stack.enter_context(InferenceClient(server.target, model=name)), triton)
            for name, own in models.items()
        }


def same(got: Any, expected: Tensor) -> None:
    found = got if isinstance(got, Tensor) else torch.from_numpy(np.array(got))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def check_predict(doors: Doors, dense: Tensor, kjt: KeyedJaggedTensor) -> None:
    expected = doors.predictor.predict(dense, kjt)
    assert doors.ours.predict(dense, kjt).keys() == expected.keys()
    same(doors.ours.predict(dense, kjt)["output"], expected["output"])
    for door in doors.triton:
        same(door.infer({"dense": dense.numpy(), **jagged(kjt)}).as_numpy("output"), expected["output"])


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


def with_context(doors: Doors, seed: int, batch: int) -> None:
    """A user's features once beside the candidates', over our wire and in this process, and as one plain request."""
    dense, kjt = make_request(seed, batch, keys=["item", "shop"])
    _, context = make_request(seed + 1, 1, keys=["user", "history"])
    expected = doors.predictor.predict(dense, kjt, context)["output"]
    message = codec.encode_predict_request(dense, kjt, doors.model)
    features = pb.JaggedFeatures(
        keys=context.keys(),
        batch_size=1,
        lengths=context.lengths().int().numpy().tobytes(),
        values=context.values().numpy().tobytes(),
    )
    message += b"".join(bytes_field(5, features.SerializeToString()))
    method = doors.ours._channel.unary_unary(f"/{SERVICE_NAME}/Predict")
    answer = invoke(method, message, doors.ours.target, 10, start_with="")
    same(codec.decode_predict_response(answer)[0]["output"], expected)
    repeated = KeyedJaggedTensor.concat([kjt, *[_repeat(context, batch)]])
    check_predict(doors, dense, repeated)
    same(doors.predictor.predict(dense, repeated)["output"], expected)


def _repeat(context: KeyedJaggedTensor, batch: int) -> KeyedJaggedTensor:
    parts = [value.values().repeat(batch) for value in context.to_dict().values()]
    lengths = [value.lengths().repeat(batch) for value in context.to_dict().values()]
    return KeyedJaggedTensor(context.keys(), torch.cat(parts), lengths=torch.cat(lengths))


def weighted_or_unpooled(seed: int, batch: int, model: str, most: int = 4) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    rows = {"tag": 20} if model == "weighted" else {"clicks": 20, "page": 9, "buys": 20}
    keys = list(rows)[: 1 + seed % len(rows)]
    lengths = torch.randint(0, most + 1, (len(keys), batch), generator=random, dtype=torch.int32)
    ids = torch.cat([torch.randint(0, rows[k], (int(n.sum()),), generator=random) for k, n in zip(keys, lengths)])
    weights = torch.randn(ids.numel(), generator=random) if model == "weighted" else None
    return KeyedJaggedTensor(keys, ids, weights=weights, lengths=lengths.reshape(-1))


def test_random_requests_through_every_door(doors: dict[str, Doors], request: pytest.FixtureRequest):
    check_lookup(doors["weighted"], weighted_or_unpooled(0, 3, "weighted", most=0))  # bags that are all empty
    for seed in range(request.config.getoption("--congruence")):
        batch = 1 + seed * 7 % 33
        form = seed % 6
        dtype = torch.int32 if seed % 4 == 3 else torch.int64
        if form in (0, 1):
            check_predict(doors["tiny"], *make_request(seed, batch, dtype=dtype))
        elif form == 2:
            subset = [key for bit, key in enumerate(ROWS) if (seed // 6 % 15 + 1) >> bit & 1]
            check_lookup(doors["tiny"], make_request(seed, batch, keys=subset, dtype=dtype)[1])
        elif form == 3:
            with_context(doors["tiny"], seed, batch)
        else:
            model = "weighted" if form == 4 else "sequences"
            check_lookup(doors[model], weighted_or_unpooled(seed, batch, model))


BAD: dict[str, tuple[type[RecinferError], dict[str, Any]]] = {
    "id out of range": (InputError, {"ids": {"user": [50]}}),
    "negative id": (InputError, {"ids": {"user": [-1]}}),
    "unknown feature": (InputError, {"ids": {"nobody": [1]}}),
    "nothing": (InputError, {"ids": {"user": []}}),
    "nan in dense": (InputError, {"ids": {"user": [1]}, "dense": [[0.0, float("nan"), 0.0]]}),
    "dense too wide": (InputError, {"ids": {"user": [1]}, "dense": [[0.0] * 4]}),
    "another model": (NotFoundError, {"ids": {"user": [1]}, "model": "other"}),
    "another version": (NotFoundError, {"ids": {"user": [1]}, "version": "9"}),
}


@pytest.mark.parametrize("case", list(BAD))
def test_errors_mean_the_same(doors: dict[str, Doors], case: str):
    kind, how = BAD[case]
    here, model, version = doors["tiny"], how.get("model", "tiny"), how.get("version", "")
    (name, ids), *_ = how["ids"].items()
    kjt = KeyedJaggedTensor([name], torch.tensor(ids, dtype=torch.int64), lengths=torch.ones(len(ids)).int())
    dense = torch.tensor(how["dense"]) if "dense" in how else None
    with InferenceClient(here.ours.target, model=model, version=version) as ours, pytest.raises(kind) as caught:
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
