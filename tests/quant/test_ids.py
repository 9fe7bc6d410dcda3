"""The error names ids out of range, whether the op finds them or, where it cannot, a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recinfer.errors import InputError, UnavailableError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.buffers import Buffers, Placed, whole_table
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.formats.registry import row_format
from recinfer.quant.lookup import PooledLookup
from recinfer.quant.rows import PACKED_TYPES, row_bytes
from recinfer.quant.tbe import TableBatch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = {"a": 10, "b": 1, "c": 77}
BATCH = 3


def tables(kind: type, data_type: DataType, dim: int) -> list:
    return [
        kind(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[f"f{name}"], data_type=data_type)
        for name, rows in ROWS.items()
    ]


def features(bad: int | None = None, at: int = 0, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Bags of 2, 0 and 1 ids of each feature; the id at position ``at`` is ``bad``."""
    ids = torch.zeros(9, dtype=dtype)
    if bad is not None:
        ids[at] = bad
    return KeyedJaggedTensor(["fa", "fb", "fc"], ids, lengths=torch.tensor([2, 0, 1] * 3, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dim", [64, 8, 1])
@pytest.mark.parametrize("data_type", PACKED_TYPES, ids=str)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_every_id_out_of_range_is_refused_and_named(
    pooled: bool, data_type: DataType, dim: int, dtype: torch.dtype
) -> None:
    module: torch.nn.Module
    if pooled:
        module = EmbeddingBagCollection(tables(EmbeddingBagConfig, data_type, dim), False)
    else:
        module = EmbeddingCollection(tables(EmbeddingConfig, data_type, dim))
    module(features(dtype=dtype))
    for table, (name, rows) in enumerate(ROWS.items()):
        for bad in (-1, -2, -(2**31), rows, rows + 1, rows + 1000, 2**31 - 1):
            for sample, place in ((0, 0), (0, 1), (2, 2)):
                with pytest.raises(InputError, match=f"'f{name}', sample {sample}: id {bad} is out of range"):
                    module(features(bad, 3 * table + place, dtype))
        module(features(rows - 1, 3 * table, dtype))


@pytest.mark.parametrize("data_type", PACKED_TYPES, ids=str)
def test_the_op_knows_the_rows_of_a_live_module(data_type: DataType) -> None:
    for dim in (1, 7, 64):
        module = EmbeddingBagCollection(tables(EmbeddingBagConfig, data_type, dim), False)
        if row_format(data_type).fbgemm:
            assert module.tbes()  # registered as before
        else:
            with pytest.raises(UnavailableError, match=f"no TBE module for {data_type} rows"):
                module.tbes()
        assert module._lookup.batch.knows_rows


@pytest.mark.parametrize("gap", [0, 11, 12, 4096])
def test_tables_that_lie_apart_are_compared_instead(gap: int) -> None:
    """A mapped archive begins every table on a page: the op takes the gap for more rows."""
    configs = tables(EmbeddingBagConfig, DataType.INT8, 8)
    width = row_bytes(8, DataType.INT8)
    pieces, at = {}, 0
    for config in configs:
        pieces[config.name] = (replace(whole_table(config), offset=at),)
        at += config.num_embeddings * width + gap
    lookup = PooledLookup(configs, pieces, Buffers(torch.zeros(at, dtype=torch.uint8)))
    assert lookup.batch.knows_rows is (gap < width)
    lookup(features())
    for table, rows in enumerate(ROWS.values()):
        for bad in (-1, rows, rows + 1):
            with pytest.raises(InputError, match=f"id {bad} is out of range"):
                lookup(features(bad, 3 * table + 2))


def test_tables_in_another_order_are_compared() -> None:
    a, b = (Placed(Rect(0, 0, 4, 0, 8, name), DataType.INT8, at) for name, at in (("a", 48), ("b", 0)))
    buffers = Buffers(torch.zeros(96, dtype=torch.uint8))
    assert not TableBatch([a, b], PoolingType.SUM, buffers).knows_rows
    assert TableBatch([b, a, a], PoolingType.SUM, buffers).knows_rows
    assert not TableBatch([b, a, b], PoolingType.SUM, buffers).knows_rows


def test_features_without_ids_do_not_hide_others() -> None:
    configs = tables(EmbeddingBagConfig, DataType.INT8, 8)
    pieces = {c.name: (replace(whole_table(c), offset=4096 * i),) for i, c in enumerate(configs)}
    lookup = PooledLookup(configs, pieces, Buffers(torch.zeros(3 * 4096, dtype=torch.uint8)))
    for lengths in ([0, 0, 1], [1, 0, 0], [0, 1, 0], [1, 0, 1]):
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        good = KeyedJaggedTensor(["fa", "fb", "fc"], ids, lengths=torch.tensor(lengths))
        lookup(good)
        for place in range(len(ids)):
            ids[place] = 77
            with pytest.raises(InputError, match="id 77 is out of range"):
                lookup(good)
            ids[place] = 0
    # 70 is in range for c alone: it must not count for a, which has no ids
    lookup(KeyedJaggedTensor(["fa", "fb", "fc"], torch.tensor([70]), lengths=torch.tensor([0, 0, 1])))


def test_other_dtypes_and_batch_sizes_of_their_own_are_refused() -> None:
    module = EmbeddingBagCollection(tables(EmbeddingBagConfig, DataType.INT8, 8), False)
    with pytest.raises(InputError, match=r"ids: got torch\.int16; expected torch\.int32 or torch\.int64"):
        module(features(dtype=torch.int16))
    ragged = KeyedJaggedTensor(
        ["fa", "fb", "fc"],
        torch.zeros(4, dtype=torch.int64),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    with pytest.raises(InputError, match=r"batch sizes \[1, 2, 1\] and no inverse indices"):
        module(ragged)


@pytest.mark.parametrize("lengths_dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_lengths_of_any_integers_give_the_same(dtype: torch.dtype, lengths_dtype: torch.dtype) -> None:
    module = EmbeddingBagCollection(tables(EmbeddingBagConfig, DataType.FP32, 8), False)
    for name in ROWS:
        module.load_float(name, torch.randn(ROWS[name], 8))
    given = features(dtype=dtype)
    want = module(given).values()
    other = KeyedJaggedTensor(given.keys(), given.values(), lengths=given.lengths().to(lengths_dtype))
    assert torch.equal(module(other).values(), want)
    many = KeyedJaggedTensor(
        given.keys(), torch.zeros(70_000, dtype=dtype), lengths=torch.tensor([30_000, 0, 40_000], dtype=torch.int32)
    )
    assert module(many).values().shape == (1, 24)
