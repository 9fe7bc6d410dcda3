"""A checkpoint that TorchRec wrote, exported with ``--model``, gives TorchRec's own embeddings and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.archive.manifest import Manifest
from recinfer.inference.predictor import load
from recinfer.serving import server_process
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server_process import served
from recinfer.sparse import KeyedJaggedTensor
from tests.e2e.commands import run, run_json
from tests.e2e.torchrec_model import FEATURES, TABLES
from tests.warm import starting_warm

MODEL = "tests.e2e.torchrec_model:build"


@pytest.fixture(scope="module")
def reference(sample_data: Path) -> dict[str, Any]:
    return torch.load(sample_data / "torchrec_ckpt/reference.pt", weights_only=True)


@pytest.fixture(scope="module")
def features(reference: dict[str, Any]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=reference["keys"], values=reference["values"], lengths=reference["lengths"])


@pytest.fixture(scope="module", params=["dcp_sharded_tensor", "plain.pt"])
def checkpoint(request: pytest.FixtureRequest, sample_data: Path) -> Path:
    return sample_data / "torchrec_ckpt" / request.param


def export(checkpoint: Path, out: Path, world_size: int, precision: str) -> Path:
    options = ["--model", MODEL, "--world-size", world_size, "--precision", precision]
    run_json("export", "--checkpoint", checkpoint, *options, "--out", out)
    return out


def bounds(manifest: Manifest, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """How far each pooled value may be: half the largest step of the table, for each id of a SUM, once for a MEAN."""
    steps = {t.name: t.quantization.max_step for t in manifest.tables}
    found = {}
    for name, _, _, pooling, table_features in TABLES:
        for feature in table_features:
            ids = features[feature].lengths()
            times = ids.clamp(max=1) if pooling.value == "MEAN" else ids
            found[feature] = times[:, None] * steps[name] / 2 + 1e-6
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_int8_stays_within_the_bound(
    checkpoint: Path, reference: dict[str, Any], features: KeyedJaggedTensor, world_size: int, tmp_path: Path
) -> None:
    archive = export(checkpoint, tmp_path / "model.rqa", world_size, "int8")
    predictor = load(archive)
    with starting_warm(server_process), served(archive) as target, InferenceClient(target, timeout=60) as client:
        embeddings = client.lookup(features)
        (logits,) = client.predict(reference["dense"], features).values()
    assert embeddings.keys() == FEATURES
    for feature, bound in bounds(predictor.manifest, features).items():
        difference = (embeddings[feature] - reference["pooled"][feature]).abs()
        assert bool((difference <= bound).all()), f"{feature}: {difference.max()} over {bound.max()}"
        assert difference.max() > 0  # it is quantized
    assert torch.allclose(logits, reference["logits"], rtol=0, atol=2e-3)


@pytest.mark.parametrize("world_size", [1, 3])
def test_fp32_is_the_float_model(
    checkpoint: Path, reference: dict[str, Any], features: KeyedJaggedTensor, world_size: int, tmp_path: Path
) -> None:
    predictor = load(export(checkpoint, tmp_path / "model.rqa", world_size, "fp32"))
    found = predictor.lookup(features)
    for feature in FEATURES:
        assert torch.allclose(found[feature], reference["pooled"][feature], rtol=0, atol=1e-6)
    (logits,) = predictor.predict(reference["dense"], features).values()
    assert torch.allclose(logits, reference["logits"], rtol=0, atol=1e-6)


def test_without_a_model_it_says_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    code, _, err = run("export", "--checkpoint", checkpoint, "--world-size", 1, "--out", tmp_path / "model.rqa")
    assert code == 2
    assert "--model" in err


@pytest.mark.parametrize(
    "spec", ["tests.e2e.torchrec_model", "tests.e2e.no_such_module:build", "tests.e2e.torchrec_model:no_such_name"]
)
def test_a_model_that_is_not_there_is_named(checkpoint: Path, spec: str, tmp_path: Path) -> None:
    options = ["--model", spec, "--world-size", 1, "--out", tmp_path / "model.rqa"]
    code, _, err = run("export", "--checkpoint", checkpoint, *options)
    assert code == 2
    assert spec.rpartition(":")[2] in err
