"""A model whose features are called ``dense`` and ``dense_``: every protocol has another name for its dense numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.columns import dense_name
from recinfer.inference.predictor import Predictor, load
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.server import Server
from tests.e2e.commands import run_json
from tests.serving.conftest import export
from tests.serving.v1 import ask, get, post

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")

NAME = "dense__"
IDS = {"dense": [[1, 2], [3, 4]], "dense_": [[5], [6]], "user": [[7], []]}
NUMBERS = [[0.5, 1.0], [-2.0, 3.0]]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(num_embeddings=20, embedding_dim=4, name=f"t_{name}", feature_names=[name]) for name in IDS
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), 2, [8, 4], [8, 1])
    return load(export(model, tmp_path_factory.mktemp("dense"), "dense", "1"))


@pytest.fixture(scope="module")
def expected(predictor: Predictor) -> list[list[float]]:
    return predictor.predict(torch.tensor(NUMBERS), IDS)["output"].tolist()


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    with Server({"m": predictor}, http_port=0) as running:
        yield running


def rows(key: str) -> list[dict[str, Any]]:
    return [{name: IDS[name][at] for name in IDS} | {key: NUMBERS[at]} for at in range(2)]


def test_the_name_is_the_first_that_no_input_has() -> None:
    assert [dense_name(taken) for taken in ([], ["user"], ["dense"], ["dense_"], IDS)] == [
        "dense",
        "dense",
        "dense_",
        "dense",
        "dense__",
    ]


def test_v1_takes_and_describes_it(server: Server, expected: list[list[float]]) -> None:
    assert ask(server, "m:predict", {"instances": rows(NAME)})[2] == {"predictions": expected}
    assert ask(server, "m:predict", {"inputs": IDS | {NAME: NUMBERS}})[2] == {"outputs": expected}
    error = ask(server, "m:predict", {"inputs": IDS})[2]["error"]
    assert f"got no '{NAME}'" in error
    error = ask(server, "m:predict", {"inputs": IDS | {NAME: [[1.0, "x"], [0, 0]]}})[2]["error"]
    assert f"inputs['{NAME}'][0][1]" in error
    described = get(server, "/v1/models/m/metadata")[2]["metadata"]["signature_def"]["signature_def"]
    assert {name: one["dtype"] for name, one in described["serving_default"]["inputs"].items()} == {
        **dict.fromkeys(IDS, "DT_INT64"),
        NAME: "DT_FLOAT",
    }
    found = ask(server, "m:lookup", {"inputs": IDS})
    assert found[0] == 200 and found[2]["outputs"].keys() == IDS.keys()


def test_open_inference_takes_and_describes_it(server: Server, expected: list[list[float]]) -> None:
    described = {one["name"]: one["datatype"] for one in get(server, "/v2/models/m")[2]["inputs"]}
    assert described[NAME] == "FP32" and described["dense.values"] == "INT64" and "dense" not in described
    numbers = {"datatype": "FP32", "shape": [2, 2], "data": np.ravel(NUMBERS).tolist()}
    features = [
        {"name": "dense", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3, 4]},
        {"name": "dense_", "datatype": "INT64", "shape": [2], "data": [5, 6]},
        {"name": "user.values", "datatype": "INT64", "shape": [1], "data": [7]},
        {"name": "user.lengths", "datatype": "INT32", "shape": [2], "data": [1, 0]},
    ]
    jagged = [
        {"name": "dense.values", "datatype": "INT64", "shape": [4], "data": [1, 2, 3, 4]},
        {"name": "dense.lengths", "datatype": "INT32", "shape": [2], "data": [2, 2]},
    ]
    forms = [[*features, {"name": NAME, **numbers}], [*features[1:], *jagged, {"name": "dense", **numbers}]]
    for inputs in forms:  # the second is what clients sent before the tensor had a name of its own
        code, _, answer = post(server, "/v2/models/m/infer", {"inputs": inputs})
        assert code == 200, answer
        assert np.array_equal(np.float32(answer["outputs"][0]["data"]), np.float32(expected).ravel())


def test_the_examples_of_the_interfaces_page_are_answered(server: Server) -> None:
    document = get(server, "/openapi.json")[2]
    found = 0
    for path, item in document["paths"].items():
        if "{" in path:
            continue
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        for example in content.get("application/json", {}).get("examples", {}).values():
            code, _, answer = post(server, path, example["value"])
            assert code == 200, (path, answer)
            found += 1
    assert found
    assert document["components"]["schemas"]["m.PredictRow"]["properties"].keys() == {*IDS, NAME}


def test_clients_name_the_key(server: Server, expected: list[list[float]]) -> None:
    with InferenceClient(server.target, timeout=60) as client:
        found = [one.outputs for one in client.predict_many(rows("numbers"), dense="numbers")]
    assert [one["output"].tolist() for one in found if one is not None] == expected

    async def asked() -> list[Any]:
        async with AsyncInferenceClient(server.target, timeout=60) as client:
            return [one async for one in client.predict_many(rows("numbers"), dense="numbers")]

    assert [one.outputs["output"].tolist() for one in asyncio.run(asked())] == expected


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_predict_names_the_column(server: Server, expected: list[list[float]], tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps(row) for row in rows("numbers")]
    if suffix == ".csv":
        lines = [",".join(rows("numbers")[0])]
        lines += [",".join(" ".join(map(str, cell)) for cell in row.values()) for row in rows("numbers")]
    path, out = tmp_path / f"rows{suffix}", tmp_path / "out.csv"
    path.write_text("\n".join(lines))
    run_json("predict", "--target", server.target, "--rows", path, "--dense", "numbers", "--out", out)
    _, *written = out.read_text().splitlines()
    assert [[float(line.split(",")[1])] for line in written] == pytest.approx(np.array(expected), rel=1e-6)
    said = run_json("predict", "--target", server.target, "--input", path, "--dense", "numbers", code=2)
    assert "--dense with --input" in said["error"]["message"]
