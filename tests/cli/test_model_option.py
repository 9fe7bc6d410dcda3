"""``--model pkg:build``: one sentence names the package that the user's module imports and that is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.e2e.commands import run, run_json

TORCHREC = """
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["f", "g"])]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.top = torch.nn.Linear(10, 1, device="meta")

    def forward(self, dense, features):
        return self.top(torch.cat([dense, self.ebc(features).values()], dim=1))

def build():
    return Model()
"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state dict of the model above, in the folder that is worked in."""
    weights = {
        "ebc.embedding_bags.t.weight": torch.randn(20, 4),
        "top.weight": torch.randn(1, 10),
        "top.bias": torch.randn(1),
    }
    torch.save(weights, tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "weights.pt"


def export(checkpoint: Path, module: str) -> tuple[object, ...]:
    return ("export", "--checkpoint", checkpoint, "--model", f"{module}:build", "--out", checkpoint.parent / "a.rqa")


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is not None, reason="torchrec is installed")
@pytest.mark.parametrize("inside", [False, True], ids=["of the module", "of its function"])
def test_torchrec_that_is_not_installed(checkpoint: Path, inside: bool) -> None:
    name = f"needs_torchrec_{inside}".lower()
    text = "def build():\n    import torchrec.modules.mlp\n" if inside else TORCHREC
    (checkpoint.parent / f"{name}.py").write_text(text)
    code, _, err = run(*export(checkpoint, name))
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "it imports 'torchrec', which is not installed" in err
    assert "install torchrec to use the model unchanged" in err
    assert "`recinfer migrate`" in err
    said = run_json(*export(checkpoint, name), code=2)["error"]
    assert said["type"] == "UnavailableError"


def test_another_package_that_is_not_installed(checkpoint: Path) -> None:
    (checkpoint.parent / "needs_another.py").write_text("import a_package_of_nobody.parts\n")
    code, _, err = run(*export(checkpoint, "needs_another"))
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "it imports 'a_package_of_nobody', which is not installed where recinfer runs; install it" in err


@pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")
def test_torchrec_that_is_installed(checkpoint: Path) -> None:
    (checkpoint.parent / "has_torchrec.py").write_text(TORCHREC)
    assert run_json(*export(checkpoint, "has_torchrec"))["outputs"] == ["output"]
