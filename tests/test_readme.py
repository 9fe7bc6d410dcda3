"""The documentation is true: the README's commands and example run, links lead somewhere, the tour names what exists."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.ports import held_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "recinfer/archive").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `recinfer` is this source tree's, installed or not."""
    script = tmp_path / "bin" / "recinfer"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recinfer "$@"\n')
    script.chmod(0o755)
    paths = {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **paths}


def test_the_commands_and_the_example_of_the_readme_run(tmp_path: Path, shell_environment: dict[str, str]) -> None:
    (commands,) = blocks(ROOT / "README.md", "bash")
    (example,) = blocks(ROOT / "README.md", "python")
    commands = commands.replace("--limit 20000", "--limit 2000").replace("--wait 60", "--wait 600")
    with held_port() as port:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands.replace("8500", str(port)) + "wait\n"],
            cwd=tmp_path,
            env=shell_environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "C1" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env=shell_environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([1, 16]) torch.Size([1, 16])\n"
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_and_verbs_named_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets
    verbs = {p.stem for p in (ROOT / "recinfer/cli").glob("*.py") if "\nNAME = " in p.read_text()}
    assert set(re.findall(r"(?:^ {4}|`)recinfer ([a-z]+)", text, flags=re.MULTILINE)) <= verbs


def test_the_readme_lists_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[a-z`, ]+) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"[a-z]+", row)) == sorted(extras)


def names_in(path: Path) -> set[str]:
    """Dotted names that a module defines: classes, functions, methods, constants."""
    found: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.AnnAssign | ast.Assign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    walk(ast.parse(path.read_text()), "")
    return found


def test_the_tour_names_what_exists() -> None:
    text = (ROOT / "docs/tour.md").read_text()
    steps = re.findall(r"^## (\d)\.", text, flags=re.MULTILINE)
    assert steps == list("12345678")
    mentioned = re.findall(r"`([\w/.-]+/[\w.-]*)(?::([\w.]+))?`", text)
    assert len(mentioned) > 20
    for path, name in mentioned:
        assert (ROOT / path).exists(), f"docs/tour.md names {path}, which does not exist"
        if name:
            assert name in names_in(ROOT / path), f"docs/tour.md names {name} in {path}, which does not define it"


def test_no_page_names_this_machine() -> None:
    here = str(ROOT.parent) + "/"
    pages = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    assert not [str(page) for page in pages if here in page.read_text()]
