"""Loads a checkpoint with its optimizer state into a model with any sharding and number of ranks, in bounded memory.

Every rank reads the rectangles of its own shards and nothing else; no rank holds a table that it does not own, and
ranks exchange no data. If the sharding changes, the layout of row-wise optimizer state (one number per row and column
shard) changes too: joined shards get the mean weighted by columns, which is the value of the whole row; the parts of a
split shard get its value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import Optimizer

from recinfer.checkpoint.dcp import Chunk, StoredTensor
from recinfer.checkpoint.loading import LoadReport
from recinfer.checkpoint.reader import CheckpointReader
from recinfer.checkpoint.shard_state import state_of_all_ranks
from recinfer.distributed.embedding_types import ShardedEmbeddingModule
from recinfer.distributed.model_parallel import get_module
from recinfer.errors import CheckpointError
from recinfer.excerpts import some
from recinfer.module_tree import missing_keys
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from recinfer.optim.local_tensors import local_pieces

__all__ = ["keyed_optimizer", "load_checkpoint", "own_names", "read_rectangle"]

_BLOCK_BYTES = 16 << 20
_SEPARATORS = (".", "::")
# Names of one state in optimizers of one process and in fused kernels, for the Adagrads, Adam and LAMB.
_ALIASES = {
    "sum": ("momentum1",),
    "momentum1": ("sum", "exp_avg"),
    "exp_avg": ("momentum1",),
    "exp_avg_sq": ("momentum2",),
    "step": ("iter",),
    "iter": ("step",),
}
_COUNTS = ("step", "iter")  # states with one number per parameter or table, for any sharding


@torch.no_grad()
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Read ``model``'s state, and the optimizer's, in place. With a process group every rank calls this.

    Args:
        folder: a torch.distributed.checkpoint folder that recinfer or TorchRec wrote, at any world size and sharding,
            or a ``.pt`` state dict. The model's keys may have any prefix.
        model: sharded (its state dict holds ShardedTensors) or not.
        optimizer: keyed optimizers (``DistributedModelParallel.fused_optimizer``, CombinedOptimizer) or torch's, over
            the model's parameters.
        strict: missing and extra keys of the model are an error, and so is missing optimizer state.

    Raises:
        CheckpointError: keys missing, extra or of another shape, all named; nothing of the model is changed then.
    """
    reader = CheckpointReader(folder)
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor | ShardedTensor)}
    reader.align(state)
    missing = missing_keys(get_module(model), [key for key in state if key not in reader], set(reader.keys()))
    state = {key: value for key, value in state.items() if key in reader or key in missing}
    report = _match(reader, state, strict)
    plans = []
    if optimizer is not None:
        keyed = keyed_optimizer(model, optimizer)
        keyed.init_state()
        plans = _optimizer_plan(reader, keyed, own_names(model, keyed), model.state_dict(), strict)
    for key in report.loaded:
        stored = reader.tensor(key)
        for target, offsets in local_pieces(state[key]):
            read_rectangle(stored, key, target, offsets)
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingModule):
            module.purge()  # cached rows would be stale after the replacement
    for apply in plans:
        apply()
    if optimizer is not None:
        keyed.post_load_state_dict()
    return report


