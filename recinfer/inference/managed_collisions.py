"""Managed collisions in exports: the vocabulary of each table, from a model's settings and a checkpoint's ids.

Modules are recinfer's or TorchRec's; both have the attributes that are read here. Their classes are recognized by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError, ConfigError, InputError
from recinfer.excerpts import some
from recinfer.inference.modules import replace_modules
from recinfer.module_tree import append_prefix, outermost_modules
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.zero_collision import segments_of
from recinfer.vocabulary.table import Segment, TableVocabulary

__all__ = ["vocabularies_of", "without_collisions"]

_COLLECTION, _TABLES = "_managed_collision_collection", "_embedding_module"
_EMPTY = torch.iinfo(torch.int64).max  # the id of a slot without one, in sorted tables


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of each collection with managed collisions."""
    return outermost_modules(model, lambda m: hasattr(m, _COLLECTION) and hasattr(m, _TABLES))


class _PassOn(nn.Module):
    """Managed collisions that leave ids as they are: the archive's vocabularies map them."""

    def forward(self, features: Any, *_: Any, **__: Any) -> Any:
        return features

    def evict(self) -> dict[str, None]:
        return {}


def without_collisions(model: nn.Module) -> nn.Module:
    """``model`` with tables that take raw ids; the model itself, if it has no managed collisions.

    Raises:
        ConfigError: a collection that also returns the rows of its ids.
    """
    collections = set()
    for path, module in _wrappers(model):
        if getattr(module, "_return_remapped_features", False):
            raise ConfigError(
                f"module {path!r} is a {type(module).__name__} that returns the rows of its ids too, which no server returns; "
                f"build it with return_remapped_features=False"
            )
        collections.add(id(getattr(module, _COLLECTION)))
    return replace_modules(model, lambda _, module: _PassOn() if id(module) in collections else None)


def vocabularies_of(model: nn.Module, checkpoint: CheckpointReader) -> dict[tuple[str, str], TableVocabulary]:
    """(module path, table) -> the table's vocabulary, for each table with managed collisions.

    Args:
        model: the model with its managed collisions, whose settings are read; its buffers are not, and may be on meta.
        checkpoint: holds the ids of each table, under the model's keys.

    Raises:
        ConfigError: settings that a server does not support, and a class of modules that it does not know.
        CheckpointError: ids that do not fit the settings, and a missing key.
    """
    found = {}
    for path, module in _wrappers(model):
        collisions = getattr(module, _COLLECTION)._managed_collision_modules
        for table, part in collisions.items():
            prefix = append_prefix(path, f"{_COLLECTION}._managed_collision_modules.{table}.")
            vocabulary = _vocabulary(table, part, checkpoint, prefix)
            try:
                vocabulary.check(f"{checkpoint.path}: managed collisions of table {table!r}")
            except InputError as error:
                raise CheckpointError(
                    f"{error}; the model must have the settings of the training, such as input_hash_size"
                ) from None
            found[append_prefix(path, _TABLES), table] = vocabulary
    return found


def _vocabulary(table: str, part: Any, checkpoint: CheckpointReader, prefix: str) -> TableVocabulary:
    kinds = {kind.__name__ for kind in type(part).__mro__}
    if "MCHManagedCollisionModule" in kinds:
        return _sorted(table, part, checkpoint, prefix)
    if "HashZchManagedCollisionModule" in kinds:
        return _hashed(table, part, checkpoint, prefix)
    raise ConfigError(
        f"table {table!r}: its managed collision module is a {type(part).__name__}; expected MCHManagedCollisionModule or "
        f"HashZchManagedCollisionModule"
    )


def _sorted(table: str, part: Any, checkpoint: CheckpointReader, prefix: str) -> TableVocabulary:
    if part._input_hash_func is not None:
        raise ConfigError(
            f"table {table!r}: its managed collision module hashes ids by input_hash_func, a Python function that no server "
            f"runs; hash the ids before they reach the model, in training and in requests"
        )
    size = part.output_size()
    ids = _read(table, checkpoint, f"{prefix}_mch_sorted_raw_ids", (size,))
    rows = _read(table, checkpoint, f"{prefix}_mch_remapped_ids_mapping", (size,))
    starts = [start for start in checkpoint.read(f"{prefix}_output_segments_tensor").tolist() if start >= 0]
    segments = tuple(Segment(first, stop - first, stop - 1) for first, stop in pairwise(starts))
    input_hash_size = part.input_size()
    if not input_hash_size and len(segments) > 1:
        input_hash_size = 1  # ranks spread all ids by the remainder of unsigned numbers
    held = ids != _EMPTY
    # A search for the id of empty slots finds the first of them.
    free = (rows >= 0) & ~held & (_segments_of(rows, starts) == _segment_of(_EMPTY, input_hash_size, len(segments)))
    held[free.nonzero()[:1]] = True
    return TableVocabulary(ids[held].numpy(), rows[held].numpy(), size, segments, input_hash_size)


