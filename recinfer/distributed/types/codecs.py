"""The interface of codecs, which compress the data of collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

__all__ = [
    "NoOpQuantizedCommCodec",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
]


QuantizationContext = TypeVar("QuantizationContext")


class QuantizedCommCodec(Generic[QuantizationContext]):
    """Encodes a float32 tensor before a collective and decodes it afterwards.

    The methods are not abstract, as in TorchRec, because a codec may omit methods that its collective does not call.
    """

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """Encode a tensor."""
        raise NotImplementedError(f"{type(self).__name__} must implement encode")

    def decode(self, input_grad: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """Decode to float32."""
        raise NotImplementedError(f"{type(self).__name__} must implement decode")

    @property
    def quantized_dtype(self) -> torch.dtype:
        """dtype of the encoded tensor."""
        raise NotImplementedError(f"{type(self).__name__} must implement quantized_dtype")

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Elements after encoding ``input_len`` elements."""
        raise NotImplementedError(f"{type(self).__name__} must implement calc_quantized_size")

    def create_context(self) -> QuantizationContext | None:
        """State shared by encode and decode of one collective."""
        return None


class NoOpQuantizedCommCodec(QuantizedCommCodec[QuantizationContext]):
    """A codec that leaves float32 unchanged."""

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """``input_tensor``."""
        return input_tensor

    def decode(self, input_grad: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """``input_grad``."""
        return input_grad

    def quantized_dtype(self) -> torch.dtype:  # type: ignore[override]  # a method here, as documented
        """float32."""
        return torch.float32

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """``input_len``."""
        return input_len


@dataclass
class QuantizedCommCodecs:
    """Codecs of one collective, forward and backward."""

    forward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
