"""DLRM: its parameters' names, the formula written out, training, export, and TorchRec's own numbers."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.models.dlrm import (
    DLRM,
    DLRM_DCN,
    DenseArch,
    DLRM_Projection,
    DLRMTrain,
    InteractionArch,
    OverArch,
    SparseArch,
    choose,
)
from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor


def tables(device: str = "cpu") -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(num_embeddings=20, embedding_dim=4, name="one", feature_names=["a", "b"]),
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="two", feature_names=["c"]),
    ]
    return EmbeddingBagCollection(configs, device=torch.device(device))


def batch(size: int, seed: int = 0) -> tuple[Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (3 * size,), generator=generator)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    return torch.rand(size, 5, generator=generator), KeyedJaggedTensor(["c", "a", "b"], values, lengths=lengths)


def test_state_keys_are_torchrecs() -> None:
    shapes = {k: tuple(v.shape) for k, v in DLRM(tables(), 5, [6, 4], [7, 1]).state_dict().items()}
    assert shapes == {
        "sparse_arch.embedding_bag_collection.embedding_bags.one.weight": (20, 4),
        "sparse_arch.embedding_bag_collection.embedding_bags.two.weight": (9, 4),
        "dense_arch.model._mlp.0._linear.weight": (6, 5),
        "dense_arch.model._mlp.0._linear.bias": (6,),
        "dense_arch.model._mlp.1._linear.weight": (4, 6),
        "dense_arch.model._mlp.1._linear.bias": (4,),
        "over_arch.model.0._mlp.0._linear.weight": (7, 10),
        "over_arch.model.0._mlp.0._linear.bias": (7,),
        "over_arch.model.1.weight": (1, 7),
        "over_arch.model.1.bias": (1,),
    }


@pytest.mark.parametrize("size", [1, 6])
def test_logits_are_the_formula(size: int) -> None:
    model = DLRM(tables(), 5, [6, 4], [7, 1])
    dense, sparse = batch(size)
    vectors = [model.dense_arch(dense), *(model.sparse_arch.embedding_bag_collection(sparse)[k] for k in "abc")]
    pairs = [(x * y).sum(1, keepdim=True) for x, y in itertools.combinations(vectors, 2)]
    expected = model.over_arch(torch.cat([vectors[0], *pairs], dim=1))
    assert model(dense, sparse).shape == (size, 1)
    assert torch.allclose(model(dense, sparse), expected, atol=1e-5)


def test_parts_have_the_documented_shapes() -> None:
    sparse_arch = SparseArch(tables())
    assert sparse_arch.sparse_feature_names == ["a", "b", "c"]
    assert sparse_arch(batch(2)[1]).shape == (2, 3, 4)
    assert InteractionArch(3)(torch.rand(2, 4), torch.rand(2, 3, 4)).shape == (2, 4 + 6)
    dense = torch.rand(2, 4)
    assert InteractionArch(0)(dense, torch.rand(2, 0, 4)) is dense
    assert DenseArch(5, [3])(torch.rand(2, 5)).shape == (2, 3)
    assert OverArch(5, [3, 1])(torch.rand(2, 5)).shape == (2, 1)
    assert [choose(5, 2), choose(2, 3), choose(0, 0)] == [10, 0, 1]


@pytest.mark.parametrize(
    "model",
    [lambda: DLRM_DCN(tables(), 5, [6, 4], [7, 1], 2, 3), lambda: DLRM_Projection(tables(), 5, [4], [7, 1], [8], [4])],
)
def test_variants_run_and_train(model) -> None:
    dlrm = model()
    dlrm(*batch(3)).sum().backward()
    assert all(p.grad is not None for p in dlrm.parameters())


def test_projection_is_products_of_two_projections() -> None:
    model = DLRM_Projection(tables(), 5, [4], [7, 1], [8], [12])
    dense, sparse = torch.rand(2, 4), torch.rand(2, 3, 4)
    flat = torch.cat([dense.unsqueeze(1), sparse], 1).reshape(2, 16)
    arch = model.inter_arch
    left, right = arch.interaction_branch1(flat), arch.interaction_branch2(flat)  # type: ignore[operator]
    products = torch.einsum("bpd,bdq->bpq", left.view(2, 2, 4), right.view(2, 4, 3)).reshape(2, 6)
    assert torch.allclose(arch(dense, sparse), torch.cat([dense, products], 1), atol=1e-6)


def test_it_learns_a_planted_signal() -> None:
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(tables(), 5, [8, 4], [8, 1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    dense, sparse = batch(256)
    labels = (dense[:, 0] > 0.5).long()
    data = SimpleNamespace(dense_features=dense, sparse_features=sparse, labels=labels)
    losses = []
    for _ in range(60):
        loss, (detached, logits, same_labels) = model(data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(detached))
    assert logits.shape == (256,)
    assert same_labels is not None and torch.equal(same_labels, labels)
    assert losses[-1] < 0.2 < 0.6 < losses[0]


def test_meta_model_gets_its_weights_and_computes() -> None:
    real = DLRM(tables(), 5, [6, 4], [7, 1])
    meta = DLRM(tables("meta"), 5, [6, 4], [7, 1], dense_device=torch.device("meta"))
    assert all(p.is_meta for p in meta.parameters())
    assert list(meta.buffers()) == []
    with torch.device("meta"):
        again = DLRM(tables("meta"), 5, [6, 4], [7, 1])
    for empty in (meta, again):
        empty.load_state_dict(real.state_dict(), assign=True)
        assert torch.equal(empty(*batch(4)), real(*batch(4)))


class DensePart(nn.Module):
    """DLRM behind its tables."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        sparse = pooled.reshape(-1, self.model.sparse_arch.F, self.model.sparse_arch.D)
        return self.model.over_arch(self.model.inter_arch(self.model.dense_arch(dense), sparse))


