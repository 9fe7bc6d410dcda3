"""Registers the sparse types with torch as pytrees (torch.export, fx, DDP) and for weights-only loading.

The keys of a KeyedJaggedTensor or KeyedTensor are static: a spec, and so an exported program, holds them in the order
of the example. ``tree_flatten_spec``, which fills a spec from another object, therefore brings the object's keys into
that order first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node

from recinfer.errors import InputError
from recinfer.sparse.checks import MissingKeyError
from recinfer.sparse.jagged import JaggedTensor
from recinfer.sparse.keyed import KeyedTensor, regroup_kts
from recinfer.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["flatten_kjt_list", "unflatten_kjt_list"]

# The static part of a KeyedJaggedTensor: its keys, or (keys, keys of the inverse indices) if it has inverse indices.
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


def _keys_of(context: _Context) -> tuple[list[str], list[str]]:
    """Keys, and keys of the inverse indices."""
    if context and not isinstance(context[0], str):
        keys, inverse_keys = context
        return list(keys), list(inverse_keys)
    return list(context), []


def _unflatten_kjt(leaves: Any, context: _Context) -> KeyedJaggedTensor:
    values, weights, lengths, offsets, strides, inverse = leaves
    keys, inverse_keys = _keys_of(context)
    return KeyedJaggedTensor.from_parts_unchecked(
        keys,
        values,
        lengths,
        offsets=offsets,
        weights=weights,
        stride_per_key_per_rank=strides,
        inverse_indices=None if inverse is None else (inverse_keys, inverse),
    )


def _places(what: str, wanted: list[str], keys: list[str]) -> list[int]:
    """Index of each of ``wanted`` in ``keys``."""
    missing = [key for key in wanted if key not in keys]
    if missing:
        raise MissingKeyError(
            f"{what}: keys {missing} are missing; the spec (the exported program) has {wanted}, got {keys}"
        )
    if len(set(wanted)) != len(wanted) or len(set(keys)) != len(keys):
        raise InputError(
            f"{what}: the spec (the exported program) has keys {wanted}, got {keys}; a key occurs twice, so the keys "
            f"must be in the spec's order: permute them"
        )
    return [keys.index(key) for key in wanted]


def _kjt_in_order_of(kjt: KeyedJaggedTensor, spec: Any) -> list[Tensor | None]:
    """The leaves of ``kjt`` for a program whose keys are those of ``spec``."""
    keys, inverse_keys = _keys_of(spec.context)
    leaves, inverse = _flatten_kjt(kjt)[0], kjt._inverse_indices
    if kjt._keys != keys:
        ordered = kjt.permute(_places("KeyedJaggedTensor", keys, kjt._keys))
        # The program reads lengths, offsets or both, as the example had them.
        lengths = None if kjt._lengths is None else ordered.lengths()
        offsets = None if kjt._offsets is None else ordered.offsets()
        strides = _flatten_kjt(ordered)[0][4]
        leaves = [ordered._values, ordered._weights, lengths, offsets, strides, leaves[5]]
    if inverse is not None and inverse_keys and inverse[0] != inverse_keys:
        leaves[5] = inverse[1][_places("inverse indices of a KeyedJaggedTensor", inverse_keys, inverse[0])]
    return leaves


# The keys are a list, as after a round trip through JSON, so that the spec of a loaded program equals that of its
# inputs.
def _flatten_kt(kt: KeyedTensor) -> tuple[list[Tensor], list[Any]]:
    return [kt._values], [kt._keys, kt._length_per_key, kt._key_dim]


def _unflatten_kt(leaves: Any, context: Any) -> KeyedTensor:
    keys, lengths, key_dim = context
    (values,) = leaves
    kt = KeyedTensor.__new__(KeyedTensor)
    kt._keys, kt._length_per_key, kt._values, kt._key_dim = list(keys), list(lengths), values, key_dim
    kt._offset_per_key = None
    kt._index_per_key = None
    return kt


def _kt_in_order_of(kt: KeyedTensor, spec: Any) -> list[Tensor]:
    """The values of ``kt`` for a program whose keys are those of ``spec``."""
    keys, lengths, key_dim = spec.context
    if kt._keys == keys and kt._length_per_key == lengths and kt._key_dim == key_dim:
        return [kt._values]
    own = [kt._length_per_key[place] for place in _places("KeyedTensor", keys, kt._keys)]
    if own != list(lengths) or kt._key_dim != key_dim:
        raise InputError(
            f"KeyedTensor: keys {keys} have lengths {own} in dimension {kt._key_dim}; the spec (the exported program) has "
            f"{list(lengths)} in dimension {key_dim}"
        )
    return regroup_kts([kt], [keys])


def _register(cls: type, flatten: Any, unflatten: Any, in_order_of: Any, fields: list[str]) -> None:
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
    register_pytree_flatten_spec(cls, in_order_of)


_register(JaggedTensor, _flatten_jt, _unflatten_jt, lambda jt, spec: _flatten_jt(jt)[0], JaggedTensor._fields)
_register(KeyedJaggedTensor, _flatten_kjt, _unflatten_kjt, _kjt_in_order_of, KeyedJaggedTensor._fields)
_register(KeyedTensor, _flatten_kt, _unflatten_kt, _kt_in_order_of, ["_values"])

# Tensors, lists and strings only: torch.load(weights_only=True) and torch.export.load may read saved batches.
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])


def flatten_kjt_list(kjt_arr: list[KeyedJaggedTensor]) -> tuple[list[Tensor | None], list[_Context]]:
    """The leaves of all of ``kjt_arr``, concatenated (six each), and the contexts to rebuild them."""
    flat = [_flatten_kjt(kjt) for kjt in kjt_arr]
    return [leaf for leaves, _ in flat for leaf in leaves], [context for _, context in flat]


def unflatten_kjt_list(values: list[Tensor | None], contexts: list[_Context]) -> list[KeyedJaggedTensor]:
    """The inverse of :func:`flatten_kjt_list`."""
    count = len(KeyedJaggedTensor._fields)
    return [_unflatten_kjt(values[count * n : count * (n + 1)], context) for n, context in enumerate(contexts)]
