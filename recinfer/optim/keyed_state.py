"""Saves the state of keyed optimizers as plain values and copies it back in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from recinfer.errors import CheckpointError
from recinfer.optim.local_tensors import local_tensors

__all__ = ["check_names", "checked_copies", "saved"]


def check_names(what: str, own: Iterable[Any], given: Iterable[Any]) -> None:
    """Raise CheckpointError unless both sets of names are equal."""
    missing, unexpected = [k for k in own if k not in given], [k for k in given if k not in own]
    if missing or unexpected:
        raise CheckpointError(
            f"optimizer {what}: missing {missing}, unexpected {unexpected}; load a checkpoint of this model"
        )


def saved(value: Any) -> Any:
    """``value`` with objects replaced by their state dicts, if they have one."""
    if isinstance(value, dict):
        return {key: saved(inner) for key, inner in value.items()}
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def checked_copies(what: str, owner: Any, key: Any, given: Any) -> Iterable[Callable[[], Any]]:
    """Checks ``given`` and returns the functions that copy it into ``owner[key]`` in place.

    Raises:
        CheckpointError: ``given`` has another form; ``what`` names it in the message.
    """
    own = owner[key]
    if isinstance(own, dict):
        if not isinstance(given, Mapping):
            raise CheckpointError(f"optimizer state of {what}: got {type(given).__name__}; expected a dictionary")
        check_names(f"state of {what}", own, given)
        for inner in own:
            yield from checked_copies(f"{what}.{inner}", own, inner, given[inner])
    elif callable(getattr(own, "load_state_dict", None)):
        yield partial(own.load_state_dict, given)
    elif isinstance(own, Tensor | ShardedTensor) and isinstance(given, Tensor | ShardedTensor):
        targets, sources = local_tensors(own), local_tensors(given)
        if [t.shape for t in targets] != [s.shape for s in sources]:
            raise CheckpointError(
                f"optimizer state of {what}: got local shapes {[tuple(s.shape) for s in sources]}; expected "
                f"{[tuple(t.shape) for t in targets]}"
            )
        for target, source in zip(targets, sources):
            yield partial(target.copy_, source)
    else:
        yield partial(owner.__setitem__, key, deepcopy(given))
