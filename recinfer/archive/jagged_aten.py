"""Jagged operators of FBGEMM and torch, masked attention and others, as plain aten operators, which ONNX has too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["decompositions"]


def _complete_cumsum(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of ``lengths`` [B]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _segments(lengths: Tensor, count: Any) -> Tensor:
    """The bag of each of ``count`` values: int64 [count].

    A mark at the end of each bag, summed up, is the number of bags that end before a value.
    """
    ends = lengths.long().cumsum(0)
    marks = torch.zeros(count + 1, dtype=torch.int64, device=lengths.device)
    return marks.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:count]


def _jagged_to_padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[Any], padding_value: float = 0.0
) -> Tensor:
    """``[B, max_lengths[0], ...]``; for one jagged axis."""
    if len(offsets) != 1:
        return NotImplemented
    starts = offsets[0].long()
    lengths = (starts[1:] - starts[:-1]).unsqueeze(1)
    column = torch.arange(max_lengths[0], device=values.device)
    source = torch.where(column < lengths, starts[:-1].unsqueeze(1) + column, values.shape[0])
    padded = torch.cat([values, values.new_full((1, *values.shape[1:]), padding_value)])
    return padded.index_select(0, source.flatten()).reshape(source.shape[0], source.shape[1], *values.shape[1:])


def _jagged_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: Any, padding_value: float = 0.0) -> Tensor:
    return _jagged_to_padded_dense(values, [offsets], [max_sequence_length], padding_value)


def _dense_to_jagged(
    dense: Tensor,
    x_offsets: Sequence[Tensor],
    total_L: Any = None,
) -> tuple[Tensor, list[Tensor]]:
    """The values [total_L, ...] of padded rows, and their offsets; for one jagged axis."""
    if len(x_offsets) != 1 or total_L is None:
        return NotImplemented
    starts = x_offsets[0].long()
    bag = _segments(starts[1:] - starts[:-1], total_L)
    place = torch.arange(total_L, device=dense.device) - starts.index_select(0, bag)
    return dense.flatten(0, 1).index_select(0, bag * dense.shape[1] + place), list(x_offsets)


def _add_dense_to_jagged(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Values [total, D] plus their places of ``y`` [B, N, D], and their offsets; values behind the N places stay as they are."""
    if len(x_offsets) != 1:
        return NotImplemented
    starts, width = x_offsets[0].long(), y.shape[1]
    bag = _segments(starts[1:] - starts[:-1], x_values.shape[0])
    place = torch.arange(x_values.shape[0], device=y.device) - starts.index_select(0, bag)
    row = torch.where(place < width, bag * width + place, y.shape[0] * width)
    padded = torch.cat([y.flatten(0, 1), y.new_zeros(1, y.shape[2])])
    return x_values + padded.index_select(0, row), list(x_offsets)


def _repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Tensor:
    if output_size is not None:
        return _segments(repeats, output_size)
    if repeats.dtype == torch.int64:
        return NotImplemented
    return torch.repeat_interleave(repeats.long()).to(repeats.dtype)  # ONNX Runtime takes no other type


def _repeat_interleave_of(
    tensor: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: Any = None
) -> Tensor:
    if output_size is None:
        return NotImplemented if repeats.dtype == torch.int64 else tensor.repeat_interleave(repeats.long(), dim)
    if dim is None:
        tensor, dim = tensor.flatten(), 0
    return tensor.index_select(dim, _segments(repeats.expand(tensor.shape[dim]), output_size))


def _repeat_interleave_each(tensor: Tensor, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Tensor:
    """Each element ``repeats`` times; ONNX's form fails where another axis is empty."""
    if dim is None:
        tensor, dim = tensor.flatten(), 0
    axis = dim % tensor.dim()
    sizes = [-1] * (tensor.dim() + 1)
    sizes[axis + 1] = repeats
    return tensor.unsqueeze(axis + 1).expand(sizes).flatten(axis, axis + 1)


_NO_PRODUCT = 2  # torch's number of the mode without a product of matrices


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Distances [..., N, M] of rows [..., N, D] and [..., M, D]."""
    if p != 1.0 and (p != 2.0 or compute_mode != _NO_PRODUCT):
        return NotImplemented
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    return difference.abs().sum(-1) if p == 1.0 else difference.square().sum(-1).sqrt()


_MOST_FACTORS = 64


def _cumprod(values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The products along an axis of fixed size, one factor after the other as torch has them; ONNX has no operator for it."""
    size = values.shape[dim] if values.dim() else 0
    if not isinstance(size, int) or not 1 <= size <= _MOST_FACTORS:
        return NotImplemented
    whole = not (values.is_floating_point() or values.is_complex())
    factors = values.to(dtype or (torch.int64 if whole else values.dtype)).unbind(dim)
    return torch.stack(list(accumulate(factors, torch.mul)), dim)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """ONNX's form takes exponents of the values, which overflow from 89 on."""
    return torch.where(a == b, a + log(2), torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs())))


