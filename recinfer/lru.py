"""A bounded, thread-safe dict of recently used values."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["LruCache"]

K = TypeVar("K")
V = TypeVar("V")


class LruCache(dict[K, V]):
    """At most ``most`` values by key, including those of the ``most // 2`` most recently used keys. Thread-safe.

    ``cache[key]`` is None for a key that is not there. The dict itself holds the newer keys. When it has half of ``most`` it
    becomes the older generation, and the one before is dropped; an older key that is used becomes a newer one. So finding a
    newer key is one lookup in a dict, and needs no lock. Two threads at one moment may drop a key that had to stay: it is
    computed again.
    """

    __slots__ = ("_half", "_older")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._half = max(1, most // 2)
        self._older: dict[K, V] = {}

    def __missing__(self, key: K) -> Any:
        value = self._older.get(key)
        if value is not None:
            self[key] = value
        return value

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._half:
            self._older = dict(self)
            self.clear()
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles start empty."""
        return type(self), (2 * self._half,)
