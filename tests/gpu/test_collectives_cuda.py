"""Collectives on features and embeddings on GPUs against the CPU: the same numbers by NCCL, or by gloo on one GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed import comm_ops
from recinfer.distributed.dist_data import KJTAllToAll
from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from tests.distributed.spawn import run_ranks
from tests.distributed.test_dist_kjt import batch_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU a rank: needs two")
WORLDS = [pytest.param("gloo", id="gloo-one-gpu"), pytest.param("cpu:gloo,cuda:nccl", id="nccl", marks=needs_two)]


def device_of(rank: int, backend: str) -> torch.device:
    device = torch.device("cuda", 0 if backend == "gloo" else rank)
    torch.cuda.set_device(device)
    return device


def features(rank: int, world: int, backend: str, batches: list[list[int]], weighted: bool) -> None:
    device, pg = device_of(rank, backend), dist.group.WORLD
    assert pg is not None
    variable = any(len(set(strides)) > 1 for strides in batches)
    kjt = batch_of(rank, batches[rank], torch.int64, weighted, variable)
    module = KJTAllToAll(pg, [2, 1])
    on_cpu, on_gpu = (module(part).wait().wait() for part in (kjt, kjt.to(device)))
    assert on_gpu.device() == device and on_gpu.stride_per_key_per_rank() == on_cpu.stride_per_key_per_rank()
    for name in ("lengths", "values", "weights_or_none"):
        cpu, gpu = getattr(on_cpu, name)(), getattr(on_gpu, name)()
        assert (cpu is None and gpu is None) or torch.equal(cpu, gpu.cpu())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "batches", [[[3] * 3, [3] * 3], [[3] * 3, [1] * 3], [[3, 1, 2], [2, 2, 5]], [[0] * 3, [2] * 3]]
)
@pytest.mark.parametrize("backend", WORLDS)
def test_features(backend: str, batches: list[list[int]], weighted: bool) -> None:
    run_ranks(2, features, backend, batches, weighted, backend=backend)


OPERATIONS: dict[str, Callable[[Tensor, object], object]] = {
    "pooled": lambda x, c: comm_ops.alltoall_pooled(x, [2, 4], [3, 3], codecs=c),  # type: ignore[arg-type]
    "base": lambda x, c: comm_ops.reduce_scatter_base_pooled(x, codecs=c),  # type: ignore[arg-type]
    "v": lambda x, c: comm_ops.reduce_scatter_v_pooled(x, [5, 1], codecs=c),  # type: ignore[arg-type]
    "gather": lambda x, c: comm_ops.all_gather_base_pooled(x, codecs=c),  # type: ignore[arg-type]
}


def embeddings(rank: int, world: int, backend: str, name: str, precision: str) -> None:
    device = device_of(rank, backend)
    config = QCommsConfig(CommType(precision), CommType(precision), fp8_quantize_dim=64 if precision == "fp8" else None)
    codecs = get_qcomm_codecs(config) if precision != "fp32" else None
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(rank))
    results = []
    for where in (torch.device("cpu"), device):
        leaf = x.to(where).requires_grad_()
        out = OPERATIONS[name](leaf, codecs).wait()  # type: ignore[attr-defined]
        (out * torch.linspace(0.5, 1.0, out.numel(), device=where).view_as(out)).sum().backward()
        assert leaf.grad is not None and out.device == where
        results.append((out.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "fp8"])
@pytest.mark.parametrize(
    "backend,name", [("gloo", "pooled"), *[pytest.param("cpu:gloo,cuda:nccl", n, marks=needs_two) for n in OPERATIONS]]
)
def test_embeddings(backend: str, name: str, precision: str) -> None:
    run_ranks(2, embeddings, backend, name, precision, backend=backend)
