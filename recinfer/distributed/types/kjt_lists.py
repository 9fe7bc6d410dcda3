"""Lists of KeyedJaggedTensors: a sharded module's features, by group of tables and by device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recinfer.streamable import Multistreamable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["KJTList", "ListOfKJTList"]


class KJTList(Multistreamable):
    """A list of KeyedJaggedTensors, one per shard group."""

    def __init__(self, features: list[KeyedJaggedTensor]) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, key: int) -> KeyedJaggedTensor:
        return self.features[key]

    def __setitem__(self, key: int, item: KeyedJaggedTensor) -> None:
        self.features[key] = item

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter(self.features)

    def record_stream(self, stream: Any) -> None:
        """Keep every member alive until ``stream`` is done with it."""
        for feature in self.features:
            feature.record_stream(stream)


class ListOfKJTList(Multistreamable):
    """A list of :class:`KJTList`."""

    def __init__(self, features: list[KJTList]) -> None:
        self.features_list = features

    def __len__(self) -> int:
        return len(self.features_list)

    def __getitem__(self, key: int) -> KJTList:
        return self.features_list[key]

    def __setitem__(self, key: int, item: KJTList) -> None:
        self.features_list[key] = item

    def __iter__(self) -> Iterator[KJTList]:
        return iter(self.features_list)

    def record_stream(self, stream: Any) -> None:
        """Keep every member alive until ``stream`` is done with it."""
        for feature in self.features_list:
            feature.record_stream(stream)
