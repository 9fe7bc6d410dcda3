"""An archive on a GPU by the Triton kernel. Never run yet: no GPU was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recinfer
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.triton_batch import TritonBatch
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request

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
