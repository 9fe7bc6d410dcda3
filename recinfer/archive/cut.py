"""Separates a model's dense part from its embedding modules, as one function of tensors.

The model runs with stand-ins: each embedding module returns given vectors instead of looking up, and each argument of
``forward`` is a stand-in that records whether it reaches an embedding module (a sparse input) or is used as a tensor
(the dense input). Any other use raises an error that names it.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recinfer.archive.leaves import Leaf, find_leaves
from recinfer.archive.standins import Argument, Refused, Slots, Stub, UsedAsTensor, named_outputs
from recinfer.errors import ConfigError

__all__ = ["Cut", "Leaf", "cut_model", "find_leaves"]

_PROBE_WIDTH = 10007  # a dense width that no model has, to recognise the dense input where a Linear reads it


@dataclass
class Cut:
    """The dense part of a model as one function.

    Attributes:
        program: ``forward(*tensors) -> dict[str, Tensor]``; inputs as :attr:`inputs` name them, outputs float32 [B, ...].
        inputs: names, in order.
        example: makes random inputs of a batch size.
        batch_axes: per input the name of its dynamic first dimension: ``"batch"``, or one of its own.
        num_dense: columns of the dense input; 0 without one.
        outputs: output names and shapes behind the batch.
    """

    program: nn.Module
    inputs: list[str]
    example: Callable[[int, int], list[Tensor]]
    batch_axes: list[str]
    num_dense: int
    outputs: dict[str, tuple[int, ...]]


def cut_model(
    model: nn.Module, leaves: Sequence[Leaf], load: Callable[[nn.Module], object], num_dense: int | None = None
) -> Cut | None:
    """Separate the dense part of ``model`` from the embedding modules ``leaves``.

    Args:
        model: not changed; its dense parameters may be on meta.
        leaves: the model's embedding modules, whose tables are neither copied nor read.
        load: fills the parameters and buffers of the model without its leaves.
        num_dense: columns of the dense input, if no Linear layer or matrix product determines them.

    Returns:
        the dense part, or None if the model is a single embedding module.

    Raises:
        ConfigError: the input of an embedding module is computed inside forward, two tensors are used as dense inputs,
            an output is not a batch of numbers, or num_dense is unknown. The message names the place.
    """
    if len(leaves) == 1 and leaves[0].module is model:
        return None
    slots = Slots(leaves)
    stubs: dict[int, Any] = {id(leaf.module): Stub(slots, i) for i, leaf in enumerate(leaves)}
    body = copy.deepcopy(model, stubs).eval()
    load(body)
    _refuse_meta(body)
    with torch.no_grad():
        dense_path, width = _discover(body, slots, num_dense)
        outputs = _check_outputs(body, slots, dense_path, width)
    names, axes = _input_names(leaves, width)
    program = _Program(body, slots, dense_path)
    return Cut(program, names, lambda batch, seed: _example(leaves, width, batch, seed), axes, width, outputs)


def _refuse_meta(body: nn.Module) -> None:
    stuck = [name for name, tensor in [*body.named_parameters(), *body.named_buffers()] if tensor.is_meta]
    for path, module in body.named_modules():
        plain = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        stuck += [f"{path}.{name}" if path else name for name in plain]
    if stuck:
        raise ConfigError(
            f"{', '.join(stuck[:5])} of the model are on the meta device and not in the checkpoint; create tensors "
            f"that are neither parameters nor persistent buffers on the CPU (only tables need device='meta')"
        )


class _Found(Exception):
    def __init__(self, num_dense: int) -> None:
        self.num_dense = num_dense


class _Program(nn.Module):
    """The dense part as a function of tensors: it fills the stand-ins, calls the model and names its outputs."""

    def __init__(self, body: nn.Module, slots: Slots, dense_path: str) -> None:
        super().__init__()
        self.model = body
        self.__dict__["_slots"] = slots  # not a submodule
        self._dense_path = dense_path

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        path = self._dense_path
        slots: Slots = self.__dict__["_slots"]
        slots.fill(tensors[1:] if path else tensors)
        try:
            return named_outputs(_call(self.model, {path: tensors[0]} if path else {}))
        finally:
            slots.fill([])


def _call(body: nn.Module, dense: Mapping[str, Tensor]) -> Any:
    """Run forward with stand-ins for the arguments that have no default."""
    args, kwargs = [], {}
    for name, parameter in inspect.signature(body.forward).parameters.items():
        if (
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            or parameter.default is not parameter.empty
        ):
            continue
        value = dense[name] if name in dense else Argument(name, dense)
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = value
        else:
            args.append(value)
    return body(*args, **kwargs)


class _FindDense(TorchFunctionMode):
    """Finds the Linear layer or the matrix product that reads the dense input, by the width of a probe input."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, taken = _inner_sizes(function, args)
        extra = given - _PROBE_WIDTH
        if extra >= 0 and given != taken > extra:
            raise _Found(taken - extra)
        return function(*args, **(kwargs or {}))


_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


def _inner_sizes(function: Any, args: Any) -> tuple[int, int]:
    """The two sizes that ``function`` contracts, the larger one first; (0, 0) if it contracts none."""
    if len(args) < 2 or not all(isinstance(value, Tensor) and value.dim() >= 2 for value in args[:2]):
        return 0, 0
    if function is nn.functional.linear:
        return args[0].shape[-1], args[1].shape[-1]
    if function in _PRODUCTS:  # crossnets multiply by their weights without a transpose
        sizes = args[0].shape[-1], args[1].shape[-2]
        return max(sizes), min(sizes)
    return 0, 0


