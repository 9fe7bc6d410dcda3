"""Imports all that is slow to import; an interpreter that has imported this module forks processes which start fast.

No module here starts threads when it is imported, as grpc and onnxruntime do: threads do not live on in a fork.
"""

from __future__ import annotations

import gc
import importlib
import logging

from tests.export_caches import cache_exports

_MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._export.serde.serialize",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.export._trace",
    "torch.export.pt2_archive._package",
    "torch.onnx._internal.exporter._core",
    "fbgemm_gpu",
    "torchmetrics",
    "typer._adapters",
    "recinfer.archive.writer",
    "recinfer.checkpoint",
    "recinfer.cli.main",
    "recinfer.distributed.model_parallel",
    "recinfer.inference.delta",
    "recinfer.inference.export",
    "recinfer.inference.predictor",
    "recinfer.inference.reshard",
    "recinfer.models.dlrm",
    "recinfer.training.batches",
    "recinfer.training.loop",
)


def _derive_signatures_of_onnxscript() -> None:
    """Each export asks for them; :func:`cache_exports` keeps them."""
    from torch.onnx._internal._lazy_import import onnxscript_apis
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    assert onnxscript_apis.get_torchlib_ops  # imports the module of torch's version
    cache_exports()
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision is not installed
    ONNXRegistry.from_torchlib()
    log.setLevel(level)


gc.disable()  # some hundred passes over all that is imported find nothing to free
for _name in _MODULES:
    importlib.import_module(_name)
_derive_signatures_of_onnxscript()
# Collections in a process that is forked pass over what was imported, and copy none of its pages. Each server collects once.
gc.collect()
gc.freeze()
gc.enable()
