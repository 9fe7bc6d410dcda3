"""Managed collisions in exports: the vocabulary of each table, from a model's settings and a checkpoint's ids.

Modules are recinfer's or TorchRec's, see :func:`recinfer.capture.collision_settings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.capture import CaptureError, collision_settings
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError, ConfigError, InputError
from recinfer.excerpts import some
from recinfer.module_tree import append_prefix, outermost_modules
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_modules import MCHManagedCollisionModule
from recinfer.modules.mc_slots import segments_of
from recinfer.modules.remapping import managed_collision_module
from recinfer.vocabulary.table import Segment, TableVocabulary

__all__ = ["vocabularies_of"]

_COLLECTION, _TABLES = "_managed_collision_collection", "_embedding_module"
_EMPTY = torch.iinfo(torch.int64).max  # the id of a slot without one, in sorted tables


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of each collection with managed collisions."""
    return outermost_modules(model, lambda m: hasattr(m, _COLLECTION) and hasattr(m, _TABLES))


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
            try:
                settings = collision_settings(part)
            except CaptureError as error:
                raise ConfigError(f"table {table!r}: {error}") from None
            made = _sorted if settings["class"] == MCHManagedCollisionModule.__name__ else _hashed
            vocabulary = made(table, settings, checkpoint, prefix)
            try:
                vocabulary.check(f"{checkpoint.path}: managed collisions of table {table!r}")
            except InputError as error:
                raise CheckpointError(
                    f"{error}; the model must have the settings of the training, such as input_hash_size"
                ) from None
            found[append_prefix(path, _TABLES), table] = vocabulary
    return found


def _sorted(table: str, settings: Mapping[str, Any], checkpoint: CheckpointReader, prefix: str) -> TableVocabulary:
    size, input_hash_size = settings["zch_size"], settings["input_hash_size"]
    ids = _read(table, checkpoint, f"{prefix}_mch_sorted_raw_ids", (size,))
    rows = _read(table, checkpoint, f"{prefix}_mch_remapped_ids_mapping", (size,))
    starts = [start for start in checkpoint.read(f"{prefix}_output_segments_tensor").tolist() if start >= 0]
    if not any(starts):
        raise _never_set(table, checkpoint)
    segments = tuple(Segment(first, stop - first, stop - 1) for first, stop in pairwise(starts))
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


def _hashed(table: str, settings: Mapping[str, Any], checkpoint: CheckpointReader, prefix: str) -> TableVocabulary:
    for name in ("inference_dispatch_div_train_world_size", "no_bag"):
        if settings[name]:
            raise ConfigError(
                f"table {table!r}: its managed collision module has {name}=True, which archives do not support; build it "
                f"without"
            )
    size, buckets = settings["zch_size"], settings["total_num_buckets"]
    stored = f"{prefix}{HashZchManagedCollisionModule.BUCKET_BUFFER}"
    if stored in checkpoint and int(checkpoint.read(stored)) != buckets:
        raise CheckpointError(
            f"{checkpoint.path}: the managed collisions of table {table!r} have {int(checkpoint.read(stored))} buckets, the "
            f"model's {buckets}; give the model with the settings of the training"
        )
    lookup = managed_collision_module({**settings, "disable_fallback": True}, torch.device("cpu"))
    assert isinstance(lookup, HashZchManagedCollisionModule)
    identities = _read(table, checkpoint, f"{prefix}{lookup.IDENTITY_BUFFER}", (size, 1))
    if size > 1 and not identities.any():
        raise _never_set(table, checkpoint)
    lookup._hash_zch_identities.data.copy_(identities)
    ids = torch.unique(identities)
    slots = lookup.slots_of(ids)
    held = ids != -1  # empty slots read as this id too
    lost = ids[(slots < 0) & held]
    if len(lost):
        raise CheckpointError(
            f"{checkpoint.path}: managed collisions of table {table!r}: a search finds {len(lost)} of {int(held.sum())} stored ids in no "
            f"slot, such as {some([str(id_) for id_ in lost.tolist()], 3)}, with max_probe={settings['max_probe']}, {buckets} "
            f"buckets and input_hash_size={settings['input_hash_size']}; give the model with the settings of the training"
        )
    reserved = max(lookup.get_reserved_slots_per_bucket(), 0)
    drops = settings["disable_fallback"]
    segments = tuple(_bucket(first, stop, reserved, drops) for first, stop in pairwise(settings["output_segments"]))
    found = slots >= 0
    return TableVocabulary(ids[found].numpy(), slots[found].numpy(), size, segments, settings["input_hash_size"])


def _bucket(first: int, stop: int, reserved: int, drops: bool) -> Segment:
    if drops:
        return Segment(first, stop - first, first, 0)
    return (
        Segment(first, stop - first, stop - reserved, reserved)
        if reserved
        else Segment(first, stop - first, first, stop - first)
    )


def _never_set(table: str, checkpoint: CheckpointReader) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: the managed collisions of table {table!r} have a state of zeros alone; a module has its state once it is "
        "made on a device, and a module of the meta device, or after to_empty(), once a state is loaded: do that before saving"
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
