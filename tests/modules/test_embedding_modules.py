"""Float embedding modules against loops over bags: pooling, weights, shared tables, gradients, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


def bag_table(name: str, features: list[str], *, dim: int = 4, rows: int = 11, **more: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows,
        embedding_dim=dim,
        name=name,
        feature_names=features,
        **more,  # type: ignore[arg-type]
    )


def batch(weighted: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Features c, a, b of 3 examples; bags of 0 to 3 ids."""
    lengths = torch.tensor([1, 0, 2, 3, 1, 0, 0, 2, 1], dtype=dtype)
    values = torch.tensor([10, 0, 3, 7, 7, 2, 9, 1, 4, 5], dtype=dtype)
    weights = torch.linspace(-1, 2, 10) if weighted else None
    return KeyedJaggedTensor(["c", "a", "b"], values, weights, lengths=lengths)


def pooled_by_loop(weight: Tensor, kjt: KeyedJaggedTensor, feature: str, pooling: PoolingType) -> Tensor:
    part = kjt[feature]
    bags = part.to_dense()
    scales = part.to_dense_weights() or [torch.ones(len(bag)) for bag in bags]
    rows = []
    for bag, scale in zip(bags, scales, strict=True):
        row = torch.zeros(weight.shape[1])
        for i, s in zip(bag.tolist(), scale, strict=True):
            row = row + weight[i].float() * s
        rows.append(row / max(len(bag), 1) if pooling is MEAN else row)
    return torch.stack(rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_pools_as_the_loop_does(weighted: bool, dtype: torch.dtype, data_type: DataType) -> None:
    tables = [
        bag_table("one", ["a", "b"], pooling=MEAN, data_type=data_type),
        bag_table("two", ["b", "c"], dim=3, data_type=data_type),
    ]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
    kjt = batch(weighted, dtype)
    out = ebc(kjt)
    assert out.keys() == ["a", "b@one", "b@two", "c"]
    assert out.length_per_key() == [4, 4, 3, 3]
    assert out.values().dtype == torch.float32
    places = [("one", "a", MEAN), ("one", "b", MEAN), ("two", "b", SUM), ("two", "c", SUM)]
    close = 1e-6 if data_type is DataType.FP32 else 0.02
    for key, (table, feature, pooling) in zip(out.keys(), places, strict=True):
        expected = pooled_by_loop(ebc.embedding_bags[table].weight, kjt, feature, pooling)  # type: ignore[arg-type]
        assert torch.allclose(out[key], expected, atol=close)
    assert out["a"][2].tolist() == [0.0] * 4, "an empty bag pools to zeros"


def test_int32_ids_with_int64_offsets() -> None:
    ebc = EmbeddingBagCollection([bag_table("t", ["a"])])
    values, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    mixed = ebc(KeyedJaggedTensor(["a"], values.int(), lengths=lengths)).values()
    assert torch.equal(mixed, ebc(KeyedJaggedTensor(["a"], values, lengths=lengths)).values())


def test_names_state_and_configs_are_torchrecs() -> None:
    tables = [bag_table("one", ["a", "b"]), bag_table("two", ["c"])]
    ebc = EmbeddingBagCollection(tables)
    assert list(ebc.state_dict()) == ["embedding_bags.one.weight", "embedding_bags.two.weight"]
    assert ebc.embedding_bag_configs() == tables
    assert not ebc.is_weighted()
    assert ebc.device == torch.device("cpu")
    assert get_embedding_names_by_table(tables) == [["a", "b"], ["c"]]
    ec = EmbeddingCollection([EmbeddingConfig(5, 4, "one", feature_names=["a"])])
    assert list(ec.state_dict()) == ["embeddings.one.weight"]
    assert (ec.embedding_dim(), ec.embedding_names_by_table(), ec.need_indices()) == (4, [["a"]], False)


def test_initial_values_keep_to_their_bounds() -> None:
    def fill(weight: Tensor) -> None:
        weight.fill_(7)

    ebc = EmbeddingBagCollection(
        [
            bag_table("default", ["a"], rows=400),
            bag_table("given", ["b"], weight_init_min=1.0, weight_init_max=2.0),
            bag_table("function", ["c"], init_fn=fill),
        ]
    )
    weights = {name: bag.weight.detach() for name, bag in ebc.embedding_bags.items()}  # type: ignore[operator, union-attr]
    assert 0.9 / 20 < float(weights["default"].abs().max()) <= 1 / 20
    assert 1 <= float(weights["given"].min()) <= float(weights["given"].max()) <= 2
    assert weights["function"].unique().tolist() == [7]


def test_meta_costs_nothing_and_knows_shapes() -> None:
    huge = bag_table("huge", ["a"], rows=10**11)
    ebc = EmbeddingBagCollection([huge], device=torch.device("meta"))
    assert ebc.device.type == "meta"
    assert ebc.embedding_bags["huge"].weight.shape == (10**11, 4)
    kjt = batch().to(torch.device("meta"))
    ec = EmbeddingCollection([EmbeddingConfig(10**11, 4, "huge", feature_names=["a"])], device=torch.device("meta"))
    assert ec.device.type == kjt.device().type


def ids_on(device: torch.device, form: str, weighted: bool) -> KeyedJaggedTensor:
    """Three examples of two features; lengths, offsets, or a variable batch."""
    values = torch.arange(7, device=device)
    weights = torch.rand(7, device=device) if weighted else None
    lengths = torch.tensor([1, 2, 1, 1, 2, 0], device=device)
    if form == "offsets":
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return KeyedJaggedTensor(["a", "b"], values, weights, offsets=offsets)
    if form == "lengths":
        return KeyedJaggedTensor(["a", "b"], values, weights, lengths=lengths)
    return KeyedJaggedTensor(
        ["a", "b"],
        values,
        weights,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [4]],
        inverse_indices=(["a", "b"], torch.zeros(2, 4, dtype=torch.int64, device=device)),
    )


