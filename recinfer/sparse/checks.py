"""Checks of jagged data when it is built; skipped while tracing and, where they are slow, on other devices than the
CPU.

Shapes are always checked. Numbers inside tensors (sums, signs) are checked on the CPU only: on other devices each check
would wait for the device. No check runs while torch traces, exports or compiles, or on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from recinfer.errors import InputError, NotFoundError

__all__ = [
    "MissingKeyError",
    "check_distinct_keys",
    "check_id_dtype",
    "check_jagged",
    "check_keys_per_stride",
    "ids_are_below",
    "is_plain",
    "require",
]

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_ID_DTYPES = {torch.int32: np.uint32, torch.int64: np.uint64}


class MissingKeyError(NotFoundError, KeyError):
    """Raised for a key that is not in a keyed tensor; also a KeyError, as in TorchRec."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def require(condition: bool, message: str) -> None:
    """Raise InputError with ``message`` unless ``condition``."""
    if not condition:
        raise InputError(message)


def is_plain(*tensors: object) -> bool:
    """Whether all of ``tensors`` are real tensors with real sizes (no tracing, no fake, no proxy, not meta)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device.type != "meta") for t in tensors)  # type: ignore[attr-defined]


def _check_integers(name: str, tensor: Tensor) -> None:
    require(
        tensor.numel() == 0 or tensor.dtype in _INTEGERS,
        f"{name} must hold integers, got {tensor.dtype}; convert it with .to(torch.int64)",
    )
    require(tensor.dim() == 1, f"{name} must have 1 dimension, got shape {tuple(tensor.shape)}")


def check_id_dtype(values: Tensor) -> None:
    """Check that the ids of a lookup are int32 or int64.

    Raises:
        InputError: another dtype, such as float32 of a column with gaps: a lookup would truncate it.
    """
    if type(values) is Tensor and values.dtype not in _ID_DTYPES and values.numel():
        raise InputError(
            f"ids: got {values.dtype}; expected torch.int32 or torch.int64. Fill gaps and convert them with "
            ".to(torch.int64), or map them to rows before the lookup"
        )


def ids_are_below(ids_N: Tensor, edges: np.ndarray, limits: np.ndarray) -> bool:
    """Whether each feature's ids are 0 or more and below its limit, in one vectorised pass of 0.2 ns per id.

    Args:
        ids_N: int32 or int64 on the CPU, feature after feature.
        edges: the start of each feature, and the end: ``[F + 1]``.
        limits: rows of each feature's table, uint64 ``[F]``.
    """
    # A negative id is a large unsigned one.
    ids: np.ndarray = ids_N.detach().numpy().view(_ID_DTYPES[ids_N.dtype])
    if ids_N.dtype is torch.int32:
        limits = np.minimum(limits, 2**31)
    starts = edges[:-1]
    if len(starts) and starts[-1] < edges[-1] and (np.maximum.reduceat(ids, starts) < limits).all():
        return True
    # For a feature without ids, reduceat takes the neighbour's first id (or would read beyond the last id).
    filled = edges[1:] > starts
    return bool((np.maximum.reduceat(ids, starts[filled]) < limits[filled]).all())


def check_jagged(
    what: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> None:
    """Check that ``values``, ``weights`` and ``lengths`` or ``offsets`` fit together.

    Args:
        what: the name of the object to build, for messages.
        values: ``[N, ...]``.
        weights: ``[N, ...]`` or None.
        lengths: integers ``[n]`` or None.
        offsets: integers ``[n + 1]`` or None; at least one of the two is given.

    Raises:
        InputError: neither is given, wrong dtype or shape, a negative length, or ends that differ from ``N``.
    """
    given = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
    for name, part in given.items():
        if isinstance(part, list | tuple | np.ndarray | int | float):
            raise InputError(f"{what}: {name} are a {type(part).__name__}; expected a tensor: torch.as_tensor({name})")
    require(lengths is not None or offsets is not None, f"{what}: got neither lengths nor offsets; give one of them")
    if not is_plain(values, weights, lengths, offsets):
        return
    num_values = values.shape[0] if values.dim() else -1
    require(num_values >= 0, f"{what}: values must have at least 1 dimension, got a scalar")
    if weights is not None:
        require(
            weights.dim() > 0 and weights.shape[0] == num_values,
            f"{what}: got {tuple(weights.shape)} weights for {num_values} values; expected one weight per value",
        )
    if lengths is not None:
        _check_integers(f"{what}: lengths", lengths)
        if lengths.device.type == "cpu" and lengths.numel():
            _check_lengths(what, lengths, num_values)
    if offsets is not None:
        _check_integers(f"{what}: offsets", offsets)
        _check_offsets(what, offsets, lengths, num_values)


def _check_lengths(what: str, lengths: Tensor, num_values: int) -> None:
    lowest = int(lengths.min())
    if lowest < 0:
        raise InputError(f"{what}: lengths[{int(lengths.argmin())}] is {lowest}; lengths must be 0 or more")
    total = int(lengths.sum())
    if total != num_values:
        raise InputError(f"{what}: lengths sum to {total} but there are {num_values} values; they must be equal")


def _check_offsets(what: str, offsets: Tensor, lengths: Tensor | None, num_values: int) -> None:
    if lengths is not None:
        expected = lengths.numel() + 1
        # An empty offsets tensor for no lengths is how TorchRec spells "empty".
        fits = offsets.numel() == expected or (offsets.numel() == 0 and lengths.numel() == 0)
        require(
            fits,
            f"{what}: got {offsets.numel()} offsets for {lengths.numel()} lengths; expected {expected} offsets",
        )
    if offsets.device.type != "cpu" or offsets.numel() == 0:
        return
    first, last = int(offsets[0]), int(offsets[-1])
    require(first == 0, f"{what}: offsets start at {first}; expected 0")
    steps = offsets[1:] - offsets[:-1]
    if steps.numel() and int(steps.min()) < 0:
        at = int(steps.argmin())
        raise InputError(f"{what}: offsets fall from {int(offsets[at])} to {int(offsets[at + 1])} at position {at + 1}")
    require(last == num_values, f"{what}: offsets end at {last} but there are {num_values} values; they must be equal")
    if lengths is not None and lengths.device.type == "cpu":
        require(bool((steps == lengths).all()), f"{what}: lengths and offsets disagree; give only one of them")


def check_keys_per_stride(
    what: str, keys: Sequence[str], num_lengths: int, stride: int | None, stride_per_key: Sequence[int] | None
) -> None:
    """Check that ``num_lengths`` matches the keys and their batch sizes.

    Raises:
        InputError: the number of lengths is not keys x stride (or the sum of ``stride_per_key``).
    """
    num_keys = len(keys)
    if stride_per_key is not None:
        require(
            len(stride_per_key) == num_keys,
            f"{what}: got {len(stride_per_key)} strides for {num_keys} keys; expected one stride per key",
        )
        total = sum(stride_per_key)
        require(
            total == num_lengths, f"{what}: strides sum to {total} but there are {num_lengths} lengths; must be equal"
        )
    elif stride is not None:
        require(
            num_keys * stride == num_lengths,
            f"{what}: got {num_lengths} lengths for {num_keys} keys of batch size {stride}; expected {num_keys * stride}",
        )
    else:
        require(
            num_lengths % num_keys == 0 if num_keys else num_lengths == 0,
            f"{what}: got {num_lengths} lengths for {num_keys} keys; expected a multiple of the number of keys",
        )


def check_distinct_keys(keys: Sequence[str]) -> None:
    """Check that no key is repeated, because sharded tables exchange one list of ids per feature.

    Raises:
        InputError: naming the keys that come more than once.
    """
    if len(set(keys)) < len(keys):
        repeated = sorted({key for key in keys if list(keys).count(key) > 1})
        raise InputError(
            f"keys {repeated} occur more than once in the input {list(keys)}; expected each key once: join the ids "
            f"of a "
            "feature in one jagged tensor, or give them different keys"
        )
