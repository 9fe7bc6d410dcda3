"""The public surface is pinned: names, signatures, fields, read from the source with nothing imported.

Pinned are packages, and modules that documentation, examples or programs written for TorchRec name. Each public name of
such a module is recorded as it is where it is defined, so that code may move without a change of the snapshot.

A change that is meant: ``pytest tests/test_public_surface.py --update-surface``, and commit the snapshots that it changes.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

import pytest

from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "recinfer"
TESTS = Path(__file__).parent
SNAPSHOTS = TESTS / "public_surface"  # one file a package, so that changes to two do not meet

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def files() -> dict[str, Path]:
    """Every module of the package that is written by hand, by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem.endswith("_pb2"):
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The same, parsed."""
    return {name: tree_of(path) for name, path in files().items()}


def exported(module: ast.Module) -> list[str] | None:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def signature(function: Definition) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(function.args)}){returns}"


def describe_class(node: ast.ClassDef, module: ast.Module) -> dict[str, str]:
    """Its members, and those of its base classes in the package, so that a method may move to one of them."""
    bases = list(map(ast.unparse, node.bases))
    names = [base.partition("[")[0] for base in bases]  # without the arguments of a generic class
    members = {"": f"class({', '.join(bases)})"}
    for item in node.body:
        if isinstance(item, Definition) and (not item.name.startswith("_") or item.name == "__init__"):
            overloads = members.get(item.name)
            members[item.name] = f"{overloads} | {signature(item)}" if overloads else signature(item)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            default = f" = {ast.unparse(item.value)}" if item.value else ""
            members[item.target.id] = f": {ast.unparse(item.annotation)}{default}"
    for base, home in base_classes(names, module):
        members = describe_class(base, home) | members
    return members


def base_classes(names: list[str], module: ast.Module) -> list[tuple[ast.ClassDef, ast.Module]]:
    """The classes of ``names`` that ``module`` defines or imports from the package by ``from``, with their modules."""
    found = []
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            found.append((node, module))
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            imported = [alias.name for alias in node.names if (alias.asname or alias.name) in names]
            found += base_classes(imported, modules()[str(node.module)]) if imported else []
    return found


def names_of(target: ast.expr) -> list[str]:
    """The names of ``a, b = ...``; none for a single name."""
    return [ast.unparse(each) for each in target.elts] if isinstance(target, ast.Tuple) else []


def describe(module: str, name: str) -> object:
    """What ``module`` offers as ``name``: members of a class, signature of a function; imports are followed."""
    found: object = None
    for node in nodes_of(modules()[module]):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return describe_class(node, modules()[module])
        if isinstance(node, Definition) and node.name == name and found is None:
            found = signature(node)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and name in map(ast.unparse, node.targets):
            return describe(module, node.value.id)  # a second name
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and name in names_of(node.targets[0]):
            return ast.unparse(node.value)  # classes that a function makes: its arguments name their parameters
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return describe_import(str(node.module), alias.name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names":
            texts = texts_of(modules()[module])
            for key, home in zip(node.args[1].keys, node.args[1].values):  # type: ignore[attr-defined]
                if ast.literal_eval(key) == name:
                    return describe_import(texts[home.id] if isinstance(home, ast.Name) else home.value, name)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            found = found or "value"
    assert found, f"{module} defines no {name}"
    return found


def texts_of(module: ast.Module) -> dict[str, str]:
    """The texts that have names in a module."""
    return {
        ast.unparse(node.targets[0]): str(node.value.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


def describe_import(module: str, name: str) -> object:
    """What ``from module import name`` brings."""
    if f"{module}.{name}" in modules():
        return "module"
    return describe(module, name) if module in modules() else f"from {module}"


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


def module_of(name: str) -> str:
    """The module that a dotted name lies in."""
    while name and name not in files():
        name = name.rpartition(".")[0]
    return name


# TorchRec's modules, in addition to those that the two lists name.
PLACES = [
    "recinfer.datasets.criteo",
    "recinfer.datasets.movielens",
    "recinfer.datasets.random",
    "recinfer.datasets.utils",
    "recinfer.distributed.fp_embeddingbag",
    "recinfer.distributed.fused_params",
    "recinfer.distributed.planner.perf_models",
    "recinfer.distributed.planner.stats",
    "recinfer.distributed.sharding.cw_sharding",
    "recinfer.distributed.sharding.dp_sharding",
    "recinfer.distributed.sharding.grid_sharding",
    "recinfer.distributed.sharding.tw_sharding",
    "recinfer.distributed.sharding.twcw_sharding",
    "recinfer.distributed.sharding.twrw_sharding",
    "recinfer.modules.activation",
    "recinfer.modules.crossnet",
    "recinfer.modules.feature_processor",
    "recinfer.modules.feature_processor_",
    "recinfer.modules.fp_embedding_modules",
    "recinfer.modules.hash_mc_evictions",
    "recinfer.modules.hash_mc_modules",
    "recinfer.modules.mc_embedding_modules",
    "recinfer.modules.mc_modules",
    "recinfer.modules.regroup",
    "recinfer.optim.warmup",
]


@functools.cache
def outside() -> frozenset[str]:
    """Modules that documentation, examples and programs written for TorchRec name."""
    names = [*PLACES]
    for listed in ("documented_api.json", "imported_names.json"):
        names += json.loads((TESTS / listed).read_text())
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]:
        names += re.findall(r"^\s*(?:from|import) (recinfer[.\w]*)", path.read_text(), re.MULTILINE)
    return frozenset(map(module_of, names))


@functools.cache
def pinned() -> dict[str, list[str]]:
    """Public names of every pinned place with an ``__all__``; tests/cli pins the command line."""
    return {
        name: names
        for name, path in files().items()
        if not name.startswith("recinfer.cli")
        and (is_package(name) or name in outside())
        and (names := exported(tree_of(path))) is not None
    }


@functools.cache
def surface() -> dict[str, dict[str, object]]:
    """{module: {public name: what it is}} of the pinned places."""
    return {name: {public: describe(name, public) for public in names} for name, names in pinned().items()}


def test_all_names_the_public_definitions() -> None:
    """Ruff keeps ``__all__`` sorted (RUF022); here: it exists where it must, and each name in it once."""
    wrong = []
    for name, module in modules().items():
        names = exported(module)
        if names is None:
            if any(
                isinstance(node, Definition | ast.ClassDef) and not node.name.startswith("_") for node in module.body
            ):
                wrong.append(f"{name} defines public names and has no __all__")
        elif len(names) != len(set(names)):
            wrong.append(f"__all__ of {name} names something twice")
    assert not wrong, "\n".join(wrong)


def defines(module: ast.Module) -> bool:
    """Whether a module has more than imports and ``__all__``."""
    assigned = [
        node for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__all__"
    ]
    return bool(assigned) or any(isinstance(node, Definition | ast.ClassDef) for node in module.body)


def imported_by(module: ast.Module) -> dict[str, str]:
    """Imported name -> module that it comes from, wherever the import statement is."""
    return {
        alias.asname or alias.name: str(node.module)
        for node in nodes_of(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_documented_module_of_distributed_is_a_facade_or_code() -> None:
    """A facade defines nothing; code exports only names that it defines."""
    places = [name for name in pinned() if name.startswith("recinfer.distributed") and not is_package(name)]
    both = {
        name
        for name in places
        if defines(modules()[name]) and imported_by(modules()[name]).keys() & set(exported(modules()[name]) or ())
    }
    assert not both


def test_code_of_distributed_imports_no_facade() -> None:
    ours = {name: module for name, module in modules().items() if name.startswith("recinfer.distributed.")}
    code = {name for name, module in ours.items() if is_package(name) or defines(module)}
    wrong = [
        f"{name}: {home}" for name in code for home in imported_by(ours[name]).values() if home in ours.keys() - code
    ]
    assert not wrong, "import these names from where they are defined:\n" + "\n".join(wrong)


def package_of(module: str) -> str:
    """``sparse`` of ``recinfer.sparse.jagged``; ``recinfer`` of what lies directly in the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else "recinfer"


PACKAGES = sorted({package_of(name) for name in pinned()})


@pytest.mark.parametrize("package", PACKAGES)
def test_surface_is_the_pinned_one(package: str, request: pytest.FixtureRequest) -> None:
    now = {name: what for name, what in surface().items() if package_of(name) == package}
    snapshot = SNAPSHOTS / f"{package}.json"
    if request.config.getoption("--update-surface"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    before = json.loads(snapshot.read_text())
    changes = [f"- {m}.{n}" for m in before for n in before[m] if n not in now.get(m, {})]
    changes += [f"+ {m}.{n}" for m in now for n in now[m] if n not in before.get(m, {})]
    changes += [
        f"~ {m}.{n}: {before[m][n]} -> {now[m][n]}"
        for m in now
        for n in now[m]
        if n in before.get(m, {}) and before[m][n] != now[m][n]
    ]
    assert not changes, "the public surface changed (see this file's head if that is meant):\n" + "\n".join(changes)


def test_no_snapshot_is_left_over() -> None:
    assert sorted(path.stem for path in SNAPSHOTS.glob("*.json")) == PACKAGES
