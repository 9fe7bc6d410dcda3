"""Finds the inputs of sharded modules in a batch, by tracing the model symbolically."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from recinfer.distributed.types import ShardedModule
from recinfer.errors import ConfigError, InputError

__all__ = ["ArgInfo", "Tracer", "build_args", "find_sharded_calls"]


@dataclass
class ArgInfo:
    """The path from a batch to one argument of a module.

    Attributes:
        input_attrs: steps from the batch: ``batch.a["b"]`` is ``["a", "b"]``. Empty: the argument is None, or the batch
            itself if ``is_batch``.
        is_getitems: for each step whether it is an item (True) or an attribute (False).
        name: keyword of the argument; None for a positional one.
        is_batch: without steps, the argument is the batch.
    """

    input_attrs: list[Any] = field(default_factory=list)
    is_getitems: list[bool] = field(default_factory=list)
    name: str | None = None
    is_batch: bool = False

    def value(self, batch: Any) -> Any:
        """The argument in ``batch``.

        Raises:
            InputError: the batch has no such attribute or item.
        """
        if not self.input_attrs:
            return batch if self.is_batch else None
        found = batch
        for step, is_item in zip(self.input_attrs, self.is_getitems):
            try:
                found = found[step] if is_item else getattr(found, step)
            except (AttributeError, KeyError, IndexError, TypeError) as error:
                raise InputError(
                    f"the batch, a {type(batch).__name__}, has no {self.path()}, which the model read when the "
                    f"pipeline was built ({error}); every batch needs the fields of the first"
                ) from error
        return found

    def path(self) -> str:
        """``batch.a['b']``, for messages."""
        steps = zip(self.input_attrs, self.is_getitems)
        return "batch" + "".join(f"[{step!r}]" if is_item else f".{step}" for step, is_item in steps)


def build_args(infos: list[ArgInfo], batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments from ``batch``."""
    args = [info.value(batch) for info in infos if info.name is None]
    return args, {info.name: info.value(batch) for info in infos if info.name is not None}


class Tracer(fx.Tracer):
    """Tracer whose leaves are sharded modules, torch's own modules, and ``leaf_modules`` by path.

    Buffers are not proxied: models that change them in forward would not trace.
    """

    proxy_buffer_attributes = False

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = leaf_modules or []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of ``m`` is a single node."""
        if isinstance(m, ShardedModule) or module_qualified_name in self._leaf_modules:
            return True
        return super().is_leaf_module(m, module_qualified_name)


def find_sharded_calls(model: nn.Module) -> dict[str, list[ArgInfo]]:
    """Path of each sharded module that reads the batch itself -> its arguments.

    A module whose input is computed in the model (by anything but attributes and items of the batch) is left out: its
    input is not known before the forward.

    Raises:
        ConfigError: the model cannot be traced.
    """
    sharded = {name for name, module in model.named_modules() if isinstance(module, ShardedModule)}
    leaves = [*sharded, *_without_sharded(model)]
    try:
        graph = Tracer(leaf_modules=leaves).trace(model)
    except Exception as error:
        raise ConfigError(
            "a training pipeline traces the model (torch.fx) to find the inputs of sharded modules, and "
            f"{type(model).__name__} cannot be traced: {error}. Remove control flow that depends on data from its "
            "forward, or use TrainPipelineBase"
        ) from error
    first = next((node for node in graph.nodes if node.op == "placeholder"), None)
    calls: dict[str, list[ArgInfo]] = {}
    called_twice = set()
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in sharded:
            continue
        if node.target in calls:
            called_twice.add(node.target)
        pairs = [(None, arg) for arg in node.args] + list(node.kwargs.items())
        infos = [_path_to(arg, first, name) for name, arg in pairs]
        if all(info is not None for info in infos):
            calls[node.target] = [info for info in infos if info is not None]
    for name in called_twice:  # a batch has one request per module; a second call uses the module's own forward
        calls.pop(name, None)
    return calls


def _without_sharded(model: nn.Module) -> list[str]:
    """Modules without sharded modules in them. These modules are leaves: their outputs are computed, so they cannot be
    inputs that are read from the batch."""
    names = list(model.named_modules(remove_duplicate=False))  # a sharded module may have a second parent
    found = [path for path, module in names if isinstance(module, ShardedModule)]
    holders = {path[:at] for path in found for at, letter in enumerate(path) if letter == "."} | set(found)
    return [path for path, _ in names if path and path not in holders]


def _path_to(arg: Any, batch: fx.Node | None, name: str | None) -> ArgInfo | None:
    """The path from the batch to ``arg`` by attributes and items; None without such a path."""
    info = ArgInfo(name=name)
    if arg is None:
        return info
    while isinstance(arg, fx.Node) and arg is not batch:
        step: tuple[Callable[..., Any] | str, bool] | None = (
            _STEPS.get(arg.target) if arg.op == "call_function" else None
        )
        if step is None or len(arg.args) < 2:
            return None
        info.input_attrs.insert(0, arg.args[1])
        info.is_getitems.insert(0, step[1])
        arg = arg.args[0]
    info.is_batch = arg is batch
    return info if info.is_batch else None


_STEPS: Mapping[Any, tuple[str, bool]] = {getattr: ("attribute", False), operator.getitem: ("item", True)}
