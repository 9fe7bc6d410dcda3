"""A torch.fx tracer that keeps each embedding collection as one node of the graph."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx.node import Argument

from recinfer.distributed.model_parallel import get_module
from recinfer.distributed.types import LazyAwaitable, NoWait
from recinfer.errors import ConfigError
from recinfer.sparse.opaque import Opaque

__all__ = ["Tracer", "symbolic_trace"]


class Tracer(fx.Tracer):
    """A ``torch.fx.Tracer`` for which modules that read jagged data (:class:`~recinfer.sparse.opaque.Opaque`) are leaves.

    The leaves are the embedding collections (float, quantized and sharded), feature processors and KTRegroupAsDict. A
    graph is for the model below DistributedModelParallel and DistributedDataParallel, which is :attr:`root` after
    :meth:`trace`.

    Args:
        leaf_modules: names of more classes whose modules are leaves.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = leaf_modules or []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of ``m`` is kept as one node."""
        if isinstance(m, Opaque) or type(m).__name__ in self._leaf_modules:
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a module or function.

        Raises:
            ConfigError: ``root`` itself is a leaf.
            torch.fx.proxy.TraceError: its Python depends on the data.
        """
        if isinstance(root, nn.Module):
            root = get_module(root)
            if isinstance(root, Opaque):
                raise ConfigError(
                    f"a {type(root).__name__} is a leaf module and cannot be traced on its own; trace the model that "
                    f"holds it, or use recinfer.fx.symbolic_trace, which wraps it in a model"
                )
        graph = super().trace(root, concrete_args)
        _resolve_annotations(graph, root.forward if isinstance(root, nn.Module) else root)
        return graph

    def create_arg(self, a: Any) -> Argument:
        """``a`` as an argument of a node: the value of a LazyAwaitable, a NoWait as the call that makes it."""
        if isinstance(a, LazyAwaitable):
            return super().create_arg(a.wait())
        if isinstance(a, NoWait):
            return self.create_node("call_function", type(a), (self.create_arg(a.wait()),), {})
        return super().create_arg(a)


def _resolve_annotations(graph: fx.Graph, function: Callable[..., Any]) -> None:
    """Replace annotations that are text (``from __future__ import annotations``) by their classes.

    torch.fx writes them into the code of the GraphModule unchanged, where TorchScript cannot resolve them.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that the module imports for type checkers only
        hints = {}
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = hints.get("return" if node.op == "output" else node.target)


class _Holder(nn.Module):
    """A model whose only child is a module that is a leaf itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Any) -> Any:
        return self.module(features)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> fx.GraphModule:
    """A module that runs the operations recorded while ``root`` ran on symbols; its parameters are those of ``root``.

    Args:
        root: a model, also one in DistributedModelParallel, or a function. A module that is a leaf itself becomes the
            child ``module`` of the result.
        concrete_args: arguments of forward with a fixed value.
        leaf_modules: names of classes whose modules stay one node; recinfer's collections do anyway.

    Raises:
        torch.fx.proxy.TraceError: the model's Python depends on the data.
    """
    tracer = Tracer(leaf_modules)
    if isinstance(root, nn.Module) and isinstance(get_module(root), Opaque):
        root = _Holder(get_module(root))
    graph = tracer.trace(root, concrete_args)
    name = type(tracer.root).__name__ if isinstance(root, nn.Module) else root.__name__
    return fx.GraphModule(tracer.root, graph, name)
