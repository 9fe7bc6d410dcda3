"""What the package raises, read from its source: recinfer's own errors, with messages that show what they say they show."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recinfer import errors
from tests.sources import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent / "recinfer"
FILES = sorted(ROOT.rglob("*.py"))

# Errors that Python's or torch's protocols ask for, bugs of recinfer itself, and the operating system's.
PROTOCOLS = {"AssertionError", "AttributeError", "ImportError", "NotImplementedError", "StopIteration"}
SYSTEM = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)}
# Raised to be caught in the same file, which says more; or as Python's own: list() expects a TypeError of __len__.
CAUGHT = {
    "strict_json.py": {"ValueError"},
    "cli/rows.py": {"ValueError"},
    "columns.py": {"TypeError"},
    "data/tokens.py": {"ValueError"},
    "datasets/random.py": {"TypeError"},
    "distributed/types/awaitables.py": {"RuntimeError"},  # as Python's, of an object without its super().__init__()
    "quant/compiled_batch.py": {"RuntimeError"},  # as FBGEMM's operator, whose callers name feature and id
    "quant/cuda_graphs.py": {"RuntimeError"},
    "serving/server/grpc_core.py": {"RuntimeError"},  # as grpc.aio's server; grpc_methods.bind catches it
    "serving/server/v1/requests.py": {"KeyError"},
    "serving/wire/tls.py": {"ValueError"},
}
FIELD = re.compile(r"\{[A-Za-z_][\w.]*(\([^{}]*\)|\[[^{}]*\])?(![rsa])?(:[^{}]*)?\}")


def raised(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and class of every raise of a class that has a plain name."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(kind, ast.Name):
                yield node.lineno, kind.id


def unfilled(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of strings without f, in a raise, or a call that prints, logs or warns, that have ``{name}`` in them;
    but for those that ``format`` fills in."""
    filled = {id(n.value) for n in nodes_of(tree) if isinstance(n, ast.Attribute) and n.attr == "format"}
    says = {
        "print",
        "show",
        "note",
        "warn",
        "debug",
        "info",
        "warning",
        "error",
        "exception",
        "critical",
        "log",
        "fail",
    }
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            parts = [*node.args, *(k.value for k in node.keywords)] if name in says else []
        elif isinstance(node, ast.Raise) and node.exc is not None:
            parts = [node.exc]
        else:
            continue
        for part in parts:
            for constant in ast.walk(part):
                if not isinstance(constant, ast.Constant) or id(constant) in filled:
                    continue
                if isinstance(constant.value, str) and FIELD.search(constant.value):
                    yield node.lineno, constant.value


def test_what_is_raised_is_ours_or_asked_for_by_a_protocol() -> None:
    ours = {name for name in vars(errors) if name.endswith("Error")}
    assert {"ConfigError", "InputError"} <= ours
    builtin = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    wrong = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for line, kind in raised(tree_of(path)):
            if kind in builtin - PROTOCOLS - SYSTEM - CAUGHT.get(name, set()):
                wrong.append(f"{name}:{line} raises {kind}; raise a subclass of RecinferError (recinfer/errors.py)")
    assert not wrong, "\n".join(wrong)


def test_a_message_is_filled_in() -> None:
    wrong = []
    for path in FILES:
        for line, text in unfilled(tree_of(path)):
            wrong.append(f"{path.relative_to(ROOT)}:{line} shows {text!r} as it stands; it lacks an f")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise ConfigError("no {name}")', True),
        ('raise ConfigError(f"a {a} " "and {b.c!r:>3}") from None', True),
        ('logger.warning("no {error}")', True),
        ('raise ConfigError(f"a {a}" "and {{}} and {}")', False),
        ('path = "/models/{model}"', False),
        ('print("{a}".format(a=1))', False),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, found: bool) -> None:
    assert bool(list(unfilled(ast.parse(source)))) is found
