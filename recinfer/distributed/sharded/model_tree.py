"""Traverses a model with sharded modules: their parameters and optimizers, and parameters on the meta device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from recinfer.distributed.types import ShardedModule
from recinfer.errors import ConfigError
from recinfer.module_tree import named_children
from recinfer.optim.fused import FusedOptimizerModule
from recinfer.optim.keyed import KeyedOptimizer

__all__ = [
    "fused_optimizers",
    "get_unsharded_module_names",
    "join",
    "materialise",
    "sharded_parameter_names",
    "some_of",
]


def join(prefix: str, name: str) -> str:
    """The prefix of a child's keys, with its dot."""
    return f"{prefix}{name}."


def sharded_parameter_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Parameters that sharded modules synchronise themselves."""
    if isinstance(module, ShardedModule):
        yield from module.sharded_parameter_names(prefix.removesuffix("."))
        return
    for name, child in named_children(module):
        yield from sharded_parameter_names(child, join(prefix, name))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialise parameters and buffers on the meta device; move the others to ``device``."""
    if isinstance(module, ShardedModule):
        return  # the sharder has built the module on its device
    for child in module.children():
        materialise(child, device)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    was_meta = any(tensor.is_meta for tensor in own)
    if any(tensor.device != device for tensor in own):
        module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device), recurse=False)
    if was_meta:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            names = ", ".join(
                n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            )
            raise ConfigError(
                f"{type(module).__name__} has parameters on the meta device ({names}) and no reset_parameters() to "
                "give them values; build it on a real device, or pass init_parameters=False and load a state"
            )
        reset()


def fused_optimizers(
    module: nn.Module, path: str = "", done: set[int] | None = None
) -> list[tuple[str, KeyedOptimizer]]:
    """Path and optimizer of every module that updates its parameters in the backward."""
    done = set() if done is None else done
    if id(module) in done:
        return []
    done.add(id(module))
    if isinstance(module, FusedOptimizerModule):
        return [(path, module.fused_optimizer)]
    found = []
    for name, child in named_children(module):
        found += fused_optimizers(child, f"{path}.{name}" if path else name, done)
    return found


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the outermost modules that contain no sharded module and are none; [] if nothing is sharded."""

    def holds_sharded(module: nn.Module) -> bool:
        return any(isinstance(m, ShardedModule) for m in module.modules())

    def names(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in named_children(module):
            if not holds_sharded(child):
                yield prefix + name
            elif not isinstance(child, ShardedModule):
                yield from names(child, f"{prefix}{name}.")

    return list(names(model, "")) if holds_sharded(model) and not isinstance(model, ShardedModule) else []


def some_of(keys: list[str]) -> str:
    """The first few names, as text for a message."""
    return ", ".join(keys[:5]) + (" ..." if len(keys) > 5 else "") if keys else "none"
