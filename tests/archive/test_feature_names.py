"""Features as lookups name them: one name stands for one list of ids with one list of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer.archive.captured import collections_of, read_program
from recinfer.capture import capture
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.zoo.drawing import Draw
from tests.zoo.rankers import bags
from tests.zoo.sequences import rows
from tests.zoo.test_zoo import check


class Small(nn.Module):
    """Plain, weighted and position-weighted collections, of which a case is the forward."""

    def __init__(self, forward: Callable[[Small, KeyedJaggedTensor], Tensor]) -> None:
        super().__init__()
        self.plain, self.one, self.two = bags("item"), bags("item", weighted=True), bags("item", weighted=True)
        self.recent = FeatureProcessedEmbeddingBagCollection(
            bags("item", "old", weighted=True), {"item": PositionWeightedModule(4), "old": PositionWeightedModule(5)}
        )
        self.all_recent = FeatureProcessedEmbeddingBagCollection(
            bags("item", weighted=True), PositionWeightedModuleCollection({"item": 4})
        )
        with torch.no_grad():
            for fp in (self.recent, self.all_recent):
                for weight in fp._feature_processors.parameters():
                    weight.uniform_(0.5, 1.5)
        self.rest = forward

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.rest(self, ids)


def draw(batch: int, seed: int) -> tuple[KeyedJaggedTensor]:
    d = Draw(batch, seed)
    return (d.kjt(d.bag("item", 40, weighted=True), d.bag("old", 40, weighted=True)),)


def of(bag: JaggedTensor, *keys: str, times: float | None = None, added: int = 0) -> KeyedJaggedTensor:
    """The ids of ``bag`` for each of ``keys``, with their weights multiplied."""
    each = [(bag.values() + added) % 40 if added else bag.values()] * len(keys)
    weights = None if times is None else torch.cat([bag.weights() * times] * len(keys))
    return KeyedJaggedTensor(list(keys), torch.cat(each), weights, lengths=torch.cat([bag.lengths()] * len(keys)))


def two_weights(self: Any, ids: Any) -> Tensor:
    bag = ids["item"]
    return self.one(of(bag, "item", times=2)).values() + self.two(of(bag, "item", times=3)).values()


def one_module_two_weights(self: Any, ids: Any) -> Tensor:
    bag = ids["item"]
    return self.one(of(bag, "item", times=2)).values() + self.one(of(bag, "item", times=3)).values()


def with_and_without_weights(self: Any, ids: Any) -> Tensor:
    bag = of(ids["item"], "item", times=2, added=3)
    return self.plain(bag).values() + self.one(bag).values()


def computed_ids_by_position(self: Any, ids: Any) -> Tensor:
    return self.recent(of(ids["item"], "item", "old", added=3)).values()


def other_ids_by_position(self: Any, ids: Any) -> Tensor:
    """Each name of the request is that of the other in the module."""
    swapped = KeyedJaggedTensor.concat([of(ids["old"], "item"), of(ids["item"], "old")])
    return self.recent(swapped).values()


def two_bags_by_position(self: Any, ids: Any) -> Tensor:
    return self.all_recent(of(ids["item"], "item")).values() - 2 * self.all_recent(of(ids["old"], "item")).values()


def one_bag_under_two_names(self: Any, ids: Any) -> Tensor:
    return self.recent(of(ids["item"], "item", "old")).values()


def one_bag_in_two_modules(self: Any, ids: Any) -> Tensor:
    return self.recent(ids).values()[:, :4] + self.all_recent(of(ids["old"], "item")).values()


FORWARDS = [
    two_weights,
    one_module_two_weights,
    with_and_without_weights,
    computed_ids_by_position,
    other_ids_by_position,
    two_bags_by_position,
    one_bag_under_two_names,
    one_bag_in_two_modules,
]


def model_of(forward: Callable[..., Tensor]) -> nn.Module:
    """A model with the collections that ``forward`` calls."""
    torch.manual_seed(0)
    model = Small(forward)
    for name in [name for name, _ in model.named_children() if name not in forward.__code__.co_names]:
        delattr(model, name)
    return model.eval()


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_an_archive_weighs_ids_as_forward_does(forward: Callable[..., Tensor], tmp_path: Path) -> None:
    model = model_of(forward)
    served = recinfer.export(model, draw(6, 1), tmp_path / "m.rqa", precision="fp32", progress=False)
    for batch in (1, 5):
        with torch.no_grad():
            check({"output": served(*draw(batch, batch))}, model(*draw(batch, batch)), 1e-5)


class Unused(nn.Module):
    """Computes the ids of four features and reads the vectors of one; an output and a column of it share memory on torch."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.ebc, self.ec, self.in_place = bags("user", "item"), rows(("hist",), ("old",)), in_place

    @staticmethod
    def draw(batch: int, seed: int) -> tuple[KeyedJaggedTensor]:
        d = Draw(batch, seed)
        return (d.kjt(*(d.bag(name, 1 << 40) for name in ("user", "item", "hist", "old"))),)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        hashed = KeyedJaggedTensor(ids.keys(), ids.values() % 40, lengths=ids.lengths())
        _, found = self.ebc(hashed), self.ec(hashed)
        x = torch.special.i0e(found["hist"].to_padded_dense(3).flatten(1))  # which ONNX does not have
        if self.in_place:
            x[:, 0] = x[:, 1]
        return {"all": x, "first": x[:, 0], "again": x}


@pytest.mark.parametrize("in_place", [False, True])
def test_ids_of_vectors_that_nothing_reads_are_computed(in_place: bool, tmp_path: Path) -> None:
    model = Unused(in_place).eval()
    served = recinfer.export(model, model.draw(6, 1), tmp_path / "m.rqa", precision="fp32", progress=False)
    for batch in (1, 5):
        with torch.no_grad():
            check(served(*model.draw(batch, batch)), model(*model.draw(batch, batch)), 1e-5)


class InPlace(nn.Module):
    """Reads three computed ids of each sample, and changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item",))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        x = self.ec(of(ids["item"], "item", added=3))["item"].values().view(-1, 3, 4).sum(1)
        x[:, 0] = x[:, 1]
        return x


def threes(batch: int, seed: int) -> tuple[KeyedJaggedTensor]:
    d = Draw(batch, seed)
    return (d.kjt(d.bag("item", 40, each=3)),)


@pytest.mark.parametrize(
    ("model", "draw"),
    [(model_of(computed_ids_by_position), draw), (InPlace(), threes)],
    ids=["weights by position", "change in place"],
)
def test_a_captured_program_answers_as_its_model(model: nn.Module, draw: Any, tmp_path: Path) -> None:
    capture(model, draw(6, 1)).save(tmp_path / "m.rqp")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    program, reader = read_program(tmp_path / "m.rqp"), CheckpointReader(tmp_path / "m.pt")
    plan = plan_inference(collections_of(program), world_size=1, precision=DataType.FP32)
    export_archive(program, reader, plan, tmp_path / "m.rqa", name="m", version="1", progress=False)
    with torch.no_grad():
        check(load(tmp_path / "m.rqa").predict(None, *draw(5, 5)), model(*draw(5, 5)), 1e-5)
