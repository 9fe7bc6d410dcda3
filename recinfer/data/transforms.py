"""Transforms of a feature contract that convert text to ids: hash, vocabulary and identity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Union

import numpy as np
from numpy.typing import NDArray

from recinfer.data.tokens import Tokens, hash_tokens, look_up_tokens, parse_tokens
from recinfer.errors import ConfigError

__all__ = ["TRANSFORMS", "Hash", "Identity", "Transform", "Vocabulary", "check_text", "check_whole", "is_finite"]

_MAX_ROWS = 2**63 - 1


@dataclass(frozen=True)
class Hash:
    """Id = a hash of the text modulo ``num_buckets`` (see :func:`recinfer.data.tokens.hash_tokens`).

    Attributes:
        num_buckets: rows of the table, at least 1.
        seed: 0 to 2^64 - 1; another seed makes other collisions.
    """

    kind: ClassVar[str] = "hash"
    num_buckets: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("hash", "num_buckets", self.num_buckets, 1, _MAX_ROWS)
        check_whole("hash", "seed", self.seed, 0, 2**64 - 1)

    @property
    def num_embeddings(self) -> int:
        """Rows that ids of this transform need."""
        return self.num_buckets

    def ids(self, tokens: Tokens, name: str) -> NDArray[np.int64]:
        """The id of each token, int64 ``[T]``."""
        return hash_tokens(tokens, self.seed, self.num_buckets)


@dataclass(frozen=True)
class Vocabulary:
    """Id = the position of the text in ``tokens``, or ``out_of_vocabulary`` for other text.

    Attributes:
        tokens: different, non-empty texts.
        out_of_vocabulary: 0 to ``len(tokens)``; None is ``len(tokens)``, a row of its own behind all others.
    """

    kind: ClassVar[str] = "vocabulary"
    tokens: tuple[str, ...]
    out_of_vocabulary: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str):
            raise ConfigError(f"vocabulary: tokens is {self.tokens!r:.40}; expected a list of texts")
        object.__setattr__(self, "tokens", tuple(self.tokens))
        odd = [t for t in self.tokens if not isinstance(t, str) or not t]
        if odd:
            raise ConfigError(f"vocabulary: token {odd[0]!r}; expected non-empty text")
        if len(self._places) != len(self.tokens):
            twice = next(t for at, t in enumerate(self.tokens) if self._places[t] != at)
            raise ConfigError(f"vocabulary: token {twice!r} occurs twice; expected each token once")
        if self.out_of_vocabulary is not None:
            check_whole("vocabulary", "out_of_vocabulary", self.out_of_vocabulary, 0, len(self.tokens))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {token: at for at, token in enumerate(self.tokens)}

    @property
    def _default(self) -> int:
        return len(self.tokens) if self.out_of_vocabulary is None else self.out_of_vocabulary

    @property
    def num_embeddings(self) -> int:
        """Rows that ids of this transform need."""
        return max(len(self.tokens), self._default + 1)

    def ids(self, tokens: Tokens, name: str) -> NDArray[np.int64]:
        """The id of each token, int64 ``[T]``."""
        return look_up_tokens(tokens, self._places, self._default)


@dataclass(frozen=True)
class Identity:
    """Id = the value, a whole number from 0 to ``num_embeddings - 1``; the feature's ``out_of_range`` policy applies to
    others."""

    kind: ClassVar[str] = "identity"
    num_embeddings: int

    def __post_init__(self) -> None:
        check_whole("identity", "num_embeddings", self.num_embeddings, 1, _MAX_ROWS)

    def ids(self, tokens: Tokens, name: str) -> NDArray[np.int64]:
        """The number that each token spells, int64 ``[T]``, also outside the range."""
        return parse_tokens(tokens, name)


Transform = Union[Hash, Vocabulary, Identity]  # noqa: UP007 - a value at run time
TRANSFORMS: dict[str, type[Hash] | type[Vocabulary] | type[Identity]] = {
    t.kind: t for t in (Hash, Vocabulary, Identity)
}


def check_whole(what: str, key: str, value: Any, low: int, high: int) -> None:
    """Raises ConfigError unless ``value`` is a whole number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{what}: {key} is {value!r}; expected a whole number from {low} to {high}")


def check_text(what: str, key: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is non-empty text."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{what}: {key} is {value!r}; expected non-empty text")


def is_finite(value: Any) -> bool:
    """Whether ``value`` is a number, and neither infinite nor nan."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
