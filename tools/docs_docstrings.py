"""A griffe extension of the documentation site: Sphinx's marks in docstrings become Markdown.

zensical.toml names this file. ``:func:`~package.name``` becomes `` `name` ``, and ``Example::`` becomes ``Example:``.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class Roles(griffe.Extension):
    """Rewrites the docstring of every object."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown_of(obj.docstring.value)


def markdown_of(docstring: str) -> str:
    """A docstring without Sphinx's roles and double colons."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]+\.)?([\w.]+)`", r"`\1`", docstring)
    return re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
