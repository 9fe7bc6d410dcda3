"""Makes an example batch for a forward of the plain shape: one float matrix, and sparse inputs that it passes on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recinfer.archive.leaves import Leaf
from recinfer.capture import Stub, collision_stubs, model_copy
from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["made_batch"]

_SAMPLES = 16
_STUB_IDS = 7  # ids of each unpooled feature in 4 samples
_PROBE_WIDTH = 10007  # a width that no model has, to recognise the dense input where a Linear reads it
_ADVICE = "give an example batch (recinfer export --inputs FILE, or inputs= in Python)"


def made_batch(
    model: nn.Module, leaves: Sequence[Leaf], prepare: Callable[[nn.Module], object], num_dense: int | None
) -> tuple[Any, ...]:
    """Arguments of ``model.forward`` with random numbers.

    The model runs with unknown values as arguments: one that reaches an embedding module is a KeyedJaggedTensor, another
    one that is used otherwise is the dense matrix.

    Args:
        leaves: the model's embedding modules.
        prepare: fills the parameters of the copy without tables.
        num_dense: columns of the dense input, if they are known.

    Returns:
        ``(args, kwargs)``.

    Raises:
        ConfigError: forward is not of the plain shape.
    """
    if any(leaf.about.plain for leaf in leaves):
        raise ConfigError(
            f"the model's tables are torch.nn.Embedding or EmbeddingBag, whose ids may be any tensors; {_ADVICE}"
        )
    left_out = [name for name, p in inspect.signature(model.forward).parameters.items() if p.default is None]
    found = _Found(num_dense, left_out)
    stubs: dict[int, Any] = {id(leaf.module): _Vectors(leaf, found) for leaf in leaves}
    stubs |= collision_stubs(model, stubs)
    body = model_copy(model, stubs)
    prepare(body)
    for _ in range(4):  # the dense input, its width, the run that succeeds
        try:
            with torch.no_grad(), _FindWidth(found):
                args, kwargs = _arguments(body, lambda path: _value(path, found))
                body(*args, **kwargs)
            break
        except _Retry:
            continue
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(_explained(found, error)) from error
    if num_dense and not found.dense:
        raise ConfigError(f"the feature contract has {num_dense} dense columns, but forward uses no dense tensor")
    if found.dense and found.width is None:
        raise ConfigError(
            f"no Linear layer or matrix product reads the dense input {_text(found.dense)!r}, so its width is not known; {_ADVICE}"
        )
    return _batch(body, found)


class _Step(NamedTuple):
    """One step from a value to a part of it: an attribute or an item."""

    key: str | int
    is_item: bool


Path = tuple[_Step, ...]
"""A place in forward's arguments; the first step is the argument."""


def _text(path: Path) -> str:
    first, *rest = path
    return str(first.key) + "".join(f"[{step.key!r}]" if step.is_item else f".{step.key}" for step in rest)


@dataclass
class _Found:
    """The inputs of forward, as far as they are known."""

    width: int | None
    left_out: Sequence[str]  # arguments whose default is None
    dense: Path | None = None
    use: str = ""
    features: dict[Path, dict[str, Leaf]] = field(default_factory=dict)  # input -> feature -> a module that reads it
    weighted: set[Path] = field(default_factory=set)  # inputs whose ids need weights
    unpooled: bool = False  # whether forward has read unpooled vectors

    def about_defaults(self) -> str:
        """A clause about the arguments that a made batch leaves out, for messages."""
        names = ", ".join(map(repr, self.left_out))
        return f"; a made batch leaves out the arguments of forward whose default is None: {names}" if names else ""


class _Retry(Exception):
    """Raised where forward showed more about its inputs."""