def _log_sigmoid(values: Tensor) -> Tensor:
    """ONNX's form is the logarithm of the sigmoid, which is 0 from -104 on."""
    return values.clamp(max=0) - torch.log1p(torch.exp(-values.abs()))


def _logcumsumexp(values: Tensor, dim: int) -> Tensor:
    """The running logsumexp along an axis of fixed size; see :func:`_logaddexp`."""
    size = values.shape[dim] if values.dim() else 0
    if not isinstance(size, int) or not 1 <= size <= _MOST_FACTORS:
        return NotImplemented
    return torch.stack(list(accumulate(values.unbind(dim), _logaddexp)), dim)


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """The next state [B, H]; torch's own form in other operators would fix the number of samples."""
    of_input, of_state = linear(input, w_ih, b_ih).chunk(3, 1), linear(hx, w_hh, b_hh).chunk(3, 1)
    reset, kept = ((a + b).sigmoid() for a, b in zip(of_input[:2], of_state[:2]))
    new = (of_input[2] + reset * of_state[2]).tanh()
    return (hx - new) * kept + new


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The next state and cell, [B, H] each."""
    taken, kept, new, shown = (linear(input, w_ih, b_ih) + linear(hx[0], w_hh, b_hh)).chunk(4, 1)
    cell = kept.sigmoid() * hx[1] + taken.sigmoid() * new.tanh()
    return shown.sigmoid() * cell.tanh(), cell


def _segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """Sums, means, maxima and minima [B, ...] of the values of each bag, for bags along the first axis."""
    if axis != 0 or lengths is None or lengths.dim() != 1 or reduce not in ("sum", "mean", "max", "min"):
        return NotImplemented
    shape = (lengths.shape[0], *data.shape[1:])
    bag = _segments(lengths, data.shape[0]).reshape(-1, *[1] * (data.dim() - 1)).expand(data.shape)
    if reduce in ("sum", "mean"):
        total = data.new_full(shape, initial or 0.0).scatter_add(0, bag, data)
        if reduce == "sum":
            return total
        count = lengths.to(data.dtype).reshape(-1, *[1] * (data.dim() - 1))
        return total / (count if initial is None else count.clamp(min=1))
    edge = float("-inf") if reduce == "max" else float("inf")
    start = data.new_full(shape, edge if initial is None else initial)
    return start.scatter_reduce(0, bag, data, "amax" if reduce == "max" else "amin")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with a mask, where a query without any key gets zeros, as torch's has it; ONNX's form gives NaN. Also attention
    without heads, for which ONNX has no form."""
    heads = query.dim() == key.dim() == value.dim() == 4
    if enable_gqa or dropout_p or (heads and (attn_mask is None or is_causal)):
        return NotImplemented
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    else:
        scores = scores + attn_mask
    most = scores.amax(-1, keepdim=True)
    exponents = (scores - torch.where(torch.isinf(most), 0.0, most)).exp()
    return exponents / exponents.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny) @ value


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operator -> its form in aten operators; a form that does not cover a call returns NotImplemented."""
    forms: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
        torch.ops.aten.repeat_interleave.self_Tensor: _repeat_interleave_of,
        torch.ops.aten.repeat_interleave.self_int: _repeat_interleave_each,
        torch.ops.aten.cdist.default: _distances,
        torch.ops.aten.cumprod.default: _cumprod,
        torch.ops.aten.logaddexp.default: _logaddexp,
        torch.ops.aten.log_sigmoid.default: _log_sigmoid,
        torch.ops.aten.logcumsumexp.default: _logcumsumexp,
        torch.ops.aten.gru_cell.default: _gru_cell,
        torch.ops.aten.lstm_cell.default: _lstm_cell,
        torch.ops.aten.segment_reduce.default: _segment_reduce,
        torch.ops.aten.scaled_dot_product_attention.default: _attention,
    }
    for name, form in _FBGEMM.items():
        operator = getattr(torch.ops.fbgemm, name, None)  # absent unless FBGEMM is loaded, and then no trace has it
        if operator is not None:
            forms[operator.default] = form
    return forms


_FBGEMM: dict[str, Callable[..., Any]] = {
    "asynchronous_complete_cumsum": _complete_cumsum,
    "jagged_to_padded_dense": _jagged_to_padded_dense,
    "jagged_2d_to_dense": _jagged_to_dense,
    "jagged_1d_to_dense": _jagged_to_dense,
    "jagged_to_padded_dense_forward": _jagged_to_padded_dense,  # torch's run over all operators makes it of these two
    "dense_to_jagged": _dense_to_jagged,
    "jagged_dense_elementwise_add_jagged_output": _add_dense_to_jagged,
}
