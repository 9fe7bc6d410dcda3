"""Devices of the GPU tests; where it makes sense, they also run on the CPU, which checks the tests themselves."""

from __future__ import annotations

import pytest
import torch

from recinfer import fbgemm

__all__ = ["BACKENDS", "DEVICES", "skip_unless_fbgemm_has"]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
            pytest.mark.skipif(not fbgemm.HAS_CUDA, reason="tables that train on a GPU need FBGEMM's CUDA build"),
        ],
    ),
]
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def skip_unless_fbgemm_has(optimizer: str, device: str) -> None:
    """FBGEMM's modules compute few optimizers on the CPU."""
    if device == "cpu" and optimizer not in ("SGD", "ADAGRAD", "ROWWISE_ADAGRAD"):
        pytest.skip(f"FBGEMM's module has no {optimizer} on the CPU")
