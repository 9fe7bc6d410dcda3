"""Packed shards in buffers: whether they cover their tables, as whole column pieces, joined, copied to a device.

Shape suffixes: R rows, P packed bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recinfer.distributed.quant_layout import PackedShard, shard_name
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType
from recinfer.quant.lookup import ColumnPiece
from recinfer.quant.rows import join_packed_columns, row_bytes
from recinfer.quant.tbe import managed_bytes

__all__ = [
    "allocate_shards",
    "column_parts",
    "fused_pieces",
    "joined_pieces",
    "place_shards",
    "rows_view",
]

_SLACK_BYTES = 64  # vectorised kernels may read past the last row
_ALIGNMENT = 128
_COPY_BYTES = 64 << 20

ColumnParts = dict[tuple[int, int], list[PackedShard]]
"""Of one table: columns -> its row pieces from top to bottom; columns from left to right."""


def column_parts(configs: Sequence[BaseEmbeddingConfig], shards: Sequence[PackedShard]) -> dict[str, ColumnParts]:
    """The shards of every table in the order in which they cover it.

    Raises:
        ConfigError: the shards of a table do not cover it exactly once.
    """
    by_table: dict[str, list[PackedShard]] = {config.name: [] for config in configs}
    for shard in sorted(shards, key=lambda s: (s.col_start, s.col_stop, s.row_start, s.row_stop)):
        by_table[shard.table].append(shard)
    return {config.name: _column_parts(config, by_table[config.name]) for config in configs}


def _column_parts(config: BaseEmbeddingConfig, shards: Sequence[PackedShard]) -> ColumnParts:
    columns: ColumnParts = {}
    for shard in shards:
        columns.setdefault((shard.col_start, shard.col_stop), []).append(shard)
    at = 0
    for (start, stop), parts in columns.items():
        edges = [0, *(part.row_stop for part in parts)]
        if start != at or [part.row_start for part in parts] != edges[:-1] or edges[-1] != config.num_embeddings:
            break
        at = stop
    else:
        if at == config.embedding_dim:
            return columns
    raise ConfigError(
        f"table {config.name!r}: shards {'; '.join(map(shard_name, shards)) or '(none)'} do not cover its "
        f"{config.num_embeddings} rows x {config.embedding_dim} columns exactly once"
    )


def fused_pieces(
    configs: Sequence[BaseEmbeddingConfig], parts: Mapping[str, ColumnParts]
) -> dict[str, tuple[ColumnPiece, ...]] | None:
    """Whole column pieces of every table, when the row pieces of each are neighbours in the buffer; else None.

    Args:
        parts: of :func:`column_parts`; row alignment 1.
    """
    pieces: dict[str, tuple[ColumnPiece, ...]] = {}
    for config in configs:
        merged = []
        for (start, stop), rows in parts[config.name].items():
            width = row_bytes(stop - start, config.data_type)
            if any(part.offset != rows[0].offset + part.row_start * width for part in rows):
                return None
            merged.append(ColumnPiece(start, stop, rows[0].offset))
        pieces[config.name] = tuple(merged)
    return pieces


_JOIN_BYTES = 8 << 20  # of whole rows a step: temporary memory stays bounded


def joined_pieces(
    configs: Sequence[BaseEmbeddingConfig], pieces: Mapping[str, Sequence[ColumnPiece]], buffer: Tensor
) -> tuple[dict[str, tuple[ColumnPiece, ...]], Tensor, Tensor | None]:
    """Tables that are cut by columns put together again.

    A cut table costs a row's cache misses once a piece, and its ids once more for the op to read. Whole rows cost
    their bytes a second time, in memory that no other process shares. Where the uncut tables are no more than the cut
    ones, all move: the op checks ids itself only where all tables lie in one buffer, in order.

    Args:
        pieces: table -> its pieces in ``buffer`` (row alignment 1).

    Returns:
        the pieces, their buffer, and a second one that joined tables lie in (None: all lie in the first).
    """
    sizes = {c.name: c.num_embeddings * row_bytes(c.embedding_dim, c.data_type) for c in configs}
    cut = [c for c in configs if len(pieces[c.name]) > 1]
    whole = {name: tuple(parts) for name, parts in pieces.items()}
    if not cut:
        return whole, buffer, None
    cut_bytes = sum(sizes[c.name] for c in cut)
    moved = list(configs) if sum(sizes.values()) <= 2 * cut_bytes else cut
    new = torch.zeros(sum(sizes[c.name] for c in moved) + _SLACK_BYTES, dtype=torch.uint8)
    at = 0
    for config in moved:
        size = sizes[config.name]
        _join(config, pieces[config.name], buffer, new[at : at + size].view(config.num_embeddings, -1))
        where = ColumnPiece(0, config.embedding_dim, at)
        whole[config.name] = (where if moved is not cut else replace(where, memory="managed"),)
        at += size
    return (whole, buffer, new) if moved is cut else (whole, new, None)


def _join(config: BaseEmbeddingConfig, pieces: Sequence[ColumnPiece], buffer: Tensor, out_RP: Tensor) -> None:
    """Packed rows from their pieces, some at a time."""
    step = max(1, _JOIN_BYTES // out_RP.shape[1])
    for first in range(0, config.num_embeddings, step):
        last = min(first + step, config.num_embeddings)
        parts = []
        for piece in pieces:
            width = row_bytes(piece.col_stop - piece.col_start, config.data_type)
            span = buffer[piece.offset + first * width : piece.offset + last * width]
            parts.append((piece.col_start, piece.col_stop, span.view(last - first, width)))
        if len(parts) == 1:
            out_RP[first:last] = parts[0][2]
            continue
        out_RP[first:last] = join_packed_columns(
            parts, config.embedding_dim, config.data_type, table=config.name, first_row=first
        )


def allocate_shards(
    types: Mapping[str, DataType], shards: Sequence[PackedShard], device: torch.device, row_alignment: int
) -> tuple[Tensor, Tensor | None, list[PackedShard]]:
    """Zeroed buffers for shards on ``device``.

    Args:
        types: table -> precision.

    Returns:
        the buffer in the device's memory (uint8, 1-D), the one in managed memory for shards that a GPU leaves there
        (None without any), and the shards with their offsets in the two.
    """
    placed, sizes = [], {True: 0, False: 0}
    for shard in shards:
        near = shard.memory == "near" or device.type != "cuda"
        placed.append(replace(shard, offset=sizes[near]))
        num_bytes = shard.rows * row_bytes(shard.cols, types[shard.table], row_alignment)
        sizes[near] += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.zeros(sizes[True] + _SLACK_BYTES, dtype=torch.uint8, device=device)
    managed = managed_bytes(sizes[False] + _SLACK_BYTES, device) if sizes[False] else None
    return buffer, managed, placed


def rows_view(
    shard: PackedShard, data_type: DataType, buffer: Tensor, managed: Tensor | None, row_alignment: int
) -> Tensor:
    """Rows of a shard of :func:`allocate_shards`, uint8 [rows, row bytes], a view."""
    width = row_bytes(shard.cols, data_type, row_alignment)
    target = buffer if managed is None or shard.memory == "near" else managed
    return target[shard.offset : shard.offset + shard.rows * width].view(shard.rows, width)


def place_shards(
    configs: Sequence[BaseEmbeddingConfig],
    shards: Sequence[PackedShard],
    rows_of: Callable[[PackedShard], Tensor],
    device: torch.device,
    row_alignment: int,
) -> tuple[Tensor, Tensor | None, list[PackedShard]]:
    """Copy shards into buffers of their own for ``device``, re-padding rows to ``row_alignment``.

    As :func:`allocate_shards`, with the rows.

    Args:
        rows_of: gives a shard's packed rows, uint8 [rows, >= row_bytes at alignment 1], on CPU.
    """
    types = {config.name: config.data_type for config in configs}
    buffer, managed, placed = allocate_shards(types, shards, device, row_alignment)
    for shard, spot in zip(shards, placed):
        packed_RP = rows_of(shard)
        need = row_bytes(shard.cols, types[shard.table])
        view = rows_view(spot, types[shard.table], buffer, managed, row_alignment)
        width = view.shape[1]
        # A copy between rows of two widths passes through memory of its size on the device.
        step = max(1, _COPY_BYTES // width)
        for at in range(0, shard.rows, step):
            view[at : at + step, :need].copy_(packed_RP[at : at + step, :need])
    return buffer, managed, placed
