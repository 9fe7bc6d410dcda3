"""recinfer's modules and tensors inside a dense part: each exports to ONNX and gives torch's numbers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recinfer.modules
from recinfer.archive.cut import cut_model
from recinfer.archive.dense import OnnxEngine, TorchEngine, export_part
from recinfer.archive.leaves import find_leaves
from recinfer.models import dlrm
from recinfer.modules.activation import SwishLayerNorm
from recinfer.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor import PositionWeightedModule as PositionWeightedFeatures
from recinfer.modules.feature_processor_ import PositionWeightedModule
from recinfer.modules.mlp import MLP, Perceptron
from recinfer.modules.regroup import KTRegroupAsDict
from recinfer.sparse import JaggedTensor, KeyedTensor

WIDTH = 3 + 4 + 4 + 4


class Model(nn.Module):
    """Three pooled features and two sequences of dim 4, three dense columns, and an output of each part that is tried."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        pooled = [EmbeddingBagConfig(20, 4, f"t_{name}", feature_names=[name]) for name in "abc"]
        self.ebc = EmbeddingBagCollection(tables=pooled)
        self.words = EmbeddingCollection(tables=[EmbeddingConfig(20, 4, "t_words", feature_names=["w", "v"])])
        self.first = nn.Linear(3, 3)
        self.parts = nn.ModuleList(PARTS[name][0]() or nn.Identity() for name in names)
        self.names = tuple(names)

    def forward(self, dense: Tensor, kjt: Any) -> dict[str, Tensor]:
        inputs = self.first(dense), self.ebc(kjt), self.words(kjt)
        return {f"part_{i}": PARTS[n][1](part, *inputs) for i, (n, part) in enumerate(zip(self.names, self.parts))}


def wide(dense: Tensor, pooled: KeyedTensor) -> Tensor:
    return torch.cat([dense, pooled.values()], dim=1)


def stacked(part: Any, dense: Tensor, pooled: KeyedTensor, words: Any) -> Tensor:
    return part(wide(dense, pooled))


def interacted(part: Any, dense: Tensor, pooled: KeyedTensor, words: Any) -> Tensor:
    return part(torch.cat([dense, dense[:, :1]], dim=1), pooled.values().reshape(-1, 3, 4))


def weighted(jagged: JaggedTensor, width: int = 3) -> Tensor:
    padded, weights = jagged.to_padded_dense(width), jagged.to_padded_dense_weights(width)
    assert weights is not None
    return (padded * weights.unsqueeze(2)).flatten(1)


