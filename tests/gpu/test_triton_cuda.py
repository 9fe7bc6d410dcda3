"""The Triton kernel on a GPU: CUDA graphs, and lookups without synchronization. Not yet run on a GPU.

Needs torch, Triton, numpy and pytest alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from recinfer.errors import InputError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant import cuda_graphs
from recinfer.quant.buffers import Memory, Placed, allocate
from recinfer.quant.cuda_graphs import buckets_for
from recinfer.quant.reference import reference_lookup
from recinfer.quant.triton_batch import TritonBatch
from tests.quant.test_triton import ROWS, bags, packed, placed_in_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


_kept: list[torch.cuda.CUDAGraph] = []  # see recinfer.quant.cuda_graphs._failed


def made(*, graphs: bool, pooling: PoolingType = PoolingType.SUM) -> TritonBatch:
    tables = [(DataType.INT8, 64), (DataType.INT4, 64), (DataType.FP16, 64)]
    buffers, placed, _ = placed_in_memory(tables, 16)
    batch = TritonBatch(placed, pooling, buffers)
    if not graphs:
        batch.graphs = None
    return batch


@pytest.mark.parametrize("weighted", [False, True])
def test_a_replayed_graph_gives_what_a_launch_does(weighted: bool) -> None:
    graphed, launched = made(graphs=True), made(graphs=False)
    kept = []
    for size in (1, 2, 3, 32, 200, 256, 257, 3):  # 257 is too large for a graph, the last the second use of one
        ids, offsets, weights = bags(3, size, size)
        given = weights if weighted else None
        kept.append((graphed.forward(ids, offsets, given), launched.forward(ids, offsets, given)))
    for mine, its in kept:  # after all: none was overwritten by a later replay
        assert torch.equal(mine, its)
    assert graphed.graphs is not None and len(graphed.graphs) == len(buckets_for(3, weighted))
    assert all(found._graph is not None for found in graphed.graphs._recorded or ())
    assert graphed.out_of_range() == [0, 0, 0] and not cuda_graphs._failed


def test_threads_share_graphs_and_have_other_memory_of_their_own() -> None:
    batch = made(graphs=True)
    expected = {size: made(graphs=False).forward(*bags(3, size, size)[:2]).cpu() for size in (1, 7, 300)}

    def ask(turn: int) -> bool:
        size = (1, 7, 300)[turn % 3]
        return torch.equal(batch.forward(*bags(3, size, size)[:2]).cpu(), expected[size])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(200)))


def test_lookups_of_other_threads_go_on_while_graphs_are_recorded() -> None:
    """As while a delta is applied. These lookups are too large for a graph, so each copies its ids on a stream of its own."""
    batch, given = made(graphs=True), bags(3, 300, 1)[:2]
    want = batch.forward(*given).cpu()

    def ask(turns: int) -> bool:
        return all(torch.equal(batch.forward(*given).cpu(), want) for _ in range(turns))

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, 300) for _ in range(3)]
        for _ in range(3):
            new = made(graphs=True)
            new.forward(*bags(3, 1, 1)[:2])
            assert new.graphs is not None and len(new.graphs)
        assert all(each.result() for each in asked)
    assert not cuda_graphs._failed


def test_a_recording_that_the_device_refuses_leaves_launched_lookups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait for the device while a graph is recorded is an error of CUDA, and ends the recording."""
    monkeypatch.setattr(cuda_graphs, "_failed", [])
    batch, want = made(graphs=True), made(graphs=False)
    assert batch.graphs is not None
    graph_of = cuda_graphs._graph_of

    def waiting(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return graph_of(lambda: (run(), torch.cuda.current_stream().synchronize()))  # type: ignore[func-returns-value]

    monkeypatch.setattr(cuda_graphs, "_graph_of", waiting)
    before = torch.cuda.current_stream()
    for size in (1, 3, 1):
        ids, offsets, _ = bags(3, size, size)
        assert torch.equal(batch.forward(ids, offsets), want.forward(ids, offsets))
    assert len(batch.graphs) == 0 and len(cuda_graphs._failed) == 1
    assert sum("without CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
    _kept.extend(cuda_graphs._failed)
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20


def test_a_lookup_of_ids_on_the_device_waits_for_nothing() -> None:
    batch = made(graphs=False)
    ids, offsets, _ = (tensor.cuda() for tensor in bags(3, 50, 1))
    batch.forward(ids, offsets)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            batch.forward(ids, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch.forward(torch.full_like(ids, ROWS), offsets)
    torch.cuda.synchronize()
    with pytest.raises(InputError, match="an earlier lookup had ids out of range"):
        batch.forward(ids, offsets)


@pytest.mark.parametrize("memory", ["managed", "cached"])
def test_the_kernel_reads_rows_in_host_memory(memory: Memory) -> None:
    wanted = [
        Placed(Rect(0, 0, ROWS, 0, 64, name), DataType.INT8, memory=kind)
        for name, kind in (("a", "near"), ("b", memory))
    ]
    buffers, placed = allocate(wanted, torch.device("cuda", 0))
    for spot in placed:
        buffers.write(spot, packed(DataType.INT8, 64, 1))
    assert buffers.managed is not None and buffers.managed.is_pinned()
    batch = TritonBatch(placed, PoolingType.SUM, buffers)
    for size in (1, 40, 40, 700):
        ids, offsets, _ = bags(1, size, size)
        out = batch.forward(torch.cat([ids, ids]), torch.cat([offsets, offsets[1:] + len(ids)]))
        assert torch.equal(out[:, :64], out[:, 64:]) and bool(out.any()) is (len(ids) > 0)


def test_rows_beyond_four_gibibytes() -> None:
    rows, dim = 40_000_000, 128  # of 144 bytes on a GPU
    buffers, (table,) = allocate([Placed(Rect(0, 0, rows, 0, dim, "t"), DataType.INT8)], torch.device("cuda", 0))
    ids, two = torch.tensor([20_000_000, rows - 1]), packed(DataType.INT8, dim, 7, 2)
    for there, row in zip(ids.tolist(), two):
        buffers.rows(table)[there, : len(row)].copy_(row)
    out = TritonBatch([table], PoolingType.SUM, buffers).forward(ids.cuda(), torch.arange(3).cuda())
    want = reference_lookup(two, dim, DataType.INT8, torch.tensor([0, 1]), torch.arange(3), PoolingType.NONE)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-6, atol=1e-6)
