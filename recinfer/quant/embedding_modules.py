"""Quantized EmbeddingBagCollection and EmbeddingCollection: packed tables in one buffer, one TBE call.

Names and signatures are TorchRec's (``torchrec.quant.embedding_modules``). Weights are uint8 packed rows (see
:mod:`recinfer.quant.packing`) and appear in ``state_dict`` as ``embedding_bags.<table>.weight`` or
``embeddings.<table>.weight``, views of the one buffer that the op reads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    check_table_name,
    dtype_to_data_type,
)
from recinfer.quant.lookup import ColumnPiece, PooledLookup, SequenceLookup
from recinfer.quant.packing import QPARAM_BYTES, pack_rows, row_bytes, unpack_rows
from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "PackedTable", "allocate_tables", "chosen_data_types"]

C = TypeVar("C", bound=BaseEmbeddingConfig)
_TABLE_ALIGNMENT = 128  # bytes; as FBGEMM lays tables out, so that no two share a cache line
SLACK_BYTES = 64
"""Bytes after the last table: vectorised kernels may read past a row's end."""


class PackedTable(nn.Module):
    """Holds one table's packed rows, uint8 [rows, row_bytes]: a view of the collection's buffer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)


def row_alignment_for(device: torch.device) -> int:
    """Row alignment FBGEMM needs: 1 on CPU (smaller and faster), 16 on a GPU."""
    return 1 if device.type in ("cpu", "meta") else 16


def allocate_tables(
    configs: Sequence[BaseEmbeddingConfig], device: torch.device, row_alignment: int
) -> tuple[Tensor, dict[str, int]]:
    """One zeroed uint8 buffer for all tables, and the byte offset of each; rows are not initialised on meta."""
    offsets: dict[str, int] = {}
    size = 0
    for config in configs:
        width = row_bytes(config.embedding_dim, config.data_type, row_alignment)
        # Less than a row between tables, so that the op can tell where each ends (TableBatch.knows_rows).
        align = _TABLE_ALIGNMENT
        while row_alignment == 1 and align > width:
            align //= 2
        offsets[config.name] = size
        size += -(-config.num_embeddings * width // align) * align
    return torch.zeros(size + SLACK_BYTES, dtype=torch.uint8, device=device), offsets


def chosen_data_types(
    configs: Sequence[BaseEmbeddingConfig], default: DataType, per_table: Mapping[str, DataType] | None = None
) -> dict[str, DataType]:
    """Precision of every table; raises ConfigError when ``per_table`` names a table that is not there."""
    names = {config.name for config in configs}
    unknown = sorted(set(per_table or {}) - names)
    if unknown:
        raise ConfigError(f"unknown tables {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    return {name: (per_table or {}).get(name, default) for name in names}


def _unpacked_weights(name: str, quantized: tuple[Tensor, Tensor | None], data_type: DataType) -> Tensor:
    """Packed rows from TorchRec's pair (codes, scale and bias)."""
    codes, scale_bias = quantized
    codes = codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes
    if data_type in (DataType.FP16, DataType.FP32):
        return codes
    if scale_bias is None:
        raise InputError(f"table {name!r}: got codes without scale and bias; {data_type.value} rows need both")
    qparams = scale_bias if scale_bias.dtype == torch.uint8 else scale_bias.half().contiguous().view(torch.uint8)
    return torch.cat([qparams.reshape(-1, QPARAM_BYTES), codes], dim=1)


L = TypeVar("L", bound=nn.Module)


