"""Every way to call a served model as one function each: a request to its vectors or outputs by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recinfer.errors import InputError, RecinferError
from recinfer.inference.predictor import LookupResult, Predictor
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.server import Server
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.e2e.commands import run
from tests.serving.test_open_inference import Admission, InferenceServerException, jagged, triton_grpc, triton_http
from tests.serving.v1 import ask, columns_of, post, rows_of
from tests.torchserve.test_handler import handler

__all__ = [
    "Asked",
    "Way",
    "answer_of",
    "flat",
    "in_process",
    "json_of",
    "read_json",
    "read_protobuf",
    "to_protobuf",
    "ways_of",
]

Arrays = dict[str, np.ndarray]
_BY_STATUS = {"StatusCode.INVALID_ARGUMENT": "InputError", "400": "InputError", "404": "NotFoundError"}


@dataclass(frozen=True)
class Asked:
    """A lookup (``dense`` None) or a prediction. ``kind``: the column of the table that it counts in."""

    kind: str
    model: str
    features: KeyedJaggedTensor
    dense: Tensor | None = None


Way = Callable[[Asked], Any]
"""Gives arrays by name, or raises."""


def answer_of(way: Way, asked: Asked) -> Arrays | str:
    """The float32 arrays that ``way`` gives, vectors of unpooled features one behind another; or the name of its error."""
    try:
        return {name: np.asarray(values, np.float32) for name, values in way(asked).items()}
    except RecinferError as error:
        return type(error).__name__
    except InferenceServerException as error:
        return _BY_STATUS[error.status()]


def in_process(models: dict[str, Predictor]) -> Way:
    """The predictors of this process."""

    def way(asked: Asked) -> Any:
        predictor = models[asked.model]
        if asked.dense is None:
            return flat(predictor.lookup(asked.features))
        return predictor.predict(asked.dense, asked.features)

    return way


def ways_of(
    models: dict[str, Predictor], archives: dict[str, Path], server: Server, stack: ExitStack, folder: Path
) -> dict[str, Way]:
    """By name; ``stack`` closes what they keep open, and the first is what the others are compared with."""

    clients = {name: stack.enter_context(InferenceClient(server.target, model=name, timeout=60)) for name in models}
    runner = stack.enter_context(asyncio.Runner())

    def over_grpc(asked: Asked) -> Any:
        client = clients[asked.model]
        if asked.dense is None:
            return flat(client.lookup(asked.features))
        return client.predict(asked.dense, asked.features)

    def over_async_grpc(asked: Asked) -> Any:
        async def call() -> Any:
            async with AsyncInferenceClient(server.target, model=asked.model, timeout=60) as client:
                if asked.dense is None:
                    return flat(await client.lookup(asked.features))
                return await client.predict(asked.dense, asked.features)

        return runner.run(call())

    doors = {
        "V2 gRPC": Admission(triton_grpc, server.target),
        "V2 REST, binary": Admission(triton_http, f"127.0.0.1:{server.http_port}"),
    }
    handlers = {name: handler(path, [{}]) for name, path in archives.items()}
    return {
        "Python in process": in_process(models),
        "gRPC": over_grpc,
        "gRPC, asyncio": over_async_grpc,
        **{name: _triton(door, stack) for name, door in doors.items()},
        "V2 REST, JSON": lambda asked: _v2_json(server, asked),
        "V1 REST, rows": lambda asked: _v1(server, asked, in_rows=True),
        "V1 REST, columns": lambda asked: _v1(server, asked, in_rows=False),
        "TorchServe's handler, protobuf": lambda asked: _torchserve(handlers[asked.model], asked, is_json=False),
        "TorchServe's handler, JSON": lambda asked: _torchserve(handlers[asked.model], asked, is_json=True),
        "command line": lambda asked: _command_line(server, asked, folder),
    }


def flat(found: LookupResult | Any) -> dict[str, Tensor]:
    """Vectors by feature; those of an unpooled one stand one behind another."""
    return {
        name: found.sequences[name].values() if name in found.sequences else found[name]
        for name in found.keys()  # noqa: SIM118 - no dict
    }


def _inputs(asked: Asked) -> dict[str, np.ndarray]:
    arrays = jagged(asked.features)
    return arrays if asked.dense is None else {"dense": asked.dense.numpy(), **arrays}


def _method(asked: Asked) -> dict[str, str]:
    return {"method": "lookup" if asked.dense is None else "predict"}


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """Outputs of V2 under the names that the others have."""
    return {name.removesuffix(".embedding"): value for name, value in found.items() if not name.endswith(".lengths")}


def _triton(door: Admission, stack: ExitStack) -> Way:
    stack.callback(door.close)

    def way(asked: Asked) -> Any:
        answer = door.infer(_inputs(asked), parameters=_method(asked), model=asked.model)
        described = answer.get_response()
        outputs = described["outputs"] if isinstance(described, dict) else described.outputs
        names = [output["name"] if isinstance(output, dict) else output.name for output in outputs]
        return _named({name: answer.as_numpy(name) for name in names})

    return way


def _checked(code: int, found: Any) -> Any:
    if code != 200:
        assert code == 400, (code, found)
        raise InputError(found["error"])
    return found


def _v2_json(server: Server, asked: Asked) -> Any:
    datatypes = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    inputs = [
        {"name": name, "datatype": datatypes[array.dtype.name], "shape": list(array.shape), "data": array.tolist()}
        for name, array in _inputs(asked).items()
    ]
    body = {"inputs": inputs, "parameters": _method(asked)}
    code, _, found = post(server, f"/v2/models/{asked.model}/infer", body)
    outputs = _checked(code, found)["outputs"]
    return _named({output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in outputs})


def _v1(server: Server, asked: Asked, *, in_rows: bool) -> Any:
    body = (
        {"instances": rows_of(asked.features, asked.dense)}
        if in_rows
        else {"inputs": columns_of(asked.features, asked.dense)}
    )
    code, _, found = ask(server, f"{asked.model}:{'lookup' if asked.dense is None else 'predict'}", body)
    found = _checked(code, found)["predictions" if in_rows else "outputs"]
    if in_rows and isinstance(found[0], dict):
        found = {name: [row[name] for row in found] for name in found[0]}
    if not isinstance(found, dict):
        found = {"output": found}
    sequences = asked.model == "sequences"
    return {
        name: [vector for part in values for vector in part] if sequences else values for name, values in found.items()
    }


def _torchserve(made: tuple[Any, Any], asked: Asked, *, is_json: bool) -> Any:
    run, context = made
    context.headers[0] = {"Content-Type": "application/json"} if is_json else {}
    row: dict[str, Any] = {"method": _method(asked)["method"].encode()}
    row["body"] = json_of(asked) if is_json else to_protobuf(asked)
    try:
        (found,) = run.handle([row], context)
    except Exception as error:  # TorchServe's own: it has the HTTP code of the error behind it
        if isinstance(error.__cause__, RecinferError):
            raise error.__cause__ from None
        raise
    return read_json(found) if is_json else read_protobuf(found, asked)


def to_protobuf(asked: Asked) -> bytes:
    """A request as TorchServe's handler takes it."""
    if asked.dense is None:
        return codec.encode_lookup_request(asked.features)
    return codec.encode_predict_request(asked.dense, asked.features)


