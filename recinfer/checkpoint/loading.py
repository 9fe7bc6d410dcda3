"""Loads a checkpoint into a module tensor by tensor, after checking that all tensors fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recinfer.checkpoint.reader import CheckpointReader
from recinfer.errors import CheckpointError
from recinfer.excerpts import some

__all__ = ["KeyFilter", "LoadReport", "load_into"]

KeyFilter = Callable[[str], bool]
_SHOWN = 10


@dataclass(frozen=True)
class LoadReport:
    """The tensors that :func:`load_into` loaded, and the keys without a counterpart.

    Attributes:
        loaded: keys that were read.
        missing: keys of the module that the checkpoint lacks (they keep their values).
        extra: keys of the checkpoint that the module lacks.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


@torch.no_grad()
def load_into(
    reader: CheckpointReader,
    module: nn.Module,
    *,
    strict: bool = True,
    only: KeyFilter | Iterable[str] | None = None,
) -> LoadReport:
    """Load the tensors of ``module``'s state dict in place; tensors on the meta device are created on the CPU.

    No tensor exists twice: a CPU tensor is filled from the file, one on another device through one copy at a time.
    Nothing is changed before every key and shape is checked.

    Args:
        reader: the checkpoint; aligned with the module's keys (:meth:`CheckpointReader.align`).
        module: any module whose state dict has TorchRec's or its own plain names.
        strict: missing and extra keys are an error.
        only: the keys to load (a collection, or a function of the key); then nothing counts as extra.

    Raises:
        CheckpointError: keys missing, extra (both when strict) or of another shape, all named; a buffer on meta that
            no checkpoint holds.
    """
    tensors = dict(module.state_dict(keep_vars=True))
    reader.align(tensors)
    wanted = _select(tensors, only)
    missing = [k for k in wanted if k not in reader]
    extra = [] if only is not None else sorted(set(reader.keys()) - set(tensors))
    loading = [k for k in wanted if k in reader]
    misshapen = [
        f"{k}: {list(reader.shape(k))} in the checkpoint, {list(tensors[k].shape)} in the module"
        for k in loading
        if reader.shape(k) != tuple(tensors[k].shape)
    ]
    _report(reader, missing if strict else [], extra if strict else [], misshapen)
    made: dict[int, Tensor] = {}  # tied parameters stay tied
    for key in loading:
        _load_one(reader, module, key, tensors[key], made)
    if only is None and strict:
        _refuse_meta_buffers(module)
    for part in module.modules():
        validate = getattr(part, "validate_state", None)  # a module may sort what it searches
        if callable(validate):
            validate()
    return LoadReport(tuple(loading), tuple(missing), tuple(extra))


def _select(tensors: dict[str, Tensor], only: KeyFilter | Iterable[str] | None) -> list[str]:
    if only is None:
        return list(tensors)
    if callable(only):
        return [k for k in tensors if only(k)]
    chosen = set(only)
    unknown = sorted(chosen - set(tensors))
    if unknown:
        raise CheckpointError(f"only: the module has no {', '.join(unknown[:_SHOWN])}; expected keys of its state dict")
    return [k for k in tensors if k in chosen]


def _report(reader: CheckpointReader, missing: list[str], extra: list[str], misshapen: list[str]) -> None:
    parts = [
        f"{len(found)} {what}: " + some(found, _SHOWN, "; ")
        for what, found in (
            ("missing in the checkpoint", missing),
            ("not in the module", extra),
            ("of another shape", misshapen),
        )
        if found
    ]
    if parts:
        raise CheckpointError(
            f"{reader.path} does not fit the module (keys read under {reader.prefix!r}): "
            + " | ".join(parts)
            + ". Give the module that was trained, or strict=False to load what fits by name"
        )


def _load_one(reader: CheckpointReader, module: nn.Module, key: str, old: Tensor, made: dict[int, Tensor]) -> None:
    if not old.is_meta:
        if old.device.type == "cpu":
            reader.read_into(key, old.detach())
        else:
            old.detach().copy_(reader.read(key))
        return
    new = made.get(id(old))
    if new is None:
        values = torch.empty(old.shape, dtype=old.dtype)
        reader.read_into(key, values)
        new = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
        made[id(old)] = new
    owner_path, _, name = key.rpartition(".")
    owner = module.get_submodule(owner_path)
    (owner._parameters if name in owner._parameters else owner._buffers)[name] = new  # type: ignore[assignment]


def _refuse_meta_buffers(module: nn.Module) -> None:
    stuck = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if stuck:
        raise CheckpointError(
            f"buffers {', '.join(stuck[:_SHOWN])} are on the meta device and in no state dict (persistent=False), so "
            f"they have no values; create these parts of the module on the CPU"
        )
