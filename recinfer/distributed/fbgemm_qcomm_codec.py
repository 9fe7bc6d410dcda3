"""Codecs that compress the data of collectives: FP16, BF16, row-wise INT8, and FP8 with or without row scales.

A row-wise format cuts the numbers into rows of ``row_dim`` and sends each row's scale with it, so that one large number
reduces the precision of its own row only. The formats are listed in :data:`_FORMATS`;
:mod:`recinfer.distributed.comm.transport` applies codecs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

import torch
from torch import Tensor
from torch.nn import functional as F

from recinfer import fbgemm  # noqa: F401  registers the ops
from recinfer.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodec, QuantizedCommCodecs
from recinfer.errors import ConfigError

__all__ = [
    "CommType",
    "QCommsCodec",
    "QCommsConfig",
    "RowContext",
    "get_qcomm_codecs",
    "get_qcomm_codecs_registry",
]

_ROW_DIM = 64  # INT8: 8 bytes of scale and bias per row are then 12 % on top
_LARGEST_HALF = torch.finfo(torch.float16).max
_HFP8 = (4, 15)  # bits and bias of the exponent, as TorchRec has them; 3 bits of mantissa
_HFP8_LARGEST = 2 ** (2**4 - 2 - 15) * (2 - 2**-3)


@unique
class CommType(Enum):
    """Format in which a collective sends float32 numbers."""

    FP32 = "fp32"  # 4 bytes, unchanged
    FP16 = "fp16"  # 2 bytes; beyond 65504 the largest half, times a loss scale for small gradients
    BF16 = "bf16"  # 2 bytes, the range of float32, 8 bits of precision
    FP8 = "fp8"  # 1 byte, and 4 bytes of scale per row where rows are asked for
    INT8 = "int8"  # 1 byte, and 8 bytes of scale and bias per row
    MX4 = "mx4"  # for compatibility; not supported

    def __str__(self) -> str:
        return self.value


@dataclass
class QCommsConfig:
    """Wire formats of collectives on embeddings.

    Args:
        forward_precision: format of embeddings.
        backward_precision: format of gradients.
        forward_loss_scale, backward_loss_scale: factor of the numbers on the wire, removed after the receive, so that
            small ones survive FP16. Used for FP16 and BF16 only.
        fp8_quantize_dim, fp8_quantize_dim_bwd: numbers per row, for FP8; for gradients the default is the forward's.
            Without it numbers have no scale and are clamped to ±0.9375, with a warning. 64 is a good choice.
        fp8_bwd_uses_143: gradients in FP8 rows have 3 bits of mantissa (e4m3) like embeddings, not 2 (e5m2).

    Raises:
        ConfigError: MX4, FP8 settings without FP8, a scale or row size that is not above 0.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False

    def __post_init__(self) -> None:
        precisions = (self.forward_precision, self.backward_precision)
        if CommType.MX4 in precisions:
            raise ConfigError("CommType.MX4 is not supported; use INT8 or FP8")
        rows = (self.fp8_quantize_dim, self.fp8_quantize_dim_bwd)
        if any(rows) and CommType.FP8 not in precisions:
            raise ConfigError(
                f"fp8_quantize_dim {rows[0]}, fp8_quantize_dim_bwd {rows[1]} with precisions {precisions[0]} and "
                f"{precisions[1]}; they are for fp8 only"
            )
        for name in ("forward_loss_scale", "backward_loss_scale", "fp8_quantize_dim", "fp8_quantize_dim_bwd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"QCommsConfig.{name} is {value}; expected a number above 0")


@dataclass(frozen=True)
class RowContext:
    """Context shared by encode and decode of a row-wise format.

    Args:
        row_dim: numbers per row.
    """

    row_dim: int


@dataclass(frozen=True)
class _Format:
    """A wire format. ``row_bytes`` is the number of extra bytes sent with each row; None: a format without rows."""

    dtype: torch.dtype
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    row_bytes: int | None = None


def _to_fp8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    largest = torch.finfo(dtype).max

    def encode(rows: Tensor) -> Tensor:
        scales = (rows.abs().amax(1) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (rows / scales.unsqueeze(1)).to(dtype)
        return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8).view(-1, 4)], dim=1)

    return encode


def _from_fp8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def decode(wire: Tensor) -> Tensor:
        numbers, scales = wire[:, :-4].contiguous().view(dtype), wire[:, -4:].contiguous().view(torch.float32)
        return numbers.float() * scales

    return decode


def _to_int8(rows: Tensor) -> Tensor:
    wire: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    return wire


def _from_int8(wire: Tensor) -> Tensor:
    rows: Tensor = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(wire)
    return rows


def _to_hfp8(numbers: Tensor) -> Tensor:
    wire: Tensor = torch.ops.fbgemm.FloatToHFP8Quantized(numbers.reshape(1, -1), *_HFP8, _HFP8_LARGEST)
    return wire.view(numbers.shape)


def _from_hfp8(wire: Tensor) -> Tensor:
    numbers: Tensor = torch.ops.fbgemm.HFP8QuantizedToFloat(wire.reshape(1, -1), *_HFP8)
    return numbers.view(wire.shape)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_FORMATS: dict[str, _Format] = {
    "fp16": _Format(torch.float16, lambda x: x.clamp(-_LARGEST_HALF, _LARGEST_HALF).half(), lambda x: x.float()),
    "bf16": _Format(torch.bfloat16, lambda x: x.bfloat16(), lambda x: x.float()),
    "int8": _Format(torch.uint8, _to_int8, _from_int8, row_bytes=8),
    "hfp8": _Format(torch.uint8, _to_hfp8, _from_hfp8),
    "e4m3": _Format(torch.uint8, _to_fp8(_E4M3), _from_fp8(_E4M3), row_bytes=4),
    "e5m2": _Format(torch.uint8, _to_fp8(_E5M2), _from_fp8(_E5M2), row_bytes=4),
}


