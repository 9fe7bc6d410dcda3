"""Rewrites the imports and dotted uses of torchrec in one file, by their positions in the syntax tree.

Formatting, comments and strings stay as they are. Every name of torchrec becomes the same name of recinfer. A name that
recinfer lacks is listed. Where a program imports it by ``from ... import``, a stand-in takes its place (recinfer.migrate.missing), so
that the program is imported and fails where it uses the name; elsewhere, and inside of ``try``, the name is rewritten.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from recinfer.errors import InputError
from recinfer.migrate.files import FileChange, MissingName, read_text
from recinfer.migrate.names import instead_of, is_here

__all__ = ["migrate_file"]

_THEIRS, _OURS = "torchrec", "recinfer"
# Between `from` and the module there may be blanks and continued lines.
_FROM = re.compile(rb"from(?:[ \t\f]|\\\r?\n)+")
_DOTTED = re.compile(r"torchrec(\.\w+)*")
_OPERATORS, _LOADER = "torch.ops.fbgemm", "fbgemm_gpu"


def migrate_file(path: Path) -> FileChange:
    """The migration of ``path``; the file is not written.

    Raises:
        InputError: the file is not Python, or Python of another version.
        OSError: the file cannot be read.
    """
    text, encoding = read_text(path)
    if _THEIRS not in text:
        return FileChange(path, text, text, encoding)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{path}: cannot be parsed: {error}; the file was not changed") from error
    found = _Uses(text, tree)
    missing = {(line, name): None for line, name in found.names if not is_here(name)}
    return FileChange(
        path,
        text,
        found.replaced(),
        encoding,
        tuple(MissingName(path, line, name, instead_of(name)) for line, name in sorted(missing)),
        tuple(sorted(set(found.by_hand))),
    )


@dataclass
class _Uses:
    """The uses of torchrec in a file.

    Attributes:
        names: (line, dotted name) of what is imported or used.
        by_hand: (line, text) of uses that are not rewritten.
    """

    text: str
    tree: ast.Module
    names: list[tuple[int, str]] = field(default_factory=list)
    by_hand: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = self.text.encode()
        self._line_starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._places: set[int] = set()  # bytes of the source where "torchrec" is to be replaced
        self._edits: list[tuple[int, int, bytes]] = []  # (start, end, replacement) of bytes after that
        self._bound: dict[str, str] = {}  # name in the file -> dotted name of torchrec
        self._by_own_name = False  # whether `import torchrec` binds the name torchrec
        nodes = list(ast.walk(self.tree))
        tried = {id(n) for node in nodes if isinstance(node, ast.Try) for part in node.body for n in ast.walk(part)}
        for node in nodes:
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and not node.level and _is_torchrec(node.module or ""):
                self._import_from(node, node.module or "")
                if id(node) not in tried:  # a program that catches ImportError has its own way
                    self._stand_in(node, node.module or "")
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if _LOADER not in self.text and isinstance(node, ast.Attribute) and ast.unparse(node) == _OPERATORS:
                self.by_hand.append(
                    (node.lineno, f"{_OPERATORS} needs `import {_LOADER}`, which torchrec does by itself")
                )
            if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
                self._use(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
                self.by_hand.append((node.lineno, f"the string {node.value!r}"))

    def replaced(self) -> str:
        """The text with torchrec replaced by recinfer."""
        source = bytearray(self._source)
        for place in sorted(self._places, reverse=True):
            source[place : place + len(_THEIRS)] = _OURS.encode()
        for start, end, text in sorted(self._edits, reverse=True):
            source[start:end] = text
        return source.decode()

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not _is_torchrec(alias.name):
                continue
            self._replace(alias, self._place(alias))
            self.names.append((alias.lineno, alias.name))
            self._bound[alias.asname or _THEIRS] = alias.name if alias.asname else _THEIRS
            self._by_own_name |= not alias.asname

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        place = self._place(node)
        keyword = _FROM.match(self._source, place)
        self._replace(node, keyword.end() if keyword else place)
        for alias in node.names:
            name = module if alias.name == "*" else f"{module}.{alias.name}"
            self.names.append((alias.lineno, name))
            self._bound[alias.asname or alias.name] = name

    def _stand_in(self, node: ast.ImportFrom, module: str) -> None:
        """Replace the names that recinfer lacks in an import that has its lines for itself."""
        lacking = [a for a in node.names if a.name != "*" and not is_here(f"{module}.{a.name}")]
        start, end = self._place(node), self._end(node)
        line = self._line_starts[node.lineno - 1]
        line_end = self._line_starts[node.end_lineno or node.lineno]
        rest = self._source[end:line_end].strip()
        indent = self._source[line:start]
        if not lacking or indent.strip() or (rest and not rest.startswith(b"#")):
            return
        newline = b"\r\n" if self._source[line:line_end].endswith(b"\r\n") else b"\n"
        lines = [b"from recinfer.migrate.missing import absent_name"]
        for alias in lacking:
            name = f"{module}.{alias.name}".removeprefix(f"{_THEIRS}.")
            lines.append(f'{alias.asname or alias.name} = absent_name("{name}")'.encode())
        text = (newline + indent).join(lines)
        kept = [alias for alias in node.names if alias not in lacking]
        if not kept:
            self._edits.append((start, end, text))
            return
        starts = [*map(self._place, node.names), self._end(node.names[-1])]
        chunks = {id(a): (starts[i], starts[i + 1]) for i, a in enumerate(node.names)}
        names = b"".join(self._source[slice(*chunks[id(a)])] for a in kept[:-1])
        names += self._source[self._place(kept[-1]) : self._end(kept[-1])]
        self._edits.append((starts[0], starts[-1], names))
        last = line_end - len(newline) if self._source[:line_end].endswith(newline) else line_end
        self._edits.append((last, last, newline + indent + text))

    def _use(self, node: ast.Attribute | ast.Name) -> None:
        """Record a name, or a chain of attributes that starts with one."""
        root, *parts = reversed(list(_chain(node)))
        if not isinstance(root, ast.Name) or root.id not in self._bound:
            return
        if root.id == _THEIRS and self._by_own_name:
            self._replace(root, self._place(root))
        if parts and is_here(self._bound[root.id]):  # otherwise the import is listed
            attributes = [part.attr for part in parts if isinstance(part, ast.Attribute)]
            self.names.append((node.lineno, ".".join([self._bound[root.id], *attributes])))

    def _place(self, node: ast.alias | ast.ImportFrom | ast.Name) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.alias | ast.ImportFrom) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: ast.alias | ast.ImportFrom | ast.Name, place: int) -> None:
        if self._source.startswith(_THEIRS.encode(), place):
            self._places.add(place)
        else:  # Python 3.11 reports no exact positions inside f-strings
            self.by_hand.append((node.lineno, f"a use of {_THEIRS} whose position Python does not report"))


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    yield node
    while isinstance(node, ast.Attribute):
        node = node.value
        yield node


def _is_torchrec(module: str) -> bool:
    return module.partition(".")[0] == _THEIRS
