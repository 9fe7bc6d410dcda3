"""Operators of torch for which recinfer has the ONNX form: they run on onnxruntime, and give torch's numbers for large ones too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recinfer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.zoo.drawing import Draw
from tests.zoo.rankers import bags, user_and_item


def fields(x: Tensor) -> Tensor:
    return x.view(-1, 2, 4)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine_similarity": lambda x: F.cosine_similarity(x[:, :4], x[:, 4:]),
    "cosine_similarity, of fields": lambda x: F.cosine_similarity(fields(x), x[:, None, :4], dim=-1),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "nanmean": lambda x: x.nanmean(1),
    "attention": lambda x: F.scaled_dot_product_attention(fields(x), fields(x), fields(x)),
    "attention, causal": lambda x: F.scaled_dot_product_attention(fields(x), fields(x), fields(x), is_causal=True),
    "logaddexp": lambda x: torch.logaddexp(x[:, :4], x[:, 4:]),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logsigmoid": F.logsigmoid,
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1) + x.take_along_dim(x.argsort(1), dim=1),
}


class Operators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")

    def forward(self, ids: KeyedJaggedTensor, scale: Tensor) -> dict[str, Tensor]:
        x = (self.ebc(ids).values() + torch.arange(1, 9) / 10) * scale
        return {name: operator(x) for name, operator in OPERATORS.items()}


def test_operators_run_on_onnxruntime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Operators().eval()
    example = user_and_item(Draw(6, 1)), torch.ones(6, 1)
    served = recinfer.export(model, example, tmp_path / "m.rqa", precision="fp32", progress=False)
    assert served.manifest.dense is not None
    assert served.manifest.dense.onnx_refused is None
    for batch, scale in ((1, 1.0), (5, 1.0), (5, 1e3)):
        arguments = user_and_item(Draw(batch, 2)), torch.full((batch, 1), scale)
        with torch.no_grad():
            expected = model(*arguments)
        for name, found in served(*arguments).items():
            torch.testing.assert_close(
                found, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