def _discover(body: nn.Module, slots: Slots, num_dense: int | None) -> tuple[str, int]:
    """The path and the width of the dense input; ("", 0) without one."""
    path = use = ""
    width = num_dense
    while True:
        slots.given = [None] * len(slots.leaves)
        try:
            _run(body, slots, path, width, 4, use)
        except UsedAsTensor as used:
            if path:
                raise ConfigError(
                    f"forward uses two inputs as tensors, {path!r} and {used.path!r}: {use}, and {used.use}; "
                    f"recinfer passes a model one dense tensor; concatenate the inputs, or remove the training part (the loss) from forward"
                ) from None
            path, use = used.path, used.use
            continue
        except _Found as found:
            width = found.num_dense
            continue
        break
    _check_features(slots)
    if not path:
        if num_dense:
            raise ConfigError(f"num_dense is {num_dense}, but forward uses no dense tensor")
        return "", 0
    if width is None:
        raise ConfigError(
            f"no Linear layer or matrix product reads the dense input {path!r}, so its width is not known; give num_dense"
        )
    return path, width


def _run(body: nn.Module, slots: Slots, path: str, width: int | None, batch: int, use: str = "") -> dict[str, Tensor]:
    """Run the model once on random embeddings, with the probe width for a dense input of unknown width; ``use`` says
    how forward uses it."""
    dense = {path: torch.zeros(batch, _PROBE_WIDTH if width is None else width)} if path else {}
    slots.fill(_example(slots.leaves, 0, batch, 0))
    try:
        with _FindDense() if width is None else nullcontext():
            return named_outputs(_call(body, dense))
    except (UsedAsTensor, _Found, ConfigError):
        raise
    except Refused as refused:
        raise ConfigError(f"the dense part cannot be cut out: {refused}{_left_out(body)}") from None
    except Exception as error:
        why = _any_length(slots, str(error)) + _left_out(body)
        why += f"; {path!r} was taken for the dense input, because forward uses {use}" if use else ""
        if path and width is None:
            raise ConfigError(
                f"cannot tell the width of the dense input {path!r} ({type(error).__name__}: {error}); give num_dense{why}"
            ) from None
        came = f"the dense input {path!r} of shape {(batch, width)}" if path else "no dense input"
        raise ConfigError(
            f"forward failed on the tables' outputs and {came}: {type(error).__name__}: {error}{why}"
        ) from error


def _left_out(body: nn.Module) -> str:
    """A hint for an error: the arguments of forward whose default is None, their value in an export; "" without any."""
    names = [repr(name) for name, p in inspect.signature(body.forward).parameters.items() if p.default is None]
    if not names:
        return ""
    return (
        f"; an export runs forward with the defaults of its arguments: {', '.join(names)} {'is' if len(names) == 1 else 'are'} "
        f"None; remove the default of each one that the model needs"
    )


def _any_length(slots: Slots, sizes: str) -> str:
    """Explains a size that is the number of ids of an unpooled feature, where the number of samples was expected; ""
    if ``sizes`` names none."""
    for leaf, parts in zip(slots.leaves, slots.values):
        if leaf.pooled:
            continue
        for name, values, lengths in zip(leaf.outputs, parts[::2], parts[1::2]):
            if re.search(rf"\b{len(values)}\b", sizes) and len(values) != len(lengths):
                return (
                    f"; {name!r} has any number of ids a sample, here {len(values)} in {len(lengths)} samples, and its values() are "
                    f"[ids, dim]: where each sample has one id, take .to_padded_dense(1).squeeze(1), which is [samples, dim]"
                )
    return ""


def _check_features(slots: Slots) -> None:
    """Raises ConfigError if forward never calls a leaf, or if two different inputs share a feature name."""
    where: dict[str, str] = {}
    for leaf, path in zip(slots.leaves, slots.given):
        if path is None:
            raise ConfigError(f"forward never calls the embedding module {leaf.module_path!r}; remove it or use it")
        for feature in leaf.features:
            if where.setdefault(feature, path) != path:
                raise ConfigError(
                    f"feature {feature!r} comes from two inputs of forward, {where[feature]!r} and {path!r}; "
                    "give the features different names"
                )


def _input_names(leaves: Sequence[Leaf], num_dense: int) -> tuple[list[str], list[str]]:
    names, axes = (["dense"], ["batch"]) if num_dense else ([], [])
    for i, leaf in enumerate(leaves):
        if leaf.pooled:
            names.append(f"pooled_{i}")
            axes.append("batch")
            continue
        for j in range(len(leaf.outputs)):
            names += [f"sequence_{i}_{j}_values", f"sequence_{i}_{j}_lengths"]
            axes += [f"values_{i}_{j}", "batch"]
    return names, axes


def _example(leaves: Sequence[Leaf], num_dense: int, batch: int, seed: int) -> list[Tensor]:
    """Random inputs of the program for ``batch`` samples."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(batch, num_dense, generator=generator)] if num_dense else []
    with torch.device("cpu"):
        for leaf in leaves:
            if leaf.pooled:
                tensors.append(torch.randn(batch, sum(leaf.dims), generator=generator))
                continue
            for j, dim in enumerate(leaf.dims):
                lengths = torch.randint(0, 4, (batch,), generator=generator)
                lengths[0] = 2 + j % 2
                tensors += [torch.randn(int(lengths.sum()), dim, generator=generator), lengths]
    return tensors


def _check_outputs(body: nn.Module, slots: Slots, dense_path: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for batch in (3, 6):
        for name, value in _run(body, slots, dense_path, width, batch).items():
            if value.dim() < 1 or value.shape[0] != batch:
                raise ConfigError(
                    f"output {name!r} of forward has shape {tuple(value.shape)} for a batch of {batch}; "
                    "expected the batch as first dimension (remove the loss and other summaries from an inference "
                    f"model){_any_length(slots, str(value.shape[:1]))}"
                )
            shapes[name] = tuple(value.shape[1:])
    slots.fill([])
    return shapes
