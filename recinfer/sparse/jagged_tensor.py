"""The sparse types under TorchRec's module name, and two conversion modules."""

from __future__ import annotations

from torch import nn

from recinfer.sparse.jagged import JaggedTensor, jt_is_equal
from recinfer.sparse.keyed import KeyedTensor, permute_multi_embedding, regroup_kts
from recinfer.sparse.keyed_jagged import KeyedJaggedTensor, kjt_is_equal
from recinfer.sparse.pytree import flatten_kjt_list, unflatten_kjt_list

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "flatten_kjt_list",
    "jt_is_equal",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
    "unflatten_kjt_list",
]


class ComputeKJTToJTDict(nn.Module):
    """:meth:`KeyedJaggedTensor.to_dict` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Key to JaggedTensor."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """:meth:`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One KeyedJaggedTensor of all keys, in the dict's order."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
