"""A variable batch with inverse indices: kept by rearrangements, and expanded to the full batch."""

from __future__ import annotations

import pytest
import torch

from recinfer.errors import InputError
from recinfer.inference.modules import quantize_inference_model, shard_quant_model
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from recinfer.sparse.full_batch import full_batch
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

INVERSE = torch.tensor([[1, 0, 1], [0, 0, 0]])


def batch(inverse: torch.Tensor = INVERSE, weighted: bool = False) -> KeyedJaggedTensor:
    """Feature a has bags [1], [2, 3]; b has [5]."""
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3, 5]),
        torch.tensor([1.0, 2.0, 0.5, 3.0]) if weighted else None,
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], inverse),
    )


def test_permute_split_and_flatten_keep_inverse_indices() -> None:
    keys, indices = batch().permute([1, 0]).inverse_indices()
    assert (keys, indices.tolist()) == (["b", "a"], [[0, 0, 0], [1, 0, 1]])
    first, second = batch().split([1, 1])
    assert (first.inverse_indices()[0], first.inverse_indices()[1].tolist()) == (["a"], [[1, 0, 1]])
    assert (second.inverse_indices()[0], second.inverse_indices()[1].tolist()) == (["b"], [[0, 0, 0]])
    assert first.stride() == second.stride() == 3
    assert batch().flatten_lengths().inverse_indices()[0] == ["a", "b"]
    assert batch().permute([0, 0]).inverse_indices()[0] == ["a"]


@pytest.mark.parametrize("weighted", [True, False])
def test_the_full_batch_has_each_examples_bag(weighted: bool) -> None:
    found = full_batch(batch(weighted=weighted), ["b", "a"])
    assert found.keys() == ["b", "a"] and not found.variable_stride_per_key() and found.stride() == 3
    assert found["a"].values().tolist() == [2, 3, 1, 2, 3] and found["a"].lengths().tolist() == [2, 1, 2]
    assert found["b"].values().tolist() == [5, 5, 5]
    if weighted:
        assert found["a"].weights().tolist() == [2.0, 0.5, 1.0, 2.0, 0.5]


def test_inverse_indices_that_are_no_rows_are_named() -> None:
    with pytest.raises(InputError, match="inverse_indices of feature 'a' hold 2; expected 0 to 1"):
        full_batch(batch(torch.tensor([[0, 2, 1], [0, 0, 0]])), ["a"])
    with pytest.raises(InputError, match="inverse_indices of feature 'b' hold -1; expected 0 to 0"):
        full_batch(batch(torch.tensor([[0, 1, 1], [0, 0, -1]])), ["b"])


def float_bags() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(6, 8, "t", feature_names=["a", "b"])]
    module = EmbeddingBagCollection(tables)
    module.embedding_bags["t"].weight.data = torch.arange(6.0).unsqueeze(1).repeat(1, 8)
    return module


# [[0, 1], [1, 0]]: each key's batch size is the full batch, which lookups took for a fixed batch.
@pytest.mark.parametrize("inverse", [INVERSE, torch.tensor([[1, 0], [0, 0]])])
@pytest.mark.parametrize("world_size", [None, 1, 2])
def test_quantized_bags_are_those_of_the_float_module(inverse: torch.Tensor, world_size: int | None) -> None:
    module = float_bags()
    quantized = quantize_inference_model(
        torch.nn.Sequential(module), fp_weight_dtype=DataType.FP32, quantization_dtype=DataType.FP32
    )
    if world_size is not None:
        quantized, _ = shard_quant_model(quantized, world_size=world_size, compute_device="cpu")
    want = module(batch(inverse)).values()
    assert torch.equal(quantized(batch(inverse)).values(), want)
    assert want[:, 0].tolist() == ([5, 1, 5] if inverse is INVERSE else [5, 1])


def test_one_key_with_fewer_bags_than_examples() -> None:
    tables = [EmbeddingBagConfig(6, 8, "t", data_type=DataType.FP32, feature_names=["a"])]
    module = QuantEmbeddingBagCollection(tables, False)
    module.load_float("t", torch.arange(6.0).unsqueeze(1).repeat(1, 8))
    assert module(batch()).values()[:, 0].tolist() == [5, 1, 5]
    rows = QuantEmbeddingCollection([EmbeddingConfig(6, 8, "t", data_type=DataType.FP32, feature_names=["a"])])
    rows.load_float("t", torch.arange(6.0).unsqueeze(1).repeat(1, 8))
    out = rows(batch())["a"]
    assert out.values()[:, 0].tolist() == [2, 3, 1, 2, 3] and out.lengths().tolist() == [2, 1, 2]


def test_a_table_without_feature_names_reads_the_feature_of_its_name() -> None:
    ids = KeyedJaggedTensor(["item", "user"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    item = EmbeddingBagConfig(name="item", num_embeddings=4, embedding_dim=2)
    pooled = EmbeddingBagCollection([item, EmbeddingBagConfig(4, 2, "user", feature_names=["user"])])
    assert pooled(ids).keys() == ["item", "user"] and pooled(ids).values().shape == (1, 4)
    assert list(EmbeddingCollection([EmbeddingConfig(4, 2, "item")])(ids)) == ["item"]
    quantized = quantize_inference_model(torch.nn.Sequential(pooled))
    assert quantized(ids).keys() == ["item", "user"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int16, torch.uint8], ids=str)
def test_ids_of_another_dtype_are_refused_by_every_lookup(dtype: torch.dtype) -> None:
    ids = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 0]).to(dtype), lengths=torch.tensor([1, 1]))
    bags = float_bags()
    rows = EmbeddingCollection([EmbeddingConfig(6, 8, "t", feature_names=["a"])])
    quantized = quantize_inference_model(torch.nn.ModuleList([bags, rows]))
    sharded, _ = shard_quant_model(quantized, world_size=2, compute_device="cpu")
    for module in (bags, rows, *quantized, *sharded):
        with pytest.raises(InputError, match=f"ids: got {dtype}; expected torch.int32 or torch.int64"):
            module(ids)


def test_lists_are_named_as_such() -> None:
    with pytest.raises(InputError, match=r"values are a list; expected a tensor: torch\.as_tensor\(values\)"):
        KeyedJaggedTensor(["f"], [1, 2], lengths=torch.tensor([1, 1]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lengths are a list"):
        KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=[1, 1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="offsets are a ndarray"):
        JaggedTensor(torch.tensor([1, 2]), offsets=torch.tensor([0, 2]).numpy())  # type: ignore[arg-type]