def keyed_optimizer(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> KeyedOptimizer:
    """Combine optimizers into one keyed optimizer; a plain torch optimizer gets the model's parameter names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: list[KeyedOptimizer | tuple[str, KeyedOptimizer]] = []
    for part in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        if isinstance(part, KeyedOptimizer):
            parts.append(part)
            continue
        params = {names.get(id(p), ""): p for group in part.param_groups for p in group["params"]}
        if "" in params:
            raise CheckpointError(f"{type(part).__name__} optimizes parameters that are not the model's")
        parts.append(KeyedOptimizerWrapper(params, _given(part)))
    return parts[0] if len(parts) == 1 and isinstance(parts[0], KeyedOptimizer) else CombinedOptimizer(parts)


def _given(optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    return lambda params: optimizer


def own_names(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, str]:
    """Parameter name in ``optimizer`` -> the model's own name for it.

    The names differ by a prefix if the optimizer was made for a module around the model (DLRMTrain around DLRM). Several
    shards of one table on a rank are ``weight``, ``weight_1`` ... in the optimizer, and ``weight`` in the model. The state
    of a schedule, which the model does not have, keeps its name.

    Raises:
        CheckpointError: no prefix makes them fit.
    """
    known = set(model.state_dict())
    own = optimizer.own_state_names()
    names = [name for name in optimizer.params if name not in own]
    prefixes = {""} | {name[: at + 1] for name in names[:1] for at, letter in enumerate(name) if letter == "."}
    for prefix in sorted(prefixes, key=len):
        found = {name: _of_first_shard(name.removeprefix(prefix), known) for name in names if name.startswith(prefix)}
        if len(found) == len(names) and known.issuperset(found.values()):
            return found | {name: name for name in own}
    raise CheckpointError(
        f"the optimizer's parameters ({', '.join(names[:4])} ...) are not the model's ({', '.join(sorted(known)[:4])} ...)"
    )


def _of_first_shard(name: str, known: Collection[str]) -> str:
    """``name`` without the number of a shard, if the model has no parameter of this name."""
    first, _, number = name.rpartition("_")
    return first if name not in known and number.isdigit() else name


def _match(reader: CheckpointReader, state: Mapping[str, Any], strict: bool) -> LoadReport:
    missing = sorted(key for key in state if key not in reader)
    extra = sorted(set(reader.keys()) - set(state))
    if reader.prefix == "":
        extra = [key for key in extra if not key.startswith("optim")]
    wrong = [
        f"{key} has shape {reader.shape(key)}, the model's is {tuple(value.size())}"
        for key, value in state.items()
        if key in reader and reader.shape(key) != tuple(value.size())
    ]
    if wrong or (strict and (missing or extra)):
        told = [f"{len(missing)} keys are missing ({some(missing, 5)})"] if missing else []
        told += [f"{len(extra)} are not the model's ({some(extra, 5)})"] if extra else []
        told += [some(wrong, 3, "; ")] if wrong else []
        raise CheckpointError(f"{reader.path} does not fit the model: {'; '.join(told)}")
    return LoadReport(tuple(sorted(set(state) - set(missing))), tuple(missing), tuple(extra))


# --------------------------------------------------------------------------------------------------- optimizer state


def _optimizer_plan(
    reader: CheckpointReader,
    optimizer: KeyedOptimizer,
    names: Mapping[str, str],
    model: Mapping[str, Any],
    strict: bool,
) -> list[Any]:
    """The copies that restore each state of ``optimizer``; all are checked before any is made."""
    plans, missing = [], []
    stored = set(reader.stored_keys())
    for name, values in state_of_all_ranks(optimizer, names, model).items():
        found = {
            state_name: _stored_state(stored, names[name], str(state_name))
            for state_name, value in values.items()
            if isinstance(value, Tensor | ShardedTensor)
        }
        for state_name, key in found.items():
            value = values[state_name]
            if key is None:
                # A fused kernel that needs no count of steps stores none.
                if state_name != "step" or not any(found.values()):
                    missing.append(f"{names[name]}: {state_name}")
                continue
            if names[name] not in model:
                plans.append(_copy_plan(reader.stored(key), key, value))
                continue
            weight = reader.tensor(names[name])
            plans.append(_state_plan(reader.stored(key), key, value, model[names[name]], weight))
    plans += _counts_of_further_shards(optimizer, names)
    if missing and strict:
        raise CheckpointError(
            f"{reader.path}: {len(missing)} states of the optimizer are missing ({some(missing, 5, none='none')}); strict=False "
            f"initializes them"
        )
    return plans


def _stored_state(stored: Iterable[str], parameter: str, state: str) -> str | None:
    table, _, short = state.rpartition(".")
    table = table or parameter.split(".")[-2] if "." in parameter else table
    candidates = [state, short, f"{table}.{short}"]
    for other in _ALIASES.get(short, ()):
        candidates += [other, f"{table}.{other}"]
    for candidate in candidates:
        for separator in _SEPARATORS:
            end = f"{parameter}{separator}{candidate}"
            for key in stored:
                if key.startswith("optim") and key.endswith(end) and key[-len(end) - 1 : -len(end)] in (".", ""):
                    return key
    return None


def _state_plan(stored: StoredTensor, key: str, value: Any, parameter: Any, weight: StoredTensor) -> Any:
    """The copies of one state, which has one number per element, per row and column shard, or in all."""
    targets = local_pieces(value)
    if not targets:
        return lambda: None
    shape = stored.shape
    if key.endswith(_COUNTS) and stored.shape in ((), (1,)):
        count = torch.empty(shape, dtype=stored.dtype)

        def set_count() -> None:
            read_rectangle(stored, key, count, (0,) * len(shape))
            for target, _ in targets:
                target.fill_(count.item())

        return set_count
    if not shape or len(weight.shape) < 2 or (shape == weight.shape and targets[0][0].dim() == len(shape)):
        return _copy_plan(stored, key, value)
    rows = weight.shape[0]
    spans = sorted({(c.offsets[1], c.offsets[1] + c.sizes[1]) for c in weight.chunks})
    if shape in ((rows,), (rows, 1)):  # one number per row, so the whole row is one piece
        spans = [(0, weight.shape[1])]
    elif shape != (rows * len(spans),):
        raise CheckpointError(
            f"{key} has shape {shape}; expected {rows * len(spans)} numbers, one for each of {rows} rows and "
            f"{len(spans)} column shards of the weight"
        )
    places = [(offsets, tuple(piece.shape)) for piece, offsets in local_pieces(parameter)]
    if len(places) != len(targets):
        raise CheckpointError(
            f"{key}: the optimizer has {len(targets)} state tensors for {len(places)} shards of the weight"
        )

    def apply() -> None:
        for (target, _), ((row, col), (height, width)) in zip(targets, places):
            flat = target.view(-1)
            flat.zero_()
            for at, (start, stop) in enumerate(spans):
                overlap = min(stop, col + width) - max(start, col)
                if overlap > 0:
                    part = torch.empty((height, *shape[1:]), dtype=flat.dtype)
                    read_rectangle(stored, key, part, (at * rows + row, *(0 for _ in shape[1:])))
                    flat.add_(part.view(-1).to(flat.device), alpha=overlap / width)

    return apply


def _copy_plan(stored: StoredTensor, key: str, value: Any) -> Callable[[], None]:
    """The copy of a state that is stored in the shape that it has here."""
    if tuple(value.size()) != stored.shape:
        raise CheckpointError(f"{key} has shape {stored.shape}, the optimizer's state has {tuple(value.size())}")

    def copy() -> None:
        for target, offsets in local_pieces(value):
            read_rectangle(stored, key, target, offsets)

    return copy


def _counts_of_further_shards(optimizer: KeyedOptimizer, names: Mapping[str, str]) -> list[Callable[[], Any]]:
    """The copies of a table's step counts from its first shard on this rank to its others; see own_names."""
    states, first, copies = optimizer.state_dict()["state"], {}, []
    for name, values in states.items():
        source = first.setdefault(names[name], values)
        if source is not values:
            counts = [key for key, value in values.items() if isinstance(value, Tensor) and not value.dim()]
            copies += [partial(values[key].copy_, source[key]) for key in counts]
    return copies


# --------------------------------------------------------------------------------------------------- rectangles


def read_rectangle(stored: StoredTensor, key: str, target: Tensor, offsets: Sequence[int]) -> None:
    """Fill ``target`` with the rectangle at ``offsets`` of the stored tensor.

    Raises:
        CheckpointError: the rectangle reaches beyond the tensor, or a file is missing or damaged.
    """
    shape = tuple(target.shape)
    if len(shape) != len(stored.shape) or any(o + s > whole for o, s, whole in zip(offsets, shape, stored.shape)):
        raise CheckpointError(
            f"{key}: got the rectangle {shape} at {tuple(offsets)}, but the tensor has shape {stored.shape}"
        )
    for chunk in stored.chunks:
        if not shape:
            whole = torch.empty((), dtype=stored.dtype)
            chunk.data.read_rows(0, 1, whole)
            target.copy_(whole)
            continue
        starts = [max(o, c) for o, c in zip(offsets, chunk.offsets)]
        stops = [min(o + s, c + n) for o, s, c, n in zip(offsets, shape, chunk.offsets, chunk.sizes)]
        if all(a < b for a, b in zip(starts, stops)):
            _copy_overlap(chunk, stored.dtype, target, offsets, starts, stops)


def _copy_overlap(
    chunk: Chunk, dtype: torch.dtype, target: Tensor, offsets: Sequence[int], starts: list[int], stops: list[int]
) -> None:
    """Copy in blocks of rows, so that memory is bounded for any width."""
    width = max(1, torch.Size(chunk.sizes[1:]).numel())
    rows = max(1, _BLOCK_BYTES // (width * dtype.itemsize))
    for first in range(starts[0], stops[0], rows):
        last = min(first + rows, stops[0])
        block = torch.empty((last - first, *chunk.sizes[1:]), dtype=dtype)
        chunk.data.read_rows(first - chunk.offsets[0], last - chunk.offsets[0], block)
        place = target[first - offsets[0] : last - offsets[0]]
        for dim in range(1, target.dim()):
            block = block.narrow(dim, starts[dim] - chunk.offsets[dim], stops[dim] - starts[dim])
            place = place.narrow(dim, starts[dim] - offsets[dim], stops[dim] - starts[dim])
        place.copy_(block)