def _segments_of(rows: Tensor, starts: list[int]) -> Tensor:
    return torch.searchsorted(torch.tensor(starts), rows, right=True) - 1


def _segment_of(id_: int, input_hash_size: int, count: int) -> int:
    return int(segments_of(torch.tensor([id_]), input_hash_size, max(count, 1)))


def _hashed(table: str, part: Any, checkpoint: CheckpointReader, prefix: str) -> TableVocabulary:
    divided = getattr(part, "_divided", None)
    if divided is None:
        divided = part.input_mapper._inference_dispatch_div_train_world_size
    for name, given in (("inference_dispatch_div_train_world_size", divided), ("no_bag", part._no_bag)):
        if given:
            raise ConfigError(
                f"table {table!r}: its managed collision module has {name}=True, which archives do not support; build it "
                f"without"
            )
    size, buckets = part.output_size(), part.buckets()
    stored = f"{prefix}{HashZchManagedCollisionModule.BUCKET_BUFFER}"
    if stored in checkpoint and int(checkpoint.read(stored)) != buckets:
        raise CheckpointError(
            f"{checkpoint.path}: the managed collisions of table {table!r} have {int(checkpoint.read(stored))} buckets, the "
            f"model's {buckets}; give the model with the settings of the training"
        )
    lookup = HashZchManagedCollisionModule(
        size,
        torch.device("cpu"),
        buckets,
        part._max_probe,
        part.input_size(),
        list(part._output_segments),
        is_inference=True,
        name=table,
        opt_in_prob=part._opt_in_prob,
        percent_reserved_slots=part._percent_reserved_slots,
        disable_fallback=True,
    )
    identities = _read(table, checkpoint, f"{prefix}{lookup.IDENTITY_BUFFER}", (size, 1))
    lookup._hash_zch_identities.data.copy_(identities)
    ids = torch.unique(identities)
    slots = lookup.slots_of(ids)
    lost = ids[(slots < 0) & (ids != -1)]
    if len(lost):
        raise CheckpointError(
            f"{checkpoint.path}: managed collisions of table {table!r}: a search finds {len(lost)} of {len(ids)} stored ids in "
            f"no slot, such as {some([str(i) for i in lost.tolist()], 3)}, with max_probe={part._max_probe}, {buckets} buckets and input_hash_size="
            f"{part.input_size()}; give the model with the settings of the training"
        )
    reserved = max(lookup.get_reserved_slots_per_bucket(), 0)
    segments = tuple(
        _bucket(first, stop, reserved, part._disable_fallback) for first, stop in pairwise(part._output_segments)
    )
    found = slots >= 0
    return TableVocabulary(ids[found].numpy(), slots[found].numpy(), size, segments, part.input_size())


def _bucket(first: int, stop: int, reserved: int, drops: bool) -> Segment:
    if drops:
        return Segment(first, stop - first, first, 0)
    return (
        Segment(first, stop - first, stop - reserved, reserved)
        if reserved
        else Segment(first, stop - first, first, stop - first)
    )


def _read(table: str, checkpoint: CheckpointReader, key: str, shape: tuple[int, ...]) -> Tensor:
    """An int64 tensor of a managed collision module."""
    if key not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.path}: has no {key!r}, the ids of table {table!r}; give a checkpoint of the model with its managed "
            f"collisions"
        )
    if checkpoint.shape(key) != shape or checkpoint.dtype(key) != torch.int64:
        raise CheckpointError(
            f"{checkpoint.path}: {key} is {checkpoint.dtype(key)} {list(checkpoint.shape(key))}; expected int64 {list(shape)}, "
            f"one number per row of the model's table"
        )
    return checkpoint.read(key)
