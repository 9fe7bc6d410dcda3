"""Forms of forward that models in public repositories have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401 - defines torch.ops.fbgemm
import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer.archive.leaves import find_leaves
from recinfer.capture import trace
from recinfer.errors import ConfigError
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from tests.zoo.drawing import Draw
from tests.zoo.rankers import DIM, bags
from tests.zoo.sequences import LENGTH, rows


class Forms(nn.Module):
    """Each output has one form."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.ec = bags("item"), rows(("hist",))
        # The weights of "t_user", the name of a table, have no effect.
        weights = PositionWeightedModuleCollection({"user": 6, "t_user": 6})
        with torch.no_grad():
            for weight in weights.parameters():
                weight.uniform_(0.5, 1.5)
        self.fp = FeatureProcessedEmbeddingBagCollection(bags("user", weighted=True), weights)

    @staticmethod
    def draw(batch: int, seed: int = 0) -> tuple[Any, ...]:
        d = Draw(batch, seed)
        return d.kjt(d.bag("user", 40), d.bag("item", 40), d.bag("hist", 40)), d.floats(1)

    def forward(self, ids: KeyedJaggedTensor, price: Tensor) -> dict[str, Tensor]:
        hist = self.ec(ids)["hist"]
        pooled = [self.fp(ids), self.ebc(ids)]
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(hist.lengths())
        padded = torch.ops.fbgemm.jagged_2d_to_dense(hist.values(), offsets, LENGTH)
        samples = len(ids.lengths()) // len(ids.keys())
        return {
            "all_axes": price.squeeze() * pooled[0]["user"].sum(1, keepdim=True).squeeze(),
            "first_axis": pooled[0]["user"].squeeze(0) * price,
            "last_axis": price.squeeze(-1) + 1,
            "regrouped": torch.cat(KeyedTensor.regroup(pooled, [["user", "item"], []]), 1),
            "padded": padded.view(samples, LENGTH * DIM),
        }


def test_forms_of_public_models(tmp_path: Path) -> None:
    model = Forms().eval()
    served = recinfer.export(model, Forms.draw(6), tmp_path / "forms.rqa", precision="fp32")
    assert served.manifest.dense is not None
    assert served.manifest.dense.engine == "onnx", served.manifest.dense.onnx_refused
    for batch in (1, 2, 7):
        arguments = Forms.draw(batch, batch)
        with torch.no_grad():
            expected = model(*arguments)
        for name, found in served(*arguments).items():
            assert len(found) == batch, name  # of one sample too, where forward removes the axis
            assert torch.allclose(found, expected[name].reshape(found.shape), atol=1e-6), name


class FlatIds(nn.Module):
    """Values and lengths of ids as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")

    def forward(self, values: Tensor, lengths: Tensor, price: Tensor) -> Tensor:
        return self.ebc(KeyedJaggedTensor(["user", "item"], values, lengths=lengths)).values() * price


def flat(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(6 * batch, dtype=torch.int64), torch.full((2 * batch,), 3), torch.rand(batch, 1)


def test_flat_ids_are_refused_by_what_to_give() -> None:
    model = FlatIds()
    leaves = find_leaves(model)
    modules, abouts = [leaf.module for leaf in leaves], [leaf.about for leaf in leaves]
    for batches, todo in (([flat(4)], "two example batches"), ([flat(4), flat(5)], "as a KeyedJaggedTensor")):
        with pytest.raises(ValueError, match=f"24 rows in values, 8 rows in lengths, 4 rows in price, .*{todo}"):
            trace(model, modules, abouts, batches)


class Shared(nn.Module):
    """A tensor of one id a sample, and one that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user")

    def forward(self, user: Tensor, shift: Tensor) -> Tensor:
        ones = torch.ones(user.shape[0], dtype=torch.int32)
        return self.ebc(KeyedJaggedTensor(["user"], user, lengths=ones)).values() + shift


def test_two_batches_tell_the_samples_of_tensors(tmp_path: Path) -> None:
    model, shift = Shared(), torch.rand(4)
    one, two = (torch.arange(6), shift), (torch.arange(7), shift)
    with pytest.raises(ConfigError, match=r"6 rows in user, 4 rows in shift, .*give two example batches"):
        recinfer.export(model, one, tmp_path / "one.rqa", precision="fp32")
    served = recinfer.export(model, [one, two], tmp_path / "two.rqa", precision="fp32")
    assert torch.allclose(served(torch.arange(3), shift), model(torch.arange(3), shift))


class Masked(nn.Module):
    """The mask of a history, of the user alone, goes to the candidates' part as booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.ebc = rows(("hist",)), bags("item")

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hist = self.ec(ids)["hist"]
        scores = torch.einsum("bld,bd->bl", hist.to_padded_dense(LENGTH), self.ebc(ids)["item"])
        mask = torch.arange(LENGTH) < hist.lengths().unsqueeze(1)
        return torch.where(mask, scores, -1e9).softmax(1)


def test_a_mask_between_the_users_part_and_the_candidates(tmp_path: Path) -> None:
    d, model = Draw(6, 1), Masked().eval()
    batch = d.kjt(d.bag("hist", 40), d.bag("item", 40, each=1))
    served = recinfer.export(model, batch, tmp_path / "masked.rqa", precision="fp32", user=["hist"])
    assert torch.allclose(served(batch), model(batch), atol=1e-6)
    found = served.predict(features={"item": [[1], [2]]}, context={"hist": [[3, 7]]})["output"]
    pair = served.predict(features={"item": [[1], [2]], "hist": [[3, 7], [3, 7]]})["output"]
    assert torch.allclose(found, pair, atol=1e-6)


class ViewByLength(nn.Module):
    """The number of values of each sample is read from the first one, or is a number."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.ec, self.count = rows(("hist",)), count

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        count = ids.lengths()[0].item() if self.count is None else self.count
        return self.ec(ids)["hist"].values().view(ids.lengths().numel(), count, DIM).sum(1)


def test_a_view_by_a_number_of_a_tensor_is_refused_by_what_to_write(tmp_path: Path) -> None:
    d = Draw(6, 1)
    batch = d.kjt(d.bag("hist", 40, each=3))
    with pytest.raises(ConfigError, match=r"is invalid for input of size .*their number as a number of forward"):
        recinfer.export(ViewByLength(None), batch, tmp_path / "read.rqa", precision="fp32")
    served = recinfer.export(ViewByLength(3), batch, tmp_path / "number.rqa", precision="fp32")
    assert served.manifest.signature is not None
    assert served.manifest.signature.per_sample == {"hist": 3}
