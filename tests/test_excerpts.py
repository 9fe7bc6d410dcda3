"""Excerpts in messages keep the start, and name how much is left out."""

from __future__ import annotations

import doctest

from recinfer import excerpts
from recinfer.excerpts import excerpt, quoted, some


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(excerpts) == (0, 3)


def test_short_values_are_whole() -> None:
    assert (excerpt("abc", 3), quoted("a\n", 2), some(["a", "b"], 2)) == ("abc", "'a\\n'", "a, b")
    assert (some([]), some([], none="none"), some(["a", "b", "c"], 1, "; ")) == ("", "none", "a and 2 more")