class QCommsCodec(QuantizedCommCodec[RowContext]):
    """A codec for one format.

    Args:
        comm_precision: the format; FP32 has none, see NoOpQuantizedCommCodec.
        loss_scale: multiplied before encoding and divided after decoding; FP16 and BF16 only, ignored otherwise.
        row_dim: numbers per row, a multiple of 4. INT8: default 64; FP8: without it there are no row scales.
        mantissa3: FP8 rows with 3 bits of mantissa (e4m3), else 2 (e5m2).

    Raises:
        ConfigError: a precision without a codec, or a ``row_dim`` that is no multiple of 4.
    """

    def __init__(
        self,
        comm_precision: CommType,
        loss_scale: float | None = None,
        row_dim: int | None = None,
        mantissa3: bool = True,
    ) -> None:
        name = comm_precision.value
        if comm_precision is CommType.FP8:
            name = "hfp8" if row_dim is None else "e4m3" if mantissa3 else "e5m2"
        if name == "hfp8":
            warnings.warn(
                f"FP8 without a row dimension has no scale: numbers beyond ±{_HFP8_LARGEST} are sent as "
                f"±{_HFP8_LARGEST}; use QCommsConfig(fp8_quantize_dim=64) for a scale every 64 numbers",
                stacklevel=2,
            )
        if name not in _FORMATS:
            raise ConfigError(f"{comm_precision} has no codec; expected fp16, bf16, fp8 or int8")
        self._format = _FORMATS[name]
        self._row_dim = row_dim or _ROW_DIM
        if self._row_dim % 4:
            raise ConfigError(f"rows of {self._row_dim} numbers; expected a multiple of 4")
        self._loss_scale = loss_scale if comm_precision in (CommType.FP16, CommType.BF16) else None

    def _rows(self, ctx: RowContext | None) -> int:
        return self._row_dim if ctx is None else ctx.row_dim

    def encode(self, input_tensor: Tensor, ctx: RowContext | None = None) -> Tensor:
        """Encode float32 of any shape: the same shape, or 1-D uint8 for row-wise formats (last row padded)."""
        if self._format.row_bytes is None:
            scaled = input_tensor if self._loss_scale is None else input_tensor * self._loss_scale
            return self._format.encode(scaled)
        row_dim = self._rows(ctx)
        flat = input_tensor.reshape(-1)
        if flat.numel() % row_dim:
            flat = F.pad(flat, (0, -flat.numel() % row_dim))
        return self._format.encode(flat.view(-1, row_dim)).view(-1)

    def decode(self, input_grad: Tensor, ctx: RowContext | None = None) -> Tensor:
        """Decode to float32: the same shape, or 1-D with whole rows."""
        if self._format.row_bytes is None:
            numbers = self._format.decode(input_grad)
            return numbers if self._loss_scale is None else numbers / self._loss_scale
        return self._format.decode(input_grad.view(-1, self._rows(ctx) + self._format.row_bytes)).reshape(-1)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """dtype of the encoded tensor."""
        return self._format.dtype

    def calc_quantized_size(self, input_len: int, ctx: RowContext | None = None) -> int:
        """Number of encoded elements for ``input_len`` numbers: the same, or the bytes of whole rows with their
        scales."""
        if self._format.row_bytes is None:
            return input_len
        row_dim = self._rows(ctx)
        return -(-input_len // row_dim) * (row_dim + self._format.row_bytes)

    def create_context(self) -> RowContext | None:
        """The row size of a row-wise format."""
        return None if self._format.row_bytes is None else RowContext(self._row_dim)


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """The codecs of a config. Codecs for FP32, or without a config, leave numbers unchanged."""
    codecs = QuantizedCommCodecs()
    if qcomms_config is None:
        return codecs
    config = qcomms_config
    if config.forward_precision is not CommType.FP32:
        codecs.forward = QCommsCodec(config.forward_precision, config.forward_loss_scale, config.fp8_quantize_dim)
    if config.backward_precision is not CommType.FP32:
        codecs.backward = QCommsCodec(
            config.backward_precision,
            config.backward_loss_scale,
            config.fp8_quantize_dim_bwd or config.fp8_quantize_dim,
            mantissa3=bool(config.fp8_bwd_uses_143),
        )
    return codecs


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: list[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs] | None:
    """Codecs by the name of the collective, as the sharders take them: ``EmbeddingBagCollectionSharder(
    qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16)))``.

    Args:
        qcomms_config: the formats.
        comm_ops: the collectives; default: all.
        device: does nothing (:mod:`recinfer.ignored`): codecs work on every device and backend.

    Returns:
        ``CommOp`` name -> codecs; None when everything is sent unchanged.
    """
    codecs = get_qcomm_codecs(qcomms_config)
    if isinstance(codecs.forward, NoOpQuantizedCommCodec) and isinstance(codecs.backward, NoOpQuantizedCommCodec):
        return None
    return {op.name: get_qcomm_codecs(qcomms_config) for op in comm_ops or list(CommOp)}