@pytest.mark.parametrize("form", ["lengths", "offsets", "variable"])
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_on_meta_has_the_shapes_of_a_real_one(form: str, weighted: bool) -> None:
    meta, cpu = torch.device("meta"), torch.device("cpu")
    bags = [bag_table("t", ["a", "b"]), bag_table("u", ["b"], pooling=MEAN)]
    rows = [EmbeddingConfig(11, 4, "t", feature_names=["a", "b"]), EmbeddingConfig(11, 4, "u", feature_names=["b"])]
    outputs = {}
    for device in (meta, cpu):
        features = ids_on(device, form, weighted)
        pooled = EmbeddingBagCollection(bags, weighted, device)(features)
        unpooled = EmbeddingCollection(rows, device, need_indices=True)(features)
        assert pooled.values().device == device
        assert {part.values().device for part in unpooled.values()} == {device}
        outputs[device] = (
            (pooled.keys(), pooled.length_per_key(), pooled.values().shape, pooled.values().dtype),
            {name: (part.lengths().shape, part.values().shape[1]) for name, part in unpooled.items()},
        )
        # Of a variable batch, each of the 4 examples gets the first bag; on meta their sizes are unknown.
        expected = 8 if form == "variable" and device == cpu else 7
        assert sum(part.values().shape[0] for name, part in unpooled.items() if name != "b@u") == expected
    assert outputs[meta] == outputs[cpu]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_the_loops(sparse: bool) -> None:
    ebc = EmbeddingBagCollection([bag_table("t", ["a", "b"], pooling=MEAN)])
    bag = ebc.embedding_bags["t"]
    bag.sparse = sparse  # type: ignore[assignment]
    kjt = batch()
    ebc(kjt).values().square().sum().backward()
    grad = bag.weight.grad
    assert isinstance(grad, Tensor)
    assert grad.is_sparse == sparse
    weight = bag.weight.detach().clone().requires_grad_()  # type: ignore[union-attr, operator]
    torch.cat([pooled_by_loop(weight, kjt, f, MEAN) for f in ("a", "b")], 1).square().sum().backward()
    assert torch.allclose(grad.to_dense(), weight.grad, atol=1e-6)  # type: ignore[arg-type]


def test_weights_get_gradients() -> None:
    ebc = EmbeddingBagCollection([bag_table("t", ["a"], pooling=MEAN)], is_weighted=True)
    weights = torch.ones(3, requires_grad=True)
    kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([2, 1]))
    ebc(kjt).values().sum().backward()
    sums = ebc.embedding_bags["t"].weight[[1, 2, 3]].sum(1).detach()  # type: ignore[index]
    assert torch.allclose(weights.grad, sums / torch.tensor([2.0, 2.0, 1.0]))  # type: ignore[arg-type]


