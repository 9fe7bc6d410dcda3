"""torch.export of quantized collections and models, reloaded in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from recinfer.inference.modules import quantize_inference_model
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.quant.cases import MIXED, float_bags, random_features

KEYS = ["f0", "f1", "f2", "f3", "f4"]


class Wrapped(nn.Module):
    """Tensors in, tensors out, a KeyedJaggedTensor in between: what a serving program looks like."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.over = nn.Linear(80, 1)

    def forward(self, dense: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths, stride=dense.shape[0])
        return self.over(self.inner(features).values()).squeeze(1) + dense.sum(dim=1)


CASES: list[tuple[str, dict[str, DataType]]] = [
    ("sum", {}),
    ("mixed", {}),
    ("mixed", {"c": DataType.BF16}),
    ("sum", dict.fromkeys(MIXED, DataType.BF16)),
]
"""Pooling, and tables of a type that FBGEMM lacks: the first two need no operators but FBGEMM's."""

RELOAD = """
import sys, torch, fbgemm_gpu
from pathlib import Path

for number in range(4):
    if number == 2:
        assert "recinfer" not in sys.modules
        import recinfer.quant.compiled_batch
    folder = Path(sys.argv[1], str(number))
    program = torch.export.load(folder / "model.pt2").module()
    given = torch.load(folder / "in.pt", weights_only=True)
    torch.save([program(*inputs) for inputs in given], folder / "out.pt")
"""


def test_exports_run_after_reload_in_a_fresh_process(tmp_path: Path) -> None:
    """One process reloads all four."""
    expected = []
    for number, (pooling, lacking) in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        expected.append(export(tmp_path / str(number), pooling, lacking))
    subprocess.run([sys.executable, "-c", RELOAD, tmp_path], check=True, timeout=240)
    for number, outputs in enumerate(expected):
        for got, out in zip(torch.load(tmp_path / str(number) / "out.pt", weights_only=True), outputs, strict=True):
            torch.testing.assert_close(got, out, rtol=0, atol=0)


def export(folder: Path, pooling: str, lacking: dict[str, DataType]) -> list[torch.Tensor]:
    """Write the exported program of a model and inputs to ``folder``; returns what the model gives for these."""
    poolings = [PoolingType.SUM, PoolingType.MEAN if pooling == "mixed" else PoolingType.SUM] * 2
    model = quantize_inference_model(Wrapped(float_bags(poolings)), per_table_weight_dtype={**MIXED, **lacking})
    assert isinstance(model.inner, EmbeddingBagCollection)

    def inputs(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        features = random_features(model.inner.embedding_bag_configs(), batch, seed=seed)
        return torch.randn(batch, 4), features.values(), features.lengths()

    batch, count = torch.export.Dim("batch", min=2), torch.export.Dim("count", min=2)
    example = inputs(6, 0)
    program = torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: count}, {0: 5 * batch}), strict=False)
    torch.export.save(program, folder / "model.pt2")
    given = [inputs(size, size) for size in (3, 6, 50)]
    torch.save(given, folder / "in.pt")
    return [model(*args) for args in given]
