"""Base class of the quantized collections: packed tables in one buffer, their state, and copies to devices."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, check_table_name
from recinfer.quant.buffers import Buffers, Placed, allocate, whole_table
from recinfer.quant.formats.registry import row_format
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import row_bytes, unpack_rows
from recinfer.sparse.opaque import Opaque

if TYPE_CHECKING:
    from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen

__all__ = ["PackedTable", "QuantizedCollection"]

C = TypeVar("C", bound=BaseEmbeddingConfig)
L = TypeVar("L", bound=nn.Module)


class PackedTable(nn.Module):
    """Holds one table's packed rows, uint8 [rows, row_bytes]: a view of the collection's buffer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)


def _unpacked_weights(name: str, quantized: tuple[Tensor, Tensor | None], data_type: DataType) -> Tensor:
    """Packed rows from TorchRec's pair (codes, scale and bias)."""
    codes, scale_bias = quantized
    codes = codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes
    lead_bytes = row_format(data_type).lead_bytes
    if not lead_bytes:
        return codes
    if scale_bias is None:
        raise InputError(f"table {name!r}: got codes without scale and bias; {data_type.value} rows need both")
    qparams = scale_bias if scale_bias.dtype == torch.uint8 else scale_bias.half().contiguous().view(torch.uint8)
    return torch.cat([qparams.reshape(-1, lead_bytes), codes], dim=1)


class QuantizedCollection(Opaque, nn.Module, Generic[C, L]):
    """Base class of both collections: the buffer, views of it, state, and copies to devices.

    ``C`` is the kind of config, ``L`` the lookup behind forward.
    """

    _tables_attribute: str
    _lookup: L
    _storage: Buffers
    _placed: dict[str, Placed]

    def __init__(
        self,
        tables: Sequence[C],
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None,
        row_alignment: int | None,
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if not tables or len(set(names)) != len(names):
            raise ConfigError(f"tables: got names {names}; expected at least one table, and different names")
        for name in names:
            check_table_name(type(self).__name__, name)
        self._configs: list[C] = [replace(table) for table in tables]
        self._output_dtype = output_dtype
        self._requested_alignment = row_alignment
        self._build(torch.device(device if device is not None else "cpu"))
        for name, quantized in (table_name_to_quantized_weights or {}).items():
            config = next((c for c in self._configs if c.name == name), None)
            if config is None:
                raise ConfigError(f"quantized weights for unknown table {name!r}; the tables are: {', '.join(names)}")
            self.load_packed(name, _unpacked_weights(name, quantized, config.data_type))

    def _build(self, device: torch.device) -> None:
        self._device = device
        buffers, placed = allocate([whole_table(c) for c in self._configs], device, self._requested_alignment)
        views = nn.ModuleDict({table.rect.table: PackedTable(buffers.rows(table)) for table in placed})
        setattr(self, self._tables_attribute, views)
        # Not submodules: their buffers are views of what ``views`` holds already, and must not be saved or moved twice.
        self.__dict__["_storage"] = buffers
        self.__dict__["_placed"] = {table.rect.table: table for table in placed}
        self.__dict__["_lookup"] = self._make_lookup({name: (table,) for name, table in self._placed.items()})

    def _make_lookup(self, pieces: Mapping[str, Sequence[Placed]]) -> L:
        raise AssertionError("subclasses implement this")

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self._device

    @property
    def storage(self) -> Buffers:
        """All tables' packed rows."""
        return self._storage

    @property
    def placed(self) -> dict[str, Placed]:
        """The position of each table in :attr:`storage`."""
        return self._placed

    @property
    def row_alignment(self) -> int:
        """Packed rows are multiples of this many bytes."""
        return self._storage.row_alignment

    def output_dtype(self) -> torch.dtype:
        """Element type of the looked-up vectors."""
        return self._output_dtype

    def packed_table(self, name: str) -> Tensor:
        """Packed rows of a table, uint8 [rows, row_bytes], sharing memory with the module."""
        return getattr(self, self._tables_attribute)[name].weight

    def load_packed(self, name: str, packed: Tensor) -> None:
        """Copy packed rows [rows, row_bytes(dim, type)] (row alignment 1 or this module's) into a table."""
        view = self.packed_table(name)
        config = next(c for c in self._configs if c.name == name)
        need = row_bytes(config.embedding_dim, config.data_type)
        if packed.dim() != 2 or packed.shape[0] != view.shape[0] or packed.shape[1] < need:
            raise InputError(
                f"table {name!r}: got packed rows of shape {tuple(packed.shape)}; "
                f"expected ({view.shape[0]}, {need}) for {config.embedding_dim} {config.data_type.value} columns"
            )
        self._storage.write(self._placed[name], packed)

    def dequantized_table(self, name: str) -> Tensor:
        """A table as float32 [rows, dim]; allocates the whole float table."""
        config = next(c for c in self._configs if c.name == name)
        return unpack_rows(self.packed_table(name).cpu(), config.embedding_dim, config.data_type)

    def load_float(self, name: str, weight: Tensor) -> None:
        """Quantize a float table [rows, dim] into place, in bounded chunks."""
        config = next(c for c in self._configs if c.name == name)
        expected = (config.num_embeddings, config.embedding_dim)
        if tuple(weight.shape) != expected:
            raise InputError(f"table {name!r}: got weights of shape {tuple(weight.shape)}; expected {expected}")
        step = max(1, (1 << 23) // config.embedding_dim)
        view = self.packed_table(name)
        width = row_bytes(config.embedding_dim, config.data_type)
        for start in range(0, config.num_embeddings, step):
            chunk = weight[start : start + step].detach().cpu()
            view[start : start + step, :width] = pack_rows(chunk, config.data_type, table=name, first_row=start).to(
                view.device
            )

    def _holding(self, weights: Mapping[str, Tensor]) -> Self:
        """Quantize the float tables into this collection and return it; no effect on the meta device."""
        if self._device.type != "meta":
            for name, weight in weights.items():
                self.load_float(name, weight)
        return self

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE modules over the same bytes, for registration."""
        raise AssertionError("subclasses implement this")

    def copy(self, device: torch.device | str) -> Self:
        """A copy on ``device``; rows are padded as that device requires."""
        target = torch.device(device)
        clone = copy.copy(self)
        clone._modules = dict(self._modules)
        clone._configs = [replace(c) for c in self._configs]
        clone._build(target)
        if "meta" not in (target.type, self._device.type):
            for config in self._configs:
                clone.load_packed(config.name, self.packed_table(config.name))
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy(self._device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # .to(device) must rebuild, since rows are padded for their device; casts do not touch packed rows.
        target = fn(torch.empty(0, dtype=torch.uint8, device=self._device)).device
        if target != self._device:
            moved = self.copy(target)
            self._modules = moved._modules
            self.__dict__.update({k: moved.__dict__[k] for k in ("_lookup", "_storage", "_placed", "_device")})
        return self
