"""KeyedTensor.regroup_as_dict as a module."""

from __future__ import annotations

from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType, data_type_to_dtype
from recinfer.sparse.jagged_tensor import KeyedTensor, regroup_kts
from recinfer.sparse.opaque import Opaque

__all__ = ["KTRegroupAsDict"]


class KTRegroupAsDict(Opaque, nn.Module):
    """Regroup keyed tensors into named dense tensors.

    Args:
        groups: the keys of each group.
        keys: the name of each group.
        emb_dtype: cast the groups to this type.
        multi_device: does nothing (:mod:`recinfer.ignored`): the keyed tensors say where they are.

    Raises:
        ConfigError: the number of groups is not that of names.
    """

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ConfigError(
                f"KTRegroupAsDict: got {len(groups)} groups and {len(keys)} keys; expected one key per group"
            )
        self._groups = groups
        self._keys = keys
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Name to ``[B, sum of the group's widths]``."""
        grouped = regroup_kts(keyed_tensors, self._groups)
        if self._dtype is not None:
            grouped = [g.to(self._dtype) for g in grouped]
        return dict(zip(self._keys, grouped))
