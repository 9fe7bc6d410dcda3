"""Copies of ids from the host to a kernel: buckets, their padding and their limits, in Triton's interpreter.

On CPU a bucket runs what a GPU would record; tests/gpu compares the recordings themselves.
"""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant import cuda_graphs
from recinfer.quant.cuda_graphs import Bucket, GraphedLookups, bucket_of, padded_offsets
from recinfer.quant.host_inputs import Staging

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
from recinfer.quant.triton_batch import TritonBatch
from tests.quant.test_triton import DEVICE, ROWS, bags, placed_in_memory

CPU = torch.device("cpu")
SUM, NONE = PoolingType.SUM, PoolingType.NONE
TABLES = [(DataType.INT8, 8), (DataType.INT4, 12), (DataType.FP16, 4)]


@pytest.mark.parametrize(
    ("batch", "ids", "found"),
    [
        (1, 0, (1, 64)),
        (1, 64, (1, 64)),
        (3, 65, (4, 128)),
        (256, 16384, (256, 16384)),
        (0, 5, None),
        (257, 5, None),
        (5, 16385, None),
    ],
)
def test_sizes_are_rounded_up_to_buckets(batch: int, ids: int, found: tuple[int, int] | None) -> None:
    assert bucket_of(batch, ids, True) == (None if found is None else Bucket(*found, True))


@pytest.mark.parametrize(("keys", "batch", "padded"), [(1, 1, 1), (3, 3, 4), (2, 5, 8), (4, 1, 2)])
def test_bags_that_a_bucket_has_too_many_are_empty(keys: int, batch: int, padded: int) -> None:
    _, offsets, _ = bags(keys, batch, 1)
    found = padded_offsets(offsets, keys, batch, padded)
    assert found.numel() == keys * padded + 1
    lengths = found.diff().view(keys, padded)
    assert torch.equal(lengths[:, :batch], offsets.diff().view(keys, batch)) and not lengths[:, batch:].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_staging_brings_what_it_is_given_and_grows(dtype: torch.dtype) -> None:
    staging = Staging(CPU)
    for batch, weighted in ((2, False), (50, True), (1, True), (3, False), (0, False)):
        ids, offsets, weights = bags(2, batch, batch, dtype)
        got = staging.to_device(ids, offsets, weights if weighted else None)
        assert torch.equal(got[0], ids.long()) and torch.equal(got[1], offsets.long())
        assert got[2] is None if not weighted else got[2] is not None and torch.equal(got[2], weights)
        staging.record_lookup()


def made(pooling: PoolingType = SUM, tables: list[tuple[DataType, int]] = TABLES) -> TritonBatch:
    buffers, placed, _ = placed_in_memory(tables, 16)
    return TritonBatch(placed, pooling, buffers)


def on_device(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "staging"])
@pytest.mark.parametrize("pooling", [SUM, NONE], ids=lambda p: p.value)
def test_ids_from_the_host_give_what_ids_on_the_device_do(pooling: PoolingType, graphs: bool) -> None:
    batch = made(pooling, TABLES if pooling is SUM else [(DataType.INT8, 8)] * 2)
    batch._graphs = graphs
    kept = []
    for size in (1, 3, 4, 300 if pooling is SUM else 9, 2, 3):
        ids, offsets, weights = bags(len(batch.reads), size, size, torch.int32)
        given = weights if pooling is SUM and size != 4 else None
        want = batch.forward(*on_device(ids, offsets, given))
        got = batch._of_host(ids, offsets, given, size)
        kept.append((got, want))
    for got, want in kept:  # none was overwritten by a later one
        assert torch.equal(got if pooling is SUM else got[0], want)
    sizes = batch._own.graphs and sorted(found[:2] for found in batch._own.graphs._by_bucket)
    assert sizes == ([(1, 64), (2, 64), (4, 64), (4, 64)] if graphs and pooling is SUM else None)


def test_there_are_no_more_buckets_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 2)
    graphs = GraphedLookups(lambda *given: None, 1, 4, torch.float32, CPU)
    ids, offsets = torch.tensor([0]), {size: torch.arange(size + 1).clamp(max=1) for size in (1, 2, 4)}
    for size, there in ((1, True), (2, True), (4, False), (1, True)):
        assert (graphs(ids, offsets[size], None, size) is not None) is there
    assert len(graphs) == 2


def test_a_recording_that_fails_ends_them_all_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def run(*given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = GraphedLookups(run, 1, 4, torch.float32, CPU)
    graphs._make = lambda bucket: run()  # on CPU nothing is recorded, so nothing fails then
    with caplog.at_level(logging.WARNING):
        for size in (1, 2, 1):
            assert graphs(torch.tensor([0]), torch.arange(size + 1), None, size) is None
    assert [r.getMessage().count("without CUDA graphs") for r in caplog.records] == [1]


def test_ids_out_of_range_raise_at_a_later_lookup_and_once() -> None:
    batch = made()
    good, offsets = torch.zeros(3, dtype=torch.int64), torch.arange(4)
    batch.forward(*on_device(good, offsets))
    out = batch.forward(*on_device(torch.tensor([ROWS, 1, -1]), offsets))
    assert not out[:, :8].any() and out[:, 8:20].any()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(
        InputError, match=r"earlier lookup .* 1 of table 't0' \(rows 0 to 36\), 1 of table 't2'.*ids on the host"
    ):
        batch.forward(*on_device(good, offsets))
    assert batch.forward(*on_device(good, offsets)).any()
    assert batch.out_of_range() == [0, 0, 0]
    batch.forward(*on_device(torch.tensor([0, ROWS + 5, 2**40]), offsets))
    assert batch.out_of_range() == [0, 1, 1]
    batch.forward(*on_device(good, offsets))


def test_a_copy_starts_with_nothing_under_way() -> None:
    batch = made()
    ids, offsets, _ = bags(3, 2, 1)
    want = batch._of_host(ids, offsets, None, 2)
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert other._own.graphs is None and other._sent_counts is None
        assert torch.equal(other._of_host(ids, offsets, None, 2), want)