def read_protobuf(found: bytes, asked: Asked) -> Any:
    """The handler's answer to it."""
    if asked.dense is None:
        pooled, sequences, *_ = codec.decode_lookup_response(found)
        return flat(LookupResult(pooled, sequences))
    return codec.decode_predict_response(found)[0]


def read_json(found: str | bytes) -> Any:
    """The handler's answer to a request in JSON."""
    document = json.loads(found)
    if "outputs" in document:
        return document["outputs"]
    parts = {name: [v for part in vectors for v in part] for name, vectors in document["sequences"].items()}
    return document["embeddings"] | parts


def json_of(asked: Asked) -> dict[str, Any]:
    """A request in the JSON that the handler and `recinfer predict` take."""
    columns = columns_of(asked.features)
    body: dict[str, Any] = {"features": {n: c["ids"] if isinstance(c, dict) else c for n, c in columns.items()}}
    if any(isinstance(column, dict) for column in columns.values()):
        body["weights"] = {name: column["weights"] for name, column in columns.items()}
    return body if asked.dense is None else {**body, "dense": asked.dense.tolist()}


def _command_line(server: Server, asked: Asked, folder: Path) -> Any:
    common = ("--target", server.target, "--timeout", 60, "--model", asked.model)
    if asked.dense is not None:
        path = folder / "request.json"
        path.write_text(json.dumps(json_of(asked)))
        return _said("predict", *common, "--input", path)["outputs"]
    given: list[str] = []
    for name, column in columns_of(asked.features).items():
        bags = column["ids"] if isinstance(column, dict) else column
        if isinstance(column, dict):
            bags = [[f"{i}:{w!r}" for i, w in zip(*bag)] for bag in zip(column["ids"], column["weights"])]
        given += ["--feature", f"{name}={';'.join(','.join(map(str, bag)) for bag in bags)}"]
    found = _said("lookup", *common, *given)
    return found["pooled"] | {name: [v for part in parts for v in part] for name, parts in found["sequences"].items()}


def _said(*arguments: object) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    found = json.loads(out.splitlines()[-1])
    if code:
        assert found["error"]["type"] == "InputError", (found, err)
        raise InputError(found["error"]["message"])
    return found
