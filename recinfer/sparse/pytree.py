"""Registration of the sparse types with torch: pytrees (torch.export, fx, DDP) and weights-only loading."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from recinfer.sparse.jagged import JaggedTensor
from recinfer.sparse.keyed import KeyedTensor
from recinfer.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["flatten_kjt_list", "unflatten_kjt_list"]

# What is static about a KeyedJaggedTensor: its keys, or (keys, keys of the inverse indices) when it has them.
_Context = Any


def _flatten_jt(jt: JaggedTensor) -> tuple[list[Tensor | None], None]:
    return [jt._values, jt._weights, jt._lengths, jt._offsets], None


def _unflatten_jt(leaves: Any, context: None) -> JaggedTensor:
    return JaggedTensor.from_parts_unchecked(*leaves)


def _flatten_kjt(kjt: KeyedJaggedTensor) -> tuple[list[Tensor | None], _Context]:
    strides = kjt._stride_per_key_per_rank
    if strides is not None and not isinstance(strides, Tensor):
        strides = torch.tensor(strides, dtype=torch.int32)
    inverse = kjt._inverse_indices
    leaves = [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, strides, None if inverse is None else inverse[1]]
    return leaves, kjt._keys if inverse is None else [list(kjt._keys), list(inverse[0])]


def _unflatten_kjt(leaves: Any, context: _Context) -> KeyedJaggedTensor:
    values, weights, lengths, offsets, strides, inverse = leaves
    keys, inverse_keys = context, []
    if context and not isinstance(context[0], str):
        keys, inverse_keys = context
    return KeyedJaggedTensor.from_parts_unchecked(
        list(keys),
        values,
        lengths,
        offsets=offsets,
        weights=weights,
        stride_per_key_per_rank=strides,
        inverse_indices=None if inverse is None else (list(inverse_keys), inverse),
    )


def _flatten_kt(kt: KeyedTensor) -> tuple[list[Tensor], tuple[list[str], list[int], int]]:
    return [kt._values], (kt._keys, kt._length_per_key, kt._key_dim)


def _unflatten_kt(leaves: Any, context: Any) -> KeyedTensor:
    keys, lengths, key_dim = context
    (values,) = leaves
    kt = KeyedTensor.__new__(KeyedTensor)
    kt._keys, kt._length_per_key, kt._values, kt._key_dim = list(keys), list(lengths), values, key_dim
    kt._offset_per_key = None
    kt._index_per_key = None
    return kt


def _register(cls: type, flatten: Any, unflatten: Any, fields: list[str]) -> None:
    def with_keys(obj: Any) -> Any:
        leaves, context = flatten(obj)
        return [(GetAttrKey(name), leaf) for name, leaf in zip(fields, leaves)], context

    register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"recinfer.sparse.jagged_tensor.{cls.__name__}",
        flatten_with_keys_fn=with_keys,
    )
    register_pytree_flatten_spec(cls, lambda obj, spec: flatten(obj)[0])


_register(JaggedTensor, _flatten_jt, _unflatten_jt, JaggedTensor._fields)
_register(KeyedJaggedTensor, _flatten_kjt, _unflatten_kjt, KeyedJaggedTensor._fields)
_register(KeyedTensor, _flatten_kt, _unflatten_kt, ["_values"])

# Tensors, lists and strings only: torch.load(weights_only=True) and torch.export.load may read saved batches.
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])


def flatten_kjt_list(kjt_arr: list[KeyedJaggedTensor]) -> tuple[list[Tensor | None], list[_Context]]:
    """The leaves of all of ``kjt_arr`` behind each other (six each), and what else is needed to rebuild them."""
    flat = [_flatten_kjt(kjt) for kjt in kjt_arr]
    return [leaf for leaves, _ in flat for leaf in leaves], [context for _, context in flat]


def unflatten_kjt_list(values: list[Tensor | None], contexts: list[_Context]) -> list[KeyedJaggedTensor]:
    """The inverse of :func:`flatten_kjt_list`."""
    count = len(KeyedJaggedTensor._fields)
    return [_unflatten_kjt(values[count * n : count * (n + 1)], context) for n, context in enumerate(contexts)]