@pytest.mark.parametrize(
    "model",
    [lambda: DLRM(tables(), 5, [6, 4], [7, 1]), lambda: DLRM_Projection(tables(), 5, [4], [7, 1], [8], [4])],
    ids=["DLRM", "DLRM_Projection"],
)
def test_dense_part_exports_for_every_batch_size(model) -> None:
    part = DensePart(model())
    sizes = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        part, (torch.rand(4, 5), torch.rand(4, 12)), dynamic_shapes=({0: sizes},) * 2, strict=False
    )
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    again = torch.export.load(stream).module()
    for size in (1, 4, 33):
        args = (torch.rand(size, 5), torch.rand(size, 12))
        assert torch.allclose(again(*args), part(*args), atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DLRM(tables(), 5, [6, 5], [7, 1]), r"\[6, 5\] but the tables have dim 4"),
        (lambda: DLRM(tables(), 5, [], [7, 1]), r"dense_arch_layer_sizes is \[\]"),
        (lambda: DLRM(tables(), 5, [4], [1]), "at least two layers"),
        (lambda: DLRM(EmbeddingBagCollection([]), 5, [4], [7, 1]), r"dims \[\]"),
        (lambda: DLRM_Projection(tables(), 5, [4], [7, 1], [9], [4]), "interaction_branch1_layer_sizes is"),
    ],
)
def test_refuses_sizes_that_do_not_fit(build, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


class TorchRecTrained(nn.Module):
    """The model whose weights, inputs and outputs TorchRec wrote."""

    def __init__(self) -> None:
        super().__init__()
        mean = PoolingType.MEAN
        specs = [
            ("user_id", 2000, 16, ["f_user"], PoolingType.SUM),
            ("item_id", 3000, 32, ["f_item", "f_hist"], PoolingType.SUM),
            ("category", 501, 32, ["f_cat"], mean),
            ("country", 37, 16, ["f_country"], PoolingType.SUM),
        ]
        configs = [
            EmbeddingBagConfig(num_embeddings=r, embedding_dim=d, name=n, feature_names=f, pooling=p)
            for n, r, d, f, p in specs
        ]
        self.sparse_arch = nn.Module()
        self.sparse_arch.ebc = EmbeddingBagCollection(configs)
        self.dense_arch = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Tensor]]:
        pooled = self.sparse_arch.ebc(kjt)  # type: ignore[operator]
        return self.over_arch(torch.cat([self.dense_arch(dense), pooled.values()], 1)).squeeze(1), pooled.to_dict()


def test_equals_what_torchrec_computed(sample_data: Path) -> None:
    folder = sample_data / "torchrec_ckpt"
    model = TorchRecTrained()
    model.load_state_dict(torch.load(folder / "plain.pt", weights_only=True))
    said = torch.load(folder / "reference.pt", weights_only=True)
    logits, pooled = model(said["dense"], KeyedJaggedTensor(said["keys"], said["values"], lengths=said["lengths"]))
    assert torch.allclose(logits, said["logits"], atol=1e-6)
    assert list(pooled) == list(said["pooled"])
    for key, expected in said["pooled"].items():
        assert torch.allclose(pooled[key], expected, atol=1e-6), key
