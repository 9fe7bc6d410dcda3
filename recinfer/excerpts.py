"""Excerpts of long texts and lists for messages, which name values that callers sent."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["excerpt", "quoted", "some"]


def excerpt(text: str, most: int = 80) -> str:
    """``text``, or its first ``most`` characters and its length.

    >>> excerpt("abcdef", 3)
    'abc... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def quoted(text: str, most: int = 80) -> str:
    """``repr`` of ``text``, or of its first ``most`` characters, and its length.

    >>> quoted("abcdef", 3)
    "'abc'... (6 characters)"
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}... ({len(text)} characters)"


def some(items: Sequence[str], most: int = 8, separator: str = ", ", none: str = "") -> str:
    """The first ``most`` items and the number of the others; ``none`` without items.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return (separator.join(items[:most]) + more) or none
