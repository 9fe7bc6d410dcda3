"""Converts a mapping of ragged tensors (such as a tensordict's TensorDict) to a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["maybe_td_to_kjt"]


def maybe_td_to_kjt(
    features: KeyedJaggedTensor | Mapping[str, Any], keys: list[str] | None = None
) -> KeyedJaggedTensor:
    """``features`` as a KeyedJaggedTensor.

    Args:
        features: a KeyedJaggedTensor, which is returned unchanged; or key -> nested tensor of layout ``torch.jagged``
            (what a TensorDict holds) or JaggedTensor.
        keys: the keys to take from a mapping, in this order; default: all, in its order.

    Raises:
        InputError: neither of the two, a key that is not there, or a value that is not ragged.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    if not isinstance(features, Mapping):
        raise InputError(
            f"features are a {type(features).__name__}; expected a KeyedJaggedTensor or a mapping of ragged tensors"
        )
    wanted = list(features.keys()) if keys is None else keys
    missing = [key for key in wanted if key not in features]
    if missing:
        raise InputError(f"features {missing} are missing; got {list(features.keys())}")
    return KeyedJaggedTensor.from_jt_dict({key: _jagged(key, features[key]) for key in wanted})


def _jagged(key: str, value: Any) -> JaggedTensor:
    if isinstance(value, JaggedTensor):
        return value
    if isinstance(value, Tensor) and value.is_nested:
        nested: Any = value  # the stubs lack its methods
        if nested.lengths() is None:
            return JaggedTensor(nested.values(), offsets=nested.offsets())
        return JaggedTensor(torch.cat(nested.unbind()), lengths=nested.lengths())  # a view with gaps between the rows
    raise InputError(
        f"feature {key!r} is a {type(value).__name__} that is not ragged; expected a JaggedTensor or "
        "torch.nested.nested_tensor(..., layout=torch.jagged)"
    )
