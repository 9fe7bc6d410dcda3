"""Awaitables: values that are computed or received asynchronously, with an explicit or an implicit wait."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

__all__ = [
    "Awaitable",
    "GenericMeta",
    "LazyAwaitable",
    "LazyNoWait",
    "NoWait",
]


W = TypeVar("W")


class Awaitable(abc.ABC, Generic[W]):
    """An asynchronous value; :meth:`wait` returns it after applying the callbacks in order."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abc.abstractmethod
    def _wait_impl(self) -> W: ...

    def wait(self) -> W:
        """Block until the value is available."""
        value = self._wait_impl()
        for callback in self.callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that are applied to the value; append to the list to add one."""
        return self._callbacks


class NoWait(Awaitable[W]):
    """An awaitable whose value is available already."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class GenericMeta(type):
    """Exists for code that uses it as a metaclass."""


class LazyAwaitable(Awaitable[W]):
    """An awaitable that waits implicitly when its value is used by a torch function, an attribute access or an
    operator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._result: W | None = None
        self._done = False

    def wait(self) -> W:
        """The value; computed once."""
        if not self._done:
            self._result = super().wait()
            self._done = True
        return self._result  # type: ignore[return-value]

    @staticmethod
    def _wait_async(obj: Any) -> Any:
        return obj.wait() if isinstance(obj, LazyAwaitable) else obj

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(cls._wait_async, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not on the awaitable itself.
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("_result", "_done", "_callbacks"):
            raise RuntimeError(
                f"{type(self).__name__} was not initialised: its __init__ has to call super().__init__()"
            )
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload]


class LazyNoWait(LazyAwaitable[W]):
    """A lazy awaitable whose value is available already."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _forward(op: Callable, reflected: bool) -> Callable:
    def method(self: LazyAwaitable, other: Any) -> Any:
        mine, theirs = self.wait(), LazyAwaitable._wait_async(other)
        return op(theirs, mine) if reflected else op(mine, theirs)

    return method


def _forward_unary(op: Callable) -> Callable:
    def method(self: LazyAwaitable) -> Any:
        return op(self.wait())

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_", "xor")
for _name in _BINARY:
    _method = _name.rstrip("_")
    setattr(LazyAwaitable, f"__{_method}__", _forward(getattr(operator, _name), False))
    setattr(LazyAwaitable, f"__r{_method}__", _forward(getattr(operator, _name), True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LazyAwaitable, f"__{_name}__", _forward(getattr(operator, _name), False))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(LazyAwaitable, f"__{_name}__", _forward_unary(getattr(operator, _name)))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign,assignment]