class _QuantizedCollection(nn.Module, Generic[C, L]):
    """What the two collections share: the buffer, the views, state, copies to devices.

    ``C`` is the kind of config, ``L`` the lookup behind forward.
    """

    _tables_attribute: str
    _lookup: L
    _buffer: Tensor
    _offsets: dict[str, int]

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
            raise ConfigError(f"tables: got names {names}; expected at least one table, and no name twice")
        for name in names:
            check_table_name(type(self).__name__, name)
        self._configs: list[C] = [replace(table) for table in tables]
        self._output_dtype = output_dtype
        self._requested_alignment = row_alignment
        self._build(torch.device(device if device is not None else "cpu"))
        for name, quantized in (table_name_to_quantized_weights or {}).items():
            config = next((c for c in self._configs if c.name == name), None)
            if config is None:
                raise ConfigError(f"quantized weights for unknown table {name!r}; there are: {', '.join(names)}")
            self.load_packed(name, _unpacked_weights(name, quantized, config.data_type))

    def _build(self, device: torch.device) -> None:
        self._device = device
        self._row_alignment = self._requested_alignment or row_alignment_for(device)
        buffer, offsets = allocate_tables(self._configs, device, self._row_alignment)
        pieces = {c.name: (ColumnPiece(0, c.embedding_dim, offsets[c.name]),) for c in self._configs}
        views = nn.ModuleDict()
        for c in self._configs:
            width = row_bytes(c.embedding_dim, c.data_type, self._row_alignment)
            start = offsets[c.name]
            views[c.name] = PackedTable(buffer[start : start + c.num_embeddings * width].view(-1, width))
        setattr(self, self._tables_attribute, views)
        # Not a submodule: its buffers are views of what ``views`` holds already, and must not be saved or moved twice.
        self.__dict__["_lookup"] = self._make_lookup(pieces, buffer)
        self.__dict__["_buffer"] = buffer
        self.__dict__["_offsets"] = offsets

    def _make_lookup(self, pieces: Mapping[str, Sequence[ColumnPiece]], buffer: Tensor) -> L:
        raise AssertionError("each collection makes its own lookup")

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._device

    @property
    def buffer(self) -> Tensor:
        """All tables' packed rows, uint8, 1-D."""
        return self._buffer

    @property
    def table_offsets(self) -> dict[str, int]:
        """Byte offset of each table's first row in :attr:`buffer`."""
        return self._offsets

    @property
    def row_alignment(self) -> int:
        """Packed rows are multiples of this many bytes."""
        return self._row_alignment

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
        view[:, :need].copy_(packed[:, :need])

    def dequantized_table(self, name: str) -> Tensor:
        """A table as float32 [rows, dim]; for checks, it costs the whole float table."""
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

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE modules over the same bytes, for those who register them."""
        raise AssertionError("each collection lists its own")

    def copy(self, device: torch.device | str) -> Self:
        """A copy on ``device``; rows are re-padded to what that device needs."""
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
            self.__dict__.update({k: moved.__dict__[k] for k in ("_lookup", "_buffer", "_offsets", "_device")})
            self._row_alignment = moved._row_alignment
        return self


class EmbeddingBagCollection(_QuantizedCollection[EmbeddingBagConfig, PooledLookup]):
    """Quantized pooled tables.

    Args:
        tables: configs; ``data_type`` is the packed precision (INT8, INT4, INT2, FP16, FP32), mixed as you like.
        is_weighted: ids carry weights.
        device: ``"cpu"``, a CUDA device, or ``"meta"`` (planning).
        output_dtype: float32 or float16.
        table_name_to_quantized_weights: table -> (codes [R, bytes], scale and bias [R, 4 bytes] or None for floats).
        register_tbes, quant_state_dict_split_scale_bias, cache_features_order: accepted for compatibility; TBEs can
            always be had from :meth:`tbes`, orders of keys are always cached.
        row_alignment: default 1 on CPU, 16 on a GPU.

    ``forward(features: KeyedJaggedTensor) -> KeyedTensor``: keys in module order, values [B, sum of dims]. Tables never
    initialised hold zeros. Raises InputError for missing features and out-of-range ids.
    """

    _tables_attribute = "embedding_bags"
    _is_weighted: bool

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        cache_features_order: bool = False,
    ) -> None:
        self.__dict__["_is_weighted"] = is_weighted  # the base builds the lookup, which asks
        super().__init__(tables, device, output_dtype, table_name_to_quantized_weights, row_alignment)

    def _make_lookup(self, pieces: Mapping[str, Sequence[ColumnPiece]], buffer: Tensor) -> PooledLookup:
        return PooledLookup(
            self._configs,
            pieces,
            buffer,
            is_weighted=self._is_weighted,
            row_alignment=self._row_alignment,
            output_dtype=self._output_dtype,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature."""
        return self._lookup.forward(features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE module over the same bytes."""
        return [self._lookup.batch.fbgemm_module()]

    @classmethod
    def from_float(
        cls,
        module: Any,
        use_precomputed_fake_quant: bool = False,
        *,
        data_type: DataType | None = None,
        per_table: Mapping[str, DataType] | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> EmbeddingBagCollection:
        """Quantize a float collection (ours, or any with ``embedding_bags[name].weight``), table by table.

        The precision is ``per_table``'s, else ``data_type``, else the weight type of ``module.qconfig`` (how TorchRec's
        users say it), else INT8. Raises InputError for a weight that is not finite, naming table and row.
        """
        configs = list(module.embedding_bag_configs())
        types = chosen_data_types(configs, data_type or _qconfig_type(module), per_table)
        weights = {c.name: module.embedding_bags[c.name].weight for c in configs}
        device = next(iter(weights.values())).device
        quantized = cls(
            [_requantized(c, types[c.name], EmbeddingBagConfig) for c in configs],
            bool(module.is_weighted()),
            device,
            output_dtype,
        )
        if device.type != "meta":
            for name, weight in weights.items():
                quantized.load_float(name, weight)
        return quantized


class EmbeddingCollection(_QuantizedCollection[EmbeddingConfig, SequenceLookup]):
    """Quantized unpooled tables. Args as :class:`EmbeddingBagCollection`.

    ``forward(features) -> dict[str, JaggedTensor]`` in module order, values [N_f, dim]; with ``need_indices`` the
    JaggedTensors' weights are the ids.
    """

    _tables_attribute = "embeddings"
    _need_indices: bool

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        cache_features_order: bool = False,
    ) -> None:
        self.__dict__["_need_indices"] = need_indices  # the base builds the lookup, which asks
        super().__init__(tables, device, output_dtype, table_name_to_quantized_weights, row_alignment)

    def _make_lookup(self, pieces: Mapping[str, Sequence[ColumnPiece]], buffer: Tensor) -> SequenceLookup:
        return SequenceLookup(
            self._configs,
            pieces,
            buffer,
            row_alignment=self._row_alignment,
            output_dtype=self._output_dtype,
            need_indices=self._need_indices,
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """One vector per id of every feature."""
        return self._lookup.forward(features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of the first table (TorchRec's collections have one width; ours may mix)."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names, table by table."""
        names = iter(self._lookup.names)
        return [[next(names) for _ in config.feature_names] for config in self._configs]

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._need_indices

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE modules over the same bytes, one per width."""
        return [batch.fbgemm_module() for batch in self._lookup.batches]

    @classmethod
    def from_float(
        cls,
        module: Any,
        use_precomputed_fake_quant: bool = False,
        *,
        data_type: DataType | None = None,
        per_table: Mapping[str, DataType] | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> EmbeddingCollection:
        """As :meth:`EmbeddingBagCollection.from_float`, for ``embeddings[name].weight``."""
        configs = list(module.embedding_configs())
        types = chosen_data_types(configs, data_type or _qconfig_type(module), per_table)
        weights = {c.name: module.embeddings[c.name].weight for c in configs}
        device = next(iter(weights.values())).device
        quantized = cls(
            [_requantized(c, types[c.name], EmbeddingConfig) for c in configs],
            device,
            bool(module.need_indices()) if hasattr(module, "need_indices") else False,
            output_dtype,
        )
        if device.type != "meta":
            for name, weight in weights.items():
                quantized.load_float(name, weight)
        return quantized


def _qconfig_type(module: Any) -> DataType:
    """The weight type that a TorchRec user put on the module as ``qconfig``; INT8 without one."""
    qconfig = getattr(module, "qconfig", None)
    return dtype_to_data_type(qconfig.weight().dtype) if qconfig is not None else DataType.INT8


def _requantized(config: Any, data_type: DataType, kind: type[C]) -> C:
    """Our config with the packed precision, from ours or TorchRec's (read by attributes)."""
    fields: dict[str, Any] = {
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "name": config.name,
        "data_type": data_type,
        "feature_names": list(config.feature_names),
    }
    if kind is EmbeddingBagConfig:
        from recinfer.modules.embedding_configs import PoolingType

        fields["pooling"] = PoolingType(config.pooling.value)
    return kind(**fields)
