"""Chooses the kernel that looks up packed rows: FBGEMM's, recinfer's in Triton, or recinfer's compiled loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch

from recinfer import env, fbgemm
from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.formats.registry import row_format

if TYPE_CHECKING:
    from recinfer.quant.tbe import TableBatch

__all__ = ["Kernel", "call_keys", "choose_kernel", "table_batch"]


class Kernel(NamedTuple):
    """A kernel and, in one sentence, the reason for the choice."""

    name: Literal["fbgemm", "triton"]
    reason: str


def choose_kernel(device: torch.device | str) -> Kernel:
    """Choose the kernel for tables on ``device``; works without a GPU.

    ``RECINFER_KERNEL`` decides if set. The default is FBGEMM if its build for the device is installed; on CUDA
    otherwise Triton.

    Raises:
        UnavailableError: the kernel is not installed.
    """
    kind, wanted = torch.device(device).type, env.kernel()
    no_fbgemm = "FBGEMM is not installed" if not fbgemm.INSTALLED else "the installed FBGEMM is built for the CPU only"
    have = {
        "fbgemm": fbgemm.HAS_CUDA if kind == "cuda" else fbgemm.INSTALLED,
        "triton": importlib.util.find_spec("triton") is not None,
    }
    if wanted is not None:
        if not have[wanted]:
            why = no_fbgemm if wanted == "fbgemm" else "Triton is not installed"
            raise UnavailableError(f"RECINFER_KERNEL={wanted}, but {why}; {_install(wanted, kind)}")
        return Kernel(wanted, f"RECINFER_KERNEL={wanted}")
    if have["fbgemm"]:
        return Kernel("fbgemm", "FBGEMM is installed, and RECINFER_KERNEL requests no other kernel")
    if kind != "cuda":
        raise UnavailableError(f"{no_fbgemm}; {_install('fbgemm', kind)}")
    if have["triton"]:
        return Kernel("triton", f"{no_fbgemm}, and Triton is installed")
    raise UnavailableError(f"{no_fbgemm}, and Triton is not installed; {_install('triton', kind)}")


def _install(kernel: str, kind: str) -> str:
    extra = "triton" if kernel == "triton" else "cuda" if kind == "cuda" else "cpu"
    return f"install it: pip install 'recinfer[{extra}]'"


def call_keys(reads: Sequence[Placed], device: torch.device) -> list[tuple[int, bool]]:
    """A key of each unpooled read: equal keys share a call of the kernel for ``device``. Triton's takes all; FBGEMM's one
    padded width, and only rows that FBGEMM has."""
    if choose_kernel(device).name == "triton":
        return [(0, True)] * len(reads)
    formats = [row_format(read.data_type) for read in reads]
    return [(rows.padded_dim(read.rect.cols), rows.fbgemm is not None) for rows, read in zip(formats, reads)]


def table_batch(
    reads: Sequence[Placed],
    pooling: PoolingType,
    buffers: Buffers,
    *,
    output_dtype: torch.dtype = torch.float32,
    means: Sequence[bool] = (),
) -> TableBatch:
    """A batched lookup over packed tables with the kernel that :func:`choose_kernel` chooses. On the CPU, recinfer's compiled
    loop looks up all of them if FBGEMM lacks the rows of some.

    Args:
        reads, pooling, buffers, output_dtype: as of ``TableBatch``.
        means: of each read, whether it is a MEAN though ``pooling`` is SUM. A kernel whose ``averages`` is false sums these too.

    Raises:
        ConfigError: the kernel has no such rows.
    """
    if choose_kernel(buffers.device).name == "triton":
        from recinfer.quant.triton_batch import TritonBatch

        # The same calls; a union would make every caller name both.
        return cast("TableBatch", TritonBatch(reads, pooling, buffers, output_dtype=output_dtype, means=means))
    lacking = sorted({read.data_type.value for read in reads if row_format(read.data_type).fbgemm is None})
    if lacking and buffers.device.type == "cuda":
        raise ConfigError(
            f"FBGEMM has no {', '.join(lacking)} rows on a GPU; set RECINFER_KERNEL=triton, or give the tables another "
            "precision"
        )
    if lacking:
        from recinfer.quant.compiled_batch import CompiledBatch

        return cast("TableBatch", CompiledBatch(reads, pooling, buffers, output_dtype=output_dtype))
    from recinfer.quant.tbe import TableBatch

    return TableBatch(reads, pooling, buffers, output_dtype=output_dtype)
