"""Compares the served Predict of an archive on a device and on the CPU: part of ``tools/gpu_trial.py``.

Needs what serving needs (grpcio, protobuf ...); without it the part says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recinfer import fbgemm  # noqa: E402
from recinfer.errors import RecinferError, UnavailableError  # noqa: E402

FEATURES, DENSE, DIM = 26, 13, 64


def served_predictions(
    device: torch.device, batches: list[int], rows: int, seconds: float, callers: tuple[int, ...] = (1, 8)
) -> Iterator[dict[str, Any]]:
    """A line per server, batch and number of callers: a DLRM of 26 tables in INT8, one id per feature.

    The servers, each a process of its own on loopback: the Triton kernel on ``device`` (the interpreter's in a trial on the CPU),
    and the CPU's default. One that does not start gives a line with its error.
    """
    from recinfer.serving.bench import measure_load
    from recinfer.serving.server_process import served

    with tempfile.TemporaryDirectory(prefix="recinfer-gpu-trial-") as folder:
        archive = built_apart(Path(folder), rows)
        for name, kernel, kind in (("triton", "triton", device.type), ("cpu server", None, "cpu")):
            try:
                with kernel_of_children(kernel), served(archive, "--device", kind) as target:
                    for batch in batches:
                        results = measure_load(
                            target, call="predict", concurrency=callers, duration=seconds, batch=batch
                        )
                        for result in results:
                            yield {
                                "server": name,
                                "batch": batch,
                                "callers": result.concurrency,
                                "requests_a_second": result.rate,
                                "p50_seconds": result.percentile(50),
                                "p99_seconds": result.percentile(99),
                                "errors": result.errors,
                            }
            except RecinferError as error:
                yield {"server": name, "error": str(error)}


@contextmanager
def kernel_of_children(name: str | None) -> Iterator[None]:
    """Inside, processes that start look rows up with this kernel; None: with their default."""
    before = os.environ.pop("RECINFER_KERNEL", None)
    if name is not None:
        os.environ["RECINFER_KERNEL"] = name
    try:
        yield
    finally:
        os.environ.pop("RECINFER_KERNEL", None)
        if before is not None:
            os.environ["RECINFER_KERNEL"] = before


def built_apart(folder: Path, rows: int) -> Path:
    """:func:`build` in a process of its own: without FBGEMM recinfer's kernel checks the archive, in the interpreter."""
    interpreted = {} if fbgemm.INSTALLED else {"TRITON_INTERPRET": "1", "RECINFER_KERNEL": "triton"}
    command = [sys.executable, __file__, str(folder), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **interpreted}, cwd=ROOT)
    if done.returncode:
        raise UnavailableError(f"the archive could not be made: {done.stderr.strip()[-500:]}")
    return folder / "trial.rqa"


def build(folder: Path, rows: int) -> Path:
    """The archive: random weights."""
    from recinfer.checkpoint import CheckpointReader, save_checkpoint
    from recinfer.distributed.planner.inference import plan_inference
    from recinfer.inference.export import export_archive
    from recinfer.models.dlrm import DLRM
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    def model(device: str) -> DLRM:
        tables = [EmbeddingBagConfig(rows, DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(FEATURES)]
        place = torch.device(device)
        return DLRM(
            EmbeddingBagCollection(tables=tables, device=place), DENSE, [64, DIM], [128, 64, 1], dense_device=place
        )

    torch.manual_seed(0)
    checkpoint = save_checkpoint(folder / "checkpoint", model("cpu"), model_name="trial", model_version="1")
    plan, out = plan_inference(model("meta"), world_size=1, precision=DataType.INT8), folder / "trial.rqa"
    reader = CheckpointReader(checkpoint)
    export_archive(model("meta"), reader, plan, out, name="trial", version="1", progress=False)
    return out


if __name__ == "__main__":
    build(Path(sys.argv[1]), int(sys.argv[2]))