class _Unknown:
    """An argument of forward, or a part of one, whose type is not known yet."""

    def __init__(self, path: Path, found: _Found) -> None:
        self.__dict__.update(_path=path, _found=found, _name=_text(path))

    def _child(self, key: str | int, is_item: bool) -> Any:
        return _value((*self._path, _Step(key, is_item)), self._found)

    def _is_dense(self, use: str) -> Any:
        found: _Found = self._found
        if found.dense:
            raise ConfigError(
                f"forward uses two inputs as tensors, {_text(found.dense)!r} and {self._name!r}: {found.use}, and {use}; {_ADVICE}, or "
                f"remove the training part (the loss) from forward"
            )
        found.dense, found.use = self._path, use
        raise _Retry

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(KeyedJaggedTensor, name) and name not in ("to", "device", "split"):
            raise ConfigError(
                f"forward calls {self._name}.{name}; if {self._name!r} is a KeyedJaggedTensor, {_ADVICE}"
                if not hasattr(Tensor, name)
                else f"forward uses {self._name}.{name}, of a tensor or a KeyedJaggedTensor; {_ADVICE}"
            )
        if hasattr(Tensor, name):
            return self._is_dense(f".{name} of it")
        return self._child(name, False)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str | int):
            return self._child(key, True)
        return self._is_dense("a slice of it")

    def split(self, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        """Like KeyedJaggedTensor.split: each part stands for the whole, since modules take features by name."""
        if args or kwargs or not isinstance(sizes, list | tuple):
            return self._is_dense(".split of it")
        return [self for _ in sizes]

    def __iter__(self) -> Any:
        raise ConfigError(f"forward iterates over its input {self._name!r}; {_ADVICE}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"forward calls {self._name!r}; {_ADVICE}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _flat([*args, *(kwargs or {}).values()]):
            if isinstance(value, _Unknown):
                return value._is_dense(f"{getattr(function, '__name__', function)} with it")
        raise AssertionError("a torch function without the unknown argument that called it")


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *_: self._is_dense(f"{name} with it")


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "lt", "gt", "le", "ge"):
    setattr(_Unknown, f"__{_name}__", _operator(_name))
    setattr(_Unknown, f"__r{_name}__", _operator(_name))
setattr(_Unknown, "__neg__", _operator("neg"))  # noqa: B010 - mypy wants no assignment to a method


def _flat(values: Sequence[Any]) -> list[Any]:
    result: list[Any] = []
    for value in values:
        result += _flat(list(value)) if isinstance(value, list | tuple) else [value]
    return result


class _Vectors(Stub):
    """An embedding module that returns random vectors and notes its input."""

    def __init__(self, leaf: Leaf, found: _Found) -> None:
        super().__init__(leaf.module)
        self.__dict__.update(_leaf=leaf, _found=found)

    def forward(self, features: Any) -> Any:
        leaf, found = self._leaf, self._found
        title = leaf.about.path or type(leaf.module).__name__
        if not isinstance(features, _Unknown):
            came = f"a {type(features).__name__} that forward computes" + found.about_defaults() * (features is None)
            raise ConfigError(f"the embedding module {title!r} gets {came}; {_ADVICE}")
        mine = found.features.setdefault(features._path, {})
        for feature in leaf.about.features:
            mine.setdefault(feature, leaf)
        if leaf.about.weighted:
            found.weighted.add(features._path)
        if leaf.about.pooled:
            return KeyedTensor(leaf.about.outputs, leaf.about.dims, torch.randn(4, sum(leaf.about.dims)))
        found.unpooled = True
        need_indices: Any = getattr(leaf.module, "need_indices", None)
        ids = torch.arange(_STUB_IDS) if callable(need_indices) and need_indices() else None
        lengths = torch.tensor([2, 0, 1, _STUB_IDS - 3])
        values = [torch.randn(_STUB_IDS, dim) for dim in leaf.about.dims]
        return {name: JaggedTensor(v, ids, lengths) for name, v in zip(leaf.about.outputs, values)}


class _FindWidth(TorchFunctionMode):
    """Finds the Linear layer or the matrix product that reads the dense input, by the width of a probe input."""

    def __init__(self, found: _Found) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._found.width is None:
            given, taken = _inner_sizes(function, args)
            extra = given - _PROBE_WIDTH
            if extra >= 0 and given != taken > extra:
                self._found.width = taken - extra
                raise _Retry
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


def _dense_tensor(found: _Found, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, _PROBE_WIDTH if found.width is None else found.width, generator=generator)


def _value(path: Path, found: _Found) -> Any:
    return _dense_tensor(found, 4) if path == found.dense else _Unknown(path, found)


def _arguments(body: nn.Module, value: Callable[[Path], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of forward that have no default, each the ``value`` of its path."""
    args, kwargs = [], {}
    for p in inspect.signature(body.forward).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or p.default is not p.empty:
            continue
        if p.kind is p.KEYWORD_ONLY:
            kwargs[p.name] = value((_Step(p.name, False),))
        else:
            args.append(value((_Step(p.name, False),)))
    return tuple(args), kwargs


def _explained(found: _Found, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    taken = (
        f"; {_text(found.dense)!r} was taken for the dense input, because forward uses {found.use}"
        if found.dense
        else ""
    )
    ids = (
        f"; an unpooled feature has any number of ids, here {_STUB_IDS} in 4 samples, and where each sample has one id "
        f".to_padded_dense(1).squeeze(1) of it is [samples, dim]"
        if found.unpooled and re.search(rf"\b{_STUB_IDS}\b", reason)
        else ""
    )
    return f"forward failed on a made batch: {reason}{taken}{ids}{found.about_defaults()}; {_ADVICE}"


def _batch(body: nn.Module, found: _Found) -> tuple[Any, ...]:
    values: dict[Path, Any] = {path: _ids(fs, path in found.weighted) for path, fs in found.features.items()}
    if found.dense is not None:
        values[found.dense] = _dense_tensor(found, _SAMPLES)
    return _arguments(body, lambda path: _built(path, values))


def _built(path: Path, values: dict[Path, Any]) -> Any:
    """The value at ``path``: a tensor, or an object around the values at longer paths; None if forward used none."""
    if path in values:
        return values[path]
    steps = dict.fromkeys(other[len(path)] for other in values if other[: len(path)] == path)
    if not steps:
        return None
    parts = {step: _built((*path, step), values) for step in steps}
    if all(step.is_item for step in steps):
        return {step.key: part for step, part in parts.items()}
    return SimpleNamespace(**{str(step.key): part for step, part in parts.items()})


def _ids(features: dict[str, Leaf], weighted: bool) -> KeyedJaggedTensor:
    """Ids of the features, 0 to 3 a sample."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (len(features), _SAMPLES), generator=generator)
    lengths[:, 0] = 2
    counts = lengths.sum(1).tolist()
    rows = {
        feature: min(c.num_embeddings for c in leaf.configs if feature in c.feature_names)
        for feature, leaf in features.items()
    }
    values = [torch.randint(0, rows[f], (n,), generator=generator) for f, n in zip(features, counts)]
    ids = torch.cat(values)
    return KeyedJaggedTensor(
        list(features),
        ids,
        weights=torch.rand(len(ids), generator=generator) + 0.5 if weighted else None,
        lengths=lengths.flatten().int(),
    )
