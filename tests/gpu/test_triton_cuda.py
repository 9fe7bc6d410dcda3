"""The Triton kernel on a GPU: an archive, CUDA graphs, and lookups without synchronization. Not yet run on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import recinfer
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.cuda_graphs import bucket_of
from recinfer.quant.triton_batch import TritonBatch
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request
from tests.quant.test_triton import ROWS, bags, placed_in_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_a_gpu_answers_as_the_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: DataType) -> None:
    _, archive = make_archive(tmp_path, precision=precision, ranks=1, kinds=("table_wise",))
    cpu = recinfer.load(archive.root)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    gpu = recinfer.load(archive.root, device="cuda")
    assert isinstance(gpu._state.lookups.parts[0].run.__self__.batch, TritonBatch)
    for batch in (1, 33, 2048):
        request, dense = make_request(RANKER_ROWS, batch, seed=9), torch.ones(batch, NUM_DENSE)
        torch.testing.assert_close(gpu.predict(dense, request)["output"], cpu.predict(dense, request)["output"])


def made(*, graphs: bool, pooling: PoolingType = PoolingType.SUM) -> TritonBatch:
    tables = [(DataType.INT8, 64), (DataType.INT4, 64), (DataType.FP16, 64)]
    buffers, placed, _ = placed_in_memory(tables, 16)
    batch = TritonBatch(placed, pooling, buffers)
    batch._graphs = graphs
    return batch


@pytest.mark.parametrize("weighted", [False, True])
def test_a_replayed_graph_gives_what_a_launch_does(weighted: bool) -> None:
    graphed, launched = made(graphs=True), made(graphs=False)
    kept = []
    for size in (
        1,
        2,
        3,
        32,
        200,
        256,
        257,
        3,
    ):  # the last but one is too large for a graph, the last a bucket's second use
        ids, offsets, weights = bags(3, size, size)
        given = weights if weighted else None
        kept.append((graphed.forward(ids, offsets, given), launched.forward(ids, offsets, given)))
    for mine, its in kept:  # after all: none was overwritten by a later replay
        assert torch.equal(mine, its)
    sizes = {bucket_of(size, bags(3, size, size)[0].numel(), weighted) for size in (1, 2, 3, 32, 200, 256)}
    assert graphed._own.graphs is not None and len(graphed._own.graphs) == len(sizes)
    assert all(found._graph is not None for found in graphed._own.graphs._by_bucket.values())


def test_threads_have_graphs_and_memory_of_their_own() -> None:
    batch = made(graphs=True)
    expected = {size: made(graphs=False).forward(*bags(3, size, size)[:2]).cpu() for size in (1, 7, 300)}

    def ask(turn: int) -> bool:
        size = (1, 7, 300)[turn % 3]
        return torch.equal(batch.forward(*bags(3, size, size)[:2]).cpu(), expected[size])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(200)))


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
