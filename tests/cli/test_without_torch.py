"""A client without torch: the commands that call a server, and both clients, where only the client's packages can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from recinfer.deploy.groups import footprint
from recinfer.inference.predictor import load
from recinfer.serving.engine.store import ModelStore
from recinfer.serving.server.server import Server
from tests.cli.conftest import Exported

ROOT = Path(__file__).resolve().parent.parent.parent

# What `recinfer[cpu]` and `recinfer[cuda]` bring. sitecustomize is imported by every interpreter as it starts.
ABSENT = ("torch", "fbgemm_gpu", "onnxruntime", "safetensors", "grpc_health", "grpc_reflection")
HIDE = f"""
import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hidden())
"""
BODY = {"dense": [[0.5, 1.0, -2.0]], "features": {"item": [[5]], "history": [[]], "shop": [[4]], "user": [[3, 9]]}}

# Verbs that call a server, with what else each needs. A new one is a line here.
CALLS: dict[str, list[str]] = {
    "predict": ["--input", "{folder}/ids.json"],
    "lookup": ["--feature", "user=3,9;1", "--feature", "item=5;"],
    "bench serve": ["--duration", "0.05"],
    "admin list": [],
    "admin status": [],
}
# Verbs that compute here, with arguments that get them as far as the missing package.
COMPUTES: dict[str, list[str]] = {
    "serve": ["{archive}"],
    "inspect": ["{archive}"],
    "verify": ["{archive}"],
    "train": ["--data", "{folder}/none", "--format", "criteo", "--out", "{folder}/out"],
    "demo": ["--out", "{folder}/demo"],
}


@pytest.fixture(scope="module")
def target(exported: Exported) -> Iterator[str]:
    with Server({"tiny": load(exported.archive)}, admin=ModelStore(exported.archive.parent)) as server:
        yield server.target


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    (tmp_path / "ids.json").write_text(json.dumps(BODY))
    return tmp_path


def python(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=120, check=False)


def test_hidden_packages_cannot_be_imported(place: Path) -> None:
    for name in ABSENT:
        assert f"No module named '{name}'" in python(place, "-c", f"import {name}").stderr


@pytest.mark.parametrize("verb", CALLS)
def test_a_verb_that_calls_a_server_works(place: Path, target: str, verb: str) -> None:
    more = [part.format(folder=place) for part in CALLS[verb]]
    done = python(place, "-m", "recinfer", *verb.split(), "--target", target, *more, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("verb", COMPUTES)
def test_a_verb_that_computes_says_what_to_install(place: Path, exported: Exported, verb: str) -> None:
    more = [part.format(folder=place, archive=exported.archive) for part in COMPUTES[verb]]
    done = python(place, "-m", "recinfer", *verb.split(), *more)
    assert done.returncode == 2, done.stderr
    assert "pip install 'recinfer[cpu]' or 'recinfer[cuda]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["load", "serve", "export", "KeyedJaggedTensor"])
def test_a_name_that_needs_torch_says_what_to_install(place: Path, name: str) -> None:
    said = python(place, "-c", f"import recinfer; recinfer.{name}").stderr
    assert f"recinfer.{name} needs the package 'torch'; install it with: pip install 'recinfer[cpu]'" in said


@pytest.mark.parametrize("kind", ["--k8s", "--helm"])
def test_manifests_are_rendered_without_torch(place: Path, exported: Exported, kind: str) -> None:
    out = ["--out", "out", "--image", "registry.example/recinfer:1", "--claim", "models", "--json"]
    done = python(place, "-m", "recinfer", "deploy", str(exported.archive), kind, *out)
    assert done.returncode == 0, done.stderr
    with_torch = footprint(exported.archive)
    said = json.loads(done.stdout)
    assert (said["model"], said["version"]) == (with_torch.model, with_torch.version) and Path(place / "out").is_dir()
    assert [group["ranks"] for group in said["groups"]] == [list(group.ranks) for group in with_torch.groups]


def test_both_clients_give_arrays(place: Path, target: str) -> None:
    program = f"""
import asyncio, sys
import recinfer
from recinfer.errors import UnavailableError
asked = {BODY["features"]!r}
with recinfer.InferenceClient({target!r}, timeout=60) as client:
    client.wait_until_ready()
    alone = client.predict({BODY["dense"]!r}, asked)
    found = client.lookup(asked)
    assert type(alone["output"]).__name__ == "ndarray" and found["user"].shape[0] == 1
    assert client.get_model().num_dense == 3
try:
    recinfer.InferenceClient({target!r}, tensors=True)
except UnavailableError as error:
    assert "recinfer[cpu]" in str(error)

async def ask():
    async with recinfer.AsyncInferenceClient({target!r}, timeout=60) as client:
        await client.wait_until_ready()
        return await client.predict({BODY["dense"]!r}, asked)

assert (asyncio.run(ask())["output"] == alone["output"]).all()
assert not {set(ABSENT)!r} & set(sys.modules)
"""
    done = python(place, "-c", program)
    assert done.returncode == 0, done.stderr


def test_arrays_are_given_where_torch_is_installed_too_and_torch_is_not_imported(target: str) -> None:
    program = f"""
import sys, recinfer
with recinfer.InferenceClient({target!r}, timeout=60, tensors=False) as client:
    client.lookup({BODY["features"]!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_the_two_extras_differ_in_the_kernels_alone_and_the_client_has_neither() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cpu, cuda = (set(project["optional-dependencies"][kind]) for kind in ("cpu", "cuda"))
    assert {pin.partition("==")[0] for pin in cpu ^ cuda} == {"fbgemm-gpu-cpu", "fbgemm-gpu"}
    assert any(pin.startswith("torch==") for pin in cpu & cuda)
    needs = {pin.partition(">")[0] for pin in project["dependencies"]}
    assert needs == {"numpy", "typer", "rich", "grpcio", "protobuf"}