def test_variable_batch_spreads_to_the_full_batch() -> None:
    ebc = EmbeddingBagCollection([bag_table("t", ["a", "b"])])
    inverse = torch.tensor([[1, 0, 1, 1], [0, 1, 2, 0]])
    parts = {"values": torch.arange(6), "lengths": torch.tensor([1, 2, 0, 2, 1])}
    kjt = KeyedJaggedTensor(
        ["b", "a"],
        **parts,
        stride_per_key_per_rank=[[3], [2]],
        inverse_indices=(["a", "b"], inverse),
    )
    out = ebc(kjt)
    weight = ebc.embedding_bags["t"].weight
    for at, key in enumerate(("a", "b")):
        rows = pooled_by_loop(weight, kjt, key, SUM)  # type: ignore[arg-type]
        assert torch.equal(out[key], rows[inverse[at]])
    with pytest.raises(InputError, match=r"batch sizes \[3, 2\] and no inverse indices"):
        ebc(KeyedJaggedTensor(["b", "a"], **parts, stride_per_key_per_rank=[[3], [2]]))


def test_unpooled_rows_lengths_and_ids() -> None:
    tables = [
        EmbeddingConfig(11, 4, "one", feature_names=["a", "b"]),
        EmbeddingConfig(11, 4, "two", feature_names=["b", "c"], data_type=DataType.FP16),
    ]
    ec = EmbeddingCollection(tables, need_indices=True)
    kjt = batch()
    out = ec(kjt)
    assert list(out) == ["a", "b@one", "b@two", "c"]
    for name, table in zip(out, ("one", "one", "two", "two"), strict=True):
        part = kjt[name.split("@")[0]]
        weight = ec.embeddings[table].weight
        assert torch.equal(out[name].values(), weight[part.values()].float())  # type: ignore[index]
        assert torch.equal(out[name].lengths(), part.lengths())
        assert torch.equal(out[name].weights(), part.values())
    out["c"].values().sum().backward()
    assert ec.embeddings["two"].weight.grad is not None
    assert EmbeddingCollection(tables)(kjt)["a"].weights_or_none() is None


def test_no_tables_give_no_columns() -> None:
    out = EmbeddingBagCollection([])(batch())
    assert (out.keys(), tuple(out.values().shape)) == ([], (3, 0))
    assert EmbeddingCollection([])(batch()) == {}


@pytest.mark.parametrize("bad", [11, -1])
def test_an_id_that_is_not_in_the_table_is_named(bad: int) -> None:
    kjt = KeyedJaggedTensor(["x", "a"], torch.tensor([0, 5, bad]), lengths=torch.tensor([1, 2]))
    with pytest.raises(InputError, match=rf"feature 'a': id {bad} at position 1 .* expected 0 to 10"):
        EmbeddingBagCollection([bag_table("t", ["a"])])(kjt)
    with pytest.raises(InputError, match=rf"feature 'a': id {bad} at position 1 .* expected 0 to 10"):
        EmbeddingCollection([EmbeddingConfig(11, 4, "t", feature_names=["a"])])(kjt)


def test_a_missing_feature_or_weight_is_named() -> None:
    with pytest.raises(KeyError, match=r"feature 'z' is not in the input; it has \['a', 'b', 'c'\]"):
        EmbeddingBagCollection([bag_table("t", ["z"])])(batch())
    with pytest.raises(KeyError, match="feature 'z'"):
        EmbeddingCollection([EmbeddingConfig(11, 4, "t", feature_names=["z"])])(batch())
    with pytest.raises(InputError, match="has no weights"):
        EmbeddingBagCollection([bag_table("t", ["a"])], is_weighted=True)(batch())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([bag_table("t", ["a"]), bag_table("t", ["b"])], "duplicate table name 't'"),
        ([bag_table("", ["a"])], "table name ''"),
        ([bag_table("x.y", ["a"])], "without dots"),
        ([bag_table("t", ["a"], data_type=DataType.INT8)], "is INT8; a float module holds one of FP32"),
        (
            [bag_table("t", ["a"], pooling=PoolingType.NONE)],
            "pooling <PoolingType.NONE: .*; expected PoolingType SUM or MEAN",
        ),
    ],
)
def test_refuses_tables(tables: list[EmbeddingBagConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(tables)


def test_refuses_different_dims_of_unpooled_tables() -> None:
    with pytest.raises(ConfigError, match="'two' has dim 3, 'one' has 4"):
        EmbeddingCollection([EmbeddingConfig(5, 4, "one"), EmbeddingConfig(5, 3, "two")])
