"""The compiled loop as the kernel of a batch: FBGEMM's vectors bit for bit, of the rows that both have."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from recinfer.quant._tables import sum_bags

from recinfer.errors import ConfigError, UnavailableError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Buffers, Placed, allocate
from recinfer.quant.compiled_batch import CompiledBatch
from recinfer.quant.kernels import table_batch
from recinfer.quant.lookup import SequenceTables
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import unpack_rows
from recinfer.quant.tbe import TableBatch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

HALVES = [DataType.FP16, DataType.FP32]
INTEGERS = [DataType.INT8, DataType.INT4, DataType.INT2]
CPU = torch.device("cpu")


def placed(types: list[DataType], widths: list[int], rows: int = 70) -> tuple[Buffers, list[Placed]]:
    """Random tables; the first row of those that have it is -0.0, which looked up is 0.0."""
    torch.manual_seed(len(widths))
    shapes = [Placed(Rect(0, 0, rows, 0, w, f"t{i}"), types[i % len(types)]) for i, w in enumerate(widths)]
    buffers, tables = allocate(shapes, CPU)
    for table in tables:
        weight = torch.randn(rows, table.rect.cols)
        if table.data_type in HALVES:
            weight[0] = -0.0
        buffers.write(table, pack_rows(weight, table.data_type))
    return buffers, tables


def bags(
    features: int, batch: int, longest: int, dtype: torch.dtype = torch.int64, rows: int = 70
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, longest + 1, (features * batch,))
    ids = torch.randint(0, rows, (int(lengths.sum()),), dtype=dtype)
    return ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("types", [HALVES, INTEGERS, [*INTEGERS, *HALVES]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_and_means(
    types: list[DataType], pooling: PoolingType, dtype: torch.dtype, output_dtype: torch.dtype
) -> None:
    buffers, tables = placed(types, [8, 16, 32, 64, 128, 20, 4])
    ids, offsets = bags(7, 9, 30, dtype)
    mine = CompiledBatch(tables, pooling, buffers, output_dtype=output_dtype)
    theirs = TableBatch(tables, pooling, buffers)
    for weights in (None, torch.rand(len(ids)) - 0.5):
        if weights is not None and types is not HALVES:
            continue  # FBGEMM multiplies the scale by the weight
        # FBGEMM itself rounds halves up to bfloat16; torch and the loop round them to even.
        assert torch.equal(mine(ids, offsets, weights), theirs(ids, offsets, weights).to(output_dtype))


@pytest.mark.parametrize("data_type", [*INTEGERS, *HALVES], ids=str)
def test_single_rows(data_type: DataType) -> None:
    buffers, tables = placed([data_type], [16, 16, 16])
    ids, offsets = bags(3, 11, 4)
    ids[: len(ids) // 3] = 0
    edges = offsets[::11].tolist()
    mine = CompiledBatch(tables, PoolingType.NONE, buffers)
    theirs = TableBatch(tables, PoolingType.NONE, buffers)
    for a, b in zip(mine.rows_per_read(ids, offsets, edges), theirs.rows_per_read(ids, offsets, edges), strict=True):
        assert torch.equal(a.view(torch.int32), b.contiguous().view(torch.int32))
    assert torch.equal(mine(ids, offsets), torch.cat(mine.rows_per_read(ids, offsets, edges)))


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("types", [[DataType.BF16], [DataType.INT8, DataType.BF16, DataType.FP16]], ids=str)
def test_bfloat16_rows(types: list[DataType], weighted: bool, pooling: PoolingType) -> None:
    """The reference is FBGEMM over the weights that torch rounds to bfloat16, infinities and NaN among them."""
    buffers, tables = placed(types, [8, 16, 32, 64, 128, 20, 5])
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.3e38, 2**-133])
    for table in tables:
        if table.data_type is DataType.BF16:
            buffers.rows(table)[1, : 2 * min(8, table.rect.cols)] = odd.bfloat16().view(torch.uint8)[
                : 2 * table.rect.cols
            ]
    ids, offsets = bags(7, 9, 12)
    weights = torch.rand(len(ids)) - 0.5 if weighted else None
    mine = table_batch(tables, pooling, buffers)
    assert isinstance(mine, CompiledBatch)
    with pytest.raises(UnavailableError, match="no TBE module for BF16 rows"):
        mine.fbgemm_module()
    values, wide = allocate([replace(t, data_type=DataType.FP32) for t in tables], CPU)
    for table, there in zip(tables, wide):
        rows = unpack_rows(buffers.rows(table), table.rect.cols, table.data_type)
        values.write(there, rows.view(torch.uint8))
    expected = TableBatch(wide, pooling, values)(ids, offsets, weights)
    found, starts = mine.without_padding(mine(ids, offsets, weights)), [0]
    for table in tables:
        span = slice(starts[-1], starts[-1] + table.rect.cols)
        starts.append(span.stop)
        if table.data_type is DataType.BF16:
            assert torch.equal(found[:, span].nan_to_num(7e7), expected[:, span].nan_to_num(7e7))
            assert torch.equal(found[:, span].isnan(), expected[:, span].isnan())
        else:
            torch.testing.assert_close(found[:, span], expected[:, span], rtol=1e-5, atol=1e-5)
    assert bool(found.isnan().any())


def test_bfloat16_sequences_beside_others() -> None:
    buffers, tables = placed([DataType.BF16, DataType.INT8], [16, 16, 16])
    keys = ["a", "b", "c"]
    lengths = torch.randint(0, 4, (3 * 11,))
    ids = torch.randint(0, 70, (int(lengths.sum()),))
    features = KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths)
    sequences = SequenceTables(tables, None, buffers)
    assert len(sequences.calls) == 2
    edges = features.offset_per_key()
    for at, (table, rows) in enumerate(zip(tables, sequences(features), strict=True)):
        of_key = ids[edges[at] : edges[at + 1]]
        whole = unpack_rows(buffers.rows(table), 16, table.data_type)
        torch.testing.assert_close(rows, whole[of_key], rtol=0, atol=0 if table.data_type is DataType.BF16 else 1e-6)


def test_minus_one_is_no_row_and_other_ids_are_refused() -> None:
    buffers, tables = placed([DataType.FP16], [8, 8])
    ids, offsets = torch.tensor([3, -1, 5, 69]), torch.tensor([0, 3, 4])
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        mine, theirs = CompiledBatch(tables, pooling, buffers), TableBatch(tables, pooling, buffers)
        assert mine.knows_rows and theirs.knows_rows
        assert torch.equal(mine(ids, offsets), theirs(ids, offsets))
        for bad in (70, -2, 2**40, -(2**63)):
            wrong = ids.clone()
            wrong[2] = bad
            with pytest.raises(RuntimeError, match="beyond the rows"):
                mine(wrong, offsets)
    for wrong_offsets in ([0, 5, 4], [0, 3, 5], [-1, 3, 4]):
        with pytest.raises(RuntimeError, match="offsets are not in order"):
            mine(ids, torch.tensor(wrong_offsets))


def test_copies_and_empty_batches() -> None:
    buffers, tables = placed(HALVES, [8, 16])
    ids, offsets = bags(2, 5, 3)
    batch = CompiledBatch(tables, PoolingType.MEAN, buffers)
    expected = batch(ids, offsets)
    for again in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(again(ids, offsets), expected)
    assert batch(ids[:0], torch.zeros(1, dtype=torch.int64)).shape == (0, 24)
    assert not batch(ids[:0], torch.zeros(11, dtype=torch.int64)).any()
    assert torch.equal(batch.traced(ids, offsets), expected)


def test_what_a_batch_refuses() -> None:
    buffers, tables = placed(HALVES, [8, 16])
    with pytest.raises(ConfigError, match="output_dtype"):
        CompiledBatch(tables, PoolingType.SUM, buffers, output_dtype=torch.int32)
    with pytest.raises(ConfigError, match="one width"):
        CompiledBatch(tables, PoolingType.NONE, buffers)


def test_the_loop_refuses_arrays_of_another_size() -> None:
    buffer, out = np.zeros(64, np.uint8), np.zeros((2, 8), np.float32)
    piece, step = np.array([(0, 4, 16, 8, 4, 0)], np.int64), np.zeros((1, 3), np.int64)
    ids, offsets = np.zeros(3, np.int64), np.array([0, 1, 3])
    good = (buffer, piece, step, ids, offsets, None, 2, 8, out)
    assert sum_bags(*good) is True
    for at, wrong in (
        (0, buffer[:63]),
        (1, np.array([(0, 4, 16, 8, 99, 0)], np.int64)),
        (2, np.array([(1, 0, 0)], np.int64)),
        (2, np.array([(0, 0, 1)], np.int64)),
        (3, ids.astype(np.int16)),
        (4, offsets[:2]),
        (4, None),
        (5, np.zeros(2, np.float32)),
        (5, np.zeros(3, np.float64)),
        (6, 3),
        (6, -1),
        (7, 9),
        (8, out[:1]),
    ):
        with pytest.raises(ValueError, match="sum_bags"):
            sum_bags(*good[:at], wrong, *good[at + 1 :])
    with pytest.raises(ValueError, match="sum_bags"):
        sum_bags(buffer, piece, step, ids[:0], offsets[:0], None, 0, 8, out[:0])  # no bag has one offset
