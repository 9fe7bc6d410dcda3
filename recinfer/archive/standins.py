"""Placeholders for embedding modules and forward's arguments during the export of the dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from recinfer.archive.leaves import Leaf
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["Argument", "Refused", "Slots", "Stub", "UsedAsTensor", "named_outputs"]


_IF_SPARSE = " (if it is a KeyedJaggedTensor, forward must pass it to the embedding modules unchanged)"


class Refused(Exception):
    """Raised for a use of forward's arguments that the export does not support; reported as a ConfigError."""


class UsedAsTensor(Exception):
    """Raised when forward uses an argument as a tensor; ``use`` describes the use, for messages."""

    def __init__(self, path: str, use: str) -> None:
        self.path = path
        self.use = use


class Argument:
    """A placeholder for an argument of forward, or an attribute of one, whose type is not known yet."""

    def __init__(self, path: str, dense: Mapping[str, Tensor]) -> None:
        self.__dict__["_path"] = path
        self.__dict__["_dense"] = dense

    def _child(self, path: str) -> Any:
        return self._dense[path] if path in self._dense else Argument(path, self._dense)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(Tensor, name):
            both = hasattr(KeyedJaggedTensor, name)
            raise UsedAsTensor(self._path, f".{name} of it" + (_IF_SPARSE if both else ""))
        return self._child(f"{self._path}.{name}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str | int):
            return self._child(f"{self._path}[{key!r}]")
        raise UsedAsTensor(self._path, "a slice of it")

    def split(self, sizes: Any, *args: Any, **kwargs: Any) -> Any:
        """Like KeyedJaggedTensor.split; each part represents the whole, because an embedding module selects its
        features by name.

        A tensor is split along a dimension that is named: the default is the batch, which has no fixed sizes.
        """
        if args or kwargs or not isinstance(sizes, list | tuple):
            raise UsedAsTensor(self._path, ".split of it")
        return [Argument(self._path, self._dense) for _ in sizes]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise Refused(
            f"forward calls {self._path!r}; forward must pass sparse inputs to embedding modules unchanged "
            f"(transform ids in the feature contract instead)"
        )

    def __iter__(self) -> Any:
        raise Refused(f"forward iterates over its input {self._path!r}; access its parts by name instead")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in _flat([*args, *(kwargs or {}).values()]):
            if isinstance(value, Argument):
                raise UsedAsTensor(value._path, f"{getattr(function, '__name__', function)} with it")
        raise AssertionError("a torch function without the stand-in that called it")


def _arithmetic(name: str) -> None:
    def used(self: Argument, *_: Any) -> Any:
        raise UsedAsTensor(self._path, f"{name} with it")

    setattr(Argument, name, used)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "pow",
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "neg",
    "lt",
    "gt",
    "le",
    "ge",
):
    _arithmetic(f"__{_name}__")


def _flat(values: Sequence[Any]) -> list[Any]:
    result: list[Any] = []
    for value in values:
        result += _flat(list(value)) if isinstance(value, list | tuple) else [value]
    return result


class _WithoutIndices(JaggedTensor):
    """A sequence of a collection with ``need_indices=True``, which puts the ids into the weights; the dense part of an
    archive gets vectors and lengths."""

    @classmethod
    def of(cls, sequence: JaggedTensor, what: str) -> JaggedTensor:
        self = cls.__new__(cls)
        vars(self).update(vars(sequence), _what=what)
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Refused(
            f"forward reads the ids that {self._what} puts into the weights of its outputs (need_indices=True); "  # type: ignore[attr-defined]
            "the dense part of an archive gets vectors and lengths, no ids: remove what needs them from an inference model"
        )

    weights = weights_or_none = to_dense_weights = to_padded_dense_weights = _refuse


class Slots:
    """The outputs that the stand-ins of the embedding modules return, and the inputs that they received."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = list(leaves)
        self.values: list[list[Tensor]] = [[] for _ in leaves]
        self.given: list[str | None] = [None] * len(leaves)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Set the outputs of the next calls: one tensor per pooled module, values and lengths per sequence feature."""
        rest = list(tensors)
        for i, leaf in enumerate(self.leaves):
            count = 1 if leaf.pooled else 2 * len(leaf.outputs)
            self.values[i], rest = rest[:count], rest[count:]

    def answer(self, index: int, argument: Any) -> Any:
        leaf = self.leaves[index]
        what = f"the embedding module {leaf.module_path or type(leaf.module).__name__!r}"
        if argument is None:
            raise Refused(f"the input of {what} is None; it must be an input of forward, or an attribute of one")
        if not isinstance(argument, Argument):
            came = (
                "a tensor input of forward that is also used elsewhere" if isinstance(argument, Tensor) else "a value"
            )
            raise Refused(
                f"the input of {what} is {came} of type {type(argument).__name__}, computed or used inside forward; "
                "it must be an input of forward, or an attribute of one, passed on unchanged"
            )
        path = argument._path
        if self.given[index] not in (None, path):
            raise Refused(f"{what} is called with two inputs, {self.given[index]!r} and {path!r}; expected one")
        self.given[index] = path
        parts = self.values[index]
        if leaf.pooled:
            return KeyedTensor(keys=leaf.outputs, length_per_key=leaf.dims, values=parts[0])
        need_indices = getattr(leaf.module, "need_indices", None)
        sequences = {
            name: JaggedTensor.from_parts_unchecked(parts[2 * j], None, parts[2 * j + 1])
            for j, name in enumerate(leaf.outputs)
        }
        if callable(need_indices) and need_indices():
            return {name: _WithoutIndices.of(sequence, what) for name, sequence in sequences.items()}
        return sequences


class Stub(nn.Module):
    """A stand-in for an embedding module."""

    def __init__(self, slots: Slots, index: int) -> None:
        super().__init__()
        self.__dict__["_slots"] = slots
        self._index = index

    def forward(self, features: Any) -> Any:
        return self._slots.answer(self._index, features)

    def __deepcopy__(self, memo: Any) -> Stub:
        return self

    def __getattr__(self, name: str) -> Any:
        # Models may read dims and names from their embedding modules, which needs no weights.
        try:
            return super().__getattr__(name)
        except AttributeError:
            slots: Slots = self.__dict__["_slots"]
            if name.startswith("__"):
                raise
            return getattr(slots.leaves[self._index].module, name)


def named_outputs(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        items: dict[str, Any] = {"output": value}
    elif isinstance(value, KeyedTensor):
        items = dict(value.to_dict())
    elif isinstance(value, Mapping):
        items = {str(key): item for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = dict(zip(value._fields, value))
    elif isinstance(value, tuple | list):
        items = {f"output_{i}": item for i, item in enumerate(value)}
    else:
        raise Refused(
            f"forward returns a {type(value).__name__}; expected a tensor, or a dict, tuple or KeyedTensor of them"
        )
    for name, item in items.items():
        if not isinstance(item, Tensor):
            raise Refused(f"output {name!r} of forward is a {type(item).__name__}; expected a tensor")
    return {name: item.float() for name, item in items.items()}
