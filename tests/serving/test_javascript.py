"""The JavaScript example, which uses only the proto file, gives the predictor's numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.inference.predictor import Predictor
from recinfer.serving.server.server import Server

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "javascript"
FEATURES = {"user": [[3, 9], [1]], "item": [[5], []], "history": [[], [1, 2]], "shop": [[4], [6]]}
DENSE = [[0.5, 1.0, -2.0], [0.0, 0.25, 3.0]]


def node(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if node("-e", "require('@grpc/grpc-js'); require('@grpc/proto-loader')").returncode:
        pytest.skip("the example's packages are not installed: npm install, in examples/javascript")


def ask(target: str, *arguments: Any) -> dict[str, Any]:
    done = node("client.js", target, *map(json.dumps, arguments))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_predict(server: Server, predictor: Predictor) -> None:
    found = ask(server.target, FEATURES, DENSE)["outputs"]
    expected = predictor.predict(DENSE, FEATURES)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name]["shape"] == list(tensor.shape)
        assert torch.equal(torch.tensor(found[name]["values"]), tensor.reshape(-1))


def test_lookup(server: Server, predictor: Predictor) -> None:
    found = ask(server.target, FEATURES)["embeddings"]
    expected = predictor.lookup(FEATURES).pooled
    assert expected is not None and list(found) == expected.keys()
    for name, rows in found.items():
        assert torch.equal(torch.tensor(rows), expected[name])


def test_an_error_is_said(server: Server) -> None:
    done = node("client.js", server.target, json.dumps({"nonsense": [[1]]}))
    assert done.returncode == 1 and done.stderr.startswith("INVALID_ARGUMENT: unknown features 'nonsense'")
