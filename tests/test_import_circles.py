"""No two modules reach each other by imports; those inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recinfer"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module, a package's ``__init__`` under the package's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Modules of ours that import statements of ``tree`` name: ``package.name`` where that is a module, else ``package``."""
    found = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: relative import; write the whole name"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inner}
    return found & known.keys()


@functools.cache
def imports() -> dict[str, set[str]]:
    known = modules()
    return {name: targets(tree_of(path), known) - {name} for name, path in known.items()}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected components of more than one node (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []  # nodes whose component is not known yet
    found = set()
    for start in sorted(graph):
        if start in index:
            continue
        index[start] = low[start] = len(index)
        path.append(start)
        calls = [(start, iter(sorted(graph[start])))]
        while calls:
            node, edges = calls[-1]
            for to in edges:
                if to not in index:
                    index[to] = low[to] = len(index)
                    path.append(to)
                    calls.append((to, iter(sorted(graph[to]))))
                    break
                if to in path:
                    low[node] = min(low[node], index[to])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[node])
                if low[node] == index[node]:
                    at = path.index(node)
                    if len(path) - at > 1:
                        found.add(frozenset(path[at:]))
                    del path[at:]
    return found


def test_imports_have_no_circles() -> None:
    found = [sorted(circle) for circle in circles(imports())]
    assert not found, f"modules that import each other: {found}"


def parts(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """The imports between the modules and packages directly in ``package``."""
    depth = package.count(".") + 2

    def part(module: str) -> str:
        return ".".join(module.split(".")[:depth]) if module.startswith(package + ".") else ""

    found: dict[str, set[str]] = {}
    for module, targets in graph.items():
        found.setdefault(part(module), set()).update(map(part, targets))
    return {name: targets - {name, ""} for name, targets in found.items() if name}


def test_the_parts_of_distributed_have_no_circles() -> None:
    found = [sorted(circle) for circle in circles(parts(imports(), "recinfer.distributed"))]
    assert not found, f"packages and modules of distributed that import each other: {found}"


def test_parts_are_the_next_level() -> None:
    graph = {"p.q.a.x": {"p.q.b", "p.c"}, "p.q.b": {"p.q.a.y"}, "p.q.a.y": {"p.q.a.x"}, "p.c": {"p.q.b"}}
    assert parts(graph, "p.q") == {"p.q.a": {"p.q.b"}, "p.q.b": {"p.q.a"}}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("de")}


def test_every_form_of_import_counts() -> None:
    source = """
import p.a
from p import b, other
from p.c import name
if TYPE_CHECKING:
    from p.d import name
def f():
    import p.e
"""
    known = dict.fromkeys(["p", "p.a", "p.b", "p.c", "p.d", "p.e", "p.f"], Path())
    assert targets(ast.parse(source), known) == set(known) - {"p.f"}