PARTS: dict[str, tuple[Callable[[], nn.Module | None], Callable[..., Tensor]]] = {
    "Perceptron": (lambda: Perceptron(WIDTH, 5), stacked),
    "MLP": (lambda: MLP(WIDTH, [6, 2]), stacked),
    "MLP, swish_layernorm": (lambda: MLP(WIDTH, [6, 2], activation="swish_layernorm"), stacked),
    "SwishLayerNorm": (lambda: SwishLayerNorm(WIDTH), stacked),
    "CrossNet": (lambda: CrossNet(WIDTH, 2), stacked),
    "LowRankCrossNet": (lambda: LowRankCrossNet(WIDTH, 2, low_rank=3), stacked),
    "VectorCrossNet": (lambda: VectorCrossNet(WIDTH, 2), stacked),
    "LowRankMixtureCrossNet": (lambda: LowRankMixtureCrossNet(WIDTH, 2, num_experts=2, low_rank=3), stacked),
    "DenseArch": (lambda: dlrm.DenseArch(WIDTH, [5, 4]), stacked),
    "OverArch": (lambda: dlrm.OverArch(WIDTH, [5, 1]), stacked),
    "InteractionArch": (lambda: dlrm.InteractionArch(3), interacted),
    "InteractionDCNArch": (lambda: dlrm.InteractionDCNArch(3, LowRankCrossNet(16, 2, 3)), interacted),
    "InteractionProjectionArch": (
        lambda: dlrm.InteractionProjectionArch(3, MLP(16, [8]), MLP(16, [8])),
        interacted,
    ),
    "KTRegroupAsDict": (
        lambda: KTRegroupAsDict([["c", "a"], ["b"]], ["x", "y"]),
        lambda part, d, p, w: torch.cat([d, *part([p]).values()], dim=1),
    ),
    "KTRegroupAsDict, float16": (
        lambda: KTRegroupAsDict([["c", "a"]], ["x"], emb_dtype=DataType.FP16),
        lambda part, d, p, w: torch.cat([d, part([p])["x"].float()], dim=1),
    ),
    "PositionWeightedModule": (
        lambda: PositionWeightedModule(5),
        lambda part, d, p, w: torch.cat([d, weighted(part(w["w"]))], dim=1),
    ),
    "PositionWeightedModule of a dict": (
        lambda: PositionWeightedFeatures({"w": 5}),
        lambda part, d, p, w: torch.cat([d, weighted(part(w)["w"])], dim=1),
    ),
    "KeyedTensor[key]": (lambda: None, lambda part, d, p, w: torch.cat([d, p["c"], p["a"]], dim=1)),
    "KeyedTensor.to_dict": (lambda: None, lambda part, d, p, w: torch.cat([d, *p.to_dict().values()], dim=1)),
    "KeyedTensor.regroup": (
        lambda: None,
        lambda part, d, p, w: torch.cat([d, *KeyedTensor.regroup([p], [["b", "c"], ["a"]])], dim=1),
    ),
    "KeyedTensor.regroup_as_dict": (
        lambda: None,
        lambda part, d, p, w: KeyedTensor.regroup_as_dict([p], [["b", "c"]], ["x"])["x"] * d[:, :1],
    ),
    "KeyedTensor.from_tensor_list": (
        lambda: None,
        lambda part, d, p, w: KeyedTensor.from_tensor_list(["d", "a"], [d, p["a"]])["d"],
    ),
    "JaggedTensor.to_padded_dense": (
        lambda: None,
        lambda part, d, p, w: torch.cat([d, w["w"].to_padded_dense(2).flatten(1)], dim=1),
    ),
    "JaggedTensor.to_padded_dense, a padding": (
        lambda: None,
        lambda part, d, p, w: w["v"].to_padded_dense(4, padding_value=-1.5).sum(2) + d[:, :1],
    ),
    "JaggedTensor.to_padded_dense, the longest": (
        lambda: None,
        lambda part, d, p, w: torch.cat([d, w["w"].to_padded_dense().sum(1)], dim=1),
    ),
    "JaggedTensor.from_dense_lengths": (
        lambda: None,
        lambda part, d, p, w: (
            JaggedTensor.from_dense_lengths(w["w"].to_padded_dense(2), w["w"].lengths().clamp(max=2))
            .to_padded_dense(2)
            .flatten(1)
            + d[:, :1]
        ),
    ),
    "JaggedTensor.offsets": (
        lambda: None,
        lambda part, d, p, w: torch.cat([d, w["w"].offsets()[1:, None].float(), w["v"].lengths()[:, None].float()], 1),
    ),
}


def group_of(name: str) -> str:
    if name.startswith(("Keyed", "KT")):
        return "keyed tensors"
    if name.startswith(("Jagged", "Position")):
        return "jagged tensors"
    return "interactions" if PARTS[name][1] is interacted else "modules"


GROUPS = {group: [name for name in PARTS if group_of(name) == group] for group in map(group_of, PARTS)}
ALONE = [pytest.param([name], id=name, marks=pytest.mark.nightly) for name in PARTS]


@pytest.mark.parametrize("names", [*(pytest.param(names, id=group) for group, names in GROUPS.items()), *ALONE])
def test_recinfer_modules_export_to_onnx(names: list[str]) -> None:
    """A part is an output of a model: an export takes a second whether it has one output or ten."""
    torch.manual_seed(0)
    model = Model(names).eval()
    cut = cut_model(model, find_leaves(model), lambda body: None)
    assert cut is not None
    exported = export_part(cut.dense)
    assert exported.onnx_refused is None
    assert exported.onnx is not None
    onnx = OnnxEngine(exported.onnx, cut.dense.inputs, list(cut.outputs), 1)
    engine = TorchEngine(exported.program, cut.dense.inputs, list(cut.outputs))
    for batch in (1, 2, 33):
        tensors = cut.dense.example(batch, batch)
        with torch.no_grad():
            live = cut.dense.module(*tensors)
        for name, a, b, c in zip(names, onnx(tensors), engine(tensors), live.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


# Modules in front of the tables, and the tables: an archive runs these itself, outside the dense part.
NOT_DENSE = {
    "BaseFeatureProcessor",
    "BaseGroupedFeatureProcessor",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorDictWrapper",
    "FeatureProcessorsCollection",
    "PositionWeightedModuleCollection",
    "PositionWeightedProcessor",
    "BaseManagedCollisionEmbeddingCollection",
    "HashZchManagedCollisionModule",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "ManagedCollisionModule",
}


def test_no_module_is_forgotten() -> None:
    found = set()
    for info in pkgutil.iter_modules(recinfer.modules.__path__, "recinfer.modules."):
        module = importlib.import_module(info.name)
        public = {name: getattr(module, name) for name in module.__all__}
        found |= {name for name, value in public.items() if isinstance(value, type) and issubclass(value, nn.Module)}
    assert found - NOT_DENSE - set(PARTS) == set()
