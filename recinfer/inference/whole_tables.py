"""Dequantizes the tables whose rows forward reads as a whole, such as the items that it scores all."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recinfer.archive.delta import Delta
from recinfer.archive.reader import Archive
from recinfer.archive.rows import RowReader
from recinfer.errors import UnavailableError
from recinfer.quant.rows import unpack_rows

__all__ = ["read_whole_tables"]


def read_whole_tables(archive: Archive, deltas: Sequence[Delta]) -> dict[str, Tensor]:
    """Input of the dense program -> float32 [rows, dim], with ``deltas`` applied; empty for most archives.

    Raises:
        UnavailableError: the archive was opened without its rows, as rankers do.
    """
    dense = archive.manifest.dense
    wanted = [] if dense is None else [about for about in dense.inputs if about.kind == "table"]
    if not wanted:
        return {}
    if len(archive.rank_files) < archive.manifest.world_size:
        raise UnavailableError(
            f"forward reads all rows of table {wanted[0].feature!r}, and this process holds none; serve this model without "
            f"shard servers"
        )
    found = {}
    with RowReader(archive) as reader:
        for about in wanted:
            assert about.module is not None
            assert about.feature is not None
            planned = archive.plan.table(about.module, about.feature)
            packed = reader.read(planned, 0, planned.num_embeddings)
            for delta in deltas:
                packed = delta.patch(about.module, about.feature, 0, packed)
            found[about.name] = unpack_rows(packed, planned.embedding_dim, planned.precision)
    return found
