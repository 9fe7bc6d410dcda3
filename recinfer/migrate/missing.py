"""Stands in for names of torchrec that recinfer lacks: a migrated program is imported, and fails where it uses one."""

from __future__ import annotations

from typing import Any

from recinfer.errors import NotFoundError
from recinfer.migrate.names import instead_of

__all__ = ["absent_name"]


class _Absent(type):
    """The type of the classes that stand in; they may be base classes, annotations and arguments of isinstance."""

    torchrec_name: str

    def _fail(cls, *_: Any, **__: Any) -> Any:
        instead = instead_of(cls.torchrec_name)
        raise NotFoundError(
            f"{cls.torchrec_name} is not in recinfer; {instead or 'no replacement is known'}: change the program where it uses "
            f"the name"
        )

    __call__ = __iter__ = __len__ = __getitem__ = __contains__ = _fail
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _fail
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _fail

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent_name(f"{cls.torchrec_name}.{name}".removeprefix("torchrec."))

    def __repr__(cls) -> str:
        return f"<{cls.torchrec_name}, which recinfer lacks>"


def absent_name(name: str) -> Any:
    """A class that stands in for ``torchrec.<name>``; calling it, or computing with it, raises NotFoundError."""
    return _Absent(name.rpartition(".")[2], (), {"torchrec_name": f"torchrec.{name}"})
