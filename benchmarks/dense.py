"""Measures a DLRM's dense part in onnxruntime with its interactions gathered as columns, and as rows, as an archive has it.

    OMP_NUM_THREADS=1 python -m benchmarks.dense                      # half a minute
    OMP_NUM_THREADS=1 python -m benchmarks.dense --features 40 --dim 64 --over 512 256 1

One thread; medians of the turns. See recinfer.archive.onnx_rewrites.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from recinfer.archive.onnx_rewrites import gather_rows
from recinfer.models.dlrm import InteractionArch, OverArch


class Dense(nn.Module):
    """Interactions and top MLP."""

    def __init__(self, features: int, dim: int, over: list[int]) -> None:
        super().__init__()
        self.interactions = InteractionArch(features)
        self.over = OverArch(dim + features * (features + 1) // 2, over)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, 1]``."""
        return self.over(self.interactions(dense, sparse))


def exported(model: nn.Module, features: int, dim: int) -> Any:
    """The ONNX model as torch exports it."""
    batch = torch.export.Dim("batch")
    inputs = torch.randn(5, dim), torch.randn(5, features, dim)
    shapes = {0: batch}, {0: batch}
    program = torch.onnx.export(model, inputs, dynamo=True, opset_version=18, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    return program.model_proto


def session(model: Any) -> onnxruntime.InferenceSession:
    """An onnxruntime session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=int, default=26)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--over", type=int, nargs="+", default=[64, 1], help="layer sizes of the top MLP")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256, 1024])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    columns = exported(Dense(options.features, options.dim, options.over).eval(), options.features, options.dim)
    rows = copy.deepcopy(columns)
    assert gather_rows(rows) == 1
    sessions = {"columns": session(columns), "rows": session(rows)}
    for batch in options.batches:
        values = torch.randn(batch, options.dim).numpy(), torch.randn(batch, options.features, options.dim).numpy()
        seconds: dict[str, list[float]] = {name: [] for name in sessions}
        answers: dict[str, Any] = {}
        for turn in range(options.turns + 1):  # the first one warms up
            for name, each in sessions.items():
                feed = dict(zip([item.name for item in each.get_inputs()], values))
                runs, start = max(20, 4000 // batch), time.perf_counter()
                for _ in range(runs):
                    (answers[name],) = each.run(None, feed)
                if turn:
                    seconds[name].append((time.perf_counter() - start) / runs)
        line = ", ".join(f"{name} {statistics.median(seconds[name]) * 1e6:7.1f} us" for name in sessions)
        same = "the same bits" if (answers["columns"] == answers["rows"]).all() else "close"
        print(f"batch {batch:5}: {line}; rows {same}", flush=True)


if __name__ == "__main__":
    main()
