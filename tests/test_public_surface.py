"""The public surface is pinned: names, signatures, fields, read from the source with nothing imported.

A change that is meant: ``pytest tests/test_public_surface.py --update-surface``, and commit the snapshots that it changes.
"""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recinfer"
SNAPSHOTS = Path(__file__).with_name("public_surface")  # one file a package, so that changes to two do not meet

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package that is written by hand, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem.endswith("_pb2"):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def exported(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def signature(function: Definition) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(function.args)}){returns}"


def describe_class(node: ast.ClassDef) -> dict[str, str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    members = {"": f"class({bases})"}
    for item in node.body:
        if isinstance(item, Definition) and (not item.name.startswith("_") or item.name == "__init__"):
            overloads = members.get(item.name)
            members[item.name] = f"{overloads} | {signature(item)}" if overloads else signature(item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            default = f" = {ast.unparse(item.value)}" if item.value else ""
            members[item.target.id] = f": {ast.unparse(item.annotation)}{default}"
    return members


def describe(module: ast.Module, name: str) -> object:
    found: object = None
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return describe_class(node)
        if isinstance(node, Definition) and node.name == name and found is None:
            found = signature(node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"from {node.module}"
    return found or "value"


def surface() -> dict[str, dict[str, object]]:
    """{module: {public name: what it is}} of every module with an ``__all__``; tests/cli pins the command line."""
    return {
        name: {public: describe(module, public) for public in names}
        for name, module in modules().items()
        if not name.startswith("recinfer.cli") and (names := exported(module)) is not None
    }


@pytest.mark.parametrize("name", sorted(modules()))
def test_all_names_the_public_definitions(name: str) -> None:
    """Ruff keeps ``__all__`` sorted (RUF022); here: it exists where it must, and each name in it once."""
    module = modules()[name]
    names = exported(module)
    if names is None:
        assert not any(
            isinstance(node, Definition | ast.ClassDef) and not node.name.startswith("_") for node in module.body
        ), f"{name} defines public names and has no __all__"
        return
    assert len(names) == len(set(names)), f"__all__ of {name} names something twice"


def package_of(module: str) -> str:
    """``sparse`` of ``recinfer.sparse.jagged``; ``recinfer`` of what lies directly in the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "recinfer"


PACKAGES = sorted({package_of(name) for name in modules()} - {"cli"})


@pytest.mark.parametrize("package", PACKAGES)
def test_surface_is_the_pinned_one(package: str, request: pytest.FixtureRequest) -> None:
    now = {name: what for name, what in surface().items() if package_of(name) == package}
    snapshot = SNAPSHOTS / f"{package}.json"
    if request.config.getoption("--update-surface"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    pinned = json.loads(snapshot.read_text())
    changes = [f"- {m}.{n}" for m in pinned for n in pinned[m] if n not in now.get(m, {})]
    changes += [f"+ {m}.{n}" for m in now for n in now[m] if n not in pinned.get(m, {})]
    changes += [
        f"~ {m}.{n}: {pinned[m][n]} -> {now[m][n]}"
        for m in now
        for n in now[m]
        if n in pinned.get(m, {}) and pinned[m][n] != now[m][n]
    ]
    assert not changes, "the public surface changed (see this file's head if that is meant):\n" + "\n".join(changes)


def test_no_snapshot_is_left_over() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.json")) == PACKAGES
