"""torch.export of quantized collections and models, reloaded in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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


RELOAD = """
import sys, torch, fbgemm_gpu
program = torch.export.load(sys.argv[1]).module()
given = torch.load(sys.argv[2], weights_only=True)
torch.save([program(*inputs) for inputs in given], sys.argv[3])
"""


@pytest.mark.parametrize(
    ("pooling", "lacking"),
    [("sum", {}), ("mixed", {}), ("mixed", {"c": DataType.BF16}), ("sum", dict.fromkeys(MIXED, DataType.BF16))],
)
def test_export_runs_after_reload_in_a_fresh_process(
    tmp_path: Path, pooling: str, lacking: dict[str, DataType]
) -> None:
    poolings = [PoolingType.SUM, PoolingType.MEAN if pooling == "mixed" else PoolingType.SUM] * 2
    model = quantize_inference_model(Wrapped(float_bags(poolings)), per_table_weight_dtype={**MIXED, **lacking})
    assert isinstance(model.inner, EmbeddingBagCollection)

    def inputs(batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        features = random_features(model.inner.embedding_bag_configs(), batch, seed=seed)
        return torch.randn(batch, 4), features.values(), features.lengths()

    batch, count = torch.export.Dim("batch", min=2), torch.export.Dim("count", min=2)
    example = inputs(6, 0)
    program = torch.export.export(model, example, dynamic_shapes=({0: batch}, {0: count}, {0: 5 * batch}), strict=False)
    torch.export.save(program, tmp_path / "model.pt2")
    given = [inputs(size, size) for size in (3, 6, 50)]
    torch.save(given, tmp_path / "in.pt")
    operators = "import recinfer.quant.compiled_batch\n" if lacking else ""
    subprocess.run(
        [sys.executable, "-c", operators + RELOAD, tmp_path / "model.pt2", tmp_path / "in.pt", tmp_path / "out.pt"],
        check=True,
        timeout=240,
    )
    for got, args in zip(torch.load(tmp_path / "out.pt", weights_only=True), given):
        torch.testing.assert_close(got, model(*args), rtol=0, atol=0)
