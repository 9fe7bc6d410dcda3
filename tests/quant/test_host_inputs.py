"""Copies of ids from the host to a kernel: buckets, their padding and their limits, in Triton's interpreter.

On CPU a bucket runs what a GPU would record; tests/gpu compares the recordings themselves.
"""

from __future__ import annotations

import copy
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant import cuda_graphs
from recinfer.quant.cuda_graphs import GraphedLookups, buckets_for, padded_offsets
from recinfer.quant.host_inputs import Staging

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
from recinfer.quant.triton_batch import TritonBatch
from tests.quant.test_triton import DEVICE, ROWS, bags, placed_in_memory

CPU = torch.device("cpu")
SUM, NONE = PoolingType.SUM, PoolingType.NONE
TABLES = [(DataType.INT8, 8), (DataType.INT4, 12), (DataType.FP16, 4)]


@pytest.mark.parametrize(
    ("keys", "batch", "room"),
    [
        (3, 1, [64, 512, 4096, 16384]),
        (26, 1, [64, 512, 4096, 16384]),
        (26, 32, [2048, 16384]),
        (26, 256, [16384]),
        (200, 1, [512, 4096, 16384]),
        (20000, 1, [16384]),
    ],
)
def test_there_are_buckets_for_few_and_for_many_ids(keys: int, batch: int, room: list[int]) -> None:
    buckets = buckets_for(keys, True)
    assert [each.ids for each in buckets if each.batch == batch] == room
    assert sorted({each.batch for each in buckets}) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert buckets == sorted(buckets) and len(buckets) <= 36  # the first that takes a lookup is the smallest


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


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of at most 4 samples and 512 ids: the interpreter takes long for more."""
    monkeypatch.setattr(cuda_graphs, "_MOST_BATCH", 4)
    monkeypatch.setattr(cuda_graphs, "_MOST_IDS", 512)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "staging"])
def test_ids_from_the_host_give_what_ids_on_the_device_do(few: None, graphs: bool) -> None:
    batch = made(SUM, TABLES)
    if not graphs:
        batch.graphs = None
    kept = []
    for size in (1, 3, 4, 9, 2, 3):
        ids, offsets, weights = bags(len(batch.reads), size, size, torch.int32)
        given = weights if size != 4 else None
        want = batch.forward(*on_device(ids, offsets, given))
        got = batch._of_host(ids, offsets, given, size)
        kept.append((got, want))
    for got, want in kept:  # none was overwritten by a later one
        assert torch.equal(got, want)
    sizes = batch.graphs and [each.bucket[:2] for each in batch.graphs._recorded or ()]
    expected = [(1, 64), (1, 512), (2, 64), (2, 512), (4, 64), (4, 512)]
    assert sizes == (expected if graphs else None)
    assert batch.out_of_range() == [0] * len(batch.reads)  # the trial's ids are in range


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "staging"])
def test_a_first_lookup_in_inference_mode_leaves_later_ones_free(few: None, graphs: bool) -> None:
    """Its memory stays, and torch refuses to write an inference tensor outside of the mode."""
    batch = made()
    if not graphs:
        batch.graphs = None
    ids, offsets, _ = bags(len(batch.reads), 3, 1)
    with torch.inference_mode():
        first = batch._of_host(ids, offsets, None, 3)
    assert torch.equal(batch._of_host(ids, offsets, None, 3), first)


def test_unpooled_ids_from_the_host_give_what_ids_on_the_device_do() -> None:
    batch = made(NONE, TABLES)
    assert batch.graphs is None
    kept: list[tuple[Tensor, Tensor]] = []
    for size in (1, 3, 9, 2):
        ids, offsets, _ = bags(len(batch.reads), size, size, torch.int32)
        edges = offsets[::size].tolist()
        kept += zip(batch.rows_per_read(ids, offsets, edges), batch.rows_per_read(*on_device(ids, offsets), edges))
    assert all(torch.equal(of_host, of_device) for of_host, of_device in kept)  # none was overwritten by a later one
    assert batch.out_of_range() == [0] * len(batch.reads)


def fill(ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int, out: Tensor) -> None:
    """A lookup that gives the sum of all ids everywhere."""
    out.fill_(float(ids[: int(offsets[-1])].sum()))


def test_what_does_not_fit_a_bucket_is_launched(few: None) -> None:
    graphs = GraphedLookups(fill, 1, 4, torch.float32, 5, CPU)
    ids, weights = torch.tensor([3]), torch.ones(1)
    assert graphs(ids[:0], torch.zeros(1, dtype=torch.int64), None, 0) is None and not len(graphs)
    for count, fits in ((1, True), (64, True), (65, True), (512, True), (513, False)):
        found = graphs(ids.expand(count), torch.tensor([0, count]), None, 1)
        assert (found is not None and found.tolist() == [[3.0 * count] * 4]) is fits
    assert graphs(ids, torch.tensor([0, 1]), weights, 1) is None
    assert graphs(ids, torch.arange(6).clamp(max=1), None, 5) is None
    assert len(graphs) == 6


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "without CUDA graphs" in r.getMessage()]


def test_a_recording_that_fails_ends_them_all_with_one_warning(few: None, caplog: pytest.LogCaptureFixture) -> None:
    def run(*given: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = GraphedLookups(run, 1, 4, torch.float32, 5, CPU)
    with caplog.at_level(logging.WARNING):
        for size in (1, 2, 1):
            assert graphs(torch.tensor([0]), torch.arange(size + 1).clamp(max=1), None, size) is None
    assert len(messages(caplog)) == 1 and "not permitted when stream is capturing" in messages(caplog)[0]


def test_a_replay_with_other_bits_ends_them_all_with_one_warning(
    few: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a graph that did not record the copy of the ids, or not the kernel."""

    def nothing(recorded: Any) -> None:
        recorded._out[:, 1] = 3.0

    monkeypatch.setattr(cuda_graphs._Recorded, "_replay", nothing)
    graphs = GraphedLookups(fill, 1, 4, torch.float32, 5, CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert graphs(torch.tensor([0]), torch.tensor([0, 1]), None, 1) is None
    assert len(messages(caplog)) == 1 and "other vectors" in messages(caplog)[0]


def test_threads_take_turns_with_a_graph(few: None) -> None:
    """With a lookup in torch: the interpreter runs one at a time."""
    graphs = GraphedLookups(fill, 1, 4, torch.float32, 5, CPU)

    def ask(turn: int) -> bool:
        found = graphs(torch.tensor([turn]), torch.tensor([0, 1]), None, 1)
        return found is not None and found.tolist() == [[float(turn)] * 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(400)))
    assert len(graphs) == 6


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


def test_a_copy_starts_with_nothing_under_way(few: None) -> None:
    batch = made()
    ids, offsets, _ = bags(3, 2, 1)
    want = batch._of_host(ids, offsets, None, 2)
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert other.graphs is not None and not len(other.graphs) and other._sent_counts is None
        assert torch.equal(other._of_host(ids, offsets, None, 2), want)
