"""An archive served from a GPU: rows re-padded while they are copied, the same answers as from the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import load
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.triton_batch import TritonBatch
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request
from tests.inference.test_delta import changed, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_a_gpu_answers_as_the_cpu_does(tmp_path: Path, precision: DataType) -> None:
    model, archive = make_archive(tmp_path, precision=precision, ranks=1, kinds=("table_wise",))
    cpu, gpu = load(archive.root), load(archive.root, device="cuda")
    request = make_request(RANKER_ROWS, 33, seed=9)
    dense = torch.ones(33, NUM_DENSE)

    def same() -> None:
        mine, theirs = gpu.lookup(request).pooled, cpu.lookup(request).pooled
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine.values(), theirs.values())
        torch.testing.assert_close(gpu.predict(dense, request)["output"], cpu.predict(dense, request)["output"])

    same()
    new = changed(model, 1)
    make_delta(archive.root, new, save(new, tmp_path / "new.pt"), tmp_path / "d.rqd", progress=False)
    for predictor in (cpu, gpu):
        predictor.apply_delta(tmp_path / "d.rqd")
    same()
    for predictor in (cpu, gpu):
        predictor.undo_delta()
    same()


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16])
def test_the_triton_kernel_answers_as_the_cpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: DataType
) -> None:
    _, archive = make_archive(tmp_path, precision=precision, ranks=1, kinds=("table_wise",))
    cpu = load(archive.root)
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    gpu = load(archive.root, device="cuda")
    assert isinstance(gpu._state.lookups.parts[0].run.__self__.batch, TritonBatch)
    for batch in (1, 33, 2048):
        request, dense = make_request(RANKER_ROWS, batch, seed=9), torch.ones(batch, NUM_DENSE)
        torch.testing.assert_close(gpu.predict(dense, request)["output"], cpu.predict(dense, request)["output"])


def test_one_predict_waits_for_the_gpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense input, the ids and the vectors cross or stay without a wait; the outputs come back together."""
    _, archive = make_archive(tmp_path, precision=DataType.INT8, ranks=1, kinds=("table_wise",))
    monkeypatch.setenv("RECINFER_KERNEL", "triton")
    gpu = load(archive.root, device="cuda")
    request, dense = make_request(RANKER_ROWS, 33, seed=9), torch.ones(33, NUM_DENSE)
    want = gpu.predict(dense, request)["output"]
    try:
        torch.cuda.set_sync_debug_mode("error")  # the wait for an event, which is how outputs are awaited, is no error
        got = gpu.predict(dense, request)["output"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want) and got.is_pinned()
