"""A metaclass that lets torch.fx record the construction of a class whose arguments are being traced."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy

__all__ = ["Proxyable"]


class Proxyable(type):
    """``cls(proxy, ...)`` becomes a call in the traced graph; anything else builds the object as usual.

    torch.fx has such a metaclass too, but it warns once in every process, which would reach a server's log.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Proxy):
                return arg.tracer.create_proxy("call_function", cls, args, kwargs)
        return super().__call__(*args, **kwargs)
